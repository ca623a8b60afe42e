"""The equivalence contract: every row is computed, every remedy works, and the judge knows its three words."""

import pytest
import torch

from course_lib.contract import CONTRACT, EQUAL, NOT_EQUAL, WITHIN_ROUNDING, Ingredient, WholeAndCut, judge

IDS = [f"{row.kind}: {row.name}" for row in CONTRACT]


@pytest.mark.parametrize("row", CONTRACT, ids=IDS)
def test_the_verdict_is_what_the_example_gives(row):
    found = judge(row.example, row.precision)
    assert found == row.verdict or (found, row.verdict) == (EQUAL, WITHIN_ROUNDING)


@pytest.mark.parametrize("row", [row for row in CONTRACT if row.mended], ids=lambda row: row.name)
def test_the_remedy_mends_the_example(row):
    assert judge(row.mended, row.precision) in (EQUAL, WITHIN_ROUNDING)


def test_the_contract_covers_what_a_training_loop_is_made_of():
    assert len(CONTRACT) >= 20
    assert len(set(IDS)) == len(CONTRACT)
    kinds = {row.kind for row in CONTRACT}
    assert kinds >= {"optimizer", "layer", "loss", "precision", "randomness"}
    assert kinds >= {"schedule", "clipping", "hook", "compile", "checkpointing"}
    assert {row.verdict for row in CONTRACT} == {EQUAL, WITHIN_ROUNDING, NOT_EQUAL}


def test_what_is_not_equal_has_a_remedy_and_nothing_else_has():
    for row in CONTRACT:
        assert bool(row.remedy) == (row.verdict == NOT_EQUAL), row.name
        assert row.mended is None or row.remedy, row.name


def test_examples_leave_the_random_state_alone():
    torch.manual_seed(20)  # a state that no example leaves behind by chance
    state = torch.get_rng_state()
    for row in CONTRACT:
        if row.kind in ("randomness", "checkpointing", "layer", "loss"):
            row.example(row.precision or torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def apart(relative_error):
    """Return an example whose sides differ by so much, in each precision (by a number, or by precision)."""

    def example(dtype):
        error = relative_error[dtype] if isinstance(relative_error, dict) else relative_error
        one = torch.ones(3, dtype=torch.float64)
        return {"x": one}, {"x": one * (1 + error)}

    return example


SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(
    ("example", "precision", "verdict"),
    [
        (apart(0.0), None, EQUAL),
        (apart({SINGLE: 9e-7, DOUBLE: 9e-13}), None, WITHIN_ROUNDING),
        (apart({SINGLE: 9e-7, DOUBLE: 0.0}), None, WITHIN_ROUNDING),
        (apart(1.1e-3), None, NOT_EQUAL),
        (apart(float("nan")), None, NOT_EQUAL),
        (apart(2**-7), HALF, WITHIN_ROUNDING),
        (apart(2**-4), HALF, NOT_EQUAL),
    ],
)
def test_the_judge_tells_the_three_words_apart(example, precision, verdict):
    assert judge(example, precision) == verdict


@pytest.mark.parametrize(
    ("example", "precision"),
    [
        (apart({SINGLE: 9e-7, DOUBLE: 9e-7}), None),  # does not shrink with the precision
        (apart({SINGLE: 2e-6, DOUBLE: 1e-16}), None),
        (apart(9e-4), None),
        (apart(2**-6), HALF),
    ],
)
def test_what_lies_between_rounding_and_a_difference_is_an_error(example, precision):
    with pytest.raises(ValueError, match="its errors are"):
        judge(example, precision)


def test_a_wrong_verdict_and_a_remedy_that_does_not_work_do_not_hold():
    assert not Ingredient("x", "x", EQUAL, apart({SINGLE: 9e-7, DOUBLE: 9e-13})).holds()
    assert not Ingredient("x", "x", WITHIN_ROUNDING, apart(0.1)).holds()
    assert not Ingredient("x", "x", NOT_EQUAL, apart(0.1), "none", apart(0.1)).holds()
    assert Ingredient("x", "x", NOT_EQUAL, apart(0.1), "some", apart(0.0)).holds()
    assert Ingredient("x", "x", WITHIN_ROUNDING, apart(0.0)).holds()


def test_the_two_sides_are_64_at_once_and_4_times_16():
    sizes = []
    WholeAndCut(lambda dtype, size: sizes.append(size))(torch.float32)
    assert sizes == [64, 16]


def test_the_running_mean_of_the_example_is_that_of_the_paper_and_pencil():
    row = next(row for row in CONTRACT if row.name == "BatchNorm, running statistics")
    whole, cut = row.example(torch.float64)
    assert [round(side["running mean"].item(), 2) for side in (whole, cut)] == [0.3, 0.59]


def test_a_step_inside_backward_is_the_example_of_the_report():
    row = next(row for row in CONTRACT if row.name == "a step inside backward")
    whole, cut = row.example(torch.float64)
    assert [round(side["w"].item(), 4) for side in (whole, cut)] == [0.8, 0.8075]
