"""The exercises of notebook 03: a check of a loop that can fail, and a test that tells rounding from a mistake."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.accumulation import accumulate_gradients
from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.exercises.engine import Exercise, expect, run_answer
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import cross_entropy_sum
from course_lib.models import dense_net

# ---- 03.1: a check that can fail -------------------------------------------------------------------------------------

# Loops: each leaves its gradient in .grad, and makes no step.


def sum_over_count(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)


def backwards_in_order(model, micro_batches):
    accumulate_gradients(model, micro_batches[::-1], cross_entropy_sum)


def a_loop_that_never_divides(model, micro_batches):
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets).backward()


def a_loop_that_divides_twice(model, micro_batches):
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches) ** 2).backward()


def a_mean_of_means(model, micro_batches):
    for inputs, targets in micro_batches:
        (cross_entropy(model(inputs), targets) / len(micro_batches)).backward()


def a_loop_that_goes_backward_once(model, micro_batches):
    accumulate_gradients(model, micro_batches[-1:], cross_entropy_sum)


def a_loop_that_drops_one_digit(model, micro_batches):
    first = tuple(part[1:] for part in micro_batches[0])
    accumulate_gradients(model, [first, *micro_batches[1:]], cross_entropy_sum)


def a_loop_that_forgets_one_bias(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)
    list(model.parameters())[-1].grad = None


def a_loop_that_adds_one_tenth_of_a_percent(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)
    for parameter in model.parameters():
        parameter.grad *= 1.002


def a_loop_that_turns_the_sign(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)
    for parameter in model.parameters():
        parameter.grad *= -1


def a_loop_that_shuffles_a_weight(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)
    weight = next(parameter for parameter in model.parameters() if parameter.ndim == 2)
    weight.grad = weight.grad.flip(0)


def a_loop_that_ends_in_nan(model, micro_batches):
    accumulate_gradients(model, micro_batches, cross_entropy_sum)
    next(iter(model.parameters())).grad[0] = torch.nan


def a_loop_without_backward(model, micro_batches):
    for inputs, targets in micro_batches:
        cross_entropy(model(inputs), targets)


RIGHT_LOOPS = (
    ("a right loop, float32, 64 in 16s", sum_over_count, torch.float32, 16, 1.0),
    ("a right loop, float32, 64 in 24s", backwards_in_order, torch.float32, 24, 1.0),
    ("a right loop, float64, 64 one by one", sum_over_count, torch.float64, 1, 1.0),
    ("a right loop, float32, tiny gradients", sum_over_count, torch.float32, 16, 1e-6),
    ("a right loop, float32, large gradients", backwards_in_order, torch.float32, 16, 1e4),
    ("a right loop, one micro-batch of 64", sum_over_count, torch.float32, 64, 1.0),
)
WRONG_LOOPS = (
    (a_loop_that_never_divides, torch.float32, 16, 1.0),
    (a_loop_that_divides_twice, torch.float64, 16, 1.0),
    (a_mean_of_means, torch.float32, 24, 1.0),
    (a_loop_that_goes_backward_once, torch.float32, 16, 1.0),
    (a_loop_that_drops_one_digit, torch.float64, 16, 1.0),
    (a_loop_that_forgets_one_bias, torch.float32, 16, 1.0),
    (a_loop_that_adds_one_tenth_of_a_percent, torch.float32, 16, 1.0),
    (a_loop_that_turns_the_sign, torch.float32, 16, 1.0),
    (a_loop_that_shuffles_a_weight, torch.float32, 16, 1.0),
    (a_loop_that_ends_in_nan, torch.float32, 16, 1.0),
    (a_loop_without_backward, torch.float32, 16, 1.0),
    (a_loop_that_never_divides, torch.float32, 16, 1e-6),
)


MOST_NAMED = 4  # wrong loops in a message


class Scaled(nn.Module):
    """A network whose scores are multiplied by a factor; with a small one its gradients are small."""

    def __init__(self, dtype: torch.dtype, factor: float):
        super().__init__()
        self.net, self.factor = dense_net(hidden=(16,), dtype=dtype), factor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) * self.factor


def try_check(
    function: Callable, name: str, loop: Callable, dtype: torch.dtype, size: int, factor: float, *, used: bool = True
) -> bool:
    """Call the learner's check once, on a fresh model; a used one holds an old gradient, as in training."""
    model, batch = Scaled(dtype, factor), load_digits(dtype).first(64)
    for parameter in model.parameters() if used else ():
        parameter.grad = torch.full_like(parameter, factor)

    def same_gradient(case):
        return function(loop, model, batch, size)

    found = run_answer(same_gradient, name)
    return as_verdict(found, name)


def as_verdict(found: Any, name: str) -> bool:
    """Return a learner's True or False, of Python's, torch's or NumPy's kind."""
    expect(found is not None, f"For {name} it returned nothing; is there a return?")
    single = isinstance(found, Tensor) and found.dtype is torch.bool and found.numel() == 1
    expect(
        single or type(found).__name__ in ("bool", "bool_"),
        f"For {name} it returned a {type(found).__name__}, not True or False; a number other than 0 counts as True.",
    )
    return bool(found)


def how_far(loop: Callable, dtype: torch.dtype, size: int, factor: float) -> str:
    """Say how far a wrong loop's gradient is from the full batch's."""
    model, batch = Scaled(dtype, factor), load_digits(dtype).first(64)
    accumulate_gradients(model, [batch], cross_entropy_sum)
    whole = copy_gradients(model)
    model.zero_grad()
    loop(model, split_batch(batch, size))
    gap = compare_gradients(whole, model)
    if gap.relative_error != gap.relative_error:
        return "there is a nan in it"
    return f"scale {gap.scale:.3g}, relative error {gap.relative_error:.2g}"


def judge_check(function) -> str | None:
    """Try the check on right loops and on wrong ones, and list where it is mistaken."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    refused = [name for name, *case in RIGHT_LOOPS if not try_check(function, name, *case)]
    accepted = [case for case in WRONG_LOOPS if try_check(function, spoken(case), *case)]
    lines = []
    if refused:
        lines.append(
            f"It refuses {len(refused)} of {len(RIGHT_LOOPS)} right loops: {'; '.join(refused)}. "
            "Their gradients are within a hundred-thousandth of the full batch's: rounding."
        )
        fresh = [case for case in RIGHT_LOOPS if case[0] in refused and try_check(function, *case, used=False)]
        if fresh:
            lines.append(f"It accepts {len(fresh)} of these when the model holds no old gradient: what becomes of it?")
    if accepted:
        named = "; ".join(f"{spoken(case)} ({how_far(*case)})" for case in accepted[:MOST_NAMED])
        more = f"; and {len(accepted) - MOST_NAMED} more" if len(accepted) > MOST_NAMED else ""
        lines.append(f"It accepts {len(accepted)} of {len(WRONG_LOOPS)} wrong loops: {named}{more}.")
    return "\n".join(lines) or None


def spoken(case: tuple) -> str:
    """Write a wrong loop in words, with what sets it apart."""
    loop, _, _, factor = case
    return loop.__name__.replace("_", " ") + (", tiny gradients" if factor < 1 else "")


def full_batch_gradient(model, batch):
    model.zero_grad()
    accumulate_gradients(model, [batch], cross_entropy_sum)
    return copy_gradients(model)


def with_two_copies(loop, model, batch, micro_batch_size):
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    one.zero_grad()
    other.zero_grad()
    cross_entropy(one(batch[0]), batch[1]).backward()
    loop(other, split_batch(batch, micro_batch_size))
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    if any(b.grad is None for _, b in pairs):
        return False
    whole = torch.cat([a.grad.flatten() for a, _ in pairs])
    pieces = torch.cat([b.grad.flatten() for _, b in pairs])
    return bool((whole - pieces).norm() <= 1e-5 * whole.norm())


def with_allclose(loop, model, batch, micro_batch_size):
    whole = full_batch_gradient(model, batch)
    model.zero_grad()
    loop(model, split_batch(batch, micro_batch_size))
    pieces = copy_gradients(model)
    return whole.keys() == pieces.keys() and all(
        torch.allclose(pieces[name], whole[name], rtol=0, atol=1e-5 * float(whole[name].norm())) for name in whole
    )


def in_float64(loop, model, batch, micro_batch_size):
    model = copy.deepcopy(model).double()
    batch = (batch[0].double(), batch[1])
    whole = full_batch_gradient(model, batch)
    model.zero_grad()
    loop(model, split_batch(batch, micro_batch_size))
    return compare_gradients(whole, model).agree(rtol=1e-9)


def checked(judgement, clear=True):
    """Make a check of a judgement on two gradients, whole and pieces, as dicts."""

    def check(loop, model, batch, micro_batch_size):
        whole = full_batch_gradient(model, batch)
        if clear:
            model.zero_grad()
        loop(model, split_batch(batch, micro_batch_size))
        return judgement(whole, copy_gradients(model))

    return check


def flat(gradients):
    return torch.cat([part.flatten() for part in gradients.values()]) if gradients else torch.zeros(1)


def same_object(loop, model, batch, micro_batch_size):
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    loop(model, split_batch(batch, micro_batch_size))
    pieces = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return compare_gradients(whole, pieces).agree(1e-5)


def old_gradient_kept(loop, model, batch, micro_batch_size):
    cross_entropy(model(batch[0]), batch[1]).backward()
    whole = copy_gradients(model)
    model.zero_grad()
    loop(model, split_batch(batch, micro_batch_size))
    return compare_gradients(whole, model).agree(1e-5)


def whole_batch_to_both(loop, model, batch, micro_batch_size):
    whole = full_batch_gradient(model, batch)
    model.zero_grad()
    loop(model, [batch])
    return compare_gradients(whole, model).agree(1e-5)


# ---- 03.2: rounding or a mistake -------------------------------------------------------------------------------------


class Gradients:
    """A function gradient(micro_batch_size, dtype) of 64 samples, with a mistake or without one.

    offset: a part of every sample's gradient that cancels in the sum and makes float32 round much. mistake: a relative
    error that the accumulated gradient has in every precision; turned: in another direction. whole: of whole numbers.
    """

    def __init__(
        self, name: str, *, offset: float = 0.0, mistake: float = 0.0, turned: bool = False, whole: bool = False
    ):
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(64, 400, generator=generator, dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)[torch.randperm(64, generator=generator)]
        self.samples = 1 + (noise.round() if whole else noise) + offset * signs[:, None]
        self.name, self.mistake, self.turned = name, mistake, turned

    def __call__(self, micro_batch_size: int = 64, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        parts = split_batch(self.samples.to(dtype), micro_batch_size)
        total = torch.zeros(400, dtype=dtype)
        for part in parts:
            total = (
                total + functools.reduce(torch.add, part) / 64
            )  # one after the other: torch.sum has an order of its own
        if len(parts) > 1 and self.mistake:
            other = total.flip(0) if self.turned else total
            total = total + self.mistake * other
        return {"weight": total}

    def __repr__(self) -> str:
        return self.name


ONLY_ROUNDING = (
    Gradients("a sum of whole numbers", whole=True),
    Gradients("a usual sum"),
    Gradients("a sum whose parts nearly cancel", offset=1e4),
    Gradients("a sum whose parts cancel to the fifth digit", offset=1e5),
)
MISTAKES = (
    Gradients("a division left out", mistake=3.0),
    Gradients("a mistake of a thousandth", mistake=1e-3, turned=True),
    Gradients("a mistake of a millionth", mistake=1e-6),
    Gradients("a mistake of a thousandth in a sum whose parts nearly cancel", offset=1e4, mistake=1e-3, turned=True),
    Gradients("a sample counted nearly twice", mistake=1 / 64, turned=True),
    Gradients("a mistake of a ten-millionth", mistake=1e-7, turned=True),
    Gradients("a gradient of nan", mistake=float("nan")),
)


def judge_rounding(function) -> str | None:
    """Try the test on gradients with nothing but rounding, and with mistakes of many sizes."""
    expect(callable(function), f"It must be a function; it is {function!r}.")
    refused = [case for case in ONLY_ROUNDING if not one_verdict(function, case)]
    accepted = [case for case in MISTAKES if one_verdict(function, case)]
    lines = []
    if refused:
        names = "; ".join(f"{case!r} ({apart(case)})" for case in refused)
        lines.append(
            f"It sees a mistake where there is only rounding, {len(refused)} of {len(ONLY_ROUNDING)}: {names}."
        )
    if accepted:
        names = "; ".join(f"{case!r} ({apart(case)})" for case in accepted)
        lines.append(f"It takes for rounding what is a mistake, {len(accepted)} of {len(MISTAKES)}: {names}.")
    return "\n".join(lines) or None


def one_verdict(function: Callable, case: Gradients) -> bool:
    """Return the learner's verdict on one case."""
    found = run_answer(function, case)
    return as_verdict(found, repr(case))


def apart(case: Gradients) -> str:
    """Say how far 4 x 16 is from 64 in both precisions, as the power of ten above it."""
    powers = []
    for dtype in (torch.float32, torch.float64):
        error = compare_gradients(case(64, dtype), case(16, dtype)).relative_error
        if error != error:
            return "nan in both precisions"
        if error == 0:
            powers.append(f"{dtype}: equal".replace("torch.", ""))
            continue
        power = next(power for power in range(-17, 2) if error <= 3.2 * 10.0**power)
        powers.append(f"{dtype}: about 1e{power:+d}".replace("torch.", ""))
    return ", ".join(powers)


def errors(gradient):
    return [
        compare_gradients(gradient(64, dtype), gradient(16, dtype)).relative_error
        for dtype in (torch.float32, torch.float64)
    ]


def shrinks_a_millionfold(gradient):
    single, double = errors(gradient)
    return double <= 1e-6 * single or double < 1e-13


def by_hand_in_float64(gradient):
    whole, pieces = (torch.cat([p.flatten() for p in gradient(size, torch.float64).values()]) for size in (64, 16))
    return bool((whole - pieces).abs().max() <= 1e-9 * whole.abs().max())


def within(rtol, dtype):
    return lambda gradient: compare_gradients(gradient(64, dtype), gradient(16, dtype)).agree(rtol)


EXERCISES = [
    Exercise(
        number="03.1",
        title="write a check that can fail",
        task="""
This is the test to keep. `loop(model, micro_batches)` goes over a list of micro-batches and leaves its gradient in
`.grad`; it makes no step. Cut `batch` into micro-batches, and return True if the loop's gradient is the full batch's
(mean cross-entropy), else False. Rounding is allowed: in float32 a relative error up to 1e-5. A relative error of 0.002
is a mistake. When the check starts, the model may hold an old gradient.

Your check is tried on right loops and on wrong ones. It has to accept the first and to refuse the others.
""",
        difficulty=2,
        importance=5,
        minutes=10,
        answer="same_gradient",
        setup="""
from course_lib.accumulation import accumulate_gradients
from course_lib.batches import split_batch
from course_lib.gradients import compare_gradients, copy_gradients
from course_lib.losses import cross_entropy_sum
""",
        stub="""
def same_gradient(loop, model, batch, micro_batch_size):
    pass  # True or False
""",
        judge=judge_check,
        hints=(
            "Two gradients of the same model and the same samples. What must be in `.grad` before each of them?",
            "Take the reference in one pass over `[batch]`, and copy it: what is in `.grad` will be cleared or added "
            "to. "
            "Then clear, run the loop on `split_batch(batch, micro_batch_size)`, and compare relative to the length.",
            "`zero_grad`, `accumulate_gradients(model, [batch], cross_entropy_sum)`, `copy_gradients`; `zero_grad`, "
            "`loop`; `compare_gradients(whole, model).agree(rtol=1e-5)`.",
        ),
        solution="""
def same_gradient(loop, model, batch, micro_batch_size):
    model.zero_grad()
    accumulate_gradients(model, [batch], cross_entropy_sum)
    whole = copy_gradients(model)
    model.zero_grad()
    loop(model, split_batch(batch, micro_batch_size))
    return compare_gradients(whole, model).agree(rtol=1e-5)
""",
        closing="It accepted 6 right loops and refused 12 wrong ones: now a pass of it means something.",
        right=(with_two_copies, with_allclose, in_float64),
        wrong={
            "accepts 12 of 12 wrong loops": lambda loop, model, batch, size: True,
            "refuses 6 of 6 right loops": lambda loop, model, batch, size: False,
            "refuses 5 of 6 right loops": checked(
                lambda a, b: a.keys() == b.keys() and all(map(torch.equal, a.values(), b.values()))
            ),
            "a loop that never divides (scale 4, relative error 3)": checked(
                lambda a, b: len(a) == len(b) and bool(torch.cosine_similarity(flat(a), flat(b), dim=0) > 0.99999)
            ),
            "a loop that turns the sign (scale -1": checked(
                lambda a, b: bool((flat(a).norm() - flat(b).norm()).abs() <= 1e-5 * flat(a).norm())
            ),
            "a loop that never divides, tiny gradients (scale 4": checked(
                lambda a, b: len(a) == len(b) and torch.allclose(flat(a), flat(b), rtol=1e-5, atol=1e-6)
            ),
            "a loop that adds one tenth of a percent (scale 1, relative error 0.002)": checked(
                lambda a, b: compare_gradients(a, b).agree(0.01)
            ),
            "a loop that forgets one bias (scale": checked(
                lambda a, b: all(compare_gradients({n: a[n]}, {n: b[n]}).agree(1e-5) for n in b)
            ),
            "a loop that shuffles a weight (scale": checked(
                lambda a, b: bool((flat(a).sum() - flat(b).sum()).abs() <= 1e-3 * flat(a).abs().sum())
            ),
            "accepts 1 of 12 wrong loops: a loop without backward": checked(
                lambda a, b: compare_gradients(b or {"": torch.zeros(1)}, a if b else {}).agree(1e-5)
            ),
            "accepts 9 of 12 wrong loops": same_object,
            "refuses 4 of 6 right loops": checked(lambda a, b: compare_gradients(a, b).agree(1e-9)),
            "one micro-batch of 64. Their": checked(lambda a, b: compare_gradients(a, b).agree(1e-5), clear=False),
            "accepts 6 of these when the model holds no old gradient": old_gradient_kept,
            "a mean of means (scale": whole_batch_to_both,
            "it returned a float, not True or False": checked(lambda a, b: compare_gradients(a, b).relative_error),
            "it returned nothing": checked(lambda a, b: print(compare_gradients(a, b))),
            "It must be a function": True,
        },
    ),
    Exercise(
        number="03.2",
        title="rounding or a mistake",
        task="""
Your float32 gradients differ by a thousandth. A colleague says: rounding. Is it? `gradient(micro_batch_size, dtype)`
returns the gradients of 64 samples, as a dict of tensors, in the precision that you ask for. Compare 64 at once with
4 x 16, and return True if nothing but rounding separates them, False for a mistake.

No tolerance in float32 can tell: some of the sums nearly cancel and round by a thousandth, and some of the mistakes are
as small as a ten-millionth.
""",
        difficulty=2,
        importance=4,
        minutes=6,
        answer="only_rounding",
        setup="import torch\nfrom course_lib.gradients import compare_gradients",
        stub="""
def only_rounding(gradient):
    pass  # gradient(64, torch.float32) and the like; True or False
""",
        judge=judge_rounding,
        hints=(
            "What happens to rounding when the arithmetic gets more digits? And to a mistake?",
            "A float64 rounds a billion times as finely as a float32. A mistake stays where it is.",
            "Compare `gradient(64, torch.float64)` with `gradient(16, torch.float64)`, at a relative error of 1e-9.",
        ),
        solution="""
def only_rounding(gradient):
    whole, pieces = gradient(64, torch.float64), gradient(16, torch.float64)
    return compare_gradients(whole, pieces).agree(rtol=1e-9)
""",
        closing="More digits make rounding smaller and leave a mistake alone: that is the test, and not a tolerance.",
        right=(shrinks_a_millionfold, by_hand_in_float64),
        wrong={
            "a mistake, 7 of 7": lambda gradient: True,
            "only rounding, 4 of 4": lambda gradient: False,
            "a mistake of a ten-millionth (float32: about": within(1e-6, torch.float32),
            "a mistake of a millionth (float32: about": within(1e-2, torch.float32),
            "only rounding, 3 of 4: a usual sum": lambda gradient: torch.equal(
                gradient(64, torch.float64)["weight"], gradient(16, torch.float64)["weight"]
            ),
            "only rounding, 2 of 4: a sum whose parts nearly cancel": within(1e-14, torch.float64),
            "is a mistake, 5 of 7": lambda gradient: compare_gradients(
                gradient(16, torch.float64), gradient(16, torch.float32)
            ).agree(1e-6),
            "a mistake, 6 of 7": lambda gradient: compare_gradients(
                gradient(16, torch.float64), gradient(16, torch.float64)
            ).agree(1e-9),
            "a mistake, 3 of 7: a division left out": lambda gradient: bool(
                torch.cosine_similarity(*(gradient(size, torch.float64)["weight"] for size in (64, 16)), dim=0)
                > 1 - 1e-12
            ),
            "it returned a float, not True or False": lambda gradient: errors(gradient)[1],
            "it returned nothing": lambda gradient: print(errors(gradient)),
            "It must be a function": 1e-9,
        },
    ),
]
