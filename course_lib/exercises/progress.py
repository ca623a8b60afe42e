"""The learner's progress: a small file beside the notebooks, and nowhere else.

It is a help, never a condition: where it can't be read it counts as empty, where it can't be written a check says so
in one line and goes on. Delete the file to begin anew.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE_NAME = ".course_progress.json"


def progress_path() -> Path:
    """Return where progress is kept: in the folder that the notebook runs in."""
    return Path.cwd() / FILE_NAME


def read_progress() -> dict[str, dict[str, Any]]:
    """Return what is kept of each exercise by number; empty for a missing or broken file."""
    try:
        content = json.loads(progress_path().read_text(encoding="utf-8"))
        kept = content["exercises"]
        return {
            str(number): {"right": entry["right"] is True, "attempts": int(entry["attempts"])}
            for number, entry in kept.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def keep(number: str, *, right: bool) -> str | None:
    """Note an attempt; once right, an exercise stays right. Return a sentence where it could not be written, else None.

    The file is replaced as a whole, so that an interrupted write leaves the old one.
    """
    kept = read_progress()
    before = kept.get(number, {"right": False, "attempts": 0})
    kept[number] = {"right": before["right"] or right, "attempts": before["attempts"] + 1}
    text = json.dumps({"exercises": dict(sorted(kept.items()))}, indent=1)
    temporary = None
    try:
        path = progress_path()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{FILE_NAME}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        return "(Your progress could not be written to the notebook's folder.)"
    return None
