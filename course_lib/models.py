"""The small models of the course: a dense network, a convolutional one and a GPT, all of plain PyTorch layers.

None has BatchNorm, and dropout is off unless asked for: each sample's output then depends on that sample alone, which
is what lets a batch be cut. A seed fixes the parameters; they are drawn without touching the global random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_lib.batches import positive_int


def dense_net(
    *,
    hidden: Sequence[int] = (64, 64),
    num_inputs: int = 64,
    num_classes: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Build a dense network with ReLU: (B, num_inputs), or images such as (B, 1, 8, 8), to scores (B, num_classes).

    hidden: the width of each hidden layer; an empty sequence gives a linear model.
    By default 8,970 parameters (35,880 bytes in float32). For its backward pass a digit keeps the sum of `hidden`
    numbers: 512 bytes in float32. float32 and float64 start from the same parameters.
    Raises TypeError or ValueError for a size below 1, a seed below 0, or a dtype that is no floating-point type.
    """
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise TypeError(f"hidden must be a sequence of layer widths such as (64, 64); got {hidden!r}")
    num_inputs, num_classes = positive_int("num_inputs", num_inputs), positive_int("num_classes", num_classes)
    widths = [num_inputs, *(positive_int("hidden", width) for width in hidden)]
    with _seeded(seed):
        layers: list[nn.Module] = [nn.Flatten()]
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        layers.append(nn.Linear(widths[-1], num_classes))
    return nn.Sequential(*layers).to(_floating_point(dtype))


def conv_net(
    *,
    channels: int = 64,
    depth: int = 4,
    num_classes: int = 10,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Build a convolutional network: grey images (B, 1, H, W) to scores (B, num_classes).

    `depth` layers of 3 x 3 convolutions with ReLU keep the full resolution; then the mean over each quadrant of the
    image (the mean over all of it learns far more slowly: where a stroke lies counts) and a linear head.
    By default 113,994 parameters (455,976 bytes in float32). For its backward pass an image keeps depth x channels x
    H x W numbers and channels x 4 means: 66,560 bytes for a digit. From 7 digits on that is more than the parameters.
    float32 and float64 start from the same parameters. The convolutions are initialised after He et al. (2015),
    "Delving deep into rectifiers".
    Raises TypeError or ValueError for a size below 1, a seed below 0, or a dtype that is no floating-point type.
    """
    channels, depth = positive_int("channels", channels), positive_int("depth", depth)
    num_classes = positive_int("num_classes", num_classes)
    with _seeded(seed):
        layers: list[nn.Module] = []
        for channels_in, channels_out in pairwise([1] + [channels] * depth):
            convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
            # PyTorch's default shrinks the signal layer by layer, and four layers deep plain SGD hardly starts.
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, num_classes)]
    return nn.Sequential(*layers).to(_floating_point(dtype))


class SmallGPT(nn.Module):
    """A decoder-only transformer: tokens (B, T) int64 to the scores (B, T, vocab_size) of each next token.

    Embeddings of token and position, `depth` pre-norm blocks of causal attention and a GELU layer four times as wide,
    a last LayerNorm, and a head without bias; `tied_head` lets the head use the token embedding's weights (one
    parameter, counted once). Initialised as GPT-2: normal with deviation 0.02, the two layers that write into the
    residual stream divided by sqrt(2 x depth), so the first loss is close to log(vocab_size).
    Parameters: depth x (12 width^2 + 13 width) + (vocab_size + context + 2) x width, and vocab_size x width more
    without a tied head.
    `checkpoint_blocks`, an attribute too, keeps of each block its input alone and computes the rest again in the
    backward pass: the same gradient with fewer activations, for the time of one more forward pass through the blocks.
    Sources: Radford et al. (2019), "Language models are unsupervised multitask learners"; Press and Wolf (2017),
    "Using the output embedding to improve language models"; Chen et al. (2016), "Training deep nets with sublinear
    memory cost".
    Raises TypeError or ValueError for a size below 1, a width that heads doesn't divide, a dropout outside [0, 1), a
    seed below 0, a dtype that is no floating-point type; when called, for tokens that are not (B, T) int64 with T up
    to `context`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        context: int,
        width: int,
        heads: int,
        depth: int,
        dropout: float = 0.0,
        tied_head: bool = True,
        checkpoint_blocks: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        vocab_size, depth = positive_int("vocab_size", vocab_size), positive_int("depth", depth)
        width, heads = positive_int("width", width), positive_int("heads", heads)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got width {width} and heads {heads}")
        if not isinstance(dropout, int | float):
            raise TypeError(f"dropout must be a number; got {dropout!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1; got {dropout!r}")
        self.context = positive_int("context", context)
        self.checkpoint_blocks = checkpoint_blocks
        with _seeded(seed):
            self.token_embedding = nn.Embedding(vocab_size, width)
            self.position_embedding = nn.Embedding(context, width)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocab_size, bias=False)
            if tied_head:
                self.head.weight = self.token_embedding.weight
            self._initialise(depth)
        self.to(_floating_point(dtype))

    def _initialise(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:  # the LayerNorm weights stay 1
                writes_residual = name.endswith(("attention.output.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if writes_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the head turns into scores: tokens (B, T) int64 to (B, T, width)."""
        if tokens.dtype != torch.int64:
            raise TypeError(f"tokens must be int64; got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (B, T); got {tuple(tokens.shape)}")
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"tokens must be at most {self.context} long, the context; got {length}")
        positions = torch.arange(length, device=tokens.device)
        stream = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        if not self.checkpoint_blocks:
            return self.norm(self.blocks(stream))
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False)  # replays the block's dropout, too
        return self.norm(stream)


class Block(nn.Module):
    """One pre-norm transformer block, (B, T, width) to the same: attention, then a dense layer, each added on."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.dense_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream)))
        return stream + self.dropout(self.contract(functional.gelu(self.expand(self.dense_norm(stream)))))


class CausalAttention(nn.Module):
    """Multi-head self-attention, (B, T, width) to the same: each position sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, stream: Tensor) -> Tensor:
        # (B, T, 3 width) -> three of (B, heads, T, width / heads)
        query, key, value = self.query_key_value(stream).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def seven_million_gpt(*, dropout: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> SmallGPT:
    """Build the GPT of the memory measurements: 7,399,936 parameters, 29,599,744 bytes in float32.

    4096 tokens, a context of 128, width 256, 8 heads, 8 blocks, a tied head.
    Raises TypeError or ValueError as SmallGPT does.
    """
    return SmallGPT(4096, context=128, width=256, heads=8, depth=8, dropout=dropout, seed=seed, dtype=dtype)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw parameters from `seed` on the CPU inside the block, and give the global random state back after it."""
    seed = positive_int("seed", seed, at_least=0)
    # torch.manual_seed would seed CUDA as well, which fork_rng(devices=[]) does not give back. And a default device
    # other than the CPU would draw from a generator of its own; "meta" draws nothing, so it may stay.
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[]), device if device.type == "meta" else torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _floating_point(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type such as torch.float32; got {dtype!r}")
    return dtype
