"""The equivalence contract: what one update of 64 samples and one of 4 x 16 have in common, ingredient by ingredient.

Each ingredient of a training loop has a verdict of one of three words, and an example that computes it:

- *equal*: every number is the same, bit for bit;
- *equal within rounding*: the numbers differ by at most 1e-6 of their size in float32 and 1e-12 in float64, so the
  difference shrinks with the precision (where the example is about bfloat16, by at most its last digit, 2^-7);
- *not equal*: they differ by more than a thousandth in float64 (in bfloat16 by more than four of its last digits),
  which no rounding explains.

What is *not equal* has a remedy, and where the remedy can be computed, an example that shows it at work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from course_lib.accumulation import (
    accumulate_contrastive_gradients,
    accumulate_gradients,
    apply_gradients,
    update_parameters,
)
from course_lib.batches import Batch, count_samples, split_batch
from course_lib.datasets import load_digits
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import (
    Count,
    LossSum,
    class_weighted_cross_entropy,
    count_tokens,
    cross_entropy_sum,
    squared_error_sum,
    token_cross_entropy_sum,
)
from course_lib.models import SmallGPT

EQUAL, WITHIN_ROUNDING, NOT_EQUAL = "equal", "equal within rounding", "not equal"
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-12}  # the largest relative error that rounding explains
TOO_FAR = 1e-3  # the smallest, in float64, that it does not

FULL, CUT = 64, 16  # samples in the full batch, and in a micro-batch

Numbers = dict[str, Tensor]
Example = Callable[[torch.dtype], tuple[Numbers, Numbers]]  # of the full batch, and of the micro-batches


@dataclass(frozen=True)
class Ingredient:
    """One row of the contract.

    verdict: one of the three words. example(dtype): the numbers of the full batch and those of the micro-batches.
    remedy: what to do where they are not equal; mended, if given, is the example with it. precision: where the example
    is about a precision of its own, that one; None where it runs in float32 and float64.
    """

    kind: str
    name: str
    verdict: str
    example: Example
    remedy: str = ""
    mended: Example | None = None
    precision: torch.dtype | None = None

    def holds(self) -> bool:
        """Compute the example, and with the remedy too; say whether the verdict is right and the remedy works."""
        found = judge(self.example, self.precision)
        right = found == self.verdict or (found, self.verdict) == (EQUAL, WITHIN_ROUNDING)  # rounding may be lucky
        return right and (self.mended is None or judge(self.mended, self.precision) != NOT_EQUAL)


def judge(example: Example, precision: torch.dtype | None = None) -> str:
    """Compute an example and return one of the three words.

    Raises ValueError when the numbers are too far apart for rounding and too close to be called different.
    """
    pairs = {dtype: example(dtype) for dtype in ([precision] if precision else ROUNDING)}
    errors = {dtype: compare_gradients(*pair).relative_error for dtype, pair in pairs.items()}
    last_digit = torch.finfo(precision).eps if precision else None
    allowed = ROUNDING if precision is None else {precision: last_digit}
    far = TOO_FAR if precision is None else 4 * last_digit
    if all(torch.equal(one, pair[1][name]) for pair in pairs.values() for name, one in pair[0].items()):
        return EQUAL
    if all(error <= allowed[dtype] for dtype, error in errors.items()):
        return WITHIN_ROUNDING
    if not errors[precision or torch.float64] <= far:
        return NOT_EQUAL
    raise ValueError(f"example must be equal within {allowed} or differ by more than {far}; its errors are {errors}")


# What the examples are made of.


def digits(dtype: torch.dtype) -> Batch:
    """Return the full batch: 64 digits."""
    return load_digits(dtype).first(FULL)


def seeded(function: Callable[[], nn.Module | Numbers]) -> nn.Module | Numbers:
    """Call a function with a fixed seed, and give the random state back."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return function()


def net(*middle: Callable[[], nn.Module], dtype: torch.dtype, width: int = 32) -> nn.Sequential:
    """Build a small network with the given layers between its two linear ones."""
    layers = seeded(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), *(build() for build in middle), nn.Tanh(), nn.Linear(width, 10)
        )
    )
    return layers.to(dtype)


def image_net(*middle: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Sequential:
    """Build a small convolutional network with the given layers behind its convolution."""
    layers = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), *(build() for build in middle), nn.Tanh(), nn.Flatten(), nn.Linear(288, 10)
        )
    )
    return layers.to(dtype)


def gradient(model: nn.Module, parts: Sequence[Batch], loss_sum: LossSum, count: Count) -> Numbers:
    """Return the gradient of the mean loss over the micro-batches."""
    seeded(lambda: accumulate_gradients(model, parts, loss_sum, count))
    return {name: value.to_dense() for name, value in copy_gradients(model).items()}


@dataclass(frozen=True)
class WholeAndCut:
    """An example made of a function that gives numbers for a size of the micro-batch."""

    run: Callable[[torch.dtype, int], Numbers]
    cut: int = CUT

    def __call__(self, dtype: torch.dtype) -> tuple[Numbers, Numbers]:
        return self.run(dtype, FULL), self.run(dtype, self.cut)


def gradients(
    build: Callable[..., nn.Module],
    loss_sum: LossSum = cross_entropy_sum,
    count: Count = count_samples,
    batch: Callable[[torch.dtype], Batch] = digits,
) -> Example:
    """Compare the gradient of a model, built anew for each side."""
    return WholeAndCut(
        lambda dtype, size: gradient(build(dtype=dtype), split_batch(batch(dtype), size), loss_sum, count)
    )


def by_hand(
    step: Callable[[nn.Module, Batch, int], None],
    build: Callable[..., nn.Module] = net,
    batch: Callable[[torch.dtype], Batch] = digits,
    after: Callable[[nn.Module], None] = lambda model: None,
) -> Example:
    """Compare the gradient of a loop that is written out: step(model, micro_batch, how many of them) each time."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        model, parts = build(dtype=dtype), split_batch(batch(dtype), size)
        for part in parts:
            step(model, part, len(parts))
        after(model)
        return copy_gradients(model)

    return WholeAndCut(lambda dtype, size: seeded(lambda: run(dtype, size)))


def two_passes(group_loss: Callable[[Tensor, Tensor], Tensor]) -> Example:
    """Compare the two-pass gradient of a loss across samples, group_loss(scores, targets)."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        model, batch = net(dtype=dtype), digits(dtype)
        parts = split_batch(batch, size)
        accumulate_contrastive_gradients(
            model, parts, lambda model, part: model(part[0]), lambda scores: group_loss(scores, batch[1])
        )
        return copy_gradients(model)

    return WholeAndCut(run)


def mean_of_parts(group_loss: Callable[[Tensor, Tensor], Tensor]) -> Example:
    """Compare the gradient of a loss across samples that is computed in each micro-batch, and divided by K."""
    return by_hand(lambda model, part, k: (group_loss(model(part[0]), part[1]) / k).backward())


def training(
    optimizer_class: type, schedule: Callable | None = None, max_grad_norm: float | None = None, **settings: object
) -> Example:
    """Compare the losses of ten updates."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        model, losses = net(dtype=dtype), []
        optimizer = optimizer_class(model.parameters(), **settings)
        scheduler = schedule(optimizer) if schedule else None
        inputs, targets = load_digits(dtype).first(10 * FULL)
        for batch in zip(inputs.split(FULL), targets.split(FULL), strict=True):
            update = update_parameters(
                model,
                optimizer,
                split_batch(batch, size),
                cross_entropy_sum,
                max_grad_norm=max_grad_norm,
                scheduler=scheduler,
            )
            losses.append(update.loss)
        return {"losses": torch.tensor(losses, dtype=torch.float64)}

    return WholeAndCut(run)


# Optimizers.


def adam_step_counter(dtype: torch.dtype, size: int) -> Numbers:
    """Count Adam's steps over two updates."""
    model = net(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        update_parameters(model, optimizer, split_batch(digits(dtype), size), cross_entropy_sum)
    return {str(place): state["step"] for place, state in enumerate(optimizer.state.values())}


def stepping(*, inside: bool) -> Example:
    """Minimise the mean of a w^2 / 2 over a = 1 and a = 3: one step, or a half step inside each backward."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        w = torch.ones((), dtype=dtype, requires_grad=True)
        for part in torch.tensor([1.0, 3.0], dtype=dtype).split(size):
            ((part * w**2 / 2).sum() / 2).backward()
            if inside:
                w.data, w.grad = w.data - 0.1 * w.grad, None
        return {"w": w.detach() if inside else (w - 0.1 * w.grad).detach()}

    return lambda dtype: (run(dtype, 2), run(dtype, 1))


def decay(*, per_update: bool) -> Example:
    """Decay a weight whose gradient is zero: lr x weight decay = 0.01, four micro-batches."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        w = torch.ones((), dtype=dtype)
        for _ in range(1 if per_update else FULL // size):
            w = w * (1 - 0.01)
        return {"w": w}

    return WholeAndCut(run)


# Layers.


class Words(nn.Module):
    """An embedding with a sparse gradient: the middle row of a digit as 8 words of a vocabulary of 17."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = seeded(lambda: nn.Embedding(17, 10, sparse=True)).to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        return self.embedding((16 * images[:, 0, 3]).long()).mean(dim=1)


def small_gpt(dtype: torch.dtype) -> nn.Module:
    return SmallGPT(17, context=16, width=16, heads=2, depth=1, dtype=dtype)


def pixel_tokens(dtype: torch.dtype) -> Batch:
    """Return the two middle rows of each digit as 16 tokens and their followers, the empty ones ignored."""
    tokens = (16 * digits(dtype)[0][:, 0, 3:5]).long().flatten(1)
    targets = tokens.roll(-1, dims=1)
    return tokens, targets.masked_fill(targets == 0, -100)


def running_mean(dtype: torch.dtype, size: int) -> Numbers:
    """Return the running mean of a BatchNorm that has seen 0, 2, 4 and 6 once."""
    norm = nn.BatchNorm1d(1, dtype=dtype)
    for part in torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=dtype).split(size):
        norm(part)
    return {"running mean": norm.running_mean}


def spectral_net(dtype: torch.dtype) -> nn.Module:
    """Build a network with spectral normalisation, whose largest singular value is followed one step per forward."""
    model = net(lambda: parametrizations.spectral_norm(nn.Linear(32, 32)), dtype=dtype)
    with torch.no_grad():
        model[2].parametrizations.weight.original.mul_(torch.linspace(0.1, 3, 32, dtype=dtype))  # it has moved on
    return model


def follow_once(model: nn.Module, part: Batch, k: int) -> None:
    """Let the singular value be followed in the first micro-batch only."""
    (cross_entropy_sum(model, part) / FULL).backward()
    model[2].parametrizations.weight.eval()


# Losses.


def token_mean(model: nn.Module, part: Batch, k: int) -> None:
    (functional.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten()) / k).backward()


def with_penalty(*, per_sample: bool) -> LossSum:
    """Add a penalty on the weights inside the loss: once per call, or once per sample."""

    def loss_sum(model: nn.Module, part: Batch) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return cross_entropy_sum(model, part) + penalty * (count_samples(part) if per_sample else 1)

    return loss_sum


def gradient_penalty_sum(model: nn.Module, part: Batch) -> Tensor:
    """Sum, over samples, the squared length of the gradient of the scores with respect to the image, less 1."""
    images = part[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square().sum()


def one_hot_squared_error(model: nn.Module, part: Batch) -> Tensor:
    return squared_error_sum(model, (part[0], functional.one_hot(part[1], 10).to(part[0])))


def info_nce(scores: Tensor, targets: Tensor) -> Tensor:
    """Tell each sample's scores from the others'; the same scores in another order stand for its second view."""
    ours = functional.normalize(scores, dim=1)
    return functional.cross_entropy(
        ours @ functional.normalize(scores.roll(1, dims=1), dim=1).T, torch.arange(len(ours))
    )


def dice(scores: Tensor, targets: Tensor) -> Tensor:
    """Compare what is marked with what should be, over the whole batch: 1 - 2 |both| / (|marked| + |wanted|)."""
    marked, wanted = scores[:, 0].sigmoid(), (targets < 5).to(scores)
    return 1 - 2 * (marked * wanted).sum() / (marked.sum() + wanted.sum())


def dice_per_sample_sum(model: nn.Module, part: Batch) -> Tensor:
    """Sum the Dice losses of the samples, each over its own ten scores."""
    marked, wanted = model(part[0]).sigmoid(), functional.one_hot(part[1], 10)
    return (1 - 2 * (marked * wanted).sum(1) / (marked.sum(1) + wanted.sum(1))).sum()


def load_balance(scores: Tensor, targets: Tensor) -> Tensor:
    """Keep experts equally busy: experts x sum of (share of the samples sent to each) x (its mean probability)."""
    probabilities = scores.softmax(dim=1)
    share = functional.one_hot(scores.argmax(dim=1), 10).to(scores).mean(dim=0)
    return 10 * (share * probabilities.mean(dim=0)).sum()


def root_mean_square(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - functional.one_hot(targets, 10)).square().mean().sqrt()


# Randomness.


class OwnMask(nn.Module):
    """Dropout in two layers whose masks come with the samples: (images, first mask, second mask)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = net(dtype=dtype)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, first, second = inputs
        _, expand, tanh, last = self.layers
        return last(tanh(expand(images.flatten(1) * first)) * second)


def masked_digits(dtype: torch.dtype) -> Batch:
    images, targets = digits(dtype)
    masks = seeded(lambda: [2 * torch.bernoulli(torch.full((FULL, width), 0.5)).to(dtype) for width in (64, 32)])
    return (images, *masks), targets


def noisy_digits(dtype: torch.dtype) -> Batch:
    images, targets = digits(dtype)
    return images + 0.1 * seeded(lambda: torch.randn(images.shape)).to(dtype), targets


# Precision.


def many_small(sum_dtype: torch.dtype | None) -> Example:
    """Sum a gradient of 256 and 63 of 1, in bfloat16: in one pass, and one micro-batch each."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        model = nn.Linear(1, 1, bias=False, dtype=dtype)
        inputs = torch.tensor([256.0] + [1.0] * (FULL - 1), dtype=dtype).view(-1, 1)
        accumulate_gradients(
            model, split_batch(inputs, size), lambda model, part: model(part).float().sum(), sum_dtype=sum_dtype
        )
        return copy_gradients(model)

    return WholeAndCut(run, cut=1)


def autocast(dtype: torch.dtype, size: int) -> Numbers:
    """Return the gradient of float32 parameters whose forward passes run in bfloat16."""
    with torch.autocast("cpu", dtype):
        return gradient(
            net(dtype=torch.float32), split_batch(digits(torch.float32), size), cross_entropy_sum, count_samples
        )


def scaled(dtype: torch.dtype, size: int) -> Numbers:
    """Return the parameters after one update under a scaler."""
    model, scaler = net(dtype=dtype), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update_parameters(model, optimizer, split_batch(digits(dtype), size), cross_entropy_sum, scaler=scaler)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def overflow(dtype: torch.dtype, size: int) -> Numbers:
    """Return parameters and scale after an update in which one sample overflows."""
    model, scaler = net(dtype=dtype), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    images, targets = digits(dtype)
    images = torch.cat([images[:20], torch.full_like(images[:1], math.inf), images[21:]])
    update_parameters(model, optimizer, split_batch((images, targets), size), cross_entropy_sum, scaler=scaler)
    return {"scale": torch.tensor(scaler.get_scale())} | {n: p.detach() for n, p in model.named_parameters()}


# Schedules, clipping, hooks, compiling, checkpointing, evaluation.


def learning_rates(*, per_update: bool) -> Example:
    """Compare the learning rate after five updates of a schedule of ten."""

    def run(dtype: torch.dtype, size: int) -> Numbers:
        optimizer = torch.optim.SGD([torch.zeros(1, dtype=dtype, requires_grad=True)], lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
        optimizer.step()
        for _ in range(5 * (1 if per_update else FULL // size)):
            schedule.step()
        return {"learning rate": torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)}

    return WholeAndCut(run)


def moving_average(dtype: torch.dtype, size: int) -> Numbers:
    """Return a moving average of the parameters over five updates."""
    model = net(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(5):
        update_parameters(model, optimizer, split_batch(digits(dtype), size), cross_entropy_sum)
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    return {str(place): mean for place, mean in enumerate(average)}


def clip_each(model: nn.Module, part: Batch, k: int) -> None:
    (cross_entropy_sum(model, part) / FULL).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_once(dtype: torch.dtype, size: int) -> Numbers:
    """Return the parameters after one step with a gradient that is clipped to a length of 0.1."""
    model = net(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulate_gradients(model, split_batch(digits(dtype), size), cross_entropy_sum)
    apply_gradients(model, optimizer, max_grad_norm=0.1)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def hooked(*, on: str) -> Callable[..., nn.Module]:
    """Build a network with a hook: it clamps the gradient of each sample's activations, or that of a parameter."""

    def build(dtype: torch.dtype) -> nn.Module:
        model = net(dtype=dtype)
        if on == "activation":
            model[2].register_full_backward_hook(lambda module, into, out: (into[0].clamp(-1e-4, 1e-4),))
        else:
            model[1].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return model

    return build


def clamp_once(model: nn.Module) -> None:
    model[1].weight.grad.clamp_(-1e-3, 1e-3)


class Checkpointed(nn.Module):
    """A network whose middle is run again in the backward pass, in place of keeping its activations."""

    def __init__(self, dtype: torch.dtype, *, keep_random_state: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.keep = net(lambda: nn.Dropout(dropout), dtype=dtype), keep_random_state

    def forward(self, images: Tensor) -> Tensor:
        return checkpoint(self.layers, images, use_reentrant=False, preserve_rng_state=self.keep)


def checkpointed(*, keep_random_state: bool) -> Example:
    """Compare dropout under checkpointing with the same micro-batches without it."""

    def run(model: nn.Module, dtype: torch.dtype) -> Numbers:
        return gradient(model, split_batch(digits(dtype), CUT), cross_entropy_sum, count_samples)

    def example(dtype: torch.dtype) -> tuple[Numbers, Numbers]:
        again = run(Checkpointed(dtype, keep_random_state=keep_random_state, dropout=0.5), dtype)
        plain = run(net(lambda: nn.Dropout(0.5), dtype=dtype), dtype)
        return plain, {name.removeprefix("layers."): value for name, value in again.items()}

    return example


def compiled(dtype: torch.dtype) -> nn.Module:
    """Compile a network; "aot_eager" traces forward and backward and needs no C++ compiler."""
    return torch.compile(net(dtype=dtype), backend="aot_eager", dynamic=True)


def right_answers(dtype: torch.dtype, size: int) -> Numbers:
    """Count the right answers of an evaluation."""
    model = net(dtype=dtype).eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in split_batch(digits(dtype), size))
    return {"right": right}


def simple(build: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    """Build the network with one layer in its middle."""
    return lambda dtype: net(build, dtype=dtype)


def simple_image(build: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    return lambda dtype: image_net(build, dtype=dtype)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
WEIGHTS = class_weighted_cross_entropy([1.0] * 5 + [3.0] * 5)

CONTRACT: tuple[Ingredient, ...] = (
    Ingredient("optimizer", "SGD", WITHIN_ROUNDING, training(SGD, lr=0.1)),
    Ingredient("optimizer", "SGD, momentum", WITHIN_ROUNDING, training(SGD, lr=0.05, momentum=0.9, nesterov=True)),
    Ingredient("optimizer", "Adam", WITHIN_ROUNDING, training(ADAM, lr=1e-3)),
    Ingredient("optimizer", "AdamW", WITHIN_ROUNDING, training(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)),
    Ingredient("optimizer", "Adafactor", WITHIN_ROUNDING, training(torch.optim.Adafactor, lr=1e-2)),
    Ingredient("optimizer", "Adam's step counter", EQUAL, WholeAndCut(adam_step_counter)),
    Ingredient(
        "optimizer",
        "weight decay in every micro-batch",
        NOT_EQUAL,
        decay(per_update=False),
        "decay once per update",
        decay(per_update=True),
    ),
    Ingredient(
        "optimizer",
        "a step inside backward",
        NOT_EQUAL,
        stepping(inside=True),
        "step once per update",
        stepping(inside=False),
    ),
    Ingredient("layer", "linear", WITHIN_ROUNDING, gradients(net)),
    Ingredient("layer", "convolution", WITHIN_ROUNDING, gradients(image_net)),
    Ingredient(
        "layer", "attention", WITHIN_ROUNDING, gradients(small_gpt, token_cross_entropy_sum, count_tokens, pixel_tokens)
    ),
    Ingredient("layer", "embedding, sparse gradient", WITHIN_ROUNDING, gradients(Words)),
    Ingredient("layer", "LayerNorm", WITHIN_ROUNDING, gradients(simple(lambda: nn.LayerNorm(32)))),
    Ingredient("layer", "GroupNorm", WITHIN_ROUNDING, gradients(simple_image(lambda: nn.GroupNorm(2, 8)))),
    Ingredient("layer", "InstanceNorm", WITHIN_ROUNDING, gradients(simple_image(lambda: nn.InstanceNorm2d(8)))),
    Ingredient(
        "layer",
        "BatchNorm, training",
        NOT_EQUAL,
        gradients(simple_image(lambda: nn.BatchNorm2d(8))),
        "GroupNorm or LayerNorm",
        gradients(simple_image(lambda: nn.GroupNorm(2, 8))),
    ),
    Ingredient(
        "layer",
        "BatchNorm, running statistics",
        NOT_EQUAL,
        lambda dtype: (running_mean(dtype, 4), running_mean(dtype, 2)),
        "another norm; or measure them anew after training",
    ),
    Ingredient(
        "layer", "BatchNorm, evaluation", WITHIN_ROUNDING, gradients(simple_image(lambda: nn.BatchNorm2d(8).eval()))
    ),
    Ingredient(
        "layer",
        "spectral normalisation",
        NOT_EQUAL,
        gradients(spectral_net),
        "one power iteration per update",
        by_hand(follow_once, spectral_net),
    ),
    Ingredient("loss", "cross-entropy over samples", WITHIN_ROUNDING, gradients(net)),
    Ingredient("loss", "squared error", WITHIN_ROUNDING, gradients(net, one_hot_squared_error)),
    Ingredient("loss", "cross-entropy, class weights", WITHIN_ROUNDING, gradients(net, *WEIGHTS)),
    Ingredient("loss", "gradient penalty per sample", WITHIN_ROUNDING, gradients(net, gradient_penalty_sum)),
    Ingredient(
        "loss",
        "mean over tokens, divided by K",
        NOT_EQUAL,
        by_hand(token_mean, small_gpt, pixel_tokens),
        "sum, divided by the group's count",
        gradients(small_gpt, token_cross_entropy_sum, count_tokens, pixel_tokens),
    ),
    Ingredient(
        "loss",
        "penalty on weights, per call",
        NOT_EQUAL,
        gradients(net, with_penalty(per_sample=False)),
        "times the count; or weight decay",
        gradients(net, with_penalty(per_sample=True)),
    ),
    Ingredient("loss", "contrastive", NOT_EQUAL, mean_of_parts(info_nce), "two passes", two_passes(info_nce)),
    Ingredient(
        "loss",
        "Dice over the batch",
        NOT_EQUAL,
        mean_of_parts(dice),
        "two passes; or Dice per sample",
        two_passes(dice),
    ),
    Ingredient("loss", "Dice per sample", WITHIN_ROUNDING, gradients(net, dice_per_sample_sum)),
    Ingredient(
        "loss", "load balancing", NOT_EQUAL, mean_of_parts(load_balance), "two passes", two_passes(load_balance)
    ),
    Ingredient(
        "loss",
        "root of the mean",
        NOT_EQUAL,
        mean_of_parts(root_mean_square),
        "two passes",
        two_passes(root_mean_square),
    ),
    Ingredient(
        "randomness",
        "dropout, two layers, one seed",
        NOT_EQUAL,
        gradients(
            lambda dtype: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), net(lambda: nn.Dropout(0.5), dtype=dtype))
        ),
        "each sample's own masks",
        gradients(OwnMask, batch=masked_digits),
    ),
    Ingredient("randomness", "noise drawn before the cut", WITHIN_ROUNDING, gradients(net, batch=noisy_digits)),
    Ingredient(
        "precision",
        "bfloat16 parameters",
        NOT_EQUAL,
        many_small(None),
        "sum_dtype=torch.float32",
        many_small(torch.float32),
        torch.bfloat16,
    ),
    Ingredient("precision", "bfloat16 autocast", WITHIN_ROUNDING, WholeAndCut(autocast), precision=torch.bfloat16),
    Ingredient("precision", "loss scaling", WITHIN_ROUNDING, WholeAndCut(scaled)),
    Ingredient("precision", "loss scaling, overflow", EQUAL, WholeAndCut(overflow)),
    Ingredient("schedule", "learning rate, per update", EQUAL, learning_rates(per_update=True)),
    Ingredient(
        "schedule",
        "learning rate, per micro-batch",
        NOT_EQUAL,
        learning_rates(per_update=False),
        "advance once per update",
        learning_rates(per_update=True),
    ),
    Ingredient("schedule", "moving average of weights", WITHIN_ROUNDING, WholeAndCut(moving_average)),
    Ingredient("clipping", "norm, once per update", WITHIN_ROUNDING, WholeAndCut(clip_once)),
    Ingredient(
        "clipping",
        "norm, in every micro-batch",
        NOT_EQUAL,
        by_hand(clip_each),
        "clip once, before the step",
        WholeAndCut(clip_once),
    ),
    Ingredient("hook", "on an activation", WITHIN_ROUNDING, gradients(hooked(on="activation"))),
    Ingredient(
        "hook",
        "clamps a parameter's gradient",
        NOT_EQUAL,
        gradients(hooked(on="parameter")),
        "clamp once, before the step",
        by_hand(lambda model, part, k: (cross_entropy_sum(model, part) / FULL).backward(), after=clamp_once),
    ),
    Ingredient("compile", "torch.compile", WITHIN_ROUNDING, gradients(compiled)),
    Ingredient("checkpointing", "activation checkpointing", WITHIN_ROUNDING, gradients(Checkpointed)),
    Ingredient("checkpointing", "with dropout, same cut", EQUAL, checkpointed(keep_random_state=True)),
    Ingredient(
        "checkpointing",
        "dropout, random state not kept",
        NOT_EQUAL,
        checkpointed(keep_random_state=False),
        "preserve_rng_state=True",
        checkpointed(keep_random_state=True),
    ),
    Ingredient("evaluation", "number of right answers", EQUAL, WholeAndCut(right_answers)),
)
