"""Finding the largest micro-batch under a budget: `python -m tests.benchmarks.batch_finding`.

`plan_batch` beside Accelerate's `find_executable_batch_size` and Lightning's `BatchSizeFinder`, in one run, on the GPT
of 7.4 M parameters: an effective batch of 64 sequences of 128 tokens, AdamW, and one `memory_budget` for all, whose
out-of-memory errors the peers recognise. A trial of Accelerate's is two updates in the batch size it hands out and the
accumulation steps that its guide derives from it; one of Lightning's is its own, with two accumulation steps, the
fewest that accumulate. All other settings are defaults. One torch thread.

Exact is judged by running: two updates in micro-batches of the size that was returned must stay within the budget, and
two in micro-batches of one sample more must not. The exit status is 1 if `plan_batch` returns a size that is not exact,
meets an out-of-memory error, takes more than 12 predictions or more than 5 seconds.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lightning
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch
from course_lib.losses import count_tokens, token_cross_entropy_sum
from course_lib.memory import memory_budget
from course_lib.models import SmallGPT, seven_million_gpt
from course_lib.planning import plan_batch

EFFECTIVE = 64
BUDGET = "400 MiB"
MOST_SECONDS, MOST_PREDICTIONS = 5, 12


@dataclass
class Found:
    """What one side returned and what it took; `trials` are runs, or predictions."""

    side: str
    size: int
    trials: int
    failures: int
    seconds: float
    samples: int  # that one update sees when the advice is followed


def setting() -> tuple[SmallGPT, tuple[Tensor, Tensor], torch.optim.Optimizer]:
    """Return a fresh model, the effective batch and a fresh optimizer."""
    model = seven_million_gpt()
    tokens = torch.randint(4096, (EFFECTIVE, 129), generator=torch.Generator().manual_seed(0))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), torch.optim.AdamW(model.parameters())


def fits(size: int) -> bool:
    """Run two updates of the effective batch in micro-batches of `size` under the budget."""
    model, batch, optimizer = setting()
    try:
        with memory_budget(BUDGET, model, optimizer, batch):
            for _ in range(2):
                update_parameters(model, optimizer, split_batch(batch, size), token_cross_entropy_sum, count_tokens)
    except torch.OutOfMemoryError:
        return False
    return True


def by_plan() -> Found:
    model, batch, optimizer = setting()
    start = time.perf_counter()
    plan = plan_batch(model, batch, token_cross_entropy_sum, optimizer, budget=BUDGET)
    seconds = time.perf_counter() - start
    side, samples = f"`plan_batch`: {plan.sentence}", sum(plan.micro_batch_sizes)
    return Found(side, plan.largest_micro_batch_size, plan.num_predictions, 0, seconds, samples)


def by_accelerate() -> Found:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=EFFECTIVE)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model, batch, optimizer = setting()
        steps = EFFECTIVE // batch_size  # as its guide on gradient accumulation does
        with memory_budget(BUDGET, model, optimizer, batch):
            for _ in range(2):
                micro_batches = split_batch(batch, batch_size)[:steps]
                update_parameters(model, optimizer, micro_batches, token_cross_entropy_sum, count_tokens)
        return batch_size

    start = time.perf_counter()
    size = train()
    seconds = time.perf_counter() - start
    side = "Accelerate, `find_executable_batch_size`"
    return Found(side, size, len(tried), len(tried) - 1, seconds, size * (EFFECTIVE // size))


class _Module(lightning.LightningModule):
    """The same model, loss and optimizer for a Lightning Trainer; it keeps the sizes that began and that ended."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self._batch, self._optimizer = model, batch, optimizer
        self.batch_size = 1
        self.begun: list[int] = []
        self.ended: list[int] = []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Repeated(self._batch), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def on_train_start(self) -> None:
        self.begun.append(self.batch_size)

    def on_train_end(self) -> None:
        self.ended.append(self.batch_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        return token_cross_entropy_sum(self.model, batch) / count_tokens(batch)


class _Repeated(Dataset):
    """The effective batch over and over, so that no trial runs short of samples."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 64 * EFFECTIVE

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[index % EFFECTIVE] for part in self.batch)


def by_lightning(mode: str) -> Found:
    model, batch, optimizer = setting()
    module = _Module(model, batch, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=2,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        start = time.perf_counter()
        with memory_budget(BUDGET, model, optimizer, batch):
            size = Tuner(trainer).scale_batch_size(module, mode=mode)
        seconds = time.perf_counter() - start
    failures = len(module.begun) - len(module.ended)
    return Found(f"Lightning, `BatchSizeFinder`, {mode}", size, len(module.begun), failures, seconds, 2 * size)


def main() -> int:
    """Print the table and return the exit status."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    sides: list[Callable[[], Found]] = [
        by_plan,
        by_accelerate,
        lambda: by_lightning("power"),
        lambda: by_lightning("binsearch"),
    ]
    print(f"Budget {BUDGET}, effective batch {EFFECTIVE} sequences of 128 tokens.\n")
    print("| side | returned | exact | runs or predictions | out of memory | wall time | one update then sees |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    judged: dict[int, bool] = {}
    status = 0
    for side in sides:
        found = side()
        for size in (found.size, found.size + 1):
            if size not in judged:
                judged[size] = fits(size)
        exact = judged[found.size] and not judged[found.size + 1]
        verdict = "yes" if exact else "no: more fits" if judged[found.size] else "no: does not fit"
        print(
            f"| {found.side} | {found.size} | {verdict} | {found.trials} | {found.failures} "
            f"| {found.seconds:.1f} s | {found.samples} |",
            flush=True,
        )
        if side is by_plan and not (
            exact and found.samples == EFFECTIVE and found.trials <= MOST_PREDICTIONS and found.seconds <= MOST_SECONDS
        ):
            status = 1
    if status:
        print(
            f"\nFAILED: plan_batch must be exact, in {MOST_PREDICTIONS} predictions and {MOST_SECONDS} s.",
            file=sys.stderr,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
