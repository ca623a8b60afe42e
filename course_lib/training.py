"""Training as a sequence of updates, and the history that two runs are compared by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.accumulation import Update, update_parameters
from course_lib.batches import Batch, count_samples
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
