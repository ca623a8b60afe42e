"""Loops over an epoch, right and wrong: train(model, optimizer, loader, accumulation_steps[, scheduler])."""

from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

from course_lib.batches import group_micro_batches
from course_lib.losses import cross_entropy_sum
from course_lib.training import train
from tests.loops.wrong_updates import share_of, total_of

RIGHT, WRONG = {}, {}  # name -> function; name -> (function, codes)


def right(function):
    RIGHT[function.__name__] = function
    return function


def fault(*codes):
    def note(function):
        WRONG[function.__name__] = (function, codes)
        return function

    return note


@right
def the_course_itself(model, optimizer, loader, accumulation_steps, scheduler):
    groups = group_micro_batches(loader, accumulation_steps)
    return train(model, optimizer, groups, cross_entropy_sum, scheduler=scheduler, max_grad_norm=5.0)


@right
def groups_of_its_own(model, optimizer, loader, accumulation_steps):
    everything = list(loader)
    for start in range(0, len(everything), accumulation_steps):
        group = everything[start : start + accumulation_steps]
        optimizer.zero_grad()
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
        optimizer.step()


@right
def flushed_by_dividing_the_gradient(model, optimizer, loader, accumulation_steps):
    schedule = StepLR(optimizer, step_size=1, gamma=0.99)
    seen = 0
    for i, (inputs, targets) in enumerate(loader, start=1):
        cross_entropy(model(inputs), targets, reduction="sum").backward()
        seen += len(targets)
        if i % accumulation_steps == 0 or i == len(loader):
            for parameter in model.parameters():
                parameter.grad /= seen
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            seen = 0


@right
def schedule_once_per_epoch(model, optimizer, loader, accumulation_steps, scheduler):
    groups_of_its_own(model, optimizer, loader, accumulation_steps)
    scheduler.step()


def usual(model, optimizer, loader, accumulation_steps, *, boundary, flush=False, clear=False, own_size=False):
    """The usual loop, with the number of micro-batches as the divisor of means, or their samples."""
    group = []
    for i, micro_batch in enumerate(loader):
        group.append(micro_batch)
        inputs, targets = micro_batch
        cross_entropy(model(inputs), targets, reduction="sum").backward()
        if boundary(i) or (flush and i + 1 == len(loader)):
            divisor = total_of(group) if own_size else accumulation_steps * len(group[0][1])
            for parameter in model.parameters():
                parameter.grad /= divisor
            optimizer.step()
            optimizer.zero_grad()
            group = []
    if clear:
        optimizer.zero_grad()


@fault("tail-leaked")
def leaks(model, optimizer, loader, accumulation_steps):
    usual(
        model,
        optimizer,
        loader,
        accumulation_steps,
        boundary=lambda i: (i + 1) % accumulation_steps == 0,
        own_size=True,
    )


@fault("tail-leaked")
def leaks_as_in_tutorials(model, optimizer, loader, accumulation_steps):
    for i, (inputs, targets) in enumerate(loader):
        (cross_entropy(model(inputs), targets) / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


@fault("tail-dropped")
def drops(model, optimizer, loader, accumulation_steps):
    usual(
        model,
        optimizer,
        loader,
        accumulation_steps,
        boundary=lambda i: (i + 1) % accumulation_steps == 0,
        clear=True,
        own_size=True,
    )


@fault("tail-dropped")
def stops_before_the_tail(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        if len(group) < accumulation_steps:
            break
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault("tail-misweighted")
def flushes_divided_by_the_full_k(model, optimizer, loader, accumulation_steps):
    for i, (inputs, targets) in enumerate(loader):
        (cross_entropy(model(inputs), targets) / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


@fault("tail-misweighted")
def flushes_divided_by_the_nominal_size(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            share_of(model, micro_batch, accumulation_steps * loader.batch_size).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault("mean-of-means")
def divides_by_the_group(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for inputs, targets in group:
            (cross_entropy(model(inputs), targets) / len(group)).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault("wrong-boundary")
def steps_on_the_first(model, optimizer, loader, accumulation_steps):
    usual(
        model,
        optimizer,
        loader,
        accumulation_steps,
        boundary=lambda i: i % accumulation_steps == 0,
        flush=True,
        own_size=True,
    )


@fault("wrong-boundary")
def joins_the_tail(model, optimizer, loader, accumulation_steps):
    last = len(loader) // accumulation_steps * accumulation_steps
    usual(
        model,
        optimizer,
        loader,
        accumulation_steps,
        boundary=lambda i: (i + 1) % accumulation_steps == 0 and i + 1 != last,
        flush=True,
        own_size=True,
    )


@fault("stepped-inside")
def steps_every_time(model, optimizer, loader, accumulation_steps):
    usual(model, optimizer, loader, accumulation_steps, boundary=lambda i: True, own_size=True)


@fault("never-stepped")
def never_steps(model, optimizer, loader, accumulation_steps):
    usual(model, optimizer, loader, accumulation_steps, boundary=lambda i: False)


@fault("schedule-per-micro-batch")
def schedule_every_time(model, optimizer, loader, accumulation_steps, scheduler):
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
            scheduler.step()
        optimizer.step()
        optimizer.zero_grad()


@fault("schedule-per-micro-batch")
def own_schedule_every_time(model, optimizer, loader, accumulation_steps):
    schedule = StepLR(optimizer, step_size=10, gamma=0.5)
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


@fault("not-divided")
def never_divides(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for inputs, targets in group:
            cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault("zeroed-inside")
def zeroes_every_time(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            optimizer.zero_grad()
            share_of(model, micro_batch, total_of(group)).backward()
        optimizer.step()


@fault("never-zeroed")
def never_zeroes(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
        optimizer.step()


@fault("clipped-inside")
def clips_every_time(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@fault("tail-leaked", "schedule-per-micro-batch")
def leaks_and_schedules_every_time(model, optimizer, loader, accumulation_steps, scheduler):
    for i, (inputs, targets) in enumerate(loader):
        (cross_entropy(model(inputs), targets) / accumulation_steps).backward()
        scheduler.step()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


@fault("tail-dropped", "not-divided")
def drops_and_never_divides(model, optimizer, loader, accumulation_steps):
    for i, (inputs, targets) in enumerate(loader):
        cross_entropy(model(inputs), targets).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()


@fault("raised")
def fails_at_the_tail(model, optimizer, loader, accumulation_steps):
    for group in group_micro_batches(loader, accumulation_steps):
        assert len(group) == accumulation_steps
        for micro_batch in group:
            share_of(model, micro_batch, total_of(group)).backward()
        optimizer.step()
        optimizer.zero_grad()


@fault("settings-changed")
def leaves_evaluation_mode_behind(model, optimizer, loader, accumulation_steps):
    groups_of_its_own(model, optimizer, loader, accumulation_steps)
    model.eval()
