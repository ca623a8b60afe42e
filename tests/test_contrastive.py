"""The two-pass update: the full batch's gradient for a loss across samples, one micro-batch at a time."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_lib.accumulation import accumulate_contrastive_gradients, accumulate_gradients, apply_gradients
from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.memory import measure_memory
from course_lib.models import conv_net, dense_net

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class TwoTowers(nn.Module):
    """An encoder for each side of a pair, and a temperature that is learned, as CLIP has."""

    def __init__(self, dropout=0.0, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.left = nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.Dropout(dropout), nn.ReLU(), nn.Linear(24, 8))
            self.right = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(dropout))
            self.right.append(nn.Linear(16, 8))
            self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.to(dtype)


def halves(model, micro_batch):
    """Encode the upper and the lower half of each digit."""
    images, _ = micro_batch
    return model.left(images[:, :, :4]), model.right(images[:, :, 4:])


def info_nce(left, right, scale=2.0):
    scores = scale * functional.normalize(left, dim=1) @ functional.normalize(right, dim=1).T
    return functional.cross_entropy(scores, torch.arange(len(scores)))


def digits(size=24, dtype=torch.float64):
    return load_digits(dtype).first(size)


def with_one_graph(model, micro_batches, encode, group_loss):
    """The reference: every micro-batch encoded with its graph kept, then one backward; for the same dropout masks."""
    encoded = [encode(model, micro_batch) for micro_batch in micro_batches]
    encoded = [part if isinstance(part, tuple) else (part,) for part in encoded]
    loss = group_loss(*map(torch.cat, zip(*encoded, strict=True)))
    loss.backward()
    return float(loss.detach()), copy_gradients(model)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 2, 7, 24, 99])
def test_two_encoders_and_a_temperature_get_the_gradient_of_the_full_batch(dtype, size):
    model, batch = TwoTowers(dtype=dtype), digits(dtype=dtype)
    loss, reference = with_one_graph(model, [batch], halves, lambda a, b: info_nce(a, b, model.log_scale.exp()))
    model.zero_grad()
    parts = split_batch(batch, size)
    got = accumulate_contrastive_gradients(model, parts, halves, lambda a, b: info_nce(a, b, model.log_scale.exp()))
    assert set(copy_gradients(model)) == set(dict(model.named_parameters()))
    assert compare_gradients(reference, model).agree(TOLERANCE[dtype])
    assert got == pytest.approx(loss, rel=TOLERANCE[dtype])


def test_cutting_without_the_second_pass_is_far_off_and_zero_at_one_sample():
    model, batch = TwoTowers(), digits()
    _, reference = with_one_graph(model, [batch], halves, info_nce)
    relative_error = {}
    for size in (12, 1):
        model.zero_grad()
        for part in split_batch(batch, size):
            (info_nce(*halves(model, part)) * size / 24).backward()
        relative_error[size] = compare_gradients(reference, model).relative_error
    assert relative_error[12] > 1e-2
    assert relative_error[1] == 1.0
    assert info_nce(*halves(model, split_batch(batch, 1)[0])).item() == 0


def test_all_similarities_zero_gives_the_logarithm_of_the_batch():
    left, right = torch.zeros(4, 3), torch.zeros(4, 3)
    assert float(info_nce(left, right)) == pytest.approx(math.log(4))
    assert float(info_nce(left[:2], right[:2])) == pytest.approx(math.log(2))
    assert float(info_nce(left[:1], right[:1])) == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dropout_draws_the_same_masks_in_both_passes(dtype):
    model, parts = TwoTowers(dropout=0.5, dtype=dtype), split_batch(digits(dtype=dtype), 7)
    torch.manual_seed(5)
    _, reference = with_one_graph(model, parts, halves, info_nce)
    after = torch.get_rng_state()
    model.zero_grad()
    torch.manual_seed(5)
    accumulate_contrastive_gradients(model, parts, halves, info_nce)
    assert compare_gradients(reference, model).agree(TOLERANCE[dtype])
    assert torch.equal(torch.get_rng_state(), after), "randomness must be spent once"


def test_random_numbers_that_a_backward_pass_draws_do_not_shift_the_masks():
    model, parts = TwoTowers(dropout=0.5), split_batch(digits(), 7)

    def encode(model, micro_batch):
        left, right = halves(model, micro_batch)
        if left.requires_grad:
            left.register_hook(lambda gradient: gradient + 0 * torch.rand_like(gradient))
        return left, right

    torch.manual_seed(5)
    _, reference = with_one_graph(model, parts, halves, info_nce)
    model.zero_grad()
    torch.manual_seed(5)
    accumulate_contrastive_gradients(model, parts, encode, info_nce)
    assert compare_gradients(reference, model).agree(1e-12)


def test_a_second_encoding_that_rounds_otherwise_is_let_through():
    model, parts, calls = TwoTowers(), split_batch(digits(), 7), []

    def encode(model, micro_batch):
        calls.append(1)
        left, right = halves(model, micro_batch)
        return left * (1 + 1e-15 * len(calls)), right

    _, reference = with_one_graph(model, parts, halves, info_nce)
    model.zero_grad()
    accumulate_contrastive_gradients(model, parts, encode, info_nce)
    assert compare_gradients(reference, model).agree(1e-12)


def test_a_loss_that_draws_random_numbers_spends_them_once():
    model, parts = TwoTowers(dropout=0.5), split_batch(digits(), 7)

    def noisy(left, right):
        return info_nce(left + 0.1 * torch.rand_like(left), right)

    torch.manual_seed(5)
    _, reference = with_one_graph(model, parts, halves, noisy)
    after = torch.get_rng_state()
    model.zero_grad()
    torch.manual_seed(5)
    accumulate_contrastive_gradients(model, parts, halves, noisy)
    assert compare_gradients(reference, model).agree(1e-12)
    assert torch.equal(torch.get_rng_state(), after)


def test_one_encoder_and_any_loss_across_samples():
    model, batch = dense_net(dtype=torch.float64), digits()

    def encode(model, micro_batch):
        return model(micro_batch[0])

    def dice(scores):
        marked, wanted = scores[:, 0].sigmoid(), (batch[1] < 5).to(scores)
        return 1 - (2 * (marked * wanted).sum() + 1) / (marked.sum() + wanted.sum() + 1)

    _, reference = with_one_graph(model, [batch], encode, dice)
    model.zero_grad()
    accumulate_contrastive_gradients(model, split_batch(batch, 5), encode, dice)
    assert compare_gradients(reference, model).agree(1e-12)


def test_buffers_that_a_forward_writes_are_written_once_and_replayed():
    model = nn.Sequential(nn.Flatten(), torch.nn.utils.parametrizations.spectral_norm(nn.Linear(64, 8)))
    model.double().append(nn.BatchNorm1d(8, dtype=torch.float64))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    parts = split_batch(digits(), 6)

    def encode(model, micro_batch):
        return model(micro_batch[0])

    def spread(scores):
        return info_nce(scores, scores.flip(1))

    _, reference = with_one_graph(model, parts, encode, spread)
    once = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(start)
    model.zero_grad()
    accumulate_contrastive_gradients(model, parts, encode, spread)
    assert compare_gradients(reference, model).agree(1e-12)
    assert all(torch.equal(value, once[name]) for name, value in model.named_buffers())
    assert int(once["2.num_batches_tracked"]) == len(parts)


def test_a_second_call_adds_up_and_a_frozen_encoder_gets_nothing():
    model, parts = TwoTowers(), split_batch(digits(), 5)
    model.right.requires_grad_(False)
    accumulate_contrastive_gradients(model, parts, halves, info_nce)
    once = copy_gradients(model)
    accumulate_contrastive_gradients(model, parts, halves, info_nce)
    assert all(name.startswith("left") for name in once)
    assert compare_gradients({name: 2 * value for name, value in once.items()}, model).agree(1e-12)


def test_a_representation_that_the_loss_does_not_use_is_fine():
    model, parts = TwoTowers(), split_batch(digits(), 5)
    accumulate_contrastive_gradients(model, parts, halves, lambda left, right: info_nce(left, left))
    assert all(not value.any() for name, value in copy_gradients(model).items() if name.startswith("right"))


def test_only_the_temperature_may_be_trained():
    model, parts = TwoTowers(), split_batch(digits(), 5)
    model.requires_grad_(False)
    model.log_scale.requires_grad_(True)
    accumulate_contrastive_gradients(model, parts, halves, lambda a, b: info_nce(a, b, model.log_scale.exp()))
    assert list(copy_gradients(model)) == ["log_scale"]


def test_encoders_without_a_gradient_are_no_optimizer_in_backward():
    model, parts = TwoTowers(), split_batch(digits(), 5)
    model.requires_grad_(False)
    model.log_scale.requires_grad_(True)  # trainable, and not used: the loss has a temperature of its own
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    accumulate_contrastive_gradients(model, parts, halves, lambda a, b: info_nce(a, b, temperature))
    assert temperature.grad is not None


def test_a_scaler_scales_and_an_overflow_skips():
    model, parts = TwoTowers(), split_batch(digits(), 5)
    accumulate_contrastive_gradients(model, parts, halves, info_nce)
    plain = copy_gradients(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model.zero_grad()
    loss = accumulate_contrastive_gradients(model, parts, halves, info_nce, scaler=scaler)
    assert compare_gradients(plain, model).scale == pytest.approx(4)
    assert loss < math.log(24) + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accumulate_contrastive_gradients(model, parts, halves, lambda a, b: info_nce(a, b) * math.inf, scaler=scaler)
    assert apply_gradients(model, optimizer, scaler=scaler).skipped
    assert all(map(torch.equal, before, model.parameters()))


def test_inside_an_autocast_block_the_second_pass_has_gradients():
    model, parts = TwoTowers(dtype=torch.float32), split_batch(digits(dtype=torch.float32), 6)
    with torch.autocast("cpu", torch.bfloat16):
        _, reference = with_one_graph(model, parts, halves, lambda a, b: info_nce(a.float(), b.float()))
    torch.clear_autocast_cache()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        accumulate_contrastive_gradients(model, parts, halves, lambda a, b: info_nce(a.float(), b.float()))
    assert set(copy_gradients(model)) == set(reference)
    assert compare_gradients(reference, model).agree(2**-7)


def test_bfloat16_encoders_are_summed_in_float32_on_request():
    parts = split_batch(digits(256, dtype=torch.bfloat16), 1)
    gradients = {}
    for sum_dtype in (None, torch.float32, torch.float64):
        model = TwoTowers(dtype=torch.bfloat16)
        accumulate_contrastive_gradients(model, parts, halves, info_nce, sum_dtype=sum_dtype)
        gradients[sum_dtype] = copy_gradients(model)
        assert {value.dtype for value in gradients[sum_dtype].values()} == {torch.bfloat16}
    reference = gradients[torch.float64]
    assert compare_gradients(reference, gradients[torch.float32]).relative_error < 1e-3
    assert compare_gradients(reference, gradients[None]).relative_error > 1e-2


def test_one_micro_batch_of_activations_is_alive_at_a_time():
    model, batch = conv_net(channels=16, depth=3), digits(64, dtype=torch.float32)

    def encode(model, micro_batch):
        return model(micro_batch[0])

    def loss(scores):
        return info_nce(scores, scores)

    def peak(size, micro_batches):
        model.zero_grad()
        with measure_memory(model, batch) as meter:
            accumulate_contrastive_gradients(model, split_batch(micro_batches, size), encode, loss)
        return meter.peak_bytes

    alone = peak(4, tuple(part[:4] for part in batch))  # one micro-batch of four, and nothing else
    representations = 64 * 10 * 4
    random_state = 5056 + 4096  # bytes of one state, and room for the allocator's small things
    whole = peak(64, batch)
    cut = peak(4, batch)
    # Encoded, joined and their gradient; similarities, their softmax and its gradient; a state per micro-batch.
    assert cut < alone + 4 * representations + 4 * 64 * 64 * 4 + 16 * random_state
    assert cut < 0.4 * whole


def ragged(model, micro_batch):
    return model.left(micro_batch[0][:, :, :4])[:, : len(micro_batch[0])]


FAULTS = {
    "no model": ({"model": "net"}, TypeError, "model must be"),
    "nothing to train": ({"model": TwoTowers().requires_grad_(False)}, ValueError, "no trainable parameters"),
    "a generator": ({"micro_batches": (part for part in [])}, TypeError, "micro_batches must be a list"),
    "an uncut batch": ({"micro_batches": digits()}, ValueError, "micro_batches must be a list of micro-batches"),
    "no micro-batch": ({"micro_batches": []}, ValueError, "at least one micro-batch"),
    "encode is no function": ({"encode": 3}, TypeError, "encode must be a function"),
    "encode gives no tensor": ({"encode": lambda model, part: 3}, TypeError, "encode must return a floating-point"),
    "encode gives nothing": ({"encode": lambda model, part: ()}, TypeError, "it gave none"),
    "encode gives a scalar": ({"encode": lambda model, part: model.log_scale}, TypeError, "shape ()"),
    "encode gives whole numbers": ({"encode": lambda model, part: part[1]}, TypeError, "torch.int64"),
    "encode gives other widths": ({"encode": ragged}, ValueError, "same kinds"),
    "the loss is no function": ({"group_loss": None}, TypeError, "group_loss must be a function"),
    "the loss is a number": ({"group_loss": lambda a, b: 1.0}, TypeError, "group_loss must return a scalar"),
    "the loss is per sample": ({"group_loss": lambda a, b: a.sum(1)}, ValueError, "got shape"),
    "the loss is a constant": ({"group_loss": lambda a, b: torch.tensor(1.0)}, ValueError, "without a gradient"),
    "the loss is not finite": (
        {"group_loss": lambda a, b: info_nce(a, b) * math.nan},
        ValueError,
        "group_loss must be",
    ),
    "no scaler": ({"scaler": 3}, TypeError, "scaler must be"),
    "no precision": ({"sum_dtype": "float32"}, TypeError, "sum_dtype must be"),
    "no floating point": ({"sum_dtype": torch.int64}, TypeError, "sum_dtype must be"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_right_is_refused_and_leaves_no_gradients(fault):
    arguments, kind, words = FAULTS[fault]
    model = TwoTowers()
    given = {"model": model, "micro_batches": split_batch(digits(), 7), "encode": halves, "group_loss": info_nce}
    state = torch.get_rng_state()
    with pytest.raises(kind, match=words.replace("(", r"\(").replace(")", r"\)")):
        accumulate_contrastive_gradients(**(given | arguments))
    assert copy_gradients(model) == {}
    assert torch.equal(torch.get_rng_state(), state)


def test_randomness_that_is_not_replayed_is_named():
    model, parts, own = TwoTowers(), split_batch(digits(), 7), torch.Generator().manual_seed(0)

    def noisy(model, micro_batch):
        left, right = halves(model, micro_batch)
        return left * (torch.rand(left.shape, generator=own) < 0.5), right

    with pytest.raises(
        ValueError, match="encode must give the same representations twice; those of micro-batch 1 of 4"
    ):
        accumulate_contrastive_gradients(model, parts, noisy, info_nce)
    assert copy_gradients(model) == {}


def test_an_optimizer_in_backward_is_refused():
    model, parts = TwoTowers(), split_batch(digits(), 7)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    with pytest.raises(ValueError, match="steps inside"):
        accumulate_contrastive_gradients(model, parts, halves, info_nce)


def test_a_loss_that_is_a_sum_over_samples_gives_what_plain_accumulation_gives():
    model, batch = dense_net(dtype=torch.float64), digits()
    accumulate_gradients(
        model, split_batch(batch, 5), lambda m, part: functional.cross_entropy(m(part[0]), part[1], reduction="sum")
    )
    reference = copy_gradients(model)
    model.zero_grad()
    accumulate_contrastive_gradients(
        model,
        split_batch(batch, 5),
        lambda m, part: m(part[0]),
        lambda scores: functional.cross_entropy(scores, batch[1]),
    )
    assert compare_gradients(reference, model).agree(1e-12)
