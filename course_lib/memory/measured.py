"""Count the bytes of an update exactly, on any machine, and limit them so that a laptop runs out as a small GPU does.

PyTorch hands every operation to a `TorchDispatchMode` when one is active. Two facts make an exact count from that:
a tensor's bytes live in its *storage*, which views share, and Python can be told when a storage dies (`weakref`).
So `live bytes = sum of storages seen and not yet dead`, updated at every operation and every death. Nothing is sampled.
What a storage was *for* is found out afterwards: the log of births and deaths is replayed with the role each one turned
out to have. What dispatch cannot see is the scratch memory that a kernel takes and gives back within one operation;
`scratch=True` measures it with PyTorch's profiler.

Modes belong to a thread: what another thread runs (a worker with its own training loop) is not counted and not limited,
unless the `with` block stands in that thread. A `DataLoader` with workers is fine: its batches arrive from outside.
On CUDA the same names read and limit the real allocator. That path is written, not run: no GPU was at hand.
"""

from __future__ import annotations

import json
import operator
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "inputs", "temporaries")

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(size: int | str, name: str = "limit") -> int:
    """Return the number of bytes that `size` says.

    `size` is a positive int (bytes) or text such as "64 MiB", "1.5 GB", "4096 B"; KiB, MiB, GiB are powers of 1024,
    KB, MB, GB powers of 1000; case and the space do not matter, a part of a byte is dropped.
    Raises TypeError for another type (a bool or a float too), ValueError for text that is no size or is below one byte;
    both call the argument `name`.
    """
    accepted = 'accepted are a whole number of bytes of at least 1 or text like "64 MiB" (B, KB, MB, GB, KiB, MiB, GiB)'
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]?i?b)\s*", size, re.IGNORECASE)
        unit = _UNITS.get(match[2].lower()) if match else None
        if unit is None:
            raise ValueError(f"{name}={size!r} is not a size in bytes: {accepted}")
        num_bytes = int(Fraction(match[1]) * unit)  # a float would round the digits of a large number
    else:
        try:
            num_bytes = operator.index(size)
        except TypeError:
            num_bytes = None
        if num_bytes is None or isinstance(size, bool):
            raise TypeError(f"{name}={size!r} is a {type(size).__name__}: {accepted}")
    if num_bytes < 1:
        raise ValueError(f"{name}={size!r} is less than one byte: {accepted}")
    return num_bytes


def format_bytes(num_bytes: int, digits: int = 1) -> str:
    """Return `num_bytes` as text in the largest fitting binary unit: 67108864 is "64.0 MiB", 100 is "100 B"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if round(value, digits) < 1024 or unit == "GiB":
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Timeline:
    """Bytes alive over a measured block, one entry per event (a storage is born or dies), the entry state first.

    `live_bytes[i]` is the total after event `i`, `by_category[c][i]` the part of category `c`; parts sum to totals.
    `marks` are pairs (index into these lists, label), set by `MemoryMeter.mark`.
    """

    live_bytes: list[int]
    by_category: dict[str, list[int]]
    marks: list[tuple[int, str]]


class _Residents:
    """What is on the device before the block starts: found again whenever needed, kept alive by nobody.

    Only weak references: a meter that is still in a variable must not keep a deleted model in memory.
    """

    def __init__(self, caller: str, objects: tuple[Any, ...]):
        self.modules: list[weakref.ref[nn.Module]] = []
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        for position, given in enumerate(objects):
            self._sort(caller, position, given)
        self.device = self._device(caller)
        self.held: tuple[Any, ...] | None = objects  # until the block starts: a temporary argument must live that long

    def _sort(self, caller: str, position: int, given: Any) -> None:
        if isinstance(given, nn.Module):
            self.modules.append(weakref.ref(given))
        elif isinstance(given, Optimizer):
            self.optimizers.append(weakref.ref(given))
        elif isinstance(given, Tensor):
            self.tensors.append(weakref.ref(given))
        elif isinstance(given, tuple | list | dict):
            for item in given.values() if isinstance(given, dict) else given:
                self._sort(caller, position, item)
        else:
            raise TypeError(
                f"{caller}: resident[{position}] holds a {type(given).__name__}; "
                "accepted are modules, optimizers, tensors and tuples, lists and dicts of them"
            )

    def _device(self, caller: str) -> torch.device:
        # The optimizer's state is left out: Adam's step counters are on the CPU on every device.
        devices = {tensor.device for tensor, role in self.roles() if role != "optimizer_state"}
        if len(devices) > 1:
            found = ", ".join(sorted(str(device) for device in devices))
            raise ValueError(f"{caller}: the resident objects are on {found}; accepted are objects on one device")
        device = devices.pop() if devices else torch.device("cpu")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{caller}: the resident objects are on {device}; accepted are cpu and cuda")
        return device

    def _own_parameters(self) -> list[Tensor]:
        """Return, once each, the parameters of modules and optimizers and those given one by one."""
        found = [p for module in _alive(self.modules) for p in module.parameters()]
        found += [
            p for optimizer in _alive(self.optimizers) for group in optimizer.param_groups for p in group["params"]
        ]
        found += [t for t in _alive(self.tensors) if isinstance(t, nn.Parameter)]
        return [p for p in {id(p): p for p in found}.values() if not is_lazy(p)]

    def with_gradient(self) -> list[Tensor]:
        """Return, once each, what may get a `.grad`: the parameters and given tensors that ask for one."""
        found = self._own_parameters()
        found += [t for t in _alive(self.tensors) if t.is_leaf and t.requires_grad]
        return list({id(p): p for p in found}.values())

    def roles(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every tensor these objects hold right now with its category; where two apply the first one counts."""
        yield from ((p, "parameters") for p in self._own_parameters())
        for module in _alive(self.modules):
            yield from ((b, "buffers") for b in module.buffers() if not is_lazy(b))
        yield from ((t.grad, "gradients") for t in self.with_gradient() if t.grad is not None)
        for optimizer in _alive(self.optimizers):
            yield from ((t, "optimizer_state") for t in _tensors_in(list(optimizer.state.values())))
        yield from ((t, "inputs") for t in _alive(self.tensors))


def _alive(references: list[weakref.ref]) -> Iterator[Any]:
    return (found for reference in references if (found := reference()) is not None)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested tuple, list or dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


class _Storage(weakref.ref):
    """A weak reference to a storage with what must be known when it dies. `serial` is 0 for one that does not count.

    Serial numbers tell apart two storages that had the same address one after the other.
    """

    __slots__ = ("key", "num_bytes", "serial")


class _Tracker(TorchDispatchMode):
    """Keeps `live_bytes` and `peak_bytes`; with `log` also every birth and death; with `limit` refuses to pass it."""

    def __init__(
        self,
        device: torch.device,
        *,
        log: bool = False,
        limit: int | None = None,
        give_back: Callable[[], None] | None = None,
    ):
        super().__init__()
        self.device, self.log, self.limit, self.give_back = device, log, limit, give_back
        self.live_bytes = self.peak_bytes = 0
        self.known: dict[int, _Storage] = {}  # id of a storage -> its record, while it lives
        self.sizes: list[int] = [0]  # serial -> bytes
        self.events: list[int] = []  # +serial at a birth, -serial at a death
        self.categories: dict[int, str] = {}  # serial -> what it turned out to be for
        self.under_other_hooks: set[int] = set()  # see _look_for_recomputed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out PyTorch's guard against compiling this class: on small models it is a third of the cost."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            result = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:  # of an enclosing budget, or a real one
            if self.give_back is not None:
                self.give_back()
            raise
        if self.under_other_hooks and not torch.is_grad_enabled():
            self._look_for_recomputed(args)
        if isinstance(result, Tensor):
            refused = self._count_one(result, func, args, kwargs)
        elif isinstance(result, tuple | list):
            refused = self._count_all(result, func, args, kwargs)
        else:
            return result
        if refused:
            free = self.limit - self.live_bytes
            del result, args, kwargs  # the error keeps this frame alive; it must not keep the tensors
            self.give_back()
            raise _out_of_memory(refused, self.limit, free, self.device)
        return result

    def _count_one(self, tensor: Tensor, func, args, kwargs) -> int:
        """Count one output; return the bytes asked for if they pass the limit, else 0."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse: its values and indices were counted when they were made
            return 0
        record = self.known.get(id(storage))
        if record is not None:
            if record.num_bytes == storage.nbytes() or not record.serial:
                return 0  # the usual case: a view, or in place
            asked = storage.nbytes() - record.num_bytes  # an out= argument was resized
            if self.limit is None or self.live_bytes + asked <= self.limit:
                self._resized(record, storage.nbytes())
                return 0
            return asked
        if not self._is_new(storage, tensor, func, args, kwargs):
            self._remember(storage, counts=False)
            return 0
        if self.limit is not None and self.live_bytes + storage.nbytes() > self.limit:
            return storage.nbytes()
        self._remember(storage)
        return 0

    def _count_all(self, results: tuple | list, func, args, kwargs) -> int:
        """The same for an operation with several outputs, which are asked for in turn."""
        for item in results:
            refused = 0
            if isinstance(item, Tensor):
                refused = self._count_one(item, func, args, kwargs)
            elif isinstance(item, tuple | list):
                refused = self._count_all(item, func, args, kwargs)
            if refused:
                return refused
        return 0

    def _is_new(self, storage, tensor: Tensor, func, args, kwargs) -> bool:
        """True if the operation made this storage: it is on our device and not the storage of one of its arguments."""
        if tensor.device != self.device:
            return False
        if func is torch.ops.aten.lift_fresh.default:
            # torch.tensor(...) and torch.from_numpy(...) end here. What NumPy owns can't be resized and is not ours.
            return storage.resizable()
        arguments = (*args, *kwargs.values()) if kwargs else args
        if getattr(func, "overloadpacket", None) is torch.ops.aten.set_:
            arguments = arguments[1:]  # the first one has been given the storage: by deepcopy, it is a new one
        return not any(_storage_or_none(argument) is storage for argument in _tensors_in(arguments))

    def _remember(self, storage, *, counts: bool = True) -> None:
        record = _Storage(storage, self._died)
        record.key = id(storage)
        record.num_bytes = storage.nbytes()
        record.serial = 0
        self.known[record.key] = record
        if counts:
            self._born(record)

    def _born(self, record: _Storage) -> None:
        record.serial = len(self.sizes)
        self.live_bytes += record.num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        if self.log:
            self.sizes.append(record.num_bytes)
            self.events.append(record.serial)
            if torch.is_grad_enabled() and _other_hooks_are_active():
                self.under_other_hooks.add(record.serial)

    def _died(self, record: _Storage) -> None:
        self.known.pop(record.key, None)
        if record.serial:
            self.live_bytes -= record.num_bytes
            if self.log:
                self.events.append(-record.serial)
                self.under_other_hooks.discard(record.serial)

    def _resized(self, record: _Storage, num_bytes: int) -> None:
        category = self.categories.get(record.serial)
        self.live_bytes -= record.num_bytes
        if self.log:
            self.events.append(-record.serial)
        record.num_bytes = num_bytes
        self._born(record)
        if category is not None:
            self.categories[record.serial] = category

    def count_resident(self, tensor: Tensor, category: str) -> None:
        """Count a tensor that was there before the block."""
        storage = _storage_or_none(tensor)
        if storage is not None and tensor.device == self.device and id(storage) not in self.known:
            self._remember(storage)
            self.set_category(tensor, category)

    def set_category(self, tensor: Tensor, category: str) -> None:
        """Note what a tensor is for. The first word counts, but that autograd saved it says least."""
        storage = _storage_or_none(tensor)
        record = self.known.get(id(storage)) if storage is not None else None
        if record is not None and record.serial:
            if category == "activations":
                self.categories.setdefault(record.serial, category)
            elif self.categories.get(record.serial, "activations") == "activations":
                self.categories[record.serial] = category

    def _look_for_recomputed(self, args) -> None:
        """Call an activation what was made under someone else's saved-tensor hooks and is read by a backward operation.

        `torch.utils.checkpoint` and other code set hooks of their own, which hide from ours what autograd saves.
        """
        for tensor in _tensors_in(args):
            record = self.known.get(id(_storage_or_none(tensor)))
            if record is not None and record.serial in self.under_other_hooks:
                self.under_other_hooks.discard(record.serial)
                self.set_category(tensor, "activations")

    def forget(self) -> None:
        """Stop watching: no reference stays, dead or alive."""
        self.known.clear()


def _storage_or_none(tensor: Tensor):
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _other_hooks_are_active() -> bool:
    """True if saved-tensor hooks are in force that are not a meter's."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__func__", None) is not MemoryMeter._pack


_profiling = threading.Lock()


class MemoryMeter:
    """The bytes of one measured block: made by `measure_memory`, which says what counts."""

    def __init__(self, residents: _Residents, *, scratch: bool):
        self._residents = residents
        self._tracker = _Tracker(residents.device, log=True)
        self._with_scratch = scratch
        self._num_resident = 0
        self._marks: list[tuple[int, str]] = []
        self._stack: ExitStack | None = None
        self._is_inside = False
        self._replayed: Timeline | None = None
        self._allocator_peak: int | None = None  # CUDA only
        self.scratch_bytes: int | None = None

    # The block

    def __enter__(self) -> MemoryMeter:
        if self._stack is not None:
            raise RuntimeError("a meter measures one block: call measure_memory again for another")
        tracker, residents = self._tracker, self._residents
        with ExitStack() as stack:
            if self._with_scratch:
                stack.enter_context(self._profiled())
            if residents.device.type == "cuda":
                stack.callback(self._read_allocator)
                torch.cuda.reset_peak_memory_stats(residents.device)
            for tensor, category in residents.roles():
                tracker.count_resident(tensor, category)
            residents.held = None
            self._num_resident = len(tracker.events)
            stack.callback(tracker.forget)
            # Meters may nest, but only the innermost hooks of saved tensors are called: they tell the outer meters too.
            outer = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Tracker) and mode.log]
            self._listeners = [tracker, *outer]
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            for parameter in residents.with_gradient():
                if parameter.is_leaf and parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._gradient_ready).remove)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.callback(self._look_again)
            stack.enter_context(tracker)
            self._stack = stack.pop_all()
        self._is_inside = True
        return self

    def __exit__(self, *error) -> None:
        self._is_inside = False
        self._stack.__exit__(*error)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        for listener in self._listeners:
            listener.set_category(tensor, "activations")
        # An output that an operation saves for itself would keep its own graph alive: keep the values, not the history.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return kept, tensor._version

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:  # hooks switch off PyTorch's own check
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
            )
        return tensor

    def _gradient_ready(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._tracker.set_category(parameter.grad, "gradients")

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:  # gradients set by hand
            for parameter in group["params"]:
                self._gradient_ready(parameter)

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        for tensor in _tensors_in(list(optimizer.state.values())):
            self._tracker.set_category(tensor, "optimizer_state")

    def _look_again(self) -> None:
        """Find what the resident objects came to hold during the block: moved parameters, gradients set by hand."""
        for tensor, category in self._residents.roles():
            self._tracker.set_category(tensor, category)

    def mark(self, label: str) -> None:
        """Put a label at the present moment of the timeline."""
        # One entry per event after the entry state, which is entry 0.
        self._marks.append((len(self._tracker.events) - self._num_resident, str(label)))

    # What came out

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment of the block; inside the block, up to now."""
        if self._allocator_peak is not None:
            return self._allocator_peak
        return self._tracker.peak_bytes

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the first moment of the peak, which sum to `peak_bytes`; inside the block, up to now."""
        timeline = self.timeline
        moment = timeline.live_bytes.index(max(timeline.live_bytes))
        at_peak = {category: timeline.by_category[category][moment] for category in CATEGORIES}
        at_peak["temporaries"] += self.peak_bytes - sum(at_peak.values())  # 0 but on CUDA: rounding and scratch
        return at_peak

    @property
    def timeline(self) -> Timeline:
        """The bytes alive after every event, in total and by category; see `Timeline`."""
        if self._is_inside:
            self._look_again()
            return self._replay()
        if self._replayed is None:
            self._replayed = self._replay()
        return self._replayed

    def _replay(self) -> Timeline:
        tracker, categories = self._tracker, self._tracker.categories
        now = dict.fromkeys(CATEGORIES, 0)
        by_category: dict[str, list[int]] = {category: [] for category in CATEGORIES}
        for index, event in enumerate([0, *tracker.events]):
            size = tracker.sizes[abs(event)]
            now[categories.get(abs(event), "temporaries")] += size if event > 0 else -size
            if index >= self._num_resident:
                for category, values in by_category.items():
                    values.append(now[category])
        live_bytes = [sum(parts) for parts in zip(*by_category.values(), strict=True)]
        return Timeline(live_bytes, by_category, list(self._marks))

    def __str__(self) -> str:
        """A table of the peak by category. It holds no times and no addresses."""
        device = self._residents.device.type.upper()
        rows = [(category.replace("_", " "), format_bytes(size)) for category, size in self.at_peak.items()]
        rows.append(("peak", format_bytes(self.peak_bytes)))
        if self.scratch_bytes is not None:
            rows.append(("kernel scratch", format_bytes(self.scratch_bytes)))
        lines = [f"{name:<16}{size:>12}" for name, size in rows]
        rule = "-" * 28
        lines.insert(len(CATEGORIES), rule)
        return "\n".join([f"{'at the peak':<16}{device:>12}", rule, *lines])

    # Beside the count

    def _read_allocator(self) -> None:
        self._allocator_peak = torch.cuda.max_memory_allocated(self._residents.device)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Run PyTorch's profiler around the block and set `scratch_bytes`."""
        # The profiler, and standard error, are the whole process's: two threads at once would crash it.
        if torch._C._autograd._profiler_enabled() or not _profiling.acquire(blocking=False):
            raise RuntimeError("scratch=True uses PyTorch's profiler, which is already running: stop it first")
        try:
            yield from self._profile()
        finally:
            _profiling.release()

    def _profile(self) -> Iterator[None]:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        with _without_profiler_log(), tempfile.TemporaryDirectory() as folder:
            with profiler:
                yield
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            allocated = _allocator_peak_of_trace(trace)
        # The trace knows nothing of what was there before: compare the peaks of what the block itself allocated.
        self.scratch_bytes = max(0, allocated - self._peak_of_block())

    def _peak_of_block(self) -> int:
        live = peak = 0
        for event in self._tracker.events[self._num_resident :]:
            if abs(event) > self._num_resident:
                size = self._tracker.sizes[abs(event)]
                live += size if event > 0 else -size
                peak = max(peak, live)
        return peak


def _allocator_peak_of_trace(trace: Path) -> int:
    """Return the most bytes that the CPU allocator had given out at one moment of a profiler trace.

    This function alone knows the trace's undocumented form: instant events named "[memory]" with the arguments
    "Bytes" (negative when memory is given back), "Addr" and "Device Type" (0 is the CPU).
    """
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    sizes: dict[int, int] = {}
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        found = event["args"]
        if found["Device Type"] != 0:
            continue
        if found["Bytes"] >= 0:
            sizes[found["Addr"]] = found["Bytes"]
            live += found["Bytes"]
        else:
            live -= sizes.pop(found["Addr"], 0)  # 0: it was there before the trace began
        peak = max(peak, live)
    return peak


@contextmanager
def _without_profiler_log() -> Iterator[None]:
    """Keep back what PyTorch's profiler writes to stderr from C++; everything else is passed on at the end."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        real = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            kept.seek(0)
            for line in kept:
                if b"CPUAllocator.cpp" not in line and b"kineto" not in line.lower():
                    os.write(2, line)


def measure_memory(*resident: Any, scratch: bool = False) -> MemoryMeter:
    """Return a context manager that counts the bytes alive in its block by category, storage by storage.

    `resident`: modules, optimizers, tensors, and nested tuples, lists or dicts of them, that are on the device already.
    They count from the start, as parameters, buffers, gradients (`.grad`), optimizer_state and inputs. Storages count
    whole: a slice of a data set keeps, and counts, the data set. Tensors made earlier and not named count nothing.
    Inside, what autograd saves for backward is activations and everything else temporaries, such as the fresh gradient
    that is added to one that exists. What is saved under other saved-tensor hooks (checkpointing recomputes) is
    recognised when backward reads it; `torch.func` transforms refuse to run while a meter's hooks are set.

    The meter has `peak_bytes`, `at_peak`, `timeline`, `mark(label)` and prints as a table; all of it may be read inside
    too, and then says what is known so far. Measure the second update: the first one makes the optimizer's state.
    `scratch=True` profiles the block as well and sets `scratch_bytes`, the memory that kernels take and return unseen.
    Profile an update, not an epoch: a trace grows with every operation.
    Blocks nest, with budgets too, in any order; on CUDA an inner block resets the statistics that the outer one reads.

    Raises TypeError for a resident object of another kind, ValueError if they are not all on one cpu or cuda device.
    Method: `torch.utils._python_dispatch.TorchDispatchMode`, as in PyTorch's FlopCounterMode. On CUDA `peak_bytes` is
    `torch.cuda.max_memory_allocated`; written, not run: no GPU was at hand.
    """
    return MemoryMeter(_Residents("measure_memory", resident), scratch=scratch)


def memory_budget(limit: int | str, *resident: Any) -> MemoryBudget:
    """Return a context manager in whose block no more than `limit` bytes may be alive, as on a device of that size.

    `limit`: bytes or text like "64 MiB", see `parse_bytes`. `resident`: as for `measure_memory`.
    The allocation that would pass the limit raises torch.OutOfMemoryError, with the one argument and the wording that
    out-of-memory handlers look for. If the resident objects alone are too large the block is refused at its start.

    After the error parameters and optimizer are as before the update that failed, also when it is caught inside the
    block (buffers that forward passes wrote, such as BatchNorm's statistics, and the random state have moved on):
    gradients made in the block are dropped. Those that existed before stay the same objects, but values may have been
    added to them: clear them. An optimizer step that runs out leaves parameters and state bit for bit as they were and
    makes no new state (the state of steps that were completed stays: the parameters have moved with it). For this each
    step keeps a copy of parameters and state outside the count while it runs. The tensors that the failed code still
    refers to are alive until the `except` block is left. An operation has run when its output is counted: what one
    operation makes must fit into the real memory even where the budget then refuses it.

    Raises ValueError or TypeError for a limit that is not a positive size, and as `measure_memory` does.
    On CUDA the limit is set on the allocator by `torch.cuda.memory.set_per_process_memory_fraction`, for the whole
    process, and lifted at the end; written, not run: no GPU was at hand.
    """
    return MemoryBudget(parse_bytes(limit), _Residents("memory_budget", resident))


class MemoryBudget:
    """A block with a limit: made by `memory_budget`, which says what happens. Nests, also with meters, in any order."""

    def __init__(self, limit_bytes: int, residents: _Residents):
        self.limit_bytes = limit_bytes
        self._residents = residents
        self._on_cuda = residents.device.type == "cuda"
        simulated = None if self._on_cuda else limit_bytes
        self._tracker = _Tracker(residents.device, limit=simulated, give_back=self._give_back)
        self._stack: ExitStack | None = None
        self._gradients_before: list[tuple[weakref.ref[Tensor], Callable[[], Tensor | None]]] = []
        self._undo_step: dict[int, Callable[[], Any]] = {}  # by the frame of the call of step

    @property
    def live_bytes(self) -> int:
        """Bytes alive now, or at the end of the block."""
        return self._tracker.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment so far; never above `limit_bytes`."""
        return self._tracker.peak_bytes

    def __enter__(self) -> MemoryBudget:
        if self._stack is not None:
            raise RuntimeError("a budget limits one block: call memory_budget again for another")
        tracker, residents = self._tracker, self._residents
        with ExitStack() as stack:
            stack.callback(tracker.forget)
            for tensor, category in residents.roles():
                tracker.count_resident(tensor, category)
            if tracker.live_bytes > self.limit_bytes:
                raise _out_of_memory(tracker.live_bytes, self.limit_bytes, self.limit_bytes, residents.device)
            residents.held = None
            self._thread = threading.get_ident()
            self._gradients_before = [
                (weakref.ref(p), weakref.ref(p.grad) if p.grad is not None else lambda: None)
                for p in residents.with_gradient()
            ]
            if self._on_cuda:
                stack.enter_context(_limited_allocator(self.limit_bytes, residents.device))
            stack.callback(self._undo_step.clear)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(tracker)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)

    def _before_step(self, optimizer: Optimizer, args, kwargs) -> None:
        if threading.get_ident() == self._thread:
            # A step that raises runs no post-hook. What it left here is out of date when its call is over, and is
            # known by that call's frame; the frame itself would keep its tensors alive.
            undo = [_snapshot(optimizer.param_groups), _snapshot(optimizer.state)]
            self._undo_step[id(sys._getframe(1))] = lambda: [restore() for restore in undo]

    def _after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        self._undo_step.pop(id(sys._getframe(1)), None)

    def _give_back(self) -> None:
        """Undo a step that is under way and drop the gradients that were made in the block."""
        while self._undo_step:
            frame_id, undo = self._undo_step.popitem()
            if _is_running(frame_id):
                undo()
        for parameter, gradient_before in ((p(), g) for p, g in self._gradients_before):
            if parameter is not None and parameter.grad is not None and parameter.grad is not gradient_before():
                parameter.grad = None


def _is_running(frame_id: int) -> bool:
    """Say whether the function call with this frame is still under way in this thread."""
    frame = sys._getframe()
    while frame is not None and id(frame) != frame_id:
        frame = frame.f_back
    return frame is not None


def _snapshot(value: Any) -> Callable[[], Any]:
    """Return a function that puts `value` back as it is now, the same objects with the same contents, and returns it.

    `value` is a tensor, a nested dict, list or tuple of tensors, or anything that is not changed in place.
    """
    if isinstance(value, Tensor):
        # Memory that PyTorch's allocator does not know of: no budget, meter or profiler counts it.
        num_bytes = value.numel() * value.element_size()
        if not num_bytes or _storage_or_none(value) is None:
            return lambda: value
        copy = torch.frombuffer(bytearray(num_bytes), dtype=value.dtype).view(value.shape)
        copy.copy_(value.detach())
        return lambda: (value.detach().copy_(copy), value)[1]
    if isinstance(value, dict):
        items = {key: _snapshot(item) for key, item in value.items()}

        def restore_dict():
            contents = {key: restore() for key, restore in items.items()}
            value.clear()
            value.update(contents)
            return value

        return restore_dict
    if isinstance(value, list):
        entries = [_snapshot(item) for item in value]

        def restore_list():
            value[:] = [restore() for restore in entries]
            return value

        return restore_list
    if isinstance(value, tuple):
        parts = [_snapshot(item) for item in value]
        return lambda: ([restore() for restore in parts], value)[1]
    return lambda: value


def _out_of_memory(asked: int, limit: int, free: int, device: torch.device) -> torch.OutOfMemoryError:
    simulated = device.type == "cpu"
    asked_text, limit_text, free_text, used_text = (format_bytes(n, 2) for n in (asked, limit, free, limit - free))
    return torch.OutOfMemoryError(
        f"{'Simulated CUDA device' if simulated else 'CUDA'} out of memory. Tried to allocate {asked_text}. "
        f"The budget has a limit of {limit_text}, of which {free_text} is free; {used_text} is in use."
        f"{' Bytes were counted on the CPU: no GPU is involved.' if simulated else ''}"
    )


@contextmanager
def _limited_allocator(limit: int, device: torch.device) -> Iterator[None]:
    """Limit what the CUDA caching allocator may reserve on `device`. Written, not run: no GPU was at hand."""
    read = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # older versions cannot tell
    before = read(device) if read else 1.0
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()  # what is only cached would count against the limit
    torch.cuda.memory.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.memory.set_per_process_memory_fraction(before, device)
