"""Audit an update or a loop in a file: python -m course_lib.audit path/to/file.py:function

The code runs in a process of its own, so that nothing it does (exit, block, flood, crash) reaches this one.
Exit status: 0 passed, 1 findings, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from course_lib.audit.report import LOOP_CONTRACT, MEANT, UPDATE_CONTRACT, AuditReport, Finding

PASSED, FOUND, COULD_NOT_RUN = 0, 1, 2
START_SECONDS = 120.0  # to start Python and import torch, before the file is looked at
GRACE_SECONDS = 5.0  # for the child to notice by itself that its time is up
LOOK_SECONDS = 0.02


class CouldNotRun(Exception):
    """Why there is nothing to audit."""


def main(arguments: list[str] | None = None) -> int:
    """Audit what the command line names, print the report and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.audit", description=__doc__.splitlines()[0])
    parser.add_argument("target", help="path/to/file.py:function; also a class or an object that can be called")
    parser.add_argument("--loop", action="store_true", help="a loop (model, optimizer, loader, accumulation_steps)")
    parser.add_argument("--task", choices=("samples", "tokens"), default="samples")
    parser.add_argument("--drop-tail", action="store_true", help="of a loop: a short last group is meant to be dropped")
    parser.add_argument("--seconds", type=float, default=60.0, help="the audit is stopped after so long (60)")
    given = parser.parse_args(arguments)
    try:
        report = run(given)
    except CouldNotRun as error:
        print(f"Could not run: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    print(report.explain())
    return PASSED if report.passed else FOUND


def run(given: argparse.Namespace) -> AuditReport:
    """Start the child, wait for it as long as it may take, and return its report."""
    path, _, name = given.target.rpartition(":")
    if not path or not name:
        raise CouldNotRun(f"the target must be path/to/file.py:function; got {given.target!r}")
    if not Path(path).is_file():
        raise CouldNotRun(f"there is no file {path}")
    if not 0 < given.seconds < 1e6:
        raise CouldNotRun(f"--seconds must be above 0; got {given.seconds:g}")
    if given.drop_tail and not given.loop:
        raise CouldNotRun("--drop-tail belongs to --loop")
    order = {"path": str(Path(path).resolve()), "name": name, "loop": given.loop, "task": given.task}
    order |= {"drop_tail": given.drop_tail, "seconds": given.seconds}
    with tempfile.TemporaryDirectory(prefix="audit-", ignore_cleanup_errors=True) as folder:
        order["folder"] = folder
        child = subprocess.Popen(
            [sys.executable, "-m", "course_lib.audit.child", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [root(), *inherited_path()]))},
        )
        try:
            in_time = wait(child, Path(folder), given.seconds)
        finally:
            end(child)
        return result(Path(folder), child.returncode, given, in_time=in_time)


def root() -> Path:
    """Return the folder that holds this package, so that the child imports the same."""
    return Path(__file__).resolve().parent.parent.parent


def inherited_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def wait(child: subprocess.Popen, folder: Path, seconds: float) -> bool:
    """Wait until the child ends; False if it had to be given up."""
    limits = {"none": START_SECONDS, "started": max(seconds, START_SECONDS), "loaded": seconds + GRACE_SECONDS}
    stage, since = "none", time.monotonic()
    while child.poll() is None:
        now = stage_of(folder)
        if now != stage:
            stage, since = now, time.monotonic()
        if stage == "done":
            return True
        if time.monotonic() - since > limits[stage]:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def stage_of(folder: Path) -> str:
    """Say how far the child has come."""
    return next((stage for stage in ("done", "loaded", "started") if (folder / stage).exists()), "none")


def end(child: subprocess.Popen) -> None:
    """End the child and what it has started, by the session that it leads."""
    if child.poll() is None and not hasattr(os, "killpg"):
        child.kill()
    elif hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def result(folder: Path, status: int, given: argparse.Namespace, *, in_time: bool) -> AuditReport:
    """Make a report of what the child left behind."""
    contract = (LOOP_CONTRACT if given.loop else UPDATE_CONTRACT).format(meant=MEANT[given.task])
    what = "epochs" if given.loop else "updates"
    stage = stage_of(folder)
    if stage == "done":
        content: dict[str, Any] = json.loads((folder / "done").read_text(encoding="utf-8"))
        if "error" in content:
            raise CouldNotRun(content["error"])
        findings = tuple(Finding(**finding) for finding in content["findings"])
        return AuditReport(findings, contract, content["checked"], what)
    if stage != "loaded":
        ended = f"the process ended with status {status}" if in_time else "it took too long"
        raise CouldNotRun(f"{given.target} could not be loaded: {ended}")
    if in_time:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        finding = Finding("exited", f"it ended the whole process {how}", {"status": status})
    else:
        finding = Finding("ran-too-long", f"it was still running after {given.seconds:g} seconds, and blocked")
    return AuditReport((finding,), contract, 0, what)


if __name__ == "__main__":
    sys.exit(main())
