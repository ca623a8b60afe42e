"""The panel of notebook 04: an epoch, K and what a loop does with the tail; what each update finds in `.grad`."""

from dataclasses import dataclass

from course_lib.batches import effective_batch_size, group_sizes
from course_lib.explorers.panel import LivePicture, Panel, labelled_list, labelled_slider
from course_lib.plots import Picture, new_axes, plot_found_gradients, plot_group_sizes

TAILS = (
    "flushed, divided by its own size",
    "dropped and cleared",
    "leaked into the next epoch",
    "divided by the full K",
)
EPOCHS = 2


@dataclass(frozen=True)
class Epochs:
    """Two epochs of a loop: sizes of its updates in micro-batches, and what it does with a tail (one of TAILS)."""

    num_micro_batches: int
    accumulation_steps: int
    tail: str

    @property
    def sizes(self) -> list[int]:
        """Micro-batches whose gradients each update finds, in order, over both epochs."""
        steps, sizes = self.accumulation_steps, group_sizes(self.num_micro_batches, self.accumulation_steps)
        if self.left_over == 0 or self.tail in (TAILS[0], TAILS[3]):
            return sizes * EPOCHS
        full = sizes[:-1]
        if self.tail == TAILS[1] or not full:
            return full * EPOCHS
        return [*full, *[steps + self.left_over if place == 0 else steps for place in range(len(full))]]

    @property
    def left_over(self) -> int:
        """Micro-batches of an epoch behind its last full group."""
        return self.num_micro_batches % self.accumulation_steps

    @property
    def found(self) -> list[float]:
        """What each update finds where every micro-batch has the gradient 1; a right loop finds 1."""
        divisors = self.sizes if self.tail == TAILS[0] else [self.accumulation_steps] * len(self.sizes)
        return [size / divisor for size, divisor in zip(self.sizes, divisors, strict=True)]

    @property
    def sentence(self) -> str:
        updates, left, wrong = len(self.sizes), self.left_over, sorted({one for one in self.found if one != 1})
        start = f"{updates} update{'s' * (updates != 1)} in two epochs"
        if left == 0:
            return f"{start}; K divides the epoch, there is no tail, and all four loops are the same."
        names = f"{left} micro-batch{'es' * (left > 1)} left over in each epoch"
        if not updates:
            return f"{start}: {names}, and K is never reached. Nothing is trained at all."
        if wrong:
            return f"{start}; {names}. Some find {', '.join(f'{one:.3g}' for one in wrong)} instead of 1: wrong."
        lost = " They have taught nothing." if self.tail == TAILS[1] else ""
        return f"{start}; {names}. Every update finds 1: right.{lost}"


class TailsPanel(Panel):
    """Micro-batches of an epoch, K, their size, the processes and the tail; answered by groups and what each finds."""

    MOST_MICRO_BATCHES, MOST_STEPS, LARGEST_SIZE, MOST_PROCESSES = 40, 16, 64, 8

    def __init__(self) -> None:
        text = (
            "A panel with five controls, micro-batches in an epoch, accumulation steps, micro-batch size, processes "
            "and what becomes of the tail: run the cell to use it. At first it shows 10 micro-batches in groups of 4 "
            "with the tail divided by the full K: the last update of each epoch finds half of its gradient."
        )
        super().__init__(text=text, lines=3)
        rows = {}
        for name, label, value, largest in (
            ("num_micro_batches", "micro-batches an epoch", 10, self.MOST_MICRO_BATCHES),
            ("accumulation_steps", "accumulation steps", 4, self.MOST_STEPS),
            ("micro_batch_size", "micro-batch size", 16, self.LARGEST_SIZE),
            ("world_size", "processes", 1, self.MOST_PROCESSES),
        ):
            rows[name], slider = labelled_slider(label, value, largest)
            setattr(self, name, slider)
        self.tail = labelled_list("the tail is", TAILS, TAILS[3])
        figure, self._axes = new_axes(2, 1, width=7.2, height=4.4)
        self.live = LivePicture(figure, layout="free")
        controls = [*(getattr(self, name) for name in rows), self.tail]
        self.arrange([*rows.values(), self.tail, self.answer, self.live.image], controls=controls)
        self.keep(Picture(figure, alt=text))

    def draw(self) -> None:
        steps, size, processes = self.accumulation_steps.value, self.micro_batch_size.value, self.world_size.value
        epochs = Epochs(self.num_micro_batches.value, steps, self.tail.value)
        above, below = self._axes
        above.clear()
        below.clear()
        plot_group_sizes({"updates": epochs.sizes}, above, title="Two epochs, update by update")
        plot_found_gradients(epochs.found, below, title="What each update finds; 1 is right")
        product = f"{size} x {steps} x {processes} = {effective_batch_size(size, steps, processes)}"
        self.say(f"<b>Effective batch: {product} samples.</b> {epochs.sentence}")
        self.live.draw()


def tails_panel() -> TailsPanel:
    """Return the panel of notebook 04: the numbers of an epoch under sliders, its groups and their gradients below."""
    return TailsPanel()
