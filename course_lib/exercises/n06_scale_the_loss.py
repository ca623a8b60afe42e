"""The exercises of notebook 06: a loop under a library that divides already, and what an undivided run amounts to."""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from course_lib.audit.problems import Probe, sample_group
from course_lib.exercises.engine import Exercise, expect, judge_update, run_answer
from course_lib.losses import cross_entropy_sum

# ---- 06.1: divided by the library already ----------------------------------------------------------------------------


class Library:
    """What a library gives the loop: a backward that divides by the accumulation steps. Counts its calls."""

    def __init__(self, accumulation_steps: int):
        self.accumulation_steps, self.calls = accumulation_steps, 0

    def backward(self, loss):
        self.calls += 1
        (loss / self.accumulation_steps).backward()


def judge_library_update(function) -> str | None:
    """Audit the update on groups of equal micro-batches; the library's backward must be what goes backward."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    missing = []

    def update(model, optimizer, micro_batches):
        library = Library(len(micro_batches))
        returned = function(model, optimizer, micro_batches, library.backward)
        if not library.calls:
            missing.append(len(micro_batches))
        return returned

    message = judge_update(
        update,
        model=Probe(1.0, seed=1),
        micro_batches=sample_group([4, 4, 4, 4], seed=5),
        loss_sum=cross_entropy_sum,
    )
    if missing and (message is None or "no-gradient" not in message):
        steps = max(missing)
        return f"The library's backward was not called for {steps} micro-batches. Without it nobody scales or records."
    return message


def mean_to_backward(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    losses = []
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        backward(loss)
        losses.append(loss.item())
    optimizer.step()
    return sum(losses) / len(losses)


def sum_over_count(model, optimizer, micro_batches, backward):
    total = sum(len(targets) for _, targets in micro_batches)
    mean = 0.0
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        share = cross_entropy_sum(model, micro_batch) / total
        backward(share * len(micro_batches))
        mean += share.item()
    optimizer.step()
    return mean


def reports_nothing(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        backward(cross_entropy(model(inputs), targets))
    optimizer.step()


def with_a_loop(to_backward=lambda loss, steps: loss, reported=lambda losses: sum(losses) / len(losses)):
    """Make an update from what goes to the library's backward, and what is reported of the means."""

    def update(model, optimizer, micro_batches, backward):
        optimizer.zero_grad()
        losses = []
        for inputs, targets in micro_batches:
            loss = cross_entropy(model(inputs), targets)
            backward(to_backward(loss, len(micro_batches)))
            losses.append(loss.item())
        optimizer.step()
        return reported(losses)

    return update


def around_the_library(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    losses = []
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        (loss / len(micro_batches)).backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses) / len(losses)


def sums_to_backward(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        backward(cross_entropy_sum(model, micro_batch))
    optimizer.step()


def backward_after_the_loop(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
    backward(loss)
    optimizer.step()


def zeroed_inside(model, optimizer, micro_batches, backward):
    for inputs, targets in micro_batches:
        optimizer.zero_grad()
        backward(cross_entropy(model(inputs), targets))
    optimizer.step()


def stepped_inside(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        backward(cross_entropy(model(inputs), targets))
        optimizer.step()


def summed_before_backward(model, optimizer, micro_batches, backward):
    optimizer.zero_grad()
    losses = [cross_entropy(model(inputs), targets) for inputs, targets in micro_batches]
    backward(sum(losses))
    optimizer.step()


# ---- 06.2: the settings of an undivided run --------------------------------------------------------------------------

CASES = (  # lr, max_norm, weight_decay, accumulation_steps
    (0.1, 1.0, 0.1, 4),
    (0.02, 0.5, 0.05, 8),
    (0.3, 2.0, 0.2, 2),
    (0.05, 1.0, 0.01, 1),
)
OFF = {"max_norm": math.inf, "weight_decay": 0.0}
SAMPLES = 48


def train(divided: bool, steps: int, lr: float, max_norm: float, weight_decay: float, scale: float) -> torch.Tensor:
    """Return the way of the weights over five updates of SGD on a quadratic loss, whose gradient has a scale."""
    generator = torch.Generator().manual_seed(steps)
    inputs = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(SAMPLES, generator=generator, dtype=torch.float64) + 2
    weight = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=lr, weight_decay=weight_decay)
    way = [weight.detach().clone()]
    for _ in range(5):
        for x, y in zip(inputs.chunk(steps), targets.chunk(steps), strict=True):
            loss = scale * (x @ weight - y).square().mean()
            (loss / steps if divided else loss).backward()
        if max_norm < math.inf:
            clip_grad_norm_([weight], max_norm)
        optimizer.step()
        optimizer.zero_grad()
        way.append(weight.detach().clone())
    return torch.stack(way)


def same_way(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two ways of the weights; wide, because clipping adds 1e-6 to the norm before it divides."""
    return bool((one - other).norm() <= 1e-4 * (one - one[0]).norm())


# What is tried: with which of the settings in force, and with gradients of which scale.
TRIALS = (
    ("without clipping and decay", ("max_norm", "weight_decay"), 0.05),
    ("with clipping and no decay", ("weight_decay",), 0.15),
    ("with clipping and no decay, and long gradients", ("weight_decay",), 5.0),
    ("with decay and no clipping", ("max_norm",), 0.05),
    ("with clipping and decay", (), 0.15),
)


def judge_settings(function) -> str | None:
    """Train with the undivided loop and its settings, and with the divided loop and the returned ones."""
    answers = []
    for case in CASES:
        found = run_answer(function, *case)
        given = "For lr {:g}, max_norm {:g}, weight_decay {:g} and K = {}".format(*case)
        expect(found is not None, f"{given} it returned nothing; is there a return?")
        try:
            lr, max_norm, weight_decay = (float(value) for value in found)
        except (TypeError, ValueError):
            return f"{given} it must return three numbers, lr, max_norm and weight_decay; it returned {found!r}."
        expect(lr >= 0 and weight_decay >= 0, f"{given} it returned a setting below 0: {found!r}.")
        expect(max_norm > 0, f"{given} it returned max_norm {max_norm:g}, which clips everything to nothing.")
        answers.append({"lr": lr, "max_norm": max_norm, "weight_decay": weight_decay})
    for trial, off, scale in TRIALS:
        for case, answer in zip(CASES, answers, strict=True):
            names = ("lr", "max_norm", "weight_decay")
            given, steps = dict(zip(names, case[:3], strict=True)), case[3]
            without = {name: OFF[name] for name in off}
            undivided = train(False, steps, **{**given, **without}, scale=scale)
            divided = train(True, steps, **{**answer, **without}, scale=scale)
            if same_way(undivided, divided):
                continue
            return describe(trial, off, given, answer, steps, undivided, divided)
    return None


def describe(trial: str, off: tuple, given: dict, answer: dict, steps: int, undivided, divided) -> str:
    """Say in which trial the two runs part, by how much, and which setting it must be."""
    text = ", ".join(f"{name} {value:g}" for name, value in given.items() if name not in off)
    mine = ", ".join(f"{name} {value:g}" for name, value in answer.items() if name not in off)
    first = (divided[1] - divided[0]).norm() / (undivided[1] - undivided[0]).norm()
    head = f"K = {steps}, {trial}: the undivided loop with {text} and the divided one with {mine} part"
    if off == ("max_norm", "weight_decay"):
        return f"{head}: the first step of the divided one is {first:.3g} times as long. That is its lr."
    if off == ("weight_decay",):
        return f"{head}: the first step of the divided one is {first:.3g} times as long. Look at max_norm."
    if off == ("max_norm",):
        ratio = answer["lr"] * answer["weight_decay"] / (given["lr"] * given["weight_decay"])
        return f"{head}: one update shrinks the weights by {ratio:.3g} times as much. Look at weight_decay."
    return f"{head}, though each alone was right."


def settings(lr=lambda k: k, max_norm=lambda k: 1 / k, weight_decay=lambda k: 1 / k):
    """Make an answer that multiplies the settings by functions of K."""
    return lambda a, b, c, k: (a * lr(k), b * max_norm(k), c * weight_decay(k))


def as_a_list(lr, max_norm, weight_decay, accumulation_steps):
    divisors = [1 / accumulation_steps, accumulation_steps, accumulation_steps]
    return [value / divisor for value, divisor in zip((lr, max_norm, weight_decay), divisors, strict=True)]


def as_a_tensor(lr, max_norm, weight_decay, accumulation_steps):
    k = torch.tensor(float(accumulation_steps), dtype=torch.float64)
    return torch.tensor([lr, max_norm, weight_decay], dtype=torch.float64) * torch.stack([k, 1 / k, 1 / k])


def one(k):
    return 1


def by(power: float) -> Callable[[int], float]:
    return lambda k: k**power


EXERCISES = [
    Exercise(
        number="06.1",
        title="mend a loop that divides twice",
        task="""
This loop was moved under a library. Its `backward(loss)` divides what it gets by the accumulation steps, scales it for
mixed precision, and goes backward; it has to be called, once per micro-batch. The loop still does what it did before.
Mend it for micro-batches of equal size. Mind the loss that it returns: it was the mean over the group, and should stay
that.
""",
        difficulty=2,
        importance=5,
        minutes=6,
        answer="library_update",
        setup="from torch.nn.functional import cross_entropy",
        stub="""
def library_update(model, optimizer, micro_batches, backward):
    mean = 0.0
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets) / len(micro_batches)
        backward(loss)
        mean += loss.item()
    optimizer.step()
    return mean
""",
        judge=judge_library_update,
        hints=(
            "How often is each loss divided by K, on its way to the gradient? And on its way to `mean`?",
            "One division too many lies on the way to the gradient. Take it away from the loss, and see what that "
            "does to "
            "the other way.",
            "`loss = cross_entropy(model(inputs), targets)`; `backward(loss)`; `mean += loss.item() / "
            "len(micro_batches)`.",
        ),
        solution="""
def library_update(model, optimizer, micro_batches, backward):
    mean = 0.0
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets)
        backward(loss)  # divides
        mean += loss.item() / len(micro_batches)
    optimizer.step()
    return mean
""",
        closing="Divided once on each way: by the library for the gradient, by you for the log.",
        right=(mean_to_backward, sum_over_count, reports_nothing),
        wrong={
            "0.25 times": with_a_loop(lambda loss, steps: loss / steps),
            "each micro-batch's mean is added without a division": with_a_loop(lambda loss, steps: loss * steps),
            "the sum of the micro-batches' means": with_a_loop(reported=sum),
            "The library's backward was not called": around_the_library,
            "the mean divided by the number of micro-batches": with_a_loop(
                reported=lambda losses: sum(losses) / len(losses) ** 2
            ),
            "the last micro-batch's mean": with_a_loop(reported=lambda losses: losses[-1]),
            "the summed losses are divided by the micro-batches": sums_to_backward,
            "one backward pass was made": backward_after_the_loop,
            "cleared between micro-batches": zeroed_inside,
            "called 4 times for one update": stepped_inside,
            "in memory together": summed_before_backward,
            "It must be a function": 0.25,
        },
    ),
    Exercise(
        number="06.2",
        title="reproduce an undivided run",
        task="""
A good run was made by a loop that adds up K mean losses and never divides: SGD without momentum, with `lr`, `max_norm`
(clipping) and `weight_decay`. Your loop divides. Return the three settings `(lr, max_norm, weight_decay)` with which it
makes the same updates. The check trains with both loops, with and without clipping and decay, for several K.
""",
        difficulty=3,
        importance=4,
        minutes=8,
        answer="divided_settings",
        stub="""
def divided_settings(lr, max_norm, weight_decay, accumulation_steps):
    pass  # return lr, max_norm, weight_decay
""",
        judge=judge_settings,
        hints=(
            "Write g for the mean gradient and w for the weights. One update of the undivided loop subtracts "
            "`lr * (K * g + weight_decay * w)`, and clips where `K * |g|` exceeds `max_norm`.",
            "Take K out of the bracket. What stands before it is the learning rate of your loop, and what is left at "
            "w its "
            "decay. From which `|g|` on does the old loop clip?",
            "`lr * (K * g + weight_decay * w)` is `K * lr * (g + weight_decay / K * w)`, and `K * |g|` exceeds "
            "`max_norm` "
            "where `|g|` exceeds `max_norm / K`.",
        ),
        solution="""
def divided_settings(lr, max_norm, weight_decay, accumulation_steps):
    k = accumulation_steps
    return k * lr, max_norm / k, weight_decay / k
""",
        closing="These are the settings that the old run really had. Write them down, and divide from now on.",
        right=(as_a_list, as_a_tensor, settings()),
        wrong={
            "is 0.25 times as long. That is its lr": settings(one, one, one),
            "is 0.0625 times as long. That is its lr": settings(by(-1)),
            "is 0.5 times as long. That is its lr": settings(by(0.5)),
            "with lr 0.4, max_norm 1 part": settings(by(1), one, one),
            "with lr 0.4, max_norm 4 part": settings(by(1), by(1)),
            "with lr 0.4, max_norm 0.5 part": settings(by(1), by(-0.5)),
            "with lr 0.4, max_norm 0.0625 part": settings(by(1), by(-2)),
            "shrinks the weights by 4 times as much": settings(by(1), by(-1), one),
            "shrinks the weights by 16 times as much": settings(by(1), by(-1), by(1)),
            "shrinks the weights by 0 times": lambda lr, max_norm, decay, k: (lr * k, max_norm / k, 0),
            "K = 8, without clipping and decay": lambda lr, max_norm, decay, k: (4 * lr, max_norm / 4, decay / 4),
            "which clips everything to nothing": lambda lr, max_norm, decay, k: (lr * k, max_norm // k, decay / k),
            "it must return three numbers": lambda lr, max_norm, decay, k: (lr * k, max_norm / k),
            "it returned nothing": lambda lr, max_norm, decay, k: print(lr * k),
            "It must be a function": (0.4, 0.25, 0.025),
        },
    ),
]
