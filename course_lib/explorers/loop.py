"""The accumulation loop, run line by line: the model behind the microscope, without a widget in it.

The lines that are shown are the lines that run: `Loop.lines` is Python, and `record` executes it one line at a time on
a real model and real digits, through two updates. After each line it keeps what that line changed: the gradient of one
hidden unit, the bytes alive, how far the parameters have moved. A `Loop` may be broken on purpose, in four ways and
their combinations; `Record.symptoms` says what came of it, with its number, always measured and never assumed.
"""

import ast
import copy
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor, nn

from course_lib.batches import positive_int, split_batch
from course_lib.datasets import load_digits
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import cross_entropy_sum
from course_lib.memory import measure_memory
from course_lib.memory.measured import Timeline
from course_lib.models import dense_net

LEARNING_RATE = 0.1
NUM_UPDATES = 2  # a gradient that nobody clears shows in the second
LARGEST_MICRO_BATCH, MOST_STEPS = 64, 8
PLACES_TO_ZERO = ("around", "inside", "never")
SAME = 1e-5  # relative: float32 sums in another order differ by less

_recording = threading.Lock()


@dataclass(frozen=True)
class Loop:
    """One way to write the loop over `accumulation_steps` micro-batches of `micro_batch_size` digits.

    divided: the sum of losses is divided by the count of the whole group; else by that of its micro-batch alone.
    zeroed: gradients are cleared "around" the loop, "inside" it before each forward pass, or "never".
    step_inside: the optimizer steps after each backward pass; else once, after the loop.
    Raises TypeError or ValueError for sizes outside 1 to 64 and 1 to 8, or another word for `zeroed`.
    """

    micro_batch_size: int = 16
    accumulation_steps: int = 4
    divided: bool = True
    zeroed: str = "around"
    step_inside: bool = False

    def __post_init__(self) -> None:
        for name, most in (("micro_batch_size", LARGEST_MICRO_BATCH), ("accumulation_steps", MOST_STEPS)):
            if positive_int(name, getattr(self, name)) > most:
                raise ValueError(f"{name} must be from 1 to {most}; got {getattr(self, name)}")
        if self.zeroed not in PLACES_TO_ZERO:
            raise ValueError(f"zeroed must be one of {', '.join(PLACES_TO_ZERO)}; got {self.zeroed!r}")

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps

    @property
    def is_right(self) -> bool:
        return self.divided and self.zeroed == "around" and not self.step_inside

    @property
    def lines(self) -> tuple[str, ...]:
        """The source of one update, a line each; `loss_sum` is `cross_entropy_sum`."""
        size = self.micro_batch_size
        return (
            *(["optimizer.zero_grad()"] if self.zeroed == "around" else []),
            f"for micro_batch in split_batch(batch, {size}):",
            *(["    optimizer.zero_grad()"] if self.zeroed == "inside" else []),
            f"    loss = loss_sum(model, micro_batch) / {self.batch_size if self.divided else size}",
            "    loss.backward()",
            "    optimizer.step()" if self.step_inside else "optimizer.step()",
            *(["optimizer.zero_grad()"] if self.zeroed == "around" else []),
        )

    @property
    def broken_lines(self) -> tuple[int, ...]:
        """The numbers, from 1, of the lines that are not as they should be."""
        right = Loop(self.micro_batch_size, self.accumulation_steps).lines
        return tuple(number for number, line in enumerate(self.lines, start=1) if line not in right)

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """The way through both updates: (update, micro_batch, line) after each line, at first (1, 0, 0)."""
        head = next(number for number, line in enumerate(self.lines, start=1) if line.startswith("for"))
        body = [number for number, line in enumerate(self.lines, start=1) if line.startswith(" ")]
        places = [(1, 0, 0)]
        for update in range(1, NUM_UPDATES + 1):
            places += [(update, 0, number) for number in range(1, head)]
            for micro_batch in range(1, self.accumulation_steps + 1):
                places += [(update, micro_batch, number) for number in (head, *body)]
            places += [(update, self.accumulation_steps, number) for number in range(body[-1] + 1, len(self.lines) + 1)]
        return tuple(places)

    def find(self, place: int, of: "Loop") -> int:
        """Return the place here that is as far in the same update as that place of another loop."""
        wanted = of._progress(place)
        return max(here for here in range(len(self.places)) if self._progress(here) <= wanted)

    def _progress(self, place: int) -> tuple[float, ...]:
        """Return how far the run has come, in numbers that mean the same in every loop."""
        update, micro_batch, line = self.places[place]
        source = self.lines[line - 1].strip() if line else ""
        order = ("", "for", "optimizer.zero_grad", "loss =", "loss.backward", "optimizer.step")
        rank = max(rank for rank, start in enumerate(order) if source.startswith(start))
        if rank == 2 and self.zeroed == "around" and micro_batch:
            rank = len(order)  # the clearing after the step
        return update, math.inf if micro_batch == self.accumulation_steps else micro_batch, rank


@dataclass(frozen=True, eq=False)
class Moment:
    """What is there when a line has run; `line` 0 is the moment before the first.

    line: its number in `Loop.lines`, from 1. update, micro_batch: which one it is, from 1; micro_batch is 0 before the
    first of an update. gradient: `.grad` of the hidden unit that is watched, (8, 8), or None. num_digits: how many
    digits' losses were added to `.grad` since it was last cleared. length, cosine: all of `.grad` against the full
    batch's gradient, the length in times that one's; nan where there is none. moved: how far the parameters are from
    where they began (Euclidean). has_moved: whether this line moved them. changes: how often they were moved in this
    update. loss: of the micro-batch, as the line computed it. live_bytes: bytes alive. events: how many entries of the
    timeline are past.
    """

    line: int
    update: int
    micro_batch: int
    gradient: Tensor | None
    num_digits: int
    length: float
    cosine: float
    moved: float
    has_moved: bool
    changes: int
    loss: float
    live_bytes: int
    events: int


@dataclass(frozen=True, eq=False)
class Verdict:
    """One whole update against the right one, which begins from the same parameters.

    length, cosine, relative_error: the gradient after the last backward pass against the full batch's.
    changes: how often the parameters moved. distance: how far, in times the one right step.
    """

    length: float
    cosine: float
    relative_error: float
    changes: int
    distance: float

    @property
    def is_right(self) -> bool:
        return self.relative_error < SAME and self.changes == 1 and abs(self.distance - 1) < SAME


@dataclass(frozen=True, eq=False)
class Record:
    """What a loop did: its `moments`, the memory `timeline`, a `Verdict` and a `full_batch` gradient an update.

    full_batch, accumulated: the watched unit's part, (8, 8), of the whole batch's gradient and of what the loop has in
    `.grad` after the last backward pass, one for each update.
    """

    loop: Loop
    moments: tuple[Moment, ...]
    timeline: Timeline
    verdicts: tuple[Verdict, ...]
    full_batch: tuple[Tensor, ...]
    accumulated: tuple[Tensor, ...]

    @cached_property
    def largest_gradient(self) -> float:
        """The largest entry, without its sign, of all gradients that are shown."""
        gradients = [one.gradient for one in self.moments if one.gradient is not None] + list(self.full_batch)
        return max(gradient.abs().max().item() for gradient in gradients)

    @cached_property
    def path(self) -> tuple[list[int], list[float]]:
        """The parameters' way: at which event, and how far from where they began."""
        return [one.events for one in self.moments], [one.moved for one in self.moments]

    def line(self, moment: Moment) -> str:
        """Return the source of the line that has just run, without its indent; empty before the first."""
        return self.loop.lines[moment.line - 1].strip() if moment.line else ""

    def before(self, moment: Moment) -> Moment | None:
        """Return the moment before this one; None before the first."""
        place = self.moments.index(moment)
        return self.moments[place - 1] if place else None

    def sentence(self, moment: Moment) -> str:
        """Say what the line has just done."""
        loop, source = self.loop, self.line(moment)
        steps = f"micro-batch {moment.micro_batch} of {loop.accumulation_steps}"
        if not source:
            return f"Nothing has run yet. {_digits(loop.batch_size).capitalize()} for each of two updates."
        if source.startswith("for"):
            return f"Took {steps}: {_digits(loop.micro_batch_size)}."
        if source.startswith("loss ="):
            return f"Forward pass of {steps}. Its activations are alive, .grad is as it was."
        if source.startswith("loss.backward"):
            return f"Backward pass of {steps}. .grad has more in it, and the activations are gone."
        if source.startswith("optimizer.step"):
            return f"The parameters have moved: change {moment.changes} in update {moment.update}."
        if self.before(moment).gradient is None:
            return "There was nothing to clear: .grad was None."
        return "Cleared: .grad is None, and its bytes are free."

    def compared(self, moment: Moment) -> str:
        """Say how `.grad` stands to the full batch's gradient at this moment."""
        if moment.gradient is None:
            return ".grad is None."
        count = f".grad has added up {_digits(moment.num_digits)}"
        return f"{count}: {_against_full_batch(moment.length, moment.cosine)}."

    def symptoms(self, moment: Moment) -> list[str]:
        """Say what is wrong with the update of this moment, as far as it has run; each symptom with its number."""
        loop, verdict, seen = self.loop, self.verdicts[moment.update - 1], []
        if self._has_run("loss.backward()", loop.accumulation_steps, moment) and verdict.relative_error >= SAME:
            seen.append(f"The gradient is {_against_full_batch(verdict.length, verdict.cosine)}.")
            if not loop.divided and loop.accumulation_steps > 1:
                seen.append(
                    f"Each loss was divided by {loop.micro_batch_size}, not by {loop.batch_size}: "
                    f"{loop.accumulation_steps} means were added up."
                )
            if loop.zeroed == "inside" and loop.accumulation_steps > 1:
                lost = loop.batch_size - loop.micro_batch_size
                seen.append(f"zero_grad in the loop has thrown away {lost} of {_digits(loop.batch_size)}.")
            if loop.zeroed == "never" and moment.update > 1:
                seen.append(f"Nobody cleared it: the gradient of update {moment.update - 1} is still in it.")
        if moment.changes > 1:
            seen.append(
                f"The parameters have changed {moment.changes} times in one update: each time the next micro-batch "
                "meets other parameters."
            )
        if self._is_over(moment) and abs(verdict.distance - 1) >= 0.005:
            seen.append(f"The update went {verdict.distance:.2f} times as far as the right one.")
        return seen

    def is_fine(self, moment: Moment) -> bool:
        """True once the step of this update has been made and nothing is wrong with the update."""
        return self._is_over(moment) and self.verdicts[moment.update - 1].is_right

    def _is_over(self, moment: Moment) -> bool:
        steps = self.loop.accumulation_steps if self.loop.step_inside else 1
        return self._has_run("optimizer.step()", steps, moment)

    def _has_run(self, source: str, times: int, moment: Moment) -> bool:
        """True if this line has run so often in the update of the moment."""
        ran = self.moments[: self.moments.index(moment) + 1]
        return sum(one.update == moment.update and self.line(one) == source for one in ran) == times


def _digits(count: int) -> str:
    return f"{count} digit{'' if count == 1 else 's'}"


def _against_full_batch(length: float, cosine: float) -> str:
    if abs(length - 1) < SAME and cosine > 1 - SAME:
        return "equal to the full batch's, to rounding"
    if cosine > 1 - SAME:
        return f"{length:.2f} times the full batch's"
    where = "nearly the same way" if cosine > 0.98 else "elsewhere"
    return f"{length:.2f} times as long as the full batch's, and it points {where} (cosine {cosine:.3f})"


@lru_cache(maxsize=64)
def record(loop: Loop) -> Record:
    """Run a loop through two updates of the first digits and return all that was seen; the same loop is run once.

    It runs twice over: once to copy gradients and measure parameters, once to count bytes with nothing else alive.
    """
    with _recording:
        batches = _batches(loop.batch_size)
        seen, verdicts, full_batch, accumulated = _watch_values(loop, batches)
        timeline, marks = _count_bytes(loop, batches)
    moments = tuple(
        Moment(**one, live_bytes=timeline.live_bytes[events], events=events)
        for one, events in zip(seen, marks, strict=True)
    )
    return Record(loop, moments, timeline, verdicts, full_batch, accumulated)


@cache
def _fresh_model() -> nn.Sequential:
    """Build the model once: that draws random numbers, which is not for a thread beside a running cell."""
    return dense_net(hidden=(256,))


@cache
def _watched_unit() -> int:
    """Return the hidden unit whose gradient is watched: that with the largest, over the first 64 digits."""
    gradient = _gradient_of(_fresh_model(), _batches(64)[0])["1.weight"]
    return int(gradient.norm(dim=1).argmax())


def _batches(batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch for each update: copies, so that they alone count as inputs."""
    digits = load_digits()
    inputs, targets = digits.first(NUM_UPDATES * batch_size)
    return [
        (inputs[start : start + batch_size].clone(), targets[start : start + batch_size].clone())
        for start in range(0, NUM_UPDATES * batch_size, batch_size)
    ]


def _gradient_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of the mean loss of a whole batch, without touching `.grad` of the model."""
    model = copy.deepcopy(model)
    model.zero_grad()
    (cross_entropy_sum(model, batch) / len(batch[1])).backward()
    return copy_gradients(model)


def _lines_run(loop: Loop, names: dict) -> Iterator[int]:
    """Run the loop's source with these names, line by line; yield the number of each line when it has run."""

    def run(statements: Sequence[ast.stmt]) -> Iterator[int]:
        for statement in statements:
            if isinstance(statement, ast.For):
                for item in eval(compile(ast.Expression(statement.iter), "loop", "eval"), names):
                    names[statement.target.id] = item
                    yield statement.lineno
                    yield from run(statement.body)
            else:
                exec(compile(ast.Module([statement], type_ignores=[]), "loop", "exec"), names)
                yield statement.lineno

    return run(ast.parse("\n".join(loop.lines)).body)


def _names(model: nn.Module) -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return {"model": model, "optimizer": optimizer, "split_batch": split_batch, "loss_sum": cross_entropy_sum}


def _watch_values(loop: Loop, batches: list) -> tuple[list[dict], tuple, tuple, tuple]:
    """Run the loop and keep after each line what has become of gradients and parameters; return parts of a `Record`."""
    model = copy.deepcopy(_fresh_model())
    names, unit = _names(model), _watched_unit()
    watched = model[1].weight
    start = _flat(model)
    seen, verdicts, full_batches, sums = [], [], [], []
    state = {"num_digits": 0, "loss": math.nan, "micro_batch": 0, "changes": 0}
    before = start

    def look(line: int, update: int) -> None:
        nonlocal before
        now = _flat(model)
        has_moved = not torch.equal(now, before)
        before = now
        state["changes"] += has_moved
        has_gradient = watched.grad is not None
        compared = compare_gradients(full, copy_gradients(model)) if has_gradient else None
        seen.append(
            {
                "line": line,
                "update": update,
                "gradient": watched.grad[unit].reshape(8, 8).clone() if has_gradient else None,
                "length": _norm(copy_gradients(model)) / _norm(full) if compared else math.nan,
                "cosine": compared.cosine if compared else math.nan,
                "moved": (now - start).norm().item(),
                "has_moved": has_moved,
                **state,
            }
        )

    for update, batch in enumerate(batches, start=1):
        names["batch"] = batch
        full = _gradient_of(model, batch)
        full_batches.append(full["1.weight"][unit].reshape(8, 8))
        update_start = _flat(model)
        state.update(micro_batch=0, changes=0)
        if update == 1:
            look(0, update)
        for line in _lines_run(loop, names):
            source = loop.lines[line - 1].strip()
            if source.startswith("for"):
                state["micro_batch"] += 1
            elif source.startswith("loss ="):
                state["loss"] = names["loss"].item()
            elif source.startswith("loss.backward"):
                state["num_digits"] += loop.micro_batch_size
                accumulated = copy_gradients(model)
            elif source.startswith("optimizer.zero_grad"):
                state["num_digits"] = 0
            look(line, update)
        sums.append(accumulated["1.weight"][unit].reshape(8, 8))
        compared = compare_gradients(full, accumulated)
        right_step = LEARNING_RATE * _norm(full)
        verdicts.append(
            Verdict(
                length=_norm(accumulated) / _norm(full),
                cosine=compared.cosine,
                relative_error=compared.relative_error,
                changes=state["changes"],
                distance=(_flat(model) - update_start).norm().item() / right_step,
            )
        )
    return seen, tuple(verdicts), tuple(full_batches), tuple(sums)


def _count_bytes(loop: Loop, batches: list) -> tuple[Timeline, list[int]]:
    """Run the loop and count; return the timeline and, for the start and after each line, how far it had come."""
    model = copy.deepcopy(_fresh_model())
    names = _names(model)
    with measure_memory(model, names["optimizer"], batches) as meter:
        meter.mark("start")
        for names["batch"] in batches:
            for line in _lines_run(loop, names):
                meter.mark(str(line))
    return meter.timeline, [event for event, _ in meter.timeline.marks]


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.hypot(*(gradient.norm().item() for gradient in gradients.values()))


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
