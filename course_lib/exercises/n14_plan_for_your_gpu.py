"""The exercises of notebook 14: balance the micro-batches of a plan, and find the largest in few questions."""

import bisect
from collections.abc import Callable
from itertools import pairwise

from course_lib.exercises.engine import Exercise, NotYet, expect, run_answer
from course_lib.planning import balanced_sizes

# ---- 14.1: balanced sizes --------------------------------------------------------------------------------------------

PLANS = ((64, 19), (64, 64), (64, 100), (10, 4), (7, 1), (65, 16), (100, 33), (1, 5))  # samples, largest that fits


def right_sizes(effective_batch, largest):
    return balanced_sizes(effective_batch, -(-effective_batch // largest))


def judge_sizes(function) -> str | None:
    """Look at each list: does it fit, does it hold all samples, in the fewest steps, as evenly as can be?"""
    for samples, largest in PLANS:
        found = run_answer(function, samples, largest)
        given = f"{samples} samples, at most {largest} at a time: "
        expect(found is not None, f"{given}it returned nothing; is there a return?")
        is_list = isinstance(found, list | tuple) and all(type(one) is int for one in found)
        expect(is_list, f"{given}it must return a list of whole numbers; it returned {found!r}.")
        shown = f"{given}{list(found)[:6]}{' and so on' if len(found) > 6 else ''}"
        wanted = right_sizes(samples, largest)
        expect(all(size >= 1 for size in found), f"{shown} has a step without samples.")
        over = max(found, default=0) - largest
        expect(over <= 0, f"{shown} has a micro-batch that is {over} too large.")
        gap = sum(found) - samples
        expect(not gap, f"{shown} holds {sum(found)} samples, {abs(gap)} too {'many' if gap > 0 else 'few'}.")
        expect(len(found) == len(wanted), f"{shown} makes {len(found)} steps; {len(wanted)} are enough.")
        spread = max(found) - min(found)
        expect(spread <= 1, f"{shown} differ by {spread}; {wanted[0]} would be the largest if they were balanced.")
    return None


def by_turns(effective_batch, largest):
    sizes = [0] * -(-effective_batch // largest)
    for place in range(effective_batch):
        sizes[place % len(sizes)] += 1
    return sizes


def by_edges(effective_batch, largest):
    steps = (effective_batch + largest - 1) // largest
    edges = [place * effective_batch // steps for place in range(steps + 1)]
    return tuple(b - a for a, b in pairwise(edges))


def filled_up(effective_batch, largest):
    full, rest = divmod(effective_batch, largest)
    return [largest] * full + [rest] * (rest > 0)


def only_divisors(effective_batch, largest):
    size = max(size for size in range(1, largest + 1) if effective_batch % size == 0)
    return [size] * (effective_batch // size)


def steps_rounded_down(effective_batch, largest):
    return balanced_sizes(effective_batch, max(1, effective_batch // largest))


# ---- 14.2: few questions ---------------------------------------------------------------------------------------------


class Peaks:
    """A prediction that counts how often it was asked. The peak never falls with the size, and is no straight line."""

    def __init__(self, floor: int, slopes: tuple[int, int], kink: int, most: int):
        self.floor, self.slopes, self.kink, self.most, self.asked = floor, slopes, kink, most, 0

    def at(self, size: int) -> int:
        low, high = self.slopes
        return self.floor + low * min(size, self.kink) + high * max(0, size - self.kink)

    def __call__(self, size: int) -> int:
        expect(type(size) is int, f"A size must be a whole number; {size!r} was asked for.")
        expect(1 <= size <= self.most, f"A size of {size} was asked for; there are sizes from 1 to {self.most}.")
        self.asked += 1
        if self.asked > 2000:
            raise NotYet("More than 2000 predictions were asked for.")
        return self.at(size)

    def __repr__(self) -> str:
        return "peak_of"


SEARCHES = (  # floor, slopes before and after a kink, kink, batch size, budget
    (100, (10, 30), 20, 64, 291),
    (100, (10, 30), 20, 64, 290),
    (100, (10, 30), 20, 1024, 9000),
    (100, (30, 10), 200, 1024, 10000),
    (100, (10, 30), 20, 1024, 10**6),
    (100, (10, 30), 20, 1024, 110),
    (100, (10, 30), 20, 1024, 109),
    (100, (10, 30), 20, 1, 500),
    (0, (1, 1), 5, 1000, 513),
)
MOST = 14  # questions for up to 1024 sizes; halving takes 11


def judge_search(function) -> str | None:
    """Compare with the largest size that fits, and count the predictions."""
    for floor, slopes, kink, most, budget in SEARCHES:
        peaks = Peaks(floor, slopes, kink, most)
        found = run_answer(function, peaks, most, budget)
        given = f"Batch of {most}, budget {budget}: "
        expect(found is not None, f"{given}it returned nothing; is there a return?")
        expect(type(found) is int, f"{given}it must return a whole number; it returned {found!r}.")
        wanted = sum(peaks.at(size) <= budget for size in range(1, most + 1))
        if found != wanted:
            if not 0 <= found <= most:
                return f"{given}{found} is no size of this batch."
            if not wanted:
                return f"{given}nothing fits, so it is 0, not {found}."
            if peaks.at(found) > budget:
                return f"{given}{found} needs {peaks.at(found)}, {peaks.at(found) - budget} too much."
            return f"{given}{found} fits, but {wanted} does too, larger by {wanted - found}."
        expect(peaks.asked, f"{given}right, but no prediction was asked for.")
        expect(peaks.asked <= MOST, f"{given}right, but with {peaks.asked} predictions; {MOST} must do.")
    return None


def by_bisect(peak_of, batch_size, budget):
    return bisect.bisect_right(range(1, batch_size + 1), budget, key=peak_of)


def by_powers(peak_of, batch_size, budget):
    size, step = 0, 1 << batch_size.bit_length()
    while step:
        if size + step <= batch_size and peak_of(size + step) <= budget:
            size += step
        step //= 2
    return size


def searching(low: int = 0, fits: Callable = lambda peak, budget: peak <= budget, above: int = 1, add: int = 0):
    """A search by halves with an end, a comparison or a result that is off."""

    def answer(peak_of, batch_size, budget):
        bottom, top = low, batch_size + above  # bottom fits, top does not
        while top - bottom > 1:
            middle = (bottom + top) // 2
            bottom, top = (middle, top) if fits(peak_of(middle), budget) else (bottom, middle)
        return bottom + add

    return answer


def one_by_one(peak_of, batch_size, budget):
    return sum(peak_of(size) <= budget for size in range(1, batch_size + 1))


def by_halving(peak_of, batch_size, budget):
    size = batch_size
    while size and peak_of(size) > budget:
        size //= 2
    return size


def by_a_line(peak_of, batch_size, budget):
    if batch_size == 1:
        return int(peak_of(1) <= budget)
    each = peak_of(2) - peak_of(1)
    return max(0, min(batch_size, (budget - peak_of(1) + each) // each))


EXERCISES = [
    Exercise(
        number="14.1",
        title="balance the steps",
        task="""
At most `largest` samples fit. Return the list of the micro-batch sizes of one update: together they hold
`effective_batch` samples, in the fewest steps, and they differ by at most one.
""",
        difficulty=2,
        importance=4,
        minutes=5,
        answer="step_sizes",
        stub="""
def step_sizes(effective_batch, largest):
    pass  # a list of sizes
""",
        judge=judge_sizes,
        hints=(
            "First the number of steps, from `largest`. Then forget `largest`.",
            "The steps are `effective_batch / largest`, rounded up. Divide the samples by the steps: what is the rest?",
            "`size, rest = divmod(effective_batch, steps)`: `rest` steps of `size + 1`, the others of `size`.",
        ),
        solution="""
def step_sizes(effective_batch, largest):
    steps = -(-effective_batch // largest)  # rounded up
    size, rest = divmod(effective_batch, steps)
    return [size + 1] * rest + [size] * (steps - rest)
""",
        closing="As few steps as can be, and a lower peak than the largest that fits would give.",
        right=(right_sizes, by_turns, by_edges),
        wrong={
            "differ by 12": filled_up,
            "16] makes 4 steps": lambda n, m: right_sizes(n, max(1, m - 1)) if n != 64 or m != 64 else [16] * 4,
            "makes 5 steps; 3 are enough": only_divisors,
            "has a micro-batch that is 3 too large": steps_rounded_down,
            "has a micro-batch that is 45 too large": lambda n, m: [n],
            "57 samples, 7 too few": lambda n, m: [m] * (n // m),
            "76 samples, 12 too many": lambda n, m: [m] * -(-n // m),
            "makes 64 steps": lambda n, m: [1] * n,
            "a step without samples": lambda n, m: [*right_sizes(n, m), 0],
            "it must return a list of whole numbers": lambda n, m: (-(-n // m)) * 1.0,
            "it returned nothing": lambda n, m: print(right_sizes(n, m)),
            "It must be a function": [16, 16, 16, 16],
        },
    ),
    Exercise(
        number="14.2",
        title="ask few questions",
        task="""
`peak_of(size)` predicts the peak of one size from 1 to `batch_size`. It never falls as the size grows, but it is not a
straight line. Return the largest size whose peak is at most `budget`, 0 if none is. A prediction takes time: ask for
at most 14 among 1024 sizes.
""",
        difficulty=3,
        importance=3,
        minutes=8,
        answer="largest_micro_batch",
        stub="""
def largest_micro_batch(peak_of, batch_size, budget):
    pass  # a size
""",
        judge=judge_search,
        hints=(
            "One question can rule out half of the sizes that are left. Which one?",
            "Keep two sizes: one that fits, one that does not. At the start these are 0 and `batch_size + 1`, which "
            "need no question. Ask in the middle.",
            "While `too_large - fits > 1`: `middle = (fits + too_large) // 2`; if `peak_of(middle) <= budget`, `fits = "
            "middle`, else `too_large = middle`. Return `fits`.",
        ),
        solution="""
def largest_micro_batch(peak_of, batch_size, budget):
    fits, too_large = 0, batch_size + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if peak_of(middle) <= budget:
            fits = middle
        else:
            too_large = middle
    return fits
""",
        closing="Eleven questions at most for 1024 sizes. plan_batch asks where a known line meets the budget: fewer.",
        right=(by_bisect, by_powers, searching()),
        wrong={
            "right, but with 64 predictions": one_by_one,
            "16 fits, but 19 does too, larger by 3": by_halving,
            "budget 9000: 890 needs": by_a_line,
            "budget 290: 18 fits, but 19 does too": searching(fits=lambda peak, budget: peak < budget),
            "20 needs 300, 9 too much": searching(add=1),
            "budget 291: 18 fits, but 19 does too": searching(add=-1),
            "nothing fits, so it is 0": lambda p, n, b: max(1, searching()(p, n, b)),
            "1023 fits, but 1024 does too": searching(above=0),
            "64 needs 1620": lambda p, n, b: n,
            "1 fits, but 19 does too": lambda p, n, b: 1,
            "A size of 65 was asked for": lambda p, n, b: next(s for s in range(n + 1, 0, -1) if p(s) <= b),
            "A size must be a whole number": lambda p, n, b: p(n / 2),
            "it must return a whole number": lambda p, n, b: float(searching()(p, n, b)),
            "it returned nothing": lambda p, n, b: print(searching()(p, n, b)),
            "It must be a function": 19,
        },
    ),
]
