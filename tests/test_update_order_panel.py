"""Tests of the panel on the order of an update: its model against numbers by hand, and every control by its value."""

import io
import math

import pytest
from PIL import Image

from course_lib.explorers import update_order, update_order_panel
from course_lib.explorers.update_order import CLIPS, SCHEDULES, UpdateOrder, UpdateOrderPanel


@pytest.fixture(scope="module")
def one_panel():
    made = update_order_panel()
    yield made
    made.close()


@pytest.fixture
def panel(one_panel):
    """The panel as it starts, made once because its first drawing is slow."""
    one_panel.clip.value, one_panel.threshold.value = "mean", 1.0
    one_panel.overflow_in.value, one_panel.schedule.value = 0, "update"
    one_panel.settle()
    return one_panel


# The model: gradients 4, -2, 1 and 3, mean 1.5; weight 1, learning rate 0.1, scale 8.


@pytest.mark.parametrize(
    ("clip", "threshold", "applied"),
    [
        ("mean", 1.0, 1.0),
        ("mean", 2.0, 1.5),
        ("each", 1.0, (1 - 1 + 1 + 1) / 4),
        ("each", 2.5, (2.5 - 2 + 1 + 2.5) / 4),
        ("each", 5.0, 1.5),
        ("sum", 1.0, 1 / 4),
        ("sum", 7.0, 1.5),
        ("scaled", 1.0, 1 / 8),
        ("scaled", 13.0, 1.5),
    ],
)
def test_the_step_uses_what_the_clip_has_left(clip, threshold, applied):
    order = UpdateOrder(clip, threshold)
    assert order.applied == pytest.approx(applied, abs=1e-5)
    assert order.weight == pytest.approx(1 - 0.1 * applied, abs=1e-6)
    assert not order.skipped
    assert order.scale == 8.0


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("overflow_in", [1, 2, 3, 4])
def test_no_clip_saves_an_update_with_an_overflow(clip, overflow_in):
    order = UpdateOrder(clip, 1.0, overflow_in)
    assert (order.skipped, order.weight, order.scale, order.applied) == (True, 1.0, 4.0, 0.0)
    assert order.gradients[overflow_in - 1] == math.inf
    assert f"Micro-batch {overflow_in} overflows" in order.sentence
    assert ("infinity times 0" in order.sentence) == (clip != "mean")
    assert "The schedule waits." in order.sentence
    assert order.step_title == f"Micro-batch {overflow_in} overflows: no step"


@pytest.mark.parametrize(
    ("schedule", "idle", "at_62", "ends"), [("update", 0, 188 / 250, 250), ("micro-batch", 187, 2 / 250, 62.5)]
)
def test_the_schedule_counts_what_it_is_called_for(schedule, idle, at_62, ends):
    order = UpdateOrder(schedule=schedule)
    rates = order.learning_rates
    assert len(rates) == 250
    assert rates[0] == pytest.approx(0.1)
    assert rates[62] == pytest.approx(0.1 * at_62)
    assert rates.count(0.0) == idle
    assert order.schedule_ends == ends
    assert order.schedule_title == f"Learning rate 0 after update {ends:g}"


def test_the_words_give_the_numbers_and_the_reason():
    assert UpdateOrder().sentence == "The weight goes from 1 to 0.900: the mean gradient 1.5 is clipped to 1."
    assert "the mean gradient 1.5 is within 2" in UpdateOrder(threshold=2.0).sentence
    each = UpdateOrder("each").sentence
    assert "the gradients are 1, -1, 1, 1, with a mean of 0.5. In the right order it goes to 0.900." in each
    assert "the sum 6 is held to 1 and then divided by 4" in UpdateOrder("sum").sentence
    assert "the sum 6 is held to 6 and" in UpdateOrder("sum", 7.0).sentence
    assert "the scaled gradient 12 is held to 1 and then divided by the scale, 8" in UpdateOrder("scaled").sentence
    assert "over after 62.5 updates; 187 more change nothing." in UpdateOrder(schedule="micro-batch").sentence
    assert "In the right order" not in UpdateOrder("each", 5.0).sentence  # nothing was clipped
    assert UpdateOrder("each", 5.0).step_title == "The step uses 1.5: right"
    assert UpdateOrder("each").step_title == "The step uses 0.5, not 1"


# The controls.


def test_it_starts_in_the_right_order(panel):
    assert isinstance(panel, UpdateOrderPanel)
    assert "The weight goes from 1 to 0.900" in panel.answer.value
    assert panel._step_axes.get_title("left") == "The step uses 1: right"
    assert panel._rate_axes.get_title("left") == "Learning rate 0 after update 250"


@pytest.mark.parametrize(("clip", "weight"), [("mean", 0.9), ("each", 0.95), ("sum", 0.975), ("scaled", 0.9875)])
def test_the_place_of_the_clip_is_a_control(panel, clip, weight):
    panel.clip.value = clip
    panel.settle()
    assert f"to {weight:.3f}" in panel.answer.value
    assert panel.last_error is None


def test_the_largest_norm_is_a_control_with_limits(panel):
    for value, stops_at, weight in ((0.5, 0.5, 0.95), (0.0, 0.25, 0.975), (99.0, 5.0, 0.85)):
        panel.threshold.value = value
        panel.settle()
        assert panel.threshold.value == stops_at
        assert f"to {weight:.3f}" in panel.answer.value


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
def test_an_overflow_is_a_control(panel, micro_batch):
    panel.overflow_in.value = micro_batch
    panel.settle()
    assert f"Micro-batch {micro_batch} overflows" in panel.answer.value
    assert panel._step_axes.get_title("left") == f"Micro-batch {micro_batch} overflows: no step"
    panel.overflow_in.value = 0
    panel.settle()
    assert "to 0.900" in panel.answer.value


def test_the_schedule_is_a_control(panel):
    panel.schedule.value = "micro-batch"
    panel.settle()
    assert "over after 62.5 updates" in panel.answer.value
    assert panel._rate_axes.get_title("left") == "Learning rate 0 after update 62.5"


def test_every_setting_can_be_drawn_and_no_other_can_be_set(panel):
    for clip in CLIPS:
        for overflow_in in (0, 4):
            panel.clip.value, panel.overflow_in.value = clip, overflow_in
            panel.settle()
            assert panel.last_error is None
    for control, value in ((panel.clip, "never"), (panel.overflow_in, 5), (panel.schedule, "epoch")):
        with pytest.raises(Exception, match="Invalid selection"):
            control.value = value
    assert [value for _, value in panel.schedule.options] == list(SCHEDULES)


def test_both_pictures_follow_and_keep_their_size(panel):
    images = (panel.step_picture.image, panel.rate_picture.image)
    before = [image.value for image in images]
    panel.clip.value, panel.schedule.value = "each", "micro-batch"
    panel.settle()
    for image, old in zip(images, before, strict=True):
        assert image.value != old
        sizes = {Image.open(io.BytesIO(png)).size for png in (old, image.value)}
        assert len(sizes) == 1
    panel.clip.value, panel.schedule.value = "mean", "update"
    panel.settle()
    assert [image.value for image in images] == before  # nothing stays of the other setting


def test_every_control_has_a_name(panel):
    names = [control.description for control in (panel.clip, panel.overflow_in, panel.schedule)]
    assert names == ["clip", "overflow in", "call the schedule"]


def test_what_it_leaves_without_a_kernel_does_not_follow(panel):
    panel.clip.value = "each"
    panel.settle()
    fresh = update_order_panel()
    data, other = panel._repr_mimebundle_()[0], fresh._repr_mimebundle_()[0]
    for mime in ("text/plain", "image/png"):
        assert data[mime] == other[mime]
    assert "0.900" in data["text/plain"]
    fresh.close()


def test_an_error_is_said_and_the_panel_goes_on(panel, monkeypatch):
    monkeypatch.setattr(update_order, "plot_update_parts", lambda *a, **k: 1 / 0)
    panel.clip.value = "sum"
    panel.settle()
    assert "could not be computed" in panel.answer.value
    monkeypatch.undo()
    panel.clip.value = "each"
    panel.settle()
    assert "to 0.950" in panel.answer.value
