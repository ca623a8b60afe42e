"""Fit an effective batch to a memory budget before anything runs: the micro-batch, the steps, and how close it is.

`predict_memory` says what an update with micro-batches of one size needs. Here that question is asked at a few sizes
until the largest one that fits is known, and the next one is known not to. The effective batch never changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from course_lib import interactions
from course_lib.batches import Batch, batch_size, map_tensors, positive_int, tensors_of
from course_lib.interactions import cross_sample_layers
from course_lib.losses import LossSum
from course_lib.memory import MemoryPredictor, MemoryReport, format_bytes, parse_bytes

Progress = Callable[[int, int], None]


def balanced_sizes(effective_batch_size: int, accumulation_steps: int) -> list[int]:
    """Cut a number of samples into steps that differ by one at most, the larger ones first: (10, 3) -> [4, 3, 3].

    Raises TypeError or ValueError unless both are whole numbers, at least 1, and there is a sample for each step.
    """
    samples = positive_int("effective_batch_size", effective_batch_size)
    steps = positive_int("accumulation_steps", accumulation_steps)
    if steps > samples:
        raise ValueError(f"accumulation_steps must be at most {samples}, one sample a step; got {steps}")
    size, larger = divmod(samples, steps)
    return [size + 1] * larger + [size] * (steps - larger)


def plan_batch(
    model: nn.Module,
    batch: Batch,
    loss_sum: LossSum,
    optimizer: Optimizer,
    *,
    budget: int | str,
    device: str | None = None,
    find_interactions: bool = False,
    progress: Progress | None = None,
) -> BatchPlan:
    """Find the largest micro-batch with which one update on `batch` fits into `budget`; nothing is allocated or run.

    batch: the effective batch, all of it: (inputs, targets) or another structure of tensors, real or on "meta".
    budget: bytes or text such as "24 GiB", held against all tensors that are alive at once. What else takes memory
    needs room beside it: kernel scratch, and on a GPU the CUDA context and what the allocator cannot use.
    device: whose rules the predictions follow, "cpu" or "cuda"; see `predict_memory`.
    find_interactions: also run up to 16 samples, to warn where samples meet in a layer or in the loss itself; see
    `interactions.find_interactions`. Without it BatchNorm alone is known, by its class.
    progress: called as progress(predictions made, micro-batch size) before each prediction.

    The whole batch in one pass is tried first. Otherwise any size up to half of the batch is a candidate: a larger one
    would need two passes all the same. The size that is found has been predicted to fit and the next one not to; the
    boundary is looked for where the line through what is known meets the budget, so four to six predictions are usual.
    The steps are then balanced: nine samples in at most fours are 3, 3, 3 and not 4, 4, 1.

    Raises BudgetTooSmall (a ValueError) when not even the smallest micro-batch fits: one sample, or two where
    BatchNorm is in training mode, since one sample has no statistics of a batch. Raises ValueError or TypeError for a
    budget that is no size, and as `predict_memory` does.
    """
    budget_bytes = parse_bytes(budget, "budget")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of (predictions made, size); got {type(progress).__name__}")
    predictor = MemoryPredictor(model, batch, loss_sum, optimizer, device=device)
    if find_interactions and (without_data := [t for t in tensors_of(batch) if t.is_meta]):
        raise ValueError(f"find_interactions runs the model; batch must hold data, {len(without_data)} tensors do not")
    normalised = bool(cross_sample_layers(model))
    search = _Search(predictor.predict, predictor.batch_size, budget_bytes, progress)
    plan = search.plan(smallest=2 if normalised else 1)
    if plan is None:
        floor = search.reports[search.smallest]
        changes = _helpful_changes(model, batch, loss_sum, optimizer, floor, budget_bytes, device)
        raise BudgetTooSmall(budget_bytes, floor, changes)
    warnings = [*_warnings_for(plan, normalised), *_unseen(search.reports[plan.micro_batch_size])]
    if find_interactions and plan.accumulation_steps > 1:
        warnings += map(str, interactions.find_interactions(model, batch, loss_sum))
    return replace(plan, warnings=tuple(warnings))


def plan_from_predictions(
    predict: Callable[[int], MemoryReport], effective_batch_size: int, *, budget: int | str, smallest: int = 1
) -> BatchPlan:
    """Plan as `plan_batch` does, with predictions from `predict(micro_batch_size)`, such as a table of earlier ones.

    Raises BudgetTooSmall, without changes that would help, when not even micro-batches of `smallest` samples fit.
    """
    budget_bytes = parse_bytes(budget, "budget")
    effective = positive_int("effective_batch_size", effective_batch_size)
    search = _Search(predict, effective, budget_bytes)
    plan = search.plan(smallest=positive_int("smallest", smallest))
    if plan is None:
        raise BudgetTooSmall(budget_bytes, search.reports[search.smallest], ())
    return replace(plan, warnings=tuple(_warnings_for(plan, normalised=smallest > 1)))


@dataclass(frozen=True, eq=False, repr=False)
class BatchPlan:
    """How to take one update within a budget: micro-batches, accumulation steps, and the predicted bytes.

    `reports` holds each prediction that was made, by micro-batch size; everything else follows from it.
    `micro_batch_size` is the balanced size to use, `largest_micro_batch_size` the largest one that fits: both take the
    same number of steps. A balanced cut has at most half of the batch in a micro-batch, so sizes between half and all
    are no candidates. `next_micro_batch_size` is the next candidate above, which does not fit (None if the whole batch
    fits). Printed as a table; neither the table nor the repr holds a time.
    """

    effective_batch_size: int
    budget_bytes: int
    largest_micro_batch_size: int
    next_micro_batch_size: int | None
    floor_micro_batch_size: int
    reports: Mapping[int, MemoryReport]
    warnings: tuple[str, ...] = ()

    @property
    def is_half(self) -> bool:
        """Whether the largest micro-batch is half of the batch, and only the whole batch comes next."""
        return self.next_micro_batch_size == self.effective_batch_size > 1

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return math.ceil(self.effective_batch_size / self.largest_micro_batch_size)

    @property
    def micro_batch_size(self) -> int:
        """The size of the largest micro-batch once the steps are balanced."""
        return math.ceil(self.effective_batch_size / self.accumulation_steps)

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The size of each micro-batch, in order; they add up to the effective batch."""
        return balanced_sizes(self.effective_batch_size, self.accumulation_steps)

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of an update of this plan, kernel scratch included where it was calibrated."""
        return self.reports[self.micro_batch_size].needed_bytes

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes of that peak by category."""
        return dict(self.reports[self.micro_batch_size].at_peak)

    @property
    def peak_moment(self) -> str:
        """When the peak is reached, in words."""
        return self.reports[self.micro_batch_size].peak_moment

    @property
    def largest_peak_bytes(self) -> int:
        """The predicted peak with micro-batches of `largest_micro_batch_size`."""
        return self.reports[self.largest_micro_batch_size].needed_bytes

    @property
    def next_peak_bytes(self) -> int | None:
        """The predicted peak of the next larger candidate, above the budget; None if the whole batch fits."""
        return None if self.next_micro_batch_size is None else self.reports[self.next_micro_batch_size].needed_bytes

    @property
    def floor_bytes(self) -> int:
        """The predicted peak of the smallest micro-batch: no accumulation gets below."""
        return self.reports[self.floor_micro_batch_size].needed_bytes

    @property
    def num_predictions(self) -> int:
        """How many predictions the plan took."""
        return len(self.reports)

    def split(self, batch: Batch) -> list[Batch]:
        """Cut the effective batch as planned: a list of micro-batches for `update_parameters`, views of the batch.

        Raises ValueError when the batch has another number of samples than the plan.
        """
        if batch_size(batch) != self.effective_batch_size:
            raise ValueError(
                f"batch must have {self.effective_batch_size} samples, as planned; it has {batch_size(batch)}"
            )
        starts = [0]
        for size in self.micro_batch_sizes:
            starts.append(starts[-1] + size)
        return [
            map_tensors(lambda tensor, start=start, end=end: tensor[start:end], batch)
            for start, end in pairwise(starts)
        ]

    def __repr__(self) -> str:
        return (
            f"BatchPlan({self.sentence}, peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{self.num_predictions} predictions)"
        )

    @property
    def sentence(self) -> str:
        """The micro-batches of one update in words, such as "64 = 4 x 16" or "10 = 1 x 4 + 2 x 3"."""
        return f"{self.effective_batch_size} = {_in_words(self.micro_batch_sizes)}"

    def __str__(self) -> str:
        """A table: what to set, the peak by category, the boundary, the floor, and what to watch out for."""
        report = self.reports[self.micro_batch_size]
        rows = [
            ("micro-batch size", str(self.micro_batch_size), ""),
            ("accumulation steps", str(self.accumulation_steps), self.sentence),
            (),
            *((_words(category), format_bytes(size), "") for category, size in report.at_peak.items() if size),
        ]
        if report.scratch_bytes:
            rows.append(("kernel scratch", format_bytes(report.scratch_bytes), ""))
        rows += [
            ("predicted peak", format_bytes(self.peak_bytes), report.peak_moment),
            ("budget", format_bytes(self.budget_bytes), ""),
            (),
        ]
        rows += [(f"micro-batches of {size}", format_bytes(peak), note) for size, peak, note in self._neighbours()]
        text = _table(rows)
        return "\n".join([text, *(f"note: {warning}" for warning in self.warnings)])

    def _neighbours(self) -> list[tuple[int, int, str]]:
        """Return the sizes that show where the boundary is: (size, peak, what it is), in order of size."""
        notes = {self.floor_micro_batch_size: "the floor", self.largest_micro_batch_size: "the largest that fits"}
        if self.next_micro_batch_size is not None:
            over = self.next_peak_bytes - self.budget_bytes
            notes[self.next_micro_batch_size] = f"too much by {format_bytes(over)}"
        if self.largest_micro_batch_size == self.floor_micro_batch_size:
            notes[self.floor_micro_batch_size] = "the floor, and the largest that fits"
        return [(size, self.reports[size].needed_bytes, notes[size]) for size in sorted(notes)]


@dataclass(frozen=True)
class Change:
    """One way to lower the floor: what it is, and the peak of the smallest micro-batch with it."""

    name: str
    peak_bytes: int
    fits: bool


class BudgetTooSmall(ValueError):
    """No micro-batch fits the budget. Carries the floor by category and the changes that were tried on paper.

    `changes` are in the order in which they touch the training: the same numbers at more time first, another optimizer
    last, all of them together at the end if none is enough alone.
    """

    def __init__(self, budget_bytes: int, floor: MemoryReport, changes: Sequence[Change]) -> None:
        self.budget_bytes = budget_bytes
        self.floor_micro_batch_size = floor.micro_batch_size
        self.floor_bytes = floor.needed_bytes
        self.floor_at_peak = dict(floor.at_peak)
        self.changes = tuple(changes)
        super().__init__(self._message())

    @property
    def smallest_change(self) -> Change | None:
        """The first change that fits, the one that touches the training least; None if none does."""
        return next((change for change in self.changes if change.fits), None)

    def _message(self) -> str:
        parts = [f"{_words(name)} {format_bytes(size, 2)}" for name, size in self.floor_at_peak.items() if size]
        short = format_bytes(self.floor_bytes - self.budget_bytes, 2)
        lines = [
            f"budget {format_bytes(self.budget_bytes, 2)} is {short} too small for any micro-batch: even with "
            f"{_of(self.floor_micro_batch_size)} the peak is {format_bytes(self.floor_bytes, 2)} ({', '.join(parts)})."
        ]
        if self.smallest_change is not None:
            change = self.smallest_change
            lines.append(f"The smallest change that helps: {change.name}, {format_bytes(change.peak_bytes, 2)}.")
        elif self.changes:
            lines.append("None of these is enough:")
        others = [change for change in self.changes if change is not self.smallest_change]
        if others:
            listed = ", ".join(f"{change.name}: {format_bytes(change.peak_bytes, 2)}" for change in others)
            lines.append(f"Also tried: {listed}." if self.smallest_change else f"{listed}.")
        return " ".join(lines)


# The search.


class _Search:
    """Asks for predictions, each size once, until the boundary is known."""

    def __init__(
        self,
        predict: Callable[[int], MemoryReport],
        effective_batch_size: int,
        budget_bytes: int,
        progress: Progress | None = None,
    ) -> None:
        self.predict, self.effective, self.budget, self.progress = predict, effective_batch_size, budget_bytes, progress
        self.reports: dict[int, MemoryReport] = {}
        self.smallest = 1

    def report(self, size: int) -> MemoryReport:
        if size not in self.reports:
            if self.progress is not None:
                self.progress(len(self.reports), size)
            self.reports[size] = self.predict(size)
        return self.reports[size]

    def peak(self, size: int) -> int:
        return self.report(size).needed_bytes

    def plan(self, smallest: int) -> BatchPlan | None:
        """Return the plan, or None if not even micro-batches of `smallest` samples fit."""
        whole = self.effective
        self.smallest = smallest = min(smallest, whole)
        half = max(math.ceil(whole / 2), smallest)
        if self.peak(whole) <= self.budget:
            # The first question of every learner, and with many parameters its answer is a surprise.
            self.peak(half)
            self.peak(smallest)
            return self._plan(whole, None)
        if self.peak(smallest) > self.budget:
            return None
        largest, beyond = self._boundary(smallest, half)
        plan = self._plan(largest, whole if beyond is None else beyond)
        self.peak(plan.micro_batch_size)
        return replace(plan, reports=dict(sorted(self.reports.items())))

    def _plan(self, largest: int, beyond: int | None) -> BatchPlan:
        reports = dict(sorted(self.reports.items()))
        return BatchPlan(self.effective, self.budget, largest, beyond, self.smallest, reports)

    def _boundary(self, low: int, high: int) -> tuple[int, int | None]:
        """Return the largest size that fits, from `low` (which does) to `high`, and the next one if it is within.

        The peak is the largest of many straight lines, one for each moment of an update: piecewise linear and convex.
        A line through two sizes that fit meets the budget at or beyond the boundary, one through a size that fits and
        one that does not meets it at or before. Where this is slow, or wrong, halving the bracket finds the end.
        """
        fit, over = [low], []  # sizes, the nearest to the boundary last
        slow, halving = 0, False
        while fit[-1] < (over[-1] - 1 if over else high):
            first, last = fit[-1] + 1, (over[-1] - 1 if over else high)
            estimate = self._estimate(fit, over)
            halving = estimate is None or (slow > 2 and not halving)  # slow: the peak is no such curve
            size = (first + last) // 2 if halving else min(max(estimate, first), last)
            (fit if self.peak(size) <= self.budget else over).append(size)
            remaining = (over[-1] if over else high + 1) - fit[-1] - 1
            slow += 2 * remaining > last - first + 1
        return fit[-1], over[-1] if over else None

    def _estimate(self, fit: list[int], over: list[int]) -> int | None:
        """Return the size at which the budget is reached, by the best of the lines that are known."""
        if len(fit) == 1 and not over:
            return self._first_estimate(fit[0])
        upper = [self._meets(*sizes[-2:]) for sizes in (fit, over) if len(sizes) > 1]
        if len(over) == 1:
            upper.append(self._meets_from(over[0]))
        upper = [size for size in upper if size is not None and (not over or fit[-1] <= size < over[-1])]
        if upper:
            return min(upper)
        if over:
            return self._meets(fit[-1], over[-1])
        return None

    def _meets(self, one: int, other: int) -> int | None:
        """Return the size, rounded down, at which the line through two sizes meets the budget."""
        rise = self.peak(other) - self.peak(one)
        if rise * (other - one) <= 0:
            return None
        return one + (self.budget - self.peak(one)) * (other - one) // rise

    def _meets_from(self, size: int) -> int | None:
        """The same for the line through one size whose slope is what each of its samples takes at its peak."""
        at_peak = self.report(size).at_peak
        growing = sum(at_peak[name] for name in _GROWING)
        return size - (self.peak(size) - self.budget) * size // growing - 1 if growing > 0 else None

    def _first_estimate(self, low: int) -> int | None:
        """Guess from the whole batch how much each sample adds to what the smallest micro-batch keeps."""
        whole = self.report(self.effective).at_peak
        growing = sum(whole[name] for name in _GROWING)
        standing = sum(size for name, size in self.report(low).at_peak.items() if name not in _GROWING)
        if growing <= 0:
            return None
        return (self.budget - standing - (self.report(low).scratch_bytes or 0)) * self.effective // growing


_GROWING = ("activations", "temporaries")


# What to watch out for.


def _warnings_for(plan: BatchPlan, normalised: bool) -> Iterator[str]:
    whole, half = plan.effective_batch_size, math.ceil(plan.effective_batch_size / 2)
    if whole > half and half in plan.reports:
        one_pass, two_passes = plan.reports[whole].needed_bytes, plan.reports[half].needed_bytes
        if two_passes > one_pass:
            yield (
                f"two micro-batches would need more than one: {format_bytes(two_passes)} against "
                f"{format_bytes(one_pass)}, since the first one's gradients stay alive"
            )
    if normalised and plan.accumulation_steps > 1:
        smallest = min(plan.micro_batch_sizes)
        yield (
            f"BatchNorm would see {smallest} sample{'s' * (smallest > 1)} at a time, not {whole}: the update is not "
            f"that of the whole batch{', and some layers refuse a single sample' if smallest == 1 else ''}"
        )


def _unseen(report: MemoryReport) -> Iterator[str]:
    """Say which kernels take more than the rest of the model's memory beside the predicted peak: those of LSTM."""
    if report.scratch_bytes is None and not report.measured:
        yield from (note for note in report.assumptions if note.startswith("LSTM ("))


# What would help when nothing fits.


def _helpful_changes(
    model: nn.Module,
    batch: Batch,
    loss_sum: LossSum,
    optimizer: Optimizer,
    floor: MemoryReport,
    budget_bytes: int,
    device: str | None,
) -> list[Change]:
    """Predict the floor with each change that this model allows, and with all of them where one is not enough."""
    shorter, how = _shorter_inputs(batch)
    leaner = SGD([p for group in optimizer.param_groups for p in group["params"]], lr=1e-3)
    options = [
        ("checkpoint the repeated blocks", {"checkpointing": True}, bool(_repeated_blocks(model))),
        (how, {"batch": shorter}, shorter is not None),
        ("plain SGD, which keeps no state", {"optimizer": leaner}, floor.at_peak["optimizer_state"] > 0),
    ]
    usual = {"batch": batch, "optimizer": optimizer, "checkpointing": False}
    changes, together = [], {}

    def peak_with(chosen: dict[str, Any]) -> int | None:
        settings = usual | chosen
        try:
            with checkpointed(model) if settings["checkpointing"] else nullcontext():
                predictor = MemoryPredictor(model, settings["batch"], loss_sum, settings["optimizer"], device=device)
                return predictor.predict(floor.micro_batch_size).needed_bytes
        except Exception:  # this model does not take shorter inputs, or its blocks cannot be run again
            return None

    for name, chosen, possible in options:
        peak = peak_with(chosen) if possible else None
        if peak is not None and peak < floor.needed_bytes:
            changes.append(Change(name, peak, peak <= budget_bytes))
            together |= chosen
    if len(changes) > 1 and not any(change.fits for change in changes):
        peak = peak_with(together)
        if peak is not None:
            changes.append(Change("all of these together", peak, peak <= budget_bytes))
    return changes


def _shorter_inputs(batch: Batch) -> tuple[Batch | None, str]:
    """Return the batch with sequences or images of half the length, where it looks like such, and what was done.

    (B, T) and (B, T, features) with one T throughout are sequences; (B, C, H, W) and targets (B, H, W) are images.
    """
    tensors = tensors_of(batch)
    images = [tensor for tensor in tensors if tensor.ndim == 4]
    if images:
        sides = images[0].shape[-2:]
        if min(sides) < 2 or any(t.ndim > 2 and t.shape[-2:] != sides for t in tensors):
            return None, ""
        height, width = (side // 2 for side in sides)
        halved = map_tensors(lambda t: t[..., :height, :width] if t.ndim > 2 else t, batch)
        return halved, f"images of {height} x {width} instead of {sides[0]} x {sides[1]}"
    lengths = {tensor.shape[1] for tensor in tensors if tensor.ndim in (2, 3)}
    if len(lengths) == 1 and not tensors[0].is_floating_point() and (length := lengths.pop()) > 1:
        halved = map_tensors(lambda t: t[:, : length // 2] if t.ndim in (2, 3) else t, batch)
        return halved, f"sequences of {length // 2} instead of {length}"
    return None, ""


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """List the blocks that checkpointing is usual for: two or more of one own class in a Sequential or ModuleList."""
    blocks = []
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            children = [child for child in module if any(True for _ in child.children())]
            kinds = {type(child) for child in children}
            if len(children) > 1 and len(kinds) == 1 and any(True for _ in children[0].parameters()):
                blocks += children
    inside = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if id(block) not in inside]


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Let the repeated blocks of a model run under checkpointing inside the block; they are as before at its end."""
    kinds = [(block, type(block)) for block in _repeated_blocks(model)]
    recomputed = {kind: _recomputed(kind) for _, kind in kinds}
    try:
        for block, kind in kinds:
            block.__class__ = recomputed[kind]
        yield
    finally:
        for block, kind in kinds:
            block.__class__ = kind


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class like `kind` whose forward pass keeps its inputs only, and is run again in backward."""

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return checkpoint(partial(kind.forward, self), *inputs, use_reentrant=False, **named)

    return type(kind.__name__, (kind,), {"forward": forward})


# Words and tables.


def _of(size: int) -> str:
    return "micro-batches of one sample" if size == 1 else f"micro-batches of {size}"


def _words(category: str) -> str:
    return category.replace("_", " ")


def _in_words(sizes: Sequence[int]) -> str:
    runs = [(sizes.count(size), size) for size in dict.fromkeys(sizes)]
    return " + ".join(f"{count} x {size}" for count, size in runs)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Lay out rows of (name, value, note); an empty row is a rule."""
    name_width = max(len(row[0]) for row in rows if row)
    value_width = max(len(row[1]) for row in rows if row)
    rule = "-" * (name_width + value_width + 2)
    lines = [f"{row[0]:<{name_width}}  {row[1]:>{value_width}}  {row[2]}".rstrip() if row else rule for row in rows]
    return "\n".join(lines)
