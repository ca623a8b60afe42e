"""Every small panel: what all of them keep, and what the panels of notebooks 01, 03, 04, 06 and 07 answer."""

import io
import math
from itertools import product

import ipywidgets
import pytest
import torch
from PIL import Image
from torch.nn import functional

from course_lib import explorers
from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.explorers.batch_bytes import FROM_DIGITS, NETWORKS, OPTIMIZERS, batch_bytes_panel, bytes_at_peak
from course_lib.explorers.cuts import DIVISIONS as CUT_DIVISIONS
from course_lib.explorers.cuts import comparison, cuts_panel, pieces
from course_lib.explorers.division import DIVISIONS, UPDATES, division_panel, losses
from course_lib.explorers.tails import TAILS, Epochs, tails_panel
from course_lib.explorers.votes import Votes, votes_panel
from course_lib.models import conv_net, dense_net

SMALL = {
    "batch_bytes_panel": ("batch_size", "network", "optimizer", "budget"),
    "cuts_panel": ("micro_batch_size", "precision", "division"),
    "division_panel": ("division", "accumulation_steps", "optimizer", "learning_rate", "max_norm"),
    "tails_panel": ("num_micro_batches", "accumulation_steps", "micro_batch_size", "world_size", "tail"),
    "votes_panel": ("tokens", "token_losses"),
}


def every_widget(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from every_widget(child)


def controls_of(panel, name):
    for attribute in SMALL[name]:
        found = getattr(panel, attribute)
        yield from found if isinstance(found, list) else [found]


def values_of(control):
    """Return the ends and some values between of a control, or all it offers."""
    if isinstance(control, (ipywidgets.Dropdown, ipywidgets.SelectionSlider)):
        return [value for _, value in control._options_full]
    middle = (control.min + control.max) / 2
    return [control.min, type(control.value)(middle), control.max]


@pytest.mark.parametrize("name", SMALL)
def test_every_value_of_every_control_is_answered_in_a_picture_of_one_size(name):
    panel = getattr(explorers, name)()
    sizes = set()
    for control in controls_of(panel, name):
        before, answers = control.value, set()
        for value in values_of(control):
            control.value = value
            panel.settle()
            assert panel.last_error is None
            answers.add((panel.answer.value, panel.live.image.value))
            with Image.open(io.BytesIO(panel.live.image.value)) as image:
                sizes.add(image.size)
        assert len(answers) == len(values_of(control)), f"two values of {control} look the same"
        control.value = before
    panel.settle()
    assert len(sizes) == 1
    panel.close()


@pytest.mark.parametrize("name", SMALL)
def test_numbers_outside_the_limits_cannot_be_set(name):
    panel = getattr(explorers, name)()
    for control in controls_of(panel, name):
        if isinstance(control, (ipywidgets.IntSlider, ipywidgets.FloatSlider)):
            for value, stops_at in ((control.min - 1, control.min), (control.max + 1, control.max)):
                control.value = value
                assert control.value == stops_at
        else:
            with pytest.raises(ipywidgets.widgets.trait_types.traitlets.TraitError):
                control.value = "no such choice"
    panel.settle()
    assert panel.last_error is None
    panel.close()


@pytest.mark.parametrize("name", SMALL)
def test_every_slider_has_a_field_with_a_name_and_no_name_comes_twice(name):
    panel = getattr(explorers, name)()
    named = (ipywidgets.BoundedIntText, ipywidgets.BoundedFloatText, ipywidgets.Dropdown)
    names = [one.description for one in every_widget(panel) if isinstance(one, named)]
    assert all(names)
    assert len(set(names)) == len(names) == len(list(controls_of(panel, name)))
    panel.close()


@pytest.mark.parametrize("name", SMALL)
def test_what_a_reader_without_a_kernel_sees_does_not_follow_the_controls(name):
    panel = getattr(explorers, name)()
    stored = panel._repr_mimebundle_()[0]
    assert stored["image/png"]
    assert stored["text/plain"].startswith("A panel with ")
    last = list(controls_of(panel, name))[-1]
    last.value = next(value for value in values_of(last) if value != last.value)
    panel.settle()
    after = panel._repr_mimebundle_()[0]
    assert {kind: after[kind] for kind in ("image/png", "text/plain")} == {
        kind: stored[kind] for kind in ("image/png", "text/plain")
    }
    panel.close()


# ---- 01 --------------------------------------------------------------------------------------------------------------


def test_only_bytes_of_the_digits_grow_with_the_batch():
    for network, optimizer in product(NETWORKS, OPTIMIZERS):
        one, many = (bytes_at_peak(network, optimizer, size) for size in (1, 100))
        for category in ("parameters", "optimizer_state", "buffers"):
            assert one[category] == many[category], (network, optimizer, category)
        assert sum(many[name] for name in FROM_DIGITS) > sum(one[name] for name in FROM_DIGITS)
    parameters = sum(4 * one.numel() for one in conv_net().parameters())
    adamw, momentum, sgd = (bytes_at_peak("convolutional", name, 8)["optimizer_state"] for name in OPTIMIZERS)
    assert sgd == 0
    assert momentum == parameters
    assert adamw == 2 * parameters + 4 * len(list(conv_net().parameters()))


def test_the_budget_is_answered_in_words():
    panel = batch_bytes_panel()
    peak = sum(bytes_at_peak("convolutional", "AdamW", 64).values())
    for budget, says in (("8 MiB", "Fits"), ("4 MiB", "Does not fit"), ("none", None)):
        panel.budget.value = budget
        panel.settle()
        assert ("fit" in panel.answer.value.lower()) == (says is not None)
        assert says is None or says in panel.answer.value
        assert (peak <= 2**20 * int(budget[0])) == (says == "Fits") if says else True
    panel.close()


# ---- 03 --------------------------------------------------------------------------------------------------------------


def test_the_words_for_a_cut_add_up_to_64():
    for size in range(1, 65):
        assert eval(pieces(size).replace("x", "*")) == 64


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_the_sum_over_the_count_is_right_for_every_cut_and_the_mean_of_means_for_equal_ones(precision, tolerance):
    by_count, by_k, none = CUT_DIVISIONS
    for size in (1, 3, 16, 24, 32, 63):
        assert comparison(size, precision, by_count).agree(rtol=tolerance)
        assert comparison(size, precision, by_k).agree(rtol=tolerance) == (64 % size == 0)
        assert not comparison(size, precision, none).agree(rtol=0.1)
    assert comparison(16, precision, none).scale == pytest.approx(4)


def test_the_words_tell_rounding_from_a_mistake():
    panel = cuts_panel()
    for division, size, words in (
        (CUT_DIVISIONS[0], 24, "equal to rounding"),
        (CUT_DIVISIONS[0], 64, "bit for bit"),
        (CUT_DIVISIONS[1], 24, "not the full batch"),
        (CUT_DIVISIONS[2], 16, "scale 4.00"),
    ):
        panel.division.value, panel.micro_batch_size.value = division, size
        panel.settle()
        assert words in panel.answer.value
    panel.close()


# ---- 04 --------------------------------------------------------------------------------------------------------------


def brute_force(num_micro_batches, steps, tail):
    """Two epochs of the loop that `tail` names, written out, on micro-batches whose gradient is 1."""
    found, gradient = [], 0.0
    for _ in range(2):
        for i in range(num_micro_batches):
            own = min(steps, num_micro_batches - i // steps * steps) if tail == TAILS[0] else steps
            gradient += 1 / own
            last = i + 1 == num_micro_batches and tail in (TAILS[0], TAILS[3])
            if (i + 1) % steps == 0 or last:
                found.append(gradient)
                gradient = 0.0
        if tail == TAILS[1]:
            gradient = 0.0
    return found


@pytest.mark.parametrize("tail", TAILS)
def test_what_each_update_finds_is_what_a_loop_finds(tail):
    for n, steps in product(range(1, 14), range(1, 7)):
        assert Epochs(n, steps, tail).found == pytest.approx(brute_force(n, steps, tail)), (n, steps)


def test_the_words_say_which_loops_are_right():
    panel = tails_panel()
    for tail, n, words in (
        (TAILS[0], 10, "Every update finds 1: right."),
        (TAILS[1], 10, "They have taught nothing."),
        (TAILS[2], 10, "Some find 1.5 instead of 1: wrong."),
        (TAILS[3], 10, "Some find 0.5 instead of 1: wrong."),
        (TAILS[3], 12, "there is no tail"),
        (TAILS[2], 3, "Nothing is trained at all."),
        (TAILS[0], 3, "2 updates in two epochs"),
    ):
        panel.tail.value, panel.num_micro_batches.value = tail, n
        panel.settle()
        assert words in panel.answer.value
    panel.world_size.value = 2
    panel.settle()
    assert "16 x 4 x 2 = 128" in panel.answer.value
    panel.close()


# ---- 06 --------------------------------------------------------------------------------------------------------------


def test_the_first_updates_are_those_of_a_scaled_gradient():
    digits = load_digits()
    start = losses("SGD", 0.1, 4, "once", None)[0]
    for division, scale in zip(DIVISIONS, (4, 1, 1 / 4), strict=True):
        curve = losses("SGD", 0.1, 4, division, None)
        assert len(curve) == UPDATES
        assert curve[0] == start
        assert curve == pytest.approx(losses("SGD", 0.1 * scale, 4, "once", None), rel=1e-4)
    model = dense_net()
    order = torch.arange(64)
    whole = functional.cross_entropy(model(digits.inputs[order]), digits.targets[order]).item()
    parts = split_batch((digits.inputs[:64], digits.targets[:64]), 16)
    assert sum(functional.cross_entropy(model(x), y).item() for x, y in parts) / 4 == pytest.approx(whole)


def test_clipping_and_k_change_the_run():
    assert losses("SGD", 0.1, 4, "never", 0.25) != losses("SGD", 0.1, 4, "never", None)
    assert losses("SGD", 0.1, 16, "once", None) == pytest.approx(losses("SGD", 0.1, 1, "once", None), rel=1e-3)
    assert losses("SGD", 0.1, 16, "never", None) != pytest.approx(losses("SGD", 0.1, 1, "never", None), rel=1e-3)


def test_the_words_say_what_the_missing_division_does():
    panel = division_panel()
    for setting, words in (
        ({"division": "never", "optimizer": "SGD", "learning_rate": 0.1}, "Ahead"),
        ({"learning_rate": 0.8}, "No better than guessing"),
        ({"division": "once"}, "This is the right loop"),
        ({"division": "twice", "accumulation_steps": 2, "learning_rate": 0.6}, "Behind"),
        ({"division": "never", "optimizer": "AdamW", "learning_rate": 0.003}, "You would not notice"),
        ({"accumulation_steps": 1}, "This is the right loop"),
    ):
        for name, value in setting.items():
            getattr(panel, name).value = value
        panel.settle()
        assert words in panel.answer.value, setting
    panel.close()


# ---- 07 --------------------------------------------------------------------------------------------------------------


def test_both_means_against_torch():
    for tokens in product(range(4), repeat=2):
        for token_losses in ((1.0, 5.0), (0.5, 0.5)):
            votes = Votes(tokens, token_losses)
            parts = [torch.full((n,), loss) for n, loss in zip(tokens, token_losses, strict=True)]
            for said, right in (
                (votes.right, torch.cat(parts).mean().item()),
                (votes.mean_of_means, torch.stack([part.mean() for part in parts]).mean().item()),
            ):
                assert said == pytest.approx(right, nan_ok=True), (tokens, token_losses)
            for shares in votes.weights.values():
                if all(tokens):
                    assert math.isclose(sum(n * share for n, share in zip(tokens, shares, strict=True)), 1)


def test_the_words_count_the_votes():
    panel = votes_panel()
    for tokens, words in (
        ((3, 1), "Sum over count: 2.00. Mean of means: 3.00. There a token of the second counts 3 times"),
        ((2, 8), "a token of the first counts 4 times one of the second"),
        ((5, 5), "the two rules are one"),
        ((0, 4), "Mean of means: nan"),
        ((0, 0), "No token at all"),
    ):
        for slider, value in zip(panel.tokens, tokens, strict=True):
            slider.value = value
        panel.settle()
        assert words in panel.answer.value
    panel.close()
