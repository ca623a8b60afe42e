"""The exercises of notebook 00: multiply an effective batch, and solve one for the accumulation steps."""

import operator
from fractions import Fraction

import torch

from course_lib.batches import effective_batch_size, solve_effective_batch
from course_lib.exercises.engine import Exercise, expect, run_answer

MICRO_BATCH_SIZE, STEPS, DEVICES = 12, 5, 2

# What other products and sums of the three numbers are the answer to.
OTHERS = {
    MICRO_BATCH_SIZE: "one forward pass on one GPU sees",
    STEPS: "are the passes that one GPU makes for an update",
    DEVICES: "are the GPUs",
    MICRO_BATCH_SIZE * STEPS: "one GPU contributes to an update",
    MICRO_BATCH_SIZE * DEVICES: "both GPUs together see in one pass",
    STEPS * DEVICES: "are the micro-batches of an update",
    MICRO_BATCH_SIZE + STEPS + DEVICES: "is the sum of the three; each pass of each GPU brings its own samples",
}


def judge_product(answer) -> str | None:
    """Compare with the product of the three numbers, and name what another number would be."""
    try:
        number = answer.item() if isinstance(answer, torch.Tensor) else answer
        value = float(number)
    except (TypeError, ValueError, RuntimeError):
        return f"It must be a number; it is {answer!r}."
    expect(not isinstance(number, bool | str), f"It must be a number; it is {answer!r}.")
    right = effective_batch_size(MICRO_BATCH_SIZE, STEPS, DEVICES)
    if value == right:
        return None
    if value in OTHERS:
        return f"{value:g} {OTHERS[value]}; what an update sees is {right / value:.3g} times that."
    if value == right * DEVICES:
        return f"{value:g} is twice too many: the GPUs were counted twice."
    return f"{value:g} is {abs(value - right):g} too {'many' if value > right else 'few'}."


CASES = ((64, 16, 1), (64, 16, 2), (256, 4, 8), (120, 12, 2), (96, 96, 1), (2048, 8, 4), (30, 3, 5))

# What other formulas give for (batch, micro_batch_size, num_devices), and what that is.
FORMULAS = {
    "the devices are left out": lambda b, m, d: Fraction(b, m),
    "that is multiplied by the devices, not divided": lambda b, m, d: Fraction(b, m) * d,
    "the micro-batch is left out": lambda b, m, d: Fraction(b, d),
    "that is the fraction upside down": lambda b, m, d: Fraction(m * d, b),
    "that is a product; the batch is to be divided": lambda b, m, d: Fraction(b * m * d),
    "that is one step too many": lambda b, m, d: Fraction(b, m * d) + 1,
    "that is the share of one device in the batch, with the micro-batch taken away": lambda b, m, d: Fraction(b, d) - m,
}


def judge_steps(function) -> str | None:
    """Compare with the one number that solves the equation, for several recipes."""
    found = [run_answer(function, *case) for case in CASES]
    right = [
        solve_effective_batch(effective_batch_size=b, micro_batch_size=m, world_size=d).accumulation_steps
        for b, m, d in CASES
    ]
    for case, value, wanted in zip(CASES, found, right, strict=True):
        b, m, d = case
        given = f"For a batch of {b}, micro-batches of {m} and {d} device{'s' * (d > 1)}"
        expect(value is not None, f"{given} it returned nothing; is there a return?")
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"{given} it returned {value!r}, which is no number."
        if number == wanted:
            continue
        same = [text for text, f in FORMULAS.items() if all(map(is_close, found, (f(*case) for case in CASES)))]
        reached = f"{m} x {number:g} x {d} = {m * number * d:g}, not {b}"
        return f"{given} it returned {number:g}: {reached}{'; ' + same[0] if same else ''}."
    for value in found:
        try:
            operator.index(value)
        except TypeError:
            return f"The number is right, but it is {value!r}, and range({value!r}) is an error: divide with //."
    return None


def is_close(value, wanted) -> bool:
    """Say whether a value is this number, to rounding; a value that is no number is not."""
    try:
        return abs(float(value) - float(wanted)) <= 1e-9 * abs(float(wanted))
    except (TypeError, ValueError):
        return False


EXERCISES = [
    Exercise(
        number="00.1",
        title="multiply",
        task=f"""
A training runs on {DEVICES} GPUs. Its settings say `per_device_train_batch_size={MICRO_BATCH_SIZE}` and
`gradient_accumulation_steps={STEPS}`. How many samples does one update see? Put the number in place of `None`, run the
cell, then run the check below it.
""",
        difficulty=1,
        importance=5,
        minutes=2,
        answer="samples_per_update",
        stub="""
samples_per_update = None  # your answer
""",
        judge=judge_product,
        hints=(
            "How many samples does one GPU see in one pass? How many passes come before the step? How many GPUs?",
            "Each of the three numbers multiplies the others: no pass sees the samples of another one.",
            "Micro-batch size x accumulation steps x GPUs.",
        ),
        solution=f"""
samples_per_update = {MICRO_BATCH_SIZE} * {STEPS} * {DEVICES}
""",
        closing="This product is the effective batch size. It is the batch that a learning rate is tuned for.",
        right=(120.0, torch.tensor(120)),
        wrong={
            "one forward pass on one GPU sees": 12,
            "are the passes that one GPU makes": 5,
            "are the GPUs": 2,
            "one GPU contributes to an update": 60,
            "both GPUs together see in one pass": 24,
            "are the micro-batches of an update": 10,
            "is the sum of the three": 19,
            "counted twice": 240,
            "100 is 20 too few": 100,
            "130 is 10 too many": 130,
            "It must be a number; it is 'twelve'": "twelve",
        },
    ),
    Exercise(
        number="00.2",
        title="solve for K",
        task="""
A recipe was tuned for `batch` samples an update. A device holds `micro_batch_size` of them at once, and `num_devices`
devices share the work. Return K, the number of accumulation steps that restores the recipe's batch. It is one line. The
check asks for several recipes, all of which have a whole K.
""",
        difficulty=1,
        importance=4,
        minutes=3,
        answer="steps_for",
        stub="""
def steps_for(batch, micro_batch_size, num_devices):
    pass  # return K
""",
        judge=judge_steps,
        hints=(
            "Write the product of exercise 00.1 with K in it, and set it equal to `batch`.",
            "micro_batch_size x K x num_devices = batch. Solve for K. A count is an int.",
            "Divide `batch` by the product of the other two, with `//`.",
        ),
        solution="""
def steps_for(batch, micro_batch_size, num_devices):
    return batch // (micro_batch_size * num_devices)
""",
        closing="With K found like this, the recipe's batch is restored, and its learning rate can stay.",
        right=(
            lambda batch, micro_batch_size, num_devices: batch // num_devices // micro_batch_size,
            lambda batch, micro_batch_size, num_devices: round(batch / micro_batch_size / num_devices),
            lambda batch, micro_batch_size, num_devices: (
                solve_effective_batch(
                    effective_batch_size=batch, micro_batch_size=micro_batch_size, world_size=num_devices
                ).accumulation_steps
            ),
        ),
        wrong={
            "the devices are left out": lambda b, m, d: b // m,
            "multiplied by the devices": lambda b, m, d: b // m * d,
            "the micro-batch is left out": lambda b, m, d: b // d,
            "upside down": lambda b, m, d: m * d / b,
            "that is a product": lambda b, m, d: b * m * d,
            "one step too many": lambda b, m, d: b // (m * d) + 1,
            "range(4.0) is an error": lambda b, m, d: b / (m * d),
            "16 x 4 x 2 = 128, not 64": lambda b, m, d: 4,
            "it returned nothing": lambda b, m, d: print(b // m),
            "which is no number": lambda b, m, d: [b // (m * d)],
            "NameError": lambda b, m, d: batch // (m * d),  # noqa: F821
            "It must be a function; it is 4": 4,
        },
    ),
]
