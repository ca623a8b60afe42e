"""The first live panel: a micro-batch size and accumulation steps, answered by their product."""

from dataclasses import dataclass

from course_lib.batches import effective_batch_size
from course_lib.explorers.panel import LivePicture, Panel, labelled_slider
from course_lib.plots import Picture, new_axes, plot_micro_batches


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
        text = (
            "A panel with two controls, micro-batch size and accumulation steps: run the cell to use it. "
            f"At first it shows {start.sentence}."
        )
        super().__init__(text=text)
        size_row, self.micro_batch_size = labelled_slider(
            "micro-batch size", start.micro_batch_size, self.LARGEST_MICRO_BATCH
        )
        steps_row, self.accumulation_steps = labelled_slider(
            "accumulation steps", start.accumulation_steps, self.MOST_STEPS
        )
        figure, self._axes = new_axes(width=5.6, height=3.0)  # not wider: on a narrow page it would shrink
        self.live = LivePicture(figure)
        self.image = self.live.image
        self.arrange(
            [size_row, steps_row, self.answer, self.image], controls=[self.micro_batch_size, self.accumulation_steps]
        )
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        split = Split(self.micro_batch_size.value, self.accumulation_steps.value)
        self._axes.clear()
        plot_micro_batches(split.micro_batch_size, split.accumulation_steps, self._axes, title=split.title)
        self.say(f"<b>{split.sentence}</b>")
        self.live.draw(words=f"{split.sentence}.")


def hello_panel() -> HelloPanel:
    """Return the panel of notebook 00: two controls and a picture that must answer when they are moved."""
    return HelloPanel()
