"""How close predicted memory is to PyTorch's allocator: `python -m tests.benchmarks.memory_prediction`.

For each model and for 1, 2 and 4 micro-batches: the peak that `predict_memory` gives before anything has run, and the
peak of the real second update by the trace of PyTorch's CPU allocator. The models are of other kinds than those in the
tests of the predictor, some of them from Transformers. Convolutions and LSTM are calibrated with one real micro-batch
(`scratch=True`). The exit status is 1 if the largest error of a model passes the mark of its kind: 0.1 % for dense
layers, attention and GRU, 2 % for convolutions after calibration; or if an LSTM is not flagged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch, tensors_of
from course_lib.losses import cross_entropy_sum, squared_error_sum, token_cross_entropy_sum
from course_lib.memory import predict_memory
from course_lib.memory.measured import _allocator_peak_of_trace, _tensors_in, _without_profiler_log

MARKS = {"dense": 0.1, "attention": 0.1, "GRU": 0.1, "convolution": 2.0, "LSTM": None}  # percent
STEPS = (1, 2, 4)
SAMPLES = 8


class Mixer(nn.Module):
    """An MLP-Mixer: dense layers over patches and over channels, in turn; images (B, 3, 32, 32)."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 16, width)
        self.over_patches = nn.ModuleList(self.block(64, 128) for _ in range(depth))
        self.over_channels = nn.ModuleList(self.block(width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    @staticmethod
    def block(width: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        stream = self.patches(patches)
        for patches_layer, channels_layer in zip(self.over_patches, self.over_channels, strict=True):
            stream = stream + patches_layer(stream.transpose(1, 2)).transpose(1, 2)
            stream = stream + channels_layer(stream)
        return self.head(stream.mean(1))


class Llama(nn.Module):
    """A decoder with RMSNorm, rotary positions and gated layers; tokens (B, T); tied or checkpointed on request."""

    def __init__(self, width: int = 128, depth: int = 4, *, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm, self.head = nn.Embedding(2000, width), nn.RMSNorm(width), nn.Linear(width, 2000)
        self.layers = nn.ModuleList(LlamaLayer(width, 4) for _ in range(depth))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens)
        for layer in self.layers:
            stream = checkpoint(layer, stream, use_reentrant=False) if self.checkpointed else layer(stream)
        return self.head(self.norm(stream))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm_in(stream)
        q, k, v = (layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_out(stream)
        return stream + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def rotated(heads: Tensor) -> Tensor:
    length, half = heads.shape[-2], heads.shape[-1] // 2
    angles = torch.outer(torch.arange(length), 10_000 ** (-torch.arange(half) / half))
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Tagger(nn.Module):
    """A recurrent layer in both directions between embedding and head; tokens (B, T) to scores (B, T, 40)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 64), nn.Linear(256, 40)
        self.recurrent = kind(64, 128, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(tokens))[0])


class Encoder(nn.Module):
    """PyTorch's own transformer encoder, with dropout; tokens (B, T) to scores (B, T, 300)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 64), nn.Linear(64, 300)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class GatedExperts(nn.Module):
    """A mixture of experts in which every expert sees every sample: inputs (B, 128) to scores (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(128, 256), nn.Linear(256, 8), nn.Linear(256, 10)
        self.up = nn.Parameter(torch.randn(8, 256, 512) / 16)
        self.down = nn.Parameter(torch.randn(8, 512, 256) / 22)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.first(inputs).relu()
        hidden = torch.einsum("bi,eio->beo", stream, self.up).relu()
        mixed = torch.einsum("beo,eoi,be->bi", hidden, self.down, self.gate(stream).softmax(-1))
        return self.last(stream + mixed)


class UNet(nn.Module):
    """Two levels down and up with skip connections: images (B, 3, 64, 64) to the same."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, width), self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge2, self.merge1 = self.block(4 * width, 2 * width), self.block(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    @staticmethod
    def block(channels_in: int, channels: int) -> nn.Sequential:
        convolutions = (nn.Conv2d(channels_in, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1))
        return nn.Sequential(convolutions[0], nn.GroupNorm(4, channels), nn.SiLU(), convolutions[1], nn.SiLU())

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        second = self.merge2(torch.cat([second, self.up2(bottom)], 1))
        return self.out(self.merge1(torch.cat([first, self.up1(second)], 1)))


def depthwise() -> nn.Sequential:
    """Depthwise and pointwise convolutions with batch norm, as in MobileNet: images (B, 3, 64, 64)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.Hardswish()]
    for channels_in, channels in ((32, 64), (64, 96), (96, 96)):
        layers += [nn.Conv2d(channels_in, channels_in, 3, padding=1, groups=channels_in), nn.BatchNorm2d(channels_in)]
        layers += [nn.ReLU6(), nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


def waves() -> nn.Sequential:
    """Dilated 1-D convolutions over sound: (B, 1, 4000)."""
    layers: list[nn.Module] = [nn.Conv1d(1, 32, 9, stride=2)]
    for dilation in (1, 2, 4, 8):
        layers += [nn.Conv1d(32, 32, 5, dilation=dilation, padding="same"), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(8), nn.Flatten(), nn.Linear(256, 10))


def autoencoder() -> nn.Sequential:
    """A dense autoencoder: (B, 784) to the same."""
    widths = (784, 512, 128, 32, 128, 512, 784)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ELU())]
    return nn.Sequential(*layers[:-1])


def bert() -> nn.Module:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=256, max_position_embeddings=64))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 1000, "n_positions": 64, "n_embd": 96, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))


class Logits(nn.Module):
    """A model of Transformers that returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def autocast_loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return token_cross_entropy_sum(model, micro_batch)


@dataclass(frozen=True)
class Case:
    """One model: `inputs` and `targets` are shapes, with the number of classes where they are whole numbers."""

    kind: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    high: int | None
    targets: tuple[int, ...]
    classes: int | None
    loss_sum: Callable = cross_entropy_sum
    optimizer: Callable = torch.optim.AdamW


TOKENS = {"high": 300, "targets": (48,), "classes": 300, "loss_sum": token_cross_entropy_sum}
CASES = {
    "dense autoencoder": Case("dense", autoencoder, (784,), None, (784,), None, squared_error_sum),
    "MLP-Mixer": Case("dense", Mixer, (3, 32, 32), None, (), 10, optimizer=torch.optim.RMSprop),
    "gated mixture of experts": Case("dense", GatedExperts, (128,), None, (), 10, optimizer=torch.optim.Adagrad),
    "decoder with rotary positions": Case("attention", Llama, (48,), **TOKENS),
    "the same, tied": Case("attention", lambda: Llama(tied=True), (48,), **TOKENS, optimizer=torch.optim.NAdam),
    "the same, checkpointed": Case("attention", lambda: Llama(checkpointed=True), (48,), **TOKENS),
    "the same, bfloat16 autocast": Case("attention", Llama, (48,), **TOKENS | {"loss_sum": autocast_loss}),
    "BERT of Transformers": Case("attention", lambda: Logits(bert()), (48,), **TOKENS),
    "GPT-2 of Transformers": Case("attention", lambda: Logits(gpt2()), (48,), **TOKENS),
    "encoder with dropout": Case("attention", Encoder, (48,), **TOKENS, optimizer=torch.optim.Adafactor),
    "GRU, two layers, both ways": Case("GRU", lambda: Tagger(nn.GRU), (48,), **TOKENS | {"classes": 40}),
    "U-Net": Case("convolution", UNet, (3, 64, 64), None, (3, 64, 64), None, squared_error_sum),
    "depthwise convolutions": Case("convolution", depthwise, (3, 64, 64), None, (), 10),
    "1-D convolutions": Case("convolution", waves, (1, 4000), None, (), 10, optimizer=torch.optim.SGD),
    "LSTM, two layers, both ways": Case("LSTM", lambda: Tagger(nn.LSTM), (48,), **TOKENS | {"classes": 40}),
}


def drawn(shape: tuple[int, ...], high: int | None) -> Tensor:
    return torch.rand(SAMPLES, *shape) if high is None else torch.randint(high, (SAMPLES, *shape))


def allocator_peak(model: nn.Module, optimizer: torch.optim.Optimizer, batch, run: Callable[[], object]) -> int:
    """Return the bytes that are there before plus the most that the allocator gave out at one moment of `run`."""
    there = [*model.parameters(), *model.buffers(), *tensors_of(batch), *_tensors_in(list(optimizer.state.values()))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in there}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _without_profiler_log(), tempfile.TemporaryDirectory() as folder:
        with profiler:
            run()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return sum(storages.values()) + _allocator_peak_of_trace(trace)


def errors_of(case: Case) -> tuple[list[float], list[float], float, bool]:
    """Return the error in percent for each number of steps, without calibration too, the peak in MiB, and a flag."""
    torch.manual_seed(0)
    model = case.make().train()
    batch = drawn(case.inputs, case.high), drawn(case.targets, case.classes)
    count = getattr(case.loss_sum, "count", None)
    if case.loss_sum is autocast_loss:
        count = token_cross_entropy_sum.count
    plain, calibrated, peaks, flagged = [], [], [], False
    for steps in STEPS:
        optimizer = case.optimizer(model.parameters(), lr=1e-4)
        micro_batch_size = SAMPLES // steps
        with_scratch = case.kind in ("convolution", "LSTM")
        report = predict_memory(
            model, batch, case.loss_sum, optimizer, micro_batch_size=micro_batch_size, scratch=with_scratch
        )
        flagged = any("LSTM" in assumption for assumption in report.assumptions)
        if report.measured:
            raise RuntimeError(f"measured, not predicted: {report.assumptions[0]}")

        def update(optimizer=optimizer, size=micro_batch_size):
            given = (count,) if count else ()
            update_parameters(model, optimizer, split_batch(batch, size), case.loss_sum, *given)

        update()
        peak = allocator_peak(model, optimizer, batch, update)
        peaks.append(peak / 2**20)
        plain.append(100 * (report.peak_bytes - peak) / peak)
        calibrated.append(100 * (report.needed_bytes - peak) / peak)
    return plain, calibrated, max(peaks), flagged


def main() -> int:
    """Print the table and return the exit status."""
    torch.set_num_threads(1)
    steps = ", ".join(map(str, STEPS))
    print(f"| model | kind | peak, largest | error in % at K = {steps} | with scratch measured | mark |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    failures = []
    for name, case in CASES.items():
        plain, calibrated, peak, flagged = errors_of(case)
        mark = MARKS[case.kind]
        words = [", ".join(f"{error:+.3f}" for error in errors) for errors in (plain, calibrated)]
        after = words[1] if case.kind in ("convolution", "LSTM") else "not needed"
        marked = f"{mark} %" if mark is not None else f"flagged: {'yes' if flagged else 'NO'}"
        print(f"| {name} | {case.kind} | {peak:.1f} MiB | {words[0]} | {after} | {marked} |", flush=True)
        if (mark is None and not flagged) or (mark is not None and max(map(abs, calibrated)) > mark):
            failures.append(name)
    print("\nOn a GPU: not measured.")
    if failures:
        print(f"\nFAILED, past the mark: {', '.join(failures)}.\n", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
