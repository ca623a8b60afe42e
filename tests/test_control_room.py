"""Tests of the control room: every control by its value, what is shown under which setting, and the missions."""

import io
import itertools
import sys
import threading
from dataclasses import replace

import ipywidgets
import pytest
from PIL import Image

from course_lib.explorers import ControlRoom, LivePicture, control_room
from course_lib.plots import Picture
from course_lib.trials import BUDGETS, LEARNING_RATES, LOOPS, MISSIONS, MODELS, OPTIMIZERS, Curves, Evidence, Setting
from course_lib.trials import compare as compare_setting

room_module = sys.modules[ControlRoom.__module__]  # its function has the same name
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def rooms():
    """Give a function that makes a room, and close what it made."""
    made = []

    def make(**setting):
        room = control_room(**{"micro_batch_size": 4, "accumulation_steps": 2} | setting)
        room.num_updates = 3
        made.append(room)
        room.settle()
        return room

    yield make
    for room in made:
        room.close()
        room.training.wait()


@pytest.fixture
def quick(monkeypatch):
    """Let drawing cost nothing: every picture is a number of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(LivePicture, "render", lambda *_: f"picture {next(numbers)}".encode())
    monkeypatch.setattr(Picture, "png", lambda _: b"still")


@pytest.fixture
def answers_at_once(monkeypatch, quick):
    """Let drawing and trying a setting out cost nothing: evidence with two made-up updates."""
    asked = []

    def gather(setting, *, num_updates, check, tell):
        asked.append(setting)
        curves = Curves((2.0, 1.0), (2.0, 1.0), (0.01, 0.01), (0.02, 0.02), 2)
        evidence = Evidence(setting, predicted=room_module.predict(setting), curves=curves if num_updates else None)
        tell(evidence)
        if num_updates:
            tell(replace(evidence, finished=True))

    monkeypatch.setattr(room_module, "gather", gather)
    monkeypatch.setattr(room_module, "SETTLING_SECONDS", 0.0)
    return asked


def every_widget(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every_widget(child)


def shown(room, name):
    return room.pictures[name].image.value


def test_it_opens_with_memory_and_gradient_and_waits_with_the_curves(rooms, quick):
    room = rooms()
    assert room.last_error is None
    assert "4 x 2 = 8: the effective batch size" in room.answer.value
    assert "at the peak, as predicted." in room.answer.value
    assert "Gradient: equal to rounding" in room.answer.value
    assert "Curves: not trained yet." in room.answer.value
    assert shown(room, "curves") == room._waiting["curves"]
    assert shown(room, "gradient") != room._waiting["gradient"]
    assert "ready" in room.training.status.value or "done" in room.training.status.value


def test_a_change_tries_the_new_setting_out_and_trains(rooms, quick):
    room = rooms()
    before = {name: shown(room, name) for name in room.pictures}
    room.micro_batch_size.value = 8
    room.settle()
    assert "8 x 2 = 16: the effective batch size" in room.answer.value
    assert "Curves: they lie on one another, at most" in room.answer.value
    assert "samples a second" in room.answer.value
    assert room.evidence.finished
    assert all(shown(room, name) != picture for name, picture in before.items())
    assert room.training.bar.value == room.training.bar.max == 3


CONTROLS = [
    ("model", MODELS),
    ("optimizer", OPTIMIZERS),
    ("learning_rate", LEARNING_RATES),
    ("budget", BUDGETS),
    ("loop", LOOPS),
    ("micro_batch_size", (1, 17, 64)),
    ("accumulation_steps", (1, 3, 64)),
]


@pytest.mark.parametrize(("control", "values"), CONTROLS)
def test_every_value_of_every_control_is_followed_by_words_and_code(rooms, answers_at_once, control, values):
    room = rooms()
    for value in values:
        getattr(room, control).value = value
        room.settle()
        assert getattr(room.setting, control) == value
        assert room.evidence.setting == room.setting
        assert room.last_error is None
        assert room.code.value == room.setting.code
        assert f"= {room.setting.effective_batch_size}: the effective batch size" in room.answer.value


@pytest.mark.parametrize(
    ("control", "given", "held"),
    [
        ("micro_batch_size", 0, 1),
        ("micro_batch_size", 65, 64),
        ("accumulation_steps", 0, 1),
        ("accumulation_steps", 1000, 64),
    ],
)
def test_sliders_stop_at_their_limits(rooms, answers_at_once, control, given, held):
    room = rooms()
    getattr(room, control).value = given
    assert getattr(room, control).value == held


def test_the_effective_batch_cannot_pass_what_the_panel_has_and_steps_come_back(rooms, answers_at_once):
    room = rooms(micro_batch_size=8, accumulation_steps=64)
    room.micro_batch_size.value = 40
    assert (room.accumulation_steps.max, room.accumulation_steps.value) == (12, 12)
    room.accumulation_steps.value = 13
    assert room.accumulation_steps.value == 12
    room.micro_batch_size.value = 64
    assert room.accumulation_steps.value == 8
    room.micro_batch_size.value = 40
    assert room.accumulation_steps.value == 12  # what a hand asked for last
    room.settle()
    assert room.last_error is None


def test_steps_that_gave_way_come_back_with_the_room_for_them(rooms, answers_at_once):
    room = rooms(micro_batch_size=8, accumulation_steps=50)
    room.micro_batch_size.value = 64
    assert room.accumulation_steps.value == 8
    room.micro_batch_size.value = 4
    assert room.accumulation_steps.value == 50


@pytest.mark.parametrize("control", [name for name, _ in CONTROLS[:5]])
def test_lists_take_nothing_else(rooms, answers_at_once, control):
    room = rooms()
    with pytest.raises(Exception, match="Invalid selection"):
        getattr(room, control).value = "something else"


def test_the_switch_leaves_training_to_the_button(rooms, quick):
    room = rooms()
    room.always_train.value = False
    room.micro_batch_size.value = 5
    room.settle()
    assert "Gradient: equal to rounding" in room.answer.value
    assert "Curves: not trained yet." in room.answer.value
    assert not room.evidence.finished
    room.train_button.click()
    room.settle()
    assert room.evidence.finished
    assert "they lie on one another" in room.answer.value


def test_the_memory_bar_stays_while_sizes_move_and_goes_with_anything_else(rooms, quick, monkeypatch):
    room = rooms()
    gate, real = threading.Event(), room_module.predict

    def slow(setting):
        gate.wait(30)
        return real(setting)

    monkeypatch.setattr(room_module, "predict", slow)
    monkeypatch.setattr(room_module, "gather", lambda setting, **_: None)
    before = shown(room, "memory")
    room.micro_batch_size.value = 5
    assert shown(room, "memory") == before
    room.budget.value = "16 MiB"
    assert shown(room, "memory") == room._waiting["memory"]
    gate.set()
    room.settle()
    assert shown(room, "memory") not in (before, room._waiting["memory"])


class Held:
    """A training that tells its first curves and then waits for the gate, looking at the check."""

    def __init__(self, monkeypatch):
        self.told, self.gate, self.ended = threading.Event(), threading.Event(), []
        monkeypatch.setattr(room_module, "gather", self.gather)
        monkeypatch.setattr(room_module, "SETTLING_SECONDS", 0.0)

    def gather(self, setting, *, num_updates, check, tell):
        if (setting.learning_rate, setting.optimizer) != (0.3, "SGD"):
            return
        curves = Curves((2.0,), (2.0,), (0.01,), (0.02,), 9)
        evidence = Evidence(setting, predicted=room_module.predict(setting), curves=curves)
        tell(evidence)
        self.told.set()
        self.gate.wait(30)
        try:
            tell(replace(evidence, curves=replace(curves, full=(2.0, 1.0), accumulated=(2.0, 1.0))))
            check()
        finally:
            self.ended.append(setting)


def test_curves_of_an_earlier_setting_are_never_shown_under_a_newer_one(rooms, monkeypatch, quick):
    room = rooms()
    held = Held(monkeypatch)
    room.learning_rate.value = 0.3
    assert held.told.wait(30)
    super(ControlRoom, room).settle()
    assert shown(room, "curves") != room._waiting["curves"]
    assert "after 1 of 9 updates" in room.answer.value
    room.optimizer.value = "Adam"  # before anything has been drawn for it
    for name in ("gradient", "curves", "time"):
        assert shown(room, name) == room._waiting[name]
    held.gate.set()  # the earlier training tells one thing more, too late
    room.settle()
    assert held.ended
    assert room.evidence.curves is None
    assert shown(room, "curves") == room._waiting["curves"]
    assert "Curves: not trained yet." in room.answer.value


def test_a_drawing_that_was_begun_for_an_earlier_setting_is_dropped(rooms, monkeypatch, answers_at_once):
    room = rooms()
    room.learning_rate.value = 0.3
    room.settle()
    begun, gate = threading.Event(), threading.Event()
    plot = room_module.plot_loss_curves

    def slow(lines, axes, *, title):
        begun.set()
        gate.wait(30)
        return plot(lines, axes, title=title)

    monkeypatch.setattr(room_module, "plot_loss_curves", slow)
    room.learning_rate.value = 1.0
    assert begun.wait(30)
    room.always_train.value = False
    room.optimizer.value = "momentum"
    gate.set()
    room.settle()
    assert shown(room, "curves") == room._waiting["curves"]


def test_stop_ends_the_training_and_keeps_what_there_is(rooms, monkeypatch, quick):
    room = rooms()
    held = Held(monkeypatch)
    room.learning_rate.value = 0.3
    assert held.told.wait(30)
    room.training.stop_button.click()
    assert "stopped after 1 of 9 updates" in room.training.status.value
    held.gate.set()
    room.settle()
    assert "after 1 of 9 updates" in room.answer.value  # not the second one, which came after Stop
    room.optimizer.value = "Adam"
    room.settle()
    assert room.last_error is None


def test_a_real_training_is_stopped_by_a_change(rooms, quick):
    room = rooms(model="convolutional", micro_batch_size=32, accumulation_steps=16)
    room.num_updates = 1000
    room.learning_rate.value = 0.03
    earlier = room.training._run
    room.num_updates = 2
    room.micro_batch_size.value = room.accumulation_steps.value = 2
    room.settle()
    assert earlier.stopped
    assert room.evidence.finished
    assert room.evidence.setting.effective_batch_size == 4


def test_a_setting_that_was_finished_is_shown_again_at_once(rooms, answers_at_once):
    room = rooms()
    room.learning_rate.value = 0.3
    room.settle()
    room.learning_rate.value = 1.0
    room.settle()
    count = len(answers_at_once)
    room.learning_rate.value = 0.3
    room.settle()
    assert len(answers_at_once) == count
    assert room.evidence.finished
    assert shown(room, "curves") != room._waiting["curves"]
    room.train_button.click()
    room.settle()
    assert len(answers_at_once) == count + 1


def test_only_so_many_settings_are_remembered(rooms, answers_at_once, monkeypatch):
    monkeypatch.setattr(room_module, "KEPT", 2)
    room = rooms()
    for size in (5, 6, 7):
        room.micro_batch_size.value = size
        room.settle()
    assert [setting.micro_batch_size for setting in room._finished] == [6, 7]


def test_an_error_in_a_training_stands_in_words_and_the_panel_goes_on(rooms, monkeypatch, quick):
    room = rooms()
    real = room_module.gather

    def broken(setting, **given):
        if setting.optimizer == "Adam":
            raise RuntimeError("no gradient <today>")
        return real(setting, **given)

    monkeypatch.setattr(room_module, "gather", broken)
    room.optimizer.value = "Adam"
    room.settle()
    assert "RuntimeError: no gradient &lt;today&gt;." in room.training.status.value
    room.optimizer.value = "AdamW"
    room.settle()
    assert room.evidence.finished
    assert "done" in room.training.status.value


def test_an_error_in_a_drawing_stands_in_words_and_the_panel_goes_on(rooms, monkeypatch, quick):
    room = rooms()
    with monkeypatch.context() as patch:
        patch.setattr(room_module, "plot_peak_bars", lambda *_, **__: 1 / 0)
        room.micro_batch_size.value = 7
        room.settle()
        assert "ZeroDivisionError: division by zero." in room.answer.value
    room.micro_batch_size.value = 6
    room.settle()
    assert "6 x 2 = 12" in room.answer.value
    assert room.last_error is None


def test_out_of_memory_is_said_with_the_size_that_fits(rooms, quick):
    room = rooms(model="GPT", budget="2 MiB")
    room.micro_batch_size.value = 16
    room.accumulation_steps.value = 1
    room.settle()
    assert "Out of memory: " in room.answer.value
    assert f"micro-batches of {room.evidence.fits} would fit" in room.answer.value
    assert room.evidence.curves.accumulated == ()


def test_missions_are_judged_as_the_controls_move_and_counted_once(rooms, quick):
    room = rooms()
    room.always_train.value = False
    assert "Reach an effective batch of 64 with micro-batches of 16" in room.verdict.value
    assert "Not yet: the effective batch must be 64, it is 8" in room.verdict.value
    assert "0 of 11 missions solved" in room.verdict.value
    room.micro_batch_size.value, room.accumulation_steps.value = 16, 4
    room.settle()
    assert "✓ Solved. 1 of 11 missions solved." in room.verdict.value
    room.micro_batch_size.value = 15
    room.settle()
    assert "Not yet" in room.verdict.value
    assert "1 of 11 missions solved" in room.verdict.value
    room.mission.value = 4
    room.micro_batch_size.value, room.accumulation_steps.value = 1, 64
    room.settle()
    assert "2 of 11 missions solved" in room.verdict.value


@pytest.mark.parametrize("number", range(1, len(MISSIONS) + 1))
def test_every_mission_can_be_chosen_and_says_its_task(rooms, answers_at_once, number):
    room = rooms()
    room.mission.value = number
    room.settle()
    assert MISSIONS[number - 1].task in room.verdict.value
    assert room.mission.label == MISSIONS[number - 1].title


def test_the_line_of_code_opens_the_same_room(rooms, answers_at_once):
    room = rooms(model="GPT", optimizer="AdamW", learning_rate=0.003, budget="16 MiB", loop="mean of means")
    again = eval(room.code.value, {"control_room": lambda **given: rooms(**given)})
    assert again.setting == room.setting
    assert again.code.value == room.code.value


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"learning_rate": 0.2}, "learning_rate must be one of 0.0001, .*; got 0.2"),
        ({"budget": "3 MiB"}, "budget must be one of 1 MiB, .*; got '3 MiB'"),
        ({"model": "BERT"}, "model must be one of"),
        ({"micro_batch_size": 64, "accumulation_steps": 9}, "must be at most 512"),
    ],
)
def test_a_setting_that_no_control_has_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        control_room(**wrong)


def test_every_control_has_a_name_and_every_picture_its_words(rooms, quick):
    room = rooms()
    for widget in every_widget(room):
        assert not isinstance(widget, ipywidgets.Output)
        if isinstance(widget, ipywidgets.BoundedIntText | ipywidgets.Dropdown | ipywidgets.Checkbox | ipywidgets.Text):
            assert widget.description
    sentences = room.evidence.sentences()
    assert {name: picture.image.tooltip for name, picture in room.pictures.items()} == sentences


def test_pictures_keep_their_size_whatever_they_show(rooms):
    room = rooms()
    sizes = set()
    for change in ({}, {"model": "GPT", "budget": "1 MiB"}):
        for name, value in change.items():
            getattr(room, name).value = value
        room.settle()
        for picture in room.pictures.values():
            with Image.open(io.BytesIO(picture.image.value)) as image:
                sizes.add((image.size, picture.image.layout.height))
    assert sizes == {((800, 580), "290px")}


def test_without_a_kernel_it_leaves_a_sentence_and_a_picture_that_do_not_change(rooms):
    room, other = rooms(), rooms()
    room.micro_batch_size.value = 9
    (data, metadata), (again, _) = room._repr_mimebundle_(), other._repr_mimebundle_()
    assert data.pop(WIDGET_VIEW) != again.pop(WIDGET_VIEW)
    assert data == again
    assert "It opens at control_room(micro_batch_size=4, accumulation_steps=2)." in data["text/plain"]
    assert "too much" not in metadata["image/png"]["alt"]


def test_closing_ends_the_training():
    room = control_room(micro_batch_size=4)
    room.num_updates = 100_000
    room.learning_rate.value = 0.3
    room.close()
    room.training.wait(30)
    assert not room.training.running


def test_the_gradient_picture_is_of_the_setting(rooms, quick):
    room = rooms()
    room.loop.value = "no division"
    room.settle()
    found = compare_setting(Setting("dense", 4, 2, loop="no division"))
    assert room.evidence.comparison.per_parameter == found.per_parameter
    assert "Gradient: not equal. It is 2.00 times" in room.answer.value
