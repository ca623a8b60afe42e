"""What measuring and limiting memory cost in time: `python -m tests.benchmarks.memory_overhead`.

Every round times one plain update, one inside `measure_memory` and one inside `memory_budget`, in this order; the table
shows medians over the rounds, so both sides of each ratio come from the same minutes of the same machine. One torch
thread. The exit status is 1 if measuring the 7 M GPT costs more than 1.5 times the plain update.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_lib.batches import split_batch
from course_lib.memory import measure_memory, memory_budget
from course_lib.models import SmallGPT, conv_net, dense_net, seven_million_gpt

LIMIT = 1.5
GUARDED = "GPT, 7.4 M parameters"


def update_of(model: nn.Module, inputs: Tensor, targets: Tensor, micro_batch_size: int):
    """Return (update, optimizer): one call is one accumulated AdamW update."""
    optimizer = torch.optim.AdamW(model.parameters())
    micro_batches = split_batch((inputs, targets), micro_batch_size)

    def update() -> None:
        for micro_inputs, micro_targets in micro_batches:
            scores = model(micro_inputs)
            loss = functional.cross_entropy(scores.flatten(0, -2), micro_targets.flatten())
            (loss / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update, optimizer


def cases() -> dict[str, tuple[nn.Module, Tensor, Tensor, int, int]]:
    """Name -> model, inputs, targets, micro-batch size, rounds."""
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    digits = torch.rand(64, 1, 8, 8, generator=generator)
    tokens, few_tokens, labels = integers(4096, 16, 128), integers(64, 16, 16), integers(10, 64)
    tiny = SmallGPT(64, context=16, width=32, heads=2, depth=2)
    return {
        GUARDED: (seven_million_gpt(), tokens, tokens, 4, 7),
        "GPT, 0.03 M parameters": (tiny, few_tokens, few_tokens, 4, 40),
        "dense, 64 digits": (dense_net(), digits, labels, 16, 40),
        "convolutions, 64 digits": (conv_net(), digits, labels, 16, 20),
    }


def seconds(update: Callable[[], None], block: AbstractContextManager) -> float:
    """Time one update; entering and leaving the block count, as they do for the user."""
    start = time.perf_counter()
    with block:
        update()
    return time.perf_counter() - start


def main() -> int:
    """Print the table and return the exit status."""
    torch.set_num_threads(1)
    print("| model, 4 micro-batches | plain update | measured | under a budget |")
    print("| --- | ---: | ---: | ---: |")
    status = 0
    for name, (model, inputs, targets, micro_batch_size, rounds) in cases().items():
        update, optimizer = update_of(model, inputs, targets, micro_batch_size)
        resident = (model, optimizer, inputs, targets)
        for block in (nullcontext(), measure_memory(*resident), memory_budget("8 GiB", *resident)):
            seconds(update, block)  # makes the optimizer's state, warms up
        times: tuple[list[float], list[float], list[float]] = ([], [], [])
        for _ in range(rounds):
            times[0].append(seconds(update, nullcontext()))
            times[1].append(seconds(update, measure_memory(*resident)))
            times[2].append(seconds(update, memory_budget("8 GiB", *resident)))
        plain, measured, limited = (median(values) for values in times)
        print(f"| {name} | {plain * 1e3:.1f} ms | {measured / plain:.2f} x | {limited / plain:.2f} x |", flush=True)
        if name == GUARDED and measured / plain > LIMIT:
            status = 1
            print(f"\nFAILED: measuring the {name} may cost at most {LIMIT} times the plain update.\n", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
