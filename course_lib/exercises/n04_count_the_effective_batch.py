"""The exercises of notebook 04: group the micro-batches of an epoch, the tail included, and plan a schedule."""

from collections.abc import Callable, Iterator
from itertools import islice

from course_lib.batches import group_micro_batches, group_sizes, updates_per_epoch
from course_lib.exercises.engine import Exercise, expect, run_answer


class Once:
    """A loader of numbered micro-batches that can be gone through once and has no length, as a stream of data."""

    def __init__(self, number: int):
        self.number, self.was_read = number, False

    def __iter__(self) -> Iterator[int]:
        expect(not self.was_read, "The loader was read a second time; a stream of data can be read only once.")
        self.was_read = True
        return iter(range(self.number))

    def __repr__(self) -> str:
        return f"a loader of {self.number} micro-batches"


def judge_groups(function) -> str | None:
    """Compare groups with the library's for every epoch of up to 9 micro-batches and every K up to 5."""
    cases = [(4, 2), (5, 2), (3, 4), *((n, k) for n in range(10) for k in range(1, 6))]
    for number, steps in cases:

        def collect(loader, steps=steps):
            return [list(group) for group in function(loader, steps)]

        expect(callable(function), f"It must be a function; it is {function!r}.")
        found = run_answer(collect, Once(number), steps) if function else None
        wanted = list(group_micro_batches(range(number), steps))
        if found != wanted:
            return describe(found, wanted, number, steps)
    return None


def describe(found: list, wanted: list, number: int, steps: int) -> str:
    """Say how the groups of one epoch differ from the right ones."""
    sizes, right = [len(group) for group in found], group_sizes(number, steps)
    given = f"{number} micro-batches and K = {steps} gave groups of {sizes}"
    flat, everything = [item for group in found for item in group], list(range(number))
    if [] in found:
        return f"{given}: an empty group would be an update without data."
    if sizes and max(sizes) > steps:
        return f"{given}: no group may hold more than {steps}."
    if any(item not in everything for item in flat):
        return f"{given}, filled up with something that is no micro-batch of this epoch."
    if len(set(flat)) < len(flat):
        return f"{given}: some micro-batch was used twice."
    if len(flat) < number:
        lost = number - len(flat)
        if found == wanted[:-1]:
            return f"{given}, not {right}: the tail of {len(wanted[-1])} is lost."
        return f"{given}, not {right}: {lost} of the {number} are lost, and not only a tail."
    if flat != everything:
        return f"{given}, in another order than they came."
    return f"{given}, not {right}: the boundaries stand elsewhere."


# Right answers.


def by_islice(loader, accumulation_steps):
    micro_batches = iter(loader)
    while group := list(islice(micro_batches, accumulation_steps)):
        yield group


def by_slices(loader, accumulation_steps):
    everything = list(loader)
    return [everything[start : start + accumulation_steps] for start in range(0, len(everything), accumulation_steps)]


# Wrong answers.


def loses_the_tail(loader, accumulation_steps):
    group = []
    for micro_batch in loader:
        group.append(micro_batch)
        if len(group) == accumulation_steps:
            yield group
            group = []


def yields_an_empty_group(loader, accumulation_steps):
    yield from loses_the_tail(loader, accumulation_steps)
    yield []


def ends_with_an_empty_group(loader, accumulation_steps):
    group = []
    for micro_batch in loader:
        group.append(micro_batch)
        if len(group) == accumulation_steps:
            yield group
            group = []
    yield group


def steps_at_the_first(loader, accumulation_steps):
    group = []
    for i, micro_batch in enumerate(loader):
        group.append(micro_batch)
        if i % accumulation_steps == 0:
            yield group
            group = []
    if group:
        yield group


def never_clears_the_group(loader, accumulation_steps):
    group = []
    for i, micro_batch in enumerate(loader):
        group.append(micro_batch)
        if (i + 1) % accumulation_steps == 0:
            yield list(group)


def joins_the_tail(loader, accumulation_steps):
    groups = by_slices(loader, accumulation_steps)
    if len(groups) > 1 and len(groups[-1]) < accumulation_steps:
        tail = groups.pop()
        groups[-1] = groups[-1] + tail
    return groups


def fills_the_tail_up(loader, accumulation_steps):
    groups = by_slices(loader, accumulation_steps)
    if groups:
        groups[-1] = groups[-1] + [None] * (accumulation_steps - len(groups[-1]))
    return groups


def repeats_the_last(loader, accumulation_steps):
    groups = by_slices(loader, accumulation_steps)
    if groups:
        groups[-1] = groups[-1] + groups[-1][-1:] * (accumulation_steps - len(groups[-1]))
    return groups


def puts_the_tail_first(loader, accumulation_steps):
    everything = list(loader)
    tail = len(everything) % accumulation_steps
    first = [everything[:tail]] if tail else []
    return first + by_slices(everything[tail:], accumulation_steps)


def deals_like_cards(loader, accumulation_steps):
    everything = list(loader)
    number = -(-len(everything) // accumulation_steps)
    return [everything[start::number] for start in range(number)]


def asks_for_the_length(loader, accumulation_steps):
    return by_slices(list(loader)[: len(loader)], accumulation_steps)


def reads_twice(loader, accumulation_steps):
    number = len(list(loader))
    return by_slices(list(loader)[:number], accumulation_steps)


def keeps_every_kth(loader, accumulation_steps):
    return [[micro_batch] for i, micro_batch in enumerate(loader) if (i + 1) % accumulation_steps == 0]


# ---- 04.2: the length of a schedule ----------------------------------------------------------------------------------

PLANS = (  # num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail
    (1797, 16, 4, 10, False),
    (1797, 16, 4, 10, True),
    (1792, 16, 4, 3, False),
    (1800, 16, 113, 2, True),
    (5, 1, 2, 10, False),
    (5, 1, 2, 10, True),
    (60, 16, 4, 3, True),
    (16, 16, 4, 7, False),
    (16, 16, 4, 7, True),
    (1797, 16, 1, 1, True),
)


def in_all(num_samples: int, micro_batch_size: int) -> int:
    """Count the micro-batches of an epoch, the short one included."""
    return -(-num_samples // micro_batch_size)


# What other counts are, for (n, m, k, epochs, drop_tail).
OTHER_PLANS: dict[str, Callable[..., float]] = {
    "that is one epoch": lambda n, m, k, e, drop: updates_per_epoch(in_all(n, m), k, drop_tail=drop),
    "these are the micro-batches; the schedule advances once per update": lambda n, m, k, e, drop: in_all(n, m) * e,
    "the tail is left out, kept or not": lambda n, m, k, e, drop: in_all(n, m) // k * e,
    "the tail is counted, dropped or not": lambda n, m, k, e, drop: -(-in_all(n, m) // k) * e,
    "the tails of all epochs are joined; each epoch ends with its own": lambda n, m, k, e, drop: (
        in_all(n, m) * e // k if drop else -(-in_all(n, m) * e // k)
    ),
    "a short micro-batch is lost; it counts as one of K": lambda n, m, k, e, drop: (
        n // m // k * e if drop else -(-(n // m) // k) * e
    ),
    "a last group with a short micro-batch is dropped; it has its K micro-batches": lambda n, m, k, e, drop: (
        n // (m * k) * e if drop else -(-n // (m * k)) * e
    ),
    "that is a fraction; an update is made or not": lambda n, m, k, e, drop: n * e / (m * k),
    "these are samples over K": lambda n, m, k, e, drop: n * e / k,
    "drop_tail is used the wrong way round": lambda n, m, k, e, drop: (
        updates_per_epoch(in_all(n, m), k, drop_tail=not drop) * e
    ),
}


def judge_plan(function) -> str | None:
    """Compare with the updates that the library's loop makes, for plans with and without tails."""
    found = [run_answer(function, *plan) for plan in PLANS]
    right = [updates_per_epoch(in_all(n, m), k, drop_tail=drop) * e for n, m, k, e, drop in PLANS]
    for plan, value, wanted in zip(PLANS, found, right, strict=True):
        n, m, k, e, drop = plan
        given = (
            f"{n} samples in micro-batches of {m}, K = {k}, {e} epoch{'s' * (e > 1)}, "
            f"the tail {'dropped' if drop else 'kept'}"
        )
        expect(value is not None, f"{given}: it returned nothing; is there a return?")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number, f"{given}: it returned {value!r}, which is no number.")
        if value == wanted:
            continue
        gap = f"{value:g}, {abs(value - wanted):.3g} too {'many' if value > wanted else 'few'}"
        for text, count in OTHER_PLANS.items():
            if all(abs(a - count(*plan)) < 1e-9 for a, plan in zip(found, PLANS, strict=True)):
                return f"{given}: {gap}: {text}."
        return f"{given}: {gap}."
    if any(isinstance(value, float) for value in found):
        return "The numbers are right, but floats: a schedule wants an int."
    return None


def by_sizes(num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail):
    sizes = group_sizes(in_all(num_samples, micro_batch_size), accumulation_steps)
    return num_epochs * sum(size == accumulation_steps or not drop_tail for size in sizes)


def by_divmod(num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail):
    full, tail = divmod(in_all(num_samples, micro_batch_size), accumulation_steps)
    return num_epochs * (full + (tail > 0 and not drop_tail))


def by_counting(num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail):
    loader = range(0, num_samples, micro_batch_size)
    return sum(
        len(group) == accumulation_steps or not drop_tail
        for _ in range(num_epochs)
        for group in group_micro_batches(loader, accumulation_steps)
    )


EXERCISES = [
    Exercise(
        number="04.1",
        title="group the micro-batches",
        task="""
Write the generator that the right loop runs over: lists of `accumulation_steps` micro-batches in the order in which
they come, and at the end of the epoch what is left as a shorter list. The loader may be a stream: it has no length and
can be read once. A list of lists will do as well as a generator.
""",
        difficulty=2,
        importance=5,
        minutes=10,
        answer="my_groups",
        stub="""
def my_groups(loader, accumulation_steps):
    pass  # yield lists of micro-batches
""",
        judge=judge_groups,
        hints=(
            "Collect micro-batches in a list. When is it complete? What if the loader ends before that?",
            "Yield the list when it holds `accumulation_steps`, then begin a *new* list. One thing is left to do.",
            "After the loop: `if group: yield group`. Without the `if`, an epoch without a tail ends in an empty list.",
        ),
        solution="""
def my_groups(loader, accumulation_steps):
    group = []
    for micro_batch in loader:
        group.append(micro_batch)
        if len(group) == accumulation_steps:
            yield group
            group = []
    if group:
        yield group
""",
        closing="Every micro-batch once, no group above K, the tail kept: in all 50 epochs that were tried.",
        right=(by_islice, by_slices, group_micro_batches),
        wrong={
            "the tail of 1 is lost": loses_the_tail,
            "gave groups of [2, 2, 0]: an empty group": ends_with_an_empty_group,
            "5 micro-batches and K = 2 gave groups of [1, 2, 2]": puts_the_tail_first,
            "4 micro-batches and K = 2 gave groups of [1, 2, 1]": steps_at_the_first,
            "no group may hold more than 2": never_clears_the_group,
            "5 micro-batches and K = 2 gave groups of [2, 3]": joins_the_tail,
            "filled up with something": fills_the_tail_up,
            "some micro-batch was used twice": repeats_the_last,
            "in another order": deals_like_cards,
            "has no len()": asks_for_the_length,
            "read a second time": reads_twice,
            "2 of the 4 are lost": keeps_every_kth,
            "is not iterable": lambda loader, accumulation_steps: 0,
            "It must be a function": [[0, 1], [2]],
        },
    ),
    Exercise(
        number="04.2",
        title="plan the schedule",
        task="""
A learning-rate schedule has to reach 0 at the last update. How many updates will the training make? `num_samples` are
cut into micro-batches of `micro_batch_size`, the last one short if need be, and grouped by `accumulation_steps`. Each
epoch ends with its own short group, which is kept, or dropped if `drop_tail` is true.
""",
        difficulty=2,
        importance=4,
        minutes=6,
        answer="schedule_length",
        stub="""
def schedule_length(num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail):
    pass  # the number of updates
""",
        judge=judge_plan,
        hints=(
            "Count in this order: micro-batches of an epoch, groups of an epoch, groups of all epochs. Where does each "
            "division round up, and where down?",
            "A short micro-batch is a micro-batch, so the first division rounds up. The second rounds up or down, as "
            "`drop_tail` says. Only then come the epochs.",
            "`-(-a // b)` rounds up. Micro-batches: `-(-num_samples // micro_batch_size)`. Groups: the same by "
            "`accumulation_steps`, or `//` if the tail is dropped. Times `num_epochs`.",
        ),
        solution="""
def schedule_length(num_samples, micro_batch_size, accumulation_steps, num_epochs, drop_tail):
    micro_batches = -(-num_samples // micro_batch_size)  # rounded up: a short one counts
    if drop_tail:
        return num_epochs * (micro_batches // accumulation_steps)
    return num_epochs * -(-micro_batches // accumulation_steps)
""",
        closing="The schedule ends with the training, in all ten plans. In your code, let plan and loop share it.",
        right=(by_sizes, by_divmod, by_counting),
        wrong={
            "that is one epoch": lambda n, m, k, e, drop: by_sizes(n, m, k, 1, drop),
            "these are the micro-batches": lambda n, m, k, e, drop: in_all(n, m) * e,
            "the tail is left out": lambda n, m, k, e, drop: in_all(n, m) // k * e,
            "the tail is counted, dropped or not": lambda n, m, k, e, drop: -(-in_all(n, m) // k) * e,
            "the tails of all epochs are joined": lambda n, m, k, e, drop: (
                in_all(n, m) * e // k if drop else -(-in_all(n, m) * e // k)
            ),
            "a short micro-batch is lost": lambda n, m, k, e, drop: by_sizes(n // m * m, m, k, e, drop),
            "a last group with a short micro-batch is dropped": lambda n, m, k, e, drop: (
                n // (m * k) * e if drop else -(-n // (m * k)) * e
            ),
            "that is a fraction": lambda n, m, k, e, drop: n * e / (m * k),
            "these are samples over K": lambda n, m, k, e, drop: n * e / k,
            "the wrong way round": lambda n, m, k, e, drop: by_sizes(n, m, k, e, not drop),
            "but floats": lambda n, m, k, e, drop: float(by_sizes(n, m, k, e, drop)),
            "10 epochs, the tail kept: 291, 1 too many": lambda n, m, k, e, drop: by_sizes(n, m, k, e, drop) + 1,
            "which is no number": lambda n, m, k, e, drop: [by_sizes(n, m, k, 1, drop)] * e,
            "it returned nothing": lambda n, m, k, e, drop: print(by_sizes(n, m, k, e, drop)),
            "It must be a function": 290,
        },
    ),
]
