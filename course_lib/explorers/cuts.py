"""The panel of notebook 03: where 64 digits are cut, and how far the accumulated gradient is from the full batch's."""

from functools import cache

import torch

from course_lib.accumulation import accumulate_gradients
from course_lib.batches import split_batch
from course_lib.datasets import load_digits
from course_lib.explorers.panel import LivePicture, Panel, labelled_list, labelled_slider
from course_lib.gradients import GradientComparison, compare_gradients, copy_gradients
from course_lib.losses import cross_entropy_sum
from course_lib.models import dense_net
from course_lib.plots import Picture, new_axes, plot_error_by_size

NUM_DIGITS = 64
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}
DIVISIONS = ("by the 64 samples", "by K (mean of means)", "none")


@cache
def comparison(micro_batch_size: int, precision: str, division: str) -> GradientComparison:
    """Compare the gradient of 64 digits, cut into micro-batches of a size, with that of one pass over all.

    `division` is one of DIVISIONS: the summed loss divided by the samples of the group, each micro-batch's mean divided
    by their number, or each micro-batch's mean as it is. `precision` is a key of PRECISIONS.
    """
    dtype = PRECISIONS[precision]
    batch = load_digits(dtype).first(NUM_DIGITS)
    model = dense_net(dtype=dtype)
    accumulate_gradients(model, [batch], cross_entropy_sum)
    full_batch = copy_gradients(model)
    model.zero_grad()
    micro_batches = split_batch(batch, micro_batch_size)
    if division == DIVISIONS[0]:
        accumulate_gradients(model, micro_batches, cross_entropy_sum)
    else:
        divisor = len(micro_batches) if division == DIVISIONS[1] else 1
        for inputs, targets in micro_batches:
            (torch.nn.functional.cross_entropy(model(inputs), targets) / divisor).backward()
    return compare_gradients(full_batch, model)


def pieces(micro_batch_size: int) -> str:
    """Say how 64 falls: "4 x 16", or "2 x 24 + 16"."""
    whole, rest = divmod(NUM_DIGITS, micro_batch_size)
    return f"{whole} x {micro_batch_size}" + (f" + {rest}" if rest else "")


class CutsPanel(Panel):
    """Micro-batch size, precision and division; answered by the relative error at every size, the chosen one marked."""

    def __init__(self) -> None:
        text = (
            "A panel with three controls, micro-batch size, precision and division: run the cell to use it. At first "
            "it shows that every cut of 64 digits gives the full batch's gradient to rounding in float64."
        )
        super().__init__(text=text, lines=2)
        row, self.micro_batch_size = labelled_slider("micro-batch size", 16, NUM_DIGITS)
        self.precision = labelled_list("precision", list(PRECISIONS), "float64")
        self.division = labelled_list("division", DIVISIONS, DIVISIONS[0])
        figure, self._axes = new_axes(width=7.2, height=3.4)
        self.live = LivePicture(figure)
        controls = [self.micro_batch_size, self.precision, self.division]
        self.arrange([row, self.precision, self.division, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        size, precision, division = self.micro_batch_size.value, self.precision.value, self.division.value
        errors = {}
        for one in range(1, NUM_DIGITS + 1):
            errors[one] = comparison(one, precision, division).relative_error
            if self.is_outdated:
                return
        chosen, tolerance = comparison(size, precision, division), TOLERANCES[precision]
        self._axes.clear()
        right = max(errors.values()) <= tolerance
        title = "Every cut gives the same gradient, to rounding" if right else "The cut changes the gradient"
        plot_error_by_size(errors, self._axes, title=title, tolerance=tolerance, chosen=size)
        self.say(f"<b>64 = {pieces(size)}: {self._in_words(chosen, tolerance)}</b>")
        self.live.draw()

    @staticmethod
    def _in_words(chosen: GradientComparison, tolerance: float) -> str:
        if chosen.relative_error == 0:
            return "the same numbers, bit for bit; nothing was cut, so nothing was added in another order."
        if chosen.relative_error <= tolerance:
            return f"relative error {chosen.relative_error:.0e}, equal to rounding."
        return f"relative error {chosen.relative_error:.2g}, scale {chosen.scale:.2f}: not the full batch's gradient."


def cuts_panel() -> CutsPanel:
    """Return the panel of notebook 03: the micro-batch size under a slider, the error of every cut as a picture."""
    return CutsPanel()
