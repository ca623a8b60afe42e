"""How a live panel feels beside a plain `interact`: `python -m tests.benchmarks.panel_latency`.

In a real JupyterLab in a headless browser one notebook shows the same picture twice: by `interact` with `plt.show()`,
and by the microscope of notebook 02, whose slider counts the lines of the loop that have run. Both sides call the same
model function with the same cache, filled beforehand, and the same plot functions, and draw at the same resolution.
Their sliders are moved by keyboard in turn, a few moves here and a few there, so both sides of each ratio come from the
same minutes of the same machine. A move is over when the new picture is decoded in the page; times are those of the
page's own clock.

Then each slider is dragged, 40 moves in 2 seconds, while the browser's painted frames are recorded: where does it end,
when, and is the picture missing, blank or of another height in a frame? Last, the panel's slider is moved 500 times:
how much have the kernel and the page grown, after a forced garbage collection? And the control room trains and is
stopped. The exit status is 1 if a mark is missed.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:  # the kernel imports this module too, and has no need of a browser
    from playwright.sync_api import CDPSession, Locator, Page

    from tests.browser import Lab

TIMES_FASTER = 3.0
MOST_MILLISECONDS_AFTER_A_DRAG = 250.0
MOST_GROWTH_PERCENT = 5.0
MOST_SECONDS_TO_STOP = 0.5

TURNS, MOVES_A_TURN = 5, 8
DRAG_MOVES, DRAG_SECONDS = 40, 2.0
MANY_MOVES = 500
STEPS = 8  # accumulation steps: 54 lines in two updates
NOTEBOOK = """\
from tests.benchmarks.panel_latency import fill_cache, show_panel, show_plain
fill_cache()
%config InlineBackend.figure_format = "retina"
#%%
show_plain()
#%%
panel = show_panel()
panel
#%%
from course_lib.explorers import control_room
room = control_room()
room
"""


# ---- in the kernel ---------------------------------------------------------------------------------------------------


def fill_cache() -> None:
    """Run the loop, so that a move only draws."""
    from course_lib.explorers.loop import Loop, record

    record(Loop(16, STEPS))


def show_plain() -> None:
    """Show the picture as most notebooks do it: a function that plots, and `interact`."""
    import matplotlib.pyplot as plt
    from ipywidgets import IntSlider, interact

    from course_lib.explorers.loop import Loop, record
    from course_lib.explorers.microscope import arrange_axes, draw_frame, draw_moment

    def show(lines_run: int) -> None:
        seen = record(Loop(16, STEPS))
        axes = arrange_axes(plt.figure(figsize=(3.9, 4.8), layout="constrained"))
        draw_frame(axes, seen, seen.moments[lines_run].update)
        draw_moment(axes, seen, lines_run)
        plt.show()

    interact(show, lines_run=IntSlider(0, min=0, max=len(Loop(16, STEPS).places) - 1))


def show_panel():
    """Return the microscope with the same loop."""
    from course_lib.explorers import microscope

    panel = microscope()
    panel.accumulation_steps.value = STEPS
    panel.settle()
    return panel


KERNEL_SIZE = """\
import gc, os, ipywidgets
panel.settle()
gc.collect(); gc.collect()
with open("/proc/self/statm") as file:
    resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
print(resident, len(gc.get_objects()))
"""
STOP_TRAINING = """\
import time
room.training.wait()
room.train_button.click()
while room.training.bar.value < 3: time.sleep(0.01)
start = time.perf_counter()
room.training.stop()
room.training.wait()
print(time.perf_counter() - start)
"""


# ---- in the browser --------------------------------------------------------------------------------------------------

# Notes when keys and pointer moved something, and when another picture stood in its place, decoded. An `interact`
# replaces the element, a panel its source: the picture is the last one in the cell either way.
WATCH = """area => {
    const seen = window.seen = {moves: [], pictures: [], stop: false}
    let shown = area.querySelector('img:last-of-type')?.src
    const move = () => seen.moves.push(performance.now())
    for (const kind of ['keydown', 'pointermove', 'mousemove']) area.addEventListener(kind, move, true)
    document.addEventListener('mousemove', move, true)
    const look = () => {
        if (seen.stop) return
        const images = area.querySelectorAll('img')
        const image = images[images.length - 1]
        if (image && image.complete && image.naturalWidth > 0 && image.src !== shown) {
            shown = image.src
            seen.pictures.push(performance.now())
        }
        requestAnimationFrame(look)
    }
    look()
}"""


@dataclass
class Side:
    """One of the two: its output area and slider, and what was measured."""

    name: str
    page: Page
    area: Locator
    handle: Locator
    milliseconds: list[float] = field(default_factory=list)
    right: bool = True  # which way the slider goes next

    def watch(self) -> None:
        self.page.evaluate("() => { if (window.seen) window.seen.stop = true }")
        self.area.evaluate(WATCH)

    def seen(self, what: str) -> list[float]:
        return self.page.evaluate(f"() => window.seen.{what}")

    def move_by_key(self) -> None:
        """Move the slider by one and wait for the picture; keep the time between them."""
        before = len(self.seen("pictures"))
        self.handle.press("ArrowRight" if self.right else "ArrowLeft")
        self.page.wait_for_function("n => window.seen.pictures.length > n", arg=before, polling=20, timeout=60_000)
        self.milliseconds.append(self.seen("pictures")[before] - self.seen("moves")[-1])

    def turn(self, moves: int) -> None:
        """Move a few times one way, and be at rest after it."""
        self.handle.scroll_into_view_if_needed()
        self.watch()
        for _ in range(moves):
            self.move_by_key()
        self.right = not self.right
        at_rest(self)

    @property
    def percentile_95(self) -> float:
        return sorted(self.milliseconds)[int(0.95 * len(self.milliseconds) + 0.5) - 1]


def at_rest(side: Side, quiet_seconds: float = 1.0) -> None:
    """Wait until no new picture has come for a while."""
    count, since = len(side.seen("pictures")), time.monotonic()
    while time.monotonic() - since < quiet_seconds:
        side.page.wait_for_timeout(50)
        if len(side.seen("pictures")) != count:
            count, since = len(side.seen("pictures")), time.monotonic()


@dataclass
class Drag:
    """What 40 moves in 2 seconds came to."""

    pictures: int
    milliseconds_after: float
    value: int
    frames: int
    missing: int
    blank: int
    heights: set[int]


def drag(side: Side, client: CDPSession) -> Drag:
    """Drag the slider from its left end to 40 in 2 seconds and watch until nothing comes any more."""
    page = side.page
    side.handle.press("Home")
    side.handle.scroll_into_view_if_needed()
    side.watch()
    at_rest(side)
    track = side.handle.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]").bounding_box()
    handle = side.handle.bounding_box()
    y = handle["y"] + handle["height"] / 2
    picture = side.area.locator("img").last.bounding_box()
    largest = float(side.handle.get_attribute("aria-valuemax"))
    frames: list[bytes] = []

    def keep(frame: dict) -> None:
        frames.append(base64.b64decode(frame["data"]))
        client.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    client.on("Page.screencastFrame", keep)
    client.send("Page.startScreencast", {"format": "png", "everyNthFrame": 1})
    page.mouse.move(handle["x"] + handle["width"] / 2, y)
    page.mouse.down()
    start = time.monotonic()
    for move in range(1, DRAG_MOVES + 1):
        page.mouse.move(track["x"] + track["width"] * move / largest, y)
        page.wait_for_timeout(max(0.0, 1000 * (start + DRAG_SECONDS * move / DRAG_MOVES - time.monotonic())))
    last_move = side.seen("moves")[-1]
    page.mouse.up()
    at_rest(side, 2.0)
    client.send("Page.stopScreencast")
    client.remove_listener("Page.screencastFrame", keep)
    pictures = side.seen("pictures")
    value = round(float(side.handle.get_attribute("aria-valuenow")))
    checked = [look_at(frame, picture) for frame in frames]
    return Drag(
        pictures=len(pictures),
        milliseconds_after=max([0.0, *(moment - last_move for moment in pictures)]),
        value=value,
        frames=len(frames),
        missing=sum(height == 0 for height, _ in checked),
        blank=sum(height > 0 and not inked for height, inked in checked),
        heights={height for height, _ in checked if height},
    )


def look_at(frame: bytes, picture: dict[str, float]) -> tuple[int, bool]:
    """Return how many rows of a painted frame are the white card of the picture, and whether there is ink on it.

    The page is dark, the card white: where it is missing, no row is white at its left edge.
    """
    with Image.open(io.BytesIO(frame)) as image:
        pixels = np.asarray(image.convert("L"))
    left, right = round(picture["x"]), round(picture["x"] + picture["width"])
    top = max(0, round(picture["y"]) - 40)
    column = pixels[top : round(picture["y"] + picture["height"]) + 40, left + 3 : left + 6]
    white = (column > 240).all(axis=1)
    card = pixels[top : top + len(white), left + 8 : right - 8][white]
    return int(white.sum()), bool(card.size and (card < 80).mean() > 0.002)


def run_in_kernel(page: Page, code: str) -> str:
    """Run code in the notebook's kernel, outside of any cell, and return what it printed."""
    return page.evaluate(
        """async code => {
            const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel
            const future = kernel.requestExecute({code, store_history: false})
            let text = ''
            future.onIOPub = message => {
                if (message.header.msg_type === 'stream') text += message.content.text
                if (message.header.msg_type === 'error') text += message.content.ename + message.content.evalue
            }
            await future.done
            return text
        }""",
        code,
    )


def sizes(page: Page, client: CDPSession) -> dict[str, float]:
    """Return how large kernel and page are after a forced garbage collection."""
    resident, objects = map(int, run_in_kernel(page, KERNEL_SIZE).split())
    client.send("HeapProfiler.enable")
    for _ in range(2):
        client.send("HeapProfiler.collectGarbage")
    heap = client.send("Runtime.getHeapUsage")["usedSize"]
    return {"kernel, resident memory": resident, "kernel, Python objects": objects, "page, JavaScript heap": heap}


def side_in(lab: Lab, name: str, cell: int, label: str = "") -> Side:
    """Return one side: the output of a code cell, and its only slider or the one of this name."""
    area = lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").nth(cell)
    area.scroll_into_view_if_needed()
    area.get_by_role("slider").first.wait_for()
    row = area.locator(".widget-hbox", has=lab.page.get_by_label(label, exact=True)) if label else area
    return Side(name, lab.page, area, row.last.get_by_role("slider"))


def write_notebook(folder: Path) -> Path:
    from nbformat import write
    from nbformat.v4 import new_code_cell, new_notebook

    folder.mkdir()
    cells = [new_code_cell(source.strip()) for source in NOTEBOOK.split("#%%\n")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    write(new_notebook(cells=cells, metadata=kernel), folder / "latency.ipynb")
    return folder


def main() -> int:
    """Measure, print the tables, and return the exit status."""
    from playwright.sync_api import sync_playwright

    from tests.browser import ARGUMENTS, Lab, find_browser, jupyter_lab

    short: list[str] = []

    def hold(is_held: bool, mark: str) -> str:
        if not is_held:
            short.append(mark)
        return "yes" if is_held else "NO"

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, sync_playwright() as playwright:
        folder = Path(name)
        notebooks = write_notebook(folder / "written")
        with jupyter_lab(folder / "lab", notebooks) as server:
            browser = playwright.chromium.launch(executable_path=find_browser(playwright), args=ARGUMENTS)
            page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
            client = page.context.new_cdp_session(page)
            lab = Lab(page, server)
            lab.open("latency")
            lab.run_all()
            page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
            plain = side_in(lab, "interact and plt.show()", 1)
            panel = side_in(lab, "panel", 2, "lines run")
            for side in (plain, panel):  # warms up
                side.turn(MOVES_A_TURN)
                side.milliseconds.clear()
            for turn in range(2 * TURNS):
                (plain if turn % 2 == 0 else panel).turn(MOVES_A_TURN)
            print_latency(plain, panel, hold)
            print_drags({side.name: drag(side, client) for side in (plain, panel)}, panel, hold)
            print_growth(panel, client, hold)
            print_stop(page, hold)
            browser.close()
    if short:
        print("\nFAILED: " + "; ".join(short), file=sys.stderr)
    return 1 if short else 0


def print_latency(plain: Side, panel: Side, hold: Callable[[bool, str], str]) -> None:
    print("| from a move of the slider to the new picture | median | 95th percentile | moves |")
    print("| --- | ---: | ---: | ---: |")
    for side in (plain, panel):
        middle, high = median(side.milliseconds), side.percentile_95
        print(f"| {side.name} | {middle:.0f} ms | {high:.0f} ms | {len(side.milliseconds)} |")
    middle = median(plain.milliseconds) / median(panel.milliseconds)
    high = plain.percentile_95 / panel.percentile_95
    held = hold(min(middle, high) >= TIMES_FASTER, f"the panel is {middle:.2f} and {high:.2f} times faster")
    print(f"| times faster (mark: {TIMES_FASTER:g}) | {middle:.1f} x | {high:.1f} x | held: {held} |", flush=True)


def print_drags(drags: dict, panel: Side, hold: Callable[[bool, str], str]) -> None:
    print(f"\n| {DRAG_MOVES} moves in {DRAG_SECONDS:g} s | {' | '.join(drags)} | mark | held |")
    print("| --- | ---: | ---: | ---: | --- |")
    limit = max(MOST_MILLISECONDS_AFTER_A_DRAG, 2 * panel.percentile_95)
    ours, wanted = drags[panel.name], DRAG_MOVES
    rows = {
        "last picture after the last move": (
            lambda one: f"{one.milliseconds_after:.0f} ms",
            f"{limit:.0f} ms",
            ours.milliseconds_after <= limit,
        ),
        "slider ends at": (lambda one: f"{one.value}", f"{wanted}", abs(ours.value - wanted) <= 1),
        "pictures drawn": (lambda one: f"{one.pictures}", "", True),
        "painted frames": (lambda one: f"{one.frames}", "", ours.frames > 5),
        "of them without a picture": (lambda one: f"{one.missing}", "0", ours.missing == 0),
        "of them with a blank one": (lambda one: f"{one.blank}", "0", ours.blank == 0),
        "heights of the picture": (lambda one: f"{len(one.heights)}", "1", len(ours.heights) == 1),
    }
    for name, (shown, mark, held) in rows.items():
        print(
            f"| {name} | "
            + " | ".join(shown(one) for one in drags.values())
            + f" | {mark} | {hold(held, f'drag: {name}') if mark else ''} |",
            flush=True,
        )
    said = panel.area.get_by_label("lines run", exact=True).input_value()
    hold(said == str(ours.value), f"after the drag the field says {said} and the slider {ours.value}")


def print_growth(panel: Side, client: CDPSession, hold: Callable[[bool, str], str]) -> None:
    panel.watch()
    many_moves(panel, MANY_MOVES // 5)  # what is made once is made now
    before = sizes(panel.page, client)
    many_moves(panel, MANY_MOVES)
    after = sizes(panel.page, client)
    print(f"\n| grown after {MANY_MOVES} moves | before | after | growth (mark: {MOST_GROWTH_PERCENT:g} %) | held |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name, old in before.items():
        growth = 100 * (after[name] / old - 1)
        values = [f"{one:,}" if "objects" in name else f"{one / 2**20:.1f} MiB" for one in (old, after[name])]
        held = hold(growth <= MOST_GROWTH_PERCENT, f"{name} grew by {growth:.1f} %")
        print(f"| {name} | {values[0]} | {values[1]} | {growth:+.1f} % | {held} |", flush=True)


def many_moves(side: Side, moves: int) -> None:
    """Move the slider right and left without waiting for each picture, as a restless hand does."""
    for move in range(moves):
        side.handle.press("ArrowRight" if move // 20 % 2 == 0 else "ArrowLeft")
        side.page.wait_for_timeout(20)
    at_rest(side)


def print_stop(page: Page, hold: Callable[[bool, str], str]) -> None:
    seconds = [float(run_in_kernel(page, STOP_TRAINING)) for _ in range(5)]
    held = hold(max(seconds) <= MOST_SECONDS_TO_STOP, f"training stopped after {max(seconds):.2f} s")
    print("\n| from Stop to the end of training | median | worst of 5 | mark | held |")
    print("| --- | ---: | ---: | ---: | --- |")
    print(
        f"| control room | {1000 * median(seconds):.0f} ms | {1000 * max(seconds):.0f} ms "
        f"| {1000 * MOST_SECONDS_TO_STOP:.0f} ms | {held} |"
    )


if __name__ == "__main__":
    sys.exit(main())
