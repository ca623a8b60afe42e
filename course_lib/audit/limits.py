"""Run somebody's code so that whatever it does ends as a sentence: errors, exits, endless loops, floods of text."""

from __future__ import annotations

import ctypes
import io
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch

from course_lib.audit.report import Finding

MOST_CHARACTERS = 100_000  # printed in one call
REPEAT_SECONDS = 0.2  # code that swallows the interruption is interrupted again


class TooLong(BaseException):
    """The time is up. Not an Exception, so that `except Exception` in the code does not swallow it."""


class Deadline:
    """A moment that all the calls of an audit share. `calls_left` is False once a call had to be stopped."""

    def __init__(self, seconds: float):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"seconds must be a number above 0; got {seconds!r}")
        if not 0 < seconds < 1e9:
            raise ValueError(f"seconds must be a number above 0; got {seconds!r}")
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, at least a millisecond."""
        return max(self.end - time.monotonic(), 1e-3)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Raise TooLong in the block when the time is up: by a signal, which also wakes a sleeping main thread.

        In another thread, or without such signals (Windows), the exception waits for the next line of Python.
        """
        inside = True
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):

            def ring(*_: Any) -> None:
                if inside:
                    raise TooLong

            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, self.left(), REPEAT_SECONDS)
            try:
                yield
            finally:
                inside = False
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            return

        me, done = threading.get_ident(), threading.Event()

        def watch() -> None:
            wait = self.left()
            while not done.wait(wait):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(TooLong))
                wait = REPEAT_SECONDS

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


class Sink(io.TextIOBase):
    """Counts what is printed, and keeps nothing."""

    def __init__(self):
        self.characters = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.characters += len(text)
        return len(text)


def call_guarded(function: Callable[..., Any], arguments: tuple, deadline: Deadline) -> tuple[Any, list[Finding]]:
    """Call a function; return what it returned (None after an error), and a finding for each way it misbehaved.

    Printed text is swallowed. Gradient mode and default dtype are given back. A KeyboardInterrupt goes through: it is
    the person at the keyboard.
    """
    findings, returned, sink = [], None, Sink()
    grad_enabled, dtype, limit = torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit()
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink), deadline.interrupts():
            warnings.simplefilter("ignore")
            returned = function(*arguments)
    except KeyboardInterrupt:
        raise
    except TooLong:
        seconds = f"{deadline.seconds:g} second{'s' * (deadline.seconds != 1)}"
        findings.append(Finding("ran-too-long", f"it was still running after {seconds}"))
    except SystemExit as error:
        findings.append(Finding("exited", f"it called exit ({shown(error.code)}) instead of returning"))
    except BaseException as error:
        findings.append(_raised(error))
    finally:
        changed = [
            name
            for name, before, now in (
                ("gradient mode", grad_enabled, torch.is_grad_enabled()),
                ("default dtype", dtype, torch.get_default_dtype()),
            )
            if before != now
        ]
        torch.set_grad_enabled(grad_enabled)
        torch.set_default_dtype(dtype)
        sys.setrecursionlimit(limit)
    if changed:
        findings.append(Finding("settings-changed", f"torch's {' and '.join(changed)} was changed and left so"))
    if sink.characters > MOST_CHARACTERS:
        text = f"one call printed {sink.characters:,} characters"
        findings.append(Finding("printed-too-much", text, {"characters": sink.characters}))
    return returned, findings


def _raised(error: BaseException) -> Finding:
    message = shown(error, quoted=False)
    if isinstance(error, RuntimeError) and "does not require grad" in message:
        return Finding("no-gradient", f"backward had nothing to go back through: {message}")
    place = _last_line(error)
    return Finding("raised", f"it raised {type(error).__name__}{place}: {message}" if message else "it raised an error")


def _last_line(error: BaseException) -> str:
    """Name the line of the audited code that failed: the first one after ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return f" in line {trace.tb_lineno}" if trace is not None else ""


def shown(value: Any, *, quoted: bool = True) -> str:
    """Write a value that somebody's code made, in at most a line; whatever its repr does, this returns."""
    try:
        text = repr(value) if quoted else str(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:157]}..."
