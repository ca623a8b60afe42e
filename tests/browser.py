"""A real browser and a real JupyterLab for the browser tests and benchmarks, on this machine alone.

`find_browser` takes what is installed and installs what is not. `jupyter_lab` and `control_room_page` serve a *copy* of
notebooks on a free port of 127.0.0.1, with configuration, workspaces and runtime files of their own. `Lab` drives a
notebook with mouse and keyboard. Everything waits for a condition, never for a time, and an answer that does not come
says what was seen instead.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, Playwright, Request, Route
from playwright.sync_api import Error as PlaywrightError

from tests.rewrite_notebooks import KERNEL_ENVIRONMENT, NOTEBOOKS, ROOT

PROGRAMS = ("chromium", "google-chrome", "google-chrome-stable", "chrome", "chromium-browser")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
)
# No sandbox: Chromium has none for root and in most containers. The others keep it from calling home.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PAGE = ROOT / "course_lib" / "explorers" / "page"  # a notebook and its template, for Voilà
TOKEN = "for-the-tests"
ANSWER_SECONDS = 60  # for an answer of the page or of a kernel; a slow machine gets it, a broken page does not
RUN_SECONDS = 180  # for all cells of a notebook


class BrowserError(Exception):
    """The browser or the server could not be started; the message says what to do about it."""


# ---- the browser -----------------------------------------------------------------------------------------------------


def find_browser(playwright: Playwright) -> str:
    """Return the path of a Chromium or Chrome that starts: an installed one, else one installed now.

    Playwright is asked to install its own first, then apt where this is root on Debian.
    Raises BrowserError, with the command to run, if there is none in the end.
    """
    problems = []
    for install in (None, _install_with_playwright, _install_with_apt):
        if install is not None:
            problems += install()
        for path in _candidates(playwright):
            if problem := _why_not(path):
                problems.append(problem)
            else:
                return path
    command = f"{sys.executable} -m playwright install --with-deps chromium"
    tried = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
    raise BrowserError(
        f"The browser tests need Chromium or Google Chrome. Install one of them, or run:\n\n    {command}\n\n"
        f"What was tried:\n{tried or '  - no browser was found'}"
    )


def _candidates(playwright: Playwright) -> list[str]:
    found = [shutil.which(program) for program in PROGRAMS] + [place for place in PLACES if Path(place).is_file()]
    own = playwright.chromium.executable_path
    return [path for path in found if path] + ([own] if Path(own).is_file() else [])


def _why_not(path: str) -> str | None:
    """Say why the browser at `path` does not start; None if it does."""
    try:
        tried = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not start: {error}"
    return None if tried.returncode == 0 else f"{path} does not start: {_last_line(tried.stderr)}"


def _install_with_playwright() -> list[str]:
    return _installed([sys.executable, "-m", "playwright", "install", "chromium"])


def _install_with_apt() -> list[str]:
    if not shutil.which("apt-get"):
        return ["apt-get is not here"]
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return ["apt-get needs root"]
    install = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "chromium"]
    return _installed(["apt-get", "update", "-qq"]) or _installed(install)


def _installed(command: list[str]) -> list[str]:
    """Run a command that installs; return what went wrong."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{' '.join(command)}: {error}"]
    return [] if done.returncode == 0 else [f"{' '.join(command)}: {_last_line(done.stderr or done.stdout)}"]


def _last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]


# ---- the servers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that answers at `url`, the `folder` that it serves, and what it wrote to its `log`."""

    url: str
    folder: Path
    log: Path


@contextmanager
def jupyter_lab(folder: Path, notebooks: Path = NOTEBOOKS) -> Iterator[Server]:
    """Serve a copy of `notebooks` by JupyterLab while the block runs; all that it writes stays in `folder`."""
    served = _copy(notebooks, folder)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0"),
        *(f"--ServerApp.root_dir={served}", f"--IdentityProvider.token={TOKEN}", "--expose-app-in-browser"),
        *(["--allow-root"] if _is_root() else []),
    ]
    # Where the command line of JupyterLab says which extensions are off: no question about news from the network.
    settings = folder / "config" / "labconfig"
    settings.mkdir(parents=True)
    news = '{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}'
    (settings / "page_config.json").write_text(news, encoding="utf-8")
    with _started(command, "--ServerApp.port={}", folder, served, answers=f"/api/status?token={TOKEN}") as server:
        yield server


@contextmanager
def control_room_page(folder: Path) -> Iterator[Server]:
    """Serve the control room alone as a web page while the block runs, by the command of `make panel`."""
    served = _copy(PAGE, folder)
    command = [
        *(sys.executable, "-m", "voila", str(served / "control_room.ipynb"), "--template=course"),
        *("--Voila.ip=127.0.0.1", "--no-browser"),
    ]
    where = {"JUPYTER_PATH": str(served)}  # of the template
    with _started(command, "--port={}", folder, served, answers="/voila/static/favicon.ico", **where) as server:
        yield server


def _copy(notebooks: Path, folder: Path) -> Path:
    return shutil.copytree(notebooks, folder / notebooks.name, ignore=shutil.ignore_patterns(".*"))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@contextmanager
def _started(
    command: list[str], port: str, folder: Path, served: Path, *, answers: str, **variables: str
) -> Iterator[Server]:
    """Start a server on a free port, wait until it answers, and end it and its kernels after the block."""
    with _free_port() as free:
        command, url = [*command, port.format(free)], f"http://127.0.0.1:{free}"
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=served,
            env=_environment(folder) | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            _wait_for(url + answers, process, log)
            yield Server(url, served, log)
        finally:
            process.send_signal(signal.SIGTERM)  # it ends its kernels itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _free_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one.getsockname()[1]


def _environment(folder: Path) -> dict[str, str]:
    """Return variables under which neither the person's settings are read nor anything of theirs is changed."""
    ours = ("JUPYTER", "IPYTHON", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    python_path = os.pathsep.join(part for part in (str(ROOT), kept.get("PYTHONPATH")) if part)
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    own = {name: str(folder / place) for name, place in places.items()}
    return {**kept, **KERNEL_ENVIRONMENT, **own, "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": python_path}


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    state = "ended" if process.poll() is not None else f"gave no answer within {ANSWER_SECONDS} s"
    last = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
    raise BrowserError(f"The server {' '.join(process.args)} {state}. Its last words:\n{last}")


# ---- a page ----------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A page of a browser, with what went wrong on it: errors of the console, scripts, and calls to other machines."""

    page: Page
    server: Server
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(1000 * ANSWER_SECONDS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(f"exception in the page: {error}"))
        self.page.route(lambda url: not url.startswith(self.server.url), self._on_call_outside)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            place = message.location.get("url", "") if message.location else ""
            self.errors.append(f"error in the console: {message.text} ({place})")

    def _on_call_outside(self, route: Route, request: Request) -> None:
        if request.url.startswith(("http:", "https:", "ws:", "wss:")):
            self.errors.append(f"call to another machine: {request.url}")
            route.abort()
        else:
            route.continue_()

    def seen(self, folder: Path) -> str:
        """Write a picture of the page to `folder`; return in words where it lies and what else was seen."""
        path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', self.page.url.partition('?')[0])[-60:].strip('-')}.png"
        try:
            self.page.screenshot(path=path)
        except PlaywrightError as error:
            path = f"no picture: {_last_line(str(error))}"
        log = self.server.log.read_text(encoding="utf-8").splitlines()[-5:]
        return "\n".join([f"picture: {path}", f"page: {self.page.url}", *self.errors, "server, last lines:", *log])


class Lab(Watched):
    """One page of JupyterLab. The notebook in front is the one that is driven."""

    def open(self, name: str) -> None:
        """Open a notebook in a fresh workspace and wait for its kernel."""
        self.page.goto(f"{self.server.url}/lab/workspaces/{name}/tree/{name}.ipynb?token={TOKEN}&reset")
        self._wait_until_ready(name)

    def open_beside(self, name: str) -> None:
        """Open a second notebook from the list of files, by a double click."""
        self.page.get_by_role("listitem", name=re.compile(rf"^Name: {name}\.ipynb")).dblclick()
        self._wait_until_ready(name)

    def bring_to_front(self, name: str) -> None:
        """Click the tab of a notebook that is open."""
        self.page.get_by_role("tab", name=f"{name}.ipynb").click()
        self._wait_until_ready(name)

    def _wait_until_ready(self, name: str) -> None:
        self._wait(
            "name => { const one = window.jupyterapp?.shell.currentWidget; return one?.context?.path === name"
            " && one.context.isReady && one.sessionContext.session?.kernel?.status === 'idle' }",
            f"{name}.ipynb",
            until=f"{name} is open in front and its kernel is idle",
        )

    def choose(self, menu: str, item: str) -> None:
        """Click an item of a menu in the menu bar."""
        self.page.get_by_role("menubar").get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menu").get_by_role("menuitem", name=re.compile(f"^{item}")).click()

    def run_all(self) -> None:
        """Run > Run All Cells; wait until all have run."""
        self._forget_runs()
        self.choose("Run", "Run All Cells")
        self._wait_until_all_ran()

    def restart_and_run_all(self) -> None:
        """Kernel > Restart Kernel and Run All Cells, and say yes; wait until all have run."""
        self._forget_runs()
        self.choose("Kernel", "Restart Kernel and Run All Cells")
        self.page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
        self._wait_until_all_ran()

    def run_again(self, cell: int) -> None:
        """Run one cell by the keyboard and wait until it has run; `cell` counts from 0."""
        before = self.counts()[cell]
        self.page.evaluate(
            "n => { const all = jupyterapp.shell.currentWidget.content; all.activeCellIndex = n; all.activate() }", cell
        )
        self.page.keyboard.press("Control+Enter")
        self._wait(
            f"([n, before]) => {{ {_CELLS} const count = cells[n].model.executionCount;"
            " return idle && count !== null && count !== before }",
            [cell, before],
            until=f"cell {cell} has run again",
        )

    def interrupt(self) -> None:
        """Kernel > Interrupt Kernel; wait until the kernel is idle."""
        self.choose("Kernel", "Interrupt Kernel")
        self._wait(f"() => {{ {_CELLS} return idle }}", until="the kernel is idle after an interrupt")

    def counts(self) -> list[int | None]:
        """Return the execution count of each cell; None for prose and for what has not run."""
        return self.page.evaluate(f"() => {{ {_CELLS} return cells.map(one => one.model.executionCount ?? null) }}")

    def failures(self) -> list[str]:
        """Return a line for each cell whose output is an error that its tags do not announce."""
        return self.page.evaluate(f"() => {{ {_CELLS} return errors }}")

    def panel(self) -> "PanelView":
        """Scroll the first live panel of the notebook in front into sight and return it."""
        number = self.page.evaluate(
            f"() => {{ {_CELLS} return cells.findIndex(one => one.model.type === 'code' && one.model.outputs.toJSON()"
            f".some(out => '{WIDGET_VIEW}' in (out.data ?? {{}}))) }}"
        )
        assert number >= 0, "no cell shows a live panel"
        self.page.evaluate(
            f"async n => {{ {_CELLS} await jupyterapp.shell.currentWidget.content.scrollToItem(n, 'start') }}", number
        )
        front = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        view = PanelView(self, number, front.locator(".jp-Cell .jp-OutputArea-output .widget-vbox").first)
        view.locator.wait_for()
        return view

    def _forget_runs(self) -> None:
        """Clear all outputs and counts, so that what is there afterwards is new."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        self._wait(
            f"() => {{ {_CELLS} return code.every(one => one.model.executionCount === null) }}",
            until="outputs are cleared",
        )

    def _wait_until_all_ran(self) -> None:
        """Wait for the last cell, or for the first error: JupyterLab runs nothing after it."""
        self._wait(
            f"() => {{ {_CELLS} return idle && (errors.length > 0"
            " || code.every(one => one.model.executionCount !== null)) }",
            until="all cells have run",
            seconds=RUN_SECONDS,
        )
        assert self.failures() == []

    def _wait(self, condition: str, argument: Any = None, *, until: str, seconds: float = ANSWER_SECONDS) -> None:
        wait(self.page, condition, argument, until=until, seconds=seconds)


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_CELLS = (
    "const front = jupyterapp.shell.currentWidget; const cells = front.content.widgets;"
    "const code = cells.filter(one => one.model.type === 'code' && one.model.sharedModel.getSource().trim());"
    "const errors = code.filter(one => !(one.model.getMetadata('tags') ?? []).includes('raises-exception'))"
    ".flatMap(one => one.model.outputs.toJSON()).filter(out => out.output_type === 'error')"
    ".map(out => out.ename + ': ' + out.evalue);"
    "const idle = front.sessionContext.session?.kernel?.status === 'idle';"
)


def wait(where: Page, condition: str, argument: Any = None, *, until: str, seconds: float = ANSWER_SECONDS) -> None:
    """Wait until a JavaScript function of `argument` is true in the page; an AssertionError says what did not come."""
    try:
        where.wait_for_function(condition, arg=argument, timeout=1000 * seconds, polling=50)
    except PlaywrightError as error:
        raise AssertionError(f"waited {seconds} s at most, and it is not so: {until}. {error.message}") from None


# ---- a panel ---------------------------------------------------------------------------------------------------------

# Another picture may take its place while one is decoded or read: then look again.
_SHOWN_PICTURE = """async image => {
    for (;;) {
        const source = image.src
        try {
            await image.decode()
            const bytes = [...new Uint8Array(await (await fetch(source)).arrayBuffer())]
            if (source === image.src) return bytes
        } catch (error) { if (source === image.src) throw error }
    }
}"""
CONTROLS = "input, select, textarea, button, [role=slider]"


@dataclass
class PanelView:
    """A live panel on a page: its controls, its words and its pictures as a person meets them."""

    on: Watched
    cell: int
    locator: Locator

    def words(self) -> str:
        """Return all text of the panel as it is read."""
        return " ".join(self.locator.inner_text().split())

    def picture(self, number: int = 0) -> bytes:
        """Return the picture that is shown now, once it is there as a whole, as the bytes of its file."""
        image = self.locator.locator("img").nth(number)
        return bytes(image.evaluate(_SHOWN_PICTURE, timeout=1000 * ANSWER_SECONDS))

    def wait_for_words(self, words: str) -> None:
        """Wait until the panel says `words`."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while words not in (seen := self.words()):
            assert time.monotonic() < deadline, f"the panel does not say {words!r}; it says {seen!r}"
            self.on.page.wait_for_timeout(50)

    def wait_for_new_picture(self, old: bytes, number: int = 0) -> bytes:
        """Wait until another picture than `old` is shown, whole, and return it."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while (new := self.picture(number)) == old:
            assert time.monotonic() < deadline, f"picture {number} does not change; the panel says {self.words()!r}"
            self.on.page.wait_for_timeout(50)
        return new

    def controls(self) -> list[Locator]:
        """Return what can be set or pressed, in the order of the page; what is disabled or hidden is left out."""
        found = self.locator.locator(CONTROLS)
        return [one for one in found.all() if one.is_visible() and not one.is_disabled()]

    def by_label(self, label: str) -> Locator:
        """Return the control with this name."""
        return self.locator.get_by_label(label, exact=True).first

    def slider_of(self, label: str) -> Locator:
        """Return the slider that stands in one row with the field of this name."""
        row = self.locator.locator(".widget-hbox", has=self.on.page.get_by_label(label, exact=True)).last
        return row.get_by_role("slider")


def new_lab(context: BrowserContext, server: Server) -> Lab:
    """Open a page for JupyterLab in a browser."""
    return Lab(context.new_page(), server)
