"""The exercises of notebook 02: write the update, and mend a broken one."""

import torch
from torch.nn.functional import cross_entropy

from course_lib.accumulation import update_parameters
from course_lib.exercises.engine import Exercise, judge_update
from course_lib.losses import cross_entropy_sum

SETUP = "from course_lib.losses import cross_entropy_sum"


def count(micro_batches):
    return sum(len(targets) for _, targets in micro_batches)


def share(model, micro_batch, total):
    return cross_entropy_sum(model, micro_batch) / total


# Right answers, built in different ways.


def with_the_library(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, cross_entropy_sum).loss


def divided_at_the_end(model, optimizer, micro_batches):
    optimizer.zero_grad()
    reported = 0.0
    for micro_batch in micro_batches:
        loss = cross_entropy_sum(model, micro_batch)
        loss.backward()
        reported += loss.item()
    for parameter in model.parameters():
        parameter.grad /= count(micro_batches)
    optimizer.step()
    return reported / count(micro_batches)


def weighted_means(model, optimizer, micro_batches):
    reported = 0.0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets) * (len(targets) / count(micro_batches))
        loss.backward()
        reported += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return reported


# Wrong answers.


def not_divided(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def only_a_sum(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        cross_entropy_sum(model, micro_batch).backward()
    optimizer.step()


def divided_by_64(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        share(model, micro_batch, 64).backward()
    optimizer.step()


def mean_of_means(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()


def divided_twice(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        (share(model, micro_batch, count(micro_batches)) / len(micro_batches)).backward()
    optimizer.step()


def zeroed_inside(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        optimizer.zero_grad()
        share(model, micro_batch, count(micro_batches)).backward()
    optimizer.step()


def never_zeroed(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        share(model, micro_batch, count(micro_batches)).backward()
    optimizer.step()


def stepped_inside(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        share(model, micro_batch, count(micro_batches)).backward()
        optimizer.step()
    optimizer.zero_grad()


def never_stepped(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        share(model, micro_batch, count(micro_batches)).backward()


def backward_outside(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        loss = share(model, micro_batch, count(micro_batches))
    loss.backward()
    optimizer.step()


def one_backward(model, optimizer, micro_batches):
    optimizer.zero_grad()
    sum(share(model, micro_batch, count(micro_batches)) for micro_batch in micro_batches).backward()
    optimizer.step()


def all_at_once(model, optimizer, micro_batches):
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    optimizer.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def returns_the_sum(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, cross_entropy_sum).loss * count(micro_batches)


def zeroed_only(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        optimizer.zero_grad()
        cross_entropy_sum(model, micro_batch).backward()
        optimizer.step()


def with_a_typo(model, optimizer, micro_batches):
    optimizer.zero_gradients()


EXERCISES = [
    Exercise(
        number="02.1",
        title="write the update",
        task="""
Write the six lines yourself, as a function. `micro_batches` is a list of pairs `(inputs, targets)`, of equal sizes or
not. Make one update: the gradient of the mean cross-entropy over all samples of the list, one micro-batch in memory at
a time, one step. Return the mean loss, or nothing.

The check runs your function on lists of one, two, three and five micro-batches, one after the other, with several
optimizers. It says what it saw.
""",
        difficulty=2,
        importance=5,
        minutes=10,
        answer="my_update",
        setup=SETUP,
        stub="""
def my_update(model, optimizer, micro_batches):
    pass  # your loop
""",
        judge=judge_update,
        hints=(
            "Four things happen once per update: count, clear, step, return. Two happen once per micro-batch.",
            "`backward` adds. So clear before the loop (or after the step), and let each micro-batch add "
            "`cross_entropy_sum(model, micro_batch) / total`, where `total` counts the samples of the whole list.",
            "`total = sum(len(targets) for inputs, targets in micro_batches)`; then `optimizer.zero_grad()`; "
            "in the loop the loss and `loss.backward()`; after the loop `optimizer.step()`.",
        ),
        solution="""
def my_update(model, optimizer, micro_batches):
    total = sum(len(targets) for inputs, targets in micro_batches)
    mean = 0.0
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        loss = cross_entropy_sum(model, micro_batch) / total
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean
""",
        closing="It is the full batch's update, for even and uneven micro-batches, with the memory of one.",
        right=(with_the_library, divided_at_the_end, weighted_means),
        wrong={
            "5.00 times": not_divided,
            "10.00 times": only_a_sum,
            "a sum, divided by 64 in every group": divided_by_64,
            "they weigh 0.625, 2.5 times": mean_of_means,
            "0.20 times": divided_twice,
            "cleared between micro-batches": zeroed_inside,
            "update before was still there": never_zeroed,
            "called 5 times for one update": stepped_inside,
            "optimizer.step was not called": never_stepped,
            "one backward pass was made": backward_outside,
            "all micro-batches are in memory together": one_backward,
            "one forward pass saw": all_at_once,
            "the sum over all items": returns_the_sum,
            "AttributeError in line": with_a_typo,
            "It must be a function": 64,
        },
    ),
    Exercise(
        number="02.2",
        title="mend the update",
        task="""
This update runs without an error, and the loss goes down. Two lines of it are wrong. Predict for each what the
gradient at the step looks like, then mend them.
""",
        difficulty=2,
        importance=4,
        minutes=8,
        answer="mended_update",
        setup=SETUP,
        stub="""
def mended_update(model, optimizer, micro_batches):
    total = sum(len(targets) for inputs, targets in micro_batches)
    mean = 0.0
    for micro_batch in micro_batches:
        optimizer.zero_grad()
        loss = cross_entropy_sum(model, micro_batch) / len(micro_batches)
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean
""",
        judge=judge_update,
        hints=(
            "Follow `.grad` of one weight through the loop, by hand, with gradients 1, 2 and 3.",
            "One line runs once per micro-batch and should run once per update. The other divides by a wrong number.",
            "Move `optimizer.zero_grad()` before the loop. A sum over samples is divided by samples: by `total`.",
        ),
        solution="""
def mended_update(model, optimizer, micro_batches):
    total = sum(len(targets) for inputs, targets in micro_batches)
    mean = 0.0
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        loss = cross_entropy_sum(model, micro_batch) / total
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean
""",
        closing="Neither mistake raised an error: only a comparison with the full batch shows them.",
        right=(with_the_library, weighted_means),
        wrong={
            "cleared between micro-batches": zeroed_inside,
            "10.00 times": only_a_sum,
            "5.00 times": not_divided,
            "they weigh 0.625, 2.5 times": mean_of_means,
            "0.20 times": divided_twice,
            "update before was still there": never_zeroed,
            "called 5 times for one update": zeroed_only,
            "optimizer.step was not called": never_stepped,
            "one backward pass was made": backward_outside,
            "the sum over all items": returns_the_sum,
        },
    ),
]
