"""Measured peak of `update_parameters` against the law of the course: `python -m tests.benchmarks.memory_floor`.

The law, for two or more micro-batches: P + B + O + X + G + max(A(m) + T, T_optimizer), where P are parameters, B
buffers, O optimizer state, X the whole batch, G gradients, A(m) the activations of one micro-batch of m samples, T what
else is alive at the worst moment of its passes, the one fresh gradient included. Its right side is put together from
pieces, each measured or counted apart, outside of any update: P, B, O, X, G are sums over tensors, A(m) + T is the peak
of one forward and backward pass of the loss above what was there, with `torch.autograd.grad`; T_optimizer is counted by
hand for AdamW, two copies of the largest parameter. The exit status is 1 if an update holds more than 1.05 times that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch
from course_lib.losses import cross_entropy_sum, token_cross_entropy_sum
from course_lib.memory import format_bytes, measure_memory
from course_lib.models import conv_net, dense_net, seven_million_gpt

LIMIT = 1.05


def cases() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor], object, tuple[int, ...]]]:
    """Name -> model, batch, loss, micro-batch sizes."""
    generator = torch.Generator().manual_seed(0)
    digits = torch.rand(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator)
    tokens = torch.randint(4096, (8, 128), generator=generator)
    wide = dense_net(hidden=(1024, 1024))
    return {
        "dense, 1.1 M parameters": (wide, digits, cross_entropy_sum, (32, 8, 1)),
        "convolutions, 0.1 M parameters": (conv_net(), digits, cross_entropy_sum, (32, 8, 1)),
        "GPT, 7.4 M parameters": (seven_million_gpt(), (tokens, tokens), token_cross_entropy_sum, (4, 2, 1)),
    }


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bound(model: nn.Module, optimizer: torch.optim.Optimizer, batch, loss_sum, micro_batch_size: int) -> int:
    """Return the right side of the law."""
    parameters = list(model.parameters())
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    still = num_bytes([*parameters, *model.buffers(), *state, *batch])
    gradients = num_bytes(p for p in parameters if p.requires_grad)
    micro_batch = split_batch(batch, micro_batch_size)[0]
    with measure_memory() as meter:
        # Each gradient dies when the next one is there: what is alive is A(m), T and one fresh gradient.
        handles = [p.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient)) for p in parameters]
        loss = loss_sum(model, micro_batch)
        torch.autograd.grad(loss, parameters)
        del loss
        for handle in handles:
            handle.remove()
    of_step = 2 * max(num_bytes([p]) for p in parameters)
    return still + gradients + max(meter.peak_bytes, of_step)


def main() -> int:
    """Print the table and return the exit status."""
    torch.set_num_threads(1)
    print("| model | micro-batches | the law's bound | measured peak | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    worst = 0.0
    for name, (model, batch, loss_sum, sizes) in cases().items():
        optimizer = torch.optim.AdamW(model.parameters())
        count = getattr(loss_sum, "count", None)
        for size in sizes:
            micro_batches = split_batch(batch, size)
            given = (micro_batches, loss_sum, count) if count else (micro_batches, loss_sum)
            update_parameters(model, optimizer, *given)
            with measure_memory(model, optimizer, batch) as meter:
                update_parameters(model, optimizer, *given)
            expected = bound(model, optimizer, batch, loss_sum, size)
            ratio = meter.peak_bytes / expected
            worst = max(worst, ratio)
            cut = f"{len(micro_batches)} x {size}"
            found = f"{format_bytes(expected)} | {format_bytes(meter.peak_bytes)} | {ratio:.4f}"
            print(f"| {name} | {cut} | {found} |", flush=True)
    print("\nOn a GPU: not measured.")
    if worst > LIMIT:
        print(f"\nFAILED: an update may hold at most {LIMIT} times the law's bound.\n", file=sys.stderr)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
