"""Losses as (sum, count): the quotient is torch's own mean, half precision does not overflow, the pairs hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_lib.accumulation import accumulate_gradients, mean_loss
from course_lib.batches import count_samples, split_batch
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import (
    chunked_token_cross_entropy,
    class_weighted_cross_entropy,
    count_tokens,
    cross_entropy_sum,
    in_bfloat16,
    squared_error_sum,
    token_cross_entropy_sum,
)
from course_lib.memory import measure_memory
from course_lib.models import SmallGPT, dense_net


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(*shape: int, classes: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


class Scores(nn.Module):
    """A model that returns its inputs, moved by one trainable number that is 0: losses can be given exactly."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.shift


def scores_with_loss(loss: float, target: int) -> list[float]:
    """Two scores whose cross-entropy with `target` is `loss`: log(1 + e^gap) = loss."""
    gap = math.log(math.expm1(loss))
    return [gap, 0.0] if target == 1 else [0.0, gap]


# The quotient is torch's own mean.


def test_sum_over_count_is_the_mean_of_cross_entropy():
    inputs, targets = drawn(7, 3), labels(7)
    total = cross_entropy_sum(Scores(), (inputs, targets))
    assert total.ndim == 0
    assert total.item() / 7 == pytest.approx(functional.cross_entropy(inputs, targets).item(), rel=1e-14)


def test_squared_error_is_summed_over_every_dimension():
    outputs, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert squared_error_sum(Scores(torch.float32), (outputs, targets)).item() == 1 + 4 + 4 + 9


def test_squared_error_of_two_shapes_is_refused_not_broadcast():
    with pytest.raises(ValueError, match=r"targets must have the shape of the model's output, \(4, 1\); got \(4,\)"):
        squared_error_sum(Scores(), (drawn(4, 1), drawn(4)))


def test_sum_over_count_is_the_mean_over_tokens():
    scores, targets = drawn(4, 5, 3), labels(4, 5)
    targets[0] = -100
    targets[2, 1:] = -100
    assert count_tokens((scores, targets)) == 11
    mean = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert token_cross_entropy_sum(Scores(), (scores, targets)).item() / 11 == pytest.approx(mean.item(), rel=1e-14)


def test_tokens_that_are_all_ignored_sum_to_zero():
    scores, targets = drawn(2, 5, 3), torch.full((2, 5), -100)
    assert count_tokens((scores, targets)) == 0
    assert token_cross_entropy_sum(Scores(), (scores, targets)).item() == 0.0


@pytest.mark.parametrize("weights", [[1, 3, 0.3], (0.0, 2.0, 5.0), torch.tensor([0.1, 0.2, 0.7])])
def test_sum_over_count_is_the_weighted_mean(weights):
    loss_sum, count = class_weighted_cross_entropy(weights)
    inputs, targets = drawn(8, 3), labels(8)
    weight = torch.as_tensor(weights, dtype=torch.float64)
    mean = functional.cross_entropy(inputs, targets, weight=weight)
    quotient = loss_sum(Scores(), (inputs, targets)).item() / count((inputs, targets))
    assert quotient == pytest.approx(mean.item(), rel=1e-14)
    assert count((inputs, targets)) == pytest.approx(float(weight[targets].sum()), rel=1e-15)


def test_class_weights_divide_by_the_weight_of_the_whole_group():
    """N07: weights 1 and 3, losses 1.0 (class 0) and 2.0 (class 1): (1 x 1 + 3 x 2) / 4 = 1.75, mean of means 1.5."""
    inputs = torch.tensor([scores_with_loss(1.0, 0), scores_with_loss(2.0, 1)], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    micro_batches = split_batch((inputs, targets), 1)
    loss_sum, count = class_weighted_cross_entropy([1, 3])
    weight = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert accumulate_gradients(Scores(), micro_batches, loss_sum, count) == pytest.approx(1.75, rel=1e-14)
    assert mean_loss(Scores(), micro_batches, loss_sum, count) == pytest.approx(1.75, rel=1e-14)
    assert functional.cross_entropy(inputs, targets, weight=weight).item() == pytest.approx(1.75, rel=1e-14)
    means = [functional.cross_entropy(*micro_batch, weight=weight).item() for micro_batch in micro_batches]
    assert sum(means) / 2 == pytest.approx(1.5, rel=1e-14)


# Labels that are no class.


def test_an_ignored_label_is_an_error_where_samples_are_counted():
    """A sample without a loss would still be counted, and the mean would be too small."""
    batch = drawn(4, 3), torch.tensor([0, 1, -100, 2])
    with pytest.raises(ValueError, match="targets must be classes from 0 to 2; got from -100 to 2"):
        cross_entropy_sum(Scores(), batch)


@pytest.mark.parametrize("bad", [-100, -1, 3])
def test_a_label_without_a_weight_is_refused_when_it_is_counted(bad):
    loss_sum, count = class_weighted_cross_entropy([1, 2, 3])
    batch = drawn(4, 3), torch.tensor([0, 1, bad, 2])
    with pytest.raises(ValueError, match="targets must be classes from 0 to 2"):
        count(batch)
    with pytest.raises(ValueError, match="targets must be classes from 0 to 2"):
        loss_sum(Scores(), batch)


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_token_label_out_of_range_is_named(bad):
    scores = drawn(2, 3, 3)
    targets = torch.tensor([[0, 1, -100], [bad, 2, 1]])
    with pytest.raises(ValueError, match=r"targets must be classes from 0 to 2, or -100 where ignored; got from -100"):
        token_cross_entropy_sum(Scores(), (scores, targets))


@pytest.mark.parametrize(
    "weights", [[], [[1.0, 2.0]], [1.0, math.nan], [1.0, math.inf], [1.0, -0.5], [0.0, 0.0], 3.0], ids=str
)
def test_class_weights_must_be_numbers_that_can_be_weights(weights):
    with pytest.raises(ValueError, match="class_weights must be"):
        class_weighted_cross_entropy(weights)


def test_later_changes_of_the_given_weights_do_not_change_the_loss():
    weights = [1.0, 3.0, 1.0]
    _, count = class_weighted_cross_entropy(weights)
    weights[1] = 100.0
    assert count((drawn(1, 3), torch.tensor([1]))) == 3.0


# Counts and the pairs.


def test_counts_refuse_inputs_and_targets_of_two_lengths():
    _, count_weights = class_weighted_cross_entropy([1, 2, 3])
    for count, batch in (
        (count_samples, (drawn(4, 3), labels(5))),
        (count_tokens, (drawn(4, 2, 3), labels(5, 2))),
        (count_weights, (drawn(4, 3), labels(5))),
    ):
        with pytest.raises(ValueError, match=r"batch holds tensors that disagree in length: \[4, 5\]"):
            count(batch)


def test_a_token_loss_without_its_count_is_refused():
    """N09: the total is never left to a fallback. With 3 tokens and 1, samples as the count would give another mean."""
    batch = drawn(2, 3, 3), torch.tensor([[0, 1, 2], [1, -100, -100]])
    for call in (accumulate_gradients, mean_loss):
        with pytest.raises(ValueError, match="count must be count_tokens, which token_cross_entropy_sum is summed for"):
            call(Scores(), split_batch(batch, 1), token_cross_entropy_sum)


def test_a_weighted_loss_is_refused_with_the_count_of_other_weights():
    loss_sum, _ = class_weighted_cross_entropy([1, 3, 1])
    _, other = class_weighted_cross_entropy([1, 1, 1])
    model = Scores()
    with pytest.raises(ValueError, match="count must be count_class_weights"):
        accumulate_gradients(model, [(drawn(2, 3), labels(2))], loss_sum, other)
    assert model.shift.grad is None


# Half precision.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_in_half_precision_neither_overflows_nor_loses_digits(dtype):
    """100,000 samples of loss log 3: float16 ends at 65504, bfloat16 has 3 digits."""
    model, targets = Scores(dtype), torch.zeros(100_000, dtype=torch.int64)
    scores = torch.zeros(100_000, 3, dtype=dtype)
    weighted, _ = class_weighted_cross_entropy([1, 1, 1])
    right = 100_000 * math.log(3)
    assert cross_entropy_sum(model, (scores, targets)).item() == pytest.approx(right, rel=1e-5)
    assert weighted(model, (scores, targets)).item() == pytest.approx(right, rel=1e-5)
    tokens = scores.reshape(1000, 100, 3), targets.reshape(1000, 100)
    assert token_cross_entropy_sum(model, tokens).item() == pytest.approx(right, rel=1e-5)
    assert squared_error_sum(model, (scores + 1, scores)).item() == pytest.approx(300_000, rel=1e-5)
    narrow = functional.cross_entropy(scores, targets, reduction="sum").item()
    assert narrow != pytest.approx(right, rel=1e-5)


def test_class_weights_are_not_rounded_to_half_precision():
    """0.3 is 0.30078 in bfloat16, and the count is in full precision: the mean would be 0.26 % too large."""
    loss_sum, count = class_weighted_cross_entropy([0.3, 0.3])
    batch = torch.zeros(4, 2, dtype=torch.bfloat16), torch.tensor([0, 1, 0, 1])
    quotient = loss_sum(Scores(torch.bfloat16), batch).item() / count(batch)
    assert quotient == pytest.approx(math.log(2), rel=1e-6)


def test_full_precision_is_left_as_it_is():
    scores = drawn(4, 3)
    assert cross_entropy_sum(Scores(), (scores, labels(4))).dtype == torch.float64
    assert cross_entropy_sum(Scores(torch.float32), (scores.float(), labels(4))).dtype == torch.float32


# The chunked loss.


def small_gpt(dtype: torch.dtype = torch.float64, **options) -> SmallGPT:
    return SmallGPT(50, context=8, width=16, heads=2, depth=2, dtype=dtype, **options)


def token_batch(sequences: int = 6, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = labels(sequences, length, classes=50), labels(sequences, length, classes=50, seed=2)
    targets[0] = -100
    targets[2, 3:] = -100
    return inputs, targets


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 48, 1000])
@pytest.mark.parametrize("tied_head", [True, False])
def test_a_chunked_loss_has_the_value_and_the_gradient_of_the_whole_one(chunk_tokens, tied_head):
    model, batch = small_gpt(tied_head=tied_head), token_batch()
    whole = token_cross_entropy_sum(model, batch)
    whole.backward()
    reference = copy_gradients(model)
    model.zero_grad()
    loss_sum, count = chunked_token_cross_entropy(chunk_tokens)
    chunked = loss_sum(model, batch)
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-13)
    chunked.backward()
    assert compare_gradients(reference, model).agree(rtol=1e-12)
    assert count is count_tokens


def test_a_chunked_loss_never_holds_the_scores_of_more_than_a_chunk():
    """48 tokens of 5000 scores in float32 are 960,000 bytes; a chunk of 8 tokens has a sixth of that."""
    model = SmallGPT(5000, context=8, width=4, heads=1, depth=1)
    batch = labels(6, 8, classes=5000), labels(6, 8, classes=5000, seed=2)
    scores = 48 * 5000 * 4

    def peak(loss_sum) -> int:
        with measure_memory(model, batch) as meter:
            loss_sum(model, batch).backward()
        model.zero_grad()
        return meter.peak_bytes

    weights = sum(parameter.nbytes for parameter in model.parameters())
    whole, chunked = peak(token_cross_entropy_sum), peak(chunked_token_cross_entropy(8)[0])
    assert whole > weights + 3 * scores
    assert chunked < 4 * weights + 3 * scores / 6 + 50_000 < whole


def test_a_chunked_loss_of_ignored_tokens_or_of_nothing_is_zero():
    model = small_gpt()
    loss_sum, _ = chunked_token_cross_entropy(5)
    inputs, targets = token_batch()
    assert loss_sum(model, (inputs, torch.full_like(targets, -100))).item() == 0.0
    assert loss_sum(model, (inputs[:0], targets[:0])).item() == 0.0


def test_a_chunked_loss_evaluates_and_accumulates_as_the_whole_one_does():
    model, micro_batches = small_gpt(), split_batch(token_batch(), 2)
    pair = chunked_token_cross_entropy(5)
    whole = mean_loss(model, micro_batches, token_cross_entropy_sum, count_tokens)
    assert mean_loss(model, micro_batches, *pair) == pytest.approx(whole, rel=1e-13)
    assert accumulate_gradients(model, micro_batches, *pair) == pytest.approx(whole, rel=1e-13)


def test_a_chunked_loss_with_the_count_of_samples_is_refused():
    with pytest.raises(ValueError, match="count must be count_tokens, which chunked_token_cross_entropy_sum is summed"):
        accumulate_gradients(small_gpt(), [token_batch()], chunked_token_cross_entropy(5)[0])


@pytest.mark.parametrize(
    ("chunk_tokens", "error", "message"),
    [
        (0, ValueError, "chunk_tokens must be at least 1; got 0"),
        (1.5, TypeError, "chunk_tokens must be a whole number"),
        (True, TypeError, "chunk_tokens must be a whole number"),
    ],
)
def test_a_chunk_of_no_tokens_is_refused(chunk_tokens, error, message):
    with pytest.raises(error, match=message):
        chunked_token_cross_entropy(chunk_tokens)


def test_a_chunked_loss_says_what_it_needs_of_a_model():
    with pytest.raises(TypeError, match="model must have features and head, as SmallGPT has; got Sequential"):
        chunked_token_cross_entropy(5)[0](dense_net(), token_batch())


# Autocast.


@pytest.mark.parametrize("loss_sum", [token_cross_entropy_sum, chunked_token_cross_entropy(16)[0]])
def test_autocast_computes_in_bfloat16_and_adds_up_in_float32(loss_sum):
    model, batch, seen = small_gpt(torch.float32), token_batch(), []
    model.blocks[0].expand.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    low = in_bfloat16(loss_sum)
    assert low.count is count_tokens
    loss_sum(model, batch).backward()
    reference = copy_gradients(model)
    model.zero_grad()
    accumulate_gradients(model, split_batch(batch, 2), low, count_tokens, total_count=None)
    for parameter in model.parameters():
        parameter.grad *= count_tokens(batch)
    assert set(seen[1:]) == {torch.bfloat16}
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    # bfloat16 has 8 binary digits: 2 ** -8 is 0.4 %. Equal would mean that nothing was cast.
    assert 1e-4 < compare_gradients(reference, model).relative_error < 3e-2
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_leaves_no_cached_weights_behind():
    """The cache would keep, and use, the weights of before a step."""
    model, batch = small_gpt(torch.float32), token_batch()
    low = in_bfloat16(token_cross_entropy_sum)
    before = low(model, batch).item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    after = low(model, batch).item()
    fresh = small_gpt(torch.float32)
    fresh.load_state_dict(model.state_dict())
    assert after == low(fresh, batch).item() != before
