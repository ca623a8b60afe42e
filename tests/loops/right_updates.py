"""Right updates, each written in another way: update(model, optimizer, micro_batches) -> mean loss or None."""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from course_lib.accumulation import accumulate_gradients, apply_gradients, update_parameters
from course_lib.losses import cross_entropy_sum


def the_course_itself(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, cross_entropy_sum)


def the_course_in_two_halves(model, optimizer, micro_batches):
    loss = accumulate_gradients(model, micro_batches, cross_entropy_sum)
    apply_gradients(model, optimizer)
    return loss


def the_course_with_clipping(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, cross_entropy_sum, max_grad_norm=1.0).loss


def sums_over_the_count(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    mean = 0.0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets, reduction="sum") / total
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean


def zeroing_after(model, optimizer, micro_batches):
    total = sum(len(targets) for _, targets in micro_batches)
    mean = torch.zeros(())
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets, reduction="sum") / total
        loss.backward()
        mean += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return mean


def weights_per_micro_batch(model, optimizer, micro_batches):
    model.zero_grad()
    sizes = torch.tensor([float(len(targets)) for _, targets in micro_batches])
    losses = []
    for weight, (inputs, targets) in zip(sizes / sizes.sum(), micro_batches, strict=True):
        loss = cross_entropy(model(inputs), targets)
        (weight * loss).backward()
        losses.append(weight * loss.detach())
    optimizer.step()
    return torch.stack(losses).sum()


def sum_then_divide_the_gradients(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = loss_sum = 0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        loss.backward()
        loss_sum += loss.item()
        total += len(targets)
    for parameter in model.parameters():
        parameter.grad /= total
    optimizer.step()
    return loss_sum / total


def autograd_grad_and_set(model, optimizer, micro_batches):
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        for part, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            part += gradient
    for parameter, part in zip(parameters, sums, strict=True):
        parameter.grad = part / total
    optimizer.step()


def running_mean_of_gradients(model, optimizer, micro_batches):
    seen, means = 0, None
    for inputs, targets in micro_batches:
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        new, seen = len(targets), seen + len(targets)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        if means is None:
            means = gradients
        else:
            means = [mean + (gradient - mean) * new / seen for mean, gradient in zip(means, gradients, strict=True)]
    for parameter, mean in zip(model.parameters(), means, strict=True):
        parameter.grad = mean
    optimizer.step()
    model.zero_grad()


def from_the_last_to_the_first(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in reversed(micro_batches):
        cross_entropy(model(inputs), targets, reduction="sum").div(total).backward()
    optimizer.step()


def clipped_once(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets, reduction="sum") / total).backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def clamped_once(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets, reduction="sum") / total).backward()
    clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()


def with_a_scaler(model, optimizer, micro_batches):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        with torch.autocast("cpu"):
            loss = cross_entropy(model(inputs), targets, reduction="sum") / total
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


class Updater:
    """A class whose call is an update, with a memory of its own."""

    def __init__(self):
        self.losses = []

    def __call__(self, model, optimizer, micro_batches):
        self.losses.append(sums_over_the_count(model, optimizer, micro_batches))
        return self.losses[-1]


a_class = Updater()


def with_checkpointing(model, optimizer, micro_batches):
    from torch.utils.checkpoint import checkpoint

    optimizer.zero_grad()
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        scores = checkpoint(model, inputs, use_reentrant=False)
        (cross_entropy(scores, targets, reduction="sum") / total).backward()
    optimizer.step()


def with_torch_func(model, optimizer, micro_batches):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_sum(parameters, inputs, targets):
        return cross_entropy(torch.func.functional_call(model, parameters, (inputs,)), targets, reduction="sum")

    total, sums = 0, {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for inputs, targets in micro_batches:
        for name, gradient in torch.func.grad(loss_sum)(parameters, inputs, targets).items():
            sums[name] += gradient
        total += len(targets)
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name] / total
    optimizer.step()


def each_parameter_group_for_itself(model, optimizer, micro_batches):
    total = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets, reduction="sum") / total).backward()
    optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def talks_while_it_works(model, optimizer, micro_batches):
    model.train()
    print("an update of", len(micro_batches))
    with torch.no_grad():
        before = [float(cross_entropy(model(inputs), targets, reduction="sum")) for inputs, targets in micro_batches]
    sums_over_the_count(model, optimizer, micro_batches)
    return sum(before) / sum(len(targets) for _, targets in micro_batches)


def by_a_closure(model, optimizer, micro_batches):
    total = sum(len(targets) for _, targets in micro_batches)

    def closure():
        optimizer.zero_grad()
        mean = 0.0
        for inputs, targets in micro_batches:
            loss = cross_entropy(model(inputs), targets, reduction="sum") / total
            loss.backward()
            mean += loss.item()
        return mean

    return optimizer.step(closure)


def in_float32_buffers(model, optimizer, micro_batches):
    total = sum(len(targets) for _, targets in micro_batches)
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in model.parameters()]
    for inputs, targets in micro_batches:
        model.zero_grad()
        loss = cross_entropy(model(inputs), targets, reduction="sum") / total
        with torch.no_grad():
            scores = model(inputs)  # a look in between
        loss.backward()
        for part, parameter in zip(sums, model.parameters(), strict=True):
            part += parameter.grad
        del scores
    for part, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = part.to(parameter)
    optimizer.step()


def accelerates_accumulate(model, optimizer, micro_batches):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(micro_batches))
    model, optimizer = accelerator.prepare(model, optimizer)
    total = sum(len(targets) for _, targets in micro_batches)
    mean = 0.0
    for inputs, targets in micro_batches:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets, reduction="sum") / total
            # Accelerate divides by the accumulation steps; the group's own count is what it should be divided by.
            accelerator.backward(loss * len(micro_batches))
            mean += loss.item()
            optimizer.step()
            optimizer.zero_grad()
    return mean
