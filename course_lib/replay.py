"""Go back to an earlier moment: the random state and a model's buffers, so that a forward pass can be run once more.

A second forward pass gives the numbers of the first only if it draws the same random numbers (dropout) and finds the
same buffers (running statistics, the power iteration of spectral normalisation).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False, repr=False)
class Moment:
    """The random state of the CPU and of the model's CUDA devices, and a copy of the model's buffers."""

    cpu: Tensor
    cuda: dict[int, Tensor]
    buffers: dict[str, Tensor]


def remember(model: nn.Module, *, buffers: bool = True) -> Moment:
    """Keep the random state, and with it a copy of the model's buffers unless that is switched off."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    kept = dict(model.named_buffers()) if buffers else {}
    return Moment(
        cpu=torch.get_rng_state(),
        cuda={device: torch.cuda.get_rng_state(device) for device in devices},
        buffers={name: buffer.detach().clone() for name, buffer in kept.items()},
    )


@torch.no_grad()
def go_back(model: nn.Module, moment: Moment) -> None:
    """Set the random state, and the buffers that `moment` holds, to what they were."""
    torch.set_rng_state(moment.cpu)
    for device, state in moment.cuda.items():
        torch.cuda.set_rng_state(state, device)
    for name, buffer in model.named_buffers():
        if name in moment.buffers:
            buffer.copy_(moment.buffers[name])


@contextmanager
def as_if_never_run(model: nn.Module) -> Iterator[Moment]:
    """Give the random state and the buffers back when the block ends, also after an error."""
    moment = remember(model)
    try:
        yield moment
    finally:
        go_back(model, moment)
