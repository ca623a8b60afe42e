"""`audit_loop`: run a loop over small loaders, and report what is wrong at the boundaries of its groups and inside.

Which micro-batches an update has used is seen by the forward passes between two steps. Where the groups are those of
K, each is judged as an update of its own, with everything that `audit` knows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from course_lib.accumulation import add_items
from course_lib.audit.judging import Seen, batches, judge
from course_lib.audit.limits import Deadline, call_guarded
from course_lib.audit.problems import Problem, Session, loop_session, rows_of, task_problem
from course_lib.audit.recording import Moment, Recorder, Surroundings, own_randomness
from course_lib.audit.report import LOOP_CONTRACT, AuditReport, Finding, in_order
from course_lib.audit.sessions import Call, Reference
from course_lib.batches import concatenate_batches, group_sizes

EPOCHS = 2
# (sizes of the micro-batches, K, scale of the gradient)
CASES = (
    ([2, 2, 2, 2, 2], 2, 1.0),
    ([2, 2, 2, 2, 2, 2], 3, 1e3),
    ([2, 2, 2], 4, 1.0),
    ([2, 2, 2, 2, 2, 2, 1], 3, 1e-3),
    ([2, 2, 2], 1, 30.0),
    ([3, 3, 3, 1], 2, 1.0),
)


@dataclass
class Epoch:
    """One call of a training loop: the micro-batches of its loader in order, K, and what happened."""

    session: Session
    group: list[Any]
    steps: int
    number: int
    moments: list[Moment]
    trouble: list[Finding]
    changes: list[str]

    @property
    def used(self) -> list[list[int]] | None:
        """Return for each step the micro-batches that passed forward since the step before; None if not recognised."""
        if any(moment.kind == "forward" and moment.rows is None for moment in self.moments):
            return None
        places = {row: place for place, batch in enumerate(self.group) for row in rows_of(batch)}
        groups: list[list[int]] = []
        now: list[int] = []
        for moment in self.moments:
            if moment.kind == "forward" and moment.with_graph:
                now += [place for place in dict.fromkeys(places.get(row, -1) for row in moment.rows) if place >= 0]
            elif moment.kind == "step":
                groups.append(now)
                now = []
        return groups

    @property
    def wanted(self) -> list[list[int]]:
        """Return the groups of K, the last one with what is left."""
        sizes, start, groups = group_sizes(len(self.group), self.steps), 0, []
        for size in sizes:
            groups.append(list(range(start, start + size)))
            start += size
        return groups

    def count(self, kind: str) -> int:
        return sum(moment.kind == kind for moment in self.moments)


def audit_loop(
    train: Callable[..., Any], *, task: str = "samples", drop_tail: bool = False, seconds: float = 60.0
) -> AuditReport:
    """Run a training loop on small loaders, and tell what is wrong with it, by name.

    The contract, also in every report. train(model, optimizer, loader, accumulation_steps) makes one epoch of updates
    from a `DataLoader` of micro-batches (inputs, targets); each update is that of the mean loss over its group of
    accumulation_steps micro-batches, the last group of an epoch is what is left, divided by its own count.
    task="samples": inputs float64, model output (B, C), targets (B); the mean cross-entropy over all samples is meant.
    task="tokens": model output (B, T, V), targets (B, T) with -100 where ignored; the mean over all other tokens.
    Gradients are None before the first epoch; a second epoch follows on the same model. A `train` with an argument
    named `scheduler` gets a learning-rate schedule, to be stepped once per update; a schedule of its own is seen too.
    What is returned is not looked at.

    drop_tail: the last, short group is meant to be dropped; else that is a finding.
    seconds: after so long the audit stops, with a finding.
    Raises TypeError or ValueError for arguments that cannot be right.
    """
    if not callable(train):
        raise TypeError(
            f"train must be a function (model, optimizer, loader, accumulation_steps); got {type(train).__name__}"
        )
    deadline, problem = Deadline(seconds), task_problem(task)
    epochs: list[list[Epoch]] = []
    calls: list[Call] = []
    for number, (sizes, steps, scale) in enumerate(CASES):
        session = loop_session(task, sizes, scale, number)
        run, segments = run_epochs(train, problem, session, steps, deadline)
        epochs.append(run)
        calls += segments
        if any(finding.code in ("ran-too-long", "exited") for epoch in run for finding in epoch.trouble):
            break
    findings = [finding for run in epochs for epoch in run for finding in epoch.trouble]
    for run in epochs:
        findings += judge_boundaries(run, calls, drop_tail=drop_tail)
        findings += [judged for epoch in run for judged in judge_schedule(epoch)]
        changed = [change for epoch in run for change in epoch.changes]
        if changed:
            text = f"changed in an epoch: {'; '.join(dict.fromkeys(changed))}"
            findings.append(Finding("settings-changed", text))
    if not any(epoch.count("step") for run in epochs for epoch in run) and not findings_of(findings, "raised"):
        findings = [finding for finding in findings if finding.code not in ("tail-dropped", "tail-leaked")]
        findings.append(Finding("never-stepped", "optimizer.step was not called in any epoch", {"calls": 0}))
    findings += judge([call for call in calls if not call.leaked])
    contract = LOOP_CONTRACT.format(meant=problem.meant)
    return AuditReport(in_order(findings), contract, sum(map(len, epochs)), "epochs")


def findings_of(findings: Sequence[Finding], code: str) -> list[Finding]:
    return [finding for finding in findings if finding.code == code]


def run_epochs(
    train: Callable[..., Any], problem: Problem, session: Session, steps: int, deadline: Deadline
) -> tuple[list[Epoch], list[Call]]:
    """Run the epochs of one case; return them, and each update whose group is the right one as a call to judge."""
    model = copy.deepcopy(session.model)
    optimizer = session.make_optimizer(model)
    recorder = Recorder(model, optimizer)
    reference = Reference(copy.deepcopy(session.model), problem)
    group = list(session.groups[0])
    loader = DataLoader(TensorDataset(*concatenate_batches(group)), batch_size=len(group[0][1]))
    arguments: list[Any] = [model, optimizer, loader, steps]
    if takes_scheduler(train):
        # Nearly flat, so that the steps keep a size that the judgement is made for.
        arguments.append(LambdaLR(optimizer, lambda update: 1 / (1 + 0.01 * update)))
    epochs: list[Epoch] = []
    calls: list[Call] = []
    with own_randomness(session.seed), torch.enable_grad():
        for number in range(EPOCHS):
            surroundings = Surroundings.of(model, optimizer, group)
            recorder.moments = []
            with recorder.listening():
                recorder.note("start")
                _, trouble = call_guarded(train, tuple(arguments), deadline)
                recorder.note("end")
            recorder.backward_depth = 0
            changes = [text for text in surroundings.changes(model, optimizer, None) if is_fixed(text)]
            for module, mode in zip(model.modules(), surroundings.modes, strict=True):
                module.training = mode
            epoch = Epoch(session, group, steps, number, recorder.moments, trouble, changes)
            epochs.append(epoch)
            calls += calls_of(epoch, reference)
            finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            if not finite or any(f.code in ("raised", "ran-too-long", "exited", "no-gradient") for f in trouble):
                break
    return epochs, calls


def is_fixed(change: str) -> bool:
    """Tell what a loop must leave alone from what it may change, such as a schedule's learning rate."""
    return not change.startswith(("the learning rate", "the optimizer's"))


def takes_scheduler(train: Callable[..., Any]) -> bool:
    """Say whether a loop has an argument named scheduler, in fifth place."""
    try:
        names = list(inspect.signature(train).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 4 and names[4] == "scheduler"


def calls_of(epoch: Epoch, reference: Reference) -> list[Call]:
    """Cut an epoch at its steps; return a call for each that has the micro-batches of its group."""
    used, wanted = epoch.used, epoch.wanted
    if used is None or any(set(a) != set(b) for a, b in zip(used, wanted, strict=False)) or len(used) > len(wanted):
        return []
    problem, calls, start = reference.problem, [], 0
    ends = [place for place, moment in enumerate(epoch.moments) if moment.kind == "after-step"]
    for end, places in zip(ends, wanted, strict=False):
        moments = epoch.moments[start : end + 1]
        start = end
        group = [epoch.group[place] for place in places]
        items = [problem.count(batch) for batch in group]
        total = add_items(items)
        columns, shares = reference.shares(moments[0].parameters, group, total)
        call = Call(
            epoch.session, len(calls), group, [float(item) for item in items], total, columns, shares, reference, total
        )
        call.moments, call.full_steps = moments, epoch.steps
        call.full_count = float(problem.count(epoch.group[0]))
        call.settings = next(moment.settings for moment in moments if moment.kind == "step")
        calls.append(call)
    if calls and epoch.number and len(used) < len(wanted):
        first = Seen(calls[0])
        calls[0].leaked = first.leftover is not None and not first.is_right
    return calls


def judge_boundaries(run: Sequence[Epoch], calls: Sequence[Call], *, drop_tail: bool) -> list[Finding]:
    """Judge which micro-batches the updates of each epoch used."""
    findings: list[Finding] = []
    for epoch in run:
        used, wanted = epoch.used, epoch.wanted
        if used is None or epoch.trouble:
            continue
        sizes, right = [len(set(group)) for group in used], [len(group) for group in wanted]
        case = f"{len(epoch.group)} micro-batches with K = {epoch.steps}"
        numbers = {"micro_batches": len(epoch.group), "accumulation_steps": epoch.steps, "updates": len(used)}
        same = [set(group) for group in used] == [set(group) for group in wanted]
        if same:
            continue
        tail = len(wanted[-1])
        if [set(group) for group in used] == [set(group) for group in wanted[:-1]]:
            leaked = any(call.leaked and call.session is epoch.session for call in calls)
            never_stepped = leftover_grows(run)
            if leaked or never_stepped:
                text = f"{case}: the gradient of the last {batches(tail)} had no step and is in the next epoch's first"
                findings.append(Finding("tail-leaked", text, numbers))
            elif tail == epoch.steps or not drop_tail:
                text = f"{case} made {updates(len(used))}: the last {batches(tail)} taught nothing"
                findings.append(Finding("tail-dropped", text, numbers))
        elif epoch.steps > 1 and len(used) >= len(epoch.group) > 1 and max(sizes) == 1:
            text = f"{case} made {updates(len(used))}, one for each micro-batch; {len(wanted)} were to be made"
            findings.append(Finding("stepped-inside", text, numbers))
        elif len(used) > len(wanted) and epoch.steps == 1:
            text = f"{case} made {updates(len(used))} instead of {len(wanted)}"
            findings.append(Finding("stepped-inside", text, numbers))
        elif used:
            fell = ", ".join(map(str, sizes))
            text = f"{case} fell into groups of {fell}; they are to be {', '.join(map(str, right))}"
            findings.append(Finding("wrong-boundary", text, numbers))
    return findings


def leftover_grows(run: Sequence[Epoch]) -> bool:
    """Say whether an epoch without a step left a gradient to which the next one added."""
    if len(run) < 2 or any(epoch.count("step") for epoch in run):
        return False
    ends = [epoch.moments[-1].gradient for epoch in run]
    begins = [moment.gradient for moment in run[1].moments if moment.kind == "backward"]
    return bool(ends[0].any()) and bool(begins) and torch.equal(begins[0], ends[0]) and bool(ends[1].any())


def judge_schedule(epoch: Epoch) -> list[Finding]:
    """Judge how often the schedule was stepped, against the updates that were made."""
    stepped, made = epoch.count("schedule"), epoch.count("step")
    if stepped <= made or epoch.steps == 1:
        return []
    text = (
        f"{len(epoch.group)} micro-batches with K = {epoch.steps}: the schedule advanced {stepped} times "
        f"in {updates(made)}"
    )
    return [Finding("schedule-per-micro-batch", text, {"advanced": stepped, "updates": made})]


def updates(number: int) -> str:
    return f"{number} update{'s' * (number != 1)}"
