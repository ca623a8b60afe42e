"""Training as a sequence of updates, the history that two runs are compared by, and a run's state in a file."""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.accumulation import Update, check_model, check_scaler, update_parameters
from course_lib.batches import Batch, count_samples, positive_int
from course_lib.losses import Count, LossSum


@dataclass
class History:
    """What every update of a run returned, in order."""

    updates: list[Update] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The mean loss of each update's group, before its step; nan where a group had no items."""
        return [update.loss for update in self.updates]

    def __len__(self) -> int:
        return len(self.updates)

    def __repr__(self) -> str:
        ends = f": loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}" if self.updates else ""
        return f"History of {len(self)} updates{ends}"


def train(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Iterable[Sequence[Batch]],
    loss_sum: LossSum,
    count: Count = count_samples,
    *,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
) -> History:
    """Make one update for each group of micro-batches, and keep what each returned.

    groups: lists of micro-batches, from `group_micro_batches(loader, K)`, or from `split_batch` for each batch.
    The other arguments, and the errors, are those of `update_parameters`. The model's training mode is left as it is.
    """
    history = History()
    for micro_batches in groups:
        update = update_parameters(
            model,
            optimizer,
            micro_batches,
            loss_sum,
            count,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
            scheduler=scheduler,
        )
        history.updates.append(update)
    return history


def loss_gaps(reference: History, candidate: History) -> list[float]:
    """Return the absolute difference of two runs' losses, update by update.

    Raises ValueError when the runs differ in length.
    """
    if len(reference) != len(candidate):
        raise ValueError(f"candidate has {len(candidate)} updates, reference {len(reference)}; they must be equal")
    return [abs(a - b) for a, b in zip(reference.losses, candidate.losses, strict=True)]


def save_training(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    extras: Mapping[str, Any] | None = None,
    updates_done: int,
) -> None:
    """Write the state of a run between two updates to a file that `load_training` resumes bit for bit.

    extras: what else the run changes, by name: a moving average (`AveragedModel`), a second optimizer; anything with
    `state_dict` and `load_state_dict`.
    updates_done: how many groups of micro-batches the run has used, also those whose step was skipped. That is its
    position in the data: with an order that depends on a seed alone, as in `shuffled_batches`, skip as many.
    Kept beside it: torch's random state, of the CPU and of the GPUs that the model is on. Not kept: the random state of
    `random` and `numpy`, training and evaluation mode, `requires_grad`, and what is not in a `state_dict`.

    Raises ValueError when a parameter has a gradient: a part of a group's sum would be lost. Raises TypeError or
    ValueError for arguments that cannot be right, and when a state could not be read again with `weights_only=True`.
    The file appears as a whole or not at all; after an error or an interrupt the one that was there is untouched.
    """
    path = Path(path).resolve()  # a link stays a link, and what it leads to is replaced
    parts = _parts(model, optimizer, scheduler, scaler, extras)
    updates_done = positive_int("updates_done", updates_done, at_least=0)
    _refuse_gradients(parts, "save")
    content = {
        "format": _FORMAT,
        "updates_done": updates_done,
        "kinds": {name: _kind(part, model) for name, part in parts.items()},
        "states": {name: part.state_dict() for name, part in parts.items()},
        "random": _random_states(model),
    }
    if path.is_dir():
        raise ValueError(f"path must name a file; {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of path does not exist: {path.parent}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it takes the place of the old one
        _read(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_training(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    extras: Mapping[str, Any] | None = None,
) -> int:
    """Bring everything to the state that `save_training` wrote, and return how many updates were done.

    Build the parts as the first run built them, load, and go on with the groups from the returned number on:
    `itertools.islice(groups, updates_done, None)`. torch's random state is set last; draw nothing from it in between.
    The file is read with `weights_only=True`: it can't run code.

    All or nothing: after an error every part and the random state are as before. Raises FileNotFoundError; ValueError
    when the file is cut short, changed (by its checksums) or not from `save_training`, when it holds a part that is not
    given or lacks one that is, when a part is of another kind (names, shapes and types of the model's tensors, class of
    the others, parameters that the optimizer holds, devices), and when a parameter has a gradient.
    """
    parts = _parts(model, optimizer, scheduler, scaler, extras)
    _refuse_gradients(parts, "load")
    content = _read(Path(path))
    states, kinds = content["states"], content["kinds"]
    for name in parts.keys() - states.keys():
        raise ValueError(f"{name} was given, but {path} was saved without it")
    for name in states.keys() - parts.keys():
        raise ValueError(f"{path} was saved with {name}; it must be given to load_training as well")
    for name, part in parts.items():
        _refuse_difference(name, kinds[name], _kind(part, model))
    _refuse_difference("random state", sorted(content["random"]), sorted(_random_states(model)))

    before = {name: _keep(part) for name, part in parts.items()}
    before_random = _random_states(model)
    try:
        for name, part in parts.items():
            try:
                part.load_state_dict(copy.deepcopy(states[name]))  # some keep, and later change, what they are given
            except Exception as error:
                raise ValueError(f"{name} refused the state in {path}: {error}") from error
            if not _contains(part.state_dict(), states[name]):
                raise ValueError(f"{name} did not take over the state in {path} as it stands there")
        _set_random_states(content["random"])
    except BaseException:
        for name, part in parts.items():
            _put_back(part, before[name])
        _set_random_states(before_random)
        raise
    return content["updates_done"]


# What a file of a run holds, and how it is compared.

_FORMAT = "course_lib.training 1"
_CONTENT = {"states", "kinds", "random", "updates_done"}


def _parts(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, scaler: Any, extras: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Name what holds state; refuse what cannot be saved or does not belong together."""
    check_model(model)
    check_scaler(scaler)
    if extras is not None and not isinstance(extras, Mapping):
        raise TypeError(f"extras must be a dict from names to what has a state_dict; got {type(extras).__name__}")
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    parts = {name: part for name, part in named.items() if part is not None or name == "optimizer"}
    parts |= {f"extras[{name!r}]": part for name, part in (extras or {}).items()}
    for name, part in parts.items():
        if isinstance(part, type) or not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"{name} must have state_dict and load_state_dict; got {type(part).__name__}")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    own = set(map(id, model.parameters()))
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("optimizer holds none of model's parameters; build it from those of this very model")
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if getattr(scheduled, "param_groups", None) is not optimizer.param_groups:
        raise ValueError("scheduler belongs to another optimizer; build it from the one that is given here")
    return parts


def _refuse_gradients(parts: Mapping[str, Any], verb: str) -> None:
    """Raise ValueError when any parameter of a module or optimizer has a gradient, naming the first."""
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            parameters = list(part.named_parameters())
        else:
            groups = getattr(part, "param_groups", [])
            parameters = [(f"parameter {i}", one) for i, one in enumerate(one for g in groups for one in g["params"])]
        for label, parameter in parameters:
            if parameter.grad is not None:
                raise ValueError(
                    f"{name} has a gradient in {label}: the group is not finished, and the part of it that is summed "
                    f"up would be lost. {verb.capitalize()} after the update, when its gradients are None "
                    "(optimizer.zero_grad())"
                )


def _kind(part: Any, model: nn.Module) -> Any:
    """Describe what a state must fit, in words: each tensor of a module, each parameter of an optimizer, a class."""
    if isinstance(part, nn.Module):
        return {
            key: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else ""
            for key, value in part.state_dict().items()
        }
    kind = {"class": type(part).__name__}
    if hasattr(part, "is_enabled"):
        kind["enabled"] = str(part.is_enabled())
    if hasattr(part, "param_groups"):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, group in enumerate(part.param_groups):
            for place, one in enumerate(group["params"]):
                kind[f"group {number}, parameter {place}"] = f"{names.get(id(one), '')} {list(one.shape)}".strip()
    return kind


def _refuse_difference(name: str, saved: Any, given: Any) -> None:
    """Raise ValueError when what was saved and what is given differ, naming the first difference."""
    if saved == given:
        return
    if not isinstance(saved, Mapping):
        raise ValueError(f"{name} was saved for {', '.join(saved)}; given is {', '.join(given)}")
    key = next(key for key in [*saved, *given] if saved.get(key) != given.get(key))
    was, now = (f"{one[key]!r}" if key in one else "none" for one in (saved, given))
    raise ValueError(f"{name} is not as it was saved. {key}: saved {was}, given {now}")


def _random_states(model: nn.Module) -> dict[str, Tensor]:
    """Return torch's random state on the CPU and on each GPU that the model is on."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    on_gpus = {str(device): torch.cuda.get_rng_state(device) for device in devices}
    return {"cpu": torch.get_rng_state()} | on_gpus


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    for device, state in states.items():
        torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)


def _read(path: Path) -> dict[str, Any]:
    """Read a file of save_training; it can hold tensors, numbers, text and containers of them, and no code."""
    with open(path, "rb") as file:
        try:
            _refuse_changed_bytes(file)
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            message = f"{path} can't be read as tensors and plain values (weights_only=True): {error}"
            raise ValueError(message) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not content.keys() >= _CONTENT:
        raise ValueError(f"{path} was not written by save_training of this version")
    return content


def _refuse_changed_bytes(file: IO[bytes]) -> None:
    """Raise ValueError where the file's own checksums do not fit, which `torch.load` does not look at."""
    has_checksums = getattr(torch.serialization, "get_crc32_options", lambda: True)  # since 2.6 they can be left out
    if has_checksums():
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its part {damaged} has changed since it was written")
    file.seek(0)


def _keep(part: Any) -> Any:
    """Keep what `_put_back` needs. An optimizer makes new containers when it loads, so its old ones are enough."""
    if isinstance(part, Optimizer):
        return {"state": part.state, "param_groups": part.param_groups}
    return copy.deepcopy(part.state_dict())


def _put_back(part: Any, kept: Any) -> None:
    if isinstance(part, Optimizer):
        part.__dict__.update(kept)
    else:
        with suppress(Exception):  # what refused the file's state may refuse its own; the others go back all the same
            part.load_state_dict(kept)


def _contains(now: Any, saved: Any) -> bool:
    """Say whether everything in `saved` is in `now`, bit for bit."""
    if isinstance(saved, Tensor):
        if not isinstance(now, Tensor) or (now.dtype, now.shape) != (saved.dtype, saved.shape):
            return False
        now = now.detach().cpu()
        return bool(((now == saved) | ((now != now) & (saved != saved))).all())
    if isinstance(saved, Mapping):
        return isinstance(now, Mapping) and all(key in now and _contains(now[key], saved[key]) for key in saved)
    if isinstance(saved, list | tuple):
        return isinstance(now, list | tuple) and len(now) == len(saved) and all(map(_contains, now, saved))
    if isinstance(saved, int | float | str | None):
        return now == saved or (now != now and saved != saved)
    return type(now) is type(saved)  # torch's own small types; others can't be in the file
