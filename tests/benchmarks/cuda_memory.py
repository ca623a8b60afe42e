"""Memory predicted by arithmetic against `torch.cuda.max_memory_allocated`: `python -m tests.benchmarks.cuda_memory`.

For each case the model is built on the GPU, the peak is predicted, two updates are run, and the second one's peak is
read from the allocator. What a library keeps for itself (the workspaces of cuBLAS, taken at the first product in each
thread) is there before a case starts and is subtracted. The exit status is 1 if a prediction is more than 5 % off;
convolutions are reported and not held to it, since cuDNN takes what workspace it likes. Without a GPU the table says
"not measured" and the exit status is 0. Written to take less than 5 minutes; a case that the GPU cannot hold is left
out and named.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from course_lib.accumulation import update_parameters
from course_lib.batches import Batch, split_batch
from course_lib.losses import LossSum, cross_entropy_sum, token_cross_entropy_sum
from course_lib.memory import format_bytes, predict_memory
from course_lib.models import SmallGPT, conv_net, dense_net

LIMIT = 5.0  # percent
STEPS = (1, 2, 4)

gpt = partial(SmallGPT, 16_384, context=512, width=768, heads=12, depth=8)
adamw = torch.optim.AdamW


def autocast_loss(model: nn.Module, micro_batch: Batch) -> Tensor:
    """Sum the cross-entropy over tokens, with the model in bfloat16."""
    with torch.autocast(micro_batch[0].device.type, dtype=torch.bfloat16):
        return token_cross_entropy_sum(model, micro_batch)


def tokens(device: str, samples: int = 16) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16_384, (samples, 512), device=device)
    return drawn, drawn.roll(-1, 1)


def digits(device: str, samples: int, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.rand(samples, 1, size, size, device=device), torch.randint(10, (samples,), device=device)


Case = tuple[Callable[[], nn.Module], Callable[[str], Batch], LossSum, Callable, bool]
CASES: dict[str, Case] = {
    # name: (model, batch, loss, optimizer, held to the mark)
    "dense, AdamW foreach": (
        lambda: dense_net(hidden=(8192,) * 4),
        partial(digits, samples=8192),
        cross_entropy_sum,
        adamw,
        True,
    ),
    "GPT, AdamW foreach": (gpt, tokens, token_cross_entropy_sum, adamw, True),
    "GPT, AdamW fused": (gpt, tokens, token_cross_entropy_sum, partial(adamw, fused=True), True),
    "GPT with dropout, SGD": (partial(gpt, dropout=0.1), tokens, token_cross_entropy_sum, torch.optim.SGD, True),
    "GPT, bfloat16 autocast": (gpt, tokens, autocast_loss, adamw, True),
    "convolutions": (
        lambda: conv_net(channels=128),
        partial(digits, samples=128, size=64),
        cross_entropy_sum,
        adamw,
        False,
    ),
}


def warm_up() -> None:
    """Let cuBLAS take its workspaces, in the thread of the forward and in that of the backward pass."""
    layer = nn.Linear(256, 256, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            layer(torch.ones(256, 256, device="cuda")).sum().backward()
    torch.cuda.synchronize()


def measured(case: Case, steps: int) -> tuple[int, int]:
    """Return (predicted, measured) peak in bytes of the second update on the GPU."""
    make, draw, loss_sum, optimize, _ = case
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, batch = make().cuda(), draw("cuda")
    optimizer = optimize(model.parameters(), lr=1e-4)
    size = len(batch[0]) // steps
    predicted = predict_memory(model, batch, loss_sum, optimizer, micro_batch_size=size).peak_bytes
    count = token_cross_entropy_sum.count if loss_sum is autocast_loss else getattr(loss_sum, "count", None)
    given = (split_batch(batch, size), loss_sum, count) if count else (split_batch(batch, size), loss_sum)
    update_parameters(model, optimizer, *given)
    torch.cuda.reset_peak_memory_stats()
    update_parameters(model, optimizer, *given)
    torch.cuda.synchronize()
    return predicted, torch.cuda.max_memory_allocated() - before


def main() -> int:
    """Print the table and return the exit status."""
    has_gpu = torch.cuda.is_available()
    print(f"GPU: {torch.cuda.get_device_name() if has_gpu else 'none within reach'}\n")
    print("| case | micro-batches | predicted by arithmetic | max_memory_allocated | error |")
    print("| --- | ---: | ---: | ---: | ---: |")
    failures = []
    if has_gpu:
        warm_up()
    for name, case in CASES.items():
        for steps in STEPS:
            if not has_gpu:
                print(f"| {name} | {steps} | not measured | not measured | not measured |")
                continue
            try:
                predicted, found = measured(case, steps)
            except torch.OutOfMemoryError:
                predicted = found = 0
            if not found:  # out of the except block, so that what failed is freed
                print(f"| {name} | {steps} | not measured: does not fit | | |", flush=True)
                continue
            error = 100 * (predicted - found) / found
            print(
                f"| {name} | {steps} | {format_bytes(predicted)} | {format_bytes(found)} | {error:+.2f} % |", flush=True
            )
            if case[-1] and abs(error) > LIMIT:
                failures.append(f"{name} at {steps}")
    if failures:
        print(f"\nFAILED, more than {LIMIT} % off: {', '.join(failures)}.\n", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
