"""Tell from what was seen what is wrong, by name.

First the order of events: where the gradient was cleared, where the optimizer stepped, what was alive. Then the
gradient: it is written as a combination of the micro-batches' gradients, which gives the *weight* that each had in it.
1 is right. The pattern of the weights over groups of different kinds names the fault.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from course_lib.audit.limits import shown
from course_lib.audit.recording import Moment, changed_settings
from course_lib.audit.report import Finding
from course_lib.audit.sessions import Call, sample_columns

LOW_PRECISION = 0.03  # bfloat16 keeps 8 bits: errors up to 0.4 % each, more in a sum that cancels
LOSS_TOLERANCE = 1e-5  # a loss may be added up in float32
OPTIMIZER_TOLERANCE = 1e-9


@dataclass
class Fit:
    """A gradient as a combination: the weight of each micro-batch (1 is right), and of what lay there before.

    residual: what is left unexplained, relative to the gradient. uneven_inside: micro-batches whose own samples have
    different weights. missing_samples: how many have none.
    """

    weights: Tensor
    residual: float
    leftover: float = 0.0
    decay: float = 0.0
    uneven_inside: bool = False
    missing_samples: int = 0


class Seen:
    """A call with the facts that the judgement needs."""

    def __init__(self, call: Call):
        self.call, self.moments, self.steps = call, call.moments, call.steps
        self.tolerance = call.reference.problem.tolerance
        self.start, self.end = call.moments[0], call.moments[-1]
        kinds = [moment.kind for moment in call.moments]
        self.step_places = [place for place, kind in enumerate(kinds) if kind == "step"]
        self.backward_places = [place for place, kind in enumerate(kinds) if kind == "backward"]
        self.forwards = [moment for moment in call.moments if moment.kind == "forward"]
        self.last_backward = self.backward_places[-1] if self.backward_places else -1
        self.broken = bool(call.trouble) and any(
            finding.code not in ("settings-changed", "printed-too-much") for finding in call.trouble
        )

    def by_hand(self) -> Iterator[tuple[int, Moment, Moment]]:
        """Yield (place, before, after) for each stretch between two events in which only the code itself acts."""
        depth = 0
        for place, (before, after) in enumerate(pairwise(self.moments)):
            depth += (before.kind == "backward") - (before.kind == "after-backward")
            if depth == 0 and before.kind != "step":
                yield place, before, after

    @cached_property
    def clearings(self) -> list[int]:
        """Return the places where a gradient of this call's own was cleared before the first step could use it."""
        first = self.backward_places[0] if self.backward_places else len(self.moments)
        until = self.step_places[0] if self.step_places else len(self.moments) - 1
        if not self.step_places and self.backward_places:
            until = self.last_backward  # clearing at the end of an update that never steps is another matter
        return [
            place
            for place, before, after in self.by_hand()
            if first < place < until and before.gradient.any() and not after.gradient.any()
        ]

    @cached_property
    def cleared_inside(self) -> list[int]:
        """Return the places of a clearing between two backward passes of one group, steps or no steps."""
        first = self.backward_places[0] if self.backward_places else len(self.moments)
        return [
            place
            for place, before, after in self.by_hand()
            if first < place < self.last_backward and before.gradient.any() and not after.gradient.any()
        ]

    @cached_property
    def shrinkings(self) -> list[float]:
        """Return the factors by which the gradient was made shorter by hand between two backward passes."""
        first = self.backward_places[0] if self.backward_places else len(self.moments)
        return [
            float(after.gradient.norm() / before.gradient.norm())
            for place, before, after in self.by_hand()
            if first < place < self.last_backward
            and before.gradient.any()
            and is_shorter(before.gradient, after.gradient)
        ]

    @cached_property
    def parameter_moves(self) -> list[tuple[int, float | None]]:
        """Return (place, factor) where parameters changed outside of a step; None if they did not just shrink."""
        moves = []
        for place, before, after in self.by_hand():
            a, b = before.parameters, after.parameters
            if not torch.equal(a, b):
                factor = float((a @ b) / (a @ a))
                shrank = float((b - factor * a).norm()) <= 1e-9 * float(a.norm()) and factor < 1
                moves.append((place, factor if shrank else None))
        return moves

    @cached_property
    def gradient(self) -> Tensor:
        """Return the gradient that the first step found; without a step, what lay there at the end or before."""
        if self.step_places:
            return self.moments[self.step_places[0]].gradient
        built = [moment.gradient for moment in self.moments if moment.gradient.any()]
        return self.end.gradient if self.end.gradient.any() or not built else built[-1]

    @cached_property
    def at(self) -> Tensor:
        """Return the parameters at which the gradient was taken: those of the first forward pass."""
        return self.forwards[0].parameters if self.forwards else self.start.parameters

    @cached_property
    def columns(self) -> Tensor:
        if torch.equal(self.at, self.start.parameters):
            return self.call.columns
        return self.call.reference.shares(self.at, self.call.group, self.call.items)[0]

    @cached_property
    def leftover(self) -> Tensor | None:
        """Return the gradient of the call before if it still lay there at the first backward pass."""
        place = self.backward_places[0] if self.backward_places else 0
        lying = self.moments[place].gradient
        return lying if lying.any() and self.start.gradient.any() else None

    @cached_property
    def is_right(self) -> bool:
        """True if the gradient is that of the mean loss over the group."""
        wanted = self.columns.sum(dim=1)
        return bool((self.gradient - wanted).norm() <= self.tolerance * wanted.norm())

    @cached_property
    def fit(self) -> Fit | None:
        """Write the gradient as a combination; None for a gradient of zeros or not a number."""
        gradient = self.gradient
        if not gradient.any() or not bool(gradient.isfinite().all()):
            return None
        tried = [fit_columns(gradient, self.columns)]
        if tried[0].residual < self.tolerance:
            return tried[0]
        if self.leftover is not None:
            alone = fit_columns(gradient - self.leftover, self.columns)
            with_it = fit_columns(gradient, self.columns, leftover=self.leftover)
            alone.leftover = 1.0
            tried += [alone, with_it]
        samples = sample_columns(self.call, self.at)
        if samples is not None:
            tried.append(fit_samples(gradient, *samples, self.steps))
            if self.leftover is not None:
                alone = fit_samples(gradient - self.leftover, *samples, self.steps)
                alone.leftover = 1.0
                tried.append(alone)
        tried.append(fit_columns(gradient, self.columns, decay=self.at))
        exact = [fit for fit in tried if fit.residual < self.tolerance]
        if exact or tried[0].residual < LOW_PRECISION:  # more columns always fit a rough sum better, and say less
            return (exact or tried)[0]
        return min(tried, key=lambda fit: fit.residual)

    @cached_property
    def seen_times(self) -> list[int] | None:
        """Count in how many passes with a graph a micro-batch's samples were seen; None if they were not recognised."""
        if any(moment.rows is None for moment in self.forwards):
            return None
        passes = Counter(row for moment in self.forwards if moment.with_graph for row in set(moment.rows))
        return [max(passes[row] for row in rows) for rows in self.call.rows]


def is_shorter(before: Tensor, after: Tensor) -> bool:
    """True if a gradient was clipped or divided: no entry grew or changed its sign, some shrank, not all to 0."""
    same_sign = (after * before >= 0).all() and (after.abs() <= before.abs() * (1 + 1e-12)).all()
    return bool(same_sign) and bool(after.any()) and bool(after.norm() < before.norm() * (1 - 1e-9))


def fit_columns(
    gradient: Tensor, columns: Tensor, *, leftover: Tensor | None = None, decay: Tensor | None = None
) -> Fit:
    """Fit the weights of the columns, and of a leftover gradient or the parameters themselves, by least squares."""
    extra = leftover if leftover is not None else decay
    wide = columns if extra is None else torch.cat([columns, extra[:, None]], dim=1)
    sizes = wide.norm(dim=0).clamp_min(1e-300)
    solution = torch.linalg.lstsq(wide / sizes, gradient[:, None]).solution[:, 0] / sizes
    residual = float((gradient - wide @ solution).norm() / gradient.norm()) if gradient.any() else math.inf
    weights = solution[: columns.shape[1]]
    last = float(solution[-1]) if extra is not None else 0.0
    return Fit(
        weights, residual, leftover=last if leftover is not None else 0.0, decay=last if decay is not None else 0.0
    )


def fit_samples(gradient: Tensor, columns: Tensor, places: list[int], steps: int) -> Fit:
    """Fit a weight for each sample; a micro-batch's weight is the mean of those of its samples."""
    fit = fit_columns(gradient, columns)
    by_batch = [
        [float(weight) for weight, place in zip(fit.weights, places, strict=True) if place == batch]
        for batch in range(steps)
    ]
    size = max((abs(weight) for weights in by_batch for weight in weights), default=0.0)
    fit.uneven_inside = any(max(weights) - min(weights) > 1e-3 * size for weights in by_batch if weights)
    fit.missing_samples = sum(abs(weight) < 1e-4 * size for weights in by_batch for weight in weights)
    fit.weights = torch.tensor([sum(w) / len(w) if w else 0.0 for w in by_batch], dtype=torch.float64)
    return fit


# Each pattern: what the weights would be, as a function of (counts n of the micro-batches, total N, steps K, fixed K).
Pattern = Callable[..., Tensor]
PATTERNS: tuple[tuple[str, str, Pattern], ...] = (
    ("right", "", lambda n, total, steps: torch.ones_like(n)),
    ("not-divided", "each micro-batch's mean is added without a division", lambda n, total, steps: total / n),
    ("not-divided", "the summed losses are added without a division", lambda n, total, steps: total + 0 * n),
    ("not-divided", "it grows with the number of micro-batches", lambda n, total, steps: steps + 0 * n),
    (
        "not-divided",
        "the summed losses are divided by the micro-batches, not by what they hold",
        lambda n, total, steps: total / steps + 0 * n,
    ),
    (
        "mean-of-means",
        "each micro-batch's mean has the same weight, whatever it holds",
        lambda n, total, steps: total / (steps * n),
    ),
    ("divided-twice", "the mean is divided by the micro-batches once more", lambda n, total, steps: 1 / steps + 0 * n),
    (
        "divided-twice",
        "each micro-batch's mean is divided by the micro-batches twice",
        lambda n, total, steps: total / (steps**2 * n),
    ),
    ("divided-twice", "the mean is divided by the items once more", lambda n, total, steps: 1 / total + 0 * n),
    (
        "divided-twice",
        "each mean is divided by the items of its micro-batch again",
        lambda n, total, steps: 1 / n,
    ),
    ("divided-twice", "each mean is divided by the items of the group again", lambda n, total, steps: 1 / (n * steps)),
    ("divided-twice", "each mean is divided by its items again", lambda n, total, steps: total / (steps * n**2)),
    (
        "tail-misweighted",
        "it is divided as if every micro-batch held as much as the first",
        lambda n, total, steps: total / (steps * n[0]) + 0 * n,
    ),
    (
        "tail-misweighted",
        "it is divided as if every micro-batch held as much as the largest",
        lambda n, total, steps: total / (steps * n.max()) + 0 * n,
    ),
)
# Of a loop, where K is given and the last group may be shorter: with the full K, and what its first
# micro-batch held, as further arguments.
SHORT_GROUP_PATTERNS: tuple[tuple[str, Pattern], ...] = (
    ("each mean is divided by the full number of steps", lambda n, total, steps, full, size: total / (full * n)),
    ("the mean is scaled as if the group were full", lambda n, total, steps, full, size: steps / full + 0 * n),
    (
        "it is divided by the nominal size of a full group",
        lambda n, total, steps, full, size: total / (full * size) + 0 * n,
    ),
)


def patterns_for(seen: Sequence[Seen]) -> list[tuple[str, str, Pattern]]:
    """Return the patterns that can be told apart in these calls."""
    if any(one.call.full_steps is None for one in seen):
        return list(PATTERNS)
    named = [("tail-misweighted", text, pattern) for text, pattern in SHORT_GROUP_PATTERNS]
    return [*PATTERNS, *named]


def judge(calls: Sequence[Call]) -> list[Finding]:
    """Return what is wrong with an update, from all its calls."""
    findings = [finding for call in calls for finding in call.trouble]
    seen = [Seen(call) for call in calls]
    # The longest group shows a fault best, and of each code the first finding is kept.
    whole = sorted((one for one in seen if not one.broken), key=lambda one: -one.steps)
    for one in whole:
        findings += judge_events(one)
        findings += judge_surroundings(one)
        findings += judge_memory(one)
    findings += judge_gradients([one for one in whole if can_be_weighed(one)])
    if not findings:
        for one in whole:
            findings += judge_step(one)
    findings += judge_losses(whole, findings)
    findings += judge_randomness(calls)
    return without_consequences(findings)


# What follows from another finding, and is not named beside it.
CONSEQUENCES = {
    "last-only": {"graph-kept", "one-backward"},
    "no-gradient": {"graph-kept", "one-backward", "never-stepped"},
}
GENERIC = {"wrong-scale", "wrong-gradient", "wrong-parameters"}


def without_consequences(findings: list[Finding]) -> list[Finding]:
    """Leave out what follows from something that says more."""
    codes = {finding.code for finding in findings}
    left_out = set().union(*(CONSEQUENCES.get(code, set()) for code in codes))
    of_values = codes - GENERIC - {"settings-changed", "wrong-loss-reported", "printed-too-much"}
    if of_values - {"whole-batch-in-memory", "one-backward", "graph-kept"}:
        left_out |= GENERIC
    return [finding for finding in findings if finding.code not in left_out]


def can_be_weighed(one: Seen) -> bool:
    """True if the gradient at the step can be held against a reference at one set of parameters."""
    moved = any(place < one.last_backward for place, _ in one.parameter_moves)
    stepped_early = bool(one.step_places) and one.step_places[0] < one.last_backward
    return not (moved or stepped_early or len(one.step_places) > 1)


def judge_events(one: Seen) -> list[Finding]:
    """Judge the order of backward passes, steps and clearings, and what moved the parameters."""
    findings = []
    steps, num_steps = one.steps, len(one.step_places)
    if not num_steps:
        moved = ", though parameters were changed by hand" if one.parameter_moves else ""
        findings.append(
            Finding("never-stepped", f"optimizer.step was not called for {batches(steps)}{moved}", {"calls": 0})
        )
    if num_steps and one.last_backward > one.step_places[-1]:
        only = "the first backward pass" if one.backward_places[0] > one.step_places[-1] else "a backward pass"
        findings.append(Finding("stepped-before-backward", f"the last step came before {only}"))
    in_backward = [m for m in one.moments[1:] if m.kind == "after-backward"]
    moved_in_backward = [
        after
        for before, after in pairwise(one.moments)
        if before.kind == "backward" and after.kind == "after-backward" and not same(before, after)
    ]
    if steps > 1 and moved_in_backward:
        text = f"parameters moved inside {len(moved_in_backward)} of {len(in_backward)} backward passes of one update"
        findings.append(Finding("stepped-inside", text, {"moves": len(moved_in_backward)}))
    elif num_steps > 1:
        text = f"optimizer.step was called {num_steps} times for one update of {batches(steps)}"
        findings.append(Finding("stepped-inside", text, {"calls": num_steps}))
    if one.cleared_inside and (num_steps > 1 or not can_be_weighed(one)):
        findings.append(
            Finding("zeroed-inside", f"the gradient was cleared {times(len(one.cleared_inside))} between micro-batches")
        )
    shrinks = [factor for _, factor in one.parameter_moves if factor is not None]
    early = [factor for place, factor in one.parameter_moves if factor is not None and place < one.last_backward]
    if early or len(shrinks) > 1:
        text = (
            f"outside of the step the parameters were multiplied {times(len(shrinks))} by {shrinks[0]:.4g} "
            f"in one update of {batches(steps)}"
        )
        findings.append(Finding("decayed-inside", text, {"times": len(shrinks), "factor": shrinks[0]}))
    return findings + judge_missing_gradient(one)


def same(before: Moment, after: Moment) -> bool:
    return torch.equal(before.parameters, after.parameters)


def judge_missing_gradient(one: Seen) -> list[Finding]:
    """Judge parameters that the step found without a gradient, though the loss depends on them."""
    if not one.step_places or one.last_backward > one.step_places[0]:
        return []
    moment = one.moments[one.step_places[0]]
    if not moment.gradient.any():
        if one.clearings:
            return [Finding("zeroed-inside", "the gradient was cleared after the last backward pass, before the step")]
        if one.backward_places:
            return [Finding("no-gradient", "at the step every gradient is missing or 0, though backward was called")]
        return [Finding("no-gradient", "no backward pass was made: at the step there is no gradient")]
    start, missing = 0, []
    model = one.call.reference.model
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    wanted = one.columns.sum(dim=1)
    for (name, parameter), filled in zip(named, moment.filled, strict=True):
        part = slice(start, start := start + parameter.numel())
        if wanted[part].any() and not (filled and moment.gradient[part].any()):
            missing.append(name)
    if not missing:
        return []
    text = f"{len(missing)} of {len(named)} parameters reach the step without a gradient: {', '.join(missing[:4])}"
    return [Finding("no-gradient", text, {"missing": len(missing)})]


def judge_step(one: Seen) -> list[Finding]:
    """Judge where the parameters end, given the gradient that the step found."""
    call = one.call
    findings = []
    if one.parameter_moves:
        findings.append(Finding("wrong-parameters", "parameters were changed outside of optimizer.step"))
    elif call.stepped_to is not None:
        step = one.moments[one.step_places[0]].parameters
        gap = float((one.end.parameters - call.stepped_to).norm())
        moved = float((call.stepped_to - step).norm())
        limit = max(OPTIMIZER_TOLERANCE, one.tolerance * 1e-3)
        if not gap <= limit * max(moved, 1e-6 * float(step.norm())):
            text = f"the parameters end {gap / moved if moved else math.inf:.3g} steps away from where one step leads"
            findings.append(Finding("wrong-parameters", text, {"distance": gap}))
        elif call.state_differs:
            text = f"the optimizer's state is not that of one step: {', '.join(call.state_differs)}"
            findings.append(Finding("wrong-parameters", text))
    return findings


def judge_surroundings(one: Seen) -> list[Finding]:
    """Judge what an update should leave alone: settings, modes, data."""
    changed = list(one.call.changes)
    for place in one.step_places:
        at_step = changed_settings(one.call.settings, one.moments[place].settings)
        changed += [f"{text} for the step" for text in at_step if text not in changed]
    if one.start.training and any(not moment.training for moment in one.forwards if moment.with_graph):
        changed.append("the training mode, for the forward pass")
    if not changed:
        return []
    return [Finding("settings-changed", f"changed in an update: {'; '.join(dict.fromkeys(changed))}")]


def judge_memory(one: Seen) -> list[Finding]:
    """Judge how much of the group is in memory together; the numbers are bytes saved for backward passes."""
    findings = []
    call, largest = one.call, max(len(rows) for rows in one.call.rows)
    for moment in one.forwards:
        if moment.rows is not None and len(moment.rows) > largest and one.steps > 1 and moment.with_graph:
            text = f"one forward pass saw {len(moment.rows)} samples; the largest micro-batch has {largest}"
            findings.append(Finding("whole-batch-in-memory", text, {"samples": len(moment.rows)}))
            break
    if not call.activations or one.steps < 2:
        return findings
    alive = dict(zip(map(id, one.moments), call.activations, strict=True))
    before_backward = [alive[id(one.moments[place])] for place in one.backward_places]
    if not before_backward or findings:
        return findings
    per_pass = one_pass_bytes(one, alive)
    if not per_pass:
        return findings
    pending = most_pending(one)
    at_forwards = max((alive[id(moment)] for moment in starting_passes(one)), default=0)
    if pending > 1 and max(before_backward) > 1.5 * per_pass:
        passes = len(one.backward_places)
        text = (
            f"{passes} backward pass{'es' * (passes > 1)} for {batches(one.steps)}: "
            f"{max(before_backward) / per_pass:.1f} times the activations of one were alive together"
        )
        findings.append(Finding("one-backward", text, {"times": max(before_backward) / per_pass}))
    elif at_forwards > 0.5 * per_pass:
        text = (
            f"when a forward pass began, activations of earlier ones were alive, "
            f"{at_forwards / per_pass:.1f} times what one pass saves"
        )
        findings.append(Finding("graph-kept", text, {"times": at_forwards / per_pass}))
    return findings


def one_pass_bytes(one: Seen, alive: dict[int, int]) -> int:
    """Return what the first forward pass saved for its backward pass: the growth until the next event."""
    for before, after in pairwise(one.moments):
        if before.kind == "forward" and before.with_graph:
            return alive[id(after)] - alive[id(before)]
    return 0


def most_pending(one: Seen) -> int:
    """Return the most micro-batches that passed forward, with a graph, before one backward pass."""
    most, pending = 0, set()
    for place, moment in enumerate(one.moments):
        if moment.kind == "forward" and moment.with_graph:
            pending.add(place if moment.rows is None else moment.rows)
            most = max(most, len(pending))
        elif moment.kind == "after-backward":
            pending = set()
    return most


def starting_passes(one: Seen) -> Iterator[Moment]:
    """Yield the forward passes before which every earlier one has had its backward pass, or none had a graph."""
    pending = False
    for moment in one.moments:
        if moment.kind == "forward":
            if not pending:
                yield moment
            pending = pending or moment.with_graph
        elif moment.kind == "after-backward":
            pending = False


def judge_gradients(seen: Sequence[Seen]) -> list[Finding]:
    """Judge the gradients at the steps of all calls together."""
    wrong = [one for one in seen if not one.is_right and one.fit is not None]
    if not wrong:
        return []
    # What holds for most kinds of groups says most: begin with the longest.
    wrong.sort(key=lambda one: -one.steps)
    weighed = [one for one in seen if one.fit is not None]
    if is_clamped_once(weighed):
        return []
    clipped = clip_pattern(weighed)
    if clipped is not None:
        return clipped
    findings = judge_leftover(wrong) + (judge_inside(wrong) or judge_by_scale(weighed))
    findings += judge_decay(weighed)
    if not {"clipped-inside", "decayed-inside"} & {finding.code for finding in findings}:
        findings += judge_missing_batches(wrong)
    structural = {finding.code for finding in findings}
    findings += judge_weights(weighed, structural)
    if not findings:
        findings.append(unexplained(wrong[0]))
    return findings


def judge_leftover(wrong: Sequence[Seen]) -> list[Finding]:
    for one in wrong:
        if one.leftover is not None and abs(one.fit.leftover) > 0.05 and one.fit.residual < LOW_PRECISION:
            text = (
                f"the gradient of the update before was still there and counts {one.fit.leftover:.2f} times in this one"
            )
            return [Finding("never-zeroed", text, {"weight": one.fit.leftover})]
    return []


def judge_missing_batches(wrong: Sequence[Seen]) -> list[Finding]:
    """Judge micro-batches and samples that have no part in the gradient, or several."""
    for one in wrong:
        fit = one.fit
        if fit.residual > LOW_PRECISION or not fit.weights.any():
            continue
        size = float(fit.weights.abs().max())
        present = fit.weights.abs() > 1e-3 * size
        times_seen = one.seen_times
        in_it = [place + 1 for place in range(one.steps) if present[place]]
        if not present.all():
            which = f"of {batches(one.steps)} only {numbered(in_it)} is in the gradient at the step"
            numbers = {"micro_batches": one.steps, "in_gradient": len(in_it)}
            if one.clearings:
                return [Finding("zeroed-inside", f"the gradient was cleared between micro-batches: {which}", numbers)]
            if times_seen is not None and max(times_seen) > 1 and min(times_seen) == 0:
                used = numbered([place + 1 for place in range(one.steps) if times_seen[place] > 1])
                text = f"{used} was used {times(max(times_seen))}, others never"
                return [Finding("repeated-micro-batch", f"{text}: {which}", numbers)]
            if in_it == [one.steps] and len(one.backward_places) == 1:
                return [Finding("last-only", f"one backward pass was made: {which}", numbers)]
            return [Finding("samples-dropped", which, numbers)]
        if fit.missing_samples:
            text = f"{fit.missing_samples} of the {sum(map(len, one.call.rows))} samples have no part in the gradient"
            return [Finding("samples-dropped", text, {"missing": fit.missing_samples})]
        if times_seen is not None and len(set(times_seen)) > 1 and max(times_seen) > 1:
            used = numbered([place + 1 for place in range(one.steps) if times_seen[place] == max(times_seen)])
            if float(fit.weights[times_seen.index(max(times_seen))]) > 1.5 * float(fit.weights.min()):
                return [Finding("repeated-micro-batch", f"{used} was used {times(max(times_seen))}")]
    return []


def judge_inside(wrong: Sequence[Seen]) -> list[Finding]:
    """Judge a gradient that was made shorter by hand between two backward passes."""
    shrunk = [one for one in wrong if one.shrinkings]
    if not shrunk:
        return []
    fixed = [
        all(
            any(math.isclose(factor, 1 / k, rel_tol=1e-6) for k in (one.steps, *one.call.counts, one.call.total))
            for factor in one.shrinkings
        )
        for one in shrunk
    ]
    factor = min(shrunk[0].shrinkings)
    if all(fixed):
        text = f"the gradient was multiplied by {factor:.3g} between micro-batches, earlier parts several times"
        return [Finding("divided-twice", text, {"factor": factor})]
    text = f"between micro-batches the gradient was made shorter, once by a factor of {factor:.3g}"
    return [Finding("clipped-inside", text, {"factor": factor})]


def judge_by_scale(weighed: Sequence[Seen]) -> list[Finding]:
    """Judge weights that depend on the scale of the gradient: parts of it were cut short, whatever did it.

    With the smallest gradients, where no clipping binds, the weights follow a pattern; with larger ones they are below.
    """
    smallest = min(one.call.session.scale for one in weighed)
    free = [one for one in weighed if one.call.session.scale == smallest]
    bound = [one for one in weighed if one.call.session.scale > smallest and one.fit.residual < LOW_PRECISION]
    if not bound or any(one.fit.residual > one.tolerance or one.fit.leftover or one.fit.decay for one in free):
        return []
    for code, text, pattern in PATTERNS:
        if not all(one.fit.weights.min() > 1e-3 * one.fit.weights.max() and matches(one, pattern) for one in free):
            continue
        ratios = [one.fit.weights / pattern(counts_of(one), one.call.total, one.steps) for one in bound]
        if any(float(ratio.max()) > 1 + 1e-3 for ratio in ratios):
            continue
        uneven = max(ratios, key=lambda ratio: float(ratio.max() - ratio.min()))
        if float(uneven.max() - uneven.min()) > 1e-3:
            weights = ", ".join(f"{float(weight):.2g}" for weight in uneven)
            seen = (
                f"where gradients are large the micro-batches weigh {weights} times what they do where they are small"
            )
            found = [Finding("clipped-inside", seen, {"least": float(uneven.min())})]
            return found if code == "right" else [*found, described(code, text, free)]
    return []


def judge_decay(weighed: Sequence[Seen]) -> list[Finding]:
    """Judge a penalty on the parameters inside the gradient: one that grows with the micro-batches decays inside."""
    with_decay = [one for one in weighed if one.fit.decay and one.fit.residual < one.tolerance]
    if not with_decay:
        return []
    longest = max(with_decay, key=lambda one: one.steps)
    shortest = min(with_decay, key=lambda one: one.steps)
    numbers = {"factor": longest.fit.decay}
    text = f"the gradient holds {longest.fit.decay:.3g} times the parameters with {batches(longest.steps)}"
    if longest.fit.decay > 1.5 * shortest.fit.decay > 0:
        more = f", {shortest.fit.decay:.3g} times with {batches(shortest.steps)}"
        return [Finding("decayed-inside", text + more, numbers)]
    return [Finding("wrong-gradient", f"{text}: a penalty that is no part of the loss meant", numbers)]


def judge_weights(weighed: Sequence[Seen], structural: set[str]) -> list[Finding]:
    """Judge the weights of the micro-batches by their pattern over all groups."""
    explained = [one for one in weighed if one.fit.residual < LOW_PRECISION and not one.fit.uneven_inside]
    whole = [one for one in explained if one.fit.residual < one.tolerance]
    if "clipped-inside" in structural:
        return []
    findings = []
    if len(explained) < len(weighed) and not structural:
        findings += judge_uneven_inside(weighed)
    if len(whole) < len(explained) and not findings:
        rough = max((one for one in explained if one not in whole), key=lambda one: one.fit.residual)
        text = f"the gradient differs by {rough.fit.residual:.1e} of its length, as a sum in 8 to 11 bits does"
        findings.append(Finding("low-precision-sum", text, {"relative_error": rough.fit.residual}))
    matching = [
        (code, text)
        for code, text, pattern in patterns_for(explained)
        if explained and all(matches(one, pattern) for one in explained)
    ]
    if matching:
        code, text = matching[0]
        if code != "right":
            findings.append(described(code, text, explained))
        return findings
    if structural & {"zeroed-inside", "last-only", "samples-dropped", "repeated-micro-batch"}:
        return findings
    constant = constant_divisor(explained)
    if constant is not None:
        return [*findings, constant]
    inside = clipped_one_by_one(explained)
    if inside is not None:
        return [*findings, inside]
    return findings + unnamed_weights(explained)


def matches(one: Seen, pattern: Pattern) -> bool:
    """True if the weights follow a pattern, counted over the whole group or over those micro-batches that take part."""
    weights = one.fit.weights
    present = weights.abs() > 1e-3 * weights.abs().max()
    counts = torch.tensor(one.call.counts, dtype=torch.float64)
    near = max(1e-4, 30 * one.fit.residual)
    fixed = () if len(inspect.signature(pattern).parameters) == 3 else (one.call.full_steps, one.call.full_count)
    whole = pattern(counts, one.call.total, one.steps, *fixed)[present]
    options = [whole]
    if not present.all() and not fixed:
        held = counts[present]
        options.append(pattern(held, float(held.sum()), int(present.sum())) * one.call.total / float(held.sum()))
    return any(bool(((weights[present] - option).abs() <= near * option.abs()).all()) for option in options)


def described(code: str, text: str, explained: Sequence[Seen]) -> Finding:
    """Put a pattern into a sentence with the number of the group that shows it best."""
    by_steps = sorted(explained, key=lambda one: (one.steps, spread(one)))
    even = [one for one in by_steps if spread(one) < 1e-3]
    if code in ("mean-of-means", "tail-misweighted"):
        one = max(explained, key=spread_of_weights)
        weights = ", ".join(f"{float(weight):.3g}" for weight in one.fit.weights)
        held = ", ".join(f"{count:g}" for count in one.call.counts)
        return Finding(code, f"{text}: with counts {held} they weigh {weights} times what they should")
    one = (even or by_steps)[-1]
    factor = length_ratio(one)
    return Finding(
        code,
        f"the gradient is {factor:.2f} times that of the mean loss with {batches(one.steps)}: {text}",
        {"times": factor, "micro_batches": one.steps},
    )


def spread(one: Seen) -> float:
    """Say how unequal the micro-batches of a group are."""
    return max(one.call.counts) / max(min(one.call.counts), 1e-300) - 1


def spread_of_weights(one: Seen) -> float:
    return float((one.fit.weights - 1).abs().max())


def length_ratio(one: Seen) -> float:
    """Return the factor on the right gradient that comes closest to the one found."""
    wanted = one.columns.sum(dim=1)
    return float((wanted @ one.gradient) / (wanted @ wanted))


def constant_divisor(explained: Sequence[Seen]) -> Finding | None:
    """Recognise a division by one number, whatever the group: a fixed K, or a fixed count."""
    if len({one.steps for one in explained}) < 2:
        return None
    for what, natural in (
        ("a mean over each micro-batch, divided by", lambda one: one.call.total / counts_of(one)),
        ("a sum, divided by", lambda one: one.call.total + 0 * counts_of(one)),
    ):
        divisors = torch.cat([natural(one) / one.fit.weights for one in explained if (one.fit.weights > 0).all()])
        if len(divisors) and float(divisors.max() - divisors.min()) <= 1e-3 * float(divisors.mean().abs()):
            number = float(divisors.mean())
            text = f"{what} {number:.3g} in every group, of one micro-batch as of {max(o.steps for o in explained)}"
            return Finding("tail-misweighted", text, {"divisor": number})
    return None


def counts_of(one: Seen) -> Tensor:
    return torch.tensor(one.call.counts, dtype=torch.float64)


def clip_pattern(explained: Sequence[Seen]) -> list[Finding] | None:
    """Recognise clipping of the whole gradient; None if that does not explain it.

    Clipped once, after dividing: its length is then the same threshold in every group where it binds, and no longer
    anywhere. Clipped before: the threshold is divided along with the gradient.
    """
    if not explained or any(one.fit.residual > one.tolerance or one.fit.leftover or one.fit.decay for one in explained):
        return None
    for code, text, pattern in PATTERNS:
        ratios, lengths = [], []
        for one in explained:
            ratio = one.fit.weights / pattern(counts_of(one), one.call.total, one.steps)
            if float(ratio.max() - ratio.min()) > 1e-3 * float(ratio.abs().max()):
                break
            ratios.append(float(ratio.mean()))
            lengths.append(float(one.gradient.norm()))
        if len(ratios) < len(explained) or max(ratios) > 1 + 1e-4:
            continue
        bound = [place for place, ratio in enumerate(ratios) if ratio < 1 - 1e-3]
        if len(bound) < 2:
            continue
        limits = [lengths[place] for place in bound]
        free = [lengths[place] for place in range(len(ratios)) if place not in bound]
        if max(limits) <= min(limits) * (1 + 2e-3):
            if free and max(free) > max(limits) * (1 + 2e-3):
                continue
            return [] if code == "right" else [described(code, text, unclipped(explained, bound))]
        for divisor in ("steps", "total"):
            scaled = [
                limit * (explained[place].steps if divisor == "steps" else explained[place].call.total)
                for limit, place in zip(limits, bound, strict=True)
            ]
            several = len({explained[place].steps for place in bound}) > 1
            if several and max(scaled) <= min(scaled) * (1 + 2e-3):
                place = max(bound, key=lambda place: explained[place].steps)
                text_here = (
                    f"clipped to {scaled[0]:.3g} and then divided: with {batches(explained[place].steps)} the gradient "
                    f"has length {lengths[place]:.3g}"
                )
                found = [Finding("clipped-before-dividing", text_here, {"threshold": scaled[0]})]
                return found if code == "right" else [*found, described(code, text, unclipped(explained, bound))]
    return None


def unclipped(explained: Sequence[Seen], bound: list[int]) -> list[Seen]:
    """Return the calls where clipping did not bind; all of them if it bound everywhere."""
    return [one for place, one in enumerate(explained) if place not in bound] or list(explained)


def is_clamped_once(weighed: Sequence[Seen]) -> bool:
    """Say whether each gradient is the right one with every entry cut off at one value, a right way to clip."""
    limits = []
    for one in weighed:
        wanted, limit = one.columns.sum(dim=1), float(one.gradient.abs().max())
        if float((one.gradient - wanted.clamp(-limit, limit)).norm()) > one.tolerance * float(one.gradient.norm()):
            return False
        if not one.is_right:
            limits.append(limit)
    return len(limits) > 1 and max(limits) <= min(limits) * (1 + 1e-6)


def clipped_one_by_one(explained: Sequence[Seen]) -> Finding | None:
    """Recognise micro-batches whose own gradients were clipped before they were added."""
    for _, _, pattern in PATTERNS:
        shortened, lengths = [], []
        for one in explained:
            ratio = one.fit.weights / pattern(counts_of(one), one.call.total, one.steps)
            if float(ratio.max()) > 1 + 1e-4 or float(ratio.min()) <= 0:
                break
            parts = one.columns * one.fit.weights
            for place in range(one.steps):
                if float(ratio[place]) < 1 - 1e-3:
                    shortened.append((float(parts[:, place].norm()), one))
            lengths.append(one)
        else:
            for divisor in (lambda one: 1.0, lambda one: 1 / one.steps, lambda one: 1 / one.call.total):
                limits = [length / divisor(one) for length, one in shortened]
                if len(limits) > 2 and max(limits) <= min(limits) * (1 + 5e-3):
                    text = f"each micro-batch's own gradient was shortened to {limits[0]:.3g} before they were added"
                    return Finding("clipped-inside", text, {"threshold": limits[0]})
    return None


def judge_uneven_inside(weighed: Sequence[Seen]) -> list[Finding]:
    """Judge calls in which the samples of one micro-batch have different weights."""
    uneven = [one for one in weighed if one.fit.uneven_inside and one.fit.residual < one.tolerance]
    if not uneven:
        return []
    one = max(uneven, key=lambda one: one.steps)
    text = "the samples of one micro-batch have different weights, as in a mean over each sequence"
    return [Finding("mean-of-means", text, {"micro_batches": one.steps})]


def unnamed_weights(explained: Sequence[Seen]) -> list[Finding]:
    """Describe weights that follow no known pattern."""
    if not explained:
        return []
    wrong = [one for one in explained if not one.is_right]
    uneven = [one for one in wrong if spread_of_ratio(one) > 1e-3]
    if not uneven:
        one = max(wrong, key=lambda one: (abs(math.log(max(length_ratio(one), 1e-300))), one.steps))
        text = f"the gradient is {length_ratio(one):.3g} times that of the mean loss with {batches(one.steps)}"
        return [Finding("wrong-scale", text, {"times": length_ratio(one), "micro_batches": one.steps})]
    one = max(uneven, key=spread_of_ratio)
    weights = ", ".join(f"{float(weight):.3g}" for weight in one.fit.weights)
    held = ", ".join(f"{count:g}" for count in one.call.counts)
    text = f"with counts {held} the micro-batches weigh {weights} times what they should"
    even_are_right = all(one.is_right for one in explained if spread(one) < 1e-9)
    return [Finding("mean-of-means" if even_are_right else "wrong-gradient", text)]


def spread_of_ratio(one: Seen) -> float:
    weights = one.fit.weights
    return float((weights.max() - weights.min()) / weights.abs().max())


def unexplained(one: Seen) -> Finding:
    wanted = one.columns.sum(dim=1)
    error = float((one.gradient - wanted).norm() / wanted.norm())
    cosine = float(wanted @ one.gradient / wanted.norm() / one.gradient.norm())
    text = f"with {batches(one.steps)} it is off by {error:.3g} times its length, cosine {cosine:.3f}"
    return Finding("wrong-gradient", text, {"relative_error": error, "cosine": cosine})


def judge_losses(seen: Sequence[Seen], findings: Sequence[Finding]) -> list[Finding]:
    """Judge what was returned; a wrong value that follows from a fault already named is not named again."""
    codes = {finding.code for finding in findings}
    if codes & {"stepped-inside", "stepped-before-backward", "decayed-inside", "raised", "ran-too-long", "exited"}:
        return []
    for one in seen:
        returned = one.call.returned
        if returned is None:
            continue
        value = as_number(returned)
        if value is None:
            text = f"it returned {shown(returned)}; accepted are the mean loss as a number, and None"
            return [Finding("wrong-loss-reported", text)]
        shares = one.call.shares
        right = sum(shares)
        if near(value, right):
            continue
        if not one.is_right and one.fit is not None and one.fit.residual < LOW_PRECISION:
            same_weights = sum(w * s for w, s in zip(one.fit.weights.tolist(), shares, strict=True))
            if near(value, same_weights, 30 * LOSS_TOLERANCE):
                continue
        return [Finding("wrong-loss-reported", loss_sentence(one, value, right), {"returned": value, "right": right})]
    return []


def near(a: float, b: float, rtol: float = LOSS_TOLERANCE) -> bool:
    return math.isclose(a, b, rel_tol=rtol)


def loss_sentence(one: Seen, value: float, right: float) -> str:
    """Say what the returned number is, if it is one that is known."""
    counts, total, steps = one.call.counts, one.call.total, one.steps
    pairs = zip(one.call.shares, counts, strict=True)
    means = [share * total / count if count else math.nan for share, count in pairs]  # of nothing there is no mean
    known = [
        ("the last micro-batch's mean", means[-1]),
        ("the first micro-batch's mean", means[0]),
        ("the sum of the micro-batches' means", sum(means)),
        ("the mean of the micro-batches' means", sum(means) / steps),
        ("the last micro-batch's mean divided by their number", means[-1] / steps),
        ("the sum over all items", right * total),
        ("the last micro-batch's share", one.call.shares[-1]),
        ("the mean divided by the number of micro-batches", right / steps),
    ]
    which = next((f", {name}" for name, number in known if near(value, number)), "")
    after = mean_after(one)
    if not which and after is not None and near(value, after):
        which = ", the loss after the step"
    return f"it returned {value:.4g}{which}; the mean loss over {batches(steps)} is {right:.4g}"


def mean_after(one: Seen) -> float | None:
    try:
        return sum(one.call.reference.shares(one.end.parameters, one.call.group, one.call.items)[1])
    except Exception:
        return None


def as_number(returned: Any) -> float | None:
    """Return a loss as a float: a number, a tensor of one number, or what has one as `.loss`; None for all else."""
    try:
        if not isinstance(returned, Tensor | int | float) and hasattr(returned, "loss"):
            returned = returned.loss
        if isinstance(returned, bool | str | bytes):
            return None
        if isinstance(returned, Tensor):
            return float(returned.detach()) if returned.numel() == 1 else None
        return float(returned)
    except Exception:
        return None


def judge_randomness(calls: Sequence[Call]) -> list[Finding]:
    """Judge a random state that is set to one value: two calls that began apart end alike."""
    sources = ("torch", "random", "numpy")
    for place, name in enumerate(sources):
        moved = [call.randomness for call in calls if call.randomness and len(call.randomness[0]) > place]
        moved = [(before[place], after[place]) for before, after in moved if before[place] != after[place]]
        for i, (before, after) in enumerate(moved):
            if any(after == other and before != earlier for earlier, other in moved[:i]):
                text = f"changed in an update: the random state of {name} is set to the same value each time"
                return [Finding("settings-changed", text)]
    return []


def batches(number: int) -> str:
    return f"{number} micro-batch{'es' * (number != 1)}"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def numbered(places: Sequence[int]) -> str:
    return f"number {', '.join(map(str, places))}"
