"""What `update_parameters` costs beside a loop by hand and two trainers: `python -m tests.benchmarks.update_overhead`.

Every round makes one AdamW update with each of the four, in turn, from the same model, so that all ratios come from the
same minutes of the same machine; the table shows the median over the rounds of one side's time over the hand-written
loop's in the same round. The loop by hand takes part twice: how far its second ratio is from 1 is the noise of the
run. Peaks are the bytes alive at the peak of one more update. One torch thread. The exit status is 1 if
`update_parameters` costs more than its mark, is slower than a peer by more than the noise, or has a higher peak than
any other.
"""

from __future__ import annotations

import copy
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch
from course_lib.losses import count_tokens, cross_entropy_sum, token_cross_entropy_sum
from course_lib.memory import measure_memory
from course_lib.models import SmallGPT, dense_net

OURS, BY_HAND, AGAIN, ACCELERATE, FABRIC = "update_parameters", "by hand", "by hand again", "Accelerate", "Fabric"
STEPS = (4, 16)
Batches = list[tuple[Tensor, Tensor]]
Update = Callable[[], None]


def mean_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of one micro-batch, as a training loop writes it."""
    scores = model(inputs)
    if targets.ndim > 1:  # tokens
        scores, targets = scores.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(scores, targets)


def by_hand(model: nn.Module, micro_batches: Batches) -> tuple[Update, object]:
    """The loop of the tutorials, right for equal micro-batches; it reads the loss once per update, as the others do."""
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        losses = []
        for inputs, targets in micro_batches:
            loss = mean_of(model, inputs, targets) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        sum(losses).item()

    return update, optimizer


def ours(model: nn.Module, micro_batches: Batches) -> tuple[Update, object]:
    """`update_parameters`, with all of its checks."""
    optimizer = torch.optim.AdamW(model.parameters())
    pair = (token_cross_entropy_sum, count_tokens) if micro_batches[0][1].ndim > 1 else (cross_entropy_sum,)

    def update() -> None:
        update_parameters(model, optimizer, micro_batches, *pair)

    return update, optimizer


def accelerate(model: nn.Module, micro_batches: Batches) -> tuple[Update, object]:
    """Accelerate's `accumulate`, which divides, and steps at every K-th micro-batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=len(micro_batches), cpu=True)
    inner = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, inner)

    def update() -> None:
        losses = []
        for inputs, targets in micro_batches:
            with accelerator.accumulate(prepared):
                loss = mean_of(prepared, inputs, targets)
                accelerator.backward(loss)
                losses.append(loss.detach() / len(micro_batches))
                optimizer.step()
                optimizer.zero_grad()
        sum(losses).item()

    return update, inner


def fabric(model: nn.Module, micro_batches: Batches) -> tuple[Update, object]:
    """Lightning Fabric: the division and the boundary are the loop's, `backward` and `step` are Fabric's."""
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    inner = torch.optim.AdamW(model.parameters())
    prepared, optimizer = runner.setup(model, inner)

    def update() -> None:
        losses = []
        for i, (inputs, targets) in enumerate(micro_batches):
            with runner.no_backward_sync(prepared, enabled=i + 1 < len(micro_batches)):
                loss = mean_of(prepared, inputs, targets) / len(micro_batches)
                runner.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        sum(losses).item()

    return update, inner


SIDES = {BY_HAND: by_hand, OURS: ours, AGAIN: by_hand, ACCELERATE: accelerate, FABRIC: fabric}
LEAST_NOISE = 0.005  # two medians of the same code seldom agree better than this


def cases() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor], int, int, float]]:
    """Name -> model, micro-batch, K, rounds, and the most that `update_parameters` may take over the loop by hand."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for steps in STEPS:
        digits = torch.rand(16 * steps, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (16 * steps,), generator=generator)
        found[f"dense, {steps} x 16 digits"] = (dense_net(), (digits, labels), steps, 400, 1.05)
    for steps in STEPS:
        tokens = torch.randint(256, (4 * steps, 65), generator=generator)
        gpt = SmallGPT(256, context=64, width=128, heads=4, depth=2)
        found[f"small GPT, {steps} x 4 x 64 tokens"] = (gpt, (tokens[:, :-1], tokens[:, 1:]), steps, 40, 1.02)
    return found


def main() -> int:
    """Print the table and return the exit status."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    others = [side for side in SIDES if side != BY_HAND]
    print(f"| time over the loop by hand | {' | '.join(others)} | mark | peak, {OURS} / by hand |")
    print(f"| --- {'| ---: ' * (len(others) + 2)}|")
    faults = []
    for name, (model, batch, steps, rounds, mark) in cases().items():
        micro_batches = split_batch(batch, len(batch[0]) // steps)
        made = {side: make(copy.deepcopy(model), micro_batches) for side, make in SIDES.items()}
        for update, _ in made.values():
            for _ in range(3):
                update()  # makes the optimizer's state, warms up
        ratios: dict[str, list[float]] = {side: [] for side in SIDES}
        gc.disable()
        for round_number in range(rounds):
            order = list(SIDES)[round_number % 5 :] + list(SIDES)[: round_number % 5]  # none is always first
            seconds = {}
            for side in order:
                start = time.perf_counter()
                made[side][0]()
                seconds[side] = time.perf_counter() - start
            for side in SIDES:
                ratios[side].append(seconds[side] / seconds[BY_HAND])
        gc.enable()
        peaks = {}
        for side, (update, optimizer) in made.items():
            with measure_memory(optimizer, batch) as meter:
                update()
            peaks[side] = meter.peak_bytes
        middle = {side: median(values) for side, values in ratios.items()}
        cells = " | ".join(f"{middle[side]:.3f}" for side in others)
        print(f"| {name} | {cells} | {mark} | {peaks[OURS] / peaks[BY_HAND]:.3f} |", flush=True)
        if middle[OURS] > mark:
            faults.append(f"{name}: {middle[OURS]:.3f} times the loop by hand, at most {mark} is allowed")
        noise = max(abs(middle[AGAIN] - 1), LEAST_NOISE)
        faults += [
            f"{name}: slower than {side} by more than the noise of {noise:.3f}"
            for side in (ACCELERATE, FABRIC)
            if middle[OURS] > middle[side] + noise
        ]
        faults += [f"{name}: a higher peak than {side}" for side in SIDES if peaks[OURS] > peaks[side]]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
