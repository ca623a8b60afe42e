"""The process that runs the code: loads the file, audits, leaves its result as a file in the folder it is given."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any


class NotThere(Exception):
    """The file does not hold what was asked for."""


def main(order: dict[str, Any]) -> None:
    """Carry out an order and write what came out."""
    folder = Path(order["folder"])
    (folder / "started").touch()
    try:
        target = load(order["path"], order["name"])
    except NotThere as error:
        write(folder, {"error": str(error)})
        return
    except SystemExit as error:
        write(folder, {"error": f"{order['path']} calls exit ({error.code!r}) while it is loaded"})
        return
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        write(folder, {"error": f"{order['path']} could not be loaded: {reason}"})
        return
    (folder / "loaded").touch()
    options = {"task": order["task"], "seconds": order["seconds"]}
    from course_lib.audit import audit, audit_loop  # not before: a file that can't be loaded needs no torch

    further = {"drop_tail": order["drop_tail"]} if order["loop"] else {}
    report = (audit_loop if order["loop"] else audit)(target, **options, **further)
    findings = [
        {"code": finding.code, "sentence": finding.sentence, "numbers": dict(finding.numbers)}
        for finding in report.findings
    ]
    write(folder, {"findings": findings, "checked": report.checked})


def load(path: str, name: str) -> Any:
    """Load a file as a module, and return what it calls `name`; a class is made without arguments."""
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path]
    module_name = f"audited_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise NotThere(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            raise NotThere(f"{path} has no {name}")
        target = getattr(target, part)
    if inspect.isclass(target):
        target = target()
    if not callable(target):
        raise NotThere(f"{name} in {path} can't be called; it is a {type(target).__name__}")
    return target


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the result as a whole: it is there or it is not."""
    (folder / "result").write_text(json.dumps(content), encoding="utf-8")
    os.replace(folder / "result", folder / "done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # threads that the code has left running must not keep this process
