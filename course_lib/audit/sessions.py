"""Run an update through the sessions of a problem, and keep of each call what it did and what it should have done."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.accumulation import Items, add_items, by_term, check_items, divide
from course_lib.audit.limits import Deadline, call_guarded
from course_lib.audit.problems import Problem, Session, rows_of, sizes_of
from course_lib.audit.recording import Moment, Recorder, Surroundings, own_randomness, random_states, unfold_closures
from course_lib.audit.report import Finding
from course_lib.batches import Batch, split_batch
from course_lib.memory import measure_memory


@dataclass
class Reference:
    """A copy of the model in which the gradient of any part of the group can be taken, at any parameters."""

    model: nn.Module
    problem: Problem

    def set(self, parameters: Tensor) -> list[nn.Parameter]:
        """Put one long vector into the trained parameters, and return them."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        pieces = parameters.split([parameter.numel() for parameter in trained])
        with torch.no_grad():
            for parameter, piece in zip(trained, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))
        return trained

    def shares(self, parameters: Tensor, parts: Sequence[Batch], total: Items) -> tuple[Tensor, list[float]]:
        """Return the gradient of what each part adds to the mean loss, as columns, and the values of what it adds."""
        trained = self.set(parameters)
        columns, values = [], []
        with torch.random.fork_rng(devices=[]):
            for part in parts:
                with torch.enable_grad():
                    share = divide(self.problem.loss_sum(self.model, part), total)
                    gradients = torch.autograd.grad(share, trained, allow_unused=True)
                flat = [
                    torch.zeros(parameter.numel(), dtype=torch.float64)
                    if gradient is None
                    else gradient.detach().double().cpu().flatten()
                    for parameter, gradient in zip(trained, gradients, strict=True)
                ]
                columns.append(torch.cat(flat))
                values.append(float(share.detach()))
        return torch.stack(columns, dim=1), values


@dataclass
class Call:
    """One call of an update: what was given, what happened, and the reference to judge it by.

    columns: the gradient of each micro-batch's share of the mean loss at the parameters at entry. shares: its value.
    stepped_to: where one step of the same optimizer leads from the gradient that the step found. leftover: the gradient
    that lay there at entry.
    """

    session: Session
    number: int
    group: list[Batch]
    counts: list[float]
    total: float
    columns: Tensor
    shares: list[float]
    reference: Reference
    items: Items
    moments: list[Moment] = field(default_factory=list)
    returned: Any = None
    trouble: list[Finding] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    randomness: tuple = ()  # (before, after)
    stepped_to: Tensor | None = None
    state_differs: list[str] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)  # bytes saved for backward, at each moment
    peak_bytes: int = 0
    settings: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer, at entry
    full_steps: int | None = None  # of a loop: its accumulation_steps
    full_count: float = 0.0  # of a loop: what the first micro-batch of the epoch holds
    leaked: bool = False  # of a loop: a tail of the epoch before is in this gradient

    @property
    def steps(self) -> int:
        return len(self.group)

    @property
    def rows(self) -> list[list[bytes]]:
        return [rows_of(batch) for batch in self.group]


def run_sessions(update: Callable[..., Any], problem: Problem, deadline: Deadline) -> list[Call]:
    """Run all sessions. After an error a session ends; after an exit or at the time limit everything does."""
    calls: list[Call] = []
    for session in problem.sessions:
        new = run_session(update, problem, session, deadline)
        if session.with_memory and any(finding.code == "raised" for call in new for finding in call.trouble):
            new = []  # what can't run under the meter (torch.func, for one) is judged by the other sessions
        calls += new
        if any(finding.code in ("ran-too-long", "exited") for call in new for finding in call.trouble):
            break
    return calls


def run_session(update: Callable[..., Any], problem: Problem, session: Session, deadline: Deadline) -> list[Call]:
    """Run one session: a fresh copy of the model, one optimizer, its groups in order."""
    model = copy.deepcopy(session.model)
    optimizer = session.make_optimizer(model)
    reference = Reference(copy.deepcopy(session.model), problem)
    recorder = Recorder(model, optimizer)
    calls: list[Call] = []
    with ExitStack() as stack:
        stack.enter_context(own_randomness(session.seed))
        stack.enter_context(torch.enable_grad())
        if session.with_memory:
            recorder.meter = stack.enter_context(measure_memory(model, optimizer, *session.groups))
        for number, group in enumerate(session.groups):
            reference.model.load_state_dict(model.state_dict())
            call = new_call(session, number, list(group), reference, recorder)
            run_call(update, call, recorder)(deadline)
            calls.append(call)
            broken = any(finding.code not in ("settings-changed", "printed-too-much") for finding in call.trouble)
            if broken or not all(bool(p.isfinite().all()) for p in model.parameters()):
                break
    if recorder.meter is not None:
        timeline = recorder.meter.timeline
        for call in calls:
            places = [timeline.marks[moment.mark][0] for moment in call.moments]
            call.activations = [timeline.by_category["activations"][place] for place in places]
            call.peak_bytes = recorder.meter.peak_bytes
    return calls


def new_call(session: Session, number: int, group: list[Batch], reference: Reference, recorder: Recorder) -> Call:
    """Prepare a call: count the group, and take the reference gradient at the present parameters."""
    with _disable_current_modes():
        problem = reference.problem
        items = [check_items(problem.count(batch)) for batch in group]
        total = add_items(items)
        with torch.no_grad():
            parameters = torch.cat([parameter.detach().double().flatten() for parameter in recorder.trained])
        columns, shares = reference.shares(parameters, group, total)
        one_number = not isinstance(total, dict)
        counts = [float(item) for item in items] if one_number else [float(size) for size in sizes_of(group)]
        return Call(session, number, group, counts, sum(counts), columns, shares, reference, total)


def run_call(update: Callable[..., Any], call: Call, recorder: Recorder) -> Callable[[Deadline], None]:
    """Return a function that makes the call and fills in what happened."""
    model, optimizer = recorder.model, recorder.optimizer

    def run(deadline: Deadline) -> None:
        given = list(call.group)
        with _disable_current_modes():  # what we keep is none of the update's bytes
            surroundings = Surroundings.of(model, optimizer, call.group)
            state = copy.deepcopy(optimizer.state_dict())
            call.settings = surroundings.settings
        recorder.moments = call.moments
        with recorder.listening():
            recorder.note("start")
            call.returned, call.trouble = call_guarded(update, (model, optimizer, given), deadline)
            recorder.note("end")
        unfold_closures(call.moments)
        recorder.backward_depth = 0
        call.changes = surroundings.changes(model, optimizer, given)
        call.randomness = (surroundings.randomness, random_states())
        for parameter, trained in zip(model.parameters(), surroundings.trained, strict=True):
            parameter.requires_grad_(trained)
        for module, mode in zip(model.modules(), surroundings.modes, strict=True):
            module.training = mode
        steps = [moment for moment in call.moments if moment.kind == "step"]
        if len(steps) == 1:
            with _disable_current_modes():
                take_reference_step(call, steps[0], state, optimizer)

    return run


def take_reference_step(call: Call, step: Moment, state: dict, optimizer: Any) -> None:
    """Take the step that was seen with a fresh optimizer in the same state, and compare where both lead."""
    trained = call.reference.set(step.parameters)
    own = call.session.make_optimizer(call.reference.model)
    own.load_state_dict(state)
    pieces = step.gradient.split([parameter.numel() for parameter in trained])
    for parameter, piece, filled in zip(trained, pieces, step.filled, strict=True):
        parameter.grad = piece.view_as(parameter).to(parameter).clone() if filled else None
    own.step()
    call.stepped_to = torch.cat([parameter.detach().double().flatten() for parameter in trained])
    for parameter in trained:
        parameter.grad = None
    wanted, found = own.state_dict()["state"], optimizer.state_dict()["state"]
    for key in sorted(wanted.keys() | found.keys()):
        for name in sorted(wanted.get(key, {}).keys() | found.get(key, {}).keys()):
            a, b = wanted.get(key, {}).get(name), found.get(key, {}).get(name)
            if a is None and b is None:
                continue
            same = a is not None and b is not None
            if same:
                a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
                same = a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-300, equal_nan=True)
            if not same and name not in call.state_differs:
                call.state_differs.append(name)


def sample_columns(call: Call, parameters: Tensor) -> tuple[Tensor, list[int]] | None:
    """Return a column for each sample of the group, and which micro-batch it is from; None where that tells nothing."""
    samples = [(place, sample) for place, batch in enumerate(call.group) for sample in split_batch(batch, 1)]
    if len(samples) > 60 or len(samples) > call.columns.shape[0]:
        return None
    try:
        parts = [(place, sample) for place, sample in samples if _counts(call, sample)]
        columns, _ = call.reference.shares(parameters, [sample for _, sample in parts], call.items)
    except Exception:
        return None  # one sample alone is refused by some models, such as those with BatchNorm
    return columns, [place for place, _ in parts]


def _counts(call: Call, sample: Batch) -> bool:
    items = by_term(call.reference.problem.count(sample))
    return any(float(number) > 0 for number in items.values())
