"""One update of a small transformer on surnames, with any of six ways to save memory switched on: what is its peak?

The batch is always 64 lines of text. Everything is counted on the CPU, on real tensors, so each answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from course_lib.accumulation import update_parameters
from course_lib.batches import positive_int, split_batch
from course_lib.datasets import load_surname_tokens
from course_lib.losses import LossSum, chunked_token_cross_entropy, count_tokens, in_bfloat16, token_cross_entropy_sum
from course_lib.memory import measure_memory
from course_lib.models import SmallGPT

NUM_SEQUENCES, MOST_TOKENS, NUM_PIECES = 64, 32, 2048
CHUNK_TOKENS = 128

Optimizers = dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@dataclass(frozen=True)
class Savers:
    """The settings of one update on 64 sequences.

    accumulation_steps: 1 to 64, a divisor of 64. tokens: the length of a sequence, 1 to 32. optimizer: a key of
    OPTIMIZERS. autocast: matrix products in bfloat16. checkpointing: block by block. chunked_loss: the scores of 128
    tokens at a time.
    Raises TypeError or ValueError for another value.
    """

    accumulation_steps: int = 1
    autocast: bool = False
    checkpointing: bool = False
    chunked_loss: bool = False
    optimizer: str = "AdamW"
    tokens: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if NUM_SEQUENCES % positive_int("accumulation_steps", self.accumulation_steps):
            raise ValueError(f"accumulation_steps must divide {NUM_SEQUENCES}; got {self.accumulation_steps}")
        if positive_int("tokens", self.tokens) > MOST_TOKENS:
            raise ValueError(f"tokens must be at most {MOST_TOKENS}; got {self.tokens}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {self.optimizer!r}")

    @property
    def micro_batch_size(self) -> int:
        return NUM_SEQUENCES // self.accumulation_steps

    @property
    def switched_on(self) -> list[str]:
        """Name in words what differs from the plain update, in a fixed order; nothing for the plain one."""
        found = [
            f"{self.accumulation_steps} x {self.micro_batch_size}" if self.accumulation_steps > 1 else "",
            "autocast" if self.autocast else "",
            "checkpointing" if self.checkpointing else "",
            "chunked loss" if self.chunked_loss else "",
            self.optimizer if self.optimizer != "AdamW" else "",
            f"{self.tokens} tokens" if self.tokens != MOST_TOKENS else "",
        ]
        return [words for words in found if words]

    def loss_sum(self) -> LossSum:
        """Return the sum of the token losses; its count is `count_tokens`."""
        loss_sum = chunked_token_cross_entropy(CHUNK_TOKENS)[0] if self.chunked_loss else token_cross_entropy_sum
        return in_bfloat16(loss_sum) if self.autocast else loss_sum


def surname_gpt(*, checkpoint_blocks: bool = False, dtype: torch.dtype = torch.float32) -> SmallGPT:
    """Build the transformer of notebook 13: 1,059,584 parameters, 2048 pieces of names, four blocks of width 128."""
    sizes = {"context": MOST_TOKENS, "width": 128, "heads": 4, "depth": 4}
    return SmallGPT(NUM_PIECES, **sizes, checkpoint_blocks=checkpoint_blocks, dtype=dtype)


def surname_batch(tokens: int = MOST_TOKENS) -> tuple[Tensor, Tensor]:
    """Return 64 sequences of `tokens` pieces, (64, tokens) int64, and as targets the piece that follows each."""
    text = _text()[: NUM_SEQUENCES * tokens + 1]
    return text[:-1].reshape(NUM_SEQUENCES, tokens).clone(), text[1:].reshape(NUM_SEQUENCES, tokens).clone()


@lru_cache(maxsize=1)
def _text() -> Tensor:
    return load_surname_tokens(NUM_PIECES)[1]


@lru_cache(maxsize=1024)
def peak_by_category(savers: Savers) -> dict[str, int]:
    """Return the bytes alive at the peak of an update with these savers, by category, counted on this CPU.

    The optimizer's state is there: a first update, on one sequence, has made it. Of more than two micro-batches two
    are run, which reach the peak of all of them (but for 4 bytes each, the loss); the inputs of all of them count.
    """
    model = surname_gpt(checkpoint_blocks=savers.checkpointing)
    optimizer = OPTIMIZERS[savers.optimizer](model.parameters())
    batch, loss_sum = surname_batch(savers.tokens), savers.loss_sum()
    update_parameters(model, optimizer, split_batch(batch, 1)[:1], token_cross_entropy_sum, count_tokens)
    micro_batches = split_batch(batch, savers.micro_batch_size)[:2]
    with measure_memory(model, optimizer, batch) as meter:
        update_parameters(model, optimizer, micro_batches, loss_sum, count_tokens)
    return meter.at_peak
