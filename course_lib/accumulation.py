"""One parameter update from several micro-batches, with the value that the whole batch in one pass would give.

`update_parameters` is one call per update, so a training loop cannot zero, clip, step or divide in the wrong place.
It is made of two halves: `accumulate_gradients` adds up the gradient of the mean loss over a group of micro-batches,
`apply_gradients` takes the step. For a loss that compares samples with one another, `accumulate_contrastive_gradients`
takes the place of the first half. The short functions first; the checks of their arguments follow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, reduce
from numbers import Real
from operator import add, attrgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.batches import Batch, concatenate_batches, count_samples, split_batch, tensors_of
from course_lib.losses import Count, LossSum
from course_lib.replay import as_if_never_run, go_back, remember

Items = float | dict[str, float]  # what a count returns: one number, or one per term of the loss


@dataclass(frozen=True)
class Update:
    """What one update did.

    loss: the mean over the group; nan when there was nothing to average. count: the items of the group.
    grad_norm: L2 norm of the whole gradient before clipping; None unless `max_grad_norm` was given.
    skipped: True when parameters, optimizer and schedule did not advance (no items, or an overflow under a scaler).
    """

    loss: float
    count: Items
    grad_norm: float | None
    skipped: bool


class Step(NamedTuple):
    """The gradient's norm before clipping (None if not asked for), and whether the step was skipped."""

    grad_norm: float | None
    skipped: bool


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    count: Count = count_samples,
    *,
    scaler: torch.amp.GradScaler | None = None,
    total_count: Items | None = None,
    sum_dtype: torch.dtype | None = None,
) -> float:
    """Add the gradient of the mean loss over a group of micro-batches to `.grad`, and return that mean.

    micro_batches: a sequence (it is counted before it is used). The activations of one micro-batch are alive at a time.
    loss_sum(model, micro_batch): the SUM of the item losses, a scalar tensor.
    count(micro_batch): how many items that sum has. Both may return a dict of terms with the same keys; each term is
    then divided by its own total.
    scaler: a GradScaler; `.grad` then holds scaled gradients until `apply_gradients` unscales them. With float16
    parameters it is an error.
    total_count: the group's count over all processes, where it is larger than this process's. What is returned and
    added is then this process's share: summed over the processes, it is the mean and its gradient.

    A micro-batch without items is passed over. A group without items adds nothing and returns nan.
    sum_dtype: the precision of the sum over the group, where a parameter's own is lower. None sums in the parameter's
    own precision: in bfloat16 many small gradients are then lost (256 + 1 = 256). With torch.float32, `.grad` of a
    bfloat16 parameter is rounded once, at the end. From the second micro-batch on that takes 4 bytes for each such
    parameter in place of 2, until the group ends.

    Better still for training, keep parameters in float32 and use `torch.autocast` for speed.
    Raises TypeError or ValueError for arguments that cannot be right, before anything has changed. A loss that is not
    finite raises ValueError (with a scaler it makes the step skip); then, and after any other error, the model's
    gradients are cleared: a part of a gradient is worth nothing.
    """
    parameters = check_model(model)
    check_sum_dtype(sum_dtype)
    check_scaler(scaler, parameters)
    total, items = check_group(model, parameters, micro_batches, loss_sum, count, total_count)
    return add_gradients(model, parameters, micro_batches, loss_sum, total, items, scaler, sum_dtype)


def add_gradients(
    model: nn.Module,
    parameters: list[nn.Parameter],
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    total: Items,
    items: list[Items],
    scaler: torch.amp.GradScaler | None,
    sum_dtype: torch.dtype | None,
) -> float:
    """Do the work of `accumulate_gradients` with arguments that have been checked and counted."""
    shares = [0.0] * len(items)
    with no_partial_gradients(model, micro_batches):
        with summed_in(sum_dtype, parameters, len(items)) as sums:
            held_still = ParametersHeldStill(parameters, sums, enabled=len(items) > 1)
            for i, micro_batch in enumerate(micro_batches):
                if has_items(items[i]):
                    share = divide(loss_sum(model, micro_batch), total)  # what this micro-batch adds to the mean
                    with held_still:
                        (share if scaler is None else scaler.scale(share)).backward()  # adds, and frees activations
                    shares[i] = share.detach()
        return add_up(shares, parameters, scaler) if has_items(total) else math.nan


def accumulate_contrastive_gradients(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    encode: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, ...]],
    group_loss: Callable[..., Tensor],
    *,
    scaler: torch.amp.GradScaler | None = None,
    sum_dtype: torch.dtype | None = None,
) -> float:
    """Add the gradient of a loss that looks across the whole group to `.grad`, and return that loss.

    encode(model, micro_batch): what the model makes of each sample alone, (B, ...), or a tuple of such tensors (a model
    that holds two encoders gives two). group_loss(*representations): the loss of the whole group from the
    representations of all its samples, a scalar tensor; it may use parameters of the model, such as a temperature.
    Nothing is divided here. scaler and sum_dtype: as in `accumulate_gradients`.

    Two passes: every micro-batch is encoded without a graph, and the loss gives the gradient of each representation.
    Then each is encoded again, with the random numbers and the buffers of the first time, and that gradient is sent
    back through it. So the gradient is the full batch's for the same dropout masks, to rounding, and for any loss
    (contrastive, Dice, load balancing), as long as `encode` looks at each sample alone. The activations of one
    micro-batch are alive at a time, and the representations of all; the price is one more forward pass.
    Source: Gao, Zhang, Han and Callan (2021), "Scaling deep contrastive learning batch size under memory limited
    setup", https://arxiv.org/abs/2101.06983.

    Raises TypeError or ValueError for arguments that cannot be right, for a loss that is not finite (with a scaler the
    step is skipped), and where the second encoding is not the first's (randomness that is not PyTorch's, for one).
    After an error the model's gradients are cleared.
    """
    parameters = check_contrastive(model, micro_batches, encode, group_loss, scaler, sum_dtype)
    start, moments, parts = remember(model), [], []
    with no_partial_gradients(model, micro_batches):
        with summed_in(sum_dtype, parameters, len(micro_batches)) as sums:
            with torch.no_grad():  # first pass: values only
                for micro_batch in micro_batches:
                    moments.append(remember(model, buffers=False))
                    parts.append(representations(encode(model, micro_batch)))
            torch.clear_autocast_cache()  # inside an autocast block it holds weights cast without gradients
            joined = [whole.requires_grad_() for whole in join(parts)]
            loss = check_group_loss(group_loss(*joined))
            (loss if scaler is None else scaler.scale(loss)).backward()  # the gradient of every representation
            gradients = split_like(parts, [whole.grad for whole in joined])
            with as_if_never_run(model):  # what this pass draws and writes, the first has drawn and written
                go_back(model, start)
                for i, micro_batch in enumerate(micro_batches):  # second pass: the same values, with a graph
                    go_back(model, moments[i])
                    again = representations(encode(model, micro_batch))
                    check_replay(parts[i], again, i, len(parts))
                    trained = [k for k, value in enumerate(again) if value.requires_grad]  # an encoder may be frozen
                    if not trained:
                        continue
                    with ParametersHeldStill(parameters, sums, enabled=len(parts) > 1):
                        torch.autograd.backward([again[k] for k in trained], [gradients[i][k] for k in trained])
        return add_up([loss.detach()], parameters, scaler, "group_loss")


def apply_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
) -> Step:
    """Take one step with the gradients in `.grad`: unscale, clip, step, scaler update, schedule, zero; each once.

    max_grad_norm: the largest L2 norm of the gradient of all parameters that the optimizer holds; `math.inf` measures
    the norm and clips nothing.
    An overflow under a scaler skips the step: parameters, optimizer state and schedule stay, the scale shrinks.
    Raises ValueError when no parameter of the optimizer has a gradient, or when the norm is not finite and no scaler is
    there to skip.
    """
    parameters, optimized = check_step(check_model(model), optimizer, max_grad_norm, scaler, scheduler)
    return step_once(parameters, optimized, optimizer, max_grad_norm, scaler, scheduler)


def step_once(
    parameters: list[nn.Parameter],
    optimized: list[nn.Parameter],
    optimizer: Optimizer,
    max_grad_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    scheduler: Any,
) -> Step:
    """Do the work of `apply_gradients` with arguments that have been checked."""
    gradients = [parameter.grad for parameter in optimized if parameter.grad is not None]
    if not gradients:
        raise ValueError("no parameter of optimizer has a gradient; call accumulate_gradients first, on items")
    grad_norm, skipped = None, False
    try:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_grad_norm is not None:
            values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
            norm = torch.nn.utils.get_total_norm(values)
            grad_norm = float(norm)
            if not math.isfinite(grad_norm) and not (is_scaling(scaler) and overflowed(values)):
                raise ValueError(f"the gradient's norm is {grad_norm}; the gradients are cleared, nothing has moved")
            torch.nn.utils.clip_grads_with_norm_(optimized, max_grad_norm, norm)
        if scaler is None:
            optimizer.step()
        else:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale  # the scale shrinks when, and only when, the step was skipped
    except BaseException:
        if is_scaling(scaler):
            with suppress(AssertionError):  # it has never scaled anything
                scaler.update(scaler.get_scale())  # keeps the scale, and forgets that it has unscaled
        raise
    finally:
        clear_gradients(parameters)
        torch.clear_autocast_cache()  # inside an autocast block, the next pass would use casts of the old parameters
    if scheduler is not None and not skipped:
        scheduler.step()
    return Step(grad_norm, skipped)


def update_parameters(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    count: Count = count_samples,
    *,
    max_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    sum_dtype: torch.dtype | None = None,
) -> Update:
    """Make one update of the parameters from a group of micro-batches, as the group in one pass would.

    Arguments as in `accumulate_gradients` and `apply_gradients`. Gradients are None at entry and at exit, also after an
    error. Any error before the step leaves parameters, optimizer, schedule and scale as they were.
    """
    own = check_model(model)
    every, optimized = check_step(own, optimizer, max_grad_norm, scaler, scheduler)
    check_sum_dtype(sum_dtype)
    total, items = check_group(model, own, micro_batches, loss_sum, count, None)
    clear_gradients(every)
    try:
        loss = add_gradients(model, own, micro_batches, loss_sum, total, items, scaler, sum_dtype)
        if not has_items(total):
            return Update(math.nan, total, None, skipped=True)
        step = step_once(every, optimized, optimizer, max_grad_norm, scaler, scheduler)
    finally:
        clear_gradients(every)
    return Update(loss, total, *step)


def mean_loss(
    model: nn.Module, micro_batches: Iterable[Batch], loss_sum: LossSum, count: Count = count_samples
) -> float:
    """Return the mean loss over all items of the micro-batches, in evaluation mode; nan when there are none.

    Gradients, the training mode of every module and the random state are as before, and so are buffers, unless the
    model writes them in evaluation mode too. It can be called in the middle of a group.
    """
    check_model(model)
    check_loss(loss_sum, count)
    if not isinstance(micro_batches, Iterable) or isinstance(micro_batches, Tensor | Mapping | str):
        raise TypeError(f"micro_batches must be a list or a loader of them; got {type(micro_batches).__name__}")
    sums, counts = [], []
    with evaluation(model):
        for micro_batch in micro_batches:
            items = check_items(count(micro_batch))
            if has_items(items):
                sums.append(loss_sum(model, micro_batch))
                counts.append(items)
        total = add_items(counts)
        if not has_items(total):
            return math.nan
        return sum(float(divide(loss, total, with_gradient=False)) for loss in sums)


# The arithmetic of sums and counts.


def has_items(items: Items) -> bool:
    """Say whether there is anything to average: a count above 0, in any term."""
    return any(number > 0 for number in items.values()) if isinstance(items, dict) else items > 0


def add_items(counts: Sequence[Items]) -> Items:
    """Add up counts, term by term; 0 for none. Raises ValueError when some have terms and others have not the same."""
    if not any(isinstance(items, dict) for items in counts):
        return sum(counts)
    if any(by_term(items).keys() != by_term(counts[0]).keys() for items in counts):
        raise ValueError(f"count must return the same terms for every micro-batch; it returned {counts}")
    return {term: sum(items[term] for items in counts) for term in counts[0]}


def divide(loss: Tensor | dict[str, Tensor], total: Items, *, with_gradient: bool = True) -> Tensor:
    """Divide a summed loss by the group's count; of a dict, each term by its own total, and add the terms up.

    A term whose total is 0 has no items in the whole group and adds nothing.
    """
    losses, totals = by_term(loss), by_term(total)
    if losses.keys() != totals.keys():
        given = [list(value) if isinstance(value, dict) else "one number" for value in (loss, total)]
        raise ValueError(f"loss_sum and count must return the same terms; loss_sum: {given[0]}, count: {given[1]}")
    for term in losses.values():
        if not isinstance(term, Tensor):
            raise TypeError(f"loss_sum must return a scalar tensor (or a dict of them); it returned {loss!r}")
        if term.ndim > 0:
            raise ValueError(f"loss_sum must return a scalar tensor, the sum over items; got shape {tuple(term.shape)}")
    share = reduce(add, [losses[term] / totals[term] for term in losses if totals[term] > 0])
    if with_gradient and not share.requires_grad:
        why = "it depends on no trainable parameter of model" if torch.is_grad_enabled() else "this is inside no_grad"
        raise ValueError(f"loss_sum returned a loss without a gradient: {why}")
    return share


def add_up(
    shares: Sequence[Tensor | float],
    parameters: list[nn.Parameter],
    scaler: torch.amp.GradScaler | None,
    name: str = "loss_sum",
) -> float:
    """Add the shares up to the mean loss. One that is not finite is an error, or under a scaler an overflow."""
    # Read here, once per group: reading each as it comes would make a GPU wait K times per update.
    values = [float(share) for share in shares]
    bad = [
        f"{value} in micro-batch {i} of {len(values)}" if name == "loss_sum" else f"{value}"
        for i, value in enumerate(values, 1)
        if not math.isfinite(value)
    ]
    if bad and not is_scaling(scaler):
        raise ValueError(
            f"{name} must be finite; it was {', '.join(bad)}. The gradients are cleared, nothing has moved"
        )
    if bad:  # a loss can overflow where no gradient does; the scaler looks at gradients, and skips this step as well
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(math.nan)
    return sum(values, start=0.0)


def is_scaling(scaler: torch.amp.GradScaler | None) -> bool:
    """Say whether a scaler is there and enabled, so that an overflow skips a step instead of being an error."""
    return scaler is not None and scaler.is_enabled()


def overflowed(gradients: Iterable[Tensor]) -> bool:
    """Say whether any entry is not finite: what the scaler skips a step for."""
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """List what an optimizer holds, each parameter once."""
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return list(held.values())


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set `.grad` of each parameter to None, which also frees its memory."""
    for parameter in parameters:
        parameter.grad = None


# Representations, of which a loss across samples needs all.


def representations(encoded: Any) -> tuple[Tensor, ...]:
    """Return what `encode` gave as a tuple; refuse what is no tensor of samples with real numbers."""
    parts = tuple(encoded) if isinstance(encoded, tuple | list) else (encoded,)
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim == 0 or not part.dtype.is_floating_point:
            given = f"{part.dtype} of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"encode must return a floating-point tensor (B, ...), or a tuple of them; it gave {given}")
    if not parts:
        raise TypeError("encode must return a floating-point tensor (B, ...), or a tuple of them; it gave none")
    return parts


def join(parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Join the micro-batches' representations, sample after sample, each kind on its own."""
    shapes = [[tuple(part.shape[1:]) for part in kinds] for kinds in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"encode must return the same kinds for every micro-batch; it gave (per sample) {shapes}")
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def split_like(parts: Sequence[tuple[Tensor, ...]], gradients: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """Cut the gradient of each kind into those of the micro-batches; zeros where the loss does not use a kind."""
    whole = [
        None if gradient is None else iter(gradient.split([len(kinds[k]) for kinds in parts]))
        for k, gradient in enumerate(gradients)
    ]
    return [
        [torch.zeros_like(part) if whole[k] is None else next(whole[k]) for k, part in enumerate(kinds)]
        for kinds in parts
    ]


def check_replay(first: tuple[Tensor, ...], again: tuple[Tensor, ...], place: int, total: int) -> None:
    """Refuse a second encoding that is not the first: its graph would give the gradient of something else."""
    for before, after in zip(first, again, strict=True):
        gap, size = (float(value.detach().double().norm()) for value in (after - before, before))
        # Half the digits: two kernels may round differently, another dropout mask changes the first digit.
        if gap > math.sqrt(torch.finfo(before.dtype).eps) * size:
            raise ValueError(
                f"encode must give the same representations twice; those of micro-batch {place + 1} of {total} differ "
                f"by {gap / size if size else math.inf:.1e} of their size. It may draw random numbers that are not "
                "PyTorch's, or change something that is no buffer"
            )


def check_group_loss(loss: Any) -> Tensor:
    """Refuse a loss of the group that is no scalar tensor with a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"group_loss must return a scalar tensor; it returned {loss!r}")
    if loss.ndim > 0:
        raise ValueError(f"group_loss must return a scalar tensor; got shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        why = "it does not depend on the representations" if torch.is_grad_enabled() else "this is inside no_grad"
        raise ValueError(f"group_loss returned a loss without a gradient: {why}")
    return loss


# What surrounds the work.


@contextmanager
def summed_in(
    dtype: torch.dtype | None, parameters: list[nn.Parameter], num_micro_batches: int
) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Sum gradients of lower precision in `dtype` over the block, and round each sum once, when the block ends.

    A gradient leaves `.grad` as soon as backward has put it there, so that one at a time is alive beside the sums.
    """
    sums: dict[nn.Parameter, Tensor] = {}
    if dtype is None or num_micro_batches < 2:  # a sum of two is rounded once in any case
        yield sums
        return

    def take(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # else a hook of somebody else has used it
            sums[parameter] = sums[parameter].add_(parameter.grad) if parameter in sums else parameter.grad.to(dtype)
            parameter.grad = None

    wanted = torch.finfo(dtype).eps
    low = [p for p in parameters if p.dtype.is_floating_point and torch.finfo(p.dtype).eps > wanted]
    for parameter in low:
        take(parameter)  # what is there already is a part of the sum
    hooks = [p.register_post_accumulate_grad_hook(take) for p in low if p.requires_grad]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
    while sums:
        parameter, total = sums.popitem()
        parameter.grad = total.to(parameter.dtype)


@contextmanager
def no_partial_gradients(model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator[None]:
    """Clear the model's gradients when the block fails, and say so plainly when model and batch are on two devices."""
    try:
        yield
    except BaseException as error:
        clear_gradients(model.parameters())
        _tried.clear()  # a loss that failed may have been changed by the time it comes again
        model_on, batch_on = devices_of(model.parameters()), devices_of(tensors_found(micro_batches))
        if isinstance(error, RuntimeError) and not batch_on <= model_on:
            message = (
                f"model is on {', '.join(sorted(model_on))} but micro_batches are on {', '.join(sorted(batch_on))}"
            )
            raise ValueError(f"{message}; move them to one device") from error
        raise


def devices_of(tensors: Iterable[Tensor]) -> set[str]:
    """Name the devices that tensors are on."""
    return {str(tensor.device) for tensor in tensors}


def tensors_found(micro_batches: Sequence[Batch]) -> list[Tensor]:
    """List the tensors of micro-batches that have the usual structure; none for one that has another."""
    try:
        return tensors_of(list(micro_batches))
    except TypeError:
        return []


_version = attrgetter("_version")  # counts how often a tensor has been changed in place


class ParametersHeldStill:
    """Refuse a backward pass that moves parameters: an optimizer that steps inside it has used a part as the whole.

    A block around each backward pass of a group. (A class: a generator's block would cost a small model a per cent.)
    """

    def __init__(self, parameters: list[nn.Parameter], sums: Mapping[nn.Parameter, Tensor], *, enabled: bool) -> None:
        self.parameters = parameters if enabled else []
        self.sums = sums
        self.versions: list[int] = []
        self.is_first = True

    def __enter__(self) -> None:
        self.versions = list(map(_version, self.parameters))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None or not self.parameters:
            return
        wrong = self.versions != list(map(_version, self.parameters))
        if self.is_first and not self.sums:  # no gradient, and no sum that took it: a hook has used and cleared it
            wrong = wrong or all(parameter.grad is None for parameter in self.parameters)
        self.is_first = False
        if wrong:
            raise ValueError(
                "parameters changed during backward, so an optimizer steps inside it (a hook, or a fused optimizer). "
                "That excludes accumulation: use a single micro-batch, or an optimizer that steps once per update"
            )


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Run a block without gradients in evaluation mode; modes and random state are as before when it ends."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        # Inside an autocast block the cache now holds weights cast without gradients; a later pass would use them.
        torch.clear_autocast_cache()
        for module, training in modes:
            if module.training != training:
                module.train(training)  # a module may do more than set the flag, such as take adapters out again
        for module, training in modes:  # or may refuse, as a frozen BatchNorm does
            module.training = training


# The checks.


def check_model(model: Any) -> list[nn.Parameter]:
    """Refuse what is not a module; return its parameters, whose listing is slow enough to be done once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    return list(model.parameters())


def check_trainable(parameters: list[nn.Parameter]) -> None:
    """Refuse a model of which nothing can be trained."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("model has no trainable parameters; at least one must have requires_grad=True")


def check_scaler(scaler: Any, parameters: Iterable[nn.Parameter] = ()) -> None:
    """Refuse what can't scale, unscale, step and update, and parameters whose gradients can't be unscaled.

    A gradient in float16 that the scale has made infinite stays so when it is divided again. In bfloat16, which has
    float32's range, a scaler is needless and changes nothing, so it is let through.
    """
    names = ("scale", "unscale_", "step", "update", "get_scale", "is_enabled")
    if scaler is not None and not all(hasattr(scaler, name) for name in names):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, or None; got {type(scaler).__name__}")
    if is_scaling(scaler) and any(one.requires_grad and one.dtype == torch.float16 for one in parameters):
        raise ValueError(
            "scaler needs parameters in float32, and model has some in float16, whose gradients it can't unscale; "
            "keep the parameters in float32 and compute the loss under torch.autocast"
        )


def check_sum_dtype(dtype: Any) -> None:
    """Refuse what is no floating-point type."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"sum_dtype must be a floating-point type such as torch.float32, or None; got {dtype!r}")


def check_loss(loss_sum: LossSum, count: Count) -> None:
    """Refuse a loss or count that is not callable, and a loss with a count of its own that is given another."""
    for name, value in (("loss_sum", loss_sum), ("count", count)):
        if not callable(value):
            raise TypeError(f"{name} must be a function; got {type(value).__name__}")
    own_count = getattr(loss_sum, "count", None)
    if own_count is not None and own_count is not count:
        names = [getattr(function, "__name__", repr(function)) for function in (loss_sum, own_count, count)]
        raise ValueError(f"count must be {names[1]}, which {names[0]} is summed for; got {names[2]}")


def check_items(items: Any, subject: str = "count must return") -> Items:
    """Return a count as a plain number, or a dict of them; refuse what is not finite or below 0."""
    numbers = {}
    for term, number in by_term(items).items():
        try:
            numbers[term] = number.item() if isinstance(number, Tensor) else number
            valid = math.isfinite(numbers[term]) and numbers[term] >= 0
        except (TypeError, ValueError, RuntimeError):
            valid = False
        if not valid:
            raise ValueError(f"{subject} a finite number, 0 or more (or a dict of them); got {items!r}")
    return numbers if isinstance(items, dict) else numbers[None]


def check_micro_batches(micro_batches: Any) -> None:
    """Refuse what is no sequence of micro-batches."""
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        raise TypeError(
            f"micro_batches must be a list, which is counted before it is used; got {type(micro_batches).__name__}. "
            "Cut a batch with split_batch, or wrap a generator in list(...)"
        )
    if len({part.dtype for part in micro_batches if isinstance(part, Tensor)}) > 1:
        raise ValueError(
            "micro_batches must be a list of micro-batches; got tensors of several types, which is one batch "
            "(inputs, targets). Cut it with split_batch, or wrap it in a list"
        )


def check_group(
    model: nn.Module,
    parameters: list[nn.Parameter],
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    count: Count,
    total_count: Items | None,
) -> tuple[Items, list[Items]]:
    """Check the arguments of an accumulation and count the group; return (total, items of each micro-batch)."""
    check_trainable(parameters)
    check_micro_batches(micro_batches)
    check_loss(loss_sum, count)
    items = [check_items(count(micro_batch)) for micro_batch in micro_batches]
    own_total = total = add_items(items)
    if total_count is not None:
        total = check_items(total_count, "total_count must be")
        here, everywhere = by_term(own_total) if items else {}, by_term(total)
        if items and here.keys() != everywhere.keys():
            raise ValueError(
                f"total_count must have the terms that count returns; got {total_count!r} for {own_total!r}"
            )
        if any(everywhere[term] < here[term] * (1 - 1e-12) for term in here):  # a sum of weights may be rounded
            raise ValueError(f"total_count must be at least this group's own count {own_total!r}; got {total_count!r}")
    probe_for_mean(model, micro_batches, items, loss_sum, count)
    return total, items


def check_contrastive(
    model: Any, micro_batches: Any, encode: Any, group_loss: Any, scaler: Any, sum_dtype: Any
) -> list[nn.Parameter]:
    """Check the arguments of an accumulation with a loss across the group; return the model's parameters."""
    parameters = check_model(model)
    check_trainable(parameters)
    check_micro_batches(micro_batches)
    if len(micro_batches) == 0:
        raise ValueError("micro_batches must hold at least one micro-batch; got none")
    for name, value in (("encode", encode), ("group_loss", group_loss)):
        if not callable(value):
            raise TypeError(f"{name} must be a function; got {type(value).__name__}")
    check_scaler(scaler, parameters)
    check_sum_dtype(sum_dtype)
    return parameters


def check_step(
    parameters: list[nn.Parameter], optimizer: Optimizer, max_grad_norm: float | None, scaler: Any, scheduler: Any
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Check the arguments of a step; return the model's parameters with what else the optimizer holds, and the latter.

    The optimizer's come as a list of its own: norm and clipping are theirs.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if needs_closure(type(optimizer)):  # LBFGS, for one
        raise ValueError(
            f"optimizer {type(optimizer).__name__} needs a closure that runs the model; it cannot take one gradient"
        )
    optimized = parameters_of(optimizer)
    own = set(map(id, parameters))
    if not any(id(parameter) in own and parameter.requires_grad for parameter in optimized):
        raise ValueError(
            "optimizer holds none of model's trainable parameters; build it from model.parameters() of this very model"
        )
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be a number above 0, or None; got {max_grad_norm!r}")
    check_scaler(scaler, optimized)
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must be a learning-rate scheduler; got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("scheduler ReduceLROnPlateau needs a metric; step it yourself, after an evaluation")
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if getattr(scheduled, "param_groups", None) is not optimizer.param_groups:
        raise ValueError("scheduler belongs to another optimizer; build it from the one that is given here")
    return parameters + [parameter for parameter in optimized if id(parameter) not in own], optimized


@cache
def needs_closure(optimizer_class: type) -> bool:
    """Say whether the step of an optimizer runs the model itself, several times."""
    step = getattr(optimizer_class, "step", None)
    closure = None if step is None else inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_tried: set[Any] = set()  # what was probed and not refused; a loop does not probe it again


def identity(value: Any, depth: int = 5) -> Any:
    """Say what tells one loss from another: its code, and the settings and functions it carries. No data is held.

    A lambda, a partial or a bound method is a new object each time round a loop; its identity is the same.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if inspect.isfunction(value):
        # An empty cell compares equal to a new one, and with any other contents are not looked at.
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        used = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        own = [part for part in used if isinstance(part, str | bool) or inspect.isfunction(part)]
        kind = value.__code__
        parts = [*cells, *own, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif inspect.ismethod(value):
        kind, parts = "method", [value.__self__, value.__func__]
    elif isinstance(value, partial):
        kind, parts = "partial", [value.func, *value.args, *value.keywords, *value.keywords.values()]
    else:
        settings = getattr(value, "__dict__", {}).values()
        kind, parts = type(value), [setting for setting in settings if isinstance(setting, str | bool | nn.Module)]
    return (kind, *(identity(part, depth - 1) for part in parts)) if depth else kind


# Working out an identity takes longer than a small model's backward pass. So for plain functions, the usual case, what
# it was made from is kept and only compared: the functions that one names, and what their names stood for.
_last_tried: dict[tuple[int, int], tuple[list[FunctionType], list[int]]] = {}


def plain_functions(value: Any, found: list[FunctionType] | None = None) -> list[FunctionType] | None:
    """List a function and those that it names, all the way down; None where one carries settings or data of its own."""
    found = [] if found is None else found
    if not inspect.isfunction(value) or value.__closure__ or value.__defaults__ or value.__kwdefaults__:
        return None
    if value not in found:
        found.append(value)
        named = (value.__globals__.get(name) for name in names_in(value))
        if any(inspect.isfunction(one) and plain_functions(one, found) is None for one in named):
            return None
    return found


def names_in(function: FunctionType) -> tuple[str, ...]:
    """List the names that a function uses; none for a function of this package, which stays what it is."""
    return () if function.__module__.startswith("course_lib.") else function.__code__.co_names


def names_stand_for(functions: list[FunctionType]) -> list[int]:
    """List the identity of each function's code and of what each name in it stands for now."""
    return [
        id(one)
        for function in functions
        for one in (function.__code__, *map(function.__globals__.get, names_in(function)))
    ]


def remember_tried(loss_sum: LossSum, count: Count) -> None:
    """Note what a pair of plain functions that was not refused is made of; of others nothing is noted."""
    parts = plain_functions(loss_sum), plain_functions(count)
    if None not in parts:
        functions = [one for part in parts for one in part]
        _last_tried.clear()  # a loop uses one pair; so the notes cannot grow, and hold one pair's code alone
        _last_tried[id(loss_sum), id(count)] = (functions, names_stand_for(functions))


def unchanged_since_tried(loss_sum: LossSum, count: Count) -> bool:
    """Say whether this is the pair of plain functions that was tried last, with nothing changed that it names."""
    if (noted := _last_tried.get((id(loss_sum), id(count)))) is None:
        return False
    functions, stood_for = noted
    return bool(_tried) and names_stand_for(functions) == stood_for


def probe_for_mean(
    model: nn.Module, micro_batches: Sequence[Batch], items: list[Items], loss_sum: LossSum, count: Count
) -> None:
    """Raise ValueError when `loss_sum` returns a mean: when a sample given twice has the loss of the sample given once.

    One sample and its double are run once per loss function, in evaluation mode, without gradients. Where that tells
    nothing (a loss of 0, a batch of another structure, a loss that looks across samples), nothing is said.
    """
    if unchanged_since_tried(loss_sum, count):
        return
    key = identity(loss_sum), identity(count)
    with_items = [micro_batch for micro_batch, number in zip(micro_batches, items, strict=True) if has_items(number)]
    if not with_items:
        return
    if key in _tried:
        remember_tried(loss_sum, count)
        return
    model = getattr(model, "_orig_mod", model)  # a compiled model would compile again for each size
    seen = []
    # Outside of what watches the update: a budget or a meter that counted these two samples would count too much.
    # Whatever goes wrong here comes up again, with its own message, in the pass itself.
    with suppress(Exception), _disable_current_modes():
        once = next(sample for sample in split_batch(with_items[0], 1) if has_items(check_items(count(sample))))
        twice = concatenate_batches([once, once])
        with evaluation(model):
            losses = [by_term(loss_sum(model, sample)) for sample in (once, twice)]
        counts = [by_term(check_items(count(sample))) for sample in (once, twice)]
        seen = [tuple(float(part[term]) for part in counts + losses) for term in counts[0]]
    for count_once, count_twice, loss_once, loss_twice in seen:
        doubled = count_twice == 2 * count_once > 0
        informative = math.isfinite(loss_once) and loss_once != 0
        if doubled and informative and math.isclose(loss_twice, loss_once, rel_tol=1e-2):
            raise ValueError(
                f"loss_sum must return the SUM of the item losses; it returned {loss_once:.6g} for one sample and "
                f"{loss_twice:.6g} for it twice, as a mean does. Use reduction='sum'; the division is done here"
            )
    _tried.add(key)
    remember_tried(loss_sum, count)


def by_term(value: Any) -> dict[str | None, Any]:
    """Treat a single number as one term without a name."""
    return value if isinstance(value, dict) else {None: value}
