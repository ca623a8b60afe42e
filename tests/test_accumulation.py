"""One update from several micro-batches: for any cut of any batch it is the update of the whole batch in one pass.

The first part is one property that holds for every cut; the second the worked cases that people reported; then what is
refused and what an error leaves behind; then the probe for means, evaluation, and models that are built in odd ways.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from course_lib import accumulation
from course_lib.accumulation import (
    Update,
    accumulate_gradients,
    apply_gradients,
    mean_loss,
    update_parameters,
)
from course_lib.batches import count_samples, group_micro_batches, map_tensors, split_batch, tensors_of
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import (
    class_weighted_cross_entropy,
    count_tokens,
    cross_entropy_sum,
    squared_error_sum,
    token_cross_entropy_sum,
)
from course_lib.memory import measure_memory, memory_budget
from course_lib.training import train


@pytest.fixture(autouse=True)
def every_loss_is_new(monkeypatch):
    """Each test starts with no loss probed."""
    monkeypatch.setattr(accumulation, "_tried", set())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class Slope(nn.Module):
    """One weight w and the outputs w * x: with the loss of `outputs_sum` a sample's gradient is its input."""

    def __init__(self, weight: float = 1.0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


def outputs_sum(model: nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
    return model(micro_batch).sum()


def singles(*values: float) -> list[torch.Tensor]:
    """Micro-batches of one sample each."""
    return [numbers(value) for value in values]


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def gradient(model: nn.Module, micro_batches, *args: Any, **options: Any) -> float:
    """The gradient that a group adds to a model of one weight without one."""
    model.zero_grad()
    accumulate_gradients(model, micro_batches, *args, **options)
    return model.weight.grad.item()


# For any cut of any batch.


class Net(nn.Module):
    """A frozen layer, a trainable one, two heads, and a layer that is never used."""

    def __init__(self, seed: int):
        super().__init__()
        sizes = {"frozen": (3, 4), "body": (4, 5), "head": (5, 3), "second_head": (5, 2), "unused": (2, 2)}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*size, dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator(seed), dtype=torch.float64)
        self.frozen.requires_grad_(False)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(torch.tanh(self.frozen(inputs))))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))


WEIGHTS = [0.0, 1.5, 0.25]


@dataclass
class Kind:
    """A loss as sum and count, and the same loss over a whole batch with torch's own mean; None where it has none."""

    loss_sum: Callable
    count: Callable
    mean: Callable
    make_batch: Callable


def labels(num_samples: int, seed: int, *shape: int, ignored: float = 0.0) -> torch.Tensor:
    random = generator(seed)
    found = torch.randint(3, (num_samples, *shape), generator=random)
    return found.masked_fill(torch.rand(found.shape, generator=random) < ignored, -100)


def inputs_of(num_samples: int, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(num_samples, *shape, 3, generator=generator(seed + 1), dtype=torch.float64)


def weighted_ignoring_sum(model, micro_batch):
    inputs, targets = micro_batch
    return functional.cross_entropy(model(inputs), targets, weight=numbers(*WEIGHTS), reduction="sum")


def weight_not_ignored(micro_batch):
    _, targets = micro_batch
    return numbers(*WEIGHTS)[targets[targets != -100]].sum()


def two_terms_sum(model, micro_batch):
    features = model.features(micro_batch["inputs"])
    return {
        "class": functional.cross_entropy(model.head(features), micro_batch["targets"], reduction="sum"),
        "place": (model.second_head(features) - micro_batch["place"]).square().sum(),
    }


def count_two_terms(micro_batch):
    return {"class": (micro_batch["targets"] != -100).sum(), "place": micro_batch["place"].numel()}


def two_terms_mean(model, batch):
    features = model.features(batch["inputs"])
    place = functional.mse_loss(model.second_head(features), batch["place"])
    if not (batch["targets"] != -100).any():
        return place
    return functional.cross_entropy(model.head(features), batch["targets"]) + place


KINDS = {
    "samples": Kind(
        cross_entropy_sum,
        count_samples,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda n, seed, ignored: (inputs_of(n, seed), labels(n, seed)),
    ),
    "tokens": Kind(
        token_cross_entropy_sum,
        count_tokens,
        lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        lambda n, seed, ignored: (inputs_of(n, seed, 4), labels(n, seed, 4, ignored=ignored)),
    ),
    "class weights": Kind(
        *class_weighted_cross_entropy(WEIGHTS),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], weight=numbers(*WEIGHTS)),
        lambda n, seed, ignored: (inputs_of(n, seed), labels(n, seed)),
    ),
    "class weights and ignored labels": Kind(
        weighted_ignoring_sum,
        weight_not_ignored,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], weight=numbers(*WEIGHTS)),
        lambda n, seed, ignored: (inputs_of(n, seed), labels(n, seed, ignored=ignored)),
    ),
    "two terms": Kind(
        two_terms_sum,
        count_two_terms,
        two_terms_mean,
        lambda n, seed, ignored: {
            "inputs": inputs_of(n, seed),
            "targets": labels(n, seed, ignored=ignored),
            "place": torch.randn(n, 2, generator=generator(seed), dtype=torch.float64),
        },
    ),
}

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, weight_decay=0.1),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "RMSprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
}


@st.composite
def cuts(draw, num_samples: int) -> list[int]:
    """Sizes of micro-batches that add up to the batch: uneven, with a short tail, some of them 0."""
    inside = draw(st.lists(st.integers(0, num_samples), max_size=5))
    edges = [0, *sorted(inside), num_samples]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def cut(batch, sizes: list[int]) -> list:
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [
        map_tensors(lambda tensor, start=start, stop=stop: tensor[start:stop], batch)
        for start, stop in itertools.pairwise(edges)
    ]


def relative_l2(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    ours, reference = (torch.cat([tensor.detach().flatten() for tensor in side]) for side in (ours, reference))
    return float((ours - reference).norm() / reference.norm())


def two_groups(optimizer, model: nn.Module):
    """One optimizer with two groups of parameters; frozen and unused ones are in it as well."""
    body = [*model.frozen.parameters(), *model.body.parameters()]
    rest = [*model.head.parameters(), *model.second_head.parameters(), *model.unused.parameters()]
    return OPTIMIZERS[optimizer]([{"params": body, "lr": 0.01}, {"params": rest, "lr": 0.003}])


@settings(max_examples=250)
@given(data=st.data())
def test_any_cut_of_any_batch_gives_the_update_of_the_full_batch(data):
    """Gradient, loss, parameters and step count: those of the full batch with torch's own mean, whatever the cut."""
    kind_name = data.draw(st.sampled_from(list(KINDS)), "kind")
    kind, optimizer_name = KINDS[kind_name], data.draw(st.sampled_from(list(OPTIMIZERS)), "optimizer")
    seed = data.draw(st.integers(0, 10**6), "seed")
    max_grad_norm = data.draw(st.sampled_from([None, 0.05, math.inf]), "max_grad_norm")
    scaled = data.draw(st.booleans(), "scaled")

    model = Net(seed)
    reference = copy.deepcopy(model)
    optimizer, by_hand = (two_groups(optimizer_name, net) for net in (model, reference))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1) if scaled else None
    steps_taken = []
    optimizer.register_step_post_hook(lambda *_: steps_taken.append(1))
    for number in range(1, 3):  # the second update meets the optimizer's state
        num_samples = data.draw(st.integers(1, 9), f"samples of update {number}")
        ignored = data.draw(st.sampled_from([0.0, 0.5, 1.0]), f"ignored in update {number}")
        batch = kind.make_batch(num_samples, seed + number, ignored)
        micro_batches = cut(batch, data.draw(cuts(num_samples), f"cut of update {number}"))
        before = [parameter.clone() for parameter in model.parameters()]
        state_before = copy.deepcopy(optimizer.state_dict())
        reference.zero_grad()
        mean = kind.mean(reference, batch)

        loss = accumulate_gradients(model, micro_batches, kind.loss_sum, kind.count)

        if not mean.isfinite():  # no items at all: torch divides 0 by 0
            event("a group without items")
            assert math.isnan(loss)
            assert copy_gradients(model) == {}
            update = update_parameters(model, optimizer, micro_batches, kind.loss_sum, kind.count, scaler=scaler)
            assert math.isnan(update.loss)
            assert (update.count, update.grad_norm, update.skipped) == (0, None, True)
            assert all(map(torch.equal, model.parameters(), before))
            assert str(optimizer.state_dict()) == str(state_before)
            assert len(steps_taken) == number - 1
            return

        # The gradient before the step.
        mean.backward()
        ours, full = copy_gradients(model), copy_gradients(reference)
        assert ours.keys() == full.keys()
        assert not any(name.startswith(("frozen", "unused")) for name in ours)
        assert relative_l2(list(ours.values()), list(full.values())) <= 1e-12
        assert loss == pytest.approx(mean.item(), rel=1e-12, abs=1e-13)

        # The update; what lies in .grad by now must not enter it.
        norm = nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm or math.inf)
        by_hand.step()
        update = update_parameters(
            model, optimizer, micro_batches, kind.loss_sum, kind.count, max_grad_norm=max_grad_norm, scaler=scaler
        )
        assert update.loss == loss
        assert not update.skipped
        assert update.count == (
            kind.count(batch) if isinstance(update.count, dict) else pytest.approx(float(kind.count(batch)))
        )
        assert update.grad_norm == (None if max_grad_norm is None else pytest.approx(float(norm), rel=1e-12))
        assert copy_gradients(model) == {}
        tolerance = 1e-12 if optimizer_name in ("SGD", "momentum") else 1e-9  # Adam divides tiny entries by tinier ones
        assert relative_l2(list(model.parameters()), list(reference.parameters())) <= tolerance
        assert len(steps_taken) == number
        for parameter in model.parameters():
            if "step" in optimizer.state.get(parameter, {}):
                other = dict(zip(model.parameters(), reference.parameters(), strict=True))[parameter]
                assert optimizer.state[parameter]["step"] == by_hand.state[other]["step"] <= number
    event(f"{kind_name}, two updates compared")


@given(data=st.data())
def test_the_mean_of_any_cut_is_evaluated_to_the_mean_of_the_whole(data):
    kind = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    num_samples = data.draw(st.integers(1, 9))
    batch = kind.make_batch(num_samples, data.draw(st.integers(0, 10**6)), 0.5)
    model = Net(0)
    micro_batches = cut(batch, data.draw(cuts(num_samples)))
    expected = kind.mean(model, batch).item()
    assume(math.isfinite(expected))
    assert mean_loss(model, micro_batches, kind.loss_sum, kind.count) == pytest.approx(expected, rel=1e-12)


@given(data=st.data())
def test_shares_of_any_division_over_processes_add_up_to_the_whole(data):
    """N05: with the count of all processes as total_count, gradients and losses add up, however uneven the ranks."""
    kind = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    num_samples = data.draw(st.integers(1, 9))
    batch = kind.make_batch(num_samples, data.draw(st.integers(0, 10**6)), 0.3)
    total = kind.count(batch)
    model, reference = Net(0), Net(0)
    mean = kind.mean(reference, batch)
    assume(mean.isfinite().item())
    mean.backward()
    losses = [
        accumulate_gradients(model, cut(rank, [len(tensors_of(rank)[0])]), kind.loss_sum, kind.count, total_count=total)
        for rank in cut(batch, data.draw(cuts(num_samples)))
    ]
    assert sum(losses) == pytest.approx(mean.item(), rel=1e-12)
    assert compare_gradients(reference, model).agree(1e-12)


def test_several_optimizers_step_from_one_accumulation():
    """Two optimizers over one model: accumulate once, then step each."""
    model, reference = Net(3), Net(3)
    batch = KINDS["samples"].make_batch(7, 3, 0.0)
    pairs = []
    for net in (model, reference):
        heads = [*net.head.parameters(), *net.second_head.parameters()]
        pairs.append([torch.optim.Adam(net.body.parameters(), lr=0.01), torch.optim.SGD(heads, lr=0.1)])
    KINDS["samples"].mean(reference, batch).backward()
    accumulate_gradients(model, split_batch(batch, 3), cross_entropy_sum)
    for optimizers in pairs:
        for optimizer in optimizers:
            optimizer.step()
    assert relative_l2(list(model.parameters()), list(reference.parameters())) <= 1e-9


def test_a_second_optimizer_is_told_that_the_gradients_are_gone():
    """apply_gradients clears what it has used; a second optimizer after it is an error, not a silent nothing."""
    model = Net(3)
    batch = KINDS["samples"].make_batch(7, 3, 0.0)
    accumulate_gradients(model, split_batch(batch, 3), cross_entropy_sum)
    apply_gradients(model, torch.optim.SGD(model.body.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="no parameter of optimizer has a gradient"):
        apply_gradients(model, torch.optim.SGD(model.head.parameters(), lr=0.1))


# Worked cases: loss normalisation.


def token_losses(*groups: list[float]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one row of token losses each, with a mask of what counts, padded to the longest."""
    longest = max(map(len, groups))
    return [
        (
            numbers(*group, *[9.0] * (longest - len(group)))[None],
            numbers(*[1.0] * len(group), *[0.0] * (longest - len(group)))[None],
        )
        for group in groups
    ]


def masked_sum(model, micro_batch):
    losses, mask = micro_batch
    return (model(losses) * mask).sum()


def count_mask(micro_batch):
    return micro_batch[1].sum()


def test_token_losses_are_divided_by_the_tokens_of_the_group():
    """N01: token counts 3 and 1, losses 1, 1, 1 and 5: 8 / 4 = 2.0; the mean of means is 3.0."""
    micro_batches = token_losses([1, 1, 1], [5])
    model = Slope()
    assert accumulate_gradients(model, micro_batches, masked_sum, count_mask) == 2.0
    assert model.weight.grad.item() == 2.0
    means = [(masked_sum(model, micro_batch) / count_mask(micro_batch)).item() for micro_batch in micro_batches]
    assert sum(means) / 2 == 3.0


def test_every_partition_of_a_padded_batch_has_one_gradient_and_means_of_means_do_not():
    """N01: a small language-model head with ignored labels, and all the ways to cut four sequences."""
    head = nn.Sequential(nn.Embedding(7, 6, dtype=torch.float64), nn.Linear(6, 7, dtype=torch.float64))
    tokens = torch.randint(7, (4, 5), generator=generator())
    targets = tokens.roll(-1, 1)
    for row, length in enumerate([5, 1, 2, 4]):
        targets[row, length:] = -100
    functional.cross_entropy(head(tokens).flatten(0, 1), targets.flatten()).backward()
    full = copy_gradients(head)
    worst = 0.0
    for sizes in ([4], [3, 1], [2, 2], [1, 3], [2, 1, 1], [1, 2, 1], [1, 1, 2], [1, 1, 1, 1]):
        micro_batches = cut((tokens, targets), sizes)
        head.zero_grad()
        accumulate_gradients(head, micro_batches, token_cross_entropy_sum, count_tokens)
        assert compare_gradients(full, head).agree(1e-12)
        head.zero_grad()
        for inputs, labelled in micro_batches:
            mean = functional.cross_entropy(head(inputs).flatten(0, 1), labelled.flatten())
            (mean / len(micro_batches)).backward()
        worst = max(worst, compare_gradients(full, head).max_abs)
    assert worst > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "gradients", "right", "undivided"),
    [
        (torch.optim.SGD, (2, 4), 0.7, 0.4),
        (torch.optim.Adam, (2, 4), 0.9, 0.9),
        (torch.optim.Adam, (1e-8, 1e-8), 0.95, 0.9333),
    ],
)
def test_a_missing_division_shows_in_sgd_and_hides_in_adam(optimizer, gradients, right, undivided):
    """N02: w = 1, lr 0.1; Adam only tells the two apart where gradients are as small as its eps."""
    model, wrong = Slope(), Slope()
    update_parameters(model, optimizer(model.parameters(), lr=0.1), singles(*gradients), outputs_sum)
    assert model.weight.item() == pytest.approx(right, abs=1e-4)
    for micro_batch in singles(*gradients):
        outputs_sum(wrong, micro_batch).backward()
    optimizer(wrong.parameters(), lr=0.1).step()
    assert wrong.weight.item() == pytest.approx(undivided, abs=1e-4)


def test_the_scale_against_the_full_batch_tells_none_once_and_twice_apart():
    """N03: K = 4, 8 tokens of loss 1: right 1.0; sum / 8, then / 4 again, is 0.25; no division is 8 / 2 = 4."""
    model = Slope()
    micro_batches = [numbers(1, 1)] * 4
    outputs_sum(model, numbers(*[1] * 8)).div(8).backward()
    full = copy_gradients(model)
    scales = []
    model.zero_grad()
    assert accumulate_gradients(model, micro_batches, outputs_sum) == 1.0
    scales.append(compare_gradients(full, model).scale)
    for divisor in (2, 8 * 4):  # the mean of each and no division by K; the total and K on top
        model.zero_grad()
        for micro_batch in micro_batches:
            (outputs_sum(model, micro_batch) / divisor).backward()
        scales.append(compare_gradients(full, model).scale)
    assert scales == [1.0, 4.0, 0.25]


@pytest.mark.parametrize(("loss_sum", "count"), [(outputs_sum, count_samples), (masked_sum, count_mask)])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_loss_does_not_grow_with_the_number_of_micro_batches(loss_sum, count, steps):
    """N04: a true loss of 0.7 stays 0.7 for K = 1, 2 and 4; times K it would be 2.8."""
    losses = numbers(*[0.7] * 8)
    batch = losses if loss_sum is outputs_sum else (losses, torch.ones_like(losses))
    micro_batches = split_batch(batch, 8 // steps)
    model = Slope()
    assert accumulate_gradients(model, micro_batches, loss_sum, count) == pytest.approx(0.7)
    assert model.weight.grad.item() == pytest.approx(0.7)
    assert sum((loss_sum(model, part) / count(part)).item() for part in micro_batches) == pytest.approx(0.7 * steps)


def test_processes_divide_by_the_tokens_of_all():
    """N05: rank 0 has 3 tokens of loss 1, rank 1 one of loss 5: 2.0; local means averaged give 3.0."""
    ranks = token_losses([1, 1, 1]), token_losses([5])
    models = Slope(), Slope()
    shares = [
        accumulate_gradients(model, rank, masked_sum, count_mask, total_count=4)
        for model, rank in zip(models, ranks, strict=True)
    ]
    assert shares == [0.75, 1.25]
    assert sum(model.weight.grad.item() for model in models) == 2.0
    # What averages over 2 ranks, as DistributedDataParallel does, needs each share times 2.
    assert sum(2 * model.weight.grad.item() for model in models) / 2 == 2.0
    assert sum(gradient(Slope(), rank, masked_sum, count_mask) for rank in ranks) / 2 == 3.0


def test_a_total_below_the_own_count_is_refused():
    """N09: a count that leaves items out would silently be another objective."""
    model = Slope()
    with pytest.raises(ValueError, match=r"total_count must be at least this group's own count .*4.*; got 3"):
        accumulate_gradients(model, token_losses([1, 1, 1], [5]), masked_sum, count_mask, total_count=3)
    assert model.weight.grad is None


def test_a_total_that_was_rounded_in_another_order_is_taken():
    weights = [0.1, 0.2, 0.3]
    loss_sum, count = class_weighted_cross_entropy(weights)
    targets = torch.tensor([0, 1, 2] * 5)
    model = nn.Linear(2, 3, dtype=torch.float64)
    micro_batches = split_batch((torch.ones(15, 2, dtype=torch.float64), targets), 1)
    own = math.fsum(weights[target] for target in targets)
    assert sum(map(count, micro_batches)) > own  # by rounding only
    loss = accumulate_gradients(model, micro_batches, loss_sum, count, total_count=own)
    assert math.isfinite(loss)


def test_sum_with_a_smaller_rate_is_the_mean_and_both_together_are_too_small():
    """N11: gradients 2 and 4, lr 0.1: mean with lr 0.7, sum with lr / 2 0.7, mean with lr / 2 0.85, sum with lr 0.4."""

    def step(lr: float, *, summed: bool, decay: float = 0.0) -> float:
        model = Slope()
        count = (lambda micro_batch: 0.5) if summed else count_samples  # a total of 1: nothing is divided
        update_parameters(model, sgd(model, lr, weight_decay=decay), singles(2, 4), outputs_sum, count)
        return model.weight.item()

    assert step(0.1, summed=False) == pytest.approx(0.7)
    assert step(0.05, summed=True) == pytest.approx(0.7)
    assert step(0.05, summed=False) == pytest.approx(0.85)
    assert step(0.1, summed=True) == pytest.approx(0.4)
    # With weight decay 0.1 the two that were equal are not: 1 - 0.1 (3 + 0.1) and 1 - 0.05 (6 + 0.1).
    assert step(0.1, summed=False, decay=0.1) == pytest.approx(0.69)
    assert step(0.05, summed=True, decay=0.1) == pytest.approx(0.695)


# Worked cases: group boundary.


def test_a_short_group_is_divided_by_its_own_size():
    """B01: 5 micro-batches of gradient 1, K = 4: updates of 1.0 and 1.0; a fixed / 4 makes the second 0.25."""
    groups = list(group_micro_batches(singles(1, 1, 1, 1, 1), 4))
    assert [gradient(Slope(), group, outputs_sum) for group in groups] == [1.0, 1.0]
    assert [sum(float(micro_batch.sum()) for micro_batch in group) / 4 for group in groups] == [1.0, 0.25]


def test_no_epoch_starts_with_gradients_of_the_last():
    """B02: 63 batches, K = 8: 7 are left over; carried on, the first update of epoch 2 sums 15, which is 15 / 8."""
    model = Slope()
    optimizer = sgd(model)
    largest = 0
    for _ in range(2):
        assert model.weight.grad is None
        for group in group_micro_batches(singles(*[1] * 63), 8):
            largest = max(largest, len(group))
            update = update_parameters(model, optimizer, group, outputs_sum, max_grad_norm=math.inf)
            assert update.grad_norm == pytest.approx(1.0)
    assert largest == 8
    assert (7 + 8) / 8 == 1.875


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("num_micro_batches", range(10))
def test_an_epoch_takes_one_step_per_group(num_micro_batches, steps):
    """B03: ceil(n / K) calls of step; three micro-batches with K = 4 are one update, not none."""
    model = Slope()
    optimizer = sgd(model)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, group_micro_batches(singles(*[1] * num_micro_batches), steps), outputs_sum)
    assert len(calls) == -(-num_micro_batches // steps)


# Worked cases: zero_grad and the life of a gradient.


def test_the_gradient_grows_by_one_share_per_micro_batch():
    """Z01: gradients 1, 2, 3, K = 3: 1/3, 1, 2; cleared each time 1/3, 2/3, 1."""
    model = Slope()
    seen = []

    def watched_sum(model, micro_batch):
        seen.append(None if model.weight.grad is None else model.weight.grad.item())
        return outputs_sum(model, micro_batch)

    result = gradient(model, singles(1, 2, 3), watched_sum)
    assert seen[-3:] == [None, pytest.approx(1 / 3), 1.0]
    assert result == 2.0
    cleared = []
    for micro_batch in singles(1, 2, 3):
        model.zero_grad()
        (outputs_sum(model, micro_batch) / 3).backward()
        cleared.append(model.weight.grad.item())
    assert cleared == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


def test_what_lies_in_grad_does_not_enter_an_update_and_nothing_stays():
    model = Slope()
    model.weight.grad = torch.tensor(100.0, dtype=torch.float64)
    update_parameters(model, sgd(model), singles(1, 2, 3), outputs_sum)
    assert model.weight.item() == pytest.approx(0.8)
    assert model.weight.grad is None


def test_accumulating_twice_adds_up():
    model = Slope()
    for values in ((1.0, 3.0), (5.0,)):
        accumulate_gradients(model, singles(*values), outputs_sum)
    assert model.weight.grad.item() == 2.0 + 5.0


def test_evaluation_in_the_middle_of_a_group_leaves_its_gradient():
    """Z03: a partial gradient of 3.0 after 2 of 4 micro-batches is 3.0 after the evaluation too."""
    model = nn.Sequential(Slope(), nn.Dropout(0.5))
    model.eval()
    first, rest = singles(6, 6), singles(2, 2)
    accumulate_gradients(model, first, outputs_sum, total_count=4)
    kept = model[0].weight.grad.clone()
    assert kept.item() == 3.0
    assert mean_loss(model, singles(1, 2), outputs_sum) == 1.5
    assert torch.equal(model[0].weight.grad, kept)
    accumulate_gradients(model, rest, outputs_sum, total_count=4)
    assert model[0].weight.grad.item() == 4.0


# Worked cases: schedules and optimizers.


def test_the_schedule_advances_once_per_update():
    """S01: 100 batches x 10 epochs, K = 4: 250 updates; stepped per micro-batch, lr is 0 after 62.5 of them."""
    model = Slope()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=250)
    rates = []
    for _ in range(10):
        for group in group_micro_batches(singles(*[1e-3] * 100), 4):
            rates.append(optimizer.param_groups[0]["lr"])
            update_parameters(model, optimizer, group, outputs_sum, scheduler=scheduler)
    assert len(rates) == 250
    assert min(rates) > 0
    assert rates[125] == pytest.approx(0.05)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert 250 / 4 == 62.5


def test_decay_and_the_step_count_advance_once_per_update():
    """O01: lr * wd = 0.01, K = 3: the factor is 0.99, per micro-batch 0.9703; Adam's t after 2 updates is 2, not 6."""
    model = Slope()
    update_parameters(model, sgd(model, 0.1, weight_decay=0.1), singles(0, 0, 0), outputs_sum)
    assert model.weight.item() == pytest.approx(0.99)
    assert round(0.99**3, 4) == 0.9703
    model = Slope()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        update_parameters(model, adam, singles(1, 2, 3), outputs_sum)
    assert adam.state[model.weight]["step"] == 2


class Parabola(Slope):
    """The loss a w^2 / 2 of O04."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight**2 / 2


def step_in_backward(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    """Step inside backward, parameter by parameter, as layer-wise optimizers do."""
    optimizer = sgd(model, lr)

    def step(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return optimizer


def test_one_mean_update_is_not_two_half_updates():
    """O04: L = a w^2 / 2, a = 1 then 3, w = 1, lr 0.1: one mean update 0.8; two half updates in backward 0.8075."""
    model = Parabola()
    update_parameters(model, sgd(model), singles(1, 3), outputs_sum)
    assert model.weight.item() == pytest.approx(0.8)
    model = Parabola()
    step_in_backward(model)
    for micro_batch in singles(1, 3):
        (outputs_sum(model, micro_batch) / 2).backward()
    assert model.weight.item() == pytest.approx(0.8075)


def test_an_optimizer_in_backward_is_refused_with_more_than_one_micro_batch():
    """O04: it has used a part of the group as the whole."""
    model = Parabola()
    step_in_backward(model)
    with pytest.raises(ValueError, match="parameters changed during backward"):
        accumulate_gradients(model, singles(1, 3), outputs_sum)
    assert model.weight.grad is None


def test_an_optimizer_in_backward_is_fine_with_one_micro_batch():
    """O04: K = 1 is what it is made for."""
    model = Parabola()
    step_in_backward(model)
    assert accumulate_gradients(model, [numbers(1, 3)], outputs_sum) == 1.0
    assert model.weight.item() == pytest.approx(0.8)


def test_hooks_that_only_look_or_scale_are_no_optimizer():
    model, seen = Slope(), []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    model.weight.register_hook(lambda grad: 2 * grad)
    assert gradient(model, singles(1, 3), outputs_sum) == 4.0
    assert seen == [1.0, 4.0]


def test_an_embedding_that_renormalises_its_rows_is_not_refused():
    """It changes parameters in the forward pass, which is no step."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 2))
    batch = torch.tensor([[0, 1], [1, 2], [3, 4]]), torch.tensor([0, 1, 0])
    update = update_parameters(model, sgd(model), split_batch(batch, 1), cross_entropy_sum)
    assert not update.skipped


# Worked cases: clipping.


def test_clipping_comes_once_and_after_averaging():
    """C01: gradients 4 and -2, max_norm 1: the mean 1 stays 1.0; clipped each and then averaged it is 0."""
    model = Slope()
    update = update_parameters(model, sgd(model, 1.0), singles(4, -2), outputs_sum, max_grad_norm=1.0)
    assert update.grad_norm == 1.0
    assert model.weight.item() == pytest.approx(0.0, abs=1e-5)
    assert sum(max(-1.0, min(1.0, value)) for value in (4, -2)) / 2 == 0.0


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_norm_is_that_of_the_mean_for_every_number_of_micro_batches(steps):
    """C02: four gradients of 0.6, max_norm 1: norm 0.6, nothing to clip; the sum clipped and divided is 0.25."""
    model = Slope()
    micro_batches = split_batch(numbers(0.6, 0.6, 0.6, 0.6), 4 // steps)
    update = update_parameters(model, sgd(model, 1.0), micro_batches, outputs_sum, max_grad_norm=1.0)
    assert update.grad_norm == pytest.approx(0.6)
    assert model.weight.item() == pytest.approx(0.4)
    assert min(4 * 0.6, 1.0) / 4 == 0.25


def test_infinity_measures_the_norm_and_clips_nothing():
    model = Slope()
    update = update_parameters(model, sgd(model, 1.0), singles(30, 50), outputs_sum, max_grad_norm=math.inf)
    assert update.grad_norm == 40.0
    assert model.weight.item() == -39.0


def test_a_norm_is_only_computed_when_asked_for():
    model = Slope()
    assert update_parameters(model, sgd(model), singles(1), outputs_sum).grad_norm is None


def test_the_norm_is_that_of_what_the_optimizer_steps():
    """A layer that is trainable but in no optimizer must not shrink the step of the others; under a scaler nothing has
    unscaled it either."""
    norms = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=64.0)):
        model = Net(1)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        batch = KINDS["samples"].make_batch(5, 1, 0.0)
        KINDS["samples"].mean(model, batch).backward()
        head = torch.cat([parameter.grad.flatten() for parameter in model.head.parameters()]).norm().item()
        update = update_parameters(
            model, optimizer, split_batch(batch, 2), cross_entropy_sum, max_grad_norm=math.inf, scaler=scaler
        )
        norms.append(update.grad_norm)
        assert update.grad_norm == pytest.approx(head, rel=1e-12)
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


# Worked cases: AMP and GradScaler.


def scaler_of(scale: float = 4.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def test_gradients_are_unscaled_once_and_after_the_group():
    """A01: scale 4, two gradients: 8 accumulated, 2 unscaled; unscaled after the first, 1 + 4 = 5."""
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model, 1.0)
    accumulate_gradients(model, singles(2, 2), outputs_sum, scaler=scaler)
    assert model.weight.grad.item() == 8.0
    step = apply_gradients(model, optimizer, max_grad_norm=math.inf, scaler=scaler)
    assert (step.grad_norm, step.skipped) == (2.0, False)
    assert model.weight.item() == -1.0
    # The wrong way, by hand: undivided gradients of 1.
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model)
    scaler.scale(outputs_sum(model, numbers(1))).backward()
    scaler.unscale_(optimizer)
    scaler.scale(outputs_sum(model, numbers(1))).backward()
    assert model.weight.grad.item() == 5.0
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_clipping_under_a_scaler_sees_unscaled_gradients():
    """A01, C02: the norm before clipping does not depend on the scale."""
    for scale in (1.0, 4.0, 65536.0):
        model = Slope()
        update = update_parameters(
            model, sgd(model, 1.0), singles(1, 3), outputs_sum, max_grad_norm=1.0, scaler=scaler_of(scale)
        )
        assert update.grad_norm == 2.0
        assert model.weight.item() == pytest.approx(0.0, abs=1e-5)


class Overflowing(Slope):
    """The loss is finite, the gradient is not: sqrt at 0."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs.clamp(min=0)).sqrt() + 0 * self.weight


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("bad", ["infinite loss", "loss that is nan", "infinite gradient"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_overflow_skips_one_update_and_the_next_works(bad, place, max_grad_norm):
    """A03: one inf in any micro-batch: parameters unchanged, the scale halves, gradients cleared, update() called."""
    model = Overflowing() if bad == "infinite gradient" else Slope()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = scaler_of()
    good = singles(1, 1, 1)
    group = list(good)
    group[place] = numbers({"infinite loss": math.inf, "loss that is nan": math.nan, "infinite gradient": 0.0}[bad])
    options = {"scaler": scaler, "scheduler": scheduler, "max_grad_norm": max_grad_norm}

    update = update_parameters(model, optimizer, group, outputs_sum, **options)
    assert update.skipped
    assert update.count == 3
    assert math.isfinite(update.loss) == (bad == "infinite gradient")
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    assert not optimizer.state
    assert scaler.get_scale() == 2.0
    assert optimizer.param_groups[0]["lr"] == 0.1

    for number in (1, 2):
        update = update_parameters(model, optimizer, good, outputs_sum, **options)
        assert not update.skipped
        assert optimizer.state[model.weight]["step"] == number
    assert scaler.get_scale() == 2.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_skipping_without_update_is_what_breaks_the_next_unscale():
    """A03: the wrong way, by hand: a skip that leaves update() out."""
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model)
    scaler.scale(outputs_sum(model, numbers(math.inf))).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_.* is being called after step"):
        scaler.unscale_(optimizer)


def test_an_infinite_loss_skips_although_its_gradient_is_finite_and_elsewhere():
    """The scaler looks at the optimizer's parameters only, here the head: the body is in no optimizer."""
    model = Net(2)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = model.head.weight.clone()
    scaler = scaler_of()

    def infinite_sum(model, micro_batch):
        return cross_entropy_sum(model, micro_batch) + math.inf

    batch = KINDS["samples"].make_batch(4, 2, 0.0)
    update = update_parameters(model, optimizer, split_batch(batch, 2), infinite_sum, scaler=scaler)
    assert update == Update(math.inf, 4, None, skipped=True)
    assert torch.equal(model.head.weight, before)
    assert scaler.get_scale() == 2.0


def test_the_scale_grows_once_per_interval_of_updates():
    model, scaler = Slope(), scaler_of(growth_interval=2)
    optimizer = sgd(model)
    scales = []
    for _ in range(4):
        update = update_parameters(model, optimizer, singles(1, 2, 3), outputs_sum, scaler=scaler)
        assert not update.skipped  # a scale that grew is no skip
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 8.0, 16.0]


def test_a_scaler_that_is_switched_off_is_no_scaler():
    model, scaler = Slope(), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = sgd(model)
    assert not update_parameters(model, optimizer, singles(1, 3), outputs_sum, scaler=scaler).skipped
    assert model.weight.item() == pytest.approx(0.8)
    with pytest.raises(ValueError, match=r"loss_sum must be finite; it was inf in micro-batch 2 of 2"):
        update_parameters(model, optimizer, singles(1, math.inf), outputs_sum, scaler=scaler)
    assert model.weight.item() == pytest.approx(0.8)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_an_error_inside_step_leaves_the_scaler_usable(max_grad_norm):
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model)
    broken = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update_parameters(model, optimizer, singles(1), outputs_sum, scaler=scaler, max_grad_norm=max_grad_norm)
    assert model.weight.grad is None
    assert scaler.get_scale() == 4.0
    broken.remove()
    for _ in range(2):
        update = update_parameters(
            model, optimizer, singles(1), outputs_sum, scaler=scaler, max_grad_norm=max_grad_norm
        )
        assert not update.skipped
    assert model.weight.item() == pytest.approx(0.8)


def test_unscaling_before_the_update_is_an_error_that_leaves_the_scaler_usable():
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model)
    accumulate_gradients(model, singles(1), outputs_sum, scaler=scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        apply_gradients(model, optimizer, scaler=scaler)
    assert model.weight.grad is None
    assert not update_parameters(model, optimizer, singles(1), outputs_sum, scaler=scaler).skipped


def test_a_scaler_that_never_scaled_is_an_error_that_leaves_it_usable():
    model, scaler = Slope(), scaler_of()
    optimizer = sgd(model)
    outputs_sum(model, numbers(1)).backward()
    with pytest.raises(AssertionError, match="Attempted unscale_"):
        apply_gradients(model, optimizer, scaler=scaler)
    assert model.weight.item() == 1.0
    assert not update_parameters(model, optimizer, singles(1), outputs_sum, scaler=scaler).skipped


@pytest.mark.parametrize("call", ["update", "accumulate", "apply"])
def test_a_scaler_with_float16_parameters_is_refused_before_anything_runs(call):
    """torch says "Attempting to unscale FP16 gradients", once the whole group has been computed."""
    model, scaler, ran = nn.Linear(2, 1).half(), scaler_of(), []
    optimizer = sgd(model)

    def loss_sum(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
        ran.append(part)
        return model(part).sum()

    batch = torch.ones(1, 2, dtype=torch.float16)
    calls = {
        "update": lambda: update_parameters(model, optimizer, [batch], loss_sum, scaler=scaler),
        "accumulate": lambda: accumulate_gradients(model, [batch], loss_sum, scaler=scaler),
        "apply": lambda: apply_gradients(model, optimizer, scaler=scaler),
    }
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"scaler needs parameters in float32, .* some in float16.*autocast"):
        calls[call]()
    assert not ran
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0


def test_float16_is_let_through_where_nothing_is_unscaled():
    """Frozen parameters, a scaler that is off, and no scaler at all."""
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 1))

    def loss_sum(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](part).float()).sum()

    batch = torch.ones(1, 2, dtype=torch.float16)
    assert not update_parameters(model, sgd(model[1]), [batch], loss_sum, scaler=scaler_of()).skipped
    half = nn.Linear(2, 1).half()
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        assert not update_parameters(half, sgd(half), [batch], outputs_sum, scaler=scaler).skipped


def test_a_scaler_changes_nothing_in_bfloat16():
    """It has the range of float32: a power of two goes in and comes out, so a scaler is needless and harmless."""
    models = [nn.Linear(2, 1, dtype=torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batch = torch.full((3, 2), 1e-3, dtype=torch.bfloat16)
    for model, scaler in zip(models, (None, scaler_of(65536.0)), strict=True):
        update_parameters(model, sgd(model), [batch[:2], batch[2:]], outputs_sum, scaler=scaler, max_grad_norm=1.0)
    assert torch.equal(models[0].weight, models[1].weight)


def test_finite_gradients_with_an_infinite_norm_are_an_error_not_a_step_of_zero():
    """1e30 squared is infinite in float32: clipping would multiply by 0, and momentum and decay would move on."""
    for scaler in (None, scaler_of(1.0)):
        model = nn.Linear(2, 1, bias=False)
        before = model.weight.clone()
        optimizer = sgd(model, weight_decay=0.1)
        batch = torch.full((1, 2), 1e30)
        with pytest.raises(ValueError, match="gradient's norm is inf; the gradients are cleared"):
            update_parameters(model, optimizer, [batch], outputs_sum, max_grad_norm=1.0, scaler=scaler)
        assert torch.equal(model.weight, before)
        assert model.weight.grad is None


def test_a_gradient_that_is_not_finite_is_an_error_when_its_norm_is_looked_at():
    model = Overflowing()
    with pytest.raises(ValueError, match=r"gradient's norm is (nan|inf)"):
        update_parameters(model, sgd(model), singles(0), outputs_sum, max_grad_norm=math.inf)
    assert model.weight.item() == 1.0
    assert model.weight.grad is None


# Worked cases: numeric precision.


def test_small_gradients_add_up_in_float32_parameters_under_autocast():
    """P01: 1 + 1000 x 0.001 is 2.0 in float32 and 1.0 in bfloat16; with bfloat16 parameters the sum gets stuck."""
    values = [1000.0] + [1.0] * 1000  # each divided by the count of 1000 below: gradients 1 and 1000 x 0.001

    def autocast_sum(model, micro_batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional.linear(micro_batch, model.weight).sum()

    sums = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(1, 1, bias=False, dtype=dtype)
        micro_batches = [torch.tensor([[value]], dtype=dtype) for value in values]
        accumulate_gradients(model, micro_batches, autocast_sum, lambda micro_batch: 1000 / 1001)
        assert model.weight.grad.dtype == dtype
        sums[dtype] = model.weight.grad.item()
    assert sums[torch.float32] == pytest.approx(2.0, rel=1e-3)
    assert sums[torch.bfloat16] == 1.0
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1).item() == 256.0


def test_two_orders_of_one_sum_differ_by_rounding_only():
    """P03: 6 micro-batches on Linear(64, 32): about 1e-8 apart in float32, 1e-17 in float64, and that is no fault."""
    for dtype, limit in ((torch.float32, 1e-7), (torch.float64, 1e-16)):
        model = nn.Linear(64, 32, dtype=dtype)
        inputs = torch.randn(48, 64, generator=generator(), dtype=torch.float64).to(dtype)
        batch = inputs, torch.randint(32, (48,), generator=generator())
        functional.cross_entropy(model(inputs), batch[1]).backward()
        full = copy_gradients(model)
        model.zero_grad()
        accumulate_gradients(model, split_batch(batch, 8), cross_entropy_sum)
        assert 0 < compare_gradients(full, model).max_abs < limit


def test_adam_makes_much_of_the_sign_of_a_tiny_gradient():
    """P03: gradients +1e-6 and -1e-6 end at 0.901 and 1.099, so compare gradients, not weights after Adam."""
    ends = []
    for sign in (1, -1):
        model = Slope()
        update_parameters(model, torch.optim.Adam(model.parameters(), lr=0.1), singles(sign * 1e-6), outputs_sum)
        ends.append(round(model.weight.item(), 3))
    assert ends == [0.901, 1.099]


# Worked cases: logging, memory, batch statistics, losses that look across samples.


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_loss_of_an_update_does_not_depend_on_the_number_of_micro_batches(steps):
    """L01: a true loss of 4 is 4 for every K; the scaled tensor would show 2 and 1."""
    model = Slope()
    micro_batches = split_batch(numbers(4, 4, 4, 4), 4 // steps)
    assert update_parameters(model, sgd(model), micro_batches, outputs_sum).loss == 4.0


def test_the_loss_of_an_update_is_the_mean_of_its_group():
    """L02: losses 1, 2, 3, 6 make 3.0, not the last one's 6; uneven micro-batches are weighed by their samples."""
    model = Slope()
    assert accumulate_gradients(model, singles(1, 2, 3, 6), outputs_sum) == 3.0
    assert accumulate_gradients(model, [numbers(1, 2, 3), numbers(6)], outputs_sum) == 3.0
    assert type(accumulate_gradients(model, singles(1), outputs_sum)) is float


class Alive:
    """Elements that autograd keeps for backward, now and at most."""

    def __init__(self):
        self.now = self.most = 0

    def keep(self, tensor: torch.Tensor):
        outer = self

        class Kept:
            def __init__(self):
                self.tensor = tensor
                outer.now += tensor.numel()
                outer.most = max(outer.most, outer.now)

            def __del__(self):
                outer.now -= tensor.numel()

        return Kept()

    def watch(self):
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)


def test_one_micro_batch_of_activations_is_alive_at_a_time():
    """M01: backward per micro-batch keeps a quarter of what one backward of the sum keeps. M05: nothing stays."""
    batch = torch.randn(32, 10, generator=generator()), torch.zeros(32, 10)
    parts = split_batch(batch, 8)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 10))

    def kept(work: Callable) -> int:
        model.zero_grad()
        alive = Alive()
        with alive.watch():
            work()
        assert alive.now == 0
        return alive.most

    one = kept(lambda: accumulate_gradients(model, parts[:1], squared_error_sum))
    each = kept(lambda: accumulate_gradients(model, parts, squared_error_sum))
    summed = kept(lambda: sum(squared_error_sum(model, part) / 32 for part in parts).backward())
    weights = 20 * 10  # the second layer's weight is kept too, once per pass
    assert each == one
    assert summed == 4 * one
    assert kept(lambda: accumulate_gradients(model, [batch], squared_error_sum)) == 4 * one - 3 * weights


def test_gradients_are_gone_when_the_next_forward_runs():
    """M03: .grad is None in the forward pass of the first micro-batch of an update."""
    model, seen = Slope(), []

    def watched_sum(model, micro_batch):
        seen.append(model.weight.grad)
        return outputs_sum(model, micro_batch)

    optimizer = sgd(model)
    for _ in range(3):
        update_parameters(model, optimizer, singles(1), watched_sum)
    assert seen == [None] * 5  # two of them the probe's


def normalised_sum(model, micro_batch):
    inputs, factors = micro_batch
    return (model(inputs) * factors).sum()


def test_no_division_makes_batch_statistics_equal():
    """BN1: 0, 2 | 4, 6: the batch normalises to -1.342 ... 1.342, micro-batches to -1, 1, -1, 1; running mean 0.30
    and 0.59. With LayerNorm in its place the cut doesn't matter."""
    inputs = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    batch_norm = nn.BatchNorm1d(1, eps=1e-12)
    assert batch_norm(inputs).flatten().tolist() == pytest.approx([-1.342, -0.447, 0.447, 1.342], abs=1e-3)
    assert batch_norm.running_mean.item() == pytest.approx(0.30)
    batch_norm = nn.BatchNorm1d(1, eps=1e-12)
    parts = [batch_norm(part) for part in split_batch(inputs, 2)]
    assert torch.cat(parts).flatten().tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-6)
    assert batch_norm.running_mean.item() == pytest.approx(0.59)

    generous = torch.randn(8, 4, generator=generator(), dtype=torch.float64)
    batch = generous, torch.randn(8, 4, generator=generator(1), dtype=torch.float64)
    agree = {}
    for layer in (nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4)):
        model = nn.Sequential(nn.Linear(4, 4), layer).double()
        gradients = []
        for size in (8, 2):
            model.zero_grad()
            accumulate_gradients(model, split_batch(batch, size), normalised_sum)
            gradients.append(copy_gradients(model))
        agree[type(layer).__name__] = compare_gradients(*gradients).agree(1e-12)
    assert agree == {"BatchNorm1d": False, "LayerNorm": True, "GroupNorm": True}


def contrastive_sum(model, micro_batch):
    """InfoNCE over the pairs of a micro-batch: every sample's negatives are the others."""
    one, other = micro_batch
    scores = model(one) @ model(other).T
    return functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")


def test_a_loss_across_samples_is_another_loss_for_every_cut_and_is_not_called_a_mean():
    """K01: all similarities 0: a batch of 4 has ln 4, two of 2 have ln 2, single pairs 0."""
    model = Slope()
    batch = torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    losses = [accumulate_gradients(model, split_batch(batch, size), contrastive_sum) for size in (4, 2, 1)]
    assert losses == [pytest.approx(math.log(4)), pytest.approx(math.log(2)), 0.0]


# Groups and micro-batches without items.


@pytest.mark.parametrize("group", [[], [numbers()], [numbers(), numbers()]], ids=["none", "one empty", "two empty"])
def test_a_group_without_items_moves_nothing_and_says_so(group):
    model, calls = Slope(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = scaler_of()

    def watched_sum(model, micro_batch):
        calls.append(1)
        return outputs_sum(model, micro_batch)

    update = update_parameters(
        model, optimizer, group, watched_sum, max_grad_norm=1.0, scaler=scaler, scheduler=scheduler
    )
    assert math.isnan(update.loss)
    assert (update.count, update.grad_norm, update.skipped) == (0, None, True)
    assert math.isnan(accumulate_gradients(model, group, watched_sum))
    assert math.isnan(mean_loss(model, group, watched_sum))
    assert calls == []
    assert model.weight.item() == 1.0
    assert model.weight.grad is None
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scaler.get_scale() == 4.0
    assert not update_parameters(model, optimizer, singles(1), outputs_sum, scaler=scaler).skipped


def test_micro_batches_without_items_are_passed_over():
    """One whose tokens are all ignored is not run, so a loss that would be nan there does no harm."""
    model = Slope()
    micro_batches = [*token_losses([1, 1, 1]), *token_losses([]), *token_losses([5])]

    def mean_of_each_sum(model, micro_batch):
        losses, mask = micro_batch
        return (model(losses) * mask).sum() / mask.sum() * mask.sum()  # 0 / 0 where nothing counts

    assert accumulate_gradients(model, micro_batches, mean_of_each_sum, count_mask) == 2.0
    assert mean_loss(model, micro_batches, mean_of_each_sum, count_mask) == 2.0


def test_a_process_without_items_of_its_own_has_a_share_of_zero():
    model = Slope()
    share = accumulate_gradients(model, [numbers()], outputs_sum, total_count=4)
    assert share == 0.0
    assert type(share) is float
    assert model.weight.grad is None
    for total in (4, {"a": 4}):
        share = accumulate_gradients(model, [], outputs_sum, total_count=total)
        assert share == 0.0
        assert type(share) is float


# Several terms.


def test_each_term_is_divided_by_its_own_total():
    """3 items of 2 and 1 item of 7 make 2 + 7, in whichever micro-batch they are."""

    def terms(model, micro_batch):
        return {"a": model(micro_batch["a"]).sum(), "b": model(micro_batch["b"]).sum()}

    def count(micro_batch):
        return {term: len(values) for term, values in micro_batch.items()}

    whole = [{"a": numbers(2, 2, 2), "b": numbers(7)}]
    apart = [{"a": numbers(2, 2), "b": numbers()}, {"a": numbers(), "b": numbers(7)}, {"a": numbers(2), "b": numbers()}]
    for group in (whole, apart):
        model = Slope()
        update = update_parameters(model, sgd(model, 1.0), group, terms, count)
        assert update.loss == 9.0
        assert update.count == {"a": 3, "b": 1}
        assert model.weight.item() == 1.0 - 9.0
        assert mean_loss(Slope(), group, terms, count) == 9.0
        assert accumulate_gradients(Slope(), group, terms, count, total_count={"a": 6, "b": 1}) == 1.0 + 7.0


def test_a_term_without_items_anywhere_adds_nothing():
    def terms(model, micro_batch):
        return {"a": outputs_sum(model, micro_batch), "b": outputs_sum(model, micro_batch) * math.nan}

    model = Slope()
    assert accumulate_gradients(model, singles(2, 4), terms, lambda part: {"a": len(part), "b": 0}) == 3.0
    assert model.weight.grad.item() == 3.0
    assert mean_loss(model, singles(2, 4), terms, lambda part: {"a": len(part), "b": 0}) == 3.0


def test_a_term_that_is_a_constant_in_one_micro_batch_is_fine():
    """Where a micro-batch has nothing of a term, its loss is often written as a plain zero."""

    def terms(model, micro_batch):
        return {
            "a": outputs_sum(model, micro_batch["a"]),
            "b": torch.zeros(()) if len(micro_batch["b"]) == 0 else outputs_sum(model, micro_batch["b"]),
        }

    def count(micro_batch):
        return {term: len(values) for term, values in micro_batch.items()}

    group = [{"a": numbers(1, 3), "b": numbers()}, {"a": numbers(), "b": numbers(5)}]
    assert accumulate_gradients(Slope(), group, terms, count) == 2.0 + 5.0
    with pytest.raises(ValueError, match="it depends on no trainable parameter of model"):
        accumulate_gradients(Slope(), group, lambda model, part: {"a": numbers(1).sum(), "b": numbers(1).sum()}, count)


# What is refused before anything has changed.


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple:
    """All that a call could change, as values to compare."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    state = repr(optimizer.state_dict()) if optimizer is not None else ""
    return repr(tensors), repr(gradients), modes, state, torch.get_rng_state().tolist()


def busy_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Dropout, BatchNorm, one module in evaluation mode, gradients in place, an optimizer with state."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    update_parameters(model, optimizer, split_batch(batch, 3), cross_entropy_sum)
    model[1].eval()
    accumulate_gradients(model, split_batch(batch, 3), cross_entropy_sum)
    return model, optimizer


def busy_batch() -> list:
    return split_batch((torch.randn(6, 3, generator=generator()), torch.tensor([0, 1, 0, 1, 0, 1])), 2)


class ClosureOptimizer(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


def own(function: Callable) -> Callable:
    """Mark what is to be called with (model, optimizer) to give the argument."""
    function.own = True
    return function


GROUP_FAULTS = {
    "no module": ({"model": "net"}, TypeError, r"model must be a torch.nn.Module; got str"),
    "nothing trainable": (
        {"model": own(lambda model, _: model.requires_grad_(False))},
        ValueError,
        "model has no trainable parameters",
    ),
    "no parameters": ({"model": nn.Dropout()}, ValueError, "model has no trainable parameters"),
    "a generator": (
        {"micro_batches": (part for part in busy_batch())},
        TypeError,
        "micro_batches must be a list.*generator",
    ),
    "a tensor": ({"micro_batches": torch.ones(4, 3)}, TypeError, "micro_batches must be a list.*Tensor"),
    "a dict": ({"micro_batches": {"a": torch.ones(4, 3)}}, TypeError, "micro_batches must be a list.*dict"),
    "a text": ({"micro_batches": "abc"}, TypeError, "micro_batches must be a list.*str"),
    "a loader": (
        {"micro_batches": DataLoader(TensorDataset(torch.ones(4, 3), torch.zeros(4).long()))},
        TypeError,
        "micro_batches must be a list.*DataLoader",
    ),
    "one batch": (
        {"micro_batches": own(lambda *_: busy_batch()[0])},
        ValueError,
        r"micro_batches must be a list of micro-batches; .*one batch \(inputs, targets\)",
    ),
    "nothing": ({"micro_batches": None}, TypeError, "micro_batches must be a list.*NoneType"),
    "lengths that disagree": (
        {"micro_batches": [*busy_batch(), (torch.ones(4, 3), torch.zeros(3).long())]},
        ValueError,
        r"batch holds tensors that disagree in length: \[4, 3\]",
    ),
    "no loss": ({"loss_sum": None}, TypeError, "loss_sum must be a function; got NoneType"),
    "no count": ({"count": 6}, TypeError, "count must be a function; got int"),
    "count of another loss": (
        {"loss_sum": token_cross_entropy_sum},
        ValueError,
        "count must be count_tokens, which token_cross_entropy_sum is summed for; got count_samples",
    ),
    "nan": ({"count": lambda part: math.nan}, ValueError, "count must return a finite number, 0 or more.*got nan"),
    "infinity": ({"count": lambda part: math.inf}, ValueError, "count must return a finite number.*got inf"),
    "negative": ({"count": lambda part: -2}, ValueError, "count must return a finite number.*got -2"),
    "no number": ({"count": lambda part: "2"}, ValueError, "count must return a finite number.*got '2'"),
    "none": ({"count": lambda part: None}, ValueError, "count must return a finite number.*got None"),
    "a vector": ({"count": lambda part: torch.ones(2)}, ValueError, "count must return a finite number.*got tensor"),
    "a complex": ({"count": lambda part: 2j}, ValueError, "count must return a finite number.*got 2j"),
    "nan in a term": (
        {"count": lambda part: {"a": 2, "b": math.nan}},
        ValueError,
        "count must return a finite.*'b': nan",
    ),
    "terms in terms": ({"count": lambda part: {"a": {"b": 2}}}, ValueError, "count must return a finite number"),
    "changing terms": (
        {
            "micro_batches": [(torch.ones(n, 3), torch.zeros(n).long()) for n in (1, 2)],
            "count": lambda part: {"a": 1} if len(part[0]) == 1 else {"b": 1},
        },
        ValueError,
        "count must return the same terms for every micro-batch",
    ),
    "terms and a number": (
        {
            "micro_batches": [(torch.ones(n, 3), torch.zeros(n).long()) for n in (1, 2)],
            "count": lambda part: {"a": 1} if len(part[0]) == 1 else 1,
        },
        ValueError,
        "count must return the same terms for every micro-batch",
    ),
    "a wrong scaler": ({"scaler": "cpu"}, TypeError, "scaler must be a torch.amp.GradScaler, or None; got str"),
    "a scale": ({"scaler": 4.0}, TypeError, "scaler must be a torch.amp.GradScaler, or None; got float"),
    "a mean": (
        {"loss_sum": lambda model, part: functional.cross_entropy(model(part[0]), part[1])},
        ValueError,
        "loss_sum must return the SUM",
    ),
}

TOTAL_FAULTS = {
    "too small": (5, "total_count must be at least this group's own count 6; got 5"),
    "nan": (math.nan, "total_count must be a finite number.*got nan"),
    "negative": (-1, "total_count must be a finite number.*got -1"),
    "no number": ("6", "total_count must be a finite number.*got '6'"),
    "of terms": ({"a": 6}, "total_count must have the terms that count returns"),
}

STEP_FAULTS = {
    "no optimizer": ({"optimizer": None}, TypeError, r"optimizer must be a torch.optim.Optimizer; got NoneType"),
    "a class": ({"optimizer": torch.optim.SGD}, TypeError, r"optimizer must be a torch.optim.Optimizer; got type"),
    "another model's": (
        {"optimizer": sgd(Slope())},
        ValueError,
        "optimizer holds none of model's trainable parameters",
    ),
    "a frozen part's": (
        {"optimizer": own(lambda model, _: torch.optim.SGD(model[0].requires_grad_(False).parameters(), lr=0.1))},
        ValueError,
        "optimizer holds none of model's trainable parameters",
    ),
    "LBFGS": (
        {"optimizer": own(lambda model, _: torch.optim.LBFGS(model.parameters()))},
        ValueError,
        "optimizer LBFGS needs a closure",
    ),
    "a closure": (
        {"optimizer": own(lambda model, _: ClosureOptimizer(model.parameters(), lr=0.1))},
        ValueError,
        "optimizer ClosureOptimizer needs a closure",
    ),
    "plateau": (
        {"scheduler": own(lambda _, optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))},
        ValueError,
        "scheduler ReduceLROnPlateau needs a metric",
    ),
    "no scheduler": ({"scheduler": 0.1}, TypeError, "scheduler must be a learning-rate scheduler; got float"),
    "another's scheduler": (
        {"scheduler": torch.optim.lr_scheduler.StepLR(sgd(Slope()), 1)},
        ValueError,
        "scheduler belongs to another optimizer",
    ),
    "an optimizer as scaler": (
        {"scaler": own(lambda _, optimizer: optimizer)},
        TypeError,
        r"scaler must be a torch.amp.GradScaler, or None; got Adam",
    ),
    "scaler": ({"scaler": object()}, TypeError, "scaler must be a torch.amp.GradScaler, or None; got object"),
    **{
        f"max_grad_norm {bad!r}": (
            {"max_grad_norm": bad},
            ValueError,
            f"max_grad_norm must be a number above 0, or None; got {bad!r}",
        )
        for bad in (math.nan, 0, 0.0, -1.0, -math.inf, True, False, "1")
    },
}


def given_faults(faults: dict, model: nn.Module, optimizer) -> dict:
    return {name: value(model, optimizer) if getattr(value, "own", False) else value for name, value in faults.items()}


@pytest.mark.parametrize("fault", GROUP_FAULTS)
@pytest.mark.parametrize("function", [accumulate_gradients, update_parameters])
def test_a_group_that_cannot_be_right_is_refused_before_anything_changes(function, fault):
    faults, error, says = GROUP_FAULTS[fault]
    model, optimizer = busy_model()
    arguments = {"model": model, "micro_batches": busy_batch(), "loss_sum": cross_entropy_sum, "count": count_samples}
    if function is update_parameters:
        arguments["optimizer"] = optimizer
        if fault in ("nothing trainable", "no parameters"):  # there the optimizer is looked at first
            says = "optimizer holds none of model's trainable parameters"
    arguments |= given_faults(faults, model, optimizer)
    before = everything(model, optimizer)
    for _ in range(2):  # refused again, also the second time
        with pytest.raises(error, match=says):
            function(**arguments)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("fault", TOTAL_FAULTS)
def test_a_total_that_cannot_be_right_is_refused_before_anything_changes(fault):
    total, says = TOTAL_FAULTS[fault]
    model, optimizer = busy_model()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=says):
        accumulate_gradients(model, busy_batch(), cross_entropy_sum, total_count=total)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("fault", STEP_FAULTS)
@pytest.mark.parametrize("function", [apply_gradients, update_parameters])
def test_a_step_that_cannot_be_right_is_refused_before_anything_changes(function, fault):
    faults, error, says = STEP_FAULTS[fault]
    model, optimizer = busy_model()
    arguments = {"model": model, "optimizer": optimizer}
    if function is update_parameters:
        arguments |= {"micro_batches": busy_batch(), "loss_sum": cross_entropy_sum}
    arguments |= given_faults(faults, model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(error, match=says):
        function(**arguments)
    assert everything(model, optimizer) == before


def test_a_step_without_gradients_is_refused_before_anything_changes():
    model, optimizer = busy_model()
    model.zero_grad()
    before = everything(model, optimizer)
    scaler = scaler_of()
    for given_scaler in (None, scaler):
        with pytest.raises(ValueError, match="no parameter of optimizer has a gradient; call accumulate_gradients"):
            apply_gradients(model, optimizer, scaler=given_scaler)
    assert everything(model, optimizer) == before
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got Adam"):
        apply_gradients(optimizer, model)


def test_other_kinds_of_numbers_and_sequences_are_taken():
    model = Slope()
    for micro_batches in (tuple(singles(1, 3)), deque(singles(1, 3))):
        for number in (1, 1.0, np.int64(1), np.float32(1), torch.tensor(1), torch.tensor([1.0])):
            count = functools.partial(lambda number, part: number, number)
            assert gradient(model, micro_batches, outputs_sum, count) == 2.0
            update = update_parameters(
                model, sgd(model, 1e-9), micro_batches, outputs_sum, count, max_grad_norm=np.float32(1)
            )
            assert update.count == 2


def test_a_scheduler_of_this_optimizer_is_taken_after_its_state_was_loaded():
    model = Slope()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    update_parameters(model, optimizer, singles(1), outputs_sum, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05


# What turns out wrong on the way.


def with_third(function: Callable) -> Callable:
    """Run `function` for the third micro-batch of three only: the one whose first input is 3."""

    def loss_sum(model, micro_batch):
        if micro_batch[0] == 3:
            return function(model, micro_batch)
        return outputs_sum(model, micro_batch)

    return loss_sum


LOSS_FAULTS = {
    "nan": (lambda model, part: outputs_sum(model, part) * math.nan, ValueError, "it was nan in micro-batch 3 of 3"),
    "infinite": (lambda model, part: outputs_sum(model, part) + math.inf, ValueError, "was inf in micro-batch 3 of 3"),
    "a vector": (lambda model, part: model(part), ValueError, r"loss_sum must return a scalar tensor.*shape \(1,\)"),
    "a number": (lambda model, part: 3.0, TypeError, "loss_sum must return a scalar tensor.*it returned 3.0"),
    "none": (lambda model, part: None, TypeError, "loss_sum must return a scalar tensor.*it returned None"),
    "without gradient": (
        lambda model, part: outputs_sum(model, part).detach(),
        ValueError,
        "loss_sum returned a loss without a gradient: it depends on no trainable parameter",
    ),
    "terms": (
        lambda model, part: {"a": outputs_sum(model, part)},
        ValueError,
        r"must return the same terms; loss_sum: \['a'\], count: one number",
    ),
    "an error": (lambda model, part: 1 / 0, ZeroDivisionError, "division"),
}


@pytest.mark.parametrize("fault", LOSS_FAULTS)
def test_a_fault_in_the_third_micro_batch_clears_the_gradients_and_leaves_the_rest(fault):
    function, error, says = LOSS_FAULTS[fault]
    model = Slope()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = everything(model, optimizer)
    loss_sum = with_third(function)
    with pytest.raises(error, match=says):
        update_parameters(model, optimizer, singles(1, 2, 3), loss_sum, scheduler=scheduler)
    assert everything(model, optimizer) == before
    assert model.weight.grad is None
    with pytest.raises(error, match=says):
        accumulate_gradients(model, singles(1, 2, 3), loss_sum)
    assert model.weight.grad is None
    assert not update_parameters(model, optimizer, singles(1, 2), loss_sum, scheduler=scheduler).skipped


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_are_named(switch):
    with switch(), pytest.raises(ValueError, match="loss without a gradient: this is inside no_grad"):
        accumulate_gradients(Slope(), singles(1), outputs_sum)


def test_every_micro_batch_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match="it was nan in micro-batch 1 of 3, inf in micro-batch 3 of 3"):
        accumulate_gradients(Slope(), singles(math.nan, 1, math.inf), outputs_sum)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_interrupt_leaves_no_gradients(place):
    model, optimizer = Slope(), None
    optimizer = sgd(model, momentum=0.9)

    def interrupted_sum(model, micro_batch):
        if micro_batch[0] == place:
            raise KeyboardInterrupt
        return outputs_sum(model, micro_batch)

    for call in (
        lambda: accumulate_gradients(model, singles(1, 2, 3), interrupted_sum),
        lambda: update_parameters(model, optimizer, singles(1, 2, 3), interrupted_sum),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert model.weight.grad is None
        assert model.weight.item() == 1.0
        assert model.training
        assert not optimizer.state
    assert not update_parameters(model, optimizer, singles(5), interrupted_sum).skipped


def test_parameters_of_the_loss_that_the_optimizer_holds_are_cleared_and_clipped_too():
    """Weights that belong to the loss, not to the model: a learnt temperature, for one."""
    model, temperature = Slope(), Slope()
    optimizer = torch.optim.SGD([*model.parameters(), *temperature.parameters()], lr=1.0)
    temperature.weight.grad = torch.tensor(100.0, dtype=torch.float64)

    def scaled_sum(model, micro_batch):
        return temperature(model(micro_batch)).sum()

    update = update_parameters(model, optimizer, singles(3, 5), scaled_sum, max_grad_norm=math.inf)
    assert update.grad_norm == pytest.approx(4 * math.sqrt(2))
    assert (model.weight.item(), temperature.weight.item()) == (-3.0, -3.0)
    assert temperature.weight.grad is None
    with pytest.raises(ValueError, match="must be finite"):
        update_parameters(model, optimizer, singles(1, math.inf), scaled_sum)
    assert temperature.weight.grad is None


@pytest.mark.parametrize("function", [accumulate_gradients, update_parameters])
@pytest.mark.parametrize(("model_on", "batch_on"), [("meta", "cpu"), ("cpu", "meta")])
def test_a_model_on_another_device_than_the_batch_is_named(function, model_on, batch_on):
    model = nn.Linear(3, 2, device=model_on)
    micro_batches = [tuple(part.to(batch_on) for part in micro_batch) for micro_batch in busy_batch()]
    rest = (sgd(model),) if function is update_parameters else ()
    says = f"model is on {model_on} but micro_batches are on {batch_on}; move them to one device"
    with pytest.raises(ValueError, match=says) as caught:
        function(model, *rest, micro_batches, cross_entropy_sum)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert model.weight.grad is None


def test_a_loss_that_moves_its_micro_batch_may_be_given_one_from_another_device():
    model = nn.Linear(3, 2)
    micro_batches = [tuple(part.to("meta") for part in micro_batch) for micro_batch in busy_batch()]

    def moved_sum(model, micro_batch):
        inputs, targets = (torch.zeros(part.shape, dtype=part.dtype) for part in micro_batch)
        return cross_entropy_sum(model, (inputs, targets))

    assert accumulate_gradients(model, micro_batches, moved_sum) > 0


# The probe for means.


def mean_of_samples(model, micro_batch):
    return model(micro_batch).mean()


def mean_of_tokens(model, micro_batch):
    losses, mask = micro_batch
    return (model(losses) * mask).sum() / mask.sum()


def mean_in_one_term(model, micro_batch):
    return {"a": outputs_sum(model, micro_batch), "b": mean_of_samples(model, micro_batch)}


class Losses:
    def __init__(self, reduction: str = "mean"):
        self.reduction = reduction

    def as_method(self, model, micro_batch):
        return getattr(model(micro_batch), self.reduction)()

    def __call__(self, model, micro_batch):
        return self.as_method(model, micro_batch)


def reduced(model, micro_batch, reduction):
    return getattr(model(micro_batch), reduction)()


def make_reduced(reduction: str) -> Callable:
    return lambda model, micro_batch: reduced(model, micro_batch, reduction)


MEANS = {
    "function": (mean_of_samples, count_samples, singles(2, 3)),
    "lambda": (lambda model, part: model(part).mean(), count_samples, [numbers(1, 2), numbers(3)]),
    "closure": (make_reduced("mean"), count_samples, singles(2, 3)),
    "bound method": (Losses().as_method, count_samples, singles(2, 3)),
    "callable object": (Losses(), count_samples, singles(2, 3)),
    "partial": (functools.partial(reduced, reduction="mean"), count_samples, singles(2, 3)),
    "wrapped": (functools.wraps(mean_of_samples)(lambda *given: mean_of_samples(*given)), count_samples, singles(2)),
    "tokens": (mean_of_tokens, count_mask, token_losses([1, 1, 1], [5])),
    "tokens, the first row without any": (
        mean_of_tokens,
        count_mask,
        [(numbers(9, 9, 1, 2).reshape(2, 2), numbers(0, 0, 1, 1).reshape(2, 2))],
    ),
    "one term of two": (
        mean_in_one_term,
        lambda part: {"a": len(part), "b": len(part)},
        singles(2, 3),
    ),
    "after a micro-batch without items": (mean_of_samples, count_samples, [numbers(), numbers(2)]),
    "of torch, over samples": (
        lambda model, part: functional.mse_loss(model(part), torch.zeros_like(part)),
        count_samples,
        singles(2, 3),
    ),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_mean_in_place_of_a_sum_is_named_each_time_it_is_given(kind):
    loss_sum, count, micro_batches = MEANS[kind]
    model = Slope()
    model.weight.grad = torch.tensor(7.0, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"loss_sum must return the SUM of the item losses.*reduction='sum'"):
            accumulate_gradients(model, micro_batches, loss_sum, count)
    with pytest.raises(ValueError, match="loss_sum must return the SUM"):
        update_parameters(model, sgd(model), micro_batches, loss_sum, count)
    assert model.weight.grad.item() == 7.0
    assert model.weight.item() == 1.0


SUMS = {
    "function": outputs_sum,
    "lambda": lambda model, part: model(part).sum(),
    "closure": make_reduced("sum"),
    "bound method": Losses("sum").as_method,
    "callable object": Losses("sum"),
    "partial": functools.partial(reduced, reduction="sum"),
    "mean times the number": lambda model, part: model(part).mean() * len(part),
    "sum over two outputs a sample": lambda model, part: model(torch.stack([part, part])).sum(),
    "zero": lambda model, part: 0 * model(part).sum(),
    "negative": lambda model, part: -model(part).sum(),
    "tiny": lambda model, part: 1e-30 * model(part).sum(),
    "an error for two samples": lambda model, part: model(part).sum() if len(part) == 1 else 1 / 0,
    "without a batch dimension": lambda model, part: model(part.reshape(())).sum(),
}


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_is_never_called_a_mean(kind):
    for micro_batches in (singles(2, 3), singles(0, 3), singles(-1)):
        accumulate_gradients(Slope(), micro_batches, SUMS[kind])


@given(data=st.data())
def test_no_sum_of_the_course_is_called_a_mean(data):
    kind = KINDS[data.draw(st.sampled_from(list(KINDS)))]
    accumulation._tried.clear()
    batch = kind.make_batch(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 10**6)), 0.5)
    accumulate_gradients(Net(data.draw(st.integers(0, 99))), [batch], kind.loss_sum, kind.count)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_contrastive_loss_is_never_called_a_mean(reduction):
    """K01: what looks across samples changes with a second sample, so the probe says nothing; hard negatives too."""
    batch = [torch.randn(6, 3, generator=generator(seed), dtype=torch.float64) for seed in range(3)]

    def with_negatives(model, micro_batch):
        one, other, hard = micro_batch
        scores = model(one) @ torch.cat([model(other), model(hard)]).T
        return functional.cross_entropy(scores, torch.arange(len(one)), reduction=reduction)

    model = Slope()
    accumulate_gradients(model, split_batch(tuple(batch), 3), with_negatives)
    if reduction == "sum":
        accumulate_gradients(model, split_batch(tuple(batch[:2]), 3), contrastive_sum)


def test_a_mean_of_means_may_be_chosen():
    """One item a micro-batch: its mean counts once, whatever its size."""
    model = Slope()
    loss = accumulate_gradients(model, [numbers(1, 1, 1), numbers(5)], mean_of_samples, lambda micro_batch: 1)
    assert loss == 3.0
    assert model.weight.grad.item() == 3.0


def test_a_mean_accepted_with_one_count_is_named_with_another():
    model = Slope()
    accumulate_gradients(model, singles(1, 2), mean_of_samples, lambda micro_batch: 1)
    with pytest.raises(ValueError, match="loss_sum must return the SUM"):
        accumulate_gradients(model, singles(1, 2), mean_of_samples)


def test_settings_tell_losses_of_one_code_apart():
    """A sum that was tried does not vouch for a mean from the same factory."""
    for make in (
        make_reduced,
        Losses,
        lambda reduction: Losses(reduction).as_method,
        lambda reduction: functools.partial(reduced, reduction=reduction),
        lambda reduction: functools.partial(make_reduced, reduction)(),
    ):
        accumulate_gradients(Slope(), singles(1, 2), make("sum"))
        with pytest.raises(ValueError, match="loss_sum must return the SUM"):
            accumulate_gradients(Slope(), singles(1, 2), make("mean"))


def loops() -> dict[str, Callable[[list], Callable]]:
    """Ways to write a loss inside a loop; each call is a new object that counts its calls in `calls`."""

    def written(calls):
        def loss_sum(model, micro_batch):
            calls.append(1)
            return outputs_sum(model, micro_batch)

        return loss_sum

    def counted(calls, step, model, micro_batch):
        calls.append(1)
        return outputs_sum(model, micro_batch)

    class Trainer:
        def __init__(self, calls):
            self.calls = calls

        def loss_sum(self, model, micro_batch):
            return written(self.calls)(model, micro_batch)

        __call__ = loss_sum

    step = iter(range(100))
    return {
        "lambda": lambda calls: lambda model, part: (calls.append(1), outputs_sum(model, part))[1],
        "def": written,
        "default": lambda calls: lambda model, part, calls=calls: written(calls)(model, part),
        "partial with the step": lambda calls: functools.partial(counted, calls, next(step)),
        "bound method": lambda calls: Trainer(calls).loss_sum,
        "callable object": lambda calls: Trainer(calls),
    }


@pytest.mark.parametrize("kind", loops())
def test_a_loop_probes_once_also_where_the_loss_is_written_in_the_loop(kind):
    """Two calls for the probe in the first update, none later; counts written in the loop make no difference."""
    make, calls, model = loops()[kind], [], Slope()
    optimizer = sgd(model)
    per_update = []
    for _ in range(4):
        update_parameters(model, optimizer, singles(1, 2, 3), make(calls), lambda micro_batch: len(micro_batch))
        per_update.append(len(calls))
        calls.clear()
    assert per_update == [5, 3, 3, 3]


def test_a_loss_that_failed_is_probed_again():
    """A first call that stopped on an error has shown nothing about the loss."""
    model = Slope()
    with pytest.raises(TypeError):
        accumulate_gradients(model, ["no tensor"], mean_of_samples, lambda micro_batch: 1.0)
    faults = ["not there yet"]

    def loss(model, micro_batch):
        return 1 / 0 if faults else mean_of_samples(model, micro_batch)

    with pytest.raises(ZeroDivisionError):
        accumulate_gradients(model, singles(1, 2), loss)
    faults.clear()
    with pytest.raises(ValueError, match="loss_sum must return the SUM"):
        accumulate_gradients(model, singles(1, 2), loss)


def test_the_memory_of_tried_losses_holds_no_data():
    big = torch.zeros(10)
    alive = []

    def loss_with_data():
        held = big.clone()
        alive.append(weakref.ref(held))
        return lambda model, micro_batch: outputs_sum(model, micro_batch) + held.sum()

    accumulate_gradients(Slope(), singles(1), loss_with_data())
    assert alive[-1]() is None


def test_a_loss_that_refers_to_itself_or_to_what_is_not_there_yet_is_fine():
    def loss(model, micro_batch, depth=1):
        return loss(model, micro_batch, depth - 1) if depth else later(model, micro_batch)

    with pytest.raises(NameError):
        accumulate_gradients(Slope(), singles(1), loss)
    later = outputs_sum
    assert accumulate_gradients(Slope(), singles(1, 3), loss) == 2.0


def test_the_probe_changes_neither_buffers_nor_randomness_nor_modes_nor_gradients():
    model, optimizer = busy_model()
    before = everything(model, optimizer)
    accumulation._tried.clear()
    items = [2, 2, 2]
    accumulation.probe_for_mean(model, busy_batch(), items, cross_entropy_sum, count_samples)
    assert everything(model, optimizer) == before
    assert len(accumulation._tried) == 1


def test_the_probe_sees_evaluation_mode_and_no_gradients():
    model, seen = nn.Sequential(Slope(), nn.Dropout(0.9)), []

    def watched_sum(model, micro_batch):
        seen.append((model.training, torch.is_grad_enabled(), len(micro_batch)))
        return outputs_sum(model, micro_batch)

    accumulate_gradients(model, [numbers(1, 2, 3)], watched_sum)
    assert seen == [(False, False, 1), (False, False, 2), (True, True, 3)]


def test_dropout_draws_the_same_numbers_with_and_without_the_probe():
    model = nn.Sequential(Slope(), nn.Dropout(0.5))
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        accumulate_gradients(model, [torch.arange(20, dtype=torch.float64)], outputs_sum)
        gradients.append(model[0].weight.grad.item())
    assert gradients[0] == gradients[1]


@pytest.mark.parametrize("evaluate", [False, True])
def test_inside_an_autocast_block_gradients_are_unharmed(evaluate):
    """Weights that were cast without gradients, by the probe or an evaluation, must not serve the next pass."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    micro_batches = busy_batch()

    def autocast_sum(model, micro_batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy_sum(model, micro_batch)

    accumulate_gradients(model, micro_batches, autocast_sum)
    expected = copy_gradients(model)
    assert len(expected) == 4
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if evaluate:
            mean_loss(model, micro_batches, cross_entropy_sum)
        accumulate_gradients(model, micro_batches, cross_entropy_sum)
    assert compare_gradients(expected, model).agree(1e-6)


def test_updates_inside_one_autocast_block_see_the_parameters_of_the_last():
    """Autocast keeps its casts until the block ends: without clearing, every later pass would use the first weights."""

    def losses(outer: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = sgd(model, 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
            return [update_parameters(model, optimizer, busy_batch(), autocast_sum).loss for _ in range(4)]

    def autocast_sum(model, micro_batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy_sum(model, micro_batch)

    inside = losses(True)
    assert inside == losses(False)
    assert len(set(inside)) == 4


# Evaluation.


def test_evaluation_changes_nothing():
    model, optimizer = busy_model()
    before = everything(model, optimizer)
    first = mean_loss(model, busy_batch(), cross_entropy_sum)
    assert mean_loss(model, busy_batch(), cross_entropy_sum) == first  # no dropout
    assert everything(model, optimizer) == before


def test_evaluation_is_in_evaluation_mode_and_weighs_by_items():
    model = nn.Sequential(Slope(), nn.Dropout(0.9))
    assert mean_loss(model, [numbers(1, 1, 1), numbers(5)], outputs_sum) == 2.0
    assert type(mean_loss(model, singles(1), outputs_sum)) is float


def test_evaluation_takes_loaders_and_generators_and_restores_what_they_draw():
    data = TensorDataset(torch.arange(10, dtype=torch.float64), torch.arange(10))
    loader = DataLoader(data, batch_size=3, shuffle=True)
    model = Slope()
    state = torch.get_rng_state()

    def first_sum(model, micro_batch):
        return outputs_sum(model, micro_batch[0])

    assert mean_loss(model, loader, first_sum) == pytest.approx(4.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert mean_loss(model, (part for part in singles(1, 2)), outputs_sum) == 1.5


def test_evaluation_says_what_is_not_finite_instead_of_raising():
    assert mean_loss(Slope(), singles(1, math.inf), outputs_sum) == math.inf
    assert math.isnan(mean_loss(Slope(), singles(1, math.nan), outputs_sum))


def test_evaluation_works_on_a_frozen_model():
    model = Slope().requires_grad_(False)
    assert mean_loss(model, singles(1, 3), outputs_sum) == 2.0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_error_during_evaluation_restores_modes_and_gradients(kind):
    model, optimizer = busy_model()
    before = everything(model, optimizer)

    def broken(model, micro_batch):
        torch.rand(3)
        raise kind

    with pytest.raises(kind):
        mean_loss(model, busy_batch(), broken)
    assert everything(model, optimizer) == before
    assert torch.is_grad_enabled()


class Adapter(nn.Module):
    """A module that folds its adapter into the weight in evaluation mode and takes it out again for training."""

    def __init__(self):
        super().__init__()
        self.weight, self.extra = (nn.Parameter(torch.tensor(value)) for value in (1.0, 0.5))
        self.folded = False

    def train(self, mode: bool = True):
        super().train(mode)
        if mode == self.folded:
            self.weight.data += -self.extra.data if mode else self.extra.data
            self.folded = not mode
        return self

    def forward(self, inputs):
        return self.weight * inputs + (0 if self.folded else self.extra * inputs)


class Stubborn(nn.BatchNorm1d):
    """A frozen BatchNorm, which stays in evaluation mode whatever it is told."""

    def train(self, mode: bool = True):
        return super().train(False)


def test_modules_that_do_more_than_set_a_flag_get_their_mode_back():
    model = nn.Sequential(Adapter(), Adapter(), Stubborn(1))
    model.train()
    model[1].eval()
    model[2].training = True
    modes = [module.training for module in model.modules()]
    assert modes == [True, True, False, True]
    batch = torch.ones(2, 1)
    assert mean_loss(model, [batch], outputs_sum) == pytest.approx(2.25, rel=1e-4)
    assert [module.training for module in model.modules()] == modes
    assert [model[0].folded, model[1].folded] == [False, True]
    assert [model[0].weight.item(), model[1].weight.item()] == [1.0, 1.5]


EVALUATION_FAULTS = {
    "no module": ({"model": "net"}, TypeError, r"model must be a torch.nn.Module; got str"),
    "a number": ({"micro_batches": 3}, TypeError, "micro_batches must be a list or a loader of them; got int"),
    "a tensor": ({"micro_batches": numbers(1, 2)}, TypeError, "micro_batches must be .*got Tensor"),
    "a dict": ({"micro_batches": {"a": numbers(1)}}, TypeError, "micro_batches must be .*got dict"),
    "no loss": ({"loss_sum": None}, TypeError, "loss_sum must be a function"),
    "count of another": ({"loss_sum": token_cross_entropy_sum}, ValueError, "count must be count_tokens"),
    "nan": ({"count": lambda part: math.nan}, ValueError, "count must return a finite number"),
    "a vector": ({"loss_sum": lambda model, part: model(part)}, ValueError, "must return a scalar tensor"),
    "a float": ({"loss_sum": lambda model, part: 1.0}, TypeError, "must return a scalar tensor"),
    "terms": ({"loss_sum": lambda model, part: {"a": part.sum()}}, ValueError, "must return the same terms"),
}


@pytest.mark.parametrize("fault", EVALUATION_FAULTS)
def test_an_evaluation_that_cannot_be_right_is_refused(fault):
    faults, error, says = EVALUATION_FAULTS[fault]
    arguments = {"model": Slope(), "micro_batches": singles(1, 2), "loss_sum": outputs_sum} | faults
    with pytest.raises(error, match=says):
        mean_loss(**arguments)


# Models and micro-batches that are built in odd ways.


def full_gradient(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    gradients = copy_gradients(model)
    model.zero_grad()
    return gradients


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, dtype=torch.float64)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_tied_parameters_are_counted_once():
    model, tokens = Tied(), torch.randint(7, (4, 5), generator=generator())
    batch = tokens, tokens.roll(-1, 1)
    full = full_gradient(model, functional.cross_entropy(model(tokens).flatten(0, 1), batch[1].flatten()))
    accumulate_gradients(model, split_batch(batch, 1), token_cross_entropy_sum, count_tokens)
    assert compare_gradients(full, model).agree(1e-12)
    norm = full["embedding.weight"].norm().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = split_batch(batch, 1), token_cross_entropy_sum, count_tokens
    update = update_parameters(model, optimizer, *arguments, max_grad_norm=math.inf)
    assert update.grad_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_the_optimizer_holds_twice_is_clipped_once():
    model, extra = Slope(), nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([model.weight, extra, extra], lr=1.0)

    def both_sum(model, micro_batch):
        return outputs_sum(model, micro_batch) + (extra * micro_batch).sum()

    update = update_parameters(model, optimizer, singles(3), both_sum, max_grad_norm=3.0 / math.sqrt(2))
    assert update.grad_norm == pytest.approx(3 * math.sqrt(2))
    assert model.weight.item() == pytest.approx(1 - 1.5, abs=1e-5)
    assert extra.item() == pytest.approx(1 - 2 * 1.5, abs=1e-5)  # stepped twice, as torch does


@pytest.mark.parametrize("max_grad_norm", [None, math.inf, 0.1])
@pytest.mark.parametrize("scaled", [False, True])
def test_sparse_gradients_are_summed_and_clipped_as_dense_ones(max_grad_norm, scaled):
    """Rows that several micro-batches touch are one entry of the norm."""
    rows = torch.tensor([[0, 1], [1, 2], [1, 1], [3, 0]])
    batch = rows, torch.tensor([0, 1, 1, 0])
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 2))
        scaler = scaler_of() if scaled else None
        update = update_parameters(
            model, sgd(model), split_batch(batch, 1), cross_entropy_sum, max_grad_norm=max_grad_norm, scaler=scaler
        )
        results.append((update, [parameter.detach().clone() for parameter in model.parameters()]))
        if scaled:  # an infinite loss must be skipped here too
            bad = update_parameters(
                model, sgd(model), [batch], lambda model, part: cross_entropy_sum(model, part) + math.inf, scaler=scaler
            )
            assert bad.skipped
    (dense_update, dense), (sparse_update, sparse) = results
    norms = dense_update.grad_norm, sparse_update.grad_norm
    assert norms == (None, None) if max_grad_norm is None else norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert relative_l2(sparse, dense) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_updated(dtype):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=dtype)
    before = model.weight.clone()
    micro_batches = [(inputs.to(dtype), targets) for inputs, targets in busy_batch()]
    expected = functional.cross_entropy(
        model(torch.cat([part[0] for part in micro_batches])).float(), torch.cat([part[1] for part in micro_batches])
    )
    update = update_parameters(model, sgd(model), micro_batches, cross_entropy_sum, max_grad_norm=1.0)
    assert update.loss == pytest.approx(expected.item(), rel=1e-5)
    assert not torch.equal(model.weight, before)
    assert model.weight.dtype == dtype


def test_a_model_in_evaluation_mode_stays_there_and_is_trained():
    model = nn.Sequential(Slope(), nn.Dropout(0.9)).eval()
    update_parameters(model, sgd(model), singles(1, 3), outputs_sum)
    assert not model.training
    assert model[0].weight.item() == pytest.approx(0.8)


def test_inputs_that_require_a_gradient_get_it():
    inputs = numbers(1, 2, 3).requires_grad_()
    model = Slope(2.0)
    assert gradient(model, split_batch(inputs, 2), outputs_sum) == 2.0
    assert inputs.grad.tolist() == pytest.approx([2 / 3] * 3)


def test_a_graph_shared_by_micro_batches_is_an_error_that_leaves_no_gradients():
    model = Slope()
    shared = model(numbers(1, 2)).exp()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        accumulate_gradients(model, split_batch(shared, 1), lambda model, part: model(part).exp().sum())
    assert model.weight.grad is None


def test_a_loss_that_evaluates_the_model_itself_is_fine():
    model = nn.Sequential(Slope(), nn.Dropout(0.0))
    seen = []

    def with_evaluation(model, micro_batch):
        loss = outputs_sum(model, micro_batch)
        seen.append(mean_loss(model, singles(1, 3), outputs_sum))
        return loss

    modes = [module.training for module in model.modules()]
    assert accumulate_gradients(model, singles(2, 4), with_evaluation) == 3.0
    assert model[0].weight.grad.item() == 3.0
    assert set(seen) == {2.0}
    assert [module.training for module in model.modules()] == modes


def test_a_loss_that_updates_another_model_is_fine():
    model, inner = Slope(), Slope()
    optimizer = sgd(inner)

    def with_inner_update(model, micro_batch):
        if torch.is_grad_enabled():
            update_parameters(inner, optimizer, singles(1), outputs_sum)
        return outputs_sum(model, micro_batch)

    assert gradient(model, singles(2, 4), with_inner_update) == 3.0
    assert inner.weight.item() == pytest.approx(0.8)
    assert inner.weight.grad is None


def test_a_loss_with_a_gradient_penalty_is_fine():
    """It differentiates inside, which needs gradients; the probe then says nothing."""
    model = Slope(2.0)

    def penalised_sum(model, micro_batch):
        inputs = micro_batch.detach().requires_grad_()
        outputs = model(inputs).sum()
        (slope,) = torch.autograd.grad(outputs, inputs, create_graph=True)
        return outputs + slope.square().sum()

    loss = accumulate_gradients(model, singles(1, 3), penalised_sum)
    assert loss == 4.0 + 4.0
    assert model.weight.grad.item() == 2.0 + 2 * 2.0


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


class Encoding(UserDict):
    """A mapping with its keys as attributes, as a tokenizer returns it."""

    def __getattr__(self, name):
        return self.data[name]


def test_named_tuples_and_mappings_with_attributes_arrive_as_they_are():
    inputs, targets = torch.randn(6, 3, generator=generator(), dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0, 1])
    model = nn.Linear(3, 2, dtype=torch.float64)
    full = full_gradient(model, functional.cross_entropy(model(inputs), targets))

    def by_attribute(model, micro_batch):
        scores = model(micro_batch.inputs)
        return functional.cross_entropy(scores, micro_batch.targets, reduction="sum")

    def as_keywords(model, micro_batch):
        return by_attribute(model, Pair(**micro_batch))

    def mean_of(loss_sum, model, micro_batch):
        return loss_sum(model, micro_batch) / count_samples(micro_batch)

    for batch, loss_sum in (
        (Pair(inputs, targets), by_attribute),
        (Encoding({"inputs": inputs, "targets": targets}), by_attribute),
        (Encoding({"inputs": inputs, "targets": targets}), as_keywords),
        ({"inputs": inputs, "targets": targets}, as_keywords),
    ):
        model.zero_grad()
        accumulate_gradients(model, split_batch(batch, 4), loss_sum)
        assert compare_gradients(full, model).agree(1e-12)
        with pytest.raises(ValueError, match="loss_sum must return the SUM"):
            accumulate_gradients(model, split_batch(batch, 4), functools.partial(mean_of, loss_sum))


def test_micro_batches_of_any_kind_are_taken_when_loss_and_count_know_them():
    """Texts, say, that the loss itself turns into tensors; the probe can't cut them and says nothing."""
    model = Slope()

    def lengths_sum(model, texts):
        return outputs_sum(model, numbers(*map(len, texts)))

    assert accumulate_gradients(model, [["a", "bbb"], ["cc"]], lengths_sum, len) == 2.0
    assert mean_loss(model, [["a", "bbb"], ["cc"]], lengths_sum, len) == 2.0

    def broken_sum(model, texts):
        raise RuntimeError("these texts cannot be read")

    with pytest.raises(RuntimeError, match="these texts cannot be read"):
        accumulate_gradients(model, [["a", "bbb"], ["cc"]], broken_sum, len)
    assert model.weight.grad is None


def test_a_compiled_wrapper_is_probed_as_the_model_inside():
    model, seen = Slope(), []

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = model

        def forward(self, inputs):
            return self._orig_mod(inputs)

    def watched_sum(given, micro_batch):
        seen.append(type(given).__name__)
        return outputs_sum(given, micro_batch)

    accumulate_gradients(Wrapper(), singles(1), watched_sum)
    assert seen == ["Slope", "Slope", "Wrapper"]


def test_losses_in_several_precisions_make_one_mean():
    """A micro-batch in float32 and one in float64 under one model in float32."""
    model = Slope(dtype=torch.float32)

    def mixed_sum(model, micro_batch):
        loss = outputs_sum(model, micro_batch)
        return loss.double() if micro_batch[0] > 1 else loss

    assert accumulate_gradients(model, [torch.tensor([1.0]), torch.tensor([3.0])], mixed_sum) == 2.0


class Scale(nn.Module):
    """One weight; two samples in evaluation need more room than one in training."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return (inputs * self.weight).relu().relu().sum(1)


def test_the_probe_is_no_part_of_what_a_budget_or_a_meter_counts():
    """A probe that ran out inside a budget dropped the gradients of an earlier group, and nobody was told."""
    model, batch = Scale(), (torch.randn(4, 1000), torch.randn(4))
    micro_batches = split_batch(batch, 1)

    def first(model, micro_batch):
        return (model(micro_batch[0]) - micro_batch[1]).square().sum()

    def second(model, micro_batch):
        return 3 * (model(micro_batch[0]) - micro_batch[1]).square().sum()

    def both():
        for loss_sum in (first, second):
            accumulate_gradients(model, micro_batches, loss_sum)

    accumulation._tried.clear()
    with measure_memory(model, batch) as with_probes:
        both()
    expected = model.weight.grad.clone()
    model.zero_grad()
    with measure_memory(model, batch) as without:
        both()
    assert with_probes.peak_bytes == without.peak_bytes
    model.zero_grad()
    accumulation._tried.clear()
    with memory_budget(without.peak_bytes, model, batch):
        both()
    assert torch.equal(model.weight.grad, expected)


class LossObject:
    """A loss that keeps its criterion as an attribute."""

    def __init__(self):
        self.criterion = nn.MSELoss(reduction="sum")

    def __call__(self, model, micro_batch):
        return self.criterion(model(micro_batch[0]), micro_batch[1])


def test_a_criterion_that_was_exchanged_is_probed_again():
    model, batch = nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4, 1))
    loss_sum = LossObject()
    accumulate_gradients(model, [batch], loss_sum)
    loss_sum.criterion = nn.MSELoss()
    with pytest.raises(ValueError, match="SUM of the item losses"):
        accumulate_gradients(model, [batch], loss_sum)


REDUCTION = "sum"


def reduced_by_a_global(model, micro_batch):
    return functional.mse_loss(model(micro_batch[0]), micro_batch[1], reduction=REDUCTION)


def test_a_global_setting_that_was_changed_is_probed_again(monkeypatch):
    model, batch = nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4, 1))
    accumulate_gradients(model, [batch], reduced_by_a_global)
    monkeypatch.setitem(globals(), "REDUCTION", "mean")
    with pytest.raises(ValueError, match="SUM of the item losses"):
        accumulate_gradients(model, [batch], reduced_by_a_global)


def test_a_hook_that_uses_and_clears_each_gradient_is_refused():
    """O04: a write through `.data` leaves the version as it was, but the gradient is gone."""
    model, batch = nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4, 1))

    def step(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match="steps inside"):
        accumulate_gradients(model, split_batch(batch, 2), squared_error_sum)


# ---- the precision of the sum ----------------------------------------------------------------------------------------


def weighted_sum(model, micro_batch):
    """A loss whose gradient with respect to the only weight is the sum of the inputs."""
    return model(micro_batch).float().sum()


def summed(values, dtype, sum_dtype, size=1):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    micro_batches = split_batch(torch.tensor(values, dtype=dtype).view(-1, 1), size)
    accumulate_gradients(
        model, micro_batches, weighted_sum, lambda part: 1, total_count=1 * len(micro_batches), sum_dtype=sum_dtype
    )
    assert model.weight.grad.dtype == dtype
    return model.weight.grad.item() * len(micro_batches)


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_ones_that_are_lost_beside_a_large_number_are_kept_in_a_float32_sum(dtype, large):
    """P01: 256 + 1 = 256 in bfloat16, 2048 + 1 = 2048 in float16."""
    values = [large] + [1.0] * 255
    assert summed(values, dtype, None) == large
    assert summed(values, dtype, torch.float32) == large + 256  # 255 ones, rounded once
    assert summed(values, dtype, torch.float64) == large + 256


def test_a_thousand_thousandths_arrive():
    """P01: 1.0 + 1000 x 0.001 stays 1.0 in bfloat16."""
    total = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        total += torch.tensor(0.001, dtype=torch.bfloat16)
    assert total.item() == 1.0
    # 24 more than 1000, so that the mean is over a power of two, which rounds nothing.
    assert summed([1.0] + [0.001] * 1023, torch.bfloat16, None) < 1.6
    assert summed([1.0] + [0.001] * 1023, torch.bfloat16, torch.float32) == pytest.approx(2.02, rel=2**-8)


def half_precision_net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, dtype=dtype), nn.Tanh(), nn.Linear(16, 3, dtype=dtype))


def half_precision_batch(dtype=torch.bfloat16):
    targets = torch.randint(3, (64,), generator=generator())
    return torch.randn(64, 8, generator=generator()).to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_sum_is_nearer_to_the_sum_in_float64(dtype):
    gradients = {}
    for sum_dtype in (None, torch.float32, torch.float64):
        model = half_precision_net(dtype)
        accumulate_gradients(model, split_batch(half_precision_batch(dtype), 1), cross_entropy_sum, sum_dtype=sum_dtype)
        gradients[sum_dtype] = copy_gradients(model)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    error = {s: compare_gradients(gradients[torch.float64], found).relative_error for s, found in gradients.items()}
    assert error[None] > 5 * error[torch.float32]
    assert error[torch.float32] < torch.finfo(dtype).eps


def test_a_parameter_of_full_precision_and_a_single_micro_batch_are_left_as_they_are():
    for dtype, size in ((torch.float32, 4), (torch.float64, 4), (torch.bfloat16, 64)):
        gradients = []
        for sum_dtype in (None, torch.float32):
            model = half_precision_net(dtype)
            seen = []
            model[0].weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad is not None))
            parts = split_batch(half_precision_batch(dtype), size)

            def loss_sum(model, micro_batch):
                assert not model[2].weight._post_accumulate_grad_hooks  # nothing is summed elsewhere
                return cross_entropy_sum(model, micro_batch)

            accumulate_gradients(model, parts, loss_sum, sum_dtype=sum_dtype)
            gradients.append(copy_gradients(model))
            assert seen == [True] * len(parts)
        assert all(torch.equal(gradients[0][name], value) for name, value in gradients[1].items())


def test_what_lies_in_grad_is_a_part_of_the_sum_and_a_second_group_adds_up():
    model, batch = half_precision_net(), half_precision_batch()
    model[0].bias.grad = torch.full_like(model[0].bias, 256.0)
    model[2].requires_grad_(False)
    model[2].bias.grad = torch.ones_like(model[2].bias)  # of an earlier group, before it was frozen
    accumulate_gradients(model, split_batch(batch, 1), cross_entropy_sum, sum_dtype=torch.float32)
    once = half_precision_net()
    accumulate_gradients(once, split_batch(batch, 1), cross_entropy_sum, sum_dtype=torch.float64)
    expected = (once[0].bias.grad.double() + 256).to(torch.bfloat16)
    assert compare_gradients({"x": expected}, {"x": model[0].bias.grad}).agree(2**-8)
    assert torch.equal(model[2].bias.grad, torch.ones_like(model[2].bias))
    first = copy_gradients(once)
    accumulate_gradients(once, split_batch(batch, 1), cross_entropy_sum, sum_dtype=torch.float32)
    assert compare_gradients({name: 2 * value for name, value in first.items()}, once).agree(2**-7)


def test_what_lies_in_grad_is_not_rounded_with_the_first_micro_batch():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.full_like(model.weight, 256.0)
    ones = split_batch(torch.ones(2, 1, dtype=torch.bfloat16), 1)
    accumulate_gradients(model, ones, weighted_sum, lambda part: 0.5, sum_dtype=torch.float32)
    assert model.weight.grad.item() == 258  # 256 + 1 + 1; rounded after each it stays 256


def test_one_gradient_at_a_time_is_alive_beside_the_sums():
    model, batch = nn.Linear(64, 64, dtype=torch.bfloat16), torch.ones(2, 64, dtype=torch.bfloat16)

    def peak(sum_dtype):
        model.zero_grad()
        with measure_memory(model, batch) as meter:
            accumulate_gradients(model, split_batch(batch, 1), weighted_sum, sum_dtype=sum_dtype)
        return meter.peak_bytes

    peak(None)  # the probe for means is behind us
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert peak(torch.float32) - peak(None) <= 2 * num_parameters + 64  # and no copy of a gradient in float32


def test_one_model_may_mix_precisions_tie_parameters_and_have_sparse_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 4, sparse=True, dtype=torch.bfloat16)
            self.inner, self.again = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.bfloat16)
            self.again.weight = self.inner.weight
            self.head = nn.Linear(4, 3)

        def forward(self, tokens):
            return self.head(self.again(self.inner(self.table(tokens))).float())

    tokens, targets = torch.randint(5, (64,), generator=generator()), torch.randint(3, (64,), generator=generator(1))
    gradients = {}
    for sum_dtype in (torch.float32, torch.float64):
        model = Tied()
        accumulate_gradients(model, split_batch((tokens, targets), 1), cross_entropy_sum, sum_dtype=sum_dtype)
        assert model.table.weight.grad.is_sparse
        assert {p.dtype: p.grad.dtype for p in model.parameters()} == {d: d for d in (torch.bfloat16, torch.float32)}
        gradients[sum_dtype] = copy_gradients(model)
    assert compare_gradients(gradients[torch.float64], gradients[torch.float32]).agree(1e-3)


def test_an_update_passes_the_precision_of_the_sum_on():
    moved = {}
    for sum_dtype in (None, torch.float32):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        nn.init.zeros_(model.weight)
        parts = split_batch(torch.tensor([256.0] + [1.0] * 255, dtype=torch.bfloat16).view(-1, 1), 1)
        update_parameters(model, sgd(model, lr=1.0), parts, weighted_sum, sum_dtype=sum_dtype)
        moved[sum_dtype] = -model.weight.item()
    assert moved == {None: 1.0, torch.float32: 2.0}


def test_a_float32_sum_takes_two_bytes_more_for_each_parameter_and_one_micro_batch_none():
    model, batch = half_precision_net(), half_precision_batch()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def peak(size, sum_dtype):
        model.zero_grad()
        with measure_memory(model, batch) as meter:
            accumulate_gradients(model, split_batch(batch, size), cross_entropy_sum, sum_dtype=sum_dtype)
        return meter.peak_bytes

    peak(8, None)  # the probe for means is behind us
    assert 2 * num_parameters - 64 <= peak(8, torch.float32) - peak(8, None) <= 2 * num_parameters + 64
    assert peak(64, torch.float32) == peak(64, None)


def test_an_error_in_the_group_takes_the_hooks_away_and_leaves_no_gradients():
    model, parts = half_precision_net(), split_batch(half_precision_batch(), 8)

    def failing(model, micro_batch):
        if micro_batch is parts[3]:
            raise KeyError("later")
        return cross_entropy_sum(model, micro_batch)

    with pytest.raises(KeyError):
        accumulate_gradients(model, parts, failing, sum_dtype=torch.float32)
    assert copy_gradients(model) == {}
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_an_optimizer_in_backward_is_refused_under_a_float32_sum_too():
    model, parts = half_precision_net(), split_batch(half_precision_batch(), 8)

    def step(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match="steps inside"):
        accumulate_gradients(model, parts, cross_entropy_sum, sum_dtype=torch.float32)


@pytest.mark.parametrize("wrong", ["float32", torch.int32, 32, float])
def test_what_is_no_precision_is_refused_before_anything_changes(wrong):
    model, parts = half_precision_net(), split_batch(half_precision_batch(), 8)
    accumulate_gradients(model, parts, cross_entropy_sum)
    before = copy_gradients(model)
    with pytest.raises(TypeError, match="sum_dtype must be a floating-point type"):
        accumulate_gradients(model, parts, cross_entropy_sum, sum_dtype=wrong)
    with pytest.raises(TypeError, match="sum_dtype must be a floating-point type"):
        update_parameters(model, sgd(model), parts, cross_entropy_sum, sum_dtype=wrong)
    assert all(torch.equal(before[name], value) for name, value in copy_gradients(model).items())


def test_an_overflow_under_a_scaler_is_seen_through_a_float32_sum():
    model, parts = half_precision_net(), split_batch(half_precision_batch(), 8)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), sgd(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parts[2] = (torch.full_like(parts[2][0], math.inf), parts[2][1])
    update = update_parameters(model, optimizer, parts, cross_entropy_sum, scaler=scaler, sum_dtype=torch.float32)
    assert update.skipped
    assert all(map(torch.equal, before, model.parameters()))
