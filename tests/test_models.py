"""The small models: shapes, sizes, seeds, what they keep for backward, and that samples do not mix."""

from __future__ import annotations

import math
import statistics
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_lib.datasets import load_digits, shuffled_batches
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.memory import measure_memory
from course_lib.models import SmallGPT, conv_net, dense_net, seven_million_gpt

tiny_gpt = partial(SmallGPT, 27, context=8, width=16, heads=2, depth=2)
BUILDERS = [dense_net, conv_net, tiny_gpt]


def inputs_for(build, num_samples: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if build is tiny_gpt:
        return torch.randint(27, (num_samples, 8), generator=torch.Generator().manual_seed(0))
    return load_digits(dtype).inputs[:num_samples]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_kept_for_backward(model: nn.Module, inputs: torch.Tensor) -> int:
    """Sum what autograd saves in a forward pass, each storage once, without the parameters and the inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), inputs)}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(inputs)  # bound: what is kept stays alive until the sum is taken, so no address is used twice
    assert outputs.requires_grad
    return sum(kept.values())


# Every model


@pytest.mark.parametrize("build", BUILDERS)
def test_a_seed_fixes_the_parameters(build):
    one, same, other = build(seed=1).state_dict(), build(seed=1).state_dict(), build(seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("build", BUILDERS)
def test_building_neither_moves_nor_depends_on_the_global_random_state(build):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    other = build().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("build", BUILDERS)
def test_building_does_not_seed_another_device(build, monkeypatch):
    # torch.manual_seed seeds every device, and only the CPU's state would be given back.
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    build()
    assert seeded == []


@pytest.mark.parametrize("build", BUILDERS)
def test_float64_starts_from_the_parameters_of_float32(build):
    single, double = build().state_dict(), build(dtype=torch.float64).state_dict()
    assert all(value.dtype == torch.float64 for value in double.values())
    assert all(torch.equal(single[name].to(torch.float64), double[name]) for name in single)


@pytest.mark.parametrize("build", BUILDERS)
def test_a_model_can_be_built_without_memory(build):
    with torch.device("meta"):
        model = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert num_parameters(model) == num_parameters(build())


@pytest.mark.parametrize("build", BUILDERS)
def test_a_new_model_trains_and_every_parameter_gets_a_gradient(build):
    model = build()
    assert model.training
    model(inputs_for(build, 4)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("build", BUILDERS)
def test_the_output_of_a_sample_depends_on_that_sample_alone(build):
    model = build(dtype=torch.float64)
    inputs = inputs_for(build, 6, torch.float64)
    together = model(inputs)
    alone = torch.cat([model(sample) for sample in inputs.split(1)])
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-13)
    assert torch.equal(together, model(inputs))  # no dropout, no running statistics


@pytest.mark.parametrize("build", BUILDERS)
def test_no_layer_mixes_samples_or_draws_random_numbers(build):
    model = build()
    assert not list(model.buffers())
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
    before = torch.get_rng_state()
    model(inputs_for(build, 4)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("build", BUILDERS)
def test_a_batch_of_nothing_gives_scores_of_nothing_and_zero_gradients(build):
    model = build()
    outputs = model(inputs_for(build, 4)[:0])
    assert len(outputs) == 0
    outputs.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be at least 0; got -1"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating-point type"),
        ({"dtype": "float32"}, TypeError, "dtype must be a floating-point type"),
    ],
)
def test_a_bad_seed_or_dtype_is_refused(build, options, error, message):
    with pytest.raises(error, match=message):
        build(**options)


# dense_net


def test_dense_net_takes_images_and_vectors():
    model = dense_net()
    images = load_digits().inputs[:5]
    assert model(images).shape == (5, 10)
    assert torch.equal(model(images), model(images.flatten(1)))


@pytest.mark.parametrize(("hidden", "expected"), [((64, 64), 8970), ((32,), 2410), ((), 650), ([7, 5, 3], 553)])
def test_dense_net_has_the_layers_asked_for(hidden, expected):
    model = dense_net(hidden=hidden)
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [*hidden, 10]
    assert sum(isinstance(layer, nn.ReLU) for layer in model) == len(hidden)
    assert num_parameters(model) == expected


def test_dense_net_takes_other_sizes():
    assert dense_net(num_inputs=6, num_classes=3)(torch.zeros(2, 6)).shape == (2, 3)


@pytest.mark.parametrize("num_samples", [1, 16])
def test_dense_net_keeps_512_bytes_a_digit_for_backward(num_samples):
    assert bytes_kept_for_backward(dense_net(), load_digits().inputs[:num_samples]) == 512 * num_samples


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden": (64, 0)}, ValueError, "hidden must be at least 1; got 0"),
        ({"hidden": 64}, TypeError, r"hidden must be a sequence of layer widths such as \(64, 64\); got 64"),
        ({"hidden": "64"}, TypeError, "hidden must be a sequence of layer widths"),
        ({"num_inputs": 0}, ValueError, "num_inputs must be at least 1"),
        ({"num_classes": 2.0}, TypeError, "num_classes must be a whole number"),
    ],
)
def test_dense_net_refuses_bad_sizes(options, error, message):
    with pytest.raises(error, match=message):
        dense_net(**options)


# conv_net


def test_conv_net_keeps_the_resolution_and_gives_scores():
    model = conv_net(channels=3, depth=2, num_classes=4)
    seen = []
    for layer in model:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    assert model(load_digits().inputs[:5]).shape == (5, 4)
    assert seen == [(5, 3, 8, 8)] * 2
    assert model(torch.zeros(2, 1, 12, 9)).shape == (2, 4)


def test_conv_net_has_the_stated_size():
    assert num_parameters(conv_net()) == 113_994


@pytest.mark.parametrize("num_samples", [1, 16])
def test_conv_net_keeps_66560_bytes_a_digit_for_backward(num_samples):
    assert bytes_kept_for_backward(conv_net(), load_digits().inputs[:num_samples]) == 66_560 * num_samples


def test_conv_net_needs_more_memory_for_activations_than_for_parameters_from_7_digits_on():
    model = conv_net()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    inputs = load_digits().inputs
    assert bytes_kept_for_backward(model, inputs[:6]) < parameter_bytes < bytes_kept_for_backward(model, inputs[:7])
    assert bytes_kept_for_backward(model, inputs[:16]) > 2 * parameter_bytes


def test_conv_net_updates_on_64_digits_within_a_quarter_of_a_second():
    # It takes about 20 ms on two idle cores: the bound leaves room for a busy machine and catches a model too large.
    model, (inputs, targets) = conv_net(), load_digits().first(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.25


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channels": 0}, ValueError, "channels must be at least 1"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"depth": 1.5}, TypeError, "depth must be a whole number"),
        ({"num_classes": -1}, ValueError, "num_classes must be at least 1"),
    ],
)
def test_conv_net_refuses_bad_sizes(options, error, message):
    with pytest.raises(error, match=message):
        conv_net(**options)


@pytest.mark.parametrize(("build", "learning_rate"), [(dense_net, 0.2), (conv_net, 0.05)])
def test_plain_sgd_learns_the_digits_within_100_updates_of_64(build, learning_rate):
    digits = load_digits()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for inputs, targets in shuffled_batches(digits.first(1500), 64, seed=0, num_batches=100):
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = model(digits.inputs[1500:]).argmax(1) == digits.targets[1500:]
    assert right.double().mean() > 0.65


# SmallGPT


def test_gpt_scores_every_token_of_every_position():
    model = tiny_gpt()
    assert model(torch.zeros(3, 8, dtype=torch.int64)).shape == (3, 8, 27)
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 27)


def test_gpt_cannot_see_the_future_and_does_see_the_past():
    model = tiny_gpt(dtype=torch.float64)
    tokens = inputs_for(tiny_gpt, 1)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 27
    moved = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (moved[:4] < 1e-14).all()
    assert (moved[4:] > 1e-9).all()


def test_gpt_knows_the_order_of_the_past():
    model = tiny_gpt(dtype=torch.float64)
    last_scores = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
    assert (last_scores[0] - last_scores[1]).abs().max() > 1e-9


def test_gpt_attention_is_the_textbook_formula():
    attention = tiny_gpt(dtype=torch.float64).blocks[0].attention
    stream = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = attention.query_key_value(stream).chunk(3, dim=-1)
    mask = torch.ones(5, 5).tril().log().to(torch.float64)
    heads = []
    for columns in (slice(0, 8), slice(8, 16)):
        scores = query[..., columns] @ key[..., columns].transpose(1, 2) / math.sqrt(8) + mask
        heads.append(scores.softmax(-1) @ value[..., columns])
    assert torch.allclose(attention(stream), attention.output(torch.cat(heads, dim=-1)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("tied_head", [True, False])
def test_gpt_has_as_many_parameters_as_its_docstring_says(tied_head):
    vocab_size, context, width, depth = 27, 8, 16, 2
    expected = depth * (12 * width**2 + 13 * width) + (vocab_size + context + 2) * width
    model = tiny_gpt(tied_head=tied_head)
    assert num_parameters(model) == expected + (0 if tied_head else vocab_size * width)
    assert (model.head.weight is model.token_embedding.weight) == tied_head


@pytest.mark.parametrize("tied_head", [True, False])
def test_gpt_starts_as_gpt_2_does(tied_head):
    model = SmallGPT(500, context=64, width=128, heads=4, depth=8, tied_head=tied_head)
    expected = {
        "token_embedding.weight": 0.02,
        "position_embedding.weight": 0.02,
        "head.weight": 0.02,
        "blocks.0.attention.query_key_value.weight": 0.02,
        "blocks.7.expand.weight": 0.02,
        "blocks.0.attention.output.weight": 0.02 / 4,
        "blocks.7.contract.weight": 0.02 / 4,
    }
    state = model.state_dict()
    for name, deviation in expected.items():
        assert float(state[name].std()) == pytest.approx(deviation, rel=0.05), name
    assert all(not value.any() for name, value in state.items() if name.endswith("bias"))
    assert all((value == 1).all() for name, value in state.items() if name.endswith("norm.weight"))
    tokens = torch.randint(500, (8, 64), generator=torch.Generator().manual_seed(0))
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(500), abs=0.1)


def test_gpt_dropout_is_at_work_in_training_only():
    model = tiny_gpt(dropout=0.5)
    tokens = inputs_for(tiny_gpt, 2)
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(model(tokens), model(tokens))
        attention, stream = model.blocks[0].attention, torch.ones(1, 8, 16)
        assert not torch.equal(attention(stream), attention(stream))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), tiny_gpt().eval()(tokens))


def test_the_gpt_of_the_memory_measurements_has_its_stated_size():
    with torch.device("meta"):
        model = seven_million_gpt()
    assert num_parameters(model) == 7_399_936
    assert sum(parameter.nbytes for parameter in model.parameters()) == 29_599_744
    assert model.context == 128


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        ({"context": 0}, ValueError, "context must be at least 1"),
        ({"width": 0}, ValueError, "width must be at least 1"),
        ({"heads": 0}, ValueError, "heads must be at least 1"),
        ({"depth": 0}, ValueError, "depth must be at least 1"),
        ({"depth": 2.0}, TypeError, "depth must be a whole number"),
        ({"width": 15}, ValueError, "width must be a multiple of heads; got width 15 and heads 2"),
        ({"dropout": 1.0}, ValueError, r"dropout must be at least 0 and below 1; got 1\.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be at least 0 and below 1"),
        ({"dropout": float("nan")}, ValueError, "dropout must be at least 0 and below 1"),
        ({"dropout": "0.1"}, TypeError, "dropout must be a number"),
    ],
)
def test_gpt_refuses_bad_sizes(options, error, message):
    arguments = {"vocab_size": 27, "context": 8, "width": 16, "heads": 2, "depth": 2, **options}
    with pytest.raises(error, match=message):
        SmallGPT(arguments.pop("vocab_size"), **arguments)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.zeros(2, 9, dtype=torch.int64), ValueError, "tokens must be at most 8 long, the context; got 9"),
        (torch.zeros(8, dtype=torch.int64), ValueError, r"tokens must have shape \(B, T\); got \(8,\)"),
        (torch.zeros(2, 8), TypeError, "tokens must be int64; got torch.float32"),
    ],
)
def test_gpt_refuses_tokens_it_cannot_read(tokens, error, message):
    with pytest.raises(error, match=message):
        tiny_gpt()(tokens)


# SmallGPT with checkpointing


def gradients_and_kept(model: SmallGPT, inputs: torch.Tensor) -> tuple[dict, int]:
    torch.manual_seed(3)
    with measure_memory(model, inputs) as meter:
        loss = model(inputs).square().sum()
        kept = meter.timeline.live_bytes[-1]  # between forward and backward
        loss.backward()
    return copy_gradients(model), kept


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_give_the_same_gradient_and_keep_less(dropout):
    """With dropout too: the masks of the second forward pass must be those of the first."""
    inputs = inputs_for(tiny_gpt, 4)
    plain, saving = (tiny_gpt(dropout=dropout, dtype=torch.float64, checkpoint_blocks=on) for on in (False, True))
    reference, plain_kept = gradients_and_kept(plain, inputs)
    found, saving_kept = gradients_and_kept(saving, inputs)
    assert compare_gradients(reference, found).agree(rtol=1e-12)
    per_block = 4 * 8 * 16 * 8  # the input of a block: 4 sequences of 8 tokens, width 16, float64
    assert saving_kept < plain_kept - 2 * 10 * per_block


def test_checkpointing_can_be_switched_on_and_off():
    model, inputs = tiny_gpt(), inputs_for(tiny_gpt, 4)
    assert model.checkpoint_blocks is False
    calls = []
    model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model(inputs).sum().backward()
    once = len(calls)
    model.checkpoint_blocks = True
    model(inputs).sum().backward()
    assert (once, len(calls)) == (1, 3)


def test_features_are_what_the_head_turns_into_scores():
    for on in (False, True):
        model, inputs = tiny_gpt(checkpoint_blocks=on), inputs_for(tiny_gpt, 3)
        assert model.features(inputs).shape == (3, 8, 16)
        assert torch.equal(model.head(model.features(inputs)), model(inputs))


def test_checkpointing_changes_no_parameter_name():
    assert list(tiny_gpt().state_dict()) == list(tiny_gpt(checkpoint_blocks=True).state_dict())
