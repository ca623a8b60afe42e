"""The planner's panel and its table of predicted peaks."""

from __future__ import annotations

import io
import json
import re

import pytest
from PIL import Image

from course_lib.architectures import DEVICES, PRESETS, build_preset
from course_lib.explorers.planner import (
    LARGEST_BATCH,
    TABLE_PATH,
    PlannerPanel,
    PresetPeaks,
    plan_preset,
    planner_panel,
    preset_peaks,
)
from course_lib.memory import parse_bytes, predict_memory
from course_lib.planning import BudgetTooSmall

GIB = 2**30


def words(panel: PlannerPanel) -> str:
    return re.sub(r"<[^>]+>", "", panel.answer.value)


def test_the_table_has_every_preset():
    assert tuple(json.loads(TABLE_PATH.read_text(encoding="utf-8"))) == PRESETS


@pytest.mark.parametrize(("name", "size", "effective"), [("U-Net", 3, 16), ("GPT-2 small", 9, 64), ("U-Net", 8, 8)])
def test_the_table_says_what_a_fresh_prediction_says(name, size, effective):
    kept = preset_peaks(name).report(size, effective)
    fresh = predict_memory(*build_preset(name, num_samples=effective).parts, micro_batch_size=size)
    assert kept.peak_bytes == pytest.approx(fresh.peak_bytes, rel=1e-4)
    for category, num_bytes in fresh.at_peak.items():
        assert kept.at_peak[category] == pytest.approx(num_bytes, abs=2e-3 * fresh.peak_bytes)
    assert kept.peak_moment == fresh.peak_moment
    assert kept.accumulation_steps == fresh.accumulation_steps


def test_sizes_between_two_kept_ones_lie_on_the_line():
    kept = {1: ({"activations": 10, "parameters": 4}, "early"), 5: ({"activations": 50, "parameters": 4}, "late")}
    peaks = PresetPeaks(2, kept, {8: ({"activations": 80, "parameters": 4}, "whole")})
    middle = peaks.report(3, 8)
    assert {name: size for name, size in middle.at_peak.items() if size} == {
        "activations": 30,
        "parameters": 4,
        "inputs": 16,
    }
    assert (middle.peak_moment, peaks.report(5, 8).peak_moment) == ("early", "late")
    assert peaks.report(6, 12).at_peak["activations"] == 60  # beyond the last one, on its extension
    assert peaks.report(8, 8).at_peak["activations"] == 80  # the whole batch in one pass has a table of its own
    assert peaks.smallest == 1


def test_another_name_is_no_preset():
    with pytest.raises(ValueError, match="name must be one of GPT-2 small"):
        preset_peaks("GPT-5")


def test_batch_norm_is_planned_for_two_samples_at_least():
    assert preset_peaks("ResNet-50").smallest == 2
    assert plan_preset("ResNet-50", 256, budget="16 GiB").warnings[0].startswith("BatchNorm would see")


def test_every_setting_is_answered_by_a_plan_that_fits_or_by_a_refusal():
    for name in PRESETS:
        for device in DEVICES:
            for effective in (8, 64, LARGEST_BATCH):
                peaks = preset_peaks(name)
                candidates = [*range(peaks.smallest, effective // 2 + 1), effective]
                fits = [s for s in candidates if peaks.report(s, effective).peak_bytes <= parse_bytes(device)]
                if not fits:
                    with pytest.raises(BudgetTooSmall):
                        plan_preset(name, effective, budget=device)
                    continue
                plan = plan_preset(name, effective, budget=device)
                assert plan.largest_micro_batch_size == max(fits)
                assert plan.peak_bytes <= parse_bytes(device)
                assert sum(plan.micro_batch_sizes) == effective


def test_the_largest_models_need_the_largest_devices():
    enough = {name: [d for d in DEVICES if _fits(name, d)] for name in PRESETS}
    assert enough["GPT-2 XL"] == ["40 GiB", "80 GiB"]
    assert enough["U-Net"] == list(DEVICES)


def _fits(name: str, device: str) -> bool:
    try:
        plan_preset(name, 64, budget=device)
    except BudgetTooSmall:
        return False
    return True


# The panel


def test_it_shows_the_plan_of_its_controls():
    panel = planner_panel()
    plan = plan_preset("GPT-2 small", 64, budget="16 GiB")
    assert words(panel).startswith(f"{plan.sentence}: {plan.accumulation_steps} accumulation steps. Peak ")
    assert f"has {plan.largest_micro_batch_size} samples; {plan.next_micro_batch_size} would be" in words(panel)
    first = panel.live.image.value
    panel.device.value = "24 GiB"
    panel.settle()
    assert plan_preset("GPT-2 small", 64, budget="24 GiB").sentence in words(panel)
    assert panel.live.image.value != first
    panel.close()


def test_each_control_changes_the_answer_and_the_picture():
    panel = planner_panel()
    for control, value in (
        (panel.model, "BERT base"),
        (panel.device, "8 GiB"),
        (panel.effective_batch, 128),
    ):
        before = words(panel), panel.live.image.value
        control.value = value
        panel.settle()
        assert panel.last_error is None
        assert words(panel) != before[0]
        assert panel.live.image.value != before[1]
    assert plan_preset("BERT base", 128, budget="8 GiB").sentence in words(panel)
    panel.close()


def test_where_nothing_fits_it_says_the_floor_and_which_device_is_enough():
    panel = planner_panel()
    panel.model.value, panel.device.value = "GPT-2 XL", "16 GiB"
    panel.settle()
    floor = preset_peaks("GPT-2 XL").report(1, 64).peak_bytes
    assert words(panel).startswith(
        f"Nothing fits. Even with micro-batches of one sample the peak is {floor / GIB:.1f} GiB, of which 23.2 GiB are "
    )
    assert words(panel).endswith("The smallest device in the list that is enough has 40 GiB.")
    panel.close()


def test_every_value_of_every_control_is_answered_in_a_picture_of_one_size():
    panel = planner_panel()
    sizes = set()
    for control in (panel.model, panel.device, panel.effective_batch):
        before = control.value
        for value in control.options:
            control.value = value
            panel.settle()
            assert panel.last_error is None
            with Image.open(io.BytesIO(panel.live.image.value)) as image:
                sizes.add(image.size)
        control.value = before
    assert len(sizes) == 1
    panel.close()


def test_one_pass_is_called_no_accumulation():
    panel = planner_panel()
    panel.model.value, panel.device.value, panel.effective_batch.value = "BERT base", "80 GiB", 8
    panel.settle()
    assert words(panel).startswith("8 = 1 x 8: one pass, no accumulation.")
    panel.close()


def test_only_settings_that_make_sense_can_be_set():
    panel = planner_panel()
    assert panel.model.options == PRESETS
    assert panel.device.options == DEVICES
    assert panel.effective_batch.options == (8, 16, 32, 64, 128, 256, 512)
    with pytest.raises(Exception, match=r"[Ii]nvalid"):
        panel.device.value = "12 GiB"
    panel.close()


def test_it_leaves_a_sentence_and_a_picture_without_a_kernel():
    panel = planner_panel()
    data, metadata = panel._repr_mimebundle_()
    assert data["text/plain"].startswith("A panel with three controls, model, device and effective batch")
    assert metadata["image/png"]["alt"] == data["text/plain"]
    panel.device.value = "80 GiB"
    panel.settle()
    assert panel._repr_mimebundle_()[0]["image/png"] == data["image/png"]
    panel.close()


def test_a_plan_from_the_table_computes_no_prediction(monkeypatch):
    plan_preset("GPT-2 small", 64, budget="16 GiB")
    monkeypatch.setattr("course_lib.memory.predicted.MemoryPredictor.__init__", None)
    assert plan_preset("GPT-2 small", 128, budget="16 GiB").effective_batch_size == 128
