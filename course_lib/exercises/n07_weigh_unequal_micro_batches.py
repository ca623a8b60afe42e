"""The exercises of notebook 07: an update over tokens, and the share of one process in an update."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.accumulation import accumulate_gradients, update_parameters
from course_lib.audit.problems import TokenProbe, token_group
from course_lib.exercises.engine import Exercise, expect, judge_update, run_answer
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import count_tokens, token_cross_entropy_sum

SETUP = """
from torch.nn.functional import cross_entropy

from course_lib.losses import count_tokens, token_cross_entropy_sum
"""

# ---- 07.1: an update over tokens -------------------------------------------------------------------------------------


def nothing_counts(micro_batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a micro-batch of which every label is ignored."""
    inputs, targets = micro_batch
    return inputs, torch.full_like(targets, -100)


def judge_tokens(function) -> str | None:
    """Audit the update on tokens, then on groups with a micro-batch in which nothing counts."""
    message = judge_update(function, task="tokens")
    if message is not None:
        return message
    group = token_group([3, 2, 2, 4], seed=11)
    group[1] = nothing_counts(group[1])
    nans = []

    def update(model, optimizer, micro_batches):
        returned = function(model, optimizer, micro_batches)
        if isinstance(returned, float | Tensor) and returned != returned:
            nans.append(returned)
            return None
        return returned

    message = judge_update(
        update,
        model=TokenProbe(1.0, seed=2),
        micro_batches=group,
        loss_sum=token_cross_entropy_sum,
        count=count_tokens,
    )
    if message is None and nans:
        message = (
            "it returned nan, and the gradient is right. A mean of no tokens is 0 / 0, also where it counts for 0."
        )
    return message and f"With a micro-batch whose labels are all -100: {message}"


def flat_mean(model, micro_batch, reduction="mean"):
    inputs, targets = micro_batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def with_the_library(model, optimizer, micro_batches):
    return update_parameters(model, optimizer, micro_batches, token_cross_entropy_sum, count_tokens).loss


def divided_at_the_end(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total, reported = 0, 0.0
    for micro_batch in micro_batches:
        loss = token_cross_entropy_sum(model, micro_batch)
        loss.backward()
        reported += loss.item()
        total += count_tokens(micro_batch)
    for parameter in model.parameters():
        parameter.grad /= total
    optimizer.step()
    return reported / total


def weighted_means(model, optimizer, micro_batches):
    counts = [count_tokens(micro_batch) for micro_batch in micro_batches]
    optimizer.zero_grad()
    for micro_batch, number in zip(micro_batches, counts, strict=True):
        if number:
            (flat_mean(model, micro_batch) * number / sum(counts)).backward()
    optimizer.step()


def dividing_by(divisor, loss_of=token_cross_entropy_sum):
    """Make an update that divides the loss of each micro-batch by divisor(micro_batch, micro_batches)."""

    def update(model, optimizer, micro_batches):
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            (loss_of(model, micro_batch) / divisor(micro_batch, micro_batches)).backward()
        optimizer.step()

    return update


def total_of(micro_batches):
    return sum(map(count_tokens, micro_batches))


def loss_with_ignored(model, micro_batch):
    inputs, targets = micro_batch
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten().clamp(min=0), reduction="sum")


def one_vote_a_sequence(model, micro_batch):
    inputs, targets = micro_batch
    losses = cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").sum(dim=1)
    return (losses / (targets != -100).sum(dim=1)).mean()


def last_only(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        loss = token_cross_entropy_sum(model, micro_batch) / total_of(micro_batches)
    loss.backward()
    optimizer.step()


def never_zeroed(model, optimizer, micro_batches):
    for micro_batch in micro_batches:
        (token_cross_entropy_sum(model, micro_batch) / total_of(micro_batches)).backward()
    optimizer.step()


def mean_of_means_reported(model, optimizer, micro_batches):
    update_parameters(model, optimizer, micro_batches, token_cross_entropy_sum, count_tokens)
    with torch.no_grad():
        return sum(flat_mean(model, micro_batch).item() for micro_batch in micro_batches) / len(micro_batches)


def stops_at_an_empty_one(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        if count_tokens(micro_batch) == 0:
            break
        (token_cross_entropy_sum(model, micro_batch) / total_of(micro_batches)).backward()
    optimizer.step()


def means_of_it(model, optimizer, micro_batches):
    optimizer.zero_grad()
    total, reported = total_of(micro_batches), 0.0
    for micro_batch in micro_batches:
        loss = flat_mean(model, micro_batch) * (count_tokens(micro_batch) / total)
        loss.backward()
        reported += loss.item()
    optimizer.step()
    return reported


# ---- 07.2: the share of one process ----------------------------------------------------------------------------------

# For each case, the lists of micro-batch sizes of the processes; a negative size has nothing but ignored labels.
WORLDS = (
    ([4],),
    ([3, 2],),
    ([2, 2], [2, 2]),
    ([3], [1, 2, 4]),
    ([2, 1], [-2], [4, 3]),
    ([1], [2], [3], [4], [1], [2], [3], [4]),
)


def draw_world(sizes: tuple[list[int], ...], seed: int) -> list[list]:
    """Draw the micro-batches of each process."""
    world = []
    for rank, own in enumerate(sizes):
        group = token_group([abs(size) for size in own], seed=seed + rank)
        world.append([nothing_counts(part) if size < 0 else part for part, size in zip(group, own, strict=True)])
    return world


def judge_share(function) -> str | None:
    """Let each process take its share, average the gradients, and compare with the full batch's."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    gaps, wrong = [], None
    for place, sizes in enumerate(WORLDS):
        world = draw_world(sizes, seed=20 + place)
        everything = [micro_batch for own in world for micro_batch in own]
        total = sum(map(count_tokens, everything))
        reference = TokenProbe(1.0, seed=place)
        accumulate_gradients(reference, everything, token_cross_entropy_sum, count_tokens)
        averaged = average(function, world, total, place)
        gap = compare_gradients(reference, averaged)
        gaps.append(gap)
        if wrong is None and not gap.agree(1e-9):
            wrong = place
    if wrong is None:
        return None
    return describe(gaps, wrong)


def average(function, world: list[list], total: int, seed: int) -> dict[str, Tensor]:
    """Return the mean over the processes of the gradients that the function leaves, as DistributedDataParallel does."""
    parts = []
    for rank, own in enumerate(world):
        model = TokenProbe(1.0, seed=seed)
        name = f"process {rank + 1} of {len(world)}, with {sum(map(count_tokens, own))} of {total} tokens"

        def share(name, model=model, own=own):
            function(model, own, total, len(world))

        before = [parameter.detach().clone() for parameter in model.parameters()]
        run_answer(share, name)
        expect(all(map(torch.equal, before, model.parameters())), f"In {name} the parameters moved; no step is wanted.")
        own_gradients = copy_gradients(model)
        expect(
            own_gradients or not any(map(count_tokens, own)), f"After {name} there is no gradient; is there a backward?"
        )
        parts.append(own_gradients)
    return {
        key: sum(part.get(key, torch.zeros_like(value)) for part in parts) / len(world)
        for key, value in TokenProbe(1.0, seed=seed).named_parameters()
    }


def describe(gaps: list, wrong: int) -> str:
    """Say in which world the averaged gradient is wrong, and by how much."""
    world, gap = WORLDS[wrong], gaps[wrong]
    number = len(world)
    sizes = ", ".join(str([abs(size) for size in own]) for own in world)
    head = f"{number} process{'es' * (number > 1)} with micro-batches of {sizes} sequences: the averaged gradient"
    if gap.relative_error != gap.relative_error:
        return f"{head} is nan. The mean of no tokens is 0 / 0."
    if gap.relative_error <= 1e-9 + abs(1 - gap.scale) * (1 + 1e-9):  # the direction is right
        text = f"{head} is {gap.scale:.3g} times the full batch's"
        factors = [one.scale * len(sizes) for one, sizes in zip(gaps, WORLDS, strict=True)]
        if max(abs(factor - 1) for factor in factors) < 1e-9:
            return f"{text}, 1 over the number of processes, in every case: the average divides once more."
        return f"{text}."
    text = f"{head} is off by {100 * gap.relative_error:.2g} % of its length, with scale {gap.scale:.3g}"
    if all(one.agree(1e-9) for one, sizes in zip(gaps, WORLDS, strict=True) if len(sizes) == 1):
        return f"{text}. One process alone is right: what does each divide by?"
    return f"{text}: its micro-batches have wrong weights."


def one_backward_per_micro_batch(model, micro_batches, total_count, world_size):
    for micro_batch in micro_batches:
        (token_cross_entropy_sum(model, micro_batch) / (total_count / world_size)).backward()


def scaled_afterwards(model, micro_batches, total_count, world_size):
    for micro_batch in micro_batches:
        flat_mean(model, micro_batch, reduction="sum").backward()
    for parameter in model.parameters():
        parameter.grad *= world_size / total_count


def with_total_count(model, micro_batches, total_count, world_size):
    def loss_sum(model: nn.Module, micro_batch):
        return world_size * token_cross_entropy_sum(model, micro_batch)

    accumulate_gradients(model, micro_batches, loss_sum, count_tokens, total_count=total_count)


def share_by(factor, loss_of=token_cross_entropy_sum):
    """Make a share that multiplies each micro-batch's loss by factor(micro_batch, micro_batches, total, world)."""

    def share(model, micro_batches, total_count, world_size):
        for micro_batch in micro_batches:
            (loss_of(model, micro_batch) * factor(micro_batch, micro_batches, total_count, world_size)).backward()

    return share


def share_of_the_last(model, micro_batches, total_count, world_size):
    (token_cross_entropy_sum(model, micro_batches[-1]) * world_size / total_count).backward()


def nan_without_tokens(model, micro_batches, total_count, world_size):
    own_count = sum(map(count_tokens, micro_batches))
    for micro_batch in micro_batches:
        token_cross_entropy_sum(model, micro_batch).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad / own_count * (own_count * world_size / total_count)


def share_with_a_step(model, micro_batches, total_count, world_size):
    one_backward_per_micro_batch(model, micro_batches, total_count, world_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def or_one(number: float) -> float:
    return number or 1


EXERCISES = [
    Exercise(
        number="07.1",
        title="write the update for tokens",
        task="""
As in exercise 02.1, but for text: `micro_batches` is a list of pairs `(inputs, targets)`, both (B, T), and the model
returns scores (B, T, V). Targets of -100 do not count, and a micro-batch may hold nothing else. Make one update with
the gradient of the mean cross-entropy over all tokens of the list that count, one micro-batch in memory at a time.
Return that mean, or nothing.
""",
        difficulty=3,
        importance=5,
        minutes=10,
        answer="token_update",
        setup=SETUP,
        stub="""
def token_update(model, optimizer, micro_batches):
    pass  # your loop
""",
        judge=judge_tokens,
        hints=(
            "What is a micro-batch's loss as a sum and a count? Which of the two must be known before the first "
            "`backward`?",
            "`count_tokens(micro_batch)` counts the targets that are not -100, `token_cross_entropy_sum(model, "
            "micro_batch)` adds up their losses. Neither of them minds a micro-batch in which nothing counts.",
            "`total = sum(count_tokens(micro_batch) for micro_batch in micro_batches)`, then the loop of 02.1 with "
            "`token_cross_entropy_sum(model, micro_batch) / total`.",
        ),
        solution="""
def token_update(model, optimizer, micro_batches):
    total = sum(count_tokens(micro_batch) for micro_batch in micro_batches)
    mean = 0.0
    optimizer.zero_grad()
    for micro_batch in micro_batches:
        loss = token_cross_entropy_sum(model, micro_batch) / total
        loss.backward()
        mean += loss.item()
    optimizer.step()
    return mean
""",
        closing="Every token that counts has one vote, however the group is cut, and an empty micro-batch has none.",
        right=(with_the_library, divided_at_the_end, weighted_means),
        wrong={
            "mean-of-means": dividing_by(lambda one, group: len(group), flat_mean),
            "not-divided": dividing_by(lambda one, group: 1),
            "each micro-batch's mean is added without a division": dividing_by(lambda one, group: 1, flat_mean),
            "the summed losses are divided by the micro-batches": dividing_by(lambda one, group: len(group)),
            "wrong-scale": dividing_by(lambda one, group: sum(part[1].numel() for part in group)),
            "divided by 64": dividing_by(lambda one, group: 64),
            "divided-twice": dividing_by(lambda one, group: total_of(group) * len(group)),
            "as in a mean over each sequence": dividing_by(lambda one, group: len(group), one_vote_a_sequence),
            "wrong-gradient": dividing_by(lambda one, group: total_of(group), loss_with_ignored),
            "last-only": last_only,
            "never-zeroed": never_zeroed,
            "wrong-loss-reported": mean_of_means_reported,
            "With a micro-batch whose labels are all -100: no-gradient": stops_at_an_empty_one,
            "With a micro-batch whose labels are all -100: it returned nan": means_of_it,
            "It must be a function": 3.296,
        },
    ),
    Exercise(
        number="07.2",
        title="take the share of one process",
        task="""
Several processes share one update. Each has its own micro-batches of text, and calls your function. It runs the
backward passes and leaves its gradient in `.grad`, which is empty before. Then the gradients are *averaged* over the
`world_size` processes, as `DistributedDataParallel` does. What comes out must be the gradient of the mean over all
tokens of all processes. `total_count` is their number, -100 left out. No process knows the others' tokens, and one may
have none.
""",
        difficulty=3,
        importance=4,
        minutes=8,
        answer="take_share",
        setup=SETUP,
        stub="""
def take_share(model, micro_batches, total_count, world_size):
    pass  # backward, no step
""",
        judge=judge_share,
        hints=(
            "If the gradients were added up over the processes, what would each have to divide its sums by?",
            "By `total_count`. But they are averaged, which divides by `world_size` once more.",
            "For each micro-batch: `(token_cross_entropy_sum(model, micro_batch) * world_size / "
            "total_count).backward()`.",
        ),
        solution="""
def take_share(model, micro_batches, total_count, world_size):
    for micro_batch in micro_batches:
        loss = token_cross_entropy_sum(model, micro_batch) * world_size / total_count
        loss.backward()
""",
        closing="One process or eight, with or without tokens: the average is the full batch's gradient.",
        right=(one_backward_per_micro_batch, scaled_afterwards, with_total_count),
        wrong={
            "1 over the number of processes": share_by(lambda one, own, total, world: 1 / total),
            "One process alone is right": share_by(
                lambda one, own, total, world: 1 / or_one(sum(map(count_tokens, own)))
            ),
            "2 processes with micro-batches of [2, 2], [2, 2] sequences: the averaged gradient is 2 times": share_by(
                lambda one, own, total, world: world**2 / total
            ),
            "of [4] sequences: the averaged gradient is 12 times": share_by(lambda one, own, total, world: 1.0),
            "1 process with micro-batches of [3, 2] sequences: the averaged gradient is off": share_by(
                lambda one, own, total, world: 1 / len(own) / or_one(count_tokens(one))
            ),
            "1 process with micro-batches of [3, 2] sequences: the averaged gradient is 0.5 times": share_by(
                lambda one, own, total, world: world / total / len(own)
            ),
            "of [4] sequences: the averaged gradient is 0.5 times": share_by(
                lambda one, own, total, world: world / sum(part[1].numel() for part in own)
            ),
            "is nan": nan_without_tokens,
            "its micro-batches have wrong weights": share_of_the_last,
            "the parameters moved": share_with_a_step,
            "is there a backward?": lambda model, own, total, world: None if total else 0,
            "NameError": lambda model, own, total, world: world_size,  # noqa: F821
            "It must be a function": 0.25,
        },
    ),
]
