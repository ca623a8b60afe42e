"""The microscope: the accumulation loop line by line, beside what each line does to gradient, bytes and parameters."""

import html
import threading
import time
from functools import partial
from itertools import pairwise

import ipywidgets
from matplotlib.artist import Artist
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
from course_lib.memory import format_bytes
from course_lib.plots import (
    Picture,
    new_axes,
    plot_bytes_frame,
    plot_bytes_so_far,
    plot_gradient_frame,
    plot_gradient_now,
    plot_steps_frame,
    plot_steps_so_far,
)

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

    `lines_run` counts the lines that have run. A changed setting stays at the same place of the update.
    """

    def __init__(self) -> None:
        text = (
            "A panel that runs the accumulation loop line by line, with the buttons Back, Step, Play and Reset: "
            "run the cell to use it. The picture shows it when the first update has stepped: .grad is the full "
            "batch's, the bytes have gone up and down four times, and the parameters have moved once."
        )
        super().__init__(text=text, lines=9)
        self._loop = start = Loop()
        size_row, self.micro_batch_size = labelled_slider(
            "micro-batch size", start.micro_batch_size, LARGEST_MICRO_BATCH
        )
        steps_row, self.accumulation_steps = labelled_slider("accumulation steps", start.accumulation_steps, MOST_STEPS)
        lines_row, self.lines_run = labelled_slider("lines run", 0, len(start.places) - 1, smallest=0)
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
        self._player: int | None = None  # the thread that plays
        self._moving = threading.RLock()  # Play moves `lines_run` too
        self.code = ipywidgets.HTML(layout={"width": COLUMN_WIDTH, "max_width": "100%", "margin": "2px"})
        self.answer.layout.max_width = COLUMN_WIDTH
        figure, _ = new_axes(width=3.9, height=4.8)
        self._axes = arrange_axes(figure)
        self._framed: tuple[Loop, int] | None = None  # what the frame of the picture was drawn for
        self._artists: list[Artist] = []
        self.live = LivePicture(figure)
        self.image = self.live.image
        # Beside the code where there is room, else below it, and never wider than the page.
        self.image.layout.width, self.image.layout.max_width = self.image.layout.max_width, "100%"
        # Observed before anything is drawn: the other switch goes off, what plays stops, the place is kept.
        for one, other in ((self.zero_inside, self.no_zero), (self.no_zero, self.zero_inside)):
            one.observe(partial(self._exclude, other), names="value")
        settings = (self.micro_batch_size, self.accumulation_steps, *switches)
        for control in settings:
            control.observe(self._keep_place, names="value")
        self.lines_run.observe(self._stop_unless_played, names="value")
        buttons = side_by_side(self.back, self.step, self.play, self.reset)
        column = ipywidgets.VBox([self.code, buttons, self.playing.row, self.answer])
        beside = side_by_side(column, self.image)
        beside.layout.align_items = "flex-start"
        self.arrange(
            [size_row, steps_row, side_by_side(*switches), lines_row, beside], controls=(*settings, self.lines_run)
        )
        self._keep_a_step(Picture(figure, alt=text))

    def _keep_a_step(self, picture: Picture) -> None:
        """Leave a picture of the first step for readers without a kernel; the live one begins at the beginning."""
        seen = record(self._loop)
        draw_frame(self._axes, seen, update=1)
        draw_moment(self._axes, seen, next(place for place, one in enumerate(seen.moments) if one.has_moved))
        self.keep(picture)
        self._framed = None

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
        """What the controls ask for: the moment after the line that is to be lit up."""
        moments = record(self.loop).moments
        return moments[min(self.lines_run.value, len(moments) - 1)]

    def draw(self) -> None:
        seen, moment = record(self.loop), self.moment
        self.code.value = code_html(seen, moment)
        self.say(words_html(seen, moment))
        self._draw_picture(seen, moment)

    def _draw_picture(self, seen: Record, moment: Moment) -> None:
        """Draw what moves over its frame; the frame only if it is another one."""
        wanted, framed = (seen.loop, moment.update), self._framed
        self._framed = None  # until all is drawn: after an error it is drawn anew
        if wanted == framed:
            for artist in self._artists:
                artist.remove()
        else:
            draw_frame(self._axes, seen, moment.update)
            self.live.forget()
        self._artists = draw_moment(self._axes, seen, seen.moments.index(moment))
        self.live.draw(*self._artists, words=f"{seen.compared(moment)} {format_bytes(moment.live_bytes)} are alive.")
        self._framed = wanted

    def _exclude(self, other: ipywidgets.Checkbox, change: dict) -> None:
        if change["new"]:
            other.value = False

    def _keep_place(self, change: object = None) -> None:
        """Let `lines_run` stand at the same place of the loop as it now is."""
        self.playing.forget()
        with self._moving:
            before, self._loop = self._loop, self.loop
            place, last = self._loop.find(self.lines_run.value, before), len(self._loop.places) - 1
            self.lines_run.max = max(last, self.lines_run.max)
            self.lines_run.value = place
            self.lines_run.max = last

    def _stop_unless_played(self, change: object = None) -> None:
        if threading.get_ident() != self._player:
            self.playing.stop()

    def _go(self, lines: int, pressed: object = None) -> None:
        self.playing.stop()
        with self._moving:
            self.lines_run.value += lines  # the slider stops at its ends

    def _reset(self, pressed: object = None) -> None:
        self.playing.forget()
        self.lines_run.value = 0

    def _play(self, pressed: object = None) -> None:
        """Run line after line on a thread of its own, from the beginning if all have run."""
        self.playing.stop()
        if self.lines_run.value == self.lines_run.max:
            self.lines_run.value = 0
        self.playing.start(self._play_on, then="both updates have run")

    def _play_on(self, run: Run) -> None:
        self._player = threading.get_ident()
        while self.lines_run.value < self.lines_run.max:
            run.show(self._play_one)
            run.report(self.lines_run.value, self.lines_run.max)
            deadline = time.monotonic() + SECONDS_A_LINE
            while time.monotonic() < deadline:
                run.check()
                time.sleep(GLANCE_SECONDS)

    def _play_one(self) -> None:
        with self._moving:
            self.lines_run.value += 1


def arrange_axes(figure: Figure) -> list[Axes]:
    """Lay out two images over two traces."""
    figure.clear()
    images, alive, moved = figure.add_gridspec(3, 1, height_ratios=[2.3, 2.0, 0.9])
    return [figure.add_subplot(place) for place in (*images.subgridspec(1, 2), alive, moved)]


def draw_frame(four: list[Axes], seen: Record, update: int) -> None:
    """Draw what stays while one update of a loop is gone through into the axes of `arrange_axes`."""
    for axes in four:
        axes.clear()
    now, full, alive, moved = four
    full_batch = seen.full_batch[update - 1]
    plot_gradient_frame(full_batch, (now, full), title="gradient of one hidden unit", limit=seen.largest_gradient)
    second = next(one.events for one, after in pairwise(seen.moments) if one.update < after.update)
    plot_bytes_frame(seen.timeline, alive, title="bytes alive", starts={"update 1": 0, "update 2": second})
    plot_steps_frame(*seen.path, moved, title="parameters: distance moved", y_label="distance")


def draw_moment(four: list[Axes], seen: Record, position: int) -> list[Artist]:
    """Draw what is there after `position` lines into the frame and return the artists."""
    now, _, alive, moved = four
    moment = seen.moments[position]
    label = f".grad after line {moment.line}" if moment.line else ".grad at the start"
    return [
        *plot_gradient_now(moment.gradient, now, limit=seen.largest_gradient, label=label),
        *plot_bytes_so_far(seen.timeline, moment.events, alive),
        *plot_steps_so_far(*seen.path, position, moved),
    ]


def words_html(seen: Record, moment: Moment) -> str:
    """Say what is to be seen at a moment: what the line did, how the gradient stands, and what is wrong."""
    where = f"Line {moment.line} of {len(seen.loop.lines)}, update {moment.update} of 2. " if moment.line else ""
    verdict = " ".join(seen.symptoms(moment))
    if seen.is_fine(moment):
        verdict = "The update is the full batch's: one change of the parameters, equal to rounding."
    lines = [where + seen.sentence(moment), seen.compared(moment)]
    return "<br>".join([*map(html.escape, lines), f"<b>{html.escape(verdict)}</b>"])


def code_html(seen: Record, moment: Moment) -> str:
    """Return the loop as HTML: the line that has just run has an arrow, a frame and bold type."""
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
