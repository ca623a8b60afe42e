"""The savers of notebook 13: settings, bytes and words; and the panel, driven by the values of its controls."""

import re

import ipywidgets
import pytest
import torch

from course_lib.accumulation import update_parameters
from course_lib.batches import split_batch
from course_lib.explorers import SaversPanel, savers_panel
from course_lib.explorers.savers import BUDGETS, LENGTHS, STEPS, verdict, what_it_changes
from course_lib.losses import count_tokens
from course_lib.memory import measure_memory
from course_lib.savers import OPTIMIZERS, Savers, peak_by_category, surname_batch, surname_gpt

MIB = 2**20
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def peak(savers: Savers) -> int:
    return sum(peak_by_category(savers).values())


# The model


def test_the_batch_is_64_lines_and_the_targets_are_the_next_tokens():
    inputs, targets = surname_batch()
    assert inputs.shape == targets.shape == (64, 32)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    short, _ = surname_batch(8)
    assert short.shape == (64, 8)
    assert short.untyped_storage().nbytes() == 64 * 8 * 8  # not a view of the whole text


@pytest.mark.parametrize(
    ("steps", "options"), [(1, {}), (4, {}), (16, {"chunked_loss": True}), (8, {"checkpointing": True})]
)
def test_two_micro_batches_have_the_peak_of_the_whole_group(steps, options):
    savers = Savers(steps, tokens=8, **options)
    model = surname_gpt(checkpoint_blocks=savers.checkpointing)
    optimizer, batch = torch.optim.AdamW(model.parameters()), surname_batch(8)
    for _ in range(2):
        with measure_memory(model, optimizer, batch) as meter:
            micro_batches = split_batch(batch, savers.micro_batch_size)
            update_parameters(model, optimizer, micro_batches, savers.loss_sum(), count_tokens)
    kept_losses = 4 * max(0, steps - 2)
    assert peak(savers) == meter.peak_bytes - kept_losses


@pytest.mark.parametrize(
    "saver",
    [
        {"accumulation_steps": 4},
        {"autocast": True},
        {"checkpointing": True},
        {"chunked_loss": True},
        {"tokens": 8},
        *({"optimizer": name} for name in OPTIMIZERS if name != "AdamW"),
    ],
    ids=str,
)
def test_each_saver_saves_alone(saver):
    assert peak(Savers(**saver)) < 0.97 * peak(Savers(tokens=32))


def test_the_two_that_fit_without_accumulation_do_more_than_their_product():
    plain, fitting = peak(Savers()), peak(Savers(checkpointing=True, chunked_loss=True))
    assert fitting < 40 * MIB < plain
    alone = plain / peak(Savers(checkpointing=True)) * plain / peak(Savers(chunked_loss=True))
    assert plain / fitting > 1.1 * alone


def test_categories_are_those_of_the_meter_and_the_state_is_there():
    found = peak_by_category(Savers(accumulation_steps=8))
    parameters = sum(parameter.nbytes for parameter in surname_gpt().parameters())
    assert found["parameters"] == found["gradients"] == parameters
    assert found["optimizer_state"] > 2 * parameters
    assert found["inputs"] == 2 * 64 * 32 * 8
    assert peak_by_category(Savers(accumulation_steps=8, optimizer="SGD"))["optimizer_state"] == 0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"accumulation_steps": 3}, ValueError, "accumulation_steps must divide 64; got 3"),
        ({"accumulation_steps": 128}, ValueError, "accumulation_steps must divide 64; got 128"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1; got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "accumulation_steps must be a whole number"),
        ({"tokens": 33}, ValueError, "tokens must be at most 32; got 33"),
        ({"tokens": 0}, ValueError, "tokens must be at least 1; got 0"),
        ({"optimizer": "Adam"}, ValueError, "optimizer must be one of AdamW, SGD with momentum, Adafactor, SGD"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Savers(**settings)


def test_what_is_switched_on_is_said_in_words():
    assert Savers().switched_on == []
    everything = Savers(4, True, True, True, "SGD", 16)
    assert everything.switched_on == ["4 x 16", "autocast", "checkpointing", "chunked loss", "SGD", "16 tokens"]


# The words


def test_the_verdict_says_by_how_much():
    assert verdict(28 * MIB, 40 * MIB) == "<b>28.0 MiB. Fits: 12.0 MiB to spare.</b>"
    assert verdict(40 * MIB, 40 * MIB) == "<b>40.0 MiB. Fits: 0 B to spare.</b>"
    assert verdict(40 * MIB + 100, 40 * MIB) == "<b>40.0 MiB. Does not fit: 100 B too much.</b>"


@pytest.mark.parametrize(
    ("savers", "words"),
    [
        (Savers(4, checkpointing=True, chunked_loss=True), "The gradient is the full batch's."),
        (Savers(autocast=True), "The gradient is another one: rounded to bfloat16."),
        (Savers(tokens=8, autocast=True), "The gradient is another one: of a shorter text, rounded to bfloat16."),
        (Savers(optimizer="SGD"), "The gradient is the full batch's; the step is no longer AdamW."),
    ],
)
def test_words_say_what_happens_to_the_gradient(savers, words):
    assert what_it_changes(savers) == words


# The panel


@pytest.fixture(scope="module")
def panel():
    made = savers_panel()
    made.checkpointing.value = made.chunked_loss.value = False
    made.settle()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def plain_again(request):
    yield
    if "panel" in request.fixturenames:
        panel = request.getfixturevalue("panel")
        values = [1, False, False, False, "AdamW", 32, "40 MiB"]  # the plain update
        for control, value in zip(controls(panel), values, strict=True):
            control.value = value
        panel.settle()


def controls(panel: SaversPanel) -> list:
    names = ("accumulation_steps", "autocast", "checkpointing", "chunked_loss", "optimizer", "tokens", "budget")
    return [getattr(panel, name) for name in names]


def said(panel: SaversPanel) -> str:
    panel.settle()
    assert panel.last_error is None
    return re.sub(r"<[^>]+>", "", panel.answer.value)


def test_at_first_two_savers_fit():
    fresh = savers_panel()
    assert said(fresh).startswith("37.5 MiB. Fits: 2.5 MiB to spare. Most of it: activations, 15.1 MiB.")
    fresh.close()


def test_the_plain_update_does_not_fit(panel):
    assert said(panel).startswith("126.4 MiB. Does not fit: 86.4 MiB too much. Most of it: activations, 82.3 MiB.")


@pytest.mark.parametrize(
    ("control", "value", "savers"),
    [
        ("accumulation_steps", 4, Savers(4)),
        ("autocast", True, Savers(autocast=True)),
        ("checkpointing", True, Savers(checkpointing=True)),
        ("chunked_loss", True, Savers(chunked_loss=True)),
        ("optimizer", "Adafactor", Savers(optimizer="Adafactor")),
        ("tokens", 16, Savers(tokens=16)),
    ],
)
def test_every_control_changes_words_and_picture(panel, control, value, savers):
    before = panel.live.image.value
    getattr(panel, control).value = value
    assert said(panel).startswith(f"{peak(savers) / MIB:.1f} MiB.")
    assert panel.live.image.value != before


def test_the_budget_moves_the_verdict_and_the_line(panel):
    panel.checkpointing.value = panel.chunked_loss.value = True
    assert said(panel).startswith("37.5 MiB. Fits: 2.5 MiB to spare.")
    before = panel.live.image.value
    panel.budget.value = "24 MiB"
    assert said(panel).startswith("37.5 MiB. Does not fit: 13.5 MiB too much.")
    assert panel.live.image.value != before


def test_everything_at_its_limit(panel):
    """The most of each saver, and the tightest budget; then the other end."""
    for control in (panel.checkpointing, panel.chunked_loss, panel.autocast):
        control.value = True
    panel.accumulation_steps.value, panel.tokens.value = STEPS[-1], LENGTHS[0]
    panel.optimizer.value, panel.budget.value = "SGD", BUDGETS[0]
    assert said(panel).startswith("11.1 MiB. Fits: ")
    panel.optimizer.value = "AdamW"
    assert "Does not fit" in said(panel)
    for control, value in zip(controls(panel), [1, False, False, False, "AdamW", 32, BUDGETS[-1]], strict=True):
        control.value = value
    assert said(panel).startswith("126.4 MiB. Fits: 1.6 MiB to spare.")


@pytest.mark.parametrize(
    ("control", "value"), [("accumulation_steps", 3), ("tokens", 33), ("optimizer", "Adam"), ("budget", "1 MiB")]
)
def test_what_makes_no_sense_cannot_be_set(panel, control, value):
    before = getattr(panel, control).value
    with pytest.raises(ipywidgets.widgets.trait_types.traitlets.TraitError):
        getattr(panel, control).value = value
    assert getattr(panel, control).value == before


def test_the_scale_of_the_bars_stays(panel):
    first = panel._axes.get_xlim()
    panel.accumulation_steps.value = 16
    said(panel)
    assert panel._axes.get_xlim() == first
    assert first[1] > peak(Savers()) / MIB


def test_stored_without_a_kernel_it_is_always_the_same(panel):
    panel.accumulation_steps.value = 8
    said(panel)
    fresh = savers_panel()
    (data, metadata), (other, other_metadata) = panel._repr_mimebundle_(), fresh._repr_mimebundle_()
    assert data.pop(WIDGET_VIEW)["model_id"] != other.pop(WIDGET_VIEW)["model_id"]
    assert data == other
    assert metadata == other_metadata
    assert "with checkpointing and a chunked loss, 37.5 MiB: it fits into 40 MiB" in data["text/plain"]
    fresh.close()
