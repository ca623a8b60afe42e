"""Watch one call of an update or a loop: what ran in which order, and gradients and parameters at each moment between.

What somebody's code *does* is seen by its events (a forward pass, a backward pass, a step, a schedule's step), whatever
it calls them by. What happened *between* two events is the difference of gradients and parameters: a gradient that has
gone was cleared, one that is shorter was clipped or divided, by whatever means.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.audit.problems import held_settings, row_names
from course_lib.batches import Batch, tensors_of


@dataclass(frozen=True)
class Moment:
    """The state at an event. gradient and parameters are one long vector each; a missing gradient counts as zeros.

    kind: start, forward, backward (before), after-backward, clear (zero_grad, before), after-clear, step (before),
    after-step, schedule, end.
    rows: of a forward pass, the samples that it saw; None where they are not known. with_graph: of a forward pass,
    whether a gradient could follow. settings: of a step, what the optimizer was set to.
    """

    kind: str
    gradient: Tensor
    filled: tuple[bool, ...]
    parameters: Tensor
    rows: tuple[bytes, ...] | None = None
    with_graph: bool = False
    training: bool = True
    settings: list[dict[str, Any]] = field(default_factory=list)
    mark: int = 0  # which mark of the meter stands here


class Recorder:
    """The moments of a call, in order. One recorder follows one model and one optimizer through a session."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self.model, self.optimizer = model, optimizer
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.moments: list[Moment] = []
        self.backward_depth = 0
        self.meter = None
        self.marks = 0
        self.is_on = False

    def __deepcopy__(self, memo: dict) -> Recorder:
        return self  # a copy of the model carries our hooks along; its passes are seen as passes of the model

    def note(self, kind: str, **details: Any) -> None:
        """Keep the state at an event."""
        if not self.is_on:
            return
        if self.meter is not None:
            self.meter.mark(kind)
            self.marks += 1
        with torch.no_grad(), _disable_current_modes():  # our copies are none of the update's bytes
            self.moments.append(
                Moment(
                    kind,
                    self.gradient(),
                    tuple(parameter.grad is not None for parameter in self.trained),
                    torch.cat([parameter.detach().double().flatten() for parameter in self.trained]),
                    mark=self.marks - 1,
                    **details,
                )
            )

    def gradient(self) -> Tensor:
        """Return the gradient as one vector in float64."""
        parts = [
            torch.zeros(parameter.numel(), dtype=torch.float64)
            if parameter.grad is None
            else parameter.grad.detach().to_dense().double().cpu().flatten()
            for parameter in self.trained
        ]
        return torch.cat(parts)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the events of model, optimizer, autograd and schedules while the block runs."""
        hooks = [
            self.model.register_forward_pre_hook(self._forward, with_kwargs=True),
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        engine, schedule = torch.autograd._engine_run_backward, LRScheduler.step

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self.backward_depth == 0:
                self.note("backward")
            self.backward_depth += 1
            try:
                return engine(*args, **kwargs)
            finally:
                self.backward_depth -= 1
                if self.backward_depth == 0:
                    self.note("after-backward")

        def step_schedule(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            if scheduler.optimizer is self.optimizer and scheduler.last_epoch != -1:  # else it is being built
                self.note("schedule")
            return schedule(scheduler, *args, **kwargs)

        def noting(clear: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(clear)
            def noted(*args: Any, **kwargs: Any) -> Any:
                self.note("clear")
                clear(*args, **kwargs)
                self.note("after-clear")

            return noted

        clearing = Optimizer.zero_grad, nn.Module.zero_grad
        Optimizer.zero_grad, nn.Module.zero_grad = map(noting, clearing)
        torch.autograd._engine_run_backward, LRScheduler.step = run_backward, step_schedule
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            torch.autograd._engine_run_backward, LRScheduler.step = engine, schedule
            Optimizer.zero_grad, nn.Module.zero_grad = clearing
            for hook in hooks:
                hook.remove()

    def _forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.backward_depth:
            return  # recomputed, as checkpointing does
        rows = None
        try:
            seen = tensors_of([args, {key: value for key, value in kwargs.items() if isinstance(value, Tensor)}])
            rows = tuple(row_names(seen[0]))
        except Exception:
            rows = None  # arguments of another kind, or under a transform: which samples these are stays unknown
        self.note("forward", rows=rows, with_graph=torch.is_grad_enabled(), training=module.training)

    def _before_step(self, *_: Any) -> None:
        self.note("step", settings=copy.deepcopy(held_settings(self.optimizer)))

    def _after_step(self, *_: Any) -> None:
        self.note("after-step")


def unfold_closures(moments: list[Moment]) -> None:
    """Put a step after the backward passes that it made itself, by a closure: that is where it used their gradient."""
    for place, moment in enumerate(moments):
        if moment.kind != "step":
            continue
        end = next((n for n in range(place, len(moments)) if moments[n].kind == "after-step"), len(moments))
        passes = [n for n in range(place, end) if moments[n].kind == "after-backward"]
        if passes:
            last = moments[passes[-1]]
            used = replace(moment, gradient=last.gradient, filled=last.filled, parameters=last.parameters)
            moments.insert(end, used)
            del moments[place]


@dataclass
class Surroundings:
    """What an update should leave as it is, kept before the call and compared after it."""

    settings: list[dict[str, Any]]
    modes: list[bool]
    trained: list[bool]
    data: list[Tensor]
    batches: list[Batch]
    randomness: tuple

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> Surroundings:
        return cls(
            copy.deepcopy(held_settings(optimizer)),
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            [tensor.clone() for tensor in tensors_of(list(batches))],
            list(batches),
            random_states(),
        )

    def changes(self, model: nn.Module, optimizer: Optimizer, given: Any) -> list[str]:
        """Say what is not as it was; the data are put back."""
        found = changed_settings(self.settings, held_settings(optimizer))
        if [module.training for module in model.modules()] != self.modes:
            found.append("the training mode of the model")
        if [parameter.requires_grad for parameter in model.parameters()] != self.trained:
            found.append("requires_grad of parameters")
        tensors = tensors_of(list(self.batches))
        if not all(
            now.shape == before.shape and torch.equal(now, before)
            for now, before in zip(tensors, self.data, strict=True)
        ):
            found.append("the data of the micro-batches")
            for now, before in zip(tensors, self.data, strict=True):
                now.detach().copy_(before)
        if isinstance(given, list) and [id(batch) for batch in given] != [id(batch) for batch in self.batches]:
            found.append("the list of micro-batches")
        return found


def changed_settings(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Name the settings of an optimizer that differ, with their values."""
    if len(before) != len(now):
        return ["the parameter groups of the optimizer"]
    found = []
    for old, new in zip(before, now, strict=True):
        for key in sorted(old.keys() | new.keys()):
            a, b = old.get(key), new.get(key)
            if isinstance(a, bool) or key in ("initial_lr", "foreach", "fused"):
                continue  # a scheduler notes initial_lr; the rest is how a step is computed, not what it is
            if a != b:
                name = "the learning rate" if key == "lr" else f"the optimizer's {key}"
                with_values = isinstance(a, int | float) and isinstance(b, int | float)
                sentence = f"{name} (from {a:.3g} to {b:.3g})" if with_values else name
                if sentence.split(" (")[0] not in [other.split(" (")[0] for other in found]:
                    found.append(sentence)
    return found


def random_states() -> tuple:
    """Return the states of torch, of `random`, and of numpy where it is loaded, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()[1].tobytes()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed the random states inside the block, and give them back after it."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            if numpy is not None:
                numpy.random.set_state(kept[1])
