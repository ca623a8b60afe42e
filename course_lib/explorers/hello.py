"""The first live panel: a micro-batch size and accumulation steps, answered by their product."""

import threading
from dataclasses import dataclass

import ipywidgets

from course_lib.batches import effective_batch_size
from course_lib.explorers.panel import Panel, labelled_slider
from course_lib.plots import Picture, live_png, new_axes, plot_micro_batches


@dataclass(frozen=True)
class Split:
    """One update of `accumulation_steps` micro-batches of `micro_batch_size` digits each."""

    micro_batch_size: int
    accumulation_steps: int

    @property
    def effective_batch_size(self) -> int:
        return effective_batch_size(self.micro_batch_size, self.accumulation_steps)

    @property
    def sentence(self) -> str:
        seen = self.effective_batch_size
        digits = "digit" if seen == 1 else "digits"
        return f"{self.micro_batch_size} x {self.accumulation_steps} = {seen}: one update sees {seen} {digits}"

    @property
    def title(self) -> str:
        steps, size = self.accumulation_steps, self.micro_batch_size
        return f"{steps} {'pass' if steps == 1 else 'passes'} of {size}, then one update"


class HelloPanel(Panel):
    """The first live control of the course: a micro-batch size and accumulation steps, answered by their product."""

    LARGEST_MICRO_BATCH, MOST_STEPS = 64, 16

    def __init__(self) -> None:
        start = Split(micro_batch_size=16, accumulation_steps=4)
        size_row, self.micro_batch_size = labelled_slider(
            "micro-batch size", start.micro_batch_size, self.LARGEST_MICRO_BATCH
        )
        steps_row, self.accumulation_steps = labelled_slider(
            "accumulation steps", start.accumulation_steps, self.MOST_STEPS
        )
        self.answer = ipywidgets.HTML()
        # A fixed height, and a picture that keeps its shape inside: nothing below jumps when it is drawn again.
        self.image = ipywidgets.Image(
            format="png",
            layout={"width": "100%", "max_width": "760px", "height": "260px", "object_fit": "contain"},
        )
        self._figure, self._axes = new_axes(height=2.6)
        self._lock = threading.Lock()  # Callbacks may come from another thread while a cell is running.
        self._draw()
        text = (
            "A panel with two controls, micro-batch size and accumulation steps: run the cell to use it. "
            f"At first it shows {start.sentence}."
        )
        super().__init__(
            [size_row, steps_row, self.answer, self.image], text=text, picture=Picture(self._figure, alt=text)
        )
        for control in (self.micro_batch_size, self.accumulation_steps):
            control.observe(self._draw, names="value")

    def _draw(self, change: object = None) -> None:
        with self._lock:
            split = Split(self.micro_batch_size.value, self.accumulation_steps.value)
            self._axes.clear()
            plot_micro_batches(
                split.micro_batch_size,
                split.accumulation_steps,
                self._axes,
                title=split.title,
            )
            self.answer.value = f"<b>{split.sentence}</b>"
            self.image.value = live_png(self._figure)


def hello_panel() -> HelloPanel:
    """Return the panel of notebook 00: two controls and a picture that must answer when they are moved."""
    return HelloPanel()
