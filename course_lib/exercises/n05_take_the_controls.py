"""The exercises of notebook 05: find a setting for an effective batch and a budget, and read a size off two peaks."""

from collections.abc import Callable
from fractions import Fraction

from course_lib.exercises.engine import Exercise, expect, run_answer

MIB = 2**20


def peak_of(size: int) -> int:
    """A peak as the control room shows it: a floor, and so many bytes a sample."""
    return 3 * MIB + size * MIB // 4


# ---- 05.1: a setting -------------------------------------------------------------------------------------------------

GOALS = ((64, 7 * MIB), (256, 8 * MIB), (48, 8 * MIB), (97, 9 * MIB), (64, 100 * MIB), (60, 6 * MIB), (64, 2 * MIB))


def right_setting(peak_of, effective_batch, budget):
    fitting = [
        size for size in range(1, effective_batch + 1) if effective_batch % size == 0 and peak_of(size) <= budget
    ]
    return (max(fitting), effective_batch // max(fitting)) if fitting else None


def judge_setting(function) -> str | None:
    """Look at each setting: does it reach the batch, does it fit, is there a larger micro-batch that does too?"""
    for goal, budget in GOALS:
        found = run_answer(function, peak_of, goal, budget)
        wanted = right_setting(peak_of, goal, budget)
        given = f"Effective batch {goal} within {budget // MIB} MiB: "
        if wanted is None:
            least = f"one sample alone takes {peak_of(1) / MIB:.2f} MiB"
            expect(found is None, f"{given}nothing fits, {least}; return None. You returned {found!r}.")
            continue
        expect(found is not None, f"{given}it returned None, but {wanted[0]} x {wanted[1]} fits.")
        is_pair = isinstance(found, tuple | list) and len(found) == 2 and all(type(one) is int for one in found)
        expect(is_pair, f"{given}it must return two whole numbers (micro-batch size, steps); it returned {found!r}.")
        size, steps = found
        expect(size >= 1 and steps >= 1, f"{given}{size} x {steps} is no setting: both are at least 1.")
        swapped = (steps, size) == wanted and size != steps
        expect(not swapped, f"{given}{size} x {steps} is turned round: the micro-batch size comes first.")
        reached = size * steps
        how = f"{abs(reached - goal)} samples too {'many' if reached > goal else 'few'}"
        expect(reached == goal, f"{given}{size} x {steps} is {reached}, {how}.")
        over = (peak_of(size) - budget) / MIB
        expect(over <= 0, f"{given}{size} x {steps} reaches it, but needs {over:.2f} MiB more than there is.")
        more = f"{steps} passes where {wanted[1]} would do, since {wanted[0]} x {wanted[1]} fits"
        expect(size == wanted[0], f"{given}{size} x {steps} is right but slow: {more}.")
    return None


def by_steps(peak_of, effective_batch, budget):
    for steps in range(1, effective_batch + 1):
        size, rest = divmod(effective_batch, steps)
        if not rest and peak_of(size) <= budget:
            return size, steps
    return None


def from_above(peak_of, effective_batch, budget):
    size = effective_batch
    while size and (effective_batch % size or peak_of(size) > budget):
        size -= 1
    return [size, effective_batch // size] if size else None


def fits(peak_of, effective_batch, budget) -> int:
    return max((size for size in range(1, effective_batch + 1) if peak_of(size) <= budget), default=1)


def rounded_down(peak_of, effective_batch, budget):
    size = fits(peak_of, effective_batch, budget)
    return size, effective_batch // size


def rounded_up(peak_of, effective_batch, budget):
    size = fits(peak_of, effective_batch, budget)
    return size, -(-effective_batch // size)


def halved(peak_of, effective_batch, budget):
    size = effective_batch
    while size > 1 and peak_of(size) > budget:
        size //= 2
    return (size, effective_batch // size) if peak_of(size) <= budget else None


def strictly_below(peak_of, effective_batch, budget):
    return right_setting(peak_of, effective_batch, budget - 1)


# ---- 05.2: the size behind two peaks ---------------------------------------------------------------------------------

PEAKS = (  # two (size, peak), a budget
    ((8, 500), (16, 800), 2000),
    ((1, 137), (4, 248), 1000),
    ((16, 800), (8, 500), 1999),
    ((2, 300), (3, 400), 200),
    ((2, 300), (3, 400), 199),
    ((10, 100), (20, 200), 150),
    ((1, 1000), (2, 1010), 900),
)


def right_size(first, second, budget):
    (m, p), (n, q) = first, second
    return max(0, (budget * (n - m) - (p * n - q * m)) // (q - p)) if n > m else right_size(second, first, budget)


OTHER_SIZES: dict[str, Callable] = {
    "the floor is left out: only a part of the peak grows with the size": lambda a, b, c: c * b[0] // b[1],
    "that is the budget over the bytes of a sample; the floor is in the budget too": lambda a, b, c: int(
        c // ((b[1] - a[1]) / (b[0] - a[0]))
    ),
    "the first peak is taken for the floor": lambda a, b, c: max(0, int((c - a[1]) // ((b[1] - a[1]) / (b[0] - a[0])))),
    "that is the first size that does not fit": lambda a, b, c: right_size(a, b, c) + 1,
    "it is below 0 where the floor alone is too much: return 0": lambda a, b, c: (
        int((c - a[1]) // ((b[1] - a[1]) / (b[0] - a[0]))) + a[0]
    ),
    "it is at least 1 even where nothing fits": lambda a, b, c: max(1, right_size(a, b, c)),
    "the bytes of a sample are the difference of the peaks over that of the sizes": lambda a, b, c: max(
        0, (c - (a[1] - a[0] * (b[1] - a[1]))) // abs(b[1] - a[1])
    ),
}


def judge_size(function) -> str | None:
    """Compare with the line through two peaks, for seven budgets."""
    found = [run_answer(function, *case) for case in PEAKS]
    for (first, second, budget), value in zip(PEAKS, found, strict=True):
        given = f"Peaks of {first[1]} at {first[0]} and {second[1]} at {second[0]}, budget {budget}: "
        expect(value is not None, f"{given}it returned nothing; is there a return?")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number, f"{given}it must return a whole number; it returned {value!r}.")
        wanted = right_size(first, second, budget)
        if value == wanted:
            continue
        text = f"{given}{value:.4g}, {abs(value - wanted):.3g} too {'many' if value > wanted else 'few'}"
        for why, other in OTHER_SIZES.items():
            if found == [other(*case) for case in PEAKS]:
                return f"{text}: {why}."
        if isinstance(value, float) and value // 1 == wanted:
            return f"{text}: a fraction of a sample is no sample; round down."
        return f"{text}."
    expect(all(isinstance(value, int) for value in found), "The numbers are right, but floats: a size is an int.")
    return None


def by_walking(first, second, budget):
    (m, p), (n, q) = first, second
    size = 0
    while p + (q - p) / (n - m) * (size + 1 - m) <= budget + 1e-9:
        size += 1
    return size


def by_fractions(first, second, budget):
    each = Fraction(second[1] - first[1], second[0] - first[0])
    return max(0, int((budget - (first[1] - each * first[0])) // each))


EXERCISES = [
    Exercise(
        number="05.1",
        title="find the setting",
        task="""
The missions by a function. `peak_of(size)` predicts the bytes at the peak with micro-batches of `size`; it grows with
the size. Return `(micro_batch_size, accumulation_steps)` whose product is exactly `effective_batch`, that fits into
`budget` and makes the fewest passes. Return None if nothing fits.
""",
        difficulty=2,
        importance=4,
        minutes=6,
        answer="find_setting",
        stub="""
def find_setting(peak_of, effective_batch, budget):
    pass  # (micro_batch_size, accumulation_steps), or None
""",
        judge=judge_setting,
        hints=(
            "Fewest passes means the largest micro-batch. Which sizes reach the effective batch exactly?",
            "Those that divide it, and not only halves of it: 48 has 24, 16, 12 and so on. Go from the largest down.",
            "For `steps` from 1 to `effective_batch`: if it divides `effective_batch` and `peak_of` of the quotient is "
            "at most `budget`, return both. After the loop nothing fits.",
        ),
        solution="""
def find_setting(peak_of, effective_batch, budget):
    for steps in range(1, effective_batch + 1):
        size = effective_batch // steps
        if size * steps == effective_batch and peak_of(size) <= budget:
            return size, steps
    return None
""",
        closing="Seven goals, one of which cannot be reached, and it says so.",
        right=(right_setting, by_steps, from_above),
        wrong={
            "64 x 1 reaches it, but needs 12.00 MiB more": lambda p, n, b: (n, 1),
            "1 x 64 is right but slow: 64 passes where 4": lambda p, n, b: (1, n) if p(1) <= b else None,
            "20 x 12 is 240, 16 samples too few": rounded_down,
            "20 x 13 is 260, 4 samples too many": rounded_up,
            "12 x 4 is right but slow: 4 passes where 3": halved,
            "8 x 8 is right but slow: 8 passes where 4": strictly_below,
            "4 x 16 is turned round": lambda p, n, b: (right_setting(p, n, b) or (0, 0))[::-1],
            "nothing fits": lambda p, n, b: right_setting(p, n, max(b, 4 * MIB)),
            "it must return two whole numbers": lambda p, n, b: right_setting(p, n, b)[0],
            "it returned None, but 16 x 4 fits": lambda p, n, b: print(right_setting(p, n, b)),
            "0 x 64 is no setting": lambda p, n, b: (0, n),
            "It must be a function": (16, 4),
        },
    ),
    Exercise(
        number="05.2",
        title="read the size off two peaks",
        task="""
You have measured two peaks, `first` and `second`, each a pair `(micro_batch_size, peak_bytes)`. The peak is a straight
line over the size. Return the largest micro-batch that fits into `budget`, 0 if none does.
""",
        difficulty=2,
        importance=3,
        minutes=5,
        answer="largest_that_fits",
        stub="""
def largest_that_fits(first, second, budget):
    pass  # a whole number
""",
        judge=judge_size,
        hints=(
            "Two points give a line. What is its slope, and where does it meet size 0?",
            "The slope is the bytes of one sample; the floor is a peak less its samples' bytes. The rest of the budget "
            "is for samples.",
            "`each = (q - p) / (n - m)`, `floor = p - each * m`, then `(budget - floor) // each`, at least 0, an int.",
        ),
        solution="""
def largest_that_fits(first, second, budget):
    (m, p), (n, q) = first, second
    each = (q - p) / (n - m)  # bytes of one sample
    floor = p - each * m  # bytes of a model without samples
    return max(0, int((budget - floor) // each))
""",
        closing="Two measurements, and no crash. Measure the answer once: a peak can change its moment, and its slope.",
        right=(right_size, by_walking, by_fractions),
        wrong={
            **OTHER_SIZES,
            "round down": lambda a, b, c: max(0.0, (c - a[1]) / ((b[1] - a[1]) / (b[0] - a[0])) + a[0]),
            "but floats": lambda a, b, c: float(right_size(a, b, c)),
            "it returned nothing": lambda a, b, c: print(right_size(a, b, c)),
            "It must be a function": 48,
        },
    ),
]
