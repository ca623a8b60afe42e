"""The panel of notebook 08: one weight, four micro-batches, the calls of one update in the right or a wrong place."""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR

from course_lib.explorers.panel import (
    LivePicture,
    Panel,
    labelled_float_slider,
    labelled_list,
    side_by_side,
)
from course_lib.plots import Picture, new_axes, plot_loss_curves, plot_update_parts

CLIPS = {
    "mean": "once: the mean, unscaled",
    "each": "each micro-batch",
    "sum": "the sum, before dividing",
    "scaled": "before unscaling",
}
SCHEDULES = {"update": "once per update", "micro-batch": "once per micro-batch"}


@dataclass(frozen=True)
class UpdateOrder:
    """One update of the weight 1 by SGD at a learning rate of 0.1, run with a real scaler, for one order of its calls.

    clip: a key of CLIPS. threshold: the largest norm. overflow_in: the micro-batch, from 1, whose gradient is infinite;
    0 for none. schedule: a key of SCHEDULES; the schedule is built for NUM_UPDATES updates.
    """

    clip: str = "mean"
    threshold: float = 1.0
    overflow_in: int = 0
    schedule: str = "update"

    GRADIENTS = (4.0, -2.0, 1.0, 3.0)
    START, LEARNING_RATE, SCALE, NUM_UPDATES = 1.0, 0.1, 8.0, 250

    @property
    def gradients(self) -> tuple[float, ...]:
        """The gradient of each micro-batch, before anything is done to it."""
        return tuple(math.inf if i == self.overflow_in else g for i, g in enumerate(self.GRADIENTS, start=1))

    @cached_property
    def _run(self) -> tuple[float, bool, float]:
        """The weight after the update, whether the step was skipped, and the scale after it."""
        weight = nn.Parameter(torch.tensor(self.START, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=self.LEARNING_RATE)
        scaler = torch.amp.GradScaler("cpu", init_scale=self.SCALE)
        steps = len(self.gradients)
        total = torch.zeros_like(weight)
        for gradient in self.gradients:
            scaler.scale(gradient * weight).backward()
            if self.clip == "each":
                clip_grad_norm_([weight], self.threshold * self.SCALE)  # in the units that stand in .grad
            total += weight.grad
            weight.grad = None
        weight.grad = total
        if self.clip == "sum":
            clip_grad_norm_([weight], self.threshold * self.SCALE)
        weight.grad /= steps
        if self.clip == "scaled":
            clip_grad_norm_([weight], self.threshold)
        scaler.unscale_(optimizer)
        if self.clip == "mean":
            clip_grad_norm_([weight], self.threshold)
        scaler.step(optimizer)
        scaler.update()
        return weight.item(), scaler.get_scale() < self.SCALE, scaler.get_scale()

    @property
    def weight(self) -> float:
        return self._run[0]

    @property
    def skipped(self) -> bool:
        return self._run[1]

    @property
    def scale(self) -> float:
        return self._run[2]

    @property
    def applied(self) -> float:
        """The gradient that the step has used; 0 if there was none."""
        return (self.START - self.weight) / self.LEARNING_RATE

    @property
    def right(self) -> "UpdateOrder":
        """The same numbers in the right order."""
        return UpdateOrder(threshold=self.threshold, overflow_in=self.overflow_in)

    @property
    def learning_rates(self) -> list[float]:
        """What each of the NUM_UPDATES updates of the run uses."""
        calls = 1 if self.schedule == "update" else len(self.GRADIENTS)
        return list(_learning_rates(self.LEARNING_RATE, self.NUM_UPDATES, calls))

    @property
    def schedule_ends(self) -> float:
        """After how many updates the learning rate is 0."""
        return self.NUM_UPDATES / (1 if self.schedule == "update" else len(self.GRADIENTS))

    @property
    def step_title(self) -> str:
        if self.skipped:
            return f"Micro-batch {self.overflow_in} overflows: no step"
        if math.isclose(self.applied, self.right.applied, rel_tol=1e-4):
            return f"The step uses {_number(self.applied)}: right"
        return f"The step uses {_number(self.applied)}, not {_number(self.right.applied)}"

    @property
    def schedule_title(self) -> str:
        return f"Learning rate 0 after update {self.schedule_ends:g}"

    @property
    def sentence(self) -> str:
        """Say what happened and why, in words."""
        shown, limit = _number, self.threshold
        total, steps = sum(self.gradients), len(self.gradients)
        if self.skipped:
            what = (
                f"Micro-batch {self.overflow_in} overflows, and a sum with an infinity in it is not finite: no step, "
                f"the weight stays {self.weight:g}, the scale falls from {self.SCALE:g} to {self.scale:g}."
            )
            if self.clip != "mean":
                what += " Clipping cannot save it: infinity times 0 is not a number."
        else:
            clipped = [max(-limit, min(g, limit)) for g in self.gradients]
            why = {
                "mean": f"the mean gradient {shown(total / steps)} is clipped to {shown(self.applied)}"
                if total / steps > limit
                else f"the mean gradient {shown(total / steps)} is within {shown(limit)}",
                "each": f"clipped one by one the gradients are {', '.join(map(shown, clipped))}, "
                f"with a mean of {shown(self.applied)}",
                "sum": f"the sum {shown(total)} is held to {shown(min(total, limit))} and then divided by {steps}",
                "scaled": f"the scaled gradient {shown(total / steps * self.SCALE)} is held to "
                f"{shown(min(total / steps * self.SCALE, limit))} and then divided by the scale, {self.SCALE:g}",
            }[self.clip]
            what = f"The weight goes from {self.START:g} to {self.weight:.3f}: {why}."
            if not math.isclose(self.weight, self.right.weight, rel_tol=1e-6):
                what += f" In the right order it goes to {self.right.weight:.3f}."
        if self.schedule == "update":
            return what + (" The schedule waits." if self.skipped else "")
        idle = self.learning_rates.count(0.0)
        return f"{what} The schedule is over after {self.schedule_ends:g} updates; {idle} more change nothing."


@cache
def _learning_rates(start: float, num_updates: int, calls_per_update: int) -> tuple[float, ...]:
    """Run a linear schedule from `start` to 0, called so many times in each update."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.tensor(0.0))], lr=start)
    schedule, found = LinearLR(optimizer, 1.0, 0.0, total_iters=num_updates), []
    optimizer.step()  # a schedule warns when it moves before the first step
    for _ in range(num_updates):
        found.append(optimizer.param_groups[0]["lr"])
        for _ in range(calls_per_update):
            schedule.step()
    return tuple(found)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


class UpdateOrderPanel(Panel):
    """Where the clip stands, what it allows, what overflows and how often the schedule is called, and what follows."""

    def __init__(self) -> None:
        start = UpdateOrder()
        text = (
            "A panel on the order of an update: where to clip and at what, which micro-batch overflows, and how often "
            f"the schedule is called. It starts in the right order. {start.sentence} The schedule ends with update 250."
        )
        super().__init__(text=text, lines=3)
        self.clip = labelled_list("clip", [(words, key) for key, words in CLIPS.items()], start.clip)
        threshold_row, self.threshold = labelled_float_slider("largest norm", start.threshold, 0.25, 5.0, step=0.25)
        micro_batches = [(f"micro-batch {i}", i) for i in range(1, len(start.GRADIENTS) + 1)]
        self.overflow_in = labelled_list("overflow in", [("none", 0), *micro_batches], start.overflow_in)
        self.schedule = labelled_list(
            "call the schedule", [(words, key) for key, words in SCHEDULES.items()], start.schedule
        )
        for one in (self.clip, self.schedule):
            one.layout.width = "28em"
        step_figure, self._step_axes = new_axes(width=4.6, height=3.2)
        rate_figure, self._rate_axes = new_axes(width=4.2, height=3.2)
        self.step_picture, self.rate_picture = LivePicture(step_figure), LivePicture(rate_figure)
        controls = [self.clip, self.threshold, self.overflow_in, self.schedule]
        self.arrange(
            [
                self.clip,
                threshold_row,
                self.overflow_in,
                self.schedule,
                self.answer,
                side_by_side(self.step_picture.image, self.rate_picture.image),
            ],
            controls=controls,
        )
        figure, (left, right) = new_axes(1, 2, width=8.8, height=3.2)
        _draw(start, left, right)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        order = UpdateOrder(self.clip.value, self.threshold.value, self.overflow_in.value, self.schedule.value)
        self._step_axes.clear()
        self._rate_axes.clear()
        _draw(order, self._step_axes, self._rate_axes)
        self.say(order.sentence)
        self.step_picture.draw()
        self.rate_picture.draw()


def _draw(order: UpdateOrder, step_axes: object, rate_axes: object) -> None:
    plot_update_parts(
        order.gradients,
        {"step": order.applied, "right": order.right.applied},
        step_axes,
        title=order.step_title,
        threshold=order.threshold,
    )
    curves = {"right": order.right.learning_rates, "as set": order.learning_rates}
    plot_loss_curves(curves, rate_axes, title=order.schedule_title, y_label="learning rate")


def update_order_panel() -> UpdateOrderPanel:
    """Return the panel of notebook 08: the calls of one update in the right or a wrong place."""
    return UpdateOrderPanel()
