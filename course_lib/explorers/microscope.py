"""The microscope: the accumulation loop line by line, beside what each line does to gradient, bytes and parameters."""

import html
import threading
import time
from functools import partial
from itertools import pairwise

import ipywidgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.explorers.loop import LARGEST_MICRO_BATCH, MOST_STEPS, Loop, Moment, Record, record
from course_lib.explorers.panel import (
    BackgroundRun,
    LivePicture,
    Panel,
    Run,
    button,
    labelled_slider,
    side_by_side,
    switch,
)
from course_lib.plots import Picture, new_axes, plot_bytes_so_far, plot_gradient_beside, plot_steps_so_far

SECONDS_A_LINE = 0.5
GLANCE_SECONDS = 0.02  # between two looks at Stop
COLUMN_WIDTH = "30em"
CODE_STYLE = (
    "margin:0;padding:4px 0;font-size:12px;line-height:1.5;white-space:pre;overflow-x:auto;"
    "background:var(--jp-layout-color1,#fff);color:var(--jp-ui-font-color1,#1a1a1a);"
    "border:1px solid var(--jp-border-color2,#ccc)"
)
LIT_STYLE = (
    "display:inline-block;min-width:100%;font-weight:bold;background:var(--jp-layout-color3,#ddd);"
    "outline:2px solid var(--jp-ui-font-color1,#1a1a1a);outline-offset:-2px"
)


class Microscope(Panel):
    """Step, Back, Play and Reset through two updates of the loop, with switches that break it.

    `position` counts the lines that have run. A changed setting stays at the same place of the update.
    """

    def __init__(self) -> None:
        text = (
            "A panel that runs the accumulation loop line by line, with the buttons Back, Step, Play and Reset: "
            "run the cell to use it. At first nothing has run: 4 micro-batches of 16 digits wait, and .grad is None."
        )
        super().__init__(text=text, lines=9)
        start = Loop()
        size_row, self.micro_batch_size = labelled_slider(
            "micro-batch size", start.micro_batch_size, LARGEST_MICRO_BATCH
        )
        steps_row, self.accumulation_steps = labelled_slider("accumulation steps", start.accumulation_steps, MOST_STEPS)
        self.no_division = switch("no division by the steps")
        self.zero_inside = switch("zero_grad inside the loop")
        self.no_zero = switch("no zero_grad at all")
        self.step_inside = switch("step inside the loop")
        switches = (self.no_division, self.zero_inside, self.no_zero, self.step_inside)
        for one in switches:
            one.layout.margin = "2px 1.5em 2px 2px"
        self.back = button("Back", partial(self._go, -1), tooltip="Back: undo one line")
        self.step = button("Step", partial(self._go, 1), tooltip="Step: run one line")
        self.play = button("Play", self._play, tooltip="Play: run one line after another")
        self.reset = button("Reset", self._reset, tooltip="Reset: back to the beginning")
        self.playing = BackgroundRun("lines")
        self.runs.append(self.playing)
        self.code = ipywidgets.HTML(layout={"width": COLUMN_WIDTH, "max_width": "100%", "margin": "2px"})
        self.answer.layout.max_width = COLUMN_WIDTH
        self.position = 0
        self._record = record(start)
        self._place = threading.RLock()  # of position and record: buttons, Play and drawing each have a thread
        figure, _ = new_axes(width=3.9, height=4.6)
        self._axes = _arrange(figure)
        self.live = LivePicture(figure)
        self.image = self.live.image
        # Beside the code where there is room, else below it, and never wider than the page.
        self.image.layout.width, self.image.layout.max_width = self.image.layout.max_width, "100%"
        # Observed first: before anything is drawn, the other switch goes off and what plays stops.
        for one, other in ((self.zero_inside, self.no_zero), (self.no_zero, self.zero_inside)):
            one.observe(partial(self._exclude, other), names="value")
        controls = (self.micro_batch_size, self.accumulation_steps, *switches)
        for control in controls:
            control.observe(self._stop, names="value")
        buttons = side_by_side(self.back, self.step, self.play, self.reset)
        column = ipywidgets.VBox([self.code, buttons, self.playing.row, self.answer])
        self.arrange(
            [size_row, steps_row, side_by_side(*switches), side_by_side(column, self.image)], controls=controls
        )
        self.keep(Picture(figure, alt=text))

    @property
    def loop(self) -> Loop:
        """The loop that the controls describe."""
        return Loop(
            self.micro_batch_size.value,
            self.accumulation_steps.value,
            divided=not self.no_division.value,
            zeroed="inside" if self.zero_inside.value else "never" if self.no_zero.value else "around",
            step_inside=self.step_inside.value,
        )

    @property
    def moment(self) -> Moment:
        """What is shown: the moment after the line that is lit up."""
        with self._place:
            return self._record.moments[self.position]

    def draw(self) -> None:
        seen = record(self.loop)
        with self._place:
            if seen is not self._record:
                self.position, self._record = seen.find(self.moment, self._record), seen
            moment, position = self.moment, self.position
        self.code.value = code_html(seen, moment)
        self.say(words_html(seen, moment))
        self._draw_pictures(seen, moment, position)
        self.live.draw()

    def _draw_pictures(self, seen: Record, moment: Moment, position: int) -> None:
        for axes in self._axes:
            axes.clear()
        now, full, alive, moved = self._axes
        gradients = [one.gradient for one in seen.moments if one.gradient is not None] + list(seen.full_batch)
        plot_gradient_beside(
            moment.gradient,
            seen.full_batch[moment.update - 1],
            (now, full),
            title="the gradient of one hidden unit, by pixel",
            limit=max(gradient.abs().max().item() for gradient in gradients),
        )
        second = next(one.events for one, after in pairwise(seen.moments) if one.update < after.update)
        plot_bytes_so_far(
            seen.timeline, moment.events, alive, title="bytes alive", starts={"update 1": 0, "update 2": second}
        )
        plot_steps_so_far(
            [one.events for one in seen.moments],
            [one.moved for one in seen.moments],
            position,
            moved,
            title="how far the parameters have moved",
            y_label="distance",
        )

    def _exclude(self, other: ipywidgets.Checkbox, change: dict) -> None:
        if change["new"]:
            other.value = False

    def _stop(self, change: object = None) -> None:
        self.playing.stop()

    def _go(self, lines: int, pressed: object = None) -> None:
        self._stop()
        self._move(lines)

    def _reset(self, pressed: object = None) -> None:
        self._stop()
        self._move(-self.position)

    def _move(self, lines: int) -> None:
        with self._place:
            self.position = min(max(self.position + lines, 0), len(self._record.moments) - 1)
        self.refresh()

    def _play(self, pressed: object = None) -> None:
        """Run line after line on a thread of its own, from the beginning if all have run."""
        self._stop()
        if self.position == len(self._record.moments) - 1:
            self._move(-self.position)
        self.playing.start(self._play_on, then="both updates have run")

    def _play_on(self, run: Run) -> None:
        total = len(self._record.moments) - 1
        while self.position < total:
            run.show(lambda: self._move(1))
            run.report(self.position, total)
            deadline = time.monotonic() + SECONDS_A_LINE
            while time.monotonic() < deadline:
                run.check()
                time.sleep(GLANCE_SECONDS)


def _arrange(figure: Figure) -> list[Axes]:
    """Lay out two images over two traces."""
    figure.clear()
    images, alive, moved = figure.add_gridspec(3, 1, height_ratios=[2.1, 2.0, 1.0])
    return [figure.add_subplot(place) for place in (*images.subgridspec(1, 2), alive, moved)]


def words_html(seen: Record, moment: Moment) -> str:
    """Say what is to be seen at a moment: what the line did, how the gradient stands, and what is wrong."""
    where = f"Line {moment.line} of {len(seen.loop.lines)}, update {moment.update} of 2. " if moment.line else ""
    verdict = " ".join(seen.symptoms(moment))
    if seen.is_fine(moment):
        verdict = "The update is the full batch's: one change of the parameters, equal to rounding."
    lines = [where + seen.sentence(moment), seen.compared(moment)]
    return "<br>".join([*map(html.escape, lines), f"<b>{html.escape(verdict)}</b>"])


def code_html(seen: Record, moment: Moment) -> str:
    """Return the loop as HTML: an arrow, a frame and bold type on the line that has just run, a cross on broken ones."""
    rows = []
    for number, line in enumerate(seen.loop.lines, start=1):
        is_lit = number == moment.line
        is_broken = number in seen.loop.broken_lines
        row = html.escape(f"{'►' if is_lit else ' '} {number} {'✗' if is_broken else ' '} {line}")
        rows.append(f'<span style="{LIT_STYLE}" aria-current="step">{row}</span>' if is_lit else row)
    if seen.loop.zeroed == "never":
        rows.append("    ✗ (no optimizer.zero_grad())")
    return f'<pre style="{CODE_STYLE}">' + "\n".join(rows) + "</pre>"


def microscope() -> Microscope:
    """Return the panel of notebook 02: the loop, line by line, and four ways to break it."""
    return Microscope()
