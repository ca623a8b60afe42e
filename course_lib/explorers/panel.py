"""What every live panel is built on: a picture that is drawn in place, words, controls with a name, and long work.

A panel is three things: a plain model, a picture from `plots`, and controls. This module holds what wires them, so that
a panel feels like an instrument: whatever a hand does to a slider, the newest value is drawn and no backlog is played;
the old picture stays until the new one is there; a computation that fails says so in words and the panel goes on.

A panel is driven by setting the `.value` of its controls, by hand or in a test; `settle()` waits for the drawing.
As the value of a cell it also leaves a sentence and a picture that never change, for readers without a kernel.
"""

import atexit
import html
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ipywidgets
from ipywidgets.widgets.widget_media import Unicode
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from course_lib.plots import DPI, Picture

LABEL_WIDTH = "11em"
IDLE_SECONDS = 5.0  # how long a drawing thread waits for more before it ends
REPORT_SECONDS = 0.1  # between two looks of a progress bar


class NamedImage(ipywidgets.Image):
    """An image whose `tooltip` is its name for a screen reader.

    The view of a widget with a tooltip reads its description, and breaks at an image, which has none in ipywidgets 8.1.
    """

    description = Unicode("").tag(sync=True)


class LivePicture:
    """A figure that is drawn again and again into one image of fixed size, `image`, an `ipywidgets.Image`.

    The image keeps its height whatever is drawn, and becomes narrower where the page is. The place of the axes is
    worked out at the first drawing and then kept (`layout="fixed"`), so that nothing moves when a label grows, and
    because that is half the time of a drawing; with `layout="free"` it is worked out each time. The card is white and
    opaque, readable on a light and a dark page. Nothing here knows pyplot.
    """

    def __init__(self, figure: Figure, *, layout: str = "fixed") -> None:
        if layout not in ("fixed", "free"):
            raise ValueError(f'layout must be "fixed" or "free", got {layout!r}')
        self.figure = figure
        self._layout = layout
        self._background: Any = None
        figure.set_dpi(2 * DPI)  # twice the page's resolution, as in `Picture`
        self._canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        width, height = (round(DPI * inches) for inches in figure.get_size_inches())
        self.image = NamedImage(
            format="png",
            layout={
                "width": "100%",
                "max_width": f"{width}px",
                "height": f"{height}px",
                "object_fit": "contain",
                "margin": "2px",
            },
        )

    def draw(self, *moving: Artist, words: str | None = None) -> None:
        """Draw the figure and put it into the image, which `words` say to a screen reader; see `render`."""
        self.image.value = self.render(*moving)
        if words is not None:
            self.image.tooltip = words

    def render(self, *moving: Artist) -> bytes:
        """Draw the figure and return it as a PNG, which belongs into `image.value`.

        With `moving` artists only these are drawn, over a background that was kept from their first drawing: for a
        picture in which a line moves and nothing else. `forget()` drops that background. Call it from one thread at a
        time; a panel's `draw` is.
        """
        if moving and self._background is not None:
            self._canvas.restore_region(self._background)
            self._draw_over(moving)
        else:
            for artist in moving:
                artist.set_animated(True)  # left out of a drawing of the whole
            self._draw_all()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox) if moving else None
            self._draw_over(moving)
        return self._png()

    def forget(self) -> None:
        """Let the next drawing draw all of the figure, because something in its background has changed."""
        self._background = None

    def _draw_all(self) -> None:
        if self._layout == "fixed":
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")
            self._layout = "done"
        self._canvas.draw()

    def _draw_over(self, artists: Sequence[Artist]) -> None:
        # Not `draw_artist`: `Picture.png` gives the figure another canvas, and that would be drawn into.
        renderer = self._canvas.get_renderer()
        for artist in artists:
            artist.draw(renderer)

    def _png(self) -> bytes:
        size, drawn = self._canvas.get_width_height(), io.BytesIO()
        pixels = Image.frombuffer("RGBA", size, self._canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
        pixels.save(drawn, format="PNG", compress_level=1)
        return drawn.getvalue()


class Panel(ipywidgets.VBox):
    """A column of widgets that answers its controls, and leaves `text` and a picture where no kernel runs.

    A panel derives from this class, overrides `draw`, and calls in its `__init__`: `super().__init__(text=...)`, which
    makes the words line `answer`; then `arrange(widgets, controls=...)`, which draws for the first time; then, if it
    has one, `keep(picture)`. `text` and that picture never follow the controls: two runs of a notebook store the same.
    """

    def __init__(
        self, children: Iterable[ipywidgets.Widget] = (), *, text: str, picture: Picture | None = None, lines: int = 1
    ) -> None:
        super().__init__(list(children))
        self._fixed_data: dict[str, Any] = {"text/plain": text}
        self._fixed_metadata: dict[str, Any] = {}
        if picture is not None:
            self.keep(picture)
        self.answer = words(lines=lines)
        self.last_error: Exception | None = None
        self.runs: list[BackgroundRun] = []  # stopped when the panel is closed
        self._drawing = threading.RLock()
        self._requests = _Newest(weakref.WeakMethod(self._draw_or_explain))

    # What a panel defines and uses.

    def draw(self) -> None:
        """Read the controls, compute, and set pictures and words. Runs off the main thread, one at a time."""

    def arrange(self, children: Iterable[ipywidgets.Widget], *, controls: Iterable[ipywidgets.Widget] = ()) -> None:
        """Show `children` as a column, draw once, and draw again whenever the value of one of `controls` changes.

        This first drawing happens here and now: an error in it is the error of the cell.
        """
        self.children = tuple(children)
        with self._drawing:
            self.draw()
        for control in controls:
            control.observe(self.refresh, names="value")

    def keep(self, picture: Picture) -> None:
        """Leave this picture, as it is now, for readers without a kernel."""
        text = self._fixed_data["text/plain"]
        self._fixed_data, self._fixed_metadata = picture._repr_mimebundle_()
        self._fixed_data["text/plain"] = text

    def say(self, sentence: str) -> None:
        """Put a sentence (HTML) into the words line, which a screen reader reads when it changes."""
        self.answer.value = spoken_line(sentence)

    def refresh(self, change: object = None) -> None:
        """Ask for a drawing of what the controls say when it begins; several requests make one drawing."""
        self._requests.ask()

    @property
    def is_outdated(self) -> bool:
        """True while a newer value waits for a drawing that has begun: a slow one may return early."""
        return self._requests.waiting

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until everything that was asked for has been drawn. Raises TimeoutError after `timeout` seconds."""
        self._requests.wait(timeout)

    def close(self) -> None:
        """Stop what runs, end the drawing thread, and close every widget of the panel, so that it can be forgotten."""
        self._requests.close()
        for run in self.runs:
            run.stop()
        for widget in [*_every_widget(self)][1:]:
            _close(widget)
        _close(self, super().close)

    def _draw_or_explain(self) -> None:
        with self._drawing:
            try:
                self.draw()
                self.last_error = None
            except Exception as error:
                self.last_error = error
                self.say(f"<b>This could not be computed.</b> {explain(error)} The panel goes on: change a control.")

    def _repr_mimebundle_(self, **kwargs: object) -> tuple[dict, dict]:
        return {**super()._repr_mimebundle_(**kwargs), **self._fixed_data}, self._fixed_metadata


class _Newest:
    """A thread that calls a method once for any number of requests that came in meanwhile.

    It holds the method's object only while it calls it, and ends after a while without requests: nothing keeps a panel
    alive, and the next request starts a new thread.
    """

    def __init__(self, method: weakref.WeakMethod) -> None:
        self._method = method
        self._condition = threading.Condition()
        self._asked = self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        _ALL_DRAWINGS.add(self)

    @property
    def waiting(self) -> bool:
        return self._asked

    def ask(self) -> None:
        with self._condition:
            if self._closed:
                return
            self._asked = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="panel-drawing", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def wait(self, timeout: float) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: not (self._asked or self._busy), timeout):
                raise TimeoutError(f"the panel was still drawing after {timeout:g} s")

    def close(self) -> None:
        with self._condition:
            self._closed, self._asked = True, False
            self._condition.notify_all()

    def _work(self) -> None:
        while self._take():
            try:
                method = self._method()
                if method is not None:
                    method()
                del method  # not kept while waiting
            finally:
                with self._condition:
                    self._busy = False
                    self._condition.notify_all()

    def _take(self) -> bool:
        """Wait for a request and take it; return False when the thread shall end."""
        with self._condition:
            self._condition.wait_for(lambda: self._asked or self._closed or self._method() is None, IDLE_SECONDS)
            if not self._asked:
                self._thread = None
                return False
            self._asked, self._busy = False, True
            return True


class RunStopped(Exception):
    """Raised inside the work of a `BackgroundRun` that has been stopped; nothing needs to catch it."""


class Run:
    """One run of a `BackgroundRun`, handed to its work: asks to stop, takes progress, lets only the newest show."""

    def __init__(self, owner: "BackgroundRun", generation: int) -> None:
        self._owner = owner
        self.generation = generation
        self._stop = threading.Event()
        self.done, self.total = 0, 0

    @property
    def stopped(self) -> bool:
        """True once Stop was pressed or another setting has taken over."""
        return self._stop.is_set()

    def check(self) -> None:
        """Leave the work if it has been stopped. Call it once a micro-batch: a look at an Event costs nothing."""
        if self._stop.is_set():
            raise RunStopped

    def pause(self, seconds: float) -> None:
        """Wait, and `check()`: a work that begins so lets a hand that is still moving go on."""
        self._stop.wait(seconds)
        self.check()

    def report(self, done: int, total: int) -> None:
        """Move the progress bar to `done` of `total`, and `check()`."""
        self.check()
        self.done, self.total = done, total
        self._owner._look(self)

    def show(self, put: Callable[[], None]) -> bool:
        """Call `put`, which shows a result, unless a newer setting has taken over; return whether it was called.

        `put` runs under the lock that a new setting has to take, so it can never show something of an earlier one.
        """
        with self._owner._lock:
            if self._stop.is_set() or self.generation != self._owner.generation:
                return False
            put()
            return True


class BackgroundRun:
    """Long work off the main thread, one run at a time, with a progress bar and a Stop button: show `row`.

    `start(work)` calls `work(run)` on a thread of its own. The work calls `run.report(done, total)` or `run.check()`
    once a micro-batch, so it ends within one of them of Stop; and `run.show(put)` for everything that it shows, so that
    nothing of an earlier setting appears under a newer one. `generation` counts the settings.
    `noun` is what `total` counts, in the plural.
    """

    def __init__(self, noun: str = "updates") -> None:
        self.noun = noun
        self.generation = 0
        self.error: Exception | None = None
        self.bar = ipywidgets.IntProgress(0, min=0, max=1, layout={"width": "12em"})
        self.stop_button = button("Stop", self.stop, tooltip="Stop what is running", disabled=True)
        self.status = words()
        self.status.layout.width = "17em"  # whatever it says, the row breaks at the same place
        self.row = ipywidgets.HBox(
            [self.stop_button, self.bar, self.status], layout={"flex_flow": "row wrap", "align_items": "center"}
        )
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._last_look = 0.0
        _ALL_RUNS.add(self)

    @property
    def running(self) -> bool:
        """True from `start` until the work's thread has ended."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, work: Callable[[Run], None], *, then: str = "") -> Run:
        """Stop the run before, and begin `work(run)`; return the run. `then` is said when it is done."""
        with self._lock:
            before = self._thread
            self._cancel()
            run = self._run = Run(self, self.generation)
            self.error = None
            self.bar.value, self.bar.max, self.bar.bar_style = 0, 1, ""
            self.stop_button.disabled = False
            self.status.value = spoken_line("starting")
            self._thread = threading.Thread(
                target=self._work, args=(run, work, then, before), name="panel-run", daemon=True
            )
            self._thread.start()
        return run

    def stop(self, change: object = None) -> None:
        """Ask the run to stop and let it show nothing more; say where it was. Without a run this does nothing."""
        with self._lock:
            run = self._run
            if run is None:
                return
            self._cancel()
            done = f"stopped after {run.done} of {run.total} {self.noun}" if run.total else "stopped"
            self.status.value = spoken_line(done)
            self.bar.bar_style = "warning"

    def forget(self) -> None:
        """Stop, and say nothing more of a run: its setting is gone, or it begins again from the beginning."""
        with self._lock:
            self.stop()
            self.status.value = spoken_line("")
            self.bar.value, self.bar.max, self.bar.bar_style = 0, 1, ""

    def wait(self, timeout: float = 60.0) -> None:
        """Wait for the run to end. Raises TimeoutError after `timeout` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"the run had not ended after {timeout:g} s")

    def _cancel(self) -> None:
        self.generation += 1
        if self._run is not None:
            self._run._stop.set()
        self._run = None
        self.stop_button.disabled = True

    def _look(self, run: Run) -> None:
        now = time.monotonic()
        if now - self._last_look >= REPORT_SECONDS or run.done == run.total:
            self._last_look = now
            run.show(lambda: self._show_progress(run))

    def _show_progress(self, run: Run) -> None:
        if self.bar.max != run.total:
            self.bar.max = max(run.total, 1)
        self.bar.value = run.done
        # Not spoken: a screen reader would read every number.
        self.status.value = f"{run.done} of {run.total} {self.noun}"

    def _work(self, run: Run, work: Callable[[Run], None], then: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()  # two runs at once would take each other's time
        try:
            run.check()
            work(run)
        except RunStopped:
            return
        except Exception as error:
            self._end(run, f"stopped by an error: {explain(error)}", "danger", error)
        else:
            self._end(run, then or f"done: {run.done} of {run.total} {self.noun}", "success")

    def _end(self, run: Run, sentence: str, style: str, error: Exception | None = None) -> None:
        with self._lock:
            if run is not self._run:
                return
            self._run, self.error = None, error
            self.status.value = spoken_line(sentence)
            self.bar.bar_style = style
            self.stop_button.disabled = True


_ALL_RUNS: "weakref.WeakSet[BackgroundRun]" = weakref.WeakSet()
_ALL_DRAWINGS: "weakref.WeakSet[_Newest]" = weakref.WeakSet()


@atexit.register
def _end_all_threads() -> None:
    """Let no thread compute while the interpreter is taken down: one inside C++ would abort the process."""
    for run in list(_ALL_RUNS):
        run.stop()
    for drawing in list(_ALL_DRAWINGS):
        drawing.close()
    for one in [*_ALL_RUNS, *_ALL_DRAWINGS]:
        thread = one._thread
        if thread is not None:
            thread.join(5)


def explain(error: Exception) -> str:
    """Say an exception in words that can stand in HTML: its type and its first line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return html.escape(f"{type(error).__name__}: {first[:300]}{'' if first[:300].endswith('.') else '.'}")


# Words.


def words(sentence: str = "", *, lines: int = 1) -> ipywidgets.HTML:
    """Return a line of words that keeps room for `lines` lines, so that nothing below it moves."""
    return ipywidgets.HTML(
        spoken_line(sentence) if sentence else "", layout={"min_height": f"{1.8 * lines:.1f}em", "max_width": "820px"}
    )


def spoken_line(sentence: str) -> str:
    """Mark HTML as something that a screen reader reads when it changes."""
    return f'<div role="status" aria-live="polite" style="line-height:1.5">{sentence}</div>'


# Controls. Each has a name that a screen reader reads. The sliders of ipywidgets have none, so each has a field beside
# it that carries the name, follows it and leads it. Every function returns the row to show and the control to observe.


def labelled_slider(
    label: str, value: int, largest: int, *, smallest: int = 1
) -> tuple[ipywidgets.HBox, ipywidgets.IntSlider]:
    """Return a row with a number field and a slider for whole numbers that follow each other, and the slider.

    They run from `smallest` to `largest`; setting `.max` or `.min` of the slider also holds for the field.
    """
    field = ipywidgets.BoundedIntText(value, min=smallest, max=largest, **_field(label))
    slider = ipywidgets.IntSlider(value, min=smallest, max=largest, **_slider())
    return _pair(field, slider), slider


def labelled_float_slider(
    label: str, value: float, smallest: float, largest: float, *, step: float = 0.1
) -> tuple[ipywidgets.HBox, ipywidgets.FloatSlider]:
    """Return a row with a number field and a slider for numbers from `smallest` to `largest`, and the slider."""
    field = ipywidgets.BoundedFloatText(value, min=smallest, max=largest, step=step, **_field(label))
    slider = ipywidgets.FloatSlider(value, min=smallest, max=largest, step=step, **_slider())
    return _pair(field, slider), slider


def labelled_choices(
    label: str, choices: Sequence[Any] | Sequence[tuple[str, Any]], value: Any
) -> tuple[ipywidgets.HBox, ipywidgets.SelectionSlider]:
    """Return a row with a list and a slider over the same `choices`, values or pairs (text, value), and the slider.

    For powers of two, learning rates and other numbers that are not evenly spaced: no value between them can be set.
    """
    field = ipywidgets.Dropdown(options=choices, value=value, **_field(label))
    slider = ipywidgets.SelectionSlider(options=choices, value=value, **_slider())
    return _pair(field, slider, bounds=()), slider


def labelled_list(label: str, choices: Sequence[Any] | Sequence[tuple[str, Any]], value: Any) -> ipywidgets.Dropdown:
    """Return a list to choose one of: values or pairs (text, value). It is its own row."""
    return ipywidgets.Dropdown(options=choices, value=value, **_field(label))


def switch(label: str, value: bool = False, *, tooltip: str = "") -> ipywidgets.Checkbox:
    """Return a box to tick. It is its own row."""
    return ipywidgets.Checkbox(value, description=label, indent=False, tooltip=tooltip, layout={"width": "auto"})


def button(
    label: str, action: Callable[[Any], None], *, tooltip: str = "", disabled: bool = False
) -> ipywidgets.Button:
    """Return a button that calls `action(button)`; press it in a test with `.click()`."""
    made = ipywidgets.Button(description=label, tooltip=tooltip or label, disabled=disabled, layout={"width": "auto"})
    made.on_click(action)
    return made


def side_by_side(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    """Return widgets in a row that breaks where the page is narrow."""
    return ipywidgets.HBox(widgets, layout={"flex_flow": "row wrap", "align_items": "center"})


def _field(label: str) -> dict[str, Any]:
    return {
        "description": label,
        "style": {"description_width": LABEL_WIDTH},
        "layout": {"width": "19em", "max_width": "100%"},
    }


def _slider() -> dict[str, Any]:
    return {"readout": False, "layout": {"width": "17em"}}


def _pair(
    field: ipywidgets.Widget, slider: ipywidgets.Widget, bounds: Sequence[str] = ("min", "max")
) -> ipywidgets.HBox:
    for trait in (*bounds, "value"):
        ipywidgets.link((slider, trait), (field, trait))
    return side_by_side(field, slider)


def _every_widget(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from _every_widget(child)


def _close(widget: ipywidgets.Widget, close: Callable[[], None] | None = None) -> None:
    """Close a widget with the layout and the style that belong to it alone."""
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    (close or widget.close)()
    for part in parts:
        if isinstance(part, ipywidgets.Widget):
            part.close()
