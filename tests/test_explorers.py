"""Tests of course_lib.explorers: panels are driven by setting the values of their controls."""

import gc
import io
import threading
import time
import weakref

import ipywidgets
import numpy as np
import pytest
from PIL import Image

from course_lib.explorers import (
    BackgroundRun,
    HelloPanel,
    LivePicture,
    Panel,
    Split,
    button,
    hello_panel,
    labelled_choices,
    labelled_float_slider,
    labelled_list,
    labelled_slider,
    switch,
)
from course_lib.explorers import panel as panel_module
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
    panel.settle()
    assert "8 x 4 = 32: one update sees 32 digits" in panel.answer.value
    middle = panel.image.value
    panel.accumulation_steps.value = 2
    panel.settle()
    assert "8 x 2 = 16: one update sees 16 digits" in panel.answer.value
    assert len({before, middle, panel.image.value}) == 3
    assert panel.image.tooltip == "8 x 2 = 16: one update sees 16 digits."  # the image's name for a screen reader
    for size, steps in ((64, 16), (16, 4)):  # by way of a larger picture, of which nothing may stay
        panel.micro_batch_size.value, panel.accumulation_steps.value = size, steps
        panel.settle()
    assert panel.image.value == before


def test_pictures_keep_their_size():
    panel = hello_panel()
    sizes = set()
    for size, steps in ((1, 1), (64, 16), (5, 3)):
        panel.micro_batch_size.value, panel.accumulation_steps.value = size, steps
        panel.settle()
        with Image.open(io.BytesIO(panel.image.value)) as image:
            sizes.add(image.size)
    assert len(sizes) == 1
    assert panel.image.layout.height == "300px"


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
        panel.settle()
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
    monkeypatch.setattr(panel.live, "draw", lambda words: drawn.append(panel.micro_batch_size.value))
    panel.micro_batch_size.value = 8
    panel.micro_batch_size.value = 8
    panel.settle()
    assert drawn == [8]


def test_bundle_without_the_view_is_constant_and_says_what_it_shows():
    moved, fresh = hello_panel(), hello_panel()
    moved.micro_batch_size.value = 1
    (data, metadata), (other, other_metadata) = moved._repr_mimebundle_(), fresh._repr_mimebundle_()
    assert data.pop(WIDGET_VIEW)["model_id"] != other.pop(WIDGET_VIEW)["model_id"]
    assert data == other
    assert metadata == other_metadata == {"image/png": {"alt": data["text/plain"], "width": 560, "height": 300}}
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


class Counter(Panel):
    """A panel whose drawing can be held up, fails at 13 and counts what it draws."""

    def __init__(self):
        super().__init__(text="A number.")
        row, self.number = labelled_slider("number", 1, 100)
        self.drawn, self.begun, self.gate = [], threading.Event(), threading.Event()
        self.gate.set()
        self.arrange([row, self.answer], controls=[self.number])

    def draw(self):
        number = self.number.value
        self.begun.set()
        self.gate.wait(20)
        if number == 13:
            raise ValueError("13 < 14 & unlucky")
        self.drawn.append((number, threading.current_thread() is threading.main_thread()))
        self.say(f"now {number}")


def hold_up(panel):
    panel.gate.clear()
    panel.begun.clear()


def test_a_burst_of_moves_draws_the_newest_value_and_no_backlog():
    panel = Counter()
    hold_up(panel)
    panel.number.value = 2
    assert panel.begun.wait(20)
    assert not panel.is_outdated
    for number in range(3, 43):
        panel.number.value = number
    assert panel.is_outdated
    panel.gate.set()
    panel.settle()
    assert [number for number, _ in panel.drawn] == [1, 2, 42]
    assert "now 42" in panel.answer.value


def test_only_the_first_drawing_is_on_the_main_thread():
    panel = Counter()
    panel.number.value = 5
    panel.settle()
    assert panel.drawn == [(1, True), (5, False)]


def test_settle_gives_up_with_an_error():
    panel = Counter()
    hold_up(panel)
    panel.number.value = 2
    with pytest.raises(TimeoutError, match=r"still drawing after 0\.05 s"):
        panel.settle(timeout=0.05)
    panel.gate.set()
    panel.settle()


def test_an_error_stands_in_words_and_the_panel_goes_on():
    panel = Counter()
    panel.number.value = 13
    panel.settle()
    assert "ValueError: 13 &lt; 14 &amp; unlucky." in panel.answer.value
    assert isinstance(panel.last_error, ValueError)
    panel.number.value = 14
    panel.settle()
    assert "now 14" in panel.answer.value
    assert panel.last_error is None


def test_an_error_in_the_first_drawing_is_the_cells():
    class Broken(Counter):
        def draw(self):
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        Broken()


def test_an_interrupt_while_waiting_leaves_the_panel_usable(monkeypatch):
    panel = Counter()
    hold_up(panel)
    panel.number.value = 2

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(panel._requests._condition, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            panel.settle()
    panel.gate.set()
    panel.number.value = 3
    panel.settle()
    assert "now 3" in panel.answer.value


def test_a_closed_panel_is_forgotten_with_its_widgets_and_its_thread():
    before = set(ipywidgets.widgets.widget._instances)
    panel = Counter()
    panel.number.value = 4
    panel.settle()
    thread, remembered = panel._requests._thread, weakref.ref(panel)
    panel.close()
    panel.number.value = 5  # nothing draws any more
    assert panel.drawn[-1][0] == 4
    del panel
    gc.collect()
    assert remembered() is None
    assert set(ipywidgets.widgets.widget._instances) == before
    thread.join(20)
    assert not thread.is_alive()


def test_an_idle_drawing_thread_ends_and_the_next_move_starts_another(monkeypatch):
    monkeypatch.setattr(panel_module, "IDLE_SECONDS", 0.01)
    panel = Counter()
    panel.number.value = 2
    panel.settle()
    first = panel._requests._thread
    if first is not None:
        first.join(20)
    assert panel._requests._thread is None
    panel.number.value = 3
    panel.settle()
    assert panel.drawn[-1][0] == 3


def test_words_are_marked_for_a_screen_reader():
    panel = Counter()
    assert 'aria-live="polite"' in panel.answer.value
    assert 'role="status"' in panel.answer.value


# The picture.


def pixels(picture):
    with Image.open(io.BytesIO(picture.image.value)) as image:
        return np.asarray(image.convert("RGB"))


def test_live_picture_is_an_opaque_card_of_a_fixed_size():
    figure, axes = new_axes(width=4.0, height=2.5)
    axes.plot([0, 1])
    picture = LivePicture(figure)
    picture.draw()
    layout = picture.image.layout
    assert (layout.height, layout.max_width, layout.width) == ("250px", "400px", "100%")
    assert pixels(picture).shape == (500, 800, 3)
    assert (pixels(picture)[0] == 255).all()


def test_moving_artists_are_drawn_over_a_background_and_give_the_same_picture():
    def drawn(blit):
        figure, axes = new_axes(width=4.0, height=2.5)
        axes.set_xlim(0, 2)
        axes.set_ylim(0, 2)
        (line,) = axes.plot([0.5, 1], [0.5, 1])  # away from the frame, which it would be drawn over
        picture = LivePicture(figure)
        moving = [line] if blit else []
        picture.draw(*moving)
        line.set_ydata([1.5, 0.5])
        picture.draw(*moving)
        return pixels(picture)

    assert (drawn(blit=True) == drawn(blit=False)).all()


def test_a_background_is_kept_until_it_is_forgotten():
    figure, axes = new_axes(width=4.0, height=2.5)
    (line,) = axes.plot([0, 1])
    picture = LivePicture(figure)
    picture.draw(line)
    first = pixels(picture)
    axes.set_facecolor("black")
    picture.draw(line)
    assert (pixels(picture) == first).all()
    picture.forget()
    picture.draw(line)
    assert pixels(picture).mean() < 200 < first.mean()


def test_axes_stay_where_they_are_unless_the_layout_is_free():
    places = {}
    for layout in ("fixed", "free"):
        figure, axes = new_axes(width=4.0, height=2.5)
        picture = LivePicture(figure, layout=layout)
        picture.draw()
        before = axes.get_position().bounds
        axes.set_ylabel("a label\nof three\nlines")
        picture.draw()
        places[layout] = axes.get_position().bounds == before
    assert places == {"fixed": True, "free": False}
    with pytest.raises(ValueError, match="layout must be"):
        LivePicture(figure, layout="tight")


# The controls.


def test_each_control_has_a_name_and_a_value_that_its_twin_follows():
    rows = {
        "steps": labelled_slider("steps", 4, 16, smallest=2),
        "rate": labelled_float_slider("rate", 0.5, 0.0, 2.0),
        "size": labelled_choices("size", [1, 2, 4], 2),
    }
    for label, (row, control) in rows.items():
        field, slider = row.children
        assert field.description == label
        assert slider is control
    rows["steps"][1].value, rows["rate"][1].value, rows["size"][1].value = 1, 9.0, 4
    assert [row.children[0].value for row, _ in rows.values()] == [2, 2.0, 4]
    rows["size"][0].children[0].value = 1
    assert rows["size"][1].value == 1
    with pytest.raises(Exception, match="Invalid selection"):
        rows["size"][1].value = 3


def test_a_limit_that_moves_holds_for_both_twins():
    row, slider = labelled_slider("steps", 4, 16)
    slider.max = 3
    assert (row.children[0].max, row.children[0].value, slider.value) == (3, 3, 3)


def test_switch_list_and_button_carry_their_name():
    pressed = []
    box, choice, press = switch("divide", True), labelled_list("model", ["a", "b"], "b"), button("Go", pressed.append)
    assert (box.description, box.value) == ("divide", True)
    assert (choice.description, choice.value) == ("model", "b")
    press.click()
    assert pressed == [press]
    assert press.description == press.tooltip == "Go"


# Long work.


def endless(run):
    while True:
        run.report(3, 1000)
        time.sleep(0.001)


def test_a_run_reports_shows_and_ends():
    shown, long = [], BackgroundRun("steps")

    def work(run):
        for done in range(1, 6):
            run.report(done, 5)
            run.show(lambda done=done: shown.append(done))

    long.start(work)
    long.wait()
    assert shown == [1, 2, 3, 4, 5]
    assert (long.bar.value, long.bar.max, long.bar.bar_style) == (5, 5, "success")
    assert "done: 5 of 5 steps" in long.status.value
    assert long.stop_button.disabled
    assert not long.running


def test_stop_ends_a_run_and_says_where():
    long = BackgroundRun("steps")
    run = long.start(endless)
    assert not long.stop_button.disabled
    while run.total == 0:
        time.sleep(0.001)
    long.stop_button.click()
    long.wait(20)
    assert run.stopped
    assert "stopped after 3 of 1000 steps" in long.status.value
    assert long.stop_button.disabled
    long.stop()  # nothing runs: nothing changes
    assert "stopped after 3" in long.status.value


def test_an_earlier_run_shows_nothing_under_a_newer_one():
    long, shown, gate = BackgroundRun(), [], threading.Event()

    def slow(run):
        gate.wait(20)  # deaf to Stop until it wants to show
        shown.append(("slow", run.show(lambda: shown.append("stale"))))

    long.start(slow)
    long.start(lambda run: run.show(lambda: shown.append("new")))
    gate.set()
    long.wait(20)
    assert shown == [("slow", False), "new"]
    assert "done" in long.status.value


def test_two_runs_never_compute_at_once():
    long, order = BackgroundRun(), []

    def work(name):
        def work(run):
            order.append(f"{name} begins")
            try:
                endless(run) if name == "first" else None
            finally:
                time.sleep(0.05)
                order.append(f"{name} ends")

        return work

    long.start(work("first"))
    while not order:
        time.sleep(0.001)
    long.start(work("second"))
    long.wait(20)
    assert order == ["first begins", "first ends", "second begins", "second ends"]


def test_an_error_in_a_run_stands_in_its_words():
    long = BackgroundRun()

    def work(run):
        raise ValueError("learning rate < 0")

    long.start(work)
    long.wait(20)
    assert "ValueError: learning rate &lt; 0." in long.status.value
    assert isinstance(long.error, ValueError)
    assert long.bar.bar_style == "danger"
    long.start(lambda run: None)
    long.wait(20)
    assert long.error is None


def test_closing_the_panel_stops_its_runs():
    panel = Counter()
    panel.runs.append(BackgroundRun())
    run = panel.runs[0].start(endless)
    panel.close()
    panel.runs[0].wait(20)
    assert run.stopped
