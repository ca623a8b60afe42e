"""Batches as plain structures: how one is cut, how micro-batches are grouped, how large an effective batch is.

A batch is a tensor, or a tuple, list or dict of batches. All its tensors have the samples in their first dimension.
Everything here is a pure function.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = Any  # a Tensor, or a tuple, list or dict of batches


def positive_int(name: str, value: Any, *, at_least: int = 1) -> int:
    """Return `value` as an int, or say which argument is not a whole number of at least `at_least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, at least {at_least}; got {value!r}")
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}; got {value!r}")
    return number


def map_tensors(function: Callable[..., Any], batch: Batch, *others: Batch) -> Batch:
    """Apply `function` to every tensor of a batch and keep the structure (tensor, tuple, named tuple, list, dict).

    With `others`, function gets the tensors that stand in the same place of each. Raises TypeError for a part that is
    no tensor, ValueError when the others are not built like the first.
    """
    if isinstance(batch, Tensor):
        if not all(isinstance(other, Tensor) for other in others):
            raise ValueError("batches must have one structure; where one holds a tensor, another does not")
        return function(batch, *others)
    if isinstance(batch, Mapping):
        if not all(isinstance(other, Mapping) and other.keys() == batch.keys() for other in others):
            raise ValueError(f"batches must have one structure; not all hold the keys {list(batch)}")
        parts = {key: map_tensors(function, part, *(other[key] for other in others)) for key, part in batch.items()}
        if not isinstance(batch, MutableMapping):
            return parts
        same_kind = copy.copy(batch)  # a tokenizer's output, for one, is a mapping with attributes of its own
        same_kind.update(parts)
        return same_kind
    if isinstance(batch, tuple | list):
        if not all(isinstance(other, tuple | list) and len(other) == len(batch) for other in others):
            raise ValueError(f"batches must have one structure; not all hold {len(batch)} parts")
        parts = [map_tensors(function, *column) for column in zip(batch, *others, strict=True)]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(f"batch must be a tensor, or a tuple, list or dict of tensors; found a {type(batch).__name__}")


def tensors_of(batch: Batch) -> list[Tensor]:
    """List every tensor of a batch, in order."""
    if isinstance(batch, tuple) and all(isinstance(part, Tensor) for part in batch):  # the usual case, in a hurry
        return list(batch)
    if isinstance(batch, Mapping | tuple | list):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return [tensor for part in parts for tensor in tensors_of(part)]
    return [map_tensors(lambda tensor: tensor, batch)]


def batch_size(batch: Batch) -> int:
    """Count the samples of a batch: the first dimension that all its tensors share.

    Raises ValueError when there is no tensor, when one has no dimensions, or when the tensors disagree in length.
    """
    tensors = tensors_of(batch)
    if not tensors:
        raise ValueError("batch holds no tensor, so it has no size")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError("batch holds a tensor without dimensions; the first dimension must count the samples")
    lengths = [tensor.shape[0] for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"batch holds tensors that disagree in length: {lengths}; all must have the same first dimension"
        )
    return lengths[0]


def count_samples(micro_batch: Batch) -> int:
    """Count the samples of a micro-batch: what a loss summed over samples is divided by."""
    return batch_size(micro_batch)


def split_batch(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """Cut a batch into micro-batches of `micro_batch_size` samples; the last one takes what is left.

    Nine samples in fours give 4, 4 and 1. A size above the batch's gives one micro-batch. The pieces are views of the
    batch, with its structure: no sample is copied.
    Raises ValueError for an empty batch, tensors that disagree in length, or a size below 1.
    """
    size = positive_int("micro_batch_size", micro_batch_size)
    num_samples = batch_size(batch)
    if num_samples == 0:
        raise ValueError("batch has 0 samples; there is nothing to cut")
    return [
        map_tensors(lambda tensor, start=start: tensor[start : start + size], batch)
        for start in range(0, num_samples, size)
    ]


def group_sizes(num_micro_batches: int, accumulation_steps: int) -> list[int]:
    """Say how many micro-batches each update of an epoch sees: (5, 2) gives [2, 2, 1].

    The tail of the epoch is a short group, not a lost one. No micro-batches give no groups.
    """
    num_micro_batches = positive_int("num_micro_batches", num_micro_batches, at_least=0)
    accumulation_steps = positive_int("accumulation_steps", accumulation_steps)
    full_groups, tail = divmod(num_micro_batches, accumulation_steps)
    return [accumulation_steps] * full_groups + [tail] * (tail > 0)


def group_micro_batches(loader: Iterable[Batch], accumulation_steps: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of `loader` in groups of `accumulation_steps`: every one once, the tail as a short group.

    One group is held at a time. It is a list, because an update counts its items before it uses them.
    """
    steps = positive_int("accumulation_steps", accumulation_steps)
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor | Mapping | str):
        raise TypeError(f"loader must yield micro-batches, one after the other; got {type(loader).__name__}")
    micro_batches = iter(loader)
    # iter(callable, sentinel): call until the group is empty, which is the end of the loader.
    return iter(lambda: list(islice(micro_batches, steps)), [])


def updates_per_epoch(num_micro_batches: int, accumulation_steps: int, *, drop_tail: bool = False) -> int:
    """Count the updates of one epoch: the number of groups, less the short one when `drop_tail` is set.

    Plan schedules with this and loop with `group_micro_batches`: the two agree by construction.
    """
    sizes = group_sizes(num_micro_batches, accumulation_steps)
    return sum(size == accumulation_steps or not drop_tail for size in sizes)


def effective_batch_size(micro_batch_size: int, accumulation_steps: int, world_size: int = 1) -> int:
    """Multiply out what one full update sees, in samples: micro-batch size x accumulation steps x processes."""
    return (
        positive_int("micro_batch_size", micro_batch_size)
        * positive_int("accumulation_steps", accumulation_steps)
        * positive_int("world_size", world_size)
    )


class EffectiveBatch(NamedTuple):
    """The four numbers of effective_batch_size = micro_batch_size x accumulation_steps x world_size."""

    effective_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int


def solve_effective_batch(
    *,
    effective_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    world_size: int | None = 1,
) -> EffectiveBatch:
    """Find the one number that is left out (None) of effective = micro-batch x accumulation steps x processes.

    Raises ValueError when not exactly one is left out, or when the division leaves a remainder: a request for 100 with
    4 processes of micro-batch 8 is refused, never silently turned into 96 or 128.
    """
    given = {
        "effective_batch_size": effective_batch_size,
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": accumulation_steps,
        "world_size": world_size,
    }
    missing = [name for name, value in given.items() if value is None]
    numbers = {name: positive_int(name, value) for name, value in given.items() if value is not None}
    if not missing:
        product = math.prod(value for name, value in numbers.items() if name != "effective_batch_size")
        if product != numbers["effective_batch_size"]:
            raise ValueError(
                f"effective_batch_size {numbers['effective_batch_size']} is not the product {product} of the rest"
            )
        return EffectiveBatch(**numbers)
    if len(missing) > 1:
        raise ValueError(f"leave out exactly one number; left out: {', '.join(missing)}")
    if missing == ["effective_batch_size"]:
        return EffectiveBatch(math.prod(numbers.values()), **numbers)
    factors = {name: value for name, value in numbers.items() if name != "effective_batch_size"}
    quotient, remainder = divmod(numbers["effective_batch_size"], math.prod(factors.values()))
    if remainder or quotient == 0:
        parts = " x ".join(f"{name} {value}" for name, value in factors.items())
        raise ValueError(
            f"effective_batch_size {numbers['effective_batch_size']} is not a multiple of {parts}, "
            f"so no whole {missing[0]} gives it"
        )
    return EffectiveBatch(**numbers, **{missing[0]: quotient})


def tokens_per_update(micro_batch_size: int, sequence_length: int, accumulation_steps: int, world_size: int = 1) -> int:
    """Count the tokens one full update sees: sequences per update x tokens per sequence (padding included)."""
    sequences = effective_batch_size(micro_batch_size, accumulation_steps, world_size)
    return sequences * positive_int("sequence_length", sequence_length)


def concatenate_batches(batches: Iterable[Batch]) -> Batch:
    """Join batches of one structure into a single one, sample after sample: the inverse of `split_batch`.

    Raises ValueError when there is no batch, or when they are not built alike.
    """
    parts = list(batches)
    if not parts:
        raise ValueError("batches must hold at least one batch")
    return map_tensors(lambda *tensors: torch.cat(tensors), *parts)
