"""The exercises of notebook 08: one update under a scaler with everything in its place, and the loss that is logged."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from course_lib.accumulation import accumulate_gradients, apply_gradients, update_parameters
from course_lib.batches import group_micro_batches
from course_lib.exercises.engine import Exercise, NotYet, expect, run_answer
from course_lib.losses import cross_entropy_sum

# ---- 08.1: the order -------------------------------------------------------------------------------------------------

K, SCALE = 4, 1024.0
LIMITS = (100.0, 0.5, 0.5, 2.0)  # of the clip, in norms of each group's mean gradient
OVERFLOWS = 2  # the place of the group with an infinite pixel


class Watched:
    """A tiny model with optimizer, schedule and scaler that write down what is called."""

    def __init__(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Linear(3, 2)
        events = self.events = []  # names of calls, in order
        self.at_step: Tensor | None = None  # the gradient that the optimizer was given
        self.found: Tensor | None = None  # what stood in .grad before the first backward of a group
        watched, inside = self, []

        def log(name: str) -> None:
            if not inside:
                events.append(name)

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                events.append("optimizer.step")
                watched.at_step = gradient(watched.model)
                return super().step(closure)

        class Scaler(GradScaler):
            def scale(self, outputs):
                log("scale")
                return super().scale(outputs)

            def unscale_(self, optimizer):
                log("unscale_")
                return super().unscale_(optimizer)

            def step(self, optimizer):
                log("step")
                inside.append(True)  # it may unscale by itself
                try:
                    return super().step(optimizer)
                finally:
                    inside.pop()

            def update(self, new_scale=None):
                log("update")
                return super().update(new_scale)

        class Schedule(torch.optim.lr_scheduler.StepLR):
            def step(self, *args):
                log("schedule")
                return super().step(*args)

        def before(_: Tensor) -> None:
            if "backward" not in events:
                watched.found = gradient(watched.model)
            events.append("backward")

        self.optimizer = Optimizer(self.model.parameters(), lr=0.5)
        self.scheduler = Schedule(self.optimizer, 1, gamma=0.5)
        self.scaler = Scaler("cpu", init_scale=SCALE)
        self.model.weight.register_hook(before)
        self.arguments = (self.model, self.optimizer, self.scheduler, self.scaler)
        events.clear()  # a schedule begins with a step of its own

    def __repr__(self) -> str:
        return "four micro-batches of 2"


def gradient(model: nn.Module) -> Tensor | None:
    """Copy all gradients into one vector; None where there is none."""
    found = [parameter.grad for parameter in model.parameters()]
    return None if found[0] is None else torch.cat([one.detach().flatten() for one in found if one is not None])


def a_group(place: int) -> list:
    generator = torch.Generator().manual_seed(place)
    group = [(torch.randn(2, 3, generator=generator), torch.randint(2, (2,), generator=generator)) for _ in range(K)]
    if place == OVERFLOWS:
        group[1][0][0, 0] = math.inf
    return group


def shorten(vector: Tensor, limit: float) -> Tensor:
    """Clip a vector to a length."""
    return vector * min(1.0, limit / vector.norm().item())


def judge_order(function) -> str | None:
    """Make four updates, the third with an overflow, and look at calls, gradient, schedule and scale of each."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    run, reference = Watched(), Watched()
    limit = 1.0
    for place, factor in enumerate(LIMITS):
        group = a_group(place)
        parts = [part_gradient(reference.model, part) for part in group]
        mean = sum(parts) / K
        if place != OVERFLOWS:
            limit = factor * mean.norm().item()
        run.events.clear()
        run.at_step = None
        epoch, scale, failure = run.scheduler.last_epoch, run.scaler.get_scale(), None
        weights = [parameter.detach().clone() for parameter in run.model.parameters()]

        def call(_, group=group, limit=limit):
            return function(*run.arguments, group, limit)

        try:
            run_answer(call, run)
        except NotYet as error:
            failure = error
        message = wrong_calls(run.events, failure is not None) or wrong_left_over(run.found, place)
        if message:
            return message
        if failure:
            raise failure
        if place == OVERFLOWS:
            message = wrong_overflow(run, weights, epoch, scale)
        else:
            message = wrong_gradient(run.at_step, parts, limit, scale, place)
            message = message or wrong_schedule(run.events, run.scheduler.last_epoch - epoch)
        if message:
            return message
        update_parameters(
            reference.model,
            reference.optimizer,
            group,
            cross_entropy_sum,
            max_grad_norm=limit,
            scaler=reference.scaler,
            scheduler=reference.scheduler,
        )
        for mine, wanted in zip(run.model.parameters(), reference.model.parameters(), strict=True):
            gap = (mine - wanted).abs().max().item()
            expect(gap < 1e-5, f"After update {place + 1} a weight is {gap:.2g} away from where one step takes it.")
    return None


def part_gradient(model: nn.Module, part) -> Tensor:
    """The gradient of one micro-batch's own mean loss, of a model that has no gradients."""
    loss = cross_entropy(model(part[0]), part[1])
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


def wrong_calls(events: list, failed: bool) -> str | None:
    """Say which call of an update is missing, doubled or in a wrong place."""
    passes = events.count("backward")
    last = max((place for place, name in enumerate(events) if name == "backward"), default=-1)

    def passes_before(name: str) -> int:
        return events[: events.index(name)].count("backward")

    if "unscale_" in events and events.index("unscale_") < last:
        early = passes_before("unscale_")
        return (
            f"scaler.unscale_ came after {early} of {K} backward passes. "
            f"What comes later is added in other units, {SCALE:g} times as large."
        )
    if events.count("unscale_") > 1:
        return f"scaler.unscale_ was called {events.count('unscale_')} times for one update; PyTorch allows one."
    for name, call in (("step", "scaler.step"), ("optimizer.step", "optimizer.step")):
        if name in events and events.index(name) < last:
            return f"{call} came after {passes_before(name)} of {K} backward passes. An update waits for all {K}."
    if failed and passes < K:
        return None
    if passes != K:
        return f"{passes} backward pass{'es were' if passes != 1 else ' was'} made for {K} micro-batches."
    if events.count("scale") != K:
        return f"scaler.scale was called {events.count('scale')} times for {K} backward passes: each needs it once."
    if "step" not in events:
        if "optimizer.step" in events:
            return "optimizer.step was called without the scaler: it would put an overflow into the weights."
        return None if failed else "scaler.step was not called: no weight has moved."
    if "update" not in events:
        return None if failed else f"scaler.update was not called: the scale would be {SCALE:g} for ever."
    if events.index("update") < events.index("step"):
        return "scaler.update came before scaler.step: it forgets what was unscaled and what overflowed."
    if events.count("update") > 1:
        return f"scaler.update was called {events.count('update')} times for one update."
    if "unscale_" not in events:
        return f"scaler.unscale_ was not called before the clip, so gradients were clipped {SCALE:g} times too large."
    return None


def wrong_left_over(found: Tensor | None, place: int) -> str | None:
    """Say that a group did not begin without gradients."""
    if found is None or not found.any():
        return None
    return f"Update {place + 1} began with a gradient of norm {found.norm().item():.3g} from the one before: clear it."


def wrong_gradient(at_step: Tensor | None, parts: Sequence[Tensor], limit: float, scale: float, place: int):
    """Compare the gradient at the step with the clipped mean, and with what the usual mistakes make of it."""
    mean, total = sum(parts) / K, sum(parts)
    wanted = shorten(mean, limit)
    head = f"Update {place + 1}, to be clipped at {limit:.3g}: "
    if at_step is None:
        return f"{head}optimizer.step was not reached."
    others = {
        "that is the sum of the group, not its mean: divide": total,
        "that is the clipped sum: the limit is for the mean": shorten(total, limit),
        "the sum was clipped, then divided": shorten(total, limit) / K,
        "nothing was clipped before the step": mean,
        "it was clipped while it was still scaled": shorten(mean * scale, limit) / scale,
        "each micro-batch was clipped, not their mean": sum(shorten(part, limit) for part in parts) / K,
        "each part of the sum was clipped as it came": clipped_as_it_came(parts, limit),
        "that is the last micro-batch alone: the others were cleared": shorten(parts[-1] / K, limit),
        "every entry was clipped; a clip of the norm keeps the direction": mean.clamp(-limit, limit),
        "it was divided twice": shorten(mean / K, limit),
    }
    if torch.allclose(at_step, wanted, rtol=1e-4, atol=1e-7):
        return None
    times = (
        f"the gradient at the step is {at_step.norm().item() / wanted.norm().item():.3g} times as long as it should be"
    )
    for text, other in others.items():
        if torch.allclose(at_step, other, rtol=1e-4, atol=1e-7):
            return f"{head}{times}; {text}."
    return f"{head}{times}."


def clipped_as_it_came(parts: Sequence[Tensor], limit: float) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = shorten(total + part / K, limit)
    return total


def wrong_schedule(events: list, moved: int) -> str | None:
    """Say that the schedule did not move once, after the step."""
    if moved != 1:
        return f"The schedule moved {moved} times in one update; it counts updates."
    if events.index("schedule") < events.index("step"):
        return "The schedule moved before the step: the first update has the second's learning rate."
    return None


def wrong_overflow(run: Watched, weights: list, epoch: int, scale: float) -> str | None:
    """Say what an overflow changed that it should have left alone."""
    same = all(map(torch.equal, weights, run.model.parameters()))
    expect(same, "Update 3 has an infinite gradient, and it went into the weights.")
    moved = run.scheduler.last_epoch - epoch
    expect(not moved, f"Update 3 overflowed and was skipped, but the schedule moved by {moved}.")
    now = run.scaler.get_scale()
    expect(now == scale / 2, f"Update 3 overflowed: the scale should be {scale / 2:g} after it; it is {now:g}.")
    return None


# Right answers.


def in_one_call(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    options = {"max_grad_norm": max_norm, "scaler": scaler, "scheduler": scheduler}
    return update_parameters(model, optimizer, micro_batches, cross_entropy_sum, **options).loss


def in_two_calls(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    accumulate_gradients(model, micro_batches, cross_entropy_sum, scaler=scaler)
    apply_gradients(model, optimizer, max_grad_norm=max_norm, scaler=scaler, scheduler=scheduler)


def backward_all(scaler, model, micro_batches, after=lambda: None, share=1 / K):
    for inputs, targets in micro_batches:
        scaler.scale(cross_entropy(model(inputs), targets) * share).backward()
        after()


def zeroed_at_entry(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    optimizer.zero_grad()
    backward_all(scaler, model, micro_batches)
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    if norm.isfinite():
        scheduler.step()


# Wrong answers: the calls in any order, with options.


def ordered(*calls: str, **options) -> Callable:
    """An update that makes the named calls after the passes; `after` are calls after each pass."""

    def update(model, optimizer, scheduler, scaler, micro_batches, max_norm):
        scale = scaler.get_scale()
        does = {
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: clip_grad_norm_(model.parameters(), max_norm),
            "clip values": lambda: torch.nn.utils.clip_grad_value_(model.parameters(), max_norm),
            "step": lambda: scaler.step(optimizer),
            "plain step": optimizer.step,
            "update": scaler.update,
            "schedule": scheduler.step,
            "schedule if stepped": lambda: scheduler.step() if scaler.get_scale() >= scale else None,
            "zero": optimizer.zero_grad,
            "divide": lambda: [parameter.grad.div_(K) for parameter in model.parameters()],
        }

        def after():
            for call in options.get("after", ()):
                does[call]()

        if options.get("unscaled"):
            for inputs, targets in micro_batches:
                (cross_entropy(model(inputs), targets) / K).backward()
        else:
            backward_all(scaler, model, micro_batches, after, options.get("share", 1 / K))
        for call in calls:
            does[call]()

    return update


def last_alone(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    for inputs, targets in micro_batches:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(inputs), targets) / K).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


REST = ("step", "update", "schedule if stepped", "zero")


# ---- 08.2: the loss of an update -------------------------------------------------------------------------------------

EPOCHS = (  # mean loss and count of each micro-batch, and K
    ([1.0, 2.0, 3.0, 6.0, 4.0, 4.0, 2.0, 2.0], [16] * 8, 4),
    ([1.0, 2.0, 3.0, 6.0, 5.0, 9.0], [16, 16, 16, 16, 16, 4], 4),
    ([1.0, 5.0, 2.0], [3, 1, 2], 2),
    ([2.0, 8.0, 4.0], [1, 3, 4], 1),
    ([3.0, 7.0], [6, 2], 5),
)


def by_update(losses, counts, k, value) -> list:
    groups = group_micro_batches(list(zip(losses, counts, strict=True)), k)
    return [value(group) for group in groups]


def group_mean(group) -> float:
    return sum(loss * count for loss, count in group) / sum(count for _, count in group)


OTHER_LOGS: dict[str, Callable] = {
    "that is the last micro-batch of each group": lambda x, n, k: by_update(x, n, k, lambda g: g[-1][0]),
    "that is the first micro-batch of each group": lambda x, n, k: by_update(x, n, k, lambda g: g[0][0]),
    "that is the last loss as divided for backward": lambda x, n, k: by_update(x, n, k, lambda g: g[-1][0] / k),
    "that is the mean of means, which gives a small micro-batch the say of a large one": lambda x, n, k: by_update(
        x, n, k, lambda g: sum(loss for loss, _ in g) / len(g)
    ),
    "these losses were added, not averaged": lambda x, n, k: by_update(x, n, k, lambda g: sum(v for v, _ in g)),
    "these are sums over samples": lambda x, n, k: by_update(x, n, k, lambda g: sum(v * c for v, c in g)),
    "a short group is divided by the full K": lambda x, n, k: by_update(x, n, k, lambda g: sum(v for v, _ in g) / k),
    "that is the mean since the start of the epoch": lambda x, n, k: [
        group_mean(list(zip(x, n, strict=True))[: min(start + k, len(x))]) for start in range(0, len(x), k)
    ],
    "that is the largest loss of each group": lambda x, n, k: by_update(x, n, k, lambda g: max(v for v, _ in g)),
}


def judge_log(function) -> str | None:
    """Compare with the weighted mean of each group, for epochs with even and uneven micro-batches and tails."""
    found = [run_answer(function, list(x), list(n), k) for x, n, k in EPOCHS]
    right = [by_update(*epoch, group_mean) for epoch in EPOCHS]
    for (losses, counts, k), log, wanted in zip(EPOCHS, found, right, strict=True):
        given = f"losses {losses}, counts {counts}, K = {k}"
        try:
            log = [float(value) for value in log]
        except (TypeError, ValueError):
            return f"With {given}: it must return a list of numbers, one for each update; it returned {log!r}."
        if len(log) != len(wanted):
            kinds = {len(losses): ": one for each micro-batch", len(losses) // k: ": the tail's update is missing"}
            why = kinds.get(len(log), "")
            return f"With {given}: {len(log)} numbers for {len(wanted)} updates{why}."
        gaps = [mine - good for mine, good in zip(log, wanted, strict=True)]
        if all(abs(gap) < 1e-6 for gap in gaps):
            continue
        place = next(place for place, gap in enumerate(gaps) if not abs(gap) < 1e-6)
        text = f"With {given}: update {place + 1} logs {log[place]:.4g}, {gaps[place]:+.4g} from its mean"
        for name, other in OTHER_LOGS.items():
            if all(matches(mine, other(*epoch)) for mine, epoch in zip(found, EPOCHS, strict=True)):
                return f"{text}: {name}."
        return f"{text}."
    return None


def matches(found, other: list) -> bool:
    try:
        return len(found) == len(other) and all(abs(a - b) < 1e-6 for a, b in zip(found, other, strict=True))
    except TypeError:
        return False


def by_totals(losses, counts, accumulation_steps):
    log, total, items = [], 0.0, 0
    for place, (loss, count) in enumerate(zip(losses, counts, strict=True), start=1):
        total, items = total + loss * count, items + count
        if place % accumulation_steps == 0 or place == len(losses):
            log.append(total / items)
            total, items = 0.0, 0
    return log


def by_tensors(losses, counts, accumulation_steps):
    pairs = zip(
        torch.tensor(losses).split(accumulation_steps), torch.tensor(counts).split(accumulation_steps), strict=True
    )
    return [torch.dot(x, n / n.sum()) for x, n in pairs]


def by_differences(losses, counts, accumulation_steps):
    sums, items = [0.0], [0]
    for loss, count in zip(losses, counts, strict=True):
        sums.append(sums[-1] + loss * count)
        items.append(items[-1] + count)
    ends = [*range(0, len(losses), accumulation_steps), len(losses)]
    return [(sums[b] - sums[a]) / (items[b] - items[a]) for a, b in pairwise(ends)]


def without_the_tail(losses, counts, accumulation_steps):
    whole = len(losses) // accumulation_steps * accumulation_steps
    return by_totals(losses[:whole], counts[:whole], accumulation_steps)


EXERCISES = [
    Exercise(
        number="08.1",
        title="put one update in order",
        task="""
Write one update under a scaler: all passes, then unscale, clip, step, scaler update, schedule and zero, each in its
place. `micro_batches` holds four pairs `(inputs, targets)` of equal size; the gradient is that of the mean
cross-entropy of them all, clipped to the norm `max_norm`.

The check makes four updates. The third has an infinite pixel: it must leave weights and schedule alone and halve the
scale.
""",
        difficulty=3,
        importance=5,
        minutes=12,
        answer="my_update",
        setup="from torch.nn.utils import clip_grad_norm_\n\nfrom course_lib.losses import cross_entropy_sum",
        stub="""
def my_update(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    pass  # K passes, then six calls
""",
        judge=judge_order,
        hints=(
            "Two things happen K times: the scaled loss and its backward. Everything else waits for the last of them. "
            "Which call needs numbers in real units?",
            "Clip compares with a limit in real units, so `unscale_` comes before it. The scaler decides whether to "
            "step, so call `scaler.step(optimizer)`, then `scaler.update()`. How can you tell that it skipped?",
            "The scale shrinks after an overflow and at no other time. Keep `scaler.get_scale()` before the step; call "
            "`scheduler.step()` if it is not smaller after `scaler.update()`. `optimizer.zero_grad()` last.",
        ),
        solution="""
def my_update(model, optimizer, scheduler, scaler, micro_batches, max_norm):
    total = sum(len(targets) for inputs, targets in micro_batches)
    for micro_batch in micro_batches:
        scaler.scale(cross_entropy_sum(model, micro_batch) / total).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()
    optimizer.zero_grad()
""",
        closing="Three updates were made and one was skipped, and the schedule knows it.",
        right=(in_one_call, in_two_calls, zeroed_at_entry),
        wrong={
            "scaler.unscale_ came after 1 of 4": ordered("clip", *REST, after=["unscale"]),
            "scaler.unscale_ was not called before the clip": ordered("clip", *REST),
            "it was clipped while it was still scaled": ordered("clip", "unscale", *REST),
            "nothing was clipped before the step": ordered("unscale", "step", "clip", "update", "schedule", "zero"),
            "that is the sum of the group": ordered("unscale", "clip", *REST, share=1.0),
            "the sum was clipped, then divided": ordered("unscale", "clip", "divide", *REST, share=1.0),
            "it was divided twice": ordered("unscale", "divide", "clip", *REST),
            "every entry was clipped": ordered("unscale", "clip values", *REST),
            "the last micro-batch alone": last_alone,
            "scaler.step came after 1 of 4": ordered(after=["step", "update"]),
            "optimizer.step was called without the scaler": ordered("unscale", "clip", "plain step", "update", "zero"),
            "scaler.step was not called": ordered("unscale", "clip", "update", "schedule", "zero"),
            "scaler.update was not called": ordered("unscale", "clip", "step", "schedule", "zero"),
            "scaler.update came before scaler.step": ordered("unscale", "clip", "update", "step", "schedule", "zero"),
            "the schedule moved by 1": ordered("unscale", "clip", "step", "update", "schedule", "zero"),
            "The schedule moved 4 times": ordered("unscale", "clip", "step", "update", "zero", after=["schedule"]),
            "The schedule moved 0 times": ordered("unscale", "clip", "step", "update", "zero"),
            "The schedule moved before the step": ordered("unscale", "clip", "schedule", "step", "update", "zero"),
            "Update 2 began with a gradient": ordered("unscale", "clip", *REST[:-1]),
            "scaler.scale was called 0 times": ordered("unscale", "clip", *REST, unscaled=True),
            "scaler.unscale_ was called 2 times": ordered("unscale", "clip", "unscale", *REST),
            "It must be a function": "unscale, clip, step, update, schedule, zero",
        },
    ),
    Exercise(
        number="08.2",
        title="log the loss of an update",
        task="""
A training loop has kept the mean loss and the number of samples of every micro-batch of an epoch, in two lists.
Return the list of what to log: one number for each update, the mean over all samples of its group. The last group may
be short, and micro-batches may differ in size.
""",
        difficulty=2,
        importance=3,
        minutes=6,
        answer="losses_to_log",
        stub="""
def losses_to_log(losses, counts, accumulation_steps):
    pass  # a list, one number per update
""",
        judge=judge_log,
        hints=(
            "How many numbers are there for six micro-batches and K = 4? And what has a micro-batch of 4 to say beside "
            "one of 16?",
            "A mean over samples needs the sum over samples: a mean loss times its count. Add up both.",
            "For `start` in `range(0, len(losses), accumulation_steps)`: cut both lists to the group, then divide the "
            "sum of `loss * count` by the sum of `count`.",
        ),
        solution="""
def losses_to_log(losses, counts, accumulation_steps):
    log = []
    for start in range(0, len(losses), accumulation_steps):
        group = slice(start, start + accumulation_steps)
        loss_sum = sum(loss * count for loss, count in zip(losses[group], counts[group], strict=True))
        log.append(loss_sum / sum(counts[group]))
    return log
""",
        closing="One number for each update, and the same curve for every K that makes the same batch.",
        right=(by_totals, by_tensors, by_differences),
        wrong={
            **OTHER_LOGS,
            "8 numbers for 2 updates: one for each micro-batch": lambda losses, counts, k: losses,
            "the tail's update is missing": without_the_tail,
            "it returned 3.0": lambda losses, counts, k: group_mean(list(zip(losses, counts, strict=True))),
            "it returned None": lambda losses, counts, k: print(by_totals(losses, counts, k)),
            "It must be a function": [3.0, 3.0],
        },
    ),
]
