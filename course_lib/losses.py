"""Losses as sums, each with the count that its sum has to be divided by.

A mean cannot be put together again from pieces of unequal size; a sum and a count can. So every loss here is a function
`loss_sum(model, micro_batch)` that returns the SUM of the item losses as a scalar tensor. A loss whose items are not
samples (tokens, weights) is tied to its own count, and `accumulate_gradients` refuses it with another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_lib.batches import Batch, batch_size, positive_int

IGNORED_LABEL = -100  # the label that marks a position without a loss, PyTorch's own default
NOTHING_IGNORED = -(2**31)  # no label has this value: an index out of range is then an error, not a silent gap

LossSum = Callable[[nn.Module, Batch], Tensor]
Count = Callable[[Batch], float]


def pair(loss_sum: LossSum, count: Count) -> tuple[LossSum, Count]:
    """Tie a loss to the one count that fits it, so that using it with another is an error."""
    loss_sum.count = count
    return loss_sum, count


def wide(scores: Tensor) -> Tensor:
    """Return half-precision numbers as float32: a sum of many losses overflows in float16, loses digits in bfloat16."""
    return scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores


@contextmanager
def labels_named(scores: Tensor, targets: Tensor, ignored: str = "") -> Iterator[None]:
    """Say which labels were given and which are taken, where one is out of range; on CUDA the driver says it."""
    try:
        yield
    except IndexError as error:
        found = f"from {int(targets.min())} to {int(targets.max())}"
        taken = f"classes from 0 to {scores.shape[1] - 1}{ignored}"
        raise ValueError(f"targets must be {taken}; got {found}") from error


def cross_entropy_sum(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Sum the cross-entropy over samples: model output (B, C), targets (B,) with classes 0 to C - 1. Count: samples.

    A label outside 0 to C - 1 is an error, -100 too: a sample without a loss would still be counted.
    """
    inputs, targets = micro_batch
    scores = wide(model(inputs))
    with labels_named(scores, targets):
        return functional.cross_entropy(scores, targets, reduction="sum", ignore_index=NOTHING_IGNORED)


def squared_error_sum(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Sum the squared error over samples: model output and targets of the same shape (B, ...). Count: samples."""
    inputs, targets = micro_batch
    outputs = wide(model(inputs))
    if outputs.shape != targets.shape:
        raise ValueError(
            f"targets must have the shape of the model's output, {tuple(outputs.shape)}; got {tuple(targets.shape)}"
        )
    return (outputs - targets).square().sum()


def count_tokens(micro_batch: Batch) -> int:
    """Count the targets that are not ignored (-100), over all sequences of a micro-batch (inputs, targets)."""
    batch_size(micro_batch)  # inputs and targets must be equally many
    _, targets = micro_batch
    return int((targets != IGNORED_LABEL).sum())


def token_cross_entropy_sum(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Sum the cross-entropy over tokens: model output (B, T, V), targets (B, T), -100 where ignored. Count: tokens."""
    inputs, targets = micro_batch
    scores = wide(model(inputs)).flatten(0, 1)
    with labels_named(scores, targets, f", or {IGNORED_LABEL} where ignored"):
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


pair(token_cross_entropy_sum, count_tokens)


def chunked_token_cross_entropy(chunk_tokens: int) -> tuple[LossSum, Count]:
    """Build (loss_sum, count) for the cross-entropy over tokens that holds the scores of `chunk_tokens` tokens at most.

    Value and gradient are those of `token_cross_entropy_sum`, to rounding. The scores of a chunk are made, reduced to a
    sum and forgotten, and made again in the backward pass: the head runs twice.
    For models with a method `features`, inputs to (B, T, width), and a `head` from width to V scores, such as SmallGPT;
    targets (B, T), -100 where ignored.
    Raises TypeError or ValueError for a chunk_tokens below 1; when called, TypeError for a model without the two.
    """
    chunk_tokens = positive_int("chunk_tokens", chunk_tokens)

    def chunk_sum(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
        scores = wide(model.head(features))  # (chunk_tokens, V), and no more of them at a time
        return functional.cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED_LABEL)

    def chunked_token_cross_entropy_sum(model: nn.Module, micro_batch: Batch) -> Tensor:
        if not (callable(getattr(model, "features", None)) and callable(getattr(model, "head", None))):
            raise TypeError(f"model must have features and head, as SmallGPT has; got {type(model).__name__}")
        inputs, targets = micro_batch
        features = model.features(inputs).flatten(0, 1)
        chunks = zip(features.split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True)
        return sum(checkpoint(chunk_sum, model, *chunk, use_reentrant=False) for chunk in chunks)

    return pair(chunked_token_cross_entropy_sum, count_tokens)


def in_bfloat16(loss_sum: LossSum) -> LossSum:
    """Return `loss_sum` under `torch.autocast`: matrix products in bfloat16, parameters and gradients as they are.

    Each call is an autocast block of its own, so the copies of the weights that autocast keeps end with it. The result
    has the count of `loss_sum`. bfloat16 has the range of float32: no GradScaler is needed.
    Source: Micikevicius et al. (2018), "Mixed precision training"; the documentation of torch.amp.
    """

    @functools.wraps(loss_sum)  # keeps its name and its count
    def loss_sum_in_bfloat16(model: nn.Module, micro_batch: Batch) -> Tensor:
        device = next(model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16):
            return loss_sum(model, micro_batch)

    return loss_sum_in_bfloat16


def class_weighted_cross_entropy(class_weights: Sequence[float] | Tensor) -> tuple[LossSum, Count]:
    """Build (loss_sum, count) for cross-entropy with a weight per class: model output (B, C), targets (B,).

    The sum weighs each sample's loss with the weight of its class; the count is the sum of those weights, which is what
    `torch.nn.CrossEntropyLoss(weight=...)` divides by. Weights: C numbers, finite, none negative, not all 0.
    """
    weights = torch.as_tensor(class_weights, dtype=torch.float64)
    if weights.ndim != 1 or len(weights) == 0:
        raise ValueError(f"class_weights must be a list of one number per class; got shape {tuple(weights.shape)}")
    if not torch.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError(f"class_weights must be finite, none negative and not all 0; got {weights.tolist()}")

    def weighted_cross_entropy_sum(model: nn.Module, micro_batch: Batch) -> Tensor:
        inputs, targets = micro_batch
        scores = wide(model(inputs))
        with labels_named(scores, targets):
            return functional.cross_entropy(
                scores, targets, weight=weights.to(scores), reduction="sum", ignore_index=NOTHING_IGNORED
            )

    def count_class_weights(micro_batch: Batch) -> float:
        batch_size(micro_batch)  # inputs and targets must be equally many
        _, targets = micro_batch
        if ((targets < 0) | (targets >= len(weights))).any():
            found = f"from {int(targets.min())} to {int(targets.max())}"
            raise ValueError(f"targets must be classes from 0 to {len(weights) - 1}, one weight each; got {found}")
        return float(weights.to(targets.device)[targets].sum())

    return pair(weighted_cross_entropy_sum, count_class_weights)
