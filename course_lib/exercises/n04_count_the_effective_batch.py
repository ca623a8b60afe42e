"""The exercises of notebook 04: group the micro-batches of an epoch, the tail included."""

from collections.abc import Iterator
from itertools import islice

from course_lib.batches import group_micro_batches, group_sizes
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
]
