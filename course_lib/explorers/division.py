"""The panel of notebook 06: who divides the loss, and how training goes on from there."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional

from course_lib.batches import split_batch
from course_lib.datasets import load_digits, shuffled_batches
from course_lib.explorers.panel import LivePicture, Panel, labelled_choices, labelled_list
from course_lib.models import dense_net
from course_lib.plots import Picture, new_axes, plot_loss_curves

BATCH_SIZE, UPDATES = 64, 60
DIVISIONS = ("never", "once", "twice")
OPTIMIZERS: dict[str, Callable] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adam, epsilon 0.01": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, eps=1e-2),
    "Adam, L2 0.01": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, weight_decay=1e-2),
}
STEPS = (1, 2, 4, 8, 16)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.8)
THRESHOLDS = (("no clipping", None), ("0.25", 0.25), ("1", 1.0), ("4", 4.0))


@lru_cache(maxsize=256)
def losses(optimizer: str, lr: float, steps: int, division: str, max_norm: float | None) -> tuple[float, ...]:
    """Train the dense network on digits with a hand-written loop; return the mean loss of each update's batch.

    60 updates of 64 digits in `steps` equal micro-batches; the mean loss of each is divided by K never, once or twice
    before `backward`. `optimizer` is a key of OPTIMIZERS; `max_norm` clips just before the step. After a loss that is
    not finite the rest is nan.
    """
    model = dense_net()
    own = OPTIMIZERS[optimizer](model.parameters(), lr=lr)
    divisor = steps ** DIVISIONS.index(division)
    digits, history = load_digits(), []
    for batch in shuffled_batches(
        (digits.inputs, digits.targets), BATCH_SIZE, seed=0, num_batches=UPDATES, drop_tail=True
    ):
        total = 0.0
        for inputs, targets in split_batch(batch, BATCH_SIZE // steps):
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / divisor).backward()
            total += loss.item() / steps
        history.append(total)
        if not math.isfinite(total):
            break
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        own.step()
        own.zero_grad()
    return (*history, *[math.nan] * (UPDATES - len(history)))


def end(curve: tuple[float, ...]) -> float:
    """Return the mean of the last ten losses."""
    return sum(curve[-10:]) / 10


class DivisionPanel(Panel):
    """Division, K, optimizer, learning rate and clipping; answered by two loss curves, the right loop's and this."""

    def __init__(self) -> None:
        text = (
            "A panel with five controls, division, accumulation steps, optimizer, learning rate and clipping: run the "
            "cell to use it. At first it shows SGD at 0.1 without the division by 4, whose loss falls faster."
        )
        super().__init__(text=text, lines=2)
        self.division = labelled_list("the loss is divided", DIVISIONS, "never")
        steps_row, self.accumulation_steps = labelled_choices("accumulation steps", STEPS, 4)
        self.optimizer = labelled_list("optimizer", list(OPTIMIZERS), "SGD")
        rate_row, self.learning_rate = labelled_choices("learning rate", RATES, 0.1)
        self.max_norm = labelled_list("max_norm", THRESHOLDS, None)
        figure, self._axes = new_axes(width=7.2, height=3.4)
        self.live = LivePicture(figure)
        controls = [self.division, self.accumulation_steps, self.optimizer, self.learning_rate, self.max_norm]
        rows = [self.division, steps_row, self.optimizer, rate_row, self.max_norm]
        self.arrange([*rows, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        division, steps = self.division.value, self.accumulation_steps.value
        setting = (self.optimizer.value, self.learning_rate.value, steps)
        right = losses(*setting, "once", self.max_norm.value)
        if self.is_outdated:
            return
        this = losses(*setting, division, self.max_norm.value)
        scale = steps / steps ** DIVISIONS.index(division)
        self._axes.clear()
        curves = {"divided once": right, f"this loop: {division}": this}
        plot_loss_curves(curves, self._axes, title=f"The gradient is {scale:.4g} times the full batch's")
        # One scale for all settings: a run that leaves it has left for good.
        self._axes.set_ylim(0, 5)
        self.say(f"<b>{self._in_words(end(right), end(this), scale)}</b>")
        self.live.draw()

    @staticmethod
    def _in_words(right: float, this: float, scale: float) -> str:
        if scale == 1:
            return f"This is the right loop: a loss of {right:.2f} over the last ten updates."
        ends = f"over the last ten updates {this:.2f}, the right loop {right:.2f}"
        if not math.isfinite(this):
            return "The loss has become infinite or nan: this loop has diverged."
        if this > 0.95 * math.log(10):
            return f"No better than guessing: {ends}."
        if abs(this - right) <= 0.03 * right:
            return f"You would not notice: {ends}."
        return f"{'Ahead' if this < right else 'Behind'}: {ends}."


def division_panel() -> DivisionPanel:
    """Return the panel of notebook 06: where the loss is divided under a list, two loss curves below."""
    return DivisionPanel()
