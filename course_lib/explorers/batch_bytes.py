"""The panel of notebook 01: a batch size, and the bytes of one update by what they are for."""

from functools import cache

import torch

from course_lib.accumulation import update_parameters
from course_lib.batches import positive_int
from course_lib.datasets import load_digits
from course_lib.explorers.panel import LivePicture, Panel, labelled_list, labelled_slider
from course_lib.losses import cross_entropy_sum
from course_lib.memory import format_bytes, measure_memory, parse_bytes
from course_lib.models import conv_net, dense_net
from course_lib.plots import Picture, new_axes, plot_peak_bars

NETWORKS = {"convolutional": conv_net, "dense": dense_net}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
}
LARGEST_BATCH = 128
FROM_DIGITS = ("inputs", "activations", "temporaries")


@cache
def bytes_at_peak(network: str, optimizer: str, num_digits: int) -> dict[str, int]:
    """Return the bytes alive at the peak of a second update on `num_digits` digits in one pass, by category.

    The second, because the optimizer's state is made by the first. `network` is a key of NETWORKS, `optimizer` one of
    OPTIMIZERS. Raises KeyError for another name, ValueError for a size below 1.
    """
    batch = load_digits().first(positive_int("num_digits", num_digits))
    batch = tuple(part.clone() for part in batch)  # a slice would count as all 1797
    model = NETWORKS[network]()
    own = OPTIMIZERS[optimizer](model.parameters())
    update_parameters(model, own, [batch], cross_entropy_sum)
    with measure_memory(model, own, batch) as meter:
        update_parameters(model, own, [batch], cross_entropy_sum)
    return meter.at_peak


class BatchBytesPanel(Panel):
    """Batch size, network, optimizer and budget; answered by three bars: one digit, the chosen batch, the largest."""

    BUDGETS = ("none", "1 MiB", "2 MiB", "4 MiB", "8 MiB")

    def __init__(self) -> None:
        text = (
            "A panel with four controls, batch size, network, optimizer and budget: run the cell to use it. At first "
            "it shows the peak of an AdamW update of the convolutional network for 1, 64 and 128 digits."
        )
        super().__init__(text=text, lines=2)
        row, self.batch_size = labelled_slider("batch size", 64, LARGEST_BATCH)
        self.network = labelled_list("network", list(NETWORKS), "convolutional")
        self.optimizer = labelled_list("optimizer", list(OPTIMIZERS), "AdamW")
        self.budget = labelled_list("budget", self.BUDGETS, "8 MiB")
        figure, self._axes = new_axes(width=7.2, height=3.4)
        self.live = LivePicture(figure)
        controls = [self.batch_size, self.network, self.optimizer, self.budget]
        self.arrange([row, self.network, self.optimizer, self.budget, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        size, network, optimizer = self.batch_size.value, self.network.value, self.optimizer.value
        budget = None if self.budget.value == "none" else parse_bytes(self.budget.value)
        sizes = sorted({1, size, LARGEST_BATCH})
        bars = {f"{one} digit{'s' * (one > 1)}": bytes_at_peak(network, optimizer, one) for one in sizes}
        chosen = bytes_at_peak(network, optimizer, size)
        peak, from_digits = sum(chosen.values()), sum(chosen[name] for name in FROM_DIGITS)
        sentence = f"<b>{size} digit{'s' * (size > 1)}: peak {format_bytes(peak)}</b>, "
        sentence += f"of which {format_bytes(from_digits)} are there because of the digits "
        sentence += f"and {format_bytes(peak - from_digits)} because of the model and its optimizer."
        if budget is not None:
            room = budget - peak
            sentence += f" {'Fits' if room >= 0 else 'Does not fit'}: {format_bytes(abs(room))} "
            sentence += "to spare." if room >= 0 else "too much."
        self._axes.clear()
        plot_peak_bars(bars, self._axes, title="Only what belongs to the digits grows", budget_bytes=budget)
        self.say(sentence)
        self.live.draw()


def batch_bytes_panel() -> BatchBytesPanel:
    """Return the panel of notebook 01: the batch size under a slider, the bytes of one update as bars."""
    return BatchBytesPanel()
