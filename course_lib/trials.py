"""A setting tried out for real: its memory, its gradient, its training and its time, each beside the full batch's.

This is the model behind the control room, and it needs no widgets: `gather(Setting(...))` computes everything once and
`Evidence.sentences()` says it in words. A mission is a goal that a setting's evidence is checked against.
Everything is measured on this CPU in float32; the memory limit is a simulated budget.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.accumulation import accumulate_gradients, apply_gradients
from course_lib.batches import Batch, count_samples, map_tensors, positive_int, split_batch
from course_lib.datasets import load_digits, load_surnames, shuffled_batches
from course_lib.gradients import GradientComparison, compare_gradients, copy_gradients
from course_lib.losses import (
    IGNORED_LABEL,
    Count,
    LossSum,
    count_tokens,
    cross_entropy_sum,
    token_cross_entropy_sum,
)
from course_lib.memory import (
    MemoryPredictor,
    MemoryReport,
    format_bytes,
    measure_memory,
    memory_budget,
    parse_bytes,
)
from course_lib.models import SmallGPT, conv_net, dense_net

MODELS = ("dense", "convolutional", "GPT")
OPTIMIZERS = ("SGD", "momentum", "Adam", "AdamW")
LOOPS = ("right", "no division", "mean of means", "zero inside")
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BUDGETS = ("1 MiB", "2 MiB", "4 MiB", "8 MiB", "16 MiB", "32 MiB", "64 MiB")

LARGEST_MICRO_BATCH, MOST_STEPS, LARGEST_BATCH = 64, 64, 512
NUM_UPDATES = 60
ROUNDING = 1e-5  # a relative error up to this is rounding: float32 has seven digits, and thousands of sums round
APART = 0.01  # curves have parted when the losses of an update differ by more than this part of the larger one
NAME_LENGTH = 13  # the longest surname

Check = Callable[[], None]

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Setting:
    """One position of all controls. Raises TypeError or ValueError for a value that no control can take.

    loop: "right", or one of three faults: "no division" (each micro-batch's mean, added up), "mean of means" (that
    divided by the steps, which weighs tokens unequally), "zero inside" (gradients cleared before each micro-batch).
    """

    model: str = "dense"
    micro_batch_size: int = 16
    accumulation_steps: int = 4
    optimizer: str = "SGD"
    learning_rate: float = 0.1
    budget: str = "8 MiB"
    loop: str = "right"

    def __post_init__(self) -> None:
        for name, accepted in (("model", MODELS), ("optimizer", OPTIMIZERS), ("loop", LOOPS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {getattr(self, name)!r}")
        for name, largest in (("micro_batch_size", LARGEST_MICRO_BATCH), ("accumulation_steps", MOST_STEPS)):
            if positive_int(name, getattr(self, name)) > largest:
                raise ValueError(f"{name} must be at most {largest}; got {getattr(self, name)}")
        if self.effective_batch_size > LARGEST_BATCH:
            raise ValueError(
                f"micro_batch_size * accumulation_steps must be at most {LARGEST_BATCH}; "
                f"got {self.micro_batch_size} * {self.accumulation_steps} = {self.effective_batch_size}"
            )
        if isinstance(self.learning_rate, bool) or not isinstance(self.learning_rate, int | float):
            raise TypeError(f"learning_rate must be a number; got {self.learning_rate!r}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be above 0 and finite; got {self.learning_rate!r}")
        parse_bytes(self.budget, "budget")

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps

    @property
    def budget_bytes(self) -> int:
        return parse_bytes(self.budget, "budget")

    @property
    def code(self) -> str:
        """The line of code that opens the control room at this setting; what is at its default is left out."""
        changed = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if getattr(self, one.name) != one.default or one.name in ("micro_batch_size", "accumulation_steps")
        ]
        return f"control_room({', '.join(changed)})"


# What a setting is made of.


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return digits.inputs, digits.targets


@lru_cache(maxsize=1)
def _names() -> tuple[Tensor, Tensor]:
    """Return 2048 surnames as tokens: 0 begins a name, 1 to 26 are letters, and the target after the last is 0."""
    names = load_surnames().names[:2048]
    inputs = torch.zeros(len(names), NAME_LENGTH + 1, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED_LABEL)
    for row, name in enumerate(names):
        letters = torch.tensor([ord(letter) - ord("a") + 1 for letter in name])
        inputs[row, 1 : len(name) + 1] = letters
        targets[row, : len(name)] = letters
        targets[row, len(name)] = 0
    return inputs, targets


def data_of(setting: Setting) -> tuple[Tensor, Tensor]:
    """Return all the data that a setting trains on: digits, or names as tokens for the GPT."""
    return _names() if setting.model == "GPT" else _digits()


def loss_of(setting: Setting) -> tuple[LossSum, Count]:
    """Return the loss as a sum, and what counts its items: samples, or tokens for the GPT."""
    return (token_cross_entropy_sum, count_tokens) if setting.model == "GPT" else (cross_entropy_sum, count_samples)


def make_model(setting: Setting) -> nn.Module:
    """Build the model, the same parameters every time."""
    if setting.model == "dense":
        return dense_net(hidden=(256, 256))
    if setting.model == "convolutional":
        return conv_net(channels=32, depth=3)
    return SmallGPT(27, context=NAME_LENGTH + 1, width=64, heads=4, depth=2)


def make_optimizer(setting: Setting, model: nn.Module) -> Optimizer:
    """Build the optimizer of a setting for a model."""
    rate, parameters = setting.learning_rate, model.parameters()
    if setting.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=rate)
    if setting.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    return {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[setting.optimizer](parameters, lr=rate)


def first_batch(setting: Setting) -> Batch:
    """Return one effective batch, copied so that exactly its bytes count as inputs."""
    return map_tensors(lambda tensor: tensor[: setting.effective_batch_size].clone(), data_of(setting))


def layer_names(model: nn.Module) -> dict[str, str]:
    """Give each parameter the name of the layer it belongs to, such as "linear 2" or "block 1"."""
    names: dict[str, str] = {}
    counted: dict[str, int] = {}
    if isinstance(model, SmallGPT):
        for name, _ in model.named_parameters():
            top, *rest = name.split(".")
            names[name] = f"block {int(rest[0]) + 1}" if top == "blocks" else top.replace("_embedding", "s")
        return names
    for prefix, module in model.named_modules():
        kind = {"Conv2d": "convolution", "Linear": "linear"}.get(type(module).__name__)
        if kind is None:
            continue
        counted[kind] = counted.get(kind, 0) + 1
        names |= {f"{prefix}.{name}": f"{kind} {counted[kind]}" for name, _ in module.named_parameters()}
    return names


# Memory.


def _memory_key(setting: Setting) -> Setting:
    """Return the setting without what the bytes don't depend on, so that equal ones are worked out once."""
    return replace(setting, budget="1 MiB", loop="right", learning_rate=1.0, micro_batch_size=1, accumulation_steps=1)


@lru_cache(maxsize=32)
def _predictor(key: Setting, effective_batch_size: int) -> MemoryPredictor:
    model = make_model(key)
    batch = map_tensors(lambda tensor: tensor[:effective_batch_size].clone(), data_of(key))  # not all the data's bytes
    return MemoryPredictor(model, batch, loss_of(key)[0], make_optimizer(key, model))


@lru_cache(maxsize=4096)
def _kept_report(key: Setting, effective_batch_size: int, micro_batch_size: int) -> MemoryReport:
    return _predictor(key, effective_batch_size).predict(micro_batch_size)


def _report(key: Setting, effective_batch_size: int, micro_batch_size: int) -> MemoryReport:
    with _one_at_a_time:  # a panel asks from two threads
        return _kept_report(key, effective_batch_size, micro_batch_size)


def predict(setting: Setting, micro_batch_size: int | None = None) -> MemoryReport:
    """Predict the peak of an update of the right loop; nothing runs. Kept, so a second question costs nothing.

    micro_batch_size: another one for the same effective batch; that batch's own size is the full batch in one pass.
    """
    size = setting.micro_batch_size if micro_batch_size is None else micro_batch_size
    return _report(_memory_key(setting), setting.effective_batch_size, size)


def largest_that_fits(setting: Setting, check: Check = lambda: None) -> int | None:
    """Return the largest micro-batch size below the setting's that cuts its batch evenly and fits; None if none does.

    Predicted, each size by itself: a peak is not proportional to the size.
    """
    total = setting.effective_batch_size
    for size in range(setting.micro_batch_size - 1, 0, -1):
        check()
        if total % size == 0 and predict(setting, size).peak_bytes <= setting.budget_bytes:
            return size
    return None


@dataclass(frozen=True)
class Measured:
    """What two real updates under the budget took: `at_peak` by category, or None where they ran out of memory."""

    at_peak: dict[str, int] | None

    @property
    def peak_bytes(self) -> int | None:
        return None if self.at_peak is None else sum(self.at_peak.values())


def measure(setting: Setting, check: Check = lambda: None) -> Measured:
    """Make two real updates within the budget and measure the second, as every later one is."""
    model = make_model(setting)
    optimizer = make_optimizer(replace(setting, learning_rate=1e-6), model)  # the bytes don't depend on it
    batch = first_batch(setting)
    micro_batches = split_batch(batch, setting.micro_batch_size)
    loss_sum, ran_out = watched_loss(setting, check), False
    try:
        with memory_budget(setting.budget_bytes, model, optimizer, batch):
            update(setting, model, optimizer, micro_batches, loss_sum)
            with measure_memory(model, optimizer, batch) as meter:
                update(setting, model, optimizer, micro_batches, loss_sum)
    except torch.OutOfMemoryError:
        ran_out = True  # what the error keeps alive is let go before anything else is tried
    return Measured(None if ran_out else dict(meter.at_peak))


# The update, right or broken.


def watched_loss(setting: Setting, check: Check) -> LossSum:
    """Return the setting's loss as a sum, which calls `check` before and after each forward pass.

    Make it once for all updates of a run: `accumulate_gradients` tries a loss out that it has not met.
    """
    loss_sum, _ = loss_of(setting)

    @functools.wraps(loss_sum)  # with the count that the loss is tied to
    def watched(model: nn.Module, micro_batch: Batch) -> Tensor:
        check()
        loss = loss_sum(model, micro_batch)
        check()  # between forward and backward too: a full batch is a large micro-batch
        return loss

    return watched


def look_in_every_layer(model: nn.Module, check: Check) -> None:
    """Let the model call `check` after each layer, forward and backward: a pass of 512 samples is long to wait for."""

    def after(module: nn.Module, inputs: object, output: object) -> None:
        check()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: check())

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(after)


def update(
    setting: Setting, model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[Batch], loss_sum: LossSum
) -> float:
    """Make one update with the setting's loop; return the mean loss over the group, whatever the loop made of it."""
    loss = gradients(setting, model, micro_batches, loss_sum)
    apply_gradients(model, optimizer)
    return loss


def gradients(setting: Setting, model: nn.Module, micro_batches: Sequence[Batch], loss_sum: LossSum) -> float:
    """Fill `.grad` with what the setting's loop makes of a group, and return the mean loss."""
    _, count = loss_of(setting)
    if setting.loop == "right":
        return accumulate_gradients(model, micro_batches, loss_sum, count)
    counts = [count(micro_batch) for micro_batch in micro_batches]
    total, steps, summed = sum(counts), len(micro_batches), 0.0
    for micro_batch, items in zip(micro_batches, counts, strict=True):
        loss = loss_sum(model, micro_batch)
        summed += float(loss.detach())
        if setting.loop == "zero inside":
            model.zero_grad()
        divisor = {"no division": items, "mean of means": items * steps, "zero inside": total}[setting.loop]
        (loss / divisor).backward()
    mean = summed / total
    if not math.isfinite(mean):
        raise ValueError(f"the mean loss is {mean}, which is not finite")
    return mean


def compare(setting: Setting, check: Check = lambda: None) -> GradientComparison:
    """Compare the gradient of the setting's loop with that of the full batch in one pass, on the same data.

    The comparison's `per_parameter` is by layer, from the input to the output.
    """
    model, batch = make_model(setting), first_batch(setting)
    loss_sum = watched_loss(setting, check)
    gradients(replace(setting, loop="right"), model, [batch], loss_sum)
    reference = copy_gradients(model)
    model.zero_grad()
    gradients(setting, model, split_batch(batch, setting.micro_batch_size), loss_sum)
    layers = layer_names(model)
    return compare_gradients(_by_layer(reference, layers), _by_layer(copy_gradients(model), layers))


def _by_layer(gradients: dict[str, Tensor], layers: dict[str, str]) -> dict[str, Tensor]:
    """Join the gradients of each layer's parameters to one vector."""
    joined: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        joined.setdefault(layers[name], []).append(gradient.flatten())
    return {layer: torch.cat(parts) for layer, parts in joined.items()}


@dataclass(frozen=True)
class Curves:
    """Two trainings on the same batches, as far as they have come: losses and seconds of each update.

    A run whose loss is not finite any more ends there: then its losses are fewer than `num_updates`.
    """

    full: tuple[float, ...] = ()
    accumulated: tuple[float, ...] = ()
    full_seconds: tuple[float, ...] = ()
    accumulated_seconds: tuple[float, ...] = ()
    num_updates: int = 0

    @property
    def largest_gap(self) -> float:
        """The largest difference of two losses of one update, as a part of the larger one."""
        pairs = [*zip(self.full, self.accumulated, strict=False)]
        return max([0.0, *(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs)])

    @property
    def parted_at(self) -> int | None:
        """The first update, counted from 1, whose losses are further than `APART` from one another, or that one lacks.

        None where the curves are together, and where only the full batch was trained.
        """
        pairs = [*zip(self.full, self.accumulated, strict=False)]
        for number, (a, b) in enumerate(pairs, start=1):
            if abs(a - b) > APART * max(abs(a), abs(b)):
                return number
        return None if len(self.full) == len(self.accumulated) or not pairs else len(pairs) + 1

    def median_seconds(self, name: str) -> float:
        """Return the median time of an update of "full" or "accumulated"."""
        return statistics.median(getattr(self, f"{name}_seconds"))

    @property
    def slowdown(self) -> float | None:
        """How many times as long an accumulated update took as one of the full batch, median over median."""
        if not (self.full_seconds and self.accumulated_seconds):
            return None
        return self.median_seconds("accumulated") / self.median_seconds("full")


def train_both(
    setting: Setting, *, num_updates: int = NUM_UPDATES, accumulate: bool = True, check: Check = lambda: None
) -> Iterator[Curves]:
    """Train with the full batch and with the setting's loop on the same batches; yield the curves after each update.

    Both start from the same parameters. The full batch is the reference: it always divides rightly and is not held to
    the budget. accumulate=False leaves the second run out, for a setting that has run out of memory.
    """
    right = replace(setting, loop="right")
    runs = {"full": right, "accumulated": setting} if accumulate else {"full": right}
    models = {name: make_model(setting) for name in runs}
    optimizers = {name: make_optimizer(setting, models[name]) for name in runs}
    if setting.effective_batch_size > LARGEST_MICRO_BATCH:
        look_in_every_layer(models["full"], check)
    losses: dict[str, list[float]] = {"full": [], "accumulated": []}
    seconds: dict[str, list[float]] = {"full": [], "accumulated": []}
    size, loss_sum = setting.effective_batch_size, watched_loss(setting, check)
    for batch in shuffled_batches(data_of(setting), size, seed=0, num_batches=num_updates, drop_tail=True):
        for name, run in list(runs.items()):
            pieces = [batch] if name == "full" else split_batch(batch, setting.micro_batch_size)
            start = time.perf_counter()
            try:
                losses[name].append(update(run, models[name], optimizers[name], pieces, loss_sum))
            except ValueError as error:
                if "finite" not in str(error):
                    raise
                del runs[name]  # it has diverged
                continue
            seconds[name].append(time.perf_counter() - start)
        yield Curves(
            full=tuple(losses["full"]),
            accumulated=tuple(losses["accumulated"]),
            full_seconds=tuple(seconds["full"]),
            accumulated_seconds=tuple(seconds["accumulated"]),
            num_updates=num_updates,
        )
        if not runs:
            return


# Everything that is known of a setting.


@dataclass(frozen=True)
class Evidence:
    """What is known of a setting so far; what has not been computed yet is None, and `finished` says if all has been.

    predicted, full_predicted: of the setting's update and of its batch in one pass. fits: the largest smaller
    micro-batch within the budget, looked for when it runs out of memory.
    """

    setting: Setting
    predicted: MemoryReport | None = None
    full_predicted: MemoryReport | None = None
    comparison: GradientComparison | None = None
    measured: Measured | None = None
    fits: int | None = None
    curves: Curves | None = None
    finished: bool = False

    @property
    def out_of_memory(self) -> bool:
        return self.measured is not None and self.measured.at_peak is None

    def sentences(self) -> dict[str, str]:
        """Say what is seen, in words: of "memory", "gradient", "curves" and "time"."""
        return {
            "memory": _memory_words(self),
            "gradient": _gradient_words(self),
            "curves": _curves_words(self),
            "time": _time_words(self),
        }


def gather(
    setting: Setting,
    *,
    num_updates: int = NUM_UPDATES,
    check: Check = lambda: None,
    tell: Callable[[Evidence], None] = lambda evidence: None,
) -> Evidence:
    """Try a setting out: predict, compare the gradients, measure, train. Returns all the evidence.

    num_updates: of the training; 0 leaves it out, and the evidence is then not finished.
    tell(evidence): called whenever something is new. check(): called at least once a micro-batch; may raise to stop.
    """
    evidence = Evidence(setting)

    def add(**known: object) -> None:
        nonlocal evidence
        check()
        evidence = replace(evidence, **known)
        tell(evidence)

    check()
    add(predicted=predict(setting))
    add(comparison=compare(setting, check))
    measured = measure(setting, check)
    fits = largest_that_fits(setting, check) if measured.at_peak is None else None
    add(measured=measured, fits=fits, full_predicted=predict(setting, setting.effective_batch_size))
    if num_updates:
        fits_whole = measured.at_peak is not None
        for curves in train_both(setting, num_updates=num_updates, accumulate=fits_whole, check=check):
            add(curves=curves)
        add(finished=True)
    return evidence


def _passes(number: int) -> str:
    return "1 pass" if number == 1 else f"{number} passes"


def _memory_words(evidence: Evidence) -> str:
    setting, report, measured = evidence.setting, evidence.predicted, evidence.measured
    if report is None:
        return "Memory: predicting."
    budget, peak = format_bytes(setting.budget_bytes), format_bytes(report.peak_bytes, 2)
    if evidence.out_of_memory:
        short = max(report.peak_bytes - setting.budget_bytes, 0)
        words = f"Out of memory: {format_bytes(short, 2)} short of the {peak} that it needs"
        if evidence.fits is None:
            return f"{words}. No smaller micro-batch of this batch would fit."
        return f"{words}; micro-batches of {evidence.fits} would fit."
    if measured is None:
        verb = "fits into" if report.peak_bytes <= setting.budget_bytes else "does not fit into"
        return f"Memory: {peak} predicted, which {verb} {budget}; not measured yet."
    here = format_bytes(measured.peak_bytes, 2)
    found = "as predicted" if here == peak else f"{peak} predicted for the right loop"
    return f"Memory: it runs within {budget}; {here} at the peak, {found}."


def _gradient_words(evidence: Evidence) -> str:
    found = evidence.comparison
    if found is None:
        return "Gradient: not compared yet."
    if evidence.setting.accumulation_steps == 1:
        return "Gradient: one micro-batch is the full batch. A difference, or a fault of the loop, takes two."
    if found.agree(ROUNDING):
        return f"Gradient: equal to rounding, relative error {found.relative_error:.0e}."
    return (
        f"Gradient: not equal. It is {found.scale:.2f} times the full batch's along it, "
        f"cosine {found.cosine:.2f}, relative error {found.relative_error:.2g}."
    )


def _curves_words(evidence: Evidence) -> str:
    curves = evidence.curves
    if evidence.out_of_memory:
        return "Curves: out of memory, so only the full batch is trained, outside the budget."
    if curves is None or not curves.full:
        return "Curves: not trained yet."
    at, done = curves.parted_at, max(len(curves.full), len(curves.accumulated))
    so_far = "" if evidence.finished else f" after {done} of {curves.num_updates} updates"
    diverged = "".join(
        f" {name} diverged at update {len(losses) + 1}."
        for name, losses in (("The full batch", curves.full), ("Accumulation", curves.accumulated))
        if len(losses) < (curves.num_updates if evidence.finished else done)
    )
    if at is None:
        return f"Curves: they lie on one another{so_far}, at most {curves.largest_gap:.0e} apart.{diverged}"
    return f"Curves: they part at update {at}{so_far}. {_cause(evidence)}{diverged}"


def _cause(evidence: Evidence) -> str:
    if evidence.setting.loop == "right":
        return "The loop is right: the learning rate is so large that training makes rounding grow."
    return f"The loop is broken: {evidence.setting.loop}."


def _time_words(evidence: Evidence) -> str:
    curves, setting = evidence.curves, evidence.setting
    if curves is None or not curves.full_seconds:
        return "Time: not measured yet."
    full = curves.median_seconds("full")
    size = setting.effective_batch_size
    words = f"Time on this CPU: {_milliseconds(full)} for the full batch, {size / full:,.0f} samples a second"
    if not curves.accumulated_seconds:
        return f"{words}."
    mine = curves.median_seconds("accumulated")
    return (
        f"{words}; {_milliseconds(mine)} in {_passes(setting.accumulation_steps)}, "
        f"{size / mine:,.0f} a second: {curves.slowdown:.1f} times the time."
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


# Missions.


@dataclass(frozen=True)
class Goal:
    """What one condition of a mission says, and whether the evidence meets it; None while it is not known yet."""

    words: str
    met: bool | None


@dataclass(frozen=True)
class Mission:
    """A goal to reach with the controls. `look(evidence)` returns its conditions, of which all must be met.

    solution: one setting that reaches it, for the tests and for those who give up.
    """

    title: str
    task: str
    look: Callable[[Evidence], list[Goal]]
    solution: Setting = field(repr=False)

    def verdict(self, evidence: Evidence) -> tuple[bool, str]:
        """Say whether the mission is solved, and in a sentence what is still missing."""
        goals = self.look(evidence)
        missing = [goal.words for goal in goals if goal.met is False]
        unknown = [goal.words for goal in goals if goal.met is None]
        if missing:
            return False, f"Not yet: {'; '.join(missing)}."
        if unknown:
            return False, f"Waiting: {'; '.join(unknown)}."
        return True, "Solved."


def _equal(evidence: Evidence) -> Goal:
    comparison = evidence.comparison
    return Goal("the gradient must equal the full batch's", None if comparison is None else comparison.agree(ROUNDING))


def _runs(evidence: Evidence) -> Goal:
    return Goal("it must run within the budget", None if evidence.measured is None else not evidence.out_of_memory)


def _effective(evidence: Evidence, wanted: int) -> Goal:
    size = evidence.setting.effective_batch_size
    return Goal(f"the effective batch must be {wanted}, it is {size}", size == wanted)


def _accumulates(evidence: Evidence) -> Goal:
    return Goal("there must be more than one accumulation step", evidence.setting.accumulation_steps > 1)


def _is(evidence: Evidence, name: str, wanted: str, words: str) -> Goal:
    return Goal(f"{words} must be {wanted}", getattr(evidence.setting, name) == wanted)


def _ran(evidence: Evidence) -> bool:
    """True when training has ended with both curves drawn to some point."""
    return evidence.finished and evidence.curves is not None and len(evidence.curves.accumulated) > 0


def _parted(evidence: Evidence, wanted: bool) -> Goal:
    words = "the curves must part" if wanted else "the curves must stay together"
    if evidence.curves is not None and evidence.curves.parted_at is not None:
        return Goal(words, wanted)  # a curve that has parted is not together again
    return Goal(words, None if not evidence.finished else _ran(evidence) and not wanted)


def _whole(evidence: Evidence) -> Goal:
    """Both trainings came to their end with numbers."""
    curves = evidence.curves
    ended = curves is not None and len(curves.full) == len(curves.accumulated) == curves.num_updates
    return Goal("no training may diverge to numbers that are not finite", ended if evidence.finished else None)


def _start(evidence: Evidence) -> list[Goal]:
    size = evidence.setting.micro_batch_size
    goal = Goal(f"micro-batches must hold 16, they hold {size}", size == 16)
    return [_effective(evidence, 64), goal, _equal(evidence), _runs(evidence)]


def _run_out(evidence: Evidence) -> list[Goal]:
    measured = evidence.measured
    return [Goal("it must run out of memory", None if measured is None else evidence.out_of_memory)]


def _within(evidence: Evidence) -> list[Goal]:
    budget = evidence.setting.budget_bytes
    return [
        _is(evidence, "model", "GPT", "the model"),
        _effective(evidence, 256),
        Goal("the budget must be 8 MiB or less", budget <= parse_bytes("8 MiB")),
        _equal(evidence),
        _runs(evidence),
    ]


def _largest(evidence: Evidence) -> list[Goal]:
    setting = evidence.setting
    goals = [
        _is(evidence, "model", "convolutional", "the model"),
        _is(evidence, "optimizer", "AdamW", "the optimizer"),
        Goal("the budget must be 1 MiB", setting.budget_bytes == parse_bytes("1 MiB")),
        _accumulates(evidence),
        _runs(evidence),
    ]
    if all(goal.met for goal in goals):
        words = f"{setting.micro_batch_size} fits, but so does {setting.micro_batch_size + 1}"
        goals.append(Goal(words, not _one_more_fits(setting)))
    return goals


def _one_more_fits(setting: Setting) -> bool:
    """Say whether one sample more a micro-batch would fit, with as many steps."""
    size = setting.micro_batch_size + 1
    report = _report(_memory_key(setting), size * setting.accumulation_steps, size)  # a control may not go so far
    return report.peak_bytes <= setting.budget_bytes


def _slowest(evidence: Evidence) -> list[Goal]:
    steps = evidence.setting.accumulation_steps
    return [
        _effective(evidence, 64),
        _equal(evidence),
        _runs(evidence),
        Goal(f"{_passes(steps)} can be outdone", steps == 64),
    ]


def _part(evidence: Evidence) -> list[Goal]:
    return [_accumulates(evidence), _parted(evidence, wanted=True)]


def _part_rightly(evidence: Evidence) -> list[Goal]:
    return [
        _is(evidence, "loop", "right", "the loop"),
        _accumulates(evidence),
        _equal(evidence),
        _parted(evidence, wanted=True),
        _whole(evidence),
    ]


def _hide(evidence: Evidence) -> list[Goal]:
    comparison, curves = evidence.comparison, evidence.curves
    scale = None if comparison is None else comparison.scale > 3.5
    close = None
    if evidence.finished:
        ends = [curves.full[-1], curves.accumulated[-1]] if curves and curves.full and curves.accumulated else []
        close = bool(ends) and abs(ends[0] - ends[1]) <= 0.05 * max(ends)
    return [
        _is(evidence, "loop", "no division", "the loop"),
        Goal("the gradient must be about 4 times too long, or more", scale),
        Goal("the last two losses must be within 5 percent", close),
        _whole(evidence),
    ]


def _mean_of_means(evidence: Evidence) -> list[Goal]:
    comparison = evidence.comparison
    unequal = None if comparison is None else not comparison.agree(1e-2)
    return [
        _is(evidence, "loop", "mean of means", "the loop"),
        Goal("the gradient must be off by more than 1 percent", unequal),
    ]


def _costs(evidence: Evidence) -> list[Goal]:
    measured, full = evidence.measured, evidence.full_predicted
    more = None
    if measured is not None and full is not None:
        more = measured.peak_bytes is not None and measured.peak_bytes > full.peak_bytes
    return [
        _accumulates(evidence),
        _is(evidence, "loop", "right", "the loop"),
        Goal("the peak must be above that of the whole batch in one pass", more),
    ]


def _learn(evidence: Evidence) -> list[Goal]:
    curves = evidence.curves
    low = None
    if evidence.finished:
        low = curves is not None and bool(curves.accumulated) and curves.accumulated[-1] < 0.5
    setting = evidence.setting
    return [
        _is(evidence, "model", "convolutional", "the model"),
        Goal("the effective batch must be at least 128", setting.effective_batch_size >= 128),
        Goal("the budget must be 1 MiB", setting.budget_bytes == parse_bytes("1 MiB")),
        _runs(evidence),
        Goal("the last loss must be below 0.5", low),
        _parted(evidence, wanted=False),
    ]


MISSIONS: tuple[Mission, ...] = (
    Mission(
        "1. Sixty-four in sixteens",
        "Reach an effective batch of 64 with micro-batches of 16, equal to the full batch.",
        _start,
        Setting(),
    ),
    Mission(
        "2. Break the device",
        "Run out of memory.",
        _run_out,
        Setting(model="GPT", micro_batch_size=64, accumulation_steps=1, budget="4 MiB"),
    ),
    Mission(
        "3. A large batch in a small room",
        "Reach an effective batch of 256 with the GPT within 8 MiB.",
        _within,
        Setting(model="GPT", micro_batch_size=8, accumulation_steps=32),
    ),
    Mission(
        "4. Equal but slowest",
        "Find the setting that equals a full batch of 64 and makes the most passes over it.",
        _slowest,
        Setting(micro_batch_size=1, accumulation_steps=64),
    ),
    Mission(
        "5. Make the curves part",
        "By any means: the two trainings must drift apart by more than 1 percent.",
        _part,
        Setting(loop="no division"),
    ),
    Mission(
        "6. The largest that fits",
        "Convolutional, AdamW, 1 MiB, more than one step: find the micro-batch that fits while one more does not.",
        _largest,
        Setting(model="convolutional", micro_batch_size=17, accumulation_steps=4, optimizer="AdamW", budget="1 MiB"),
    ),
    Mission(
        "7. Weigh the tokens wrongly",
        "With the mean of means as the loop: find where its gradient is off by more than 1 percent.",
        _mean_of_means,
        Setting(model="GPT", micro_batch_size=4, accumulation_steps=4, loop="mean of means"),
    ),
    Mission(
        "8. Hide the missing division",
        "Leave the division out, so that the gradient is 4 times too long, and end within 5 percent all the same.",
        _hide,
        Setting(optimizer="Adam", learning_rate=1e-3, loop="no division"),
    ),
    Mission(
        "9. Pay for cutting",
        "Find a batch whose peak is higher in micro-batches than in one pass.",
        _costs,
        Setting(micro_batch_size=1, accumulation_steps=2),
    ),
    Mission(
        "10. Learn in a tight room",
        "Convolutional, 1 MiB, an effective batch of 128 or more: end below a loss of 0.5, the curves together.",
        _learn,
        Setting(
            model="convolutional",
            micro_batch_size=8,
            accumulation_steps=16,
            optimizer="Adam",
            learning_rate=0.003,
            budget="1 MiB",
        ),
    ),
    Mission(
        "11. Part with the right loop",
        "The loop stays right and every number finite, and still the curves part.",
        _part_rightly,
        Setting(optimizer="momentum", learning_rate=1.0),
    ),
)


def mission(number: int) -> Mission:
    """Return a mission by its number, from 1."""
    if positive_int("number", number) > len(MISSIONS):
        raise ValueError(f"number must be at most {len(MISSIONS)}, the number of missions; got {number}")
    return MISSIONS[number - 1]


__all__ = [
    "BUDGETS",
    "LEARNING_RATES",
    "LOOPS",
    "MISSIONS",
    "MODELS",
    "OPTIMIZERS",
    "Curves",
    "Evidence",
    "Measured",
    "Mission",
    "Setting",
    "gather",
    "mission",
]
