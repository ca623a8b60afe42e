"""The panel of notebook 14: a model that does not fit here, a device and an effective batch, answered by a plan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from course_lib.architectures import DEVICES, PRESETS
from course_lib.explorers.panel import LivePicture, Panel, labelled_choices, labelled_list
from course_lib.memory import CATEGORIES, MemoryReport, format_bytes, parse_bytes
from course_lib.planning import BatchPlan, BudgetTooSmall, plan_from_predictions
from course_lib.plots import Picture, new_axes, plot_peak_bars

TABLE_PATH = Path(__file__).with_name("predicted_peaks.json")
LARGEST_BATCH = 512


@dataclass(frozen=True)
class PresetPeaks:
    """Predicted peaks of one preset, kept as the ends of straight pieces: `report(size, effective)` for any size.

    Predicted beforehand on float32, a CPU's rules and the preset's own optimizer by tests/predict_preset_peaks.py.
    `accumulated` and `whole` map a micro-batch size to (bytes by category, moment); `inputs_each` is one sample's.
    """

    inputs_each: int
    accumulated: Mapping[int, tuple[dict[str, int], str]]
    whole: Mapping[int, tuple[dict[str, int], str]]

    @property
    def smallest(self) -> int:
        """The smallest micro-batch: 2 with BatchNorm, else 1."""
        return min(self.accumulated)

    def report(self, size: int, effective_batch_size: int) -> MemoryReport:
        """Return what `predict_memory` would say, for a size up to half of the effective batch or all of it."""
        points = self.whole if size == effective_batch_size else self.accumulated
        parts, moment = _between(points, size)
        at_peak = {name: parts.get(name, 0) for name in CATEGORIES}
        at_peak["inputs"] = self.inputs_each * effective_batch_size
        peak_bytes = sum(at_peak.values())
        return MemoryReport(
            peak_bytes=peak_bytes,
            at_peak=at_peak,
            peak_moment=moment,
            micro_batch_size=size,
            accumulation_steps=-(-effective_batch_size // size),
            resident_bytes=sum(at_peak[name] for name in ("parameters", "buffers", "optimizer_state", "inputs")),
            pass_peak_bytes=peak_bytes,
            step_peak_bytes=0,
            scratch_bytes=None,
            measured=False,
            device="cpu",
            assumptions=(),
        )


def _between(points: Mapping[int, tuple[dict[str, int], str]], size: int) -> tuple[dict[str, int], str]:
    """Return the bytes by category on the straight piece that `size` is on; beyond the last one, on its extension."""
    ends = sorted(points)
    if len(ends) == 1:
        return points[ends[0]]
    low, high = next(((a, b) for a, b in pairwise(ends) if size <= b), (ends[-2], ends[-1]))
    (first, moment), (last, later) = points[low], points[high]
    share = (size - low) / (high - low)
    names = {**first, **last}
    parts = {name: round(first.get(name, 0) + share * (last.get(name, 0) - first.get(name, 0))) for name in names}
    return parts, later if size == high else moment


@cache
def preset_peaks(name: str) -> PresetPeaks:
    """Read the predicted peaks of a preset.

    Raises ValueError for a name that is not among PRESETS.
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}; got {name!r}")
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))[name]
    accumulated, whole = (
        {int(size): (point["at_peak"], point["moment"]) for size, point in table[kind].items()}
        for kind in ("accumulated", "whole")
    )
    return PresetPeaks(table["inputs_each"], accumulated, whole)


def plan_preset(name: str, effective_batch_size: int, *, budget: int | str) -> BatchPlan:
    """Plan a preset from the table of its predicted peaks, at once. Raises BudgetTooSmall where nothing fits."""
    peaks = preset_peaks(name)
    return plan_from_predictions(
        lambda size: peaks.report(size, effective_batch_size),
        effective_batch_size,
        budget=budget,
        smallest=peaks.smallest,
    )


class PlannerPanel(Panel):
    """Model, device and effective batch; answered by a plan in words, and by bars of its neighbours."""

    BATCHES = tuple(2**power for power in range(3, LARGEST_BATCH.bit_length()))

    def __init__(self) -> None:
        text = (
            "A panel with three controls, model, device and effective batch: run the cell to use it. At first it "
            "shows GPT-2 small on 16 GiB, for an effective batch of 64."
        )
        super().__init__(text=text, lines=4)
        self.model = labelled_list("model", PRESETS, "GPT-2 small")
        self.model.layout.width = "22em"  # the longest name in full
        self.device = labelled_list("device", DEVICES, "16 GiB")
        row, self.effective_batch = labelled_choices("effective batch", self.BATCHES, 64)
        figure, self._axes = new_axes(width=7.6, height=3.4)
        self.live = LivePicture(figure)
        controls = [self.model, self.device, self.effective_batch]
        self.arrange([self.model, self.device, row, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        name, device, effective = self.model.value, self.device.value, self.effective_batch.value
        try:
            plan = plan_preset(name, effective, budget=device)
        except BudgetTooSmall as refusal:
            bars, title = {_label(refusal.floor_micro_batch_size): refusal.floor_at_peak}, f"{name}: nothing fits"
            sentence = _refused(refusal)
        else:
            sizes = {plan.floor_micro_batch_size, plan.micro_batch_size, plan.largest_micro_batch_size}
            sizes |= {plan.next_micro_batch_size} - {None}
            bars = {_label(size): plan.reports[size].at_peak for size in sorted(sizes)}
            title, sentence = f"{name}: {plan.sentence}", _planned(plan)
        self._axes.clear()
        plot_peak_bars(bars, self._axes, title=title, budget_bytes=parse_bytes(device))
        self.say(sentence)
        self.live.draw()


def _refused(refusal: BudgetTooSmall) -> str:
    parts = refusal.floor_at_peak
    standing = sum(parts[name] for name in ("parameters", "gradients", "optimizer_state"))
    sentence = f"<b>Nothing fits.</b> Even with micro-batches of {_samples(refusal.floor_micro_batch_size)} the peak "
    sentence += f"is {format_bytes(refusal.floor_bytes)}, of which {format_bytes(standing)} are parameters, gradients "
    sentence += "and the optimizer's state. "
    enough = next((device for device in DEVICES if parse_bytes(device) >= refusal.floor_bytes), None)
    return sentence + (f"The smallest device in the list that is enough has {enough}." if enough else "")


def _planned(plan: BatchPlan) -> str:
    steps = plan.accumulation_steps
    what = "one pass, no accumulation" if steps == 1 else f"{steps} accumulation steps"
    sentence = f"<b>{plan.sentence}: {what}.</b> Peak {format_bytes(plan.peak_bytes)} of "
    sentence += f"{format_bytes(plan.budget_bytes)}, at the {plan.peak_moment}. "
    if plan.next_micro_batch_size is not None:
        which = "The largest micro-batch of a balanced cut" if plan.is_half else "The largest micro-batch that fits"
        sentence += f"{which} has {_samples(plan.largest_micro_batch_size)}; "
        over = format_bytes(plan.next_peak_bytes - plan.budget_bytes)
        sentence += f"{plan.next_micro_batch_size} would be {over} too much. "
    return sentence + " ".join(f"Note: {warning}." for warning in plan.warnings)


def _samples(number: int) -> str:
    return "one sample" if number == 1 else f"{number} samples"


def _label(size: int) -> str:
    return f"{size:>3} a pass"  # about as wide for any size: the axes stay where they are


def planner_panel() -> PlannerPanel:
    """Return the panel of notebook 14: a model, a device and an effective batch, answered by a plan."""
    return PlannerPanel()
