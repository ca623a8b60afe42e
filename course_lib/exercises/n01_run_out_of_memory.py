"""The exercises of notebook 01: count activations by hand, and search for the largest batch that fits."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from course_lib.datasets import load_digits
from course_lib.exercises.engine import Exercise, expect, run_answer
from course_lib.memory import measure_memory, memory_budget
from course_lib.models import dense_net

# ---- 01.1: bytes of activations by hand ------------------------------------------------------------------------------

NETS = ((64, (64, 64)), (16, (128,)), (3, (32, 256, 16)), (1, (5,)), (7, ()))
CLASSES, PIXELS, LABEL = 10, 64, 8


def measured_activations(num_digits: int, hidden: tuple[int, ...]) -> int:
    """Measure the most bytes of activations in one pass of a dense network over so many digits."""
    model, batch = dense_net(hidden=hidden), tuple(part.clone() for part in load_digits().first(num_digits))
    with measure_memory(model, batch) as meter:
        cross_entropy(model(batch[0]), batch[1]).backward()
    return max(meter.timeline.by_category["activations"])


# What is often counted too much or too little, in bytes, for (num_digits, hidden).
MISTAKES: dict[str, Callable[[int, tuple[int, ...]], int]] = {
    "the scores are left out: the loss keeps their log-probabilities, ten for each digit": (
        lambda n, hidden: -4 * n * CLASSES
    ),
    "the one number for the whole batch is left out: how many samples the loss was averaged over": (
        lambda n, hidden: -4
    ),
    "the scores and the one number for the whole batch are left out": lambda n, hidden: -4 * (n * CLASSES + 1),
    "each hidden layer is counted twice; a ReLU keeps its output, and nobody needs what it got": (
        lambda n, hidden: 4 * n * sum(hidden)
    ),
    "the images are counted; they are inputs, and on the device already": lambda n, hidden: 4 * n * PIXELS,
    "images and labels are counted; they are inputs, and on the device already": (
        lambda n, hidden: n * (4 * PIXELS + LABEL)
    ),
    "only the last hidden layer is counted": lambda n, hidden: -4 * n * sum(hidden[:-1]),
    "the scores are counted twice; only the log-probabilities are kept": lambda n, hidden: 4 * n * CLASSES,
    "the parameters are counted; they belong to the model, not to the batch": (
        lambda n, hidden: 4 * sum(p.numel() for p in dense_net(hidden=hidden).parameters())
    ),
}


def judge_bytes(function) -> str | None:
    """Hold the count against the meter, for several networks and batches."""
    found = [run_answer(function, *net) for net in NETS]
    right = [measured_activations(*net) for net in NETS]
    for net, value in zip(NETS, found, strict=True):
        given = f"For {net[0]} digits and hidden layers {net[1]}"
        expect(value is not None, f"{given} it returned nothing; is there a return?")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(is_number, f"{given} it returned {value!r}, which is no number.")
    if found == right:
        return None
    place = next(place for place, value in enumerate(found) if value != right[place])
    n, hidden = NETS[place]
    value, wanted = found[place], right[place]
    text = f"For {n} digits and hidden layers {hidden} it says {value:,}, and the meter {wanted:,} bytes"
    for factor, name in ((0.25, "numbers are counted, not bytes"), (2, "a float32 has 4 bytes, not 8")):
        if all(abs(a - factor * b) <= 1e-9 * b for a, b in zip(found, right, strict=True)):
            return f"{text}, {1 / factor:.3g} times that: {name}."
    if all(a * n == b - 4 + 4 * n for a, b, (n, _) in zip(found, right, NETS, strict=True)) and value < wanted:
        return f"{text}: this is one digit's; the batch has {n}."
    gap = f"{abs(value - wanted):,.0f} too {'many' if value > wanted else 'few'}"
    for name, excess in MISTAKES.items():
        if all(a - b == excess(*net) for a, b, net in zip(found, right, NETS, strict=True)):
            return f"{text}, {gap}: {name}."
    return f"{text}, {gap}."


def by_measuring(num_digits, hidden):
    return measured_activations(num_digits, hidden)


def by_listing(num_digits, hidden):
    numbers = [num_digits * width for width in hidden] + [num_digits * 10, 1]
    return sum(4 * number for number in numbers)


def by_hooks(num_digits, hidden):
    model, (inputs, targets) = dense_net(hidden=hidden), load_digits().first(num_digits)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), inputs, targets)}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(model(inputs), targets)
    del loss
    return sum(kept.values())


# ---- 01.2: the largest batch that fits -------------------------------------------------------------------------------

MOST_TRIES = 30
PER_DIGIT = 4 * 64 * 4  # four layers of 64 float32 numbers
LARGEST = (28, 37, 16, 1, 0, 2, 1000, 5000)


class TooManyTries(BaseException):
    """Not an Exception, so that a search that catches everything does not swallow it."""


class Device:
    """A device that holds `largest` digits: called with a number of digits, it fills real memory under a budget.

    Each try allocates four layers, one after the other. A failed try's layers live as long as its error does.
    """

    def __init__(self, largest: int, broken_above: int | None = None):
        self.largest, self.broken_above = largest, broken_above
        self.tries: list[Any] = []
        self.held = 0  # bytes that were still alive when a try began
        self.budget = memory_budget(max(largest * PER_DIGIT, PER_DIGIT // 2))

    def __call__(self, num_digits: int) -> None:
        self.tries.append(num_digits)
        if len(self.tries) > MOST_TRIES:
            raise TooManyTries
        self.held = max(self.held, self.budget.live_bytes)
        if self.broken_above is not None and num_digits > self.broken_above:
            raise RuntimeError("the shapes do not match")
        layers = []
        for _ in range(4):
            layers.append(torch.empty(min(num_digits, 4 * self.largest + 4), 64))  # more would fail alike

    def __repr__(self) -> str:
        return f"a device on which {self.largest} digits fit"


def judge_search(function) -> str | None:
    """Let the function search on devices of several sizes, and on one with an error that is not a lack of memory."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    for largest in LARGEST:
        message = one_search(function, Device(largest))
        if message:
            return message
    return error_goes_through(function)


def one_search(function: Callable, device: Device) -> str | None:
    """Search on one device."""

    def search(device):
        with device.budget:
            try:
                return function(device)
            except TooManyTries:
                return TooManyTries

    largest = device.largest
    found = run_answer(search, device)
    first = ", ".join(str(number) for number in device.tries[:6])
    text = f"On {device!r} (tries: {first}{', ...' * (len(device.tries) > 6)})"
    if found is TooManyTries:
        more = " It came back to 0 digits." if 0 in device.tries else ""
        return (
            f"{text} it was not done after {MOST_TRIES} tries; halve the gap between what fits and what does not.{more}"
        )
    expect(device.tries, f"On {device!r} it returned {found!r} without a single try.")
    expect(found is not None, f"{text} it returned nothing; is there a return?")
    expect(
        isinstance(found, int) and not isinstance(found, bool),
        f"{text} it returned {found!r}, which is no whole number.",
    )
    if found == largest:
        return None
    if device.held:
        return (
            f"{text} it returned {found}: {device.held:,} bytes of a failed try were still alive when the next began. "
            "An error keeps its tensors as long as the except block runs, or as long as you keep the error."
        )
    if found > largest:
        by = found - largest
        return f"{text} it returned {found}, {by} too many: so many do not fit."
    if found and found & (found - 1) == 0 and 2 * found > largest:
        return f"{text} it returned {found}, {largest - found} too few: a search by doubling ends at a power of two."
    return f"{text} it returned {found}, {largest - found} too few."


def error_goes_through(function: Callable) -> str | None:
    """See whether an error that has nothing to do with memory reaches the caller."""
    device = Device(5000, broken_above=100)

    def search(device):
        with device.budget:
            try:
                return function(device)
            except RuntimeError as error:
                return "went through" if "shapes" in str(error) else error
            except TooManyTries:
                return TooManyTries

    found = run_answer(search, device)
    if found == "went through":
        return None
    return (
        'A try raised RuntimeError("the shapes do not match"), which is no lack of memory, and the search took it for '
        "one. Catch torch.OutOfMemoryError only: it is a RuntimeError too, but not each RuntimeError is one."
    )


def fits(try_update, num_digits):
    try:
        try_update(num_digits)
    except torch.OutOfMemoryError:
        return False
    return True


def bit_by_bit(try_update):
    good = 0
    for bit in reversed(range(16)):
        if fits(try_update, good + 2**bit):
            good += 2**bit
    return good


def from_a_wide_gap(try_update):
    good, bad = 0, 2**20
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(try_update, middle) else (good, middle)
    return good


def with_a_flag(try_update):
    good, bad, size = 0, None, 1
    while bad is None or bad - good > 1:
        failed = False
        try:
            try_update(size)
        except torch.OutOfMemoryError:
            failed = True
        if failed:
            bad = size
        else:
            good = size
        size = 2 * good if bad is None else (good + bad) // 2
    return good


def by_doubling(try_update):
    size = 1
    while fits(try_update, size):
        size *= 2
    return size // 2


def one_by_one(try_update):
    size = 1
    while fits(try_update, size):
        size += 1
    return size - 1


def never_below_one(try_update):
    return max(1, bit_by_bit(try_update))


def first_that_fails(try_update):
    return bit_by_bit(try_update) + 1


def capped(try_update):
    return min(64, bit_by_bit(try_update))


def again_inside_except(try_update):
    def search(size):
        try:
            try_update(size)
        except torch.OutOfMemoryError:
            return search(size // 2)
        return size

    return search(64)


def keeps_the_errors(try_update):
    good, bad, errors = 0, 2**14, []
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            try_update(middle)
            good = middle
        except torch.OutOfMemoryError as error:
            errors.append(error)
            bad = middle
    return good


def catches_everything(try_update):
    good, bad = 0, 2**14
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            try_update(middle)
            good = middle
        except Exception:
            bad = middle
    return good


def does_not_catch(try_update):
    size = 1
    while True:
        try_update(size)
        size *= 2


def ten_percent_less(try_update):
    size = 64
    while size and not fits(try_update, size):
        size = int(size * 0.9)
    return size


EXERCISES = [
    Exercise(
        number="01.1",
        title="count the activations of a dense network",
        task="""
`dense_net(hidden=(64, 64))` flattens the 64 pixels of a digit and has a linear layer with a ReLU for each entry of
`hidden`, then a linear layer to ten scores. Everything is float32, the loss is `cross_entropy`. How many bytes of
activations does the forward pass keep for the backward pass? Write the formula, without running the network. The check
holds it against the meter, to the byte.
""",
        difficulty=2,
        importance=4,
        minutes=8,
        answer="dense_activation_bytes",
        stub="""
def dense_activation_bytes(num_digits, hidden):
    pass  # hidden: a tuple of layer widths, such as (64, 64)
""",
        judge=judge_bytes,
        hints=(
            "Which tensors does the backward pass need: of each linear layer, of each ReLU, of the loss? Which of them "
            "are the same tensor, and which are there anyway?",
            "A ReLU needs its output, and the linear layer after it needs its input: one tensor. The first linear "
            "layer "
            "needs the images, which are inputs. The loss keeps ten log-probabilities for each digit.",
            "4 bytes for each of: `num_digits * sum(hidden)` numbers, `num_digits * 10` numbers, and a single one, the "
            "number of samples that the loss was averaged over.",
        ),
        solution="""
def dense_activation_bytes(num_digits, hidden):
    return 4 * (num_digits * (sum(hidden) + 10) + 1)
""",
        closing="To the byte, in five networks. Everything in it but one number grows with the batch.",
        right=(by_listing, by_hooks, by_measuring),
        wrong={
            "the scores are left out: the loss keeps": lambda n, hidden: 4 * (n * sum(hidden) + 1),
            "the one number for the whole batch is left out": lambda n, hidden: 4 * n * (sum(hidden) + 10),
            "the scores and the one number": lambda n, hidden: 4 * n * sum(hidden),
            "each hidden layer is counted twice": lambda n, hidden: 4 * (n * (2 * sum(hidden) + 10) + 1),
            "the images are counted": lambda n, hidden: 4 * (n * (64 + sum(hidden) + 10) + 1),
            "images and labels are counted": lambda n, hidden: 4 * (n * (64 + sum(hidden) + 10) + 1) + 8 * n,
            "only the last hidden layer": lambda n, hidden: 4 * (n * (sum(hidden[-1:]) + 10) + 1),
            "the scores are counted twice": lambda n, hidden: 4 * (n * (sum(hidden) + 20) + 1),
            "numbers are counted, not bytes": lambda n, hidden: n * (sum(hidden) + 10) + 1,
            "a float32 has 4 bytes, not 8": lambda n, hidden: 8 * (n * (sum(hidden) + 10) + 1),
            "this is one digit's; the batch has 64": lambda n, hidden: 4 * (sum(hidden) + 10 + 1),
            "the parameters are counted": lambda n, hidden: (
                by_listing(n, hidden) + 4 * sum(p.numel() for p in dense_net(hidden=hidden).parameters())
            ),
            "which is no number": lambda n, hidden: [n * width for width in hidden],
            "it returned nothing": lambda n, hidden: print(n),
            "It must be a function": 35332,
        },
    ),
    Exercise(
        number="01.2",
        title="search without a ceiling",
        task=f"""
`largest_that_fits` was told one size that fits and one that does not. Now nobody tells you. Given is a function
`try_update`: called with a number of digits, it makes a trial update and returns, or raises `torch.OutOfMemoryError`.
Return the largest number that fits, 0 if not even one digit does. It may be in the thousands, and a try costs time: be
done after {MOST_TRIES} tries at most. An error of another kind must reach the caller.

The check runs your search under real budgets, where a failed try's tensors live as long as its error does.
""",
        difficulty=3,
        importance=4,
        minutes=12,
        answer="largest_batch",
        setup="import torch",
        stub="""
def largest_batch(try_update):
    pass  # your search
""",
        judge=judge_search,
        hints=(
            "Two parts: find a size that fails, then halve the gap. And one function that says of a size whether it "
            "fits.",
            "Double from 1 until a size fails; what fitted last is `good`, what failed is `bad`. 0 digits always "
            "fit. Why "
            "should the next try not be made inside the `except` block?",
            "Write `fits(num_digits)` with try, `except torch.OutOfMemoryError: return False`, and `return True` at "
            "the "
            "end. Then `good, bad = 0, 1`; `while fits(bad): good, bad = bad, 2 * bad`; then bisect as above.",
        ),
        solution="""
def largest_batch(try_update):
    def fits(num_digits):
        try:
            try_update(num_digits)
        except torch.OutOfMemoryError:
            return False
        return True  # by now the error is gone, and its tensors with it

    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
""",
        closing="Eight devices, 0 to 5,000 digits, and an error of another kind went through.",
        right=(bit_by_bit, from_a_wide_gap, with_a_flag),
        wrong={
            "12 too few: a search by doubling": by_doubling,
            "it was not done after 30 tries": one_by_one,
            "On a device on which 0 digits fit (tries: 32768": never_below_one,
            "returned 29, 1 too many": first_that_fails,
            "it returned 64, 936 too few": capped,
            "bytes of a failed try were still alive": again_inside_except,
            "returned 0: 28,": keeps_the_errors,
            "the search took it for one": catches_everything,
            "it raised OutOfMemoryError": does_not_catch,
            "returned 36, 1 too few": ten_percent_less,
            "returned 28 without a single try": lambda try_update: 28,
            "it returned nothing": lambda try_update: print(bit_by_bit(try_update)),
            "It must be a function; it is 28": 28,
        },
    ),
]
