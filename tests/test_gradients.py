"""Comparing gradients: what is far apart is said to be, nan agrees with nothing, and a copy stays as it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.accumulation import accumulate_gradients
from course_lib.batches import split_batch
from course_lib.gradients import GradientComparison, compare_gradients, copy_gradients
from course_lib.losses import squared_error_sum


def vector(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def linear_with_gradient(scale: float = 1.0) -> nn.Linear:
    model = nn.Linear(2, 1, dtype=torch.float64)
    model.weight.grad = scale * vector(3.0, 0.0).reshape(1, 2)
    model.bias.grad = scale * vector(4.0)
    return model


# The copy.


def test_a_copy_is_not_changed_by_later_passes():
    model = linear_with_gradient()
    copied = copy_gradients(model)
    model.weight.grad.add_(100)
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert copied["weight"].tolist() == [[3.0, 0.0]]
    assert copied["bias"].tolist() == [4.0]
    assert not copied["weight"].requires_grad


def test_a_copy_holds_only_what_has_a_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1](torch.ones(1, 2)).sum().backward()
    assert list(copy_gradients(model)) == ["1.weight", "1.bias"]
    assert copy_gradients(nn.Linear(2, 2)) == {}
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got dict"):
        copy_gradients({})


# The numbers.


def test_equal_gradients_agree_to_any_tolerance():
    result = compare_gradients(linear_with_gradient(), linear_with_gradient())
    assert result == GradientComparison(0.0, 0.0, 1.0, 1.0, {"weight": 0.0, "bias": 0.0})
    assert result.agree(0.0)


def test_all_numbers_by_hand():
    """Reference (3, 0 | 4) of size 5, candidate (3, 0 | 5): apart by 1."""
    reference = {"a": vector(3.0, 0.0), "b": vector(4.0)}
    result = compare_gradients(reference, {"a": vector(3.0, 0.0), "b": vector(5.0)})
    assert result.max_abs == 1.0
    assert result.relative_error == pytest.approx(0.2)
    assert result.cosine == pytest.approx((9 + 20) / (5 * math.sqrt(34)))
    assert result.scale == pytest.approx(29 / 25)
    assert result.per_parameter == {"a": 0.0, "b": pytest.approx(0.25)}
    assert result.agree(0.2001)
    assert not result.agree(0.1999)


@pytest.mark.parametrize("factor", [4.0, 0.25, -1.0])
def test_the_scale_names_a_division_left_out_or_done_twice(factor):
    """N03: K for a division left out, 1 / K for one done twice; and the opposite direction has the cosine -1."""
    result = compare_gradients(linear_with_gradient(), linear_with_gradient(factor))
    assert result.scale == pytest.approx(factor, rel=1e-14)
    assert result.cosine == pytest.approx(math.copysign(1, factor), rel=1e-14)
    assert result.relative_error == pytest.approx(abs(factor - 1), rel=1e-14)


def test_gradients_at_right_angles_have_the_cosine_zero():
    result = compare_gradients({"a": vector(1.0, 0.0)}, {"a": vector(0.0, 2.0)})
    assert (result.cosine, result.scale) == (0.0, 0.0)


@given(
    st.lists(st.floats(-1e3, 1e3).filter(lambda value: value == 0 or abs(value) > 1e-100), min_size=1, max_size=6),
    st.randoms(),
)
def test_the_numbers_do_not_depend_on_how_entries_are_shared_among_parameters(values, random):
    """One gradient of n entries, and the same entries as n parameters."""
    others = [value + random.randint(-64, 64) / 64 for value in values]
    whole = compare_gradients({"a": vector(*values)}, {"a": vector(*others)})
    parts = compare_gradients(*({str(i): vector(v) for i, v in enumerate(side)} for side in (values, others)))
    for name in ("max_abs", "relative_error", "cosine", "scale"):
        assert getattr(whole, name) == pytest.approx(getattr(parts, name), rel=1e-9, nan_ok=True)


# What is missing, zero or not a number.


def test_a_gradient_that_is_missing_counts_as_zeros_on_either_side():
    one, both = {"a": vector(3.0)}, {"a": vector(3.0), "b": vector(4.0)}
    assert compare_gradients(both, one).relative_error == pytest.approx(0.8)
    extra = compare_gradients(one, both)
    assert extra.relative_error == pytest.approx(4 / 3)
    assert extra.max_abs == 4.0
    assert extra.per_parameter == {"a": 0.0, "b": math.inf}
    assert not extra.agree(1.0)
    assert compare_gradients(both, {}).relative_error == 1.0
    assert compare_gradients(linear_with_gradient(), nn.Linear(2, 1)).relative_error == 1.0


def test_a_reference_of_zeros_agrees_with_zeros_only():
    zeros, ones = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    same = compare_gradients(zeros, zeros)
    assert (same.relative_error, same.cosine) == (0.0, 1.0)
    assert math.isnan(same.scale)
    assert same.agree(0.0)
    other = compare_gradients(zeros, ones)
    assert (other.relative_error, other.cosine) == (math.inf, 0.0)
    assert not other.agree(1e9)
    assert compare_gradients(ones, zeros).cosine == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_agrees_with_nothing(bad, place, side):
    sides = [{str(i): vector(1.0, 2.0) for i in range(3)} for _ in range(2)]
    sides[side][str(place)][1] = bad
    result = compare_gradients(*sides)
    assert not result.agree(1e9)
    assert not math.isfinite(result.max_abs)
    assert not math.isfinite(result.per_parameter[str(place)])


def test_an_infinity_on_both_sides_does_not_agree():
    both = {"a": vector(math.inf)}
    assert not compare_gradients(both, both).agree(1e9)


def test_parameters_without_entries_are_fine():
    empty = {"a": torch.zeros(0), "b": vector(1.0)}
    assert compare_gradients(empty, empty).agree(0.0)


# Kinds of tensors.


def test_precisions_are_compared_in_float64():
    """P03: 1e8 + 1 is 1e8 in float32; a difference of 1 between a float32 and a float64 gradient is seen."""
    result = compare_gradients({"a": vector(1e8, dtype=torch.float32)}, {"a": vector(1e8 + 1)})
    assert result.max_abs == 1.0
    assert result.relative_error == pytest.approx(1e-8)
    half = compare_gradients({"a": vector(1.0)}, {"a": vector(1.0, dtype=torch.bfloat16)})
    assert half.agree(0.0)


def test_large_gradients_in_half_precision_do_not_overflow():
    big = {"a": torch.full((100,), 60_000.0, dtype=torch.float16)}
    assert compare_gradients(big, big).agree(0.0)


def test_sparse_and_complex_gradients_are_compared_by_their_values():
    dense = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.tensor([1.0, 0.5, 1.5]), (3, 2), check_invariants=True
    )  # 0.5 + 1.5 in one place
    assert compare_gradients({"a": dense}, {"a": sparse}).agree(0.0)
    assert compare_gradients({"a": sparse}, {"b": sparse}).relative_error == pytest.approx(math.sqrt(2))
    turned = compare_gradients({"a": torch.tensor([1 + 0j])}, {"a": torch.tensor([0 + 1j])})
    assert (turned.max_abs, turned.cosine) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("reference", "candidate", "error", "says"),
    [
        ({}, {"a": vector(1.0)}, ValueError, "reference holds no gradients"),
        (nn.Linear(1, 1), {"a": vector(1.0)}, ValueError, "reference holds no gradients"),
        ({"a": vector(1.0)}, {"a": vector(1.0, 2.0)}, ValueError, r"a has shape \(1,\) in reference and \(2,\)"),
        ({"a": vector(1.0, 2.0)}, {"a": vector(1.0, 2.0).reshape(1, 2)}, ValueError, "a has shape"),
        ([vector(1.0)], {"a": vector(1.0)}, TypeError, "reference must be a module or a dict of tensors; got list"),
        ({"a": vector(1.0)}, vector(1.0), TypeError, "candidate must be a module or a dict of tensors; got Tensor"),
        ({"a": [1.0]}, {"a": vector(1.0)}, TypeError, "reference must hold tensors; a is a list"),
        ({"a": vector(1.0)}, {"a": None}, TypeError, "candidate must hold tensors; a is a NoneType"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(reference, candidate, error, says):
    with pytest.raises(error, match=says):
        compare_gradients(reference, candidate)


def test_the_text_says_the_four_numbers():
    text = str(compare_gradients(linear_with_gradient(), linear_with_gradient(4.0)))
    assert text == "relative error 3.0e+00, largest difference 1.2e+01, cosine 1.000000, scale 4.0000"


# What precision does to a sum.


def test_more_digits_bring_two_orders_of_the_same_sum_closer():
    """P03: (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1 in float32, so equality is the wrong question."""
    big, one = torch.tensor(1e8), torch.tensor(1.0)
    assert ((big + one) - big).item() == 0.0
    assert ((big - big) + one).item() == 1.0
    errors = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(48, 64, generator=generator, dtype=torch.float64).to(dtype), torch.zeros(48, 32).to(dtype)
        model = nn.Linear(64, 32, dtype=dtype)
        nn.init.constant_(model.weight, 0.01)
        gradients = []
        for size in (48, 8):
            model.zero_grad()
            accumulate_gradients(model, split_batch(batch, size), squared_error_sum)
            gradients.append(copy_gradients(model))
        errors[dtype] = compare_gradients(*gradients).relative_error
    assert 0 < errors[torch.float32] < 1e-6
    assert 0 < errors[torch.float64] < 1e-15
