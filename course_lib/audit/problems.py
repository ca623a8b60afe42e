"""The small problems that an audit poses: models, groups of micro-batches, optimizers.

Everything is float64, so that rounding can't hide a mistake. The gradients of the samples are linearly independent, so
the weight that a loop gave to each can be read off its gradient. `Probe` holds its parameters divided by a scale and
multiplies by it when it runs: the loss stays, the gradient becomes so many times as large. Clipping binds at one scale
and not at another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from course_lib.audit.report import MEANT
from course_lib.batches import Batch, batch_size, count_samples, map_tensors, tensors_of
from course_lib.losses import (
    IGNORED_LABEL,
    Count,
    LossSum,
    count_tokens,
    cross_entropy_sum,
    token_cross_entropy_sum,
)

NUM_INPUTS, NUM_HIDDEN, NUM_CLASSES = 6, 5, 4
LENGTH = 6  # tokens of a sequence


class Probe(nn.Module):
    """Two layers whose parameters are held divided by `scale`: inputs (B, ..., F) to scores (B, ..., C)."""

    def __init__(self, scale: float, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = scale
        shapes = ((NUM_HIDDEN, NUM_INPUTS), (NUM_HIDDEN,), (NUM_CLASSES, NUM_HIDDEN), (NUM_CLASSES,))
        self.first, self.first_bias, self.second, self.second_bias = (
            nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / scale) for shape in shapes
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(inputs, self.first * self.scale, self.first_bias * self.scale))
        return nn.functional.linear(hidden, self.second * self.scale, self.second_bias * self.scale)


class TokenProbe(Probe):
    """The same behind an embedding: tokens (B, T) to the scores (B, T, V) of each position."""

    def __init__(self, scale: float, seed: int):
        super().__init__(scale, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        # Not trained: what a token is, and where it stands, goes into the layers as data.
        table = torch.randn(LENGTH, 50, NUM_INPUTS, generator=generator, dtype=torch.float64)
        self.register_buffer("table", table)

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return super().forward(self.table[positions, inputs])


@dataclass(frozen=True)
class Session:
    """One model and one optimizer through several groups of micro-batches, one after the other.

    with_memory: its bytes are measured. seed: of the random state at its start.
    """

    name: str
    scale: float
    model: nn.Module
    make_optimizer: Callable[[nn.Module], Optimizer]
    groups: Sequence[list[Batch]]
    seed: int
    with_memory: bool = False


@dataclass(frozen=True)
class Problem:
    """What is meant: the loss as (sum, count), the sessions that try it, and the sentence that says so."""

    loss_sum: LossSum
    count: Count
    sessions: tuple[Session, ...]
    meant: str
    tolerance: float


def make_optimizers(scale: float) -> dict[str, Callable[[nn.Module], Optimizer]]:
    """Return the optimizers of the sessions; their steps have one size in terms of what the model computes."""

    def two_groups(model: nn.Module) -> Optimizer:
        held = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [{"params": held[0::2]}, {"params": held[1::2], "weight_decay": 0.0, "lr": 2e-2 / scale}]
        return AdamW([group for group in groups if group["params"]], lr=1e-2 / scale, weight_decay=0.1)

    return {
        "SGD": lambda model: SGD(model.parameters(), lr=0.05 / scale**2),
        "AdamW with two parameter groups": two_groups,
        "SGD with momentum and decay": lambda model: SGD(
            model.parameters(), lr=0.05 / scale**2, momentum=0.9, weight_decay=1e-3 * scale**2
        ),
        "Adam": lambda model: Adam(model.parameters(), lr=1e-2 / scale),
    }


# (name of the optimizer, scale of the gradient)
SCALES = (
    ("SGD", 1.0),
    ("SGD with momentum and decay", 1e-3),
    ("AdamW with two parameter groups", 1e3),
    ("Adam", 30.0),
)
LAYOUTS = ([4], [3, 3], [2, 2, 2], [4, 1], [3, 3, 1], [2, 2, 2, 2, 2], [1, 4, 2, 3, 2])
MEMORY_LAYOUT = [64, 64, 64, 64]


def sample_group(sizes: Sequence[int], seed: int) -> list[Batch]:
    """Draw a group of micro-batches (inputs, targets) of the given sizes; no two samples are alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, NUM_INPUTS, generator=generator, dtype=torch.float64),
            torch.randint(NUM_CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def token_group(sizes: Sequence[int], seed: int) -> list[Batch]:
    """Draw a group of micro-batches of token sequences; how many labels count differs from sequence to sequence."""
    generator = torch.Generator().manual_seed(seed)
    group = []
    for number, size in enumerate(sizes):
        inputs = torch.randint(50, (size, LENGTH), generator=generator)
        targets = torch.randint(NUM_CLASSES, (size, LENGTH), generator=generator)
        for row in range(size):
            counted = 1 + (5 * number + 2 * row + seed) % LENGTH  # 1 to 6, uneven within and between micro-batches
            targets[row, counted:] = IGNORED_LABEL
        group.append((inputs, targets))
    return group


def task_problem(task: str) -> Problem:
    """Return the problem of a task, "samples" or "tokens"."""
    known = {
        "samples": (cross_entropy_sum, count_samples, sample_group, Probe),
        "tokens": (token_cross_entropy_sum, count_tokens, token_group, TokenProbe),
    }
    if task not in known:
        raise ValueError(f"task must be 'samples' or 'tokens'; got {task!r}")
    loss_sum, count, draw, model = known[task]
    sessions = []
    for number, (name, scale) in enumerate(SCALES):
        # The first session has every layout, so that a group follows each other kind of group; the rest fewer.
        layouts = LAYOUTS if number == 0 else LAYOUTS[0::2] if number % 2 else LAYOUTS[0::3] + LAYOUTS[1::3]
        groups = [draw(sizes, seed=100 * number + place) for place, sizes in enumerate(layouts)]
        sessions.append(Session(name, scale, model(scale, seed=number), make_optimizers(scale)[name], groups, number))
    large = [draw(MEMORY_LAYOUT, seed=900 + place) for place in range(2)]
    sessions.append(
        Session("Adam", 1.0, model(1.0, seed=7), make_optimizers(1.0)["Adam"], large, seed=7, with_memory=True)
    )
    return Problem(loss_sum, count, tuple(sessions), MEANT[task], tolerance=1e-6)


def loop_session(task: str, sizes: Sequence[int], scale: float, number: int) -> Session:
    """Return a session whose one group is the micro-batches of an epoch."""
    draw, model = (sample_group, Probe) if task == "samples" else (token_group, TokenProbe)
    kinds = make_optimizers(scale)
    name = list(kinds)[number % len(kinds)]
    return Session(name, scale, model(scale, seed=number), kinds[name], [draw(sizes, seed=50 + number)], number)


def own_problem(model: nn.Module, micro_batches: Sequence[Batch], loss_sum: LossSum, count: Count) -> Problem:
    """Return the problem of somebody's own model: their micro-batches as one group, and as smaller ones.

    Model and batches are copied, in float64 where the model runs so.
    """
    given = list(micro_batches)
    tried = copy.deepcopy(model).double()
    wide = [map_tensors(_double, batch) for batch in given]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            loss_sum(copy.deepcopy(tried), wide[0])
    except Exception:
        tried, wide = copy.deepcopy(model), [map_tensors(torch.clone, batch) for batch in given]
    in_float64 = all(p.dtype is torch.float64 for p in tried.parameters())
    groups = [wide, wide[:1]] + [wide[1:]] * (len(wide) > 2) + [wide[::-1]]
    kinds = make_optimizers(1.0)
    sessions = [
        Session(name, 1.0, copy.deepcopy(tried), kinds[name], groups, number)
        for number, name in enumerate(("SGD", "AdamW with two parameter groups"))
    ]
    sessions.append(Session("Adam", 1.0, copy.deepcopy(tried), kinds["Adam"], [wide, wide], seed=7, with_memory=True))
    return Problem(loss_sum, count, tuple(sessions), MEANT["own"], tolerance=1e-6 if in_float64 else 1e-3)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def rows_of(batch: Batch) -> list[bytes]:
    """Name each sample of a batch by the bytes of its first tensor, to know it again when the model sees it."""
    first = tensors_of(batch)[0]
    return row_names(first)


def row_names(tensor: Tensor) -> list[bytes]:
    """Return the bytes of each row of a tensor."""
    if tensor.ndim == 0:
        return []
    return [row.numpy().tobytes() for row in tensor.detach().cpu().contiguous()]


def sizes_of(group: Sequence[Batch]) -> list[int]:
    """Count the samples of each micro-batch."""
    return [batch_size(batch) for batch in group]


def held_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Copy what an optimizer is set to, without its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
