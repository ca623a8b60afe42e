"""Run notebooks from a clean kernel and store them in the one canonical form.

    python -m tests.rewrite_notebooks                     all of notebooks/
    python -m tests.rewrite_notebooks notebooks/02*.ipynb   these only
    python -m tests.rewrite_notebooks --check             change nothing, say what would change
    python -m tests.rewrite_notebooks --renew             draw the pictures of `measured` cells anew too

A second run changes no byte. Cells tagged `measured` keep the picture they have unless their source changed, because a
picture of times is different on every run. A notebook that fails is left as it was.
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT_SECONDS = 120
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURE = "image/png"

# One thread, so that sums are added in one order everywhere; no messages of the profiler on stderr.
KERNEL_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


class RewriteError(Exception):
    """A notebook could not be run; the message names the notebook, the cell and the error."""


def read(path: Path) -> NotebookNode:
    """Read a notebook as format 4; raises nbformat's own errors for a file that is none."""
    return nbformat.read(path, as_version=4)


def canonical(notebook: NotebookNode) -> NotebookNode:
    """Return a copy in canonical form: what the machine, the editor or chance put in is gone, the content is untouched.

    Cell ids are ordinal, the kernel is python3, of `language_info` only the name stays, of cell metadata only tags and
    folding. Widget views go from the outputs, widget state from the metadata, and of an error its last line stays.
    """
    # Through JSON and back: a deep copy whose split or joined source lines are the same whatever the editor wrote.
    notebook = nbformat.reads(nbformat.writes(notebook), as_version=4)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.source = cell.source.strip("\n")
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in ("jupyter", "tags") if cell.metadata.get(key)})
        if cell.cell_type == "code":
            cell.outputs = [output for output in map(_canonical_output, cell.outputs) if output is not None]
    notebook.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3 (ipykernel)", language="python", name="python3"),
        language_info=NotebookNode(name="python"),
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def _canonical_output(output: NotebookNode) -> NotebookNode | None:
    """Return `output` without its widget view, or None if it was nothing else."""
    if output.output_type == "error":
        # The traceback holds paths of this machine; what the reader needs is the error itself.
        output.traceback = [f"{output.ename}: {output.evalue}"]
    if "data" not in output:
        return output
    output.data.pop(WIDGET_VIEW, None)
    output.metadata = NotebookNode({key: value for key, value in output.metadata.items() if key in output.data})
    return output if output.data else None


def canonical_text(notebook: NotebookNode) -> str:
    """Return the canonical form of `notebook` as the text of its file."""
    return nbformat.writes(canonical(notebook)) + "\n"


def run(path: Path) -> NotebookNode:
    """Run the notebook at `path` from a clean kernel, in its own folder, and return it with its new outputs.

    Raises RewriteError, naming notebook, cell and error, for an exception in a cell without the tag `raises-exception`,
    a cell over the time limit, or a kernel that died.
    """
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # Without it every kernel warns that it speaks TCP on this machine.
        timeout=CELL_TIMEOUT_SECONDS,
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )
    try:
        client.execute(env=_kernel_environment())
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RewriteError(f"{path.name}: {_where(notebook)}: {_in_a_line(error)}") from error
    return notebook


def _kernel_environment() -> dict[str, str]:
    # This checkout first, so that the notebook runs the code beside it and not another installed copy.
    python_path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, **KERNEL_ENVIRONMENT, "PYTHONPATH": python_path}


def _where(notebook: NotebookNode) -> str:
    """Name the cell that was running when the run ended: the first code cell with an error, or the last one begun."""
    last_begun = "before the first cell"
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code":
            continue
        name = f"cell {number} ({cell.source.strip().splitlines()[0] if cell.source.strip() else 'empty'})"
        tags = cell.metadata.get("tags", [])
        if any(output.output_type == "error" for output in cell.outputs) and "raises-exception" not in tags:
            return name
        if cell.execution_count is not None or cell.outputs:
            last_begun = f"in or after {name}"
    return last_begun


def _in_a_line(error: Exception) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {error.evalue}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def keep_measured_pictures(stored: NotebookNode, fresh: NotebookNode) -> None:
    """Put the pictures stored with `measured` cells back into `fresh`, cell by cell, where the source is the same."""
    pictures = defaultdict(list)
    for cell in stored.cells:
        if _is_measured(cell):
            pictures[cell.source.strip("\n")].append(_pictures(cell))
    for cell in fresh.cells:
        if not _is_measured(cell) or not pictures[cell.source.strip("\n")]:
            continue
        old, new = pictures[cell.source.strip("\n")].pop(0), _pictures(cell)
        if len(old) == len(new):
            for before, now in zip(old, new, strict=True):
                now.data[PICTURE] = before.data[PICTURE]
                if PICTURE in before.metadata:
                    now.metadata[PICTURE] = before.metadata[PICTURE]


def _is_measured(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and "measured" in cell.metadata.get("tags", [])


def _pictures(cell: NotebookNode) -> list[NotebookNode]:
    return [output for output in cell.outputs if PICTURE in output.get("data", {})]


def rewrite(path: Path, *, check: bool = False, renew: bool = False) -> bool:
    """Run one notebook and store it in canonical form; return whether its file changed (with `check`: would change).

    With `renew` the pictures of `measured` cells are drawn anew. The file is replaced in one step or not at all.
    Raises RewriteError if the notebook does not run.
    """
    stored = read(path)
    fresh = run(path)
    if not renew:
        keep_measured_pictures(stored, fresh)
    text = canonical_text(fresh)
    if text == path.read_text(encoding="utf-8"):
        return False
    if not check:
        _replace(path, text)
    return True


def _replace(path: Path, text: str) -> None:
    """Write `text` beside `path`, then move it there, so that a reader never sees half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; return 0, or 1 if a notebook failed or, with --check, would change."""
    parser = argparse.ArgumentParser(prog="python -m tests.rewrite_notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; by default all of notebooks/")
    parser.add_argument("--check", action="store_true", help="change nothing, say what would change")
    parser.add_argument("--renew", action="store_true", help="draw the pictures of measured cells anew too")
    options = parser.parse_args(arguments)
    paths = options.paths or sorted(NOTEBOOKS.glob("*.ipynb"))
    changed = failed = 0
    for path in paths:
        try:
            if rewrite(path, check=options.check, renew=options.renew):
                changed += 1
                print(f"{path.name}: {'would change' if options.check else 'rewritten'}", flush=True)
            else:
                print(f"{path.name}: unchanged", flush=True)
        except (RewriteError, OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
            failed += 1
            print(f"failed: {error}", file=sys.stderr, flush=True)
    return 1 if failed or (options.check and changed) else 0


if __name__ == "__main__":
    sys.exit(main())
