"""Well-known architectures at their published sizes, and the devices one would like to train them on.

They are for planning: by default a model is built on PyTorch's "meta" device, where tensors have a shape and a type
but no memory, so GPT-2 XL costs nothing. Each comes with a batch, a loss and an optimizer that fit it, in float32. The
layers are ours and plain; the numbers are those of the papers and of the code that was published with them, and the
tests hold the parameter counts to the published ones. There are no trained weights here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from course_lib.batches import Batch, positive_int
from course_lib.losses import LossSum, cross_entropy_sum, token_cross_entropy_sum
from course_lib.models import SmallGPT

DEVICES = ("8 GiB", "16 GiB", "24 GiB", "40 GiB", "80 GiB")


def gpt2(*, width: int, heads: int, depth: int, vocab_size: int = 50257, context: int = 1024) -> SmallGPT:
    """Build a GPT-2: tokens (B, T) to scores (B, T, vocab_size), the head tied to the token embedding, no dropout.

    Source of the numbers: Radford et al. (2019), "Language models are unsupervised multitask learners", and
    https://github.com/openai/gpt-2. The paper's table 2 states rounded counts; the released sizes are 124,439,808
    (small), 354,823,168 (medium), 774,030,080 (large) and 1,557,611,200 (XL).
    """
    return SmallGPT(vocab_size, context=context, width=width, heads=heads, depth=depth)


class BERTClassifier(nn.Module):
    """BERT with a classifier on top, as it is fine-tuned: tokens (B, T) int64 to scores (B, num_classes).

    The encoder is the published one, with its pooler: 109,482,240 parameters as base, 335,141,888 as large; the
    classifier adds (width + 1) x num_classes. Post-norm blocks, learned positions, one segment, no padding. Dropout as
    published, but none inside attention, whose scores PyTorch then need not keep.
    Source: Devlin et al. (2019), "BERT: Pre-training of deep bidirectional transformers for language understanding",
    and https://github.com/google-research/bert.
    Raises ValueError when called with sequences longer than `context`.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        depth: int,
        num_classes: int = 2,
        vocab_size: int = 30522,
        context: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.segment_embedding = nn.Embedding(2, width)
        self.embedding_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads, dropout) for _ in range(depth)))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"tokens must be at most {self.context} long, the context; got {length}")
        embedded = self.token_embedding(tokens) + self.position_embedding.weight[:length]
        embedded = embedded + self.segment_embedding.weight[0]
        stream = self.blocks(self.dropout(self.embedding_norm(embedded)))
        pooled = torch.tanh(self.pooler(stream[:, 0]))  # the first token stands for the sequence
        return self.classifier(self.dropout(pooled))


class EncoderBlock(nn.Module):
    """One post-norm block, (B, T, width) to the same: attention over all positions, then a layer four times as wide."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dense_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        # (B, T, 3 width) -> three of (B, heads, T, width / heads)
        query, key, value = self.query_key_value(stream).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        stream = self.attention_norm(stream + self.dropout(self.output(mixed)))
        dense = self.contract(functional.gelu(self.expand(stream)))
        return self.dense_norm(stream + self.dropout(dense))


class ResNet50(nn.Module):
    """ResNet-50 with BatchNorm: images (B, 3, H, W) to scores (B, num_classes); 25,557,032 parameters for 1000 classes.

    Bottleneck blocks in four stages of 3, 4, 6 and 3; a stage's stride is in its 3 x 3 convolution.
    Sources: He et al. (2016), "Deep residual learning for image recognition"; the place of the stride and the count as
    in https://github.com/pytorch/vision (models/resnet.py).
    """

    def __init__(self, *, num_classes: int = 1000) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        channels = 64
        for number, (width, depth) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
            for place in range(depth):
                stages.append(Bottleneck(channels, width, stride=2 if number and not place else 1))
                channels = 4 * width
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Bottleneck(nn.Module):
    """1 x 1 down to `width`, 3 x 3, 1 x 1 up to 4 x `width`, added to the input or to a projection of it."""

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, kernel_size=1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.residual(images) + self.shortcut(images), inplace=True)


class UNet(nn.Module):
    """The U-Net without BatchNorm: images (B, num_channels, H, W) to scores (B, num_classes, H, W) of each pixel.

    Four times down and up again, 64 channels at full resolution, 1024 at the bottom, 23 convolutions; 31,030,658
    parameters for grey images and 2 classes. The convolutions pad, so H and W stay (the paper's crop the border); both
    must be multiples of 16. No dropout.
    Source: Ronneberger et al. (2015), "U-Net: Convolutional networks for biomedical image segmentation".
    """

    def __init__(self, *, num_channels: int = 1, num_classes: int = 2) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(_two_convolutions(*pair) for pair in pairwise((num_channels, *widths)))
        upward = [(2 * width, width) for width in widths[-2::-1]]
        self.rise = nn.ModuleList(nn.ConvTranspose2d(*pair, kernel_size=2, stride=2) for pair in upward)
        self.up = nn.ModuleList(_two_convolutions(*pair) for pair in upward)
        self.head = nn.Conv2d(widths[0], num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        kept, stream = [], images
        for number, down in enumerate(self.down):
            stream = down(functional.max_pool2d(stream, 2) if number else stream)
            kept.append(stream)
        kept.pop()  # the bottom is not joined to itself
        for rise, up in zip(self.rise, self.up, strict=True):
            stream = up(torch.cat([kept.pop(), rise(stream)], dim=1))
        return self.head(stream)


def _two_convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Preset:
    """A model with all that a prediction or a plan of its training needs: `plan_batch(*preset.parts, budget=...)`.

    `batch` is the effective batch (inputs, targets). `sample` says what one sample is. Values are arbitrary: only
    shapes and types count.
    """

    name: str
    sample: str
    model: nn.Module
    batch: Batch
    loss_sum: LossSum
    optimizer: Optimizer

    @property
    def parts(self) -> tuple[nn.Module, Batch, LossSum, Optimizer]:
        """The four arguments that `predict_memory` and `plan_batch` begin with."""
        return self.model, self.batch, self.loss_sum, self.optimizer

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __repr__(self) -> str:
        num_samples = len(self.batch[0])
        return f"Preset({self.name!r}, {self.num_parameters:,} parameters, batch of {num_samples} x {self.sample})"


def _decayed_adam(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


def _momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True)
class _Recipe:
    """How a preset is made: the model, what one sample is, the shapes of an input and a target, loss and optimizer."""

    build: Callable[[], nn.Module]
    sample: str
    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    loss_sum: LossSum
    build_optimizer: Callable[[nn.Module], Optimizer]
    num_samples: int = 64


def _gpt2_recipe(width: int, heads: int, depth: int) -> _Recipe:
    return _Recipe(
        lambda: gpt2(width=width, heads=heads, depth=depth),
        "1024 tokens",
        (1024,),
        (1024,),
        token_cross_entropy_sum,
        _decayed_adam,
    )


def _bert_recipe(width: int, heads: int, depth: int) -> _Recipe:
    return _Recipe(
        lambda: BERTClassifier(width=width, heads=heads, depth=depth),
        "512 tokens",
        (512,),
        (),
        cross_entropy_sum,
        _decayed_adam,
        num_samples=32,
    )


_RECIPES = {
    "GPT-2 small": _gpt2_recipe(768, 12, 12),
    "GPT-2 medium": _gpt2_recipe(1024, 16, 24),
    "GPT-2 large": _gpt2_recipe(1280, 20, 36),
    "GPT-2 XL": _gpt2_recipe(1600, 25, 48),
    "BERT base": _bert_recipe(768, 12, 12),
    "BERT large": _bert_recipe(1024, 16, 24),
    "ResNet-50": _Recipe(
        ResNet50, "224 x 224 pixels", (3, 224, 224), (), cross_entropy_sum, _momentum, num_samples=256
    ),
    "U-Net": _Recipe(UNet, "512 x 512 pixels", (1, 512, 512), (512, 512), cross_entropy_sum, _momentum, num_samples=16),
}
PRESETS = tuple(_RECIPES)


def build_preset(name: str, *, num_samples: int | None = None, device: str | torch.device = "meta") -> Preset:
    """Build one of PRESETS: model, batch, loss and optimizer, ready for `predict_memory` and `plan_batch`.

    num_samples: the effective batch; by default 64 sequences of 1024 tokens for a GPT-2, 32 of 512 for a BERT (Devlin
    et al. fine-tune with 16 or 32), 256 images of 224 x 224 for ResNet-50 (He et al.), 16 of 512 x 512 for the U-Net.
    Optimizers: AdamW for the transformers, SGD with momentum for the convolutional networks, as published.
    device: "meta" allocates nothing; on "cpu" the model is really built (GPT-2 XL: 5.8 GiB). The batch is zeros there.
    The global random state is not touched. Raises ValueError for another name or a size below 1.
    """
    if name not in _RECIPES:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}; got {name!r}")
    recipe = _RECIPES[name]
    size = positive_int("num_samples", recipe.num_samples if num_samples is None else num_samples)
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]), device:
        model = recipe.build()
    # Tokens are whole numbers; images have channels, height and width.
    dtype = torch.float32 if len(recipe.input_shape) == 3 else torch.int64
    inputs = torch.zeros(size, *recipe.input_shape, dtype=dtype, device=device)
    targets = torch.zeros(size, *recipe.target_shape, dtype=torch.int64, device=device)
    optimizer = recipe.build_optimizer(model)
    return Preset(name, recipe.sample, model, (inputs, targets), recipe.loss_sum, optimizer)
