"""Tests of course_lib.explorers: panels are driven by setting the values of their controls."""

import io

import ipywidgets
import pytest
from PIL import Image

from course_lib.explorers import HelloPanel, Panel, Split, hello, hello_panel, labelled_slider
from course_lib.plots import Picture, new_axes

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def every_widget(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every_widget(child)


def test_hello_panel_answers_with_the_product_and_a_new_picture():
    panel = hello_panel()
    assert "16 x 4 = 64: one update sees 64 digits" in panel.answer.value
    before = panel.image.value
    panel.micro_batch_size.value = 8
    assert "8 x 4 = 32: one update sees 32 digits" in panel.answer.value
    middle = panel.image.value
    panel.accumulation_steps.value = 2
    assert "8 x 2 = 16: one update sees 16 digits" in panel.answer.value
    assert len({before, middle, panel.image.value}) == 3
    for size, steps in ((64, 16), (16, 4)):  # by way of a larger picture, of which nothing may stay
        panel.micro_batch_size.value, panel.accumulation_steps.value = size, steps
    assert panel.image.value == before


def test_pictures_keep_their_size():
    panel = hello_panel()
    sizes = set()
    for size, steps in ((1, 1), (64, 16), (5, 3)):
        panel.micro_batch_size.value, panel.accumulation_steps.value = size, steps
        with Image.open(io.BytesIO(panel.image.value)) as image:
            sizes.add(image.size)
    assert len(sizes) == 1
    assert panel.image.layout.height == "260px"


@pytest.mark.parametrize(
    ("control", "largest", "answers"),
    [
        ("micro_batch_size", 64, ("1 x 4 = 4: one update sees 4 digits", "64 x 4 = 256: one update sees 256 digits")),
        ("accumulation_steps", 16, ("16 x 1 = 16: one update sees 16 digits", "16 x 16 = 256: one update sees 256")),
    ],
)
def test_controls_stop_at_their_limits(control, largest, answers):
    panel = hello_panel()
    slider = getattr(panel, control)
    for value, stops_at, answer in ((0, 1, answers[0]), (largest + 1, largest, answers[1])):
        slider.value = value
        assert slider.value == stops_at
        assert answer in panel.answer.value


def test_number_field_and_slider_follow_each_other():
    row, slider = labelled_slider("steps", 4, 16)
    field = row.children[0]
    slider.value = 7
    assert field.value == 7
    field.value = 99
    assert slider.value == field.value == 16


def test_every_control_has_a_label_beside_it():
    fields = [one for one in every_widget(hello_panel()) if isinstance(one, ipywidgets.BoundedIntText)]
    assert [field.description for field in fields] == ["micro-batch size", "accumulation steps"]
    sliders = [one for one in every_widget(hello_panel()) if isinstance(one, ipywidgets.IntSlider)]
    assert len(sliders) == len(fields)


def test_no_output_widget():
    assert not any(isinstance(one, ipywidgets.Output) for one in every_widget(hello_panel()))


def test_one_change_draws_once(monkeypatch):
    panel = hello_panel()
    drawn = []
    monkeypatch.setattr(hello, "live_png", lambda figure: drawn.append(figure) or b"picture")
    panel.micro_batch_size.value = 8
    panel.micro_batch_size.value = 8
    assert len(drawn) == 1


def test_bundle_without_the_view_is_constant_and_says_what_it_shows():
    moved, fresh = hello_panel(), hello_panel()
    moved.micro_batch_size.value = 1
    (data, metadata), (other, other_metadata) = moved._repr_mimebundle_(), fresh._repr_mimebundle_()
    assert data.pop(WIDGET_VIEW)["model_id"] != other.pop(WIDGET_VIEW)["model_id"]
    assert data == other
    assert metadata == other_metadata == {"image/png": {"alt": data["text/plain"], "width": 760, "height": 260}}
    assert set(data) == {"text/plain", "image/png"}
    assert "16 x 4 = 64: one update sees 64 digits" in data["text/plain"]


def test_panel_without_a_picture_leaves_its_text():
    panel = Panel([ipywidgets.IntSlider()], text="A slider that does nothing.")
    data, metadata = panel._repr_mimebundle_()
    assert (data["text/plain"], set(data), metadata) == (
        "A slider that does nothing.",
        {"text/plain", WIDGET_VIEW},
        {},
    )


def test_panel_keeps_the_picture_it_was_given():
    figure, axes = new_axes()
    panel = Panel([], text="A line.", picture=Picture(figure, "A line that rises from one to four."))
    before = panel._repr_mimebundle_()[0]["image/png"]
    axes.plot([1, 4])
    assert panel._repr_mimebundle_()[0]["image/png"] == before


def test_split_speaks_of_one_digit_and_one_pass():
    assert Split(1, 1).sentence == "1 x 1 = 1: one update sees 1 digit"
    assert Split(1, 1).title == "1 pass of 1, then one update"
    assert Split(16, 4).title == "4 passes of 16, then one update"
    assert isinstance(hello_panel(), HelloPanel)
