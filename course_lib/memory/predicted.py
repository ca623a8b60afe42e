"""Predict the peak of an update before anything runs: the learner's own module, on tensors that have sizes but no data.

PyTorch's `FakeTensorMode` gives every operation its output's shape, type and lifetime without computing or allocating
it. So the update can be acted out, forward, backward and step, under the same count that measures a real one
(`measured`). The module is not touched: a stand-in of the same classes and settings takes its place, with parameters
that are fake. What needs numbers (`.item()`, a boolean mask, `nonzero`) cannot be acted out; then micro-batches
are really run, on a stand-in that shares the parameters, and the report says so.

Fake tensors are always on the CPU here: one on "cuda" ends a process whose PyTorch has no CUDA. For a CUDA device the
known rules are applied by arithmetic, and the report calls it that.
"""

from __future__ import annotations

import bisect
import collections
import copy
import enum
import functools
import inspect
import logging
import operator
import random
import re
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.batches import Batch, batch_size, map_tensors, positive_int, tensors_of
from course_lib.losses import LossSum
from course_lib.memory.measured import (
    CATEGORIES,
    MemoryMeter,
    _Residents,
    _Storage,
    _storage_or_none,
    _tensors_in,
    _Tracker,
    format_bytes,
)

CUDA_ROUNDING = 512  # bytes; kMinBlockSize of PyTorch's CUDA caching allocator


@dataclass(frozen=True)
class MemoryReport:
    """The peak of one update, of the second one and all that follow, in bytes.

    peak_bytes: the most bytes alive at one moment; at_peak: the same by category (those of `measure_memory`).
    peak_moment: that moment in words. micro_batch_size: at most the batch's size. accumulation_steps: micro-batches.
    resident_bytes: alive between updates: parameters, buffers, optimizer state, inputs.
    pass_peak_bytes, step_peak_bytes: the peak of the forward and backward passes, and that of the optimizer's step.
    scratch_bytes: what kernels took unseen in a profiled real pass, above `pass_peak_bytes`; None unless asked for.
    measured: True when micro-batches had to be run for it. device: whose rules were applied.
    assumptions: what the numbers rest on, a sentence each.
    """

    peak_bytes: int
    at_peak: dict[str, int]
    peak_moment: str
    micro_batch_size: int
    accumulation_steps: int
    resident_bytes: int
    pass_peak_bytes: int
    step_peak_bytes: int
    scratch_bytes: int | None
    measured: bool
    device: str
    assumptions: tuple[str, ...]

    @property
    def needed_bytes(self) -> int:
        """The peak with kernel scratch, where that was calibrated; else `peak_bytes`."""
        return max(self.pass_peak_bytes + (self.scratch_bytes or 0), self.step_peak_bytes)

    def __str__(self) -> str:
        """A table of the peak by category, when it is, and what it rests on. It holds no times and no addresses."""
        rows = [(category.replace("_", " "), format_bytes(size)) for category, size in self.at_peak.items()]
        rows.append(("peak", format_bytes(self.peak_bytes)))
        if self.scratch_bytes is not None:
            rows.append(("kernel scratch", format_bytes(self.scratch_bytes)))
            rows.append(("peak with scratch", format_bytes(self.needed_bytes)))
        lines = [f"{name:<18}{size:>12}" for name, size in rows]
        rule = "-" * 30
        lines.insert(len(CATEGORIES), rule)
        title = "measured peak" if self.measured else "predicted peak"
        steps = f"{self.accumulation_steps} accumulation step{'s' if self.accumulation_steps > 1 else ''}"
        notes = [f"at: {self.peak_moment}", f"micro-batch size {self.micro_batch_size}, {steps}"]
        notes += [f"assumed: {assumption}" for assumption in self.assumptions]
        return "\n".join([f"{title:<18}{self.device.upper():>12}", rule, *lines, rule, *notes])


def predict_memory(
    model: nn.Module,
    batch: Batch,
    loss_sum: LossSum,
    optimizer: Optimizer,
    *,
    micro_batch_size: int,
    device: str | None = None,
    scratch: bool = False,
) -> MemoryReport:
    """Predict the peak of `update_parameters(model, optimizer, split_batch(batch, micro_batch_size), loss_sum)`.

    Nothing is allocated and nothing is run; model, optimizer, random state and settings are as before, also after an
    error or an interrupt. On a CPU `peak_bytes` and `at_peak` are, to the byte, what `measure_memory(model, optimizer,
    batch)` finds around the second such update (the first one makes the optimizer's state), wherever that count sees
    everything. Model and batch may be on the "meta" device.

    batch: the whole effective batch, all of it resident. micro_batch_size: any size from 1; one above the batch's
    gives a single micro-batch. Of more than two micro-batches a smaller last one is left
    out, which can hide the bytes of one number.
    device: "cpu" counts what a CPU would hold; "cuda" applies the rules of a CUDA device by arithmetic (sizes rounded
    up to 512 bytes, foreach optimizers, fused dropout and attention; no cuBLAS or cuDNN workspace): not measured. By
    default the kind that model is on.
    scratch: also run one real micro-batch (two, where they differ in size) under PyTorch's profiler, on a stand-in that
    shares the parameters and has its own gradients and buffers, for the memory that kernels take and return unseen.
    Convolutions and LSTM need it.

    What cannot be acted out without numbers (`.item()`, `nonzero`, a boolean mask, control flow that depends on data)
    is measured instead, on at most two real micro-batches and such a stand-in: `measured` is then True and the first
    assumption names the operation. Forward hooks of your own are left out, in both cases.

    Raises TypeError or ValueError, naming argument or module, for an empty batch, a micro_batch_size that is no whole
    number from 1, an optimizer that holds none of model's trainable parameters, a model or loss that fails, a loss that
    is no scalar with a gradient, and what can't be traced in a model without data.
    Method: `torch._subclasses.fake_tensor.FakeTensorMode` under the count of `measure_memory`.
    """
    predictor = MemoryPredictor(model, batch, loss_sum, optimizer, device=device)
    return predictor.predict(micro_batch_size, scratch=scratch)


class MemoryPredictor:
    """The same for several micro-batch sizes of one model and batch: what they share is worked out once.

    Arguments and errors as in `predict_memory`. Change nothing about model and optimizer in between.
    """

    def __init__(
        self, model: nn.Module, batch: Batch, loss_sum: LossSum, optimizer: Optimizer, *, device: str | None = None
    ):
        self._notes: list[str] = []
        self._model = self._unwrapped(model)
        _check_arguments(self._model, loss_sum, optimizer, device)
        self.batch_size = batch_size(batch)
        if self.batch_size == 0:
            raise ValueError("batch has 0 samples; there is nothing to predict")
        self._batch, self._loss_sum, self._optimizer = batch, loss_sum, optimizer
        own_device = next(self._model.parameters()).device.type
        self.device = device or ("cuda" if own_device == "cuda" else "cpu")
        self._has_data = not any(_is_without_data(t) for t in [*_tensors_of_module(self._model), *tensors_of(batch)])
        self._why_measured: str | None = None
        self._fake: _Stage | None = None
        self._step: _Peak | None = None
        try:
            with _nothing_changed():
                self._fake = _fake_stage(self._model, batch, loss_sum, optimizer, self.device)
        except _Untraceable as reason:
            self._fall_back(str(reason))
        self._notes += [_implementation(optimizer, self.device), *_remarks(self._model, self.device)]

    def predict(self, micro_batch_size: int, *, scratch: bool = False) -> MemoryReport:
        """Return the report for one micro-batch size; see `predict_memory`."""
        size = min(positive_int("micro_batch_size", micro_batch_size), self.batch_size)
        if not isinstance(scratch, bool):
            raise TypeError(f"scratch must be True or False; got {scratch!r}")
        if scratch and not self._has_data:
            raise ValueError("scratch=True runs a real micro-batch; model and batch must hold data, not be on 'meta'")
        if scratch and {self.device, next(self._model.parameters()).device.type} != {"cpu"}:
            raise ValueError("scratch=True reads the CPU's allocator; model must be on the CPU and predicted for it")
        with _nothing_changed():
            passes = self._passes(size)
            # The allocator's peak of a real pass, less what was predicted for it.
            scratch_bytes = max(0, self._allocated(size) - passes.num_bytes) if scratch else None
        state = self._step.optimizer_state_before
        step, passes = self._step.beside(passes.left), passes.beside({"optimizer_state": state})
        peak = passes if passes.num_bytes >= step.num_bytes else step
        return MemoryReport(
            peak_bytes=peak.num_bytes,
            at_peak=dict(peak.by_category),
            peak_moment=peak.moment,
            micro_batch_size=size,
            accumulation_steps=-(-self.batch_size // size),
            resident_bytes=passes.before + state,
            pass_peak_bytes=passes.num_bytes,
            step_peak_bytes=step.num_bytes,
            scratch_bytes=scratch_bytes,
            measured=self._why_measured is not None,
            device=self.device,
            assumptions=tuple(([self._why_measured] if self._why_measured else []) + self._notes),
        )

    # The parts

    def _passes(self, size: int) -> _Peak:
        """Act out the passes of one update, or run them, and once the step that follows."""
        if self._why_measured is None:
            try:
                peak = self._fake.passes(size, self.batch_size)
                if self._step is None:
                    self._step = self._fake.step()
                return peak
            except _Untraceable as reason:
                self._fall_back(str(reason))
        with _as_it_was(self._model, self._optimizer):
            stage = _real_stage(self._model, self._batch, self._loss_sum, self._optimizer)
            peak = stage.passes(size, self.batch_size)
            if self._step is None:
                self._step = stage.step()
        return peak

    def _allocated(self, size: int) -> int:
        """Return the peak of the passes of one real update by PyTorch's allocator, without the optimizer's state."""
        with _as_it_was(self._model, self._optimizer):
            stage = _real_stage(self._model, self._batch, self._loss_sum, self._optimizer)
            if self._fake is not None:
                stage.assume_gradients_of(self._fake)
            peak = stage.passes(size, self.batch_size, scratch=True)
        return peak.num_bytes + peak.scratch_bytes

    def _fall_back(self, reason: str) -> None:
        if not self._has_data:
            raise ValueError(f"the update can't be predicted without data: {reason}. Give a model and batch with data")
        if self.device != next(self._model.parameters()).device.type:
            raise ValueError(f"the update can't be predicted for {self.device!r}: {reason}. Measure it on the device")
        self._fake = None
        self._step = None
        self._why_measured = f"measured on real micro-batches, not predicted: {reason}"

    def _unwrapped(self, model: Any) -> Any:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            self._notes.append(f"{type(model).__name__} is left out: the module inside is predicted, for one device")
            return model.module
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            self._notes.append("torch.compile is left out: the module is predicted as it was before compiling")
            return model._orig_mod
        return model


# What one update does: the same lines as `accumulate_gradients` and `apply_gradients`, which stand in a later module.


class _Stage:
    """A stand-in for model, batch and optimizer, with the means to run an update on them and see its peak."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_sum: LossSum,
        optimizer: Optimizer,
        names: _Places,
        *,
        mode: Callable[[], Any] = nullcontext,
        tracker: Callable[..., _MomentTracker],
        own_parameters: list[Tensor],
    ):
        self.model, self.batch, self.loss_sum, self.optimizer, self.places = model, batch, loss_sum, optimizer, names
        self.mode, self.make_tracker = mode, tracker
        self.cleared = [*model.parameters(), *own_parameters]  # what an update sets to None at its start
        self.resident = (model, own_parameters, tensors_of(batch))
        self.gradients: dict[Tensor, Tensor] | None = None  # those that a pass makes, once one has run
        self.share_bytes = 0
        self.graph_keeps_bytes = True  # what a graph whose backward has run still holds, through contexts of its nodes

    def passes(self, size: int, num_samples: int, *, scratch: bool = False) -> _Peak:
        """Return the peak of the passes of one update in micro-batches of `size`."""
        num_full, tail = divmod(num_samples, size)
        if self.gradients is None and any(tensor.requires_grad for tensor in tensors_of(self.batch)):
            self._run([size], 0, scratch=False)  # an update does not clear the gradients of inputs
        if num_full + (tail > 0) == 1:
            return self._run([size], 0, scratch=scratch)
        if num_full == 1:
            return self._run([size, tail], 0, scratch=scratch)
        if self.gradients is None or self.graph_keeps_bytes:
            return self._run([size, size], num_full - 2, scratch=scratch)
        return self._run([size], num_full - 1, scratch=scratch, continued=True)

    def _run(self, sizes: list[int], num_more_shares: int, *, scratch: bool, continued: bool = False) -> _Peak:
        """Run micro-batches of these sizes under a meter. `continued`: earlier ones have left their gradients."""
        places, num_samples = self.places, batch_size(self.batch)
        leaves = _Residents("predict_memory", self.resident).with_gradient()
        cleared = set() if continued else set(map(id, self.cleared))
        for leaf in leaves:
            leaf.grad = None if id(leaf) in cleared else (self.gradients or {}).get(leaf)
        meter = _MomentMeter(self.resident, self.make_tracker, places, scratch=scratch)
        places.start(first_pass=int(continued), num_passes=len(sizes) + continued)
        try:
            with self.mode(), meter:
                tracker = meter._tracker
                share, shares = None, []
                for i, length in enumerate(sizes):
                    if i or continued:  # each micro-batch that is not run here keeps its share until the group's end
                        self.share_bytes = tracker.rounded(share.element_size()) if i else self.share_bytes
                        shares.append(torch.empty(num_more_shares * self.share_bytes, dtype=torch.uint8))
                    start = sum(sizes[:i]) if sum(sizes) <= num_samples else 0
                    share = _share_of(self.loss_sum, self.model, self._micro_batch(start, length))
                    places.in_backward = True
                    share.backward()
                    places.in_backward = False
                    shares.append(share.detach())
                    places.pass_index += 1
                    if i == 0 and not continued:
                        made = [leaf for leaf in leaves if leaf.grad is not None]
                        self.graph_keeps_bytes = tracker.holds_beside(
                            [*shares, *(leaf.grad for leaf in made)], meter._num_resident
                        )
                self.share_bytes = tracker.rounded(share.element_size())
                share = None
                shares.clear()
                meter.note_what_is_left()
                made = [leaf for leaf in leaves if leaf.grad is not None]
        except Exception as error:
            explained = places.explained(error)
            raise explained from (None if explained is error else error)
        self.gradients = {leaf: leaf.grad for leaf in made}
        for leaf in leaves:
            leaf.grad = None
        return meter.peak()

    def _micro_batch(self, start: int, length: int) -> Batch:
        return map_tensors(lambda tensor: tensor[start : start + length], self.batch)

    def assume_gradients_of(self, other: _Stage) -> None:
        """Take over which parameters get gradients, so that a single pass is one of an update under way."""
        mine, others = (_Residents("predict_memory", stage.resident).with_gradient() for stage in (self, other))
        with_gradient = set(map(id, other.gradients))
        pairs = zip(mine, others, strict=True)
        self.gradients = {leaf: torch.zeros_like(leaf.detach()) for leaf, twin in pairs if id(twin) in with_gradient}
        self.share_bytes, self.graph_keeps_bytes = other.share_bytes, other.graph_keeps_bytes

    def step(self) -> _Peak:
        """Return the peak of the optimizer's step with the gradients that the passes left."""
        optimizer = self.optimizer
        for leaf, gradient in self.gradients.items():
            leaf.grad = gradient
        step = type(optimizer).step
        if getattr(step, "hooked", False):  # hooks belong to real optimizers
            step = step.__wrapped__
        optimized = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        try:
            if any(p not in optimizer.state or not optimizer.state[p] for p in optimized):
                with self.mode(), self.make_tracker(self.places, answer=True):
                    step(optimizer)  # the first update makes the state
            resident = (*self.resident, optimizer)
            meter = _MomentMeter(resident, self.make_tracker, self.places, scratch=False, answer=True)
            self.places.start_step()
            with self.mode(), meter:
                step(optimizer)
        except Exception as error:
            explained = self.places.explained(error, f"the step of optimizer {type(optimizer).__name__}")
            raise explained from (None if explained is error else error)
        for leaf in self.gradients:
            leaf.grad = None
        return meter.peak()


def _share_of(loss_sum: LossSum, model: nn.Module, micro_batch: Batch) -> Tensor:
    """Return a micro-batch's share of the mean loss, made by the same operations as in `accumulate_gradients`."""
    loss = loss_sum(model, micro_batch)
    terms = loss.values() if isinstance(loss, dict) else [loss]
    for term in terms:
        if not isinstance(term, Tensor):
            raise _Refused(TypeError(f"loss_sum must return a scalar tensor (or a dict of them); it returned {term!r}"))
        if term.ndim > 0:
            found = tuple(term.shape)
            raise _Refused(ValueError(f"loss_sum must return a scalar tensor, the sum over items; got shape {found}"))
    parts = [term / 2 for term in terms]  # the true divisor is the count of the group; the bytes are the same
    share = functools.reduce(operator.add, parts) if parts else None
    if not isinstance(share, Tensor) or not share.requires_grad:
        raise _Refused(
            ValueError("loss_sum returned a loss without a gradient: it depends on no trainable parameter of model")
        )
    return share


class _Refused(Exception):
    """Carries an error that already says what is wrong through code that explains errors."""


class _Untraceable(Exception):
    """The update cannot be acted out on tensors without data; the message says why."""


# The stand-in.


class _Copies:
    """Copies objects with the tensors in them replaced, each storage once; what cannot be copied is shared.

    `new_storage` makes the replacement of a storage, `wrap` the tensor on it.
    """

    def __init__(self, new_storage: Callable[[Any], Any], wrap: Callable[[Tensor, Any], Tensor]):
        self._new_storage, self._wrap = new_storage, wrap
        self._storages: dict[int, Any] = {}
        self.made: dict[int, Any] = {}  # id of an original -> its copy
        self._originals: list[Any] = []  # an id must not be used again

    def remember(self, original: Any, made: Any) -> Any:
        self._originals.append(original)
        self.made[id(original)] = made
        return made

    def tensor(self, original: Tensor) -> Tensor:
        """Return the replacement of a tensor: a leaf of the same kind on the replacement of its storage."""
        if id(original) in self.made:
            return self.made[id(original)]
        if is_lazy(original):
            raise ValueError("model has parameters without a size; run a lazy module once before predicting for it")
        if original.layout != torch.strided or original.is_quantized:
            kind = str(original.layout).removeprefix("torch.")
            raise _Untraceable(f"it holds a {'quantized' if original.is_quantized else kind} tensor")
        plain = type(original) in (Tensor, nn.Parameter, FakeTensor) or isinstance(original, nn.Parameter | nn.Buffer)
        if not plain:
            raise _Untraceable(f"it holds a tensor of the class {type(original).__name__}")
        storage = original.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = self._new_storage(storage)
            self._originals.append(storage)
        made = self._wrap(original, self._storages[id(storage)])
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, requires_grad=original.requires_grad)
        elif original.requires_grad:
            made.requires_grad_()
        for name, value in vars(original).items() if type(original) is not FakeTensor else ():
            if not hasattr(made, name):  # such as marks for weight decay
                setattr(made, name, value)
        return self.remember(original, made)

    def module(self, original: nn.Module) -> nn.Module:
        """Return a module of the same class and settings, with the same modules in it, all tensors replaced."""
        modules = list(original.modules())
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise _Untraceable("it holds a TorchScript module")
            self.remember(module, object.__new__(type(module)))
        for tensor in _tensors_of_module(original):
            self.tensor(tensor)
        for module in modules:
            twin = self.made[id(module)]
            for name, value in vars(module).items():
                copied = {} if "hooks" in name and isinstance(value, dict) else self.value(value)
                twin.__dict__[name] = copied
            for name, value in vars(module).items():
                if "hooks" in name and isinstance(value, dict):
                    own = ((key, hook) for key, hook in value.items() if _is_part_of_torch(hook))
                    twin.__dict__[name] = type(value)((key, self.value(hook)) for key, hook in own)
        return self.made[id(original)]

    def value(self, original: Any) -> Any:
        """Return a copy of what a module or an optimizer holds."""
        if id(original) in self.made:
            return self.made[id(original)]
        if isinstance(original, _UNCHANGING) or original is None:
            return original
        if isinstance(original, dict):
            made = self.remember(original, copy.copy(original))
            for key, item in original.items():
                made[key] = self.value(item)
            return made
        if isinstance(original, list | collections.deque):
            made = self.remember(original, copy.copy(original))
            for position, item in enumerate(original):
                made[position] = self.value(item)
            return made
        if isinstance(original, tuple):
            parts = [self.value(item) for item in original]
            if all(part is item for part, item in zip(parts, original, strict=True)):
                return original
            return type(original)(*parts) if hasattr(original, "_fields") else type(original)(parts)
        if isinstance(original, set | frozenset):
            return type(original)(self.value(item) for item in original)
        if isinstance(original, types.FunctionType):
            return self.function(original)
        if isinstance(original, types.MethodType):
            owner = self.value(original.__self__)
            return original if owner is original.__self__ else types.MethodType(original.__func__, owner)
        if isinstance(original, functools.partial):
            keywords = {key: self.value(item) for key, item in original.keywords.items()}
            return functools.partial(self.value(original.func), *map(self.value, original.args), **keywords)
        if isinstance(original, weakref.ref):
            return weakref.ref(self.made[id(original())]) if id(original()) in self.made else original
        if isinstance(original, torch.Generator):
            made = torch.Generator(original.device)
            made.set_state(original.get_state())
            return self.remember(original, made)
        if isinstance(original, nn.Module):
            return self.module(original)  # one that is held but not registered
        return self.plain_object(original)

    def plain_object(self, original: Any) -> Any:
        """Return an object of the same class with copied attributes; the very same one where that cannot be safe."""
        kind = type(original)
        home = kind.__module__.partition(".")[0]
        if not hasattr(original, "__dict__") or hasattr(kind, "__del__") or home in {*sys.stdlib_module_names, "numpy"}:
            return original
        try:
            made = object.__new__(kind)
            attributes = made.__dict__
        except (TypeError, AttributeError):  # made in C
            return original
        self.remember(original, made)
        attributes.update({name: self.value(item) for name, item in vars(original).items()})
        return made

    def function(self, original: types.FunctionType) -> types.FunctionType:
        """Return a function that uses the copies where this one uses the model past its arguments, as lambdas do."""
        if original.__module__ is None or original.__module__.partition(".")[0] == "torch":
            return original
        self.remember(original, original)  # it may call itself
        cells = [self._used_by_function(cell.cell_contents) for cell in original.__closure__ or () if _is_filled(cell)]
        known = [cell.cell_contents for cell in original.__closure__ or () if _is_filled(cell)]
        names = [name for name in _names_in(original.__code__) if name in original.__globals__]
        globals_used = {name: self._used_by_function(original.__globals__[name]) for name in names}
        same = all(made is cell for made, cell in zip(cells, known, strict=True))
        if same and all(made is original.__globals__[name] for name, made in globals_used.items()):
            return original
        contents = iter(cells)
        closure = tuple(
            types.CellType(next(contents)) if _is_filled(cell) else types.CellType()
            for cell in original.__closure__ or ()
        )
        made = types.FunctionType(
            original.__code__,
            {**original.__globals__, **globals_used},
            original.__name__,
            original.__defaults__,
            closure or None,
        )
        made.__kwdefaults__ = original.__kwdefaults__
        made.__dict__.update(original.__dict__)
        return self.remember(original, made)

    def _used_by_function(self, value: Any) -> Any:
        if isinstance(value, nn.Module):  # another model, such as a teacher, stays as it is
            is_ours = id(value) in self.made or any(id(p) in self.made for p in value.parameters())
            return self.value(value) if is_ours else value
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self.value(value)
        return self.made.get(id(value), value)

    def optimizer(self, original: Optimizer) -> Optimizer:
        """Return an optimizer of the same class and settings over the replaced parameters, without its hooks."""
        twin = self.remember(original, object.__new__(type(original)))
        for group in original.param_groups:
            for parameter in group["params"]:
                self.tensor(parameter)
        for tensor in _tensors_in([list(original.state.values()), *map(list, map(dict.values, original.param_groups))]):
            self.tensor(tensor)
        for name, value in vars(original).items():
            if "hooks" in name and isinstance(value, dict):
                twin.__dict__[name] = type(value)()
            elif name not in ("step", "zero_grad", "state", "param_groups"):  # a scheduler wraps step
                twin.__dict__[name] = self.value(value)
        twin.param_groups = [
            {key: self.value(value) for key, value in group.items()} for group in original.param_groups
        ]
        twin.state = copy.copy(original.state)
        twin.state.clear()
        for key, value in original.state.items():
            twin.state[self.made.get(id(key), key)] = self.value(value)
        return twin


_UNCHANGING = (
    *(bool, int, float, complex, str, bytes, type, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format, torch.storage.UntypedStorage),
    *(types.BuiltinFunctionType, types.ModuleType),
    Tensor,  # one that is neither a parameter nor a buffer is replaced when an operation reads it
)


def _is_filled(cell: types.CellType) -> bool:
    return cell != types.CellType()


def _names_in(code: types.CodeType) -> set[str]:
    """List the names that a function looks up, those inside of it too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _is_part_of_torch(hook: Any) -> bool:
    """Say whether a forward hook is how a module of PyTorch works (weight norm), not something the learner watches."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] == "torch"


def _tensors_of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


class _Sizes(FakeTensorMode):
    """PyTorch's mode in which tensors have sizes and no data."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out PyTorch's guard against compiling this class, as in the tracker: it costs time at each call."""
        return False


def _fake_stage(model: nn.Module, batch: Batch, loss_sum: LossSum, optimizer: Optimizer, device: str) -> _Stage:
    """Build the stage on which everything has sizes and nothing has data."""
    fake_mode = _Sizes(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def wrap(original: Tensor, storage: Any) -> Tensor:
        empty = torch.empty(0, dtype=original.dtype, device="meta")
        empty.set_(storage, original.storage_offset(), original.size(), original.stride())
        # Single numbers, such as the counters of steps, keep their value: the code of optimizers depends on it.
        known = original.ndim == 0 and original.device.type == "cpu" and not isinstance(original, FakeTensor)
        return FakeTensor(fake_mode, empty, _CPU, constant=original.detach().clone() if known else None)

    copies = _Copies(lambda storage: torch.UntypedStorage(storage.nbytes(), device="meta"), wrap)
    on_cuda = device == "cuda"

    @contextmanager
    def mode() -> Iterator[None]:
        with fake_mode, _LikeOnCuda() if on_cuda else nullcontext():
            yield

    def tracker(places: _Places, *, answer: bool = False) -> _FakeTracker:
        return _FakeTracker(
            places, copies, granularity=CUDA_ROUNDING if on_cuda else 1, answer=answer, alias=own_device
        )

    own_device = next(model.parameters()).device.type
    stage = _stage(copies, model, batch, loss_sum, optimizer, mode=mode, tracker=tracker)
    for group in stage.optimizer.param_groups if on_cuda else ():
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable")  # PyTorch's own choice on CUDA
        if "capturable" in group:
            group["capturable"] = False
    return stage


def _real_stage(model: nn.Module, batch: Batch, loss_sum: LossSum, optimizer: Optimizer) -> _Stage:
    """Build the stage on which copies of everything have data: what runs there changes nothing of the learner's."""

    def wrap(original: Tensor, storage: Any) -> Tensor:
        made = torch.empty(0, dtype=original.dtype, device=original.device)
        return made.set_(storage, original.storage_offset(), original.size(), original.stride())

    copies = _Copies(lambda storage: storage.clone(), wrap)

    def tracker(places: _Places, *, answer: bool = False) -> _MomentTracker:
        return _MomentTracker(places, next(model.parameters()).device)

    return _stage(copies, model, batch, loss_sum, optimizer, mode=nullcontext, tracker=tracker)


def _stage(copies: _Copies, model, batch, loss_sum, optimizer, *, mode, tracker) -> _Stage:
    twin = copies.module(model)
    twin_optimizer = copies.optimizer(optimizer)
    own = set(map(id, twin.parameters()))
    others = [p for group in twin_optimizer.param_groups for p in group["params"] if id(p) not in own]
    twin_batch = map_tensors(copies.tensor, batch)
    twin_loss = copies.value(loss_sum)
    places = _Places(twin, is_fake=mode is not nullcontext)
    return _Stage(
        twin, twin_batch, twin_loss, twin_optimizer, places, mode=mode, tracker=tracker, own_parameters=others
    )


_CPU = torch.device("cpu")


# What is counted, and where the update stands when the count is highest.


@dataclass(frozen=True)
class _Peak:
    """The most bytes alive in a part of an update.

    `before`: those alive at its start, without gradients. `left`: what it left alive besides them, such as what a
    module keeps in an attribute.
    """

    num_bytes: int
    by_category: dict[str, int]
    moment: str
    before: int
    optimizer_state_before: int
    left: dict[str, int]
    scratch_bytes: int | None

    def beside(self, others: dict[str, int]) -> _Peak:
        """Return the same peak beside other things that stand still."""
        by_category = {name: size + others.get(name, 0) for name, size in self.by_category.items()}
        return replace(self, num_bytes=sum(by_category.values()), by_category=by_category)


class _MomentTracker(_Tracker):
    """A tracker that notes where the update stood when more was alive than ever before.

    `granularity`: the allocator's smallest unit. Where it is not 1, single numbers (which may be on the CPU) count 0.
    """

    def __init__(self, places: _Places, device: torch.device, granularity: int = 1):
        super().__init__(device, log=True)
        self.places, self.granularity = places, granularity
        self.alive = self.highest = self.events_at_highest = 0
        self.moment: tuple = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _interrupted:
            raise KeyboardInterrupt
        return super().__torch_dispatch__(func, types, args, kwargs)

    def rounded(self, num_bytes: int) -> int:
        if self.granularity == 1:
            return num_bytes
        return 0 if num_bytes <= 8 else -(-num_bytes // self.granularity) * self.granularity

    def _born(self, record: _Storage) -> None:
        super()._born(record)
        self.alive += self.rounded(record.num_bytes)
        if self.alive > self.highest:
            self.highest, self.events_at_highest = self.alive, len(self.events)
            self.moment = self.places.now()

    def _died(self, record: _Storage) -> None:
        if record.serial:
            self.alive -= self.rounded(record.num_bytes)
        super()._died(record)

    def _resized(self, record: _Storage, num_bytes: int) -> None:
        self.alive -= self.rounded(record.num_bytes)
        super()._resized(record, num_bytes)

    def by_category(self, num_events: int) -> dict[str, int]:
        """Replay the first events: what was alive after them, by what it turned out to be for."""
        now = dict.fromkeys(CATEGORIES, 0)
        for event in self.events[:num_events]:
            size = self.rounded(self.sizes[abs(event)])
            now[self.categories.get(abs(event), "temporaries")] += size if event > 0 else -size
        return now

    def holds_beside(self, tensors: list[Tensor], num_resident: int) -> bool:
        """Say whether anything is alive that was made here, apart from these tensors."""
        storages = {id(_storage_or_none(tensor)) for tensor in tensors}
        return any(
            record.serial > num_resident and record.num_bytes and key not in storages
            for key, record in self.known.items()
        )


class _FakeTracker(_MomentTracker):
    """The same on fake tensors: stands above FakeTensorMode and hands it nothing but fake tensors."""

    def __init__(self, places: _Places, copies: _Copies, *, granularity: int, answer: bool, alias: str):
        super().__init__(places, _CPU, granularity)
        self.copies, self.answer, self.alias = copies, answer, alias
        self.foreign: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # asked for more often than anything else
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(func, args[0])
        if func.name().startswith("aten::_fused_") and not func._schema.returns:
            return None  # writes into its arguments; PyTorch has no rule for sizes for some of these
        if func is not torch.ops.aten.lift_fresh.default:
            args = self._as_fakes(args)
        if kwargs:
            kwargs = {name: self._as_fakes(value) for name, value in kwargs.items()}
            device = kwargs.get("device")
            if device is not None and torch.device(device).type not in ("cpu", "meta"):
                kwargs["device"] = self._device(torch.device(device), func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _as_fakes(self, value: Any) -> Any:
        """Replace real tensors, which code outside of the model's parameters and buffers holds, by fake ones."""
        if isinstance(value, Tensor):
            return value if isinstance(value, FakeTensor) else self._foreign(value)
        if isinstance(value, tuple | list) and any(isinstance(item, Tensor | tuple | list) for item in value):
            return type(value)(map(self._as_fakes, value))
        return value

    def _foreign(self, real: Tensor) -> Tensor:
        if id(real) not in self.foreign:
            if real.requires_grad and torch.is_grad_enabled():
                raise _Refused(
                    ValueError(
                        f"a trainable tensor of shape {tuple(real.shape)} is used that is neither model's nor "
                        "optimizer's; use the model that loss_sum is handed, and other models under torch.no_grad()"
                    )
                )
            fake = self.copies.tensor(real.detach() if real.requires_grad else real)
            self.foreign[id(real)] = real, fake
            self._remember(fake.untyped_storage(), counts=False)
        return self.foreign[id(real)][1]

    def _read(self, func, tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return func(tensor)
        try:
            return func(tensor)
        except DataDependentOutputException:
            if not self.answer:
                raise
            # A step reads norms and counters to compute a step size: any number will do.
            return 1.0 if tensor.is_floating_point() else 1

    def _device(self, device: torch.device, func) -> torch.device:
        if device.type != self.alias:
            raise _Refused(ValueError(f"{func} asks for device {str(device)!r}; model is on {self.alias!r}"))
        return _CPU

    def _is_new(self, storage, tensor: Tensor, func, args, kwargs) -> bool:
        if func is torch.ops.aten.lift_fresh.default:
            return args[0].untyped_storage().resizable()
        return super()._is_new(storage, tensor, func, args, kwargs)


class _MomentMeter(MemoryMeter):
    """A meter whose tracker notes moments."""

    def __init__(
        self, resident: tuple, make_tracker: Callable[..., _MomentTracker], places: _Places, *, scratch: bool, **options
    ):
        super().__init__(_Residents("predict_memory", resident), scratch=scratch)
        self._tracker = make_tracker(places, **options)
        self._num_events = 0

    def note_what_is_left(self) -> None:
        """Note that this part of the update ends here: what is alive now stays so through the next part."""
        self._num_events = len(self._tracker.events)

    def peak(self) -> _Peak:
        tracker = self._tracker
        before = tracker.by_category(self._num_resident)
        after = tracker.by_category(self._num_events)
        return _Peak(
            num_bytes=tracker.highest,
            by_category=tracker.by_category(tracker.events_at_highest),
            moment=tracker.places.words(tracker.moment),
            before=sum(before.values()) - before["gradients"],
            optimizer_state_before=before["optimizer_state"],
            left={name: size - before[name] for name, size in after.items() if name != "gradients"},
            scratch_bytes=self.scratch_bytes,
        )


class _LikeOnCuda(TorchFunctionMode):
    """Where CUDA has a kernel that keeps less than the CPU's, take the path with the same outputs as that kernel's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (functional.dropout, torch.dropout):
            named = inspect.signature(functional.dropout).bind(*args, **kwargs)
            named.apply_defaults()
            tensor, p, training = (named.arguments[name] for name in ("input", "p", "training"))
            if training and 0 < p < 1:
                return torch.native_dropout(tensor, p, True)[0]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)  # flash and memory-efficient attention draw dropout inside the kernel
        return func(*args, **kwargs)


class _Places:
    """Knows which module is at work, in the forward pass by hooks on the stand-in, in the backward pass by its node.

    Nodes of the graph are numbered as they are made; `_switches` says from which number on which module made them.
    """

    def __init__(self, model: nn.Module, *, is_fake: bool):
        self.modules = dict(model.named_modules())
        self.is_fake = is_fake
        self.parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stack: list[str] = []
        self._switches: list[tuple[int, str | None]] = []
        self._failed: tuple[int, str] | None = None
        self._returned = ""
        self.start(first_pass=0, num_passes=1)
        for path, module in self.modules.items():
            module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)
            module.register_forward_hook(functools.partial(self._leave, path), always_call=True)

    def start(self, *, first_pass: int, num_passes: int) -> None:
        self.pass_index, self.num_passes = first_pass, num_passes
        self.in_backward = self.in_step = False
        self._stack.clear()
        self._switches = [(0, None)]
        self._failed = None

    def start_step(self) -> None:
        self.in_step = True

    def _enter(self, path: str, module, args) -> None:
        self._stack.append(path)
        self._switches.append((torch._C._autograd._get_sequence_nr(), path))

    def _leave(self, path: str, module, args, output) -> None:
        error = sys.exc_info()[1]
        if error is not None and (self._failed is None or self._failed[0] != id(error)):
            self._failed = id(error), path  # the error itself would keep its frames, and so their tensors, alive
        while self._stack and self._stack.pop() != path:  # one that was left by an error without its hook
            pass
        above = self._stack[-1] if self._stack else None
        self._switches.append((torch._C._autograd._get_sequence_nr(), above))
        if not self._stack:
            self._returned = _in_words(output)

    def now(self) -> tuple:
        """Note where the update stands, as cheaply as can be; `words` says it."""
        if self.in_step:
            return ("step",)
        node = torch._C._current_autograd_node() if self.in_backward else None
        number = node._sequence_nr() if node is not None else None
        if number is not None and number >= 2**63:  # the node that adds a gradient to a leaf
            return "add", self.pass_index, getattr(node, "variable", None), None
        phase = "backward" if self.in_backward else "forward"
        return phase, self.pass_index, self._stack[-1] if self._stack else None, number

    def words(self, moment: tuple) -> str:
        if not moment:
            return "before the first operation"
        if moment[0] == "step":
            return "the optimizer's step"
        phase, index, what, number = moment
        if phase == "add":
            place = f"the gradient of {self.parameter_names.get(id(what), 'an input')} is added"
        elif phase == "forward":
            place = f"forward of {self._module_in_words(what)}"
        elif what is not None:  # a module at work inside the backward pass
            place = f"backward, computing {self._module_in_words(what)} again"
        else:
            switch = bisect.bisect_right(self._switches, number or 0, key=lambda pair: pair[0]) - 1
            place = f"backward of {self._module_in_words(self._switches[switch][1])}"
        if self.num_passes == 1:
            return place
        return f"{place}, {'in the first micro-batch' if index == 0 else 'from the second micro-batch on'}"

    def _module_in_words(self, path: str | None) -> str:
        if path is None:
            return "the loss"
        kind = _kind_of(self.modules[path])
        same = [other for other, module in self.modules.items() if _kind_of(module) == kind]
        if not path:
            return f"the model's own code ({kind})" if len(self.modules) > 1 else f"the {kind}"
        position = same.index(path) + 1
        which = {1: "first ", len(same): "last "}.get(position, f"{_ordinal(position)} ")
        return f"the {which if len(same) > 1 else ''}{kind} ({path})"

    def explained(self, error: Exception, who: str | None = None) -> Exception:
        """Return what to raise for an error in code of the learner's: which part failed, and why."""
        if isinstance(error, _Refused):
            return error.args[0]
        if isinstance(error, _Untraceable):
            return error
        inside = self._failed[1] if self._failed is not None and self._failed[0] == id(error) else None
        where = "" if inside is None else f" in {inside or 'its own forward'} ({type(self.modules[inside]).__name__})"
        reason = _why_untraceable(error, where or f" in {who or 'backward or loss_sum'}") if self.is_fake else None
        if reason is not None:
            return _Untraceable(reason)
        if who is None and inside is not None:
            who = "model"
        elif who is None and self.in_backward:
            who = "backward of model or loss_sum"
        elif who is None:
            who, where = "loss_sum", f" on what model returned, {self._returned}" if self._returned else ""
        return ValueError(f"{who} failed{where}: {type(error).__name__}: {error}")


def _kind_of(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith("torch.nn.modules.activation") and name != "MultiheadAttention":
        return f"{name} activation"
    return _KINDS.get(name, name)


_KINDS = {
    "Linear": "linear layer",
    "Embedding": "embedding",
    "LayerNorm": "layer norm",
    "Dropout": "dropout",
    "MultiheadAttention": "attention layer",
    "GRU": "GRU layer",
    "LSTM": "LSTM layer",
    **{f"Conv{n}d": f"{n}-D convolution" for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": f"{n}-D transposed convolution" for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": "batch norm" for n in (1, 2, 3)},
    "GroupNorm": "group norm",
}


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _in_words(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, tuple | list | dict):
        return f"a {type(output).__name__} of {len(output)} outputs"
    return f"a {type(output).__name__}"


def _why_untraceable(error: Exception, where: str) -> str | None:
    """Say which operation needs data, if that is what an error on fake tensors means."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        name = error.func.name().partition("::")[2].partition(".")[0]
        words = {
            "_local_scalar_dense": ".item() (or if, int, float or bool of a tensor)",
            "nonzero": "nonzero (or a boolean mask as an index)",
            "index": "a boolean mask as an index",
            "_unique2": "unique",
        }
        return f"{words.get(name, name)}{where} needs numbers"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func}{where} has no rule for tensors without data"
    text = str(error)
    if (isinstance(error, NotImplementedError) and "'Meta' backend" in text) or re.search("(?i)fake|numpy", text):
        return f"something{where} needs numbers ({text.splitlines()[0][:120]})"
    return None


# What holds before and after.


_interrupted: list[int] = []  # an interrupt that waits for the next operation


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let an interrupt take effect between two operations, and not while things are being given back.

    PyTorch asks fake tensors for their device in places where an exception ends the process.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: _interrupted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        waiting = bool(_interrupted)
        _interrupted.clear()
        if waiting:
            raise KeyboardInterrupt


@contextmanager
def _nothing_changed() -> Iterator[None]:
    """Keep a prediction out of what watches or steers the caller, and give random state and settings back."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    states = [
        (torch.default_generator.set_state, torch.default_generator.get_state()),
        (random.setstate, random.getstate()),
    ]
    if numpy_random is not None:
        states.append((numpy_random.set_state, numpy_random.get_state()))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    log = logging.getLogger(FakeTensorMode.__module__)  # it prints a traceback of what is raised anyway
    log_was_disabled = log.disabled

    def give_back() -> None:
        torch.clear_autocast_cache()
        log.disabled = log_was_disabled
        torch.set_default_dtype(dtype)
        for restore, state in states:
            restore(state)

    with _interrupts_wait(), ExitStack() as outer:
        outer.callback(give_back)
        log.disabled = True
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if device.type != "cpu":
                stack.enter_context(_CPU)
            torch.clear_autocast_cache()  # casts of the parameters that are there are not those of the stand-in
            yield


@contextmanager
def _as_it_was(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Give gradients and buffers back after a real run: a loss may use the model itself, past the stand-in."""
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, version, values in buffers:
            if buffer._version != version:
                buffer.detach().copy_(values)


# What is refused, and what is said.


def _check_arguments(model: Any, loss_sum: Any, optimizer: Any, device: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not callable(loss_sum):
        raise TypeError(f"loss_sum must be a function; got {type(loss_sum).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or None; got {device!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no trainable parameters; at least one must have requires_grad=True")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:  # LBFGS, for one
        raise ValueError(
            f"optimizer {type(optimizer).__name__} needs a closure that runs the model; it cannot take one gradient"
        )
    own = set(map(id, model.parameters()))
    if not any(id(p) in own and p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer holds none of model's trainable parameters; build it from model.parameters() of this very model"
        )


def _implementation(optimizer: Optimizer, device: str) -> str:
    """Say which implementation of the optimizer's step is assumed."""
    found = []
    for group in optimizer.param_groups:
        if group.get("fused"):
            found.append("fused implementation")
        elif group.get("foreach") or (device == "cuda" and "foreach" in group and group["foreach"] is None):
            found.append("foreach implementation")
        else:
            found.append("for-loop implementation")
    name, kinds = type(optimizer).__name__, list(dict.fromkeys(found))
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name}: its own step, as it stands"
    asked = any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)
    reason = "as its groups ask for" if asked else f"as on {'a CPU' if device == 'cpu' else 'CUDA'}"
    return f"{name}: {' and '.join(kinds)}, {reason}"


def _remarks(model: nn.Module, device: str) -> Iterable[str]:
    """Say what else the numbers rest on, and what they cannot see."""
    if device == "cuda":
        yield (
            "CUDA by arithmetic, not measured: sizes rounded up to 512 bytes, dropout and attention in one kernel; "
            "no workspace of cuBLAS and cuDNN"
        )
    recurrent = [path for path, module in model.named_modules() if isinstance(module, nn.LSTM | nn.RNN | nn.GRU)]
    lstm = [path for path, module in model.named_modules() if isinstance(module, nn.LSTM)]
    if lstm and recurrent:
        yield (
            f"LSTM ({', '.join(path or 'the model' for path in lstm)}): its kernel takes scratch memory that is not "
            "in the peak, and can be several times as much; scratch=True measures it"
        )
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        yield "convolutions: their kernels take scratch memory that is not in the peak; scratch=True measures it"
    hooked = [
        path or "the model"
        for path, module in model.named_modules()
        for name, hooks in vars(module).items()
        if name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(not _is_part_of_torch(hook) for hook in hooks.values())
    ]
    if hooked:
        yield f"hooks are left out: {', '.join(dict.fromkeys(hooked))}"
    of_parameters = (
        hook
        for parameter in model.parameters()
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hook in (hooks or {}).values()
    )
    if any(not isinstance(getattr(hook, "__self__", None), MemoryMeter) for hook in of_parameters):
        yield "hooks of parameters are left out"
