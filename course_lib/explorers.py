"""Live panels: controls wired to a plain model and to a picture from `plots`.

The only module that needs ipywidgets. A panel is driven by setting the `.value` of its controls, by hand or in a test.
As the value of a cell it also leaves a sentence and a picture that never change, for readers without a kernel.
"""

import threading
from dataclasses import dataclass

import ipywidgets

from course_lib.batches import effective_batch_size
from course_lib.plots import Picture, live_png, new_axes, plot_micro_batches


class Panel(ipywidgets.VBox):
    """A column of widgets that leaves `text`, and `picture` if given, where its live view cannot be shown.

    `text` says what the panel does and what `picture` shows. Neither follows the controls, so that two runs of a
    notebook store the same.
    """

    def __init__(self, children: list[ipywidgets.Widget], *, text: str, picture: Picture | None = None) -> None:
        super().__init__(children)
        self._fixed_data, self._fixed_metadata = picture._repr_mimebundle_() if picture else ({}, {})
        self._fixed_data["text/plain"] = text

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        return {**super()._repr_mimebundle_(**kwargs), **self._fixed_data}, self._fixed_metadata


def labelled_slider(label: str, value: int, largest: int) -> tuple[ipywidgets.HBox, ipywidgets.IntSlider]:
    """Return a row with a number field and a slider from 1 to `largest` that follow each other, and the slider.

    The field carries the label: the sliders of ipywidgets have no name that a screen reader could read.
    """
    field = ipywidgets.BoundedIntText(
        value, min=1, max=largest, description=label, style={"description_width": "10em"}, layout={"width": "16em"}
    )
    slider = ipywidgets.IntSlider(value, min=1, max=largest, readout=False, layout={"width": "20em"})
    ipywidgets.link((field, "value"), (slider, "value"))
    return ipywidgets.HBox([field, slider], layout={"flex_flow": "row wrap"}), slider


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
