"""Wrong updates, each with the codes that an audit must report, the main one first."""

import random

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

WRONG = {}  # name -> (function, codes)


def fault(*codes):
    """Say which codes an audit of this loop reports at least; the first is its main one."""

    def note(function):
        WRONG[function.__name__] = (function, codes)
        return function

    return note


def total_of(micro_batches):
    return sum(len(targets) for _, targets in micro_batches)


def share_of(model, micro_batch, total):
    inputs, targets = micro_batch
    return cross_entropy(model(inputs), targets, reduction="sum") / total


def accumulate(model, micro_batches):
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        share_of(model, micro_batch, total).backward()


@fault("not-divided")
def means_without_division(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
    optimizer.step()


@fault("not-divided")
def sums_without_division(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets, reduction="sum").backward()
    optimizer.step()


@fault("not-divided")
def sums_divided_by_micro_batches(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets, reduction="sum") / len(micro_batches)).backward()
    optimizer.step()


@fault("not-divided")
def not_divided_and_clipped(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@fault("divided-twice")
def mean_divided_by_k_again(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        (share_of(model, micro_batch, total) / len(micro_batches)).backward()
    optimizer.step()


@fault("divided-twice")
def loss_and_gradient_divided(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    for parameter in model.parameters():
        parameter.grad /= len(micro_batches)
    optimizer.step()


@fault("divided-twice")
def gradient_divided_each_time(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            parameter.grad /= len(micro_batches)
    optimizer.step()


@fault("mean-of-means")
def means_over_k(model, optimizer, micro_batches):
    optimizer.zero_grad()
    losses = []
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets) / len(micro_batches)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses)


@fault("tail-misweighted")
def divided_by_a_fixed_four(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / 4).backward()
    optimizer.step()


@fault("tail-misweighted")
def divided_by_a_nominal_size(model, optimizer, micro_batches):
    optimizer.zero_grad()
    nominal = len(micro_batches) * len(micro_batches[0][1])
    for micro_batch in micro_batches:
        share_of(model, micro_batch, nominal).backward()
    optimizer.step()


@fault("zeroed-inside")
def zeroed_before_each_backward(model, optimizer, micro_batches):
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        optimizer.zero_grad()
        share_of(model, micro_batch, total).backward()
    optimizer.step()


@fault("zeroed-inside")
def zeroed_in_place_by_hand(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for number, micro_batch in enumerate(micro_batches):
        share_of(model, micro_batch, total).backward()
        if number == 0 and len(micro_batches) > 1:
            for parameter in model.parameters():
                parameter.grad.zero_()
    optimizer.step()


@fault("zeroed-inside")
def zeroed_before_the_step(model, optimizer, micro_batches):
    accumulate(model, micro_batches)
    optimizer.zero_grad()
    optimizer.step()


@fault("never-zeroed")
def never_zeroed(model, optimizer, micro_batches):
    accumulate(model, micro_batches)
    optimizer.step()


@fault("never-zeroed")
def another_model_zeroed(model, optimizer, micro_batches):
    accumulate(model, micro_batches)
    optimizer.step()
    torch.nn.Linear(1, 1).zero_grad()


@fault("stepped-inside", "zeroed-inside")
def a_step_for_each(model, optimizer, micro_batches):
    for inputs, targets in micro_batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


@fault("stepped-inside")
def a_step_for_each_share(model, optimizer, micro_batches):
    total = total_of(micro_batches)
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        share_of(model, micro_batch, total).backward()
        optimizer.step()


@fault("stepped-inside")
def steps_in_backward(model, optimizer, micro_batches):
    total = total_of(micro_batches)

    def step(parameter):
        with torch.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    for micro_batch in micro_batches:
        share_of(model, micro_batch, total).backward()
    for hook in hooks:
        hook.remove()


@fault("never-stepped")
def no_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)


@fault("never-stepped")
def descends_by_hand(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad


@fault("stepped-before-backward")
def step_comes_first(model, optimizer, micro_batches):
    optimizer.step()
    optimizer.zero_grad()
    accumulate(model, micro_batches)


@fault("stepped-before-backward")
def step_before_the_last_backward(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss = share_of(model, micro_batch, total)
        if number == len(micro_batches):
            optimizer.step()
        loss.backward()


@fault("clipped-inside")
def clipped_after_each_backward(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        share_of(model, micro_batch, total).backward()
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@fault("clipped-inside")
def each_gradient_clipped_then_added(model, optimizer, micro_batches):
    parameters, total = list(model.parameters()), total_of(micro_batches)
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for micro_batch in micro_batches:
        gradients = torch.autograd.grad(share_of(model, micro_batch, total), parameters)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for part, gradient in zip(sums, gradients, strict=True):
            part += gradient * min(1.0, 0.1 / float(norm))
    for parameter, part in zip(parameters, sums, strict=True):
        parameter.grad = part
    optimizer.step()


@fault("clipped-before-dividing")
def clipped_then_divided(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        (share_of(model, micro_batch, total) * len(micro_batches)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad /= len(micro_batches)
    optimizer.step()


@fault("clipped-before-dividing")
def clipped_sum_over_samples(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets, reduction="sum").backward()
    clip_grad_norm_(model.parameters(), 5.0)
    for parameter in model.parameters():
        parameter.grad /= total_of(micro_batches)
    optimizer.step()


@fault("decayed-inside")
def decayed_for_each(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 1e-3)
        share_of(model, micro_batch, total).backward()
    optimizer.step()


@fault("decayed-inside")
def penalty_for_each(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (share_of(model, micro_batch, total) + 1e-3 * penalty).backward()
    optimizer.step()


@fault("last-only")
def backward_after_the_loop(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        loss = share_of(model, micro_batch, total)
    loss.backward()
    optimizer.step()


@fault("last-only")
def mean_of_the_last(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        scores, wanted = model(inputs), targets
    loss = cross_entropy(scores, wanted)
    loss.backward()
    optimizer.step()
    return loss.item()


@fault("samples-dropped")
def without_the_last(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches[:-1] or micro_batches)
    optimizer.step()


@fault("samples-dropped")
def returns_in_the_loop(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()


@fault("samples-dropped")
def cut_to_the_smallest(model, optimizer, micro_batches):
    smallest = min(len(targets) for _, targets in micro_batches)
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs[:smallest]), targets[:smallest]) / len(micro_batches)).backward()
    optimizer.step()


@fault("samples-dropped")
def odd_sizes_skipped(model, optimizer, micro_batches):
    full = [batch for batch in micro_batches if len(batch[1]) == len(micro_batches[0][1])]
    optimizer.zero_grad()
    accumulate(model, full)
    optimizer.step()


@fault("repeated-micro-batch")
def always_the_first(model, optimizer, micro_batches):
    optimizer.zero_grad()
    inputs, targets = micro_batches[0]
    for _ in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()


@fault("repeated-micro-batch")
def the_last_once_more(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    share_of(model, micro_batches[-1], total_of(micro_batches)).backward()
    optimizer.step()


@fault("whole-batch-in-memory")
def all_at_once(model, optimizer, micro_batches):
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()


@fault("one-backward")
def one_backward_for_all(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    loss = sum(share_of(model, micro_batch, total) for micro_batch in micro_batches)
    loss.backward()
    optimizer.step()
    return loss.item()


@fault("one-backward")
def backward_in_a_second_loop(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    losses = [share_of(model, micro_batch, total) for micro_batch in micro_batches]
    for loss in losses:
        loss.backward()
    optimizer.step()


@fault("graph-kept")
def graph_retained(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    losses = []
    for micro_batch in micro_batches:
        loss = share_of(model, micro_batch, total)
        loss.backward(retain_graph=True)
        losses.append(loss)
    optimizer.step()
    return float(sum(losses))


KEPT = []


@fault("graph-kept")
def graphs_for_the_log(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        KEPT.append(share_of(model, micro_batch, total))
        share_of(model, micro_batch, total).backward()
        del KEPT[:-3]
    optimizer.step()


@fault("low-precision-sum")
def summed_in_bfloat16(model, optimizer, micro_batches):
    total, parameters = total_of(micro_batches), list(model.parameters())
    sums = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in parameters]
    for micro_batch in micro_batches:
        for part, gradient in zip(
            sums, torch.autograd.grad(share_of(model, micro_batch, total), parameters), strict=True
        ):
            part += gradient
    for parameter, part in zip(parameters, sums, strict=True):
        parameter.grad = part.double()
    optimizer.step()


@fault("wrong-loss-reported")
def returns_the_last_loss(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        (loss * len(targets) / total).backward()
    optimizer.step()
    return loss.item()


@fault("wrong-loss-reported")
def returns_the_sum(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total, reported = total_of(micro_batches), 0.0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        (loss * len(targets) / total).backward()
        reported += loss.item()
    optimizer.step()
    return reported


@fault("wrong-loss-reported")
def returns_words(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    return "done"


@fault("settings-changed")
def smaller_learning_rate_for_the_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    for group in optimizer.param_groups:
        group["lr"] /= len(micro_batches)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= len(micro_batches)


@fault("not-divided", "settings-changed")
def learning_rate_instead_of_division(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] /= len(micro_batches)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate


@fault("settings-changed")
def left_in_evaluation_mode(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    model.eval()


@fault("settings-changed")
def seeds_the_world(model, optimizer, micro_batches):
    torch.manual_seed(0)
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()


@fault("settings-changed")
def seeds_python(model, optimizer, micro_batches):
    random.seed(0)
    random.random()
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()


@fault("settings-changed")
def empties_the_list(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    while micro_batches:
        share_of(model, micro_batches.pop(0), total).backward()
    optimizer.step()


@fault("settings-changed")
def normalises_in_place(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    for inputs, _ in micro_batches:
        inputs.sub_(inputs.mean())


@fault("no-gradient")
def loss_without_a_graph(model, optimizer, micro_batches):
    optimizer.zero_grad()
    with torch.no_grad():
        accumulate(model, micro_batches)
    optimizer.step()


@fault("no-gradient")
def forgets_backward(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    loss = sum(share_of(model, micro_batch, total).item() for micro_batch in micro_batches)
    optimizer.step()
    return loss


@fault("no-gradient")
def first_layer_frozen(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    next(iter(model.parameters())).grad = None
    optimizer.step()


@fault("wrong-scale")
def a_stray_factor(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    for micro_batch in micro_batches:
        (1.3 * share_of(model, micro_batch, total)).backward()
    optimizer.step()


@fault("wrong-gradient")
def signs_only(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    for parameter in model.parameters():
        parameter.grad.sign_()
    optimizer.step()


@fault("wrong-parameters")
def moves_on_after_the_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3


@fault("wrong-parameters")
def forgets_the_momentum(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    optimizer.state.clear()


# Two faults in one loop.


@fault("zeroed-inside", "wrong-loss-reported")
def zeroed_and_misreported(model, optimizer, micro_batches):
    total, reported = total_of(micro_batches), 0.0
    for inputs, targets in micro_batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        (loss * len(targets) / total).backward()
        reported += loss.item()
    optimizer.step()
    return reported


@fault("never-zeroed", "not-divided")
def never_zeroed_nor_divided(model, optimizer, micro_batches):
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
    optimizer.step()


@fault("never-zeroed", "mean-of-means")
def never_zeroed_mean_of_means(model, optimizer, micro_batches):
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()


@fault("never-zeroed", "settings-changed")
def never_zeroed_left_in_evaluation_mode(model, optimizer, micro_batches):
    accumulate(model, micro_batches)
    optimizer.step()
    model.eval()


@fault("samples-dropped", "not-divided")
def without_the_last_nor_division(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches[:-1] or micro_batches:
        cross_entropy(model(inputs), targets, reduction="sum").backward()
    optimizer.step()


@fault("not-divided", "one-backward")
def one_backward_not_divided(model, optimizer, micro_batches):
    optimizer.zero_grad()
    sum(cross_entropy(model(inputs), targets) for inputs, targets in micro_batches).backward()
    optimizer.step()


@fault("mean-of-means", "one-backward")
def one_backward_mean_of_means(model, optimizer, micro_batches):
    optimizer.zero_grad()
    torch.stack([cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]).mean().backward()
    optimizer.step()


@fault("never-stepped", "not-divided")
def no_step_nor_division(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()


@fault("clipped-before-dividing", "wrong-loss-reported")
def clipped_then_divided_and_misreported(model, optimizer, micro_batches):
    clipped_then_divided(model, optimizer, micro_batches)
    return 0.0


@fault("stepped-inside", "settings-changed")
def steps_inside_and_seeds(model, optimizer, micro_batches):
    torch.manual_seed(0)
    a_step_for_each(model, optimizer, micro_batches)


@fault("mean-of-means", "low-precision-sum")
def means_summed_in_bfloat16(model, optimizer, micro_batches):
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in parameters]
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets) / len(micro_batches)
        for part, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            part += gradient
    for parameter, part in zip(parameters, sums, strict=True):
        parameter.grad = part.double()
    optimizer.step()


@fault("divided-twice", "graph-kept")
def divided_twice_graph_retained(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = total_of(micro_batches)
    losses = []
    for micro_batch in micro_batches:
        losses.append(share_of(model, micro_batch, total) / len(micro_batches))
        losses[-1].backward(retain_graph=True)
    optimizer.step()


# Code that misbehaves. What only a process of its own can stand is in hostile.py.


@fault("raised")
def raises(model, optimizer, micro_batches):
    raise KeyError("there is no such key")


@fault("raised")
def fails_on_the_second_group(model, optimizer, micro_batches):
    if len(micro_batches) > 1:
        raise MemoryError
    accumulate(model, micro_batches)
    optimizer.step()
    optimizer.zero_grad()


@fault("raised")
def recurses(model, optimizer, micro_batches):
    return recurses(model, optimizer, micro_batches)


@fault("raised")
def takes_two_arguments(model, optimizer):
    optimizer.step()


@fault("exited")
def exits(model, optimizer, micro_batches):
    raise SystemExit(0)


@fault("printed-too-much")
def floods(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    print("x" * 200_000)


@fault("wrong-loss-reported")
def returns_what_cannot_be_shown(model, optimizer, micro_batches):
    class Strange:
        def __repr__(self):
            raise ValueError

        def __getattr__(self, name):
            raise RuntimeError

    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    return Strange()


@fault("wrong-loss-reported")
def returns_nan(model, optimizer, micro_batches):
    optimizer.zero_grad()
    accumulate(model, micro_batches)
    optimizer.step()
    return float("nan")


# Found by the grammar of tests/test_audit.py.


@fault("never-zeroed")
def never_zeroed_and_clipped(model, optimizer, micro_batches):
    accumulate(model, micro_batches)
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def add_by_hand(model, loss):
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@fault("zeroed-inside")
def zeroed_inside_and_added_by_hand(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        optimizer.zero_grad()
        add_by_hand(model, share_of(model, micro_batch, total_of(micro_batches)))
    optimizer.step()


@fault("clipped-inside", "not-divided")
def clipped_inside_and_added_by_hand(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        add_by_hand(model, cross_entropy(model(inputs), targets))
        clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
