"""Find what looks across samples: the layers and losses whose result for one sample depends on the others of its batch.

A batch can be cut where the loss is a sum of what each sample gives on its own. `cross_sample_layers` knows the layers
that break this by their class, and runs nothing. `find_interactions` knows no class: it exchanges samples and watches.
If the loss of a batch is a sum over samples, then exchanging some samples b changes it by the same amount whatever the
other samples a are, so L(a, b) - L(a, b') - L(a', b) + L(a', b') = 0. Statistics calls that number the interaction of
two factors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.batches import Batch, batch_size, map_tensors, positive_int
from course_lib.losses import LossSum
from course_lib.replay import as_if_never_run, go_back

MOST_SAMPLES = 16  # that are run: enough to see an interaction, few enough for any memory
OWN_ROUNDING = 8  # units in the last place that an output may differ by although nothing looked across
SUM_ROUNDING = 64  # and a sum of losses, through its additions


@dataclass(frozen=True)
class Interaction:
    """A place where samples meet: a layer by its name in the model (`layer`), or the loss itself (`layer` is None).

    kind: the class of the layer, or the name of the loss function.
    """

    layer: str | None
    kind: str

    def __str__(self) -> str:
        if self.layer is None:
            return f"the loss {self.kind} is not a sum over samples: what one sample adds depends on the others"
        place = f"layer {self.layer}" if self.layer else "the model's own forward"
        return f"{place} ({self.kind}) looks across samples: what it gives for one depends on the others"


def cross_sample_layers(model: nn.Module) -> list[str]:
    """Name the layers that are known to look across samples in the mode they are in now; nothing is run.

    These are the BatchNorms (also synchronised and lazy ones): in training mode, and in evaluation mode where they keep
    no running statistics. A layer of another class is not known here: `find_interactions` finds it by what it does.
    """
    check_model(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def find_interactions(model: nn.Module, batch: Batch, loss_sum: LossSum) -> list[Interaction]:
    """Find the layers and the loss that look across samples, by what they do; an empty list if the batch can be cut.

    batch: at least 4 samples; at most the first 16 are used. loss_sum(model, batch): a scalar tensor, or a dict.
    The model is run four times on half of these samples, without gradients, in the mode that it is in, each time with
    the same random numbers (so dropout is no interaction). Two quarters are exchanged in turn. A layer is named when
    its output for a sample changes although only other samples were exchanged; its output is then put back, so that
    what comes behind it is judged alone. At last the losses of the four runs must add up.
    Model, buffers, gradients, modes and random state are left as they were.
    Samples are looked for in the first dimension of a layer's output, or in the second where the first has another
    length. What a layer does to an output without samples (a scalar) counts as the loss's.
    Rounding hides what is below about 1e-5 of the loss in float32; a float64 model shows more.
    Raises TypeError or ValueError for another model or loss, fewer than 4 samples, or a loss that is not finite.
    """
    check_model(model)
    if not callable(loss_sum):
        raise TypeError(f"loss_sum must be a function; got {type(loss_sum).__name__}")
    available = batch_size(batch)
    if available < 4:
        raise ValueError(f"batch must have at least 4 samples, two to be exchanged for two others; got {available}")
    model = getattr(model, "_orig_mod", model)  # hooks do not reach into a compiled model
    part = min(available, MOST_SAMPLES) // 4
    size, a, b = 2 * part, list(range(part)), list(range(part, 2 * part))
    found: list[Interaction] = []
    losses: list[float] = []
    with _disable_current_modes(), torch.no_grad(), as_if_never_run(model) as start, watched(model, size) as watch:
        for exchanged in ([], b, a, [*a, *b]):
            go_back(model, start)
            rows = torch.tensor([row + size * (row in exchanged) for row in range(size)])
            samples = map_tensors(lambda tensor, rows=rows: tensor[rows.to(tensor.device)], batch)
            watch.begin(exchanged)
            loss = total_of(loss_sum(model, samples))
            losses.append(float(loss))
        found += watch.found
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"loss_sum must be finite to be judged; it was {losses}")
    plain, second, first, both = losses
    allowed = SUM_ROUNDING * torch.finfo(loss.dtype).eps * max(map(abs, losses))
    if abs(plain - second - first + both) > allowed:
        found.append(Interaction(None, getattr(loss_sum, "__name__", type(loss_sum).__name__)))
    return found


class Watch:
    """Compare what each layer gives for a sample with what it gave before, over runs with exchanged samples."""

    def __init__(self, names: dict[nn.Module, str], size: int) -> None:
        self.names, self.size = names, size
        self.found: list[Interaction] = []
        self.known: list[dict[int, Tensor]] = []  # per run: the outputs, in the order in which layers finish
        self.exchanged: list[list[int]] = []  # per run: the places of the samples that are exchanged

    def begin(self, exchanged: list[int]) -> None:
        """Start the next run, with the samples in these places exchanged."""
        self.exchanged.append(exchanged)
        self.known.append({})

    def finished(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Look at a layer's output (a hook): name the layer if another sample's part moved, and put that part back."""
        moved = False

        def settle(tensor: Tensor) -> Tensor:
            nonlocal moved
            place = len(self.known[-1])
            earlier = [known[place] for known in self.known[:-1] if place in known]
            if len(earlier) == len(self.known) - 1 > 0 and all(one.shape == tensor.shape for one in earlier):
                # In (T, B, ...) with T = B the samples may be in either dimension: named is what moved in each.
                views = [self.expected(sample, earlier) for sample in self.samples(tensor)]
                changed = [differ(tensor, before, fresh) for before, fresh in views]
                if views:
                    before, fresh = views[changed.index(False) if False in changed else 0]
                    moved |= all(changed)
                    tensor = torch.where(fresh, tensor, before)
            self.known[-1][place] = tensor.clone()  # the next layer may write over its input
            return tensor

        settled = map_outputs(settle, output)
        name = self.names[module]
        if moved and all(interaction.layer != name for interaction in self.found):
            self.found.append(Interaction(name, type(module).__name__))
        return settled

    def samples(self, tensor: Tensor) -> list[Tensor]:
        """Say to which sample each entry belongs, for each way the shape can be read; each can be broadcast to it."""
        lengths = {d: 1 for d in range(min(tensor.ndim, 2)) if tensor.shape[d] == self.size}
        if tensor.ndim and tensor.shape[0] and tensor.shape[0] % self.size == 0:
            lengths[0] = tensor.shape[0] // self.size  # above 1: samples and positions flattened into one dimension
        return [
            (torch.arange(tensor.shape[d], device=tensor.device) // length).view([-1] + [1] * (tensor.ndim - d - 1))
            for d, length in lengths.items()
        ]

    def expected(self, sample: Tensor, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what earlier runs gave, and where this run has samples that were in none of them."""
        before, fresh = earlier[0], mask(sample, self.exchanged[-1])
        if len(earlier) == 3:  # the last run: every sample has been in an earlier one
            for places, output in zip(self.exchanged[1:-1], earlier[1:], strict=True):
                before = torch.where(mask(sample, places), output, before)
            fresh = torch.zeros_like(fresh)
        return before, fresh


def differ(tensor: Tensor, before: Tensor, fresh: Tensor) -> bool:
    """Say whether a tensor differs from an earlier one by more than rounding, where it is not fresh."""
    same = fresh | (tensor == before) | (tensor.isnan() & before.isnan())
    change = (tensor.double() - before.double()).abs().masked_fill(same, 0).nan_to_num(torch.inf)
    size = before.double().abs().masked_fill(fresh, 0).nan_to_num(0).max()
    return bool(change.max() > OWN_ROUNDING * precision(tensor) * size)


def mask(sample: Tensor, places: list[int]) -> Tensor:
    """Say which entries belong to the samples in these places."""
    return torch.isin(sample, torch.tensor(places, dtype=sample.dtype, device=sample.device))


@contextmanager
def watched(model: nn.Module, size: int) -> Iterator[Watch]:
    """Let a watch see every layer's output in the block."""
    watch = Watch({module: name for name, module in model.named_modules()}, size)
    hooks = [module.register_forward_hook(watch.finished) for module in watch.names]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()
        torch.clear_autocast_cache()  # inside an autocast block it holds weights cast without gradients


def map_outputs(function: Any, output: Any) -> Any:
    """Apply `function` to the tensors of a layer's output: a tensor, or tuples, lists and dicts of them."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, dict):
        parts = {key: map_outputs(function, part) for key, part in output.items()}
        return parts if type(output) is dict else output
    if isinstance(output, tuple | list):
        parts = [map_outputs(function, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output


def precision(tensor: Tensor) -> float:
    """Return the relative distance of two neighbouring numbers of a tensor's type; 0 for whole numbers."""
    return torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0


def total_of(loss: Any) -> Tensor:
    """Return a loss as one number; the terms of a dict are added up."""
    terms = list(loss.values()) if isinstance(loss, dict) else [loss]
    for term in terms:
        if not isinstance(term, Tensor) or term.ndim > 0 or not term.dtype.is_floating_point:
            raise TypeError(f"loss_sum must return a scalar tensor (or a dict of them); it returned {loss!r}")
    return sum(terms[1:], start=terms[0].detach())


def replace_batch_norm(model: nn.Module, num_groups: int = 8) -> nn.Module:
    """Return a copy of a model with a GroupNorm in place of each BatchNorm, which looks at one sample alone.

    num_groups: the groups that each layer's channels are divided into. Scale and shift are taken over, the running
    statistics are not: the copy computes another function, so it has to be trained.
    Source: Wu and He (2018), "Group normalization".
    Raises ValueError where num_groups does not divide a layer's channels, naming the layer.
    """
    check_model(model)
    num_groups = positive_int("num_groups", num_groups)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.num_features % num_groups:
            raise ValueError(
                f"num_groups must divide the channels of each BatchNorm; layer {name or '(the model)'} has "
                f"{module.num_features}, got {num_groups}"
            )
    return grouped(copy.deepcopy(model), num_groups, {})


def grouped(module: nn.Module, num_groups: int, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Exchange the BatchNorms in a module, all the way down; `made` holds those that stand in several places."""
    if module in made:
        return made[module]
    if not isinstance(module, _BatchNorm):
        made[module] = module
        for name, child in list(module._modules.items()):  # named_children leaves out what it has named before
            if child is not None:
                setattr(module, name, grouped(child, num_groups, made))
        return module
    norm = nn.GroupNorm(num_groups, module.num_features, eps=module.eps, affine=module.affine)
    norm.train(module.training)
    norm.weight, norm.bias = module.weight, module.bias  # the copy's own, with their precision and device
    made[module] = norm
    return norm


def check_model(model: Any) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
