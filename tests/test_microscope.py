"""Tests of the microscope: the loop run line by line against the same loops written out, and every control of it."""

import itertools
import math
import time

import ipywidgets
import pytest
import torch

from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.explorers import microscope
from course_lib.explorers.loop import LEARNING_RATE, PLACES_TO_ZERO, Loop, record
from course_lib.explorers.microscope import code_html, words_html
from course_lib.losses import cross_entropy_sum
from course_lib.memory import measure_memory
from course_lib.models import dense_net

WAYS = [
    (divided, zeroed, step_inside)
    for divided, zeroed, step_inside in itertools.product((True, False), PLACES_TO_ZERO, (False, True))
]
SIZES = [(16, 4), (1, 1), (64, 8), (7, 3), (16, 1)]


# ---- the model: what a loop did, computed again by other means -------------------------------------------------------


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def written_out(size, steps, divided, zeroed, step_inside):
    """Run two updates as plain code: sums of gradients by hand, no `.grad`, no optimizer. Return numbers an update."""
    model = dense_net(hidden=(256,))
    parameters = list(model.parameters())
    inputs, targets = load_digits().first(2 * size * steps)
    held = None  # the sum that plays the part of .grad
    seen = []

    def gradient(start, stop, divisor):
        loss = cross_entropy_sum(model, (inputs[start:stop], targets[start:stop])) / divisor
        return torch.autograd.grad(loss, parameters)

    def move():
        with torch.no_grad():
            for parameter, value in zip(parameters, held, strict=True):
                parameter -= LEARNING_RATE * value

    for update in range(2):
        first, count = update * size * steps, size * steps
        full = torch.cat([value.flatten() for value in gradient(first, first + count, count)]).double()
        start = flat(model)
        if zeroed == "around":
            held = None
        for step in range(steps):
            if zeroed == "inside":
                held = None
            begin = first + step * size
            part = gradient(begin, begin + size, count if divided else size)
            held = part if held is None else [one + two for one, two in zip(held, part, strict=True)]
            accumulated = torch.cat([value.flatten() for value in held]).double()
            if step_inside:
                move()
        if not step_inside:
            move()
        if zeroed == "around":
            held = None
        seen.append(
            {
                "length": (accumulated.norm() / full.norm()).item(),
                "cosine": torch.nn.functional.cosine_similarity(accumulated, full, dim=0).item(),
                "distance": ((flat(model) - start).norm() / (LEARNING_RATE * full.norm())).item(),
            }
        )
    return seen


@pytest.mark.parametrize(("divided", "zeroed", "step_inside"), WAYS)
def test_each_way_to_write_the_loop_does_what_it_does_written_out(divided, zeroed, step_inside):
    seen = record(Loop(16, 4, divided=divided, zeroed=zeroed, step_inside=step_inside))
    for verdict, wanted in zip(seen.verdicts, written_out(16, 4, divided, zeroed, step_inside), strict=True):
        for name, number in wanted.items():
            assert getattr(verdict, name) == pytest.approx(number, rel=1e-4), name
        assert verdict.changes == (4 if step_inside else 1)


@pytest.mark.parametrize(("size", "steps"), SIZES)
def test_the_right_loop_is_the_full_batch_for_every_cut(size, steps):
    seen = record(Loop(size, steps))
    assert all(verdict.is_right for verdict in seen.verdicts)
    assert seen.is_fine(seen.moments[-1])
    assert seen.symptoms(seen.moments[-1]) == []
    assert [(one.update, one.micro_batch, one.line) for one in seen.moments] == list(seen.loop.places)
    lines_an_update = 1 + 3 * steps + 2
    assert len(seen.moments) == 1 + 2 * lines_an_update


@pytest.mark.parametrize(("divided", "zeroed", "step_inside"), WAYS)
def test_parameters_change_only_at_a_step_and_the_gradient_only_at_backward_and_zero(divided, zeroed, step_inside):
    seen = record(Loop(8, 3, divided=divided, zeroed=zeroed, step_inside=step_inside))
    assert [(one.update, one.micro_batch, one.line) for one in seen.moments] == list(seen.loop.places)
    for before, now in itertools.pairwise(seen.moments):
        source = seen.line(now)
        assert now.has_moved == (source == "optimizer.step()")
        assert (now.moved != before.moved) == now.has_moved
        if source == "loss.backward()":
            old = torch.zeros(8, 8) if before.gradient is None else before.gradient
            assert not torch.equal(now.gradient, old)
        elif source == "optimizer.zero_grad()":
            assert now.gradient is None
        else:
            assert (now.gradient is None) == (before.gradient is None)
            assert now.gradient is None or torch.equal(now.gradient, before.gradient)


def test_the_gradient_shown_grows_to_the_full_batchs():
    seen = record(Loop(16, 4))
    model = dense_net(hidden=(256,))
    (cross_entropy_sum(model, load_digits().first(64)) / 64).backward()
    whole = model[1].weight.grad
    unit = whole.norm(dim=1).argmax()
    last = [one for one in seen.moments if one.update == 1 and seen.line(one) == "loss.backward()"][-1]
    torch.testing.assert_close(last.gradient, whole[unit].reshape(8, 8), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(seen.full_batch[0], whole[unit].reshape(8, 8), rtol=1e-4, atol=1e-7)
    assert [one.num_digits for one in seen.moments if seen.line(one) == "loss.backward()"] == 2 * [16, 32, 48, 64]


def test_losses_are_those_of_the_micro_batches():
    model = dense_net(hidden=(256,))
    wanted = [cross_entropy_sum(model, part).item() / 64 for part in split_batch(load_digits().first(64), 16)]
    seen = record(Loop(16, 4))
    shown = [one.loss for one in seen.moments if one.update == 1 and seen.line(one).startswith("loss =")]
    assert shown == pytest.approx(wanted, rel=1e-5)
    assert math.isnan(seen.moments[0].loss)


def test_bytes_are_those_of_the_same_update_measured_whole():
    model = dense_net(hidden=(256,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, targets = load_digits().first(128)
    batches = [(inputs[:64].clone(), targets[:64].clone()), (inputs[64:].clone(), targets[64:].clone())]
    with measure_memory(model, optimizer, batches) as meter:
        for batch in batches:
            for micro_batch in split_batch(batch, 16):
                (cross_entropy_sum(model, micro_batch) / 64).backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = record(Loop(16, 4))
    assert max(seen.timeline.live_bytes) == pytest.approx(meter.peak_bytes, abs=16)  # the loss has a name here
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    by_line = {(one.micro_batch, seen.line(one)[:8]): one for one in seen.moments if one.update == 1}
    filled, cleared = by_line[4, "optimize"], by_line[0, "optimize"]
    assert filled.line == 6
    gradients = seen.timeline.by_category["gradients"]
    after_backward = [gradients[one.events] for one in seen.moments if seen.line(one) == "loss.backward()"]
    assert after_backward == 8 * [parameter_bytes]
    assert gradients[cleared.events] == gradients[filled.events] == 0


@pytest.mark.parametrize(
    ("way", "update", "words"),
    [
        ({"divided": False}, 1, "The gradient is 4.00 times the full batch's. Each loss was divided by 16, not by 64"),
        ({"zeroed": "inside"}, 1, "zero_grad in the loop has thrown away 48 of 64 digits."),
        ({"zeroed": "never"}, 2, "Nobody cleared it: the gradient of update 1 is still in it."),
        ({"step_inside": True}, 1, "The parameters have changed 4 times in one update"),
    ],
)
def test_each_broken_loop_has_its_symptom_in_words_with_its_number(way, update, words):
    seen = record(Loop(16, 4, **way))
    last = [one for one in seen.moments if one.update == update][-1]
    said = " ".join(seen.symptoms(last))
    assert words in said
    assert not seen.is_fine(last)
    wanted = written_out(16, 4, way.get("divided", True), way.get("zeroed", "around"), way.get("step_inside", False))[
        update - 1
    ]
    assert f"The gradient is {wanted['length']:.2f} times" in said
    assert f"went {wanted['distance']:.2f} times as far as the right one" in said


def test_what_nobody_clears_does_no_harm_in_the_first_update():
    seen = record(Loop(16, 4, zeroed="never"))
    last = [one for one in seen.moments if one.update == 1][-1]
    assert seen.is_fine(last)
    assert seen.symptoms(last) == []


@pytest.mark.parametrize("way", [{"divided": False}, {"zeroed": "inside"}, {"step_inside": True}])
def test_with_one_micro_batch_there_is_nothing_to_break(way):
    seen = record(Loop(16, 1, **way))
    assert all(verdict.is_right for verdict in seen.verdicts)


def test_no_symptom_is_named_before_it_can_be_seen():
    seen = record(Loop(16, 4, divided=False))
    named = [bool(seen.symptoms(one)) for one in seen.moments if one.update == 1]
    assert named == [False] * 13 + [True] * 3


def test_the_lines_shown_are_the_loop_of_the_notebook():
    assert Loop(16, 4).lines == (
        "optimizer.zero_grad()",
        "for micro_batch in split_batch(batch, 16):",
        "    loss = loss_sum(model, micro_batch) / 64",
        "    loss.backward()",
        "optimizer.step()",
        "optimizer.zero_grad()",
    )
    assert Loop(16, 4).broken_lines == ()
    assert Loop(16, 4, divided=False, zeroed="inside", step_inside=True).lines == (
        "for micro_batch in split_batch(batch, 16):",
        "    optimizer.zero_grad()",
        "    loss = loss_sum(model, micro_batch) / 16",
        "    loss.backward()",
        "    optimizer.step()",
    )
    assert Loop(16, 4, divided=False, zeroed="inside", step_inside=True).broken_lines == (2, 3, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"micro_batch_size": 65}, "micro_batch_size must be from 1 to 64; got 65"),
        ({"accumulation_steps": 9}, "accumulation_steps must be from 1 to 8; got 9"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"zeroed": "twice"}, "zeroed must be one of around, inside, never; got 'twice'"),
    ],
)
def test_a_loop_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Loop(**arguments)


def test_a_loop_is_run_once_and_touches_no_global_randomness():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    record.cache_clear()
    first = record(Loop(5, 2))
    assert torch.equal(torch.rand(1), wanted)
    assert record(Loop(5, 2)) is first


# ---- the panel: every control ----------------------------------------------------------------------------------------


@pytest.fixture
def panel():
    made = microscope()
    yield made
    made.close()


def press(panel, name, times=1):
    for _ in range(times):
        getattr(panel, name).click()
    panel.settle()


def test_lines_run_is_a_control_too_and_stops_at_its_limits(panel):
    panel.lines_run.value = 4
    panel.settle()
    assert lit(panel) == 4
    for value, stops_at in ((-1, 0), (31, 30)):
        panel.lines_run.value = value
        panel.settle()
        assert panel.lines_run.value == stops_at
        assert panel.last_error is None
    panel.accumulation_steps.value = 2
    assert panel.lines_run.max == 18
    assert panel.lines_run.value == 18


def lit(panel):
    """Return the number of the line that is lit up, read from the HTML; None if none is."""
    row = panel.code.value.partition('aria-current="step">')[2]
    return int(row.removeprefix("►").split()[0]) if row else None


def test_step_goes_through_the_loop_line_by_line_and_back_again(panel):
    assert lit(panel) is None
    assert "Nothing has run yet" in panel.answer.value
    path = []
    for _ in range(15):
        press(panel, "step")
        path.append(lit(panel))
    assert path == [1, *4 * [2, 3, 4], 5, 6]
    pictures = [panel.image.value]
    press(panel, "back")
    assert lit(panel) == 5
    assert "one change of the parameters, equal to rounding" in panel.answer.value
    pictures.append(panel.image.value)
    press(panel, "back", 2)
    assert lit(panel) == 3
    pictures.append(panel.image.value)
    assert len(set(pictures)) == 3


def test_step_and_back_stop_at_the_ends(panel):
    press(panel, "back", 2)
    assert panel.lines_run.value == 0
    press(panel, "step", 40)
    assert panel.lines_run.value == 30
    assert panel.moment is record(Loop()).moments[-1]
    press(panel, "reset")
    assert panel.lines_run.value == 0
    assert lit(panel) is None


def test_every_moment_draws_and_speaks(panel):
    seen = record(Loop())
    for number, moment in enumerate(seen.moments[1:], start=1):
        press(panel, "step")
        assert panel.lines_run.value == number
        assert panel.last_error is None
        assert panel.answer.value.count(words_html(seen, moment)) == 1
        assert panel.code.value == code_html(seen, moment)


@pytest.mark.parametrize(
    ("control", "largest"), [("micro_batch_size", 64), ("accumulation_steps", 8)], ids=lambda value: str(value)
)
def test_sizes_stop_at_their_limits_and_are_drawn(panel, control, largest):
    slider = getattr(panel, control)
    for value, stops_at in ((0, 1), (largest + 1, largest)):
        slider.value = value
        panel.settle()
        assert slider.value == stops_at
        assert panel.last_error is None
        size = panel.micro_batch_size.value
        assert f"split_batch(batch, {size})" in panel.code.value
        assert f"micro_batch) / {size * panel.accumulation_steps.value}" in panel.code.value


def test_largest_of_both_fits_the_data(panel):
    panel.micro_batch_size.value, panel.accumulation_steps.value = 64, 8
    press(panel, "step", 54)
    assert panel.last_error is None
    assert panel.lines_run.value == 2 * (1 + 3 * 8 + 2)


@pytest.mark.parametrize(
    ("switch", "update", "words", "number_of_lines"),
    [
        ("no_division", 1, "4.00 times the full batch&#x27;s", 6),
        ("zero_inside", 1, "thrown away 48 of 64 digits", 5),
        ("no_zero", 2, "the gradient of update 1 is still in it", 4),
        ("step_inside", 1, "changed 4 times in one update", 6),
    ],
)
def test_each_switch_breaks_the_loop_and_mends_it_again(panel, switch, update, words, number_of_lines):
    press(panel, "step", 15 * update - 1)  # the step of this update has run
    before = panel.image.value
    assert words not in panel.answer.value
    getattr(panel, switch).value = True
    panel.settle()
    assert panel.moment.update == update
    assert words in panel.answer.value
    assert f"of {number_of_lines}, update {update} of 2" in panel.answer.value
    assert "✗" in panel.code.value
    assert panel.image.value != before
    getattr(panel, switch).value = False
    panel.settle()
    assert words not in panel.answer.value
    assert "✗" not in panel.code.value
    assert panel.image.value == before


def test_zeroing_inside_and_never_exclude_each_other(panel):
    panel.zero_inside.value = True
    panel.no_zero.value = True
    assert (panel.zero_inside.value, panel.no_zero.value) == (False, True)
    panel.zero_inside.value = True
    assert (panel.zero_inside.value, panel.no_zero.value) == (True, False)
    panel.settle()
    assert panel.loop.zeroed == "inside"


def test_a_changed_setting_stays_at_the_same_place_of_the_update(panel):
    press(panel, "step", 14)  # the step of the first update
    for name, value in (
        ("accumulation_steps", 8),
        ("micro_batch_size", 3),
        ("step_inside", True),
        ("no_zero", True),
        ("accumulation_steps", 1),
    ):
        getattr(panel, name).value = value
        panel.settle()
        assert record(panel.loop).line(panel.moment) == "optimizer.step()"
        assert panel.moment.update == 1
        assert panel.moment.micro_batch == panel.accumulation_steps.value


def test_play_runs_off_the_main_thread_to_the_end(panel, monkeypatch):
    monkeypatch.setitem(microscope.__globals__, "SECONDS_A_LINE", 0.0)
    panel.play.click()
    panel.playing.wait()
    panel.settle()
    assert panel.lines_run.value == 30
    assert "both updates have run" in panel.playing.status.value
    monkeypatch.setitem(microscope.__globals__, "SECONDS_A_LINE", 60.0)  # so that it can't reach the end again first
    panel.play.click()  # begins again
    panel.playing.stop()
    panel.playing.wait()
    assert panel.lines_run.value < 30


@pytest.mark.parametrize(
    "stop",
    [
        lambda panel: panel.playing.stop_button.click(),
        lambda panel: panel.step.click(),
        lambda panel: panel.back.click(),
        lambda panel: panel.reset.click(),
        lambda panel: setattr(panel.no_division, "value", True),
        lambda panel: setattr(panel.micro_batch_size, "value", 8),
    ],
    ids=["stop", "step", "back", "reset", "switch", "slider"],
)
def test_play_stops_at_once(panel, stop):
    panel.play.click()
    deadline = time.monotonic() + 30
    while panel.lines_run.value == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop(panel)
    panel.playing.wait()
    panel.settle()
    assert not panel.playing.running
    place = panel.lines_run.value
    assert panel.playing.stop_button.disabled
    panel.settle()
    assert panel.lines_run.value == place


@pytest.mark.parametrize(
    "begin_anew",
    [lambda panel: panel.reset.click(), lambda panel: setattr(panel.accumulation_steps, "value", 8)],
    ids=["reset", "slider"],
)
def test_nothing_is_said_of_an_earlier_play_where_the_loop_begins_anew(panel, begin_anew):
    panel.play.click()
    panel.playing.stop()
    panel.playing.wait()
    assert "stopped" in panel.playing.status.value
    begin_anew(panel)
    panel.settle()
    assert "stopped" not in panel.playing.status.value
    assert panel.playing.bar.bar_style == ""


def test_an_error_is_said_in_words_and_the_panel_goes_on(panel, monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError("the lamp is out")

    with monkeypatch.context() as broken:
        broken.setitem(microscope.__globals__, "plot_bytes_so_far", fail)
        press(panel, "step")
        assert "RuntimeError: the lamp is out" in panel.answer.value
    press(panel, "step")
    assert panel.last_error is None
    assert lit(panel) == 2


def every_widget(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every_widget(child)


def test_controls_have_names_and_there_is_no_output_widget(panel):
    widgets = list(every_widget(panel))
    names = [one.description for one in widgets if isinstance(one, ipywidgets.Checkbox | ipywidgets.Button)]
    assert names == [
        "no division by the steps",
        "zero_grad inside the loop",
        "no zero_grad at all",
        "step inside the loop",
        "Back",
        "Step",
        "Play",
        "Reset",
        "Stop",
    ]
    assert not any(isinstance(one, ipywidgets.Output) for one in widgets)


def test_the_still_picture_is_constant(panel):
    press(panel, "step", 5)
    moved, fresh = panel._repr_mimebundle_(), microscope()._repr_mimebundle_()
    assert moved[0]["image/png"] == fresh[0]["image/png"]
    assert moved[0]["text/plain"] == fresh[0]["text/plain"]
    assert len(moved[1]["image/png"]["alt"]) > 20
