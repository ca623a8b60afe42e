"""The presets: published sizes, batches that fit their models, and nothing allocated on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.accumulation import accumulate_gradients
from course_lib.architectures import DEVICES, PRESETS, BERTClassifier, ResNet50, UNet, build_preset, gpt2
from course_lib.batches import batch_size, tensors_of
from course_lib.memory import parse_bytes

# Published: the released GPT-2 and BERT weights, torchvision's table, and the U-Net's layers counted by hand.
PUBLISHED = {
    "GPT-2 small": 124_439_808,
    "GPT-2 medium": 354_823_168,
    "GPT-2 large": 774_030_080,
    "GPT-2 XL": 1_557_611_200,
    "BERT base": 109_482_240,
    "BERT large": 335_141_888,
    "ResNet-50": 25_557_032,
    "U-Net": 31_030_658,
}


def without_classifier(model: nn.Module) -> int:
    head = model.classifier if isinstance(model, BERTClassifier) else nn.Identity()
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in head.parameters())


def tiny_bert(**settings) -> BERTClassifier:
    return BERTClassifier(width=16, heads=2, depth=2, vocab_size=11, context=8, **settings)


def test_every_published_count_has_a_preset():
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert without_classifier(build_preset(name).model) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_holds_no_bytes_and_its_optimizer_has_the_models_parameters(name):
    preset = build_preset(name)
    everything = [*preset.model.parameters(), *preset.model.buffers(), *tensors_of(preset.batch)]
    assert {tensor.device.type for tensor in everything} == {"meta"}
    optimized = [p for group in preset.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimized} == {id(p) for p in preset.model.parameters()}
    assert preset.model.training


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_loss_takes_its_model_and_batch(name):
    # On "meta" a pass costs nothing, but checks every shape and type.
    model, batch, loss_sum, _ = build_preset(name, num_samples=2).parts
    loss = loss_sum(model, batch)
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_the_effective_batch_is_the_papers_unless_another_is_asked_for():
    assert [batch_size(build_preset(name).batch) for name in ("GPT-2 XL", "BERT base", "ResNet-50")] == [64, 32, 256]
    assert batch_size(build_preset("U-Net", num_samples=5).batch) == 5


def test_one_sample_has_the_published_size():
    shapes = {name: [tuple(part.shape[1:]) for part in build_preset(name).batch] for name in PRESETS}
    assert shapes["GPT-2 small"] == [(1024,), (1024,)]
    assert shapes["BERT large"] == [(512,), ()]
    assert shapes["ResNet-50"] == [(3, 224, 224), ()]
    assert shapes["U-Net"] == [(1, 512, 512), (512, 512)]


def test_a_preset_prints_its_name_size_and_batch():
    assert repr(build_preset("U-Net")) == "Preset('U-Net', 31,030,658 parameters, batch of 16 x 512 x 512 pixels)"


def test_a_preset_can_be_built_for_real_without_moving_the_random_state():
    before = torch.get_rng_state()
    preset = build_preset("ResNet-50", num_samples=1, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.device.type for p in preset.model.parameters()} == {"cpu"}


def test_what_is_no_preset_or_no_size_is_refused():
    with pytest.raises(ValueError, match="name must be one of GPT-2 small"):
        build_preset("GPT-3")
    with pytest.raises(ValueError, match="num_samples must be at least 1; got 0"):
        build_preset("U-Net", num_samples=0)


def test_the_devices_are_sizes_in_order():
    sizes = [parse_bytes(device) for device in DEVICES]
    assert sizes == sorted(sizes)
    assert sizes[0] == 8 * 2**30


# The models, small and real.


def test_bert_reads_every_token_and_answers_per_sequence():
    model = tiny_bert(dropout=0.0)
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    scores = model(tokens)
    assert scores.shape == (3, 2)
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 11
    rows = (model(changed) - scores).abs().amax(dim=1)
    assert rows[0] > 1e-4
    assert torch.equal(rows[1:], torch.zeros(2))


def test_bert_refuses_a_sequence_beyond_its_context():
    with pytest.raises(ValueError, match="at most 8 long"):
        tiny_bert()(torch.zeros(1, 9, dtype=torch.int64))


def test_a_gpt2_ties_its_head():
    model = gpt2(width=16, heads=2, depth=1, vocab_size=11, context=8)
    assert model.head.weight is model.token_embedding.weight


def test_the_u_net_keeps_height_and_width_and_has_23_convolutions():
    model = UNet()
    assert model(torch.zeros(1, 1, 32, 48)).shape == (1, 2, 32, 48)
    assert sum(isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) for layer in model.modules()) == 23


def test_the_u_nets_skips_carry_detail_across():
    model = UNet()
    dark, dot = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)
    dot[0, 0, 3, 3] = 1.0
    with torch.no_grad():
        for rise in model.rise:  # nothing comes up from below: what is left came across
            rise.weight.zero_()
        difference = (model(dot) - model(dark)).abs().sum(dim=1)[0]
    assert difference[3, 3] > 0
    assert difference[12, 12] == 0


def test_resnet_halves_the_image_five_times_and_reads_every_pixel():
    model = ResNet50(num_classes=3).eval()
    seen = []
    model.blocks.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    assert seen == [(1, 2048, 2, 2)]
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 53


def test_a_tiny_bert_trains_by_the_courses_update():
    model = tiny_bert(dropout=0.0)
    batch = (torch.zeros(4, 8, dtype=torch.int64), torch.tensor([0, 1, 0, 1]))
    loss_sum = build_preset("BERT base", num_samples=1).loss_sum
    loss = accumulate_gradients(model, [batch], loss_sum)
    assert abs(loss - torch.log(torch.tensor(2.0)).item()) < 0.5
    assert all(p.grad is not None for p in model.parameters())
