"""The panel of notebook 09: every control, at its limits too, is answered in a picture and in words."""

import io

import pytest
from PIL import Image

from course_lib.contract import CONTRACT, EQUAL, NOT_EQUAL, WITHIN_ROUNDING, judge
from course_lib.explorers.splitting import INGREDIENTS, NAMES, SIZES, error, in_words, splitting_panel, tolerance


def test_the_panel_shows_rows_of_the_contract_that_can_and_cannot_be_cut():
    assert list(INGREDIENTS) != []
    assert set(NAMES) == set(INGREDIENTS)
    assert set(NAMES) <= {row.name for row in CONTRACT}
    assert {row.verdict for row in INGREDIENTS.values()} == {WITHIN_ROUNDING, NOT_EQUAL}


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_those_of_the_contract_and_the_remedy_mends_every_size(name):
    row = INGREDIENTS[name]
    cut = row.example.cut
    assert (error(name, cut, False) > tolerance(name)) == (row.verdict == NOT_EQUAL)
    assert judge(row.example, row.precision) in (row.verdict, EQUAL)
    for size in SIZES:
        assert error(name, size, True) <= tolerance(name)
    assert error(name, 64, False) == 0


def test_a_size_that_is_no_micro_batch_of_64_is_refused():
    for size in (0, 65):
        with pytest.raises(ValueError, match="micro_batch_size must be from 1 to 64"):
            error("linear", size, False)


def test_words_say_the_verdict_the_size_and_the_remedy():
    assert in_words("linear", 16, False) == "linear, 4 x 16: equal within rounding."
    assert in_words("linear", 16, True).endswith("It needs no remedy.")
    wrong = in_words("BatchNorm, training", 16, False)
    assert "not equal" in wrong
    assert "1.5 %" in wrong
    assert "Remedy: GroupNorm" in wrong
    assert "equal within rounding" in in_words("BatchNorm, training", 16, True)
    assert "1.1 times its own size" in in_words("dropout, two layers, one seed", 16, False)
    assert "nothing is cut" in in_words("contrastive", 64, False)
    assert "bit for bit" in in_words("bfloat16 parameters", 16, False)


def test_every_value_of_every_control_is_answered_in_a_picture_of_one_size():
    panel = splitting_panel()
    answers, sizes = set(), set()
    for control, values in (
        (panel.ingredient, NAMES),
        (panel.micro_batch_size, SIZES),
        (panel.remedy, (False, True)),
    ):
        before, of_control = control.value, set()
        for value in values:
            control.value = value
            panel.settle()
            assert panel.last_error is None
            of_control.add((panel.answer.value, panel.live.image.value))
            with Image.open(io.BytesIO(panel.live.image.value)) as image:
                sizes.add(image.size)
        assert len(of_control) == len(values), "two values look the same"
        answers |= of_control
        control.value = before
    panel.settle()
    assert len(sizes) == 1
    panel.close()


def test_the_picture_holds_the_errors_and_marks_the_chosen_size():
    panel = splitting_panel()
    panel.ingredient.value, panel.micro_batch_size.value = "contrastive", 1
    panel.settle()
    line, ring = panel._axes.get_lines()[0], panel._axes.get_lines()[2]
    assert list(line.get_xdata()) == list(SIZES[:-1])
    assert list(line.get_ydata()) == [error("contrastive", size, False) for size in SIZES[:-1]]
    assert list(ring.get_xdata()) == [1]
    assert "contrastive: the cut changes the update" in panel._axes.get_title(loc="left").replace("\n", " ")
    assert "off by 1.0 times" in panel.answer.value
    panel.remedy.value = True
    panel.settle()
    assert "any cut gives" in panel._axes.get_title(loc="left").replace("\n", " ")
    panel.close()


def test_what_is_no_choice_cannot_be_set():
    panel = splitting_panel()
    for control, value in ((panel.ingredient, "glue"), (panel.micro_batch_size, 3), (panel.micro_batch_size, 128)):
        with pytest.raises(Exception, match=r"[Ii]nvalid|not found"):
            control.value = value
    assert panel.micro_batch_size.value == 16
    panel.close()


def test_the_stored_picture_does_not_follow_the_controls():
    panel = splitting_panel()
    stored = panel._repr_mimebundle_()[0]["image/png"]
    panel.ingredient.value = "linear"
    panel.settle()
    assert panel._repr_mimebundle_()[0]["image/png"] == stored
    panel.close()
