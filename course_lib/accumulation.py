"""One parameter update from several micro-batches, with the value that the whole batch in one pass would give.

`update_parameters` is one call per update, so a training loop cannot zero, clip, step or divide in the wrong place.
It is made of two halves: `accumulate_gradients` adds up the gradient of the mean loss over a group of micro-batches,
`apply_gradients` takes the step. The short functions first; the checks of their arguments follow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.batches import Batch, concatenate_batches, count_samples, split_batch, tensors_of
from course_lib.losses import Count, LossSum

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
) -> float:
    """Add the gradient of the mean loss over a group of micro-batches to `.grad`, and return that mean.

    micro_batches: a sequence (it is counted before it is used). The activations of one micro-batch are alive at a time.
    loss_sum(model, micro_batch): the SUM of the item losses, a scalar tensor.
    count(micro_batch): how many items that sum has. Both may return a dict of terms with the same keys; each term is
    then divided by its own total.
    scaler: a GradScaler; `.grad` then holds scaled gradients until `apply_gradients` unscales them.
    total_count: the group's count over all processes, where it is larger than this process's. What is returned and
    added is then this process's share: summed over the processes, it is the mean and its gradient.

    A micro-batch without items is passed over. A group without items adds nothing and returns nan.
    `.grad` has the parameter's own precision, and so has the sum over the group: keep parameters in float32 and use
    `torch.autocast` for speed. In bfloat16 parameters many small gradients are lost in a sum.
    Raises TypeError or ValueError for arguments that cannot be right, before anything has changed. A loss that is not
    finite raises ValueError (with a scaler it makes the step skip); then, and after any other error, the model's
    gradients are cleared: a part of a gradient is worth nothing.
    """
    total, items = check_group(model, micro_batches, loss_sum, count, total_count, scaler)
    shares = [torch.zeros(())] * len(items)
    with no_partial_gradients(model, micro_batches):
        for i, micro_batch in enumerate(micro_batches):
            if has_items(items[i]):
                share = divide(loss_sum(model, micro_batch), total)  # what this micro-batch adds to the mean
                with parameters_held_still(model, enabled=len(items) > 1):
                    (share if scaler is None else scaler.scale(share)).backward()  # adds to .grad, frees activations
                shares[i] = share.detach()
        return add_up(shares, model, scaler) if has_items(total) else math.nan


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
    parameters = check_step(model, optimizer, max_grad_norm, scaler, scheduler)
    optimized = parameters_of(optimizer)
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
) -> Update:
    """Make one update of the parameters from a group of micro-batches, as the group in one pass would.

    Arguments as in `accumulate_gradients` and `apply_gradients`. Gradients are None at entry and at exit, also after an
    error. Any error before the step leaves parameters, optimizer, schedule and scale as they were.
    """
    parameters = check_step(model, optimizer, max_grad_norm, scaler, scheduler)
    total, _ = check_group(model, micro_batches, loss_sum, count, None, scaler)
    clear_gradients(parameters)
    try:
        loss = accumulate_gradients(model, micro_batches, loss_sum, count, scaler=scaler)
        if not has_items(total):
            return Update(math.nan, total, None, skipped=True)
        step = apply_gradients(model, optimizer, max_grad_norm=max_grad_norm, scaler=scaler, scheduler=scheduler)
    finally:
        clear_gradients(parameters)
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
    share = sum(losses[term] / totals[term] for term in losses if totals[term] > 0)
    if with_gradient and not share.requires_grad:
        why = "it depends on no trainable parameter of model" if torch.is_grad_enabled() else "this is inside no_grad"
        raise ValueError(f"loss_sum returned a loss without a gradient: {why}")
    return share


def add_up(shares: Sequence[Tensor], model: nn.Module, scaler: torch.amp.GradScaler | None) -> float:
    """Add the shares up to the mean loss. One that is not finite is an error, or under a scaler an overflow."""
    # Read here, once per group: reading each as it comes would make a GPU wait K times per update.
    values = [float(share) for share in shares]
    bad = [
        f"{value} in micro-batch {i} of {len(values)}" for i, value in enumerate(values, 1) if not math.isfinite(value)
    ]
    if bad and not is_scaling(scaler):
        raise ValueError(
            f"loss_sum must be finite; it was {', '.join(bad)}. The gradients are cleared, nothing has moved"
        )
    if bad:  # a loss can overflow where no gradient does; the scaler looks at gradients, and skips this step as well
        for parameter in model.parameters():
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


# What surrounds the work.


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


@contextmanager
def parameters_held_still(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Refuse a backward pass that moves parameters: an optimizer that steps inside it has used a part as the whole."""
    if not enabled:
        yield
        return
    versions = [parameter._version for parameter in model.parameters()]
    yield
    moved = versions != [parameter._version for parameter in model.parameters()]
    if moved or all(parameter.grad is None for parameter in model.parameters()):  # a hook has used and cleared them
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


def check_model(model: Any) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")


def check_scaler(scaler: Any) -> None:
    """Refuse what can't scale, unscale, step and update."""
    names = ("scale", "unscale_", "step", "update", "get_scale", "is_enabled")
    if scaler is not None and not all(hasattr(scaler, name) for name in names):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, or None; got {type(scaler).__name__}")


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


def check_group(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    loss_sum: LossSum,
    count: Count,
    total_count: Items | None,
    scaler: Any,
) -> tuple[Items, list[Items]]:
    """Check the arguments of an accumulation and count the group; return (total, items of each micro-batch)."""
    check_model(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no trainable parameters; at least one must have requires_grad=True")
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
    check_loss(loss_sum, count)
    check_scaler(scaler)
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


def check_step(
    model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None, scaler: Any, scheduler: Any
) -> list[nn.Parameter]:
    """Check the arguments of a step; return the model's parameters and what else the optimizer holds."""
    check_model(model)
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:  # LBFGS, for one
        raise ValueError(
            f"optimizer {type(optimizer).__name__} needs a closure that runs the model; it cannot take one gradient"
        )
    parameters, optimized = list(model.parameters()), parameters_of(optimizer)
    own = set(map(id, parameters))
    if not any(id(parameter) in own and parameter.requires_grad for parameter in optimized):
        raise ValueError(
            "optimizer holds none of model's trainable parameters; build it from model.parameters() of this very model"
        )
    is_number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if max_grad_norm is not None and not (is_number and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm must be a number above 0, or None; got {max_grad_norm!r}")
    check_scaler(scaler)
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must be a learning-rate scheduler; got {type(scheduler).__name__}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("scheduler ReduceLROnPlateau needs a metric; step it yourself, after an evaluation")
    scheduled = getattr(scheduler, "optimizer", optimizer)
    if getattr(scheduled, "param_groups", None) is not optimizer.param_groups:
        raise ValueError("scheduler belongs to another optimizer; build it from the one that is given here")
    return parameters + [parameter for parameter in optimized if id(parameter) not in own]


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


def probe_for_mean(
    model: nn.Module, micro_batches: Sequence[Batch], items: list[Items], loss_sum: LossSum, count: Count
) -> None:
    """Raise ValueError when `loss_sum` returns a mean: when a sample given twice has the loss of the sample given once.

    One sample and its double are run once per loss function, in evaluation mode, without gradients. Where that tells
    nothing (a loss of 0, a batch of another structure, a loss that looks across samples), nothing is said.
    """
    key = identity(loss_sum), identity(count)
    with_items = [micro_batch for micro_batch, number in zip(micro_batches, items, strict=True) if has_items(number)]
    if not with_items or key in _tried:
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


def by_term(value: Any) -> dict[str | None, Any]:
    """Treat a single number as one term without a name."""
    return value if isinstance(value, dict) else {None: value}
