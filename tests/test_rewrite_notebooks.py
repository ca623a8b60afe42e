"""Tests of tests/rewrite_notebooks.py: the canonical form, and that running again changes no byte."""

import copy
import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.rewrite_notebooks import (
    PICTURE,
    WIDGET_VIEW,
    canonical,
    canonical_text,
    keep_measured_pictures,
    main,
    read,
    rewrite,
)

RANDOM_PICTURE = """\
import secrets


class Shown:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": secrets.token_hex(8), "text/plain": "a picture that is new each time"}


Shown()"""


def measured_cell(source, *pictures):
    outputs = [new_output("display_data", {PICTURE: picture, "text/plain": "p"}) for picture in pictures]
    return new_code_cell(source, outputs=outputs, metadata={"tags": ["measured"]})


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data[PICTURE] for output in outputs if PICTURE in output.get("data", {})]


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "01_try_the_tool.ipynb"
    cells = [
        new_markdown_cell("# Try the tool\n"),
        new_code_cell("import os, sys\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\nprint('two', flush=True)"),
        new_code_cell(RANDOM_PICTURE, metadata={"tags": ["measured"]}),
        new_code_cell("import ipywidgets\nipywidgets.IntSlider()"),
        new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]}),
    ]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_second_run_changes_no_byte(tiny, capsys):
    assert main(["--check", str(tiny)]) == 1
    assert "would change" in capsys.readouterr().out
    assert read(tiny).cells[1].execution_count is None
    assert main([str(tiny)]) == 0
    first = tiny.read_bytes()
    assert main([str(tiny)]) == 0
    assert tiny.read_bytes() == first
    assert capsys.readouterr().out.endswith("unchanged\n")
    assert main(["--check", str(tiny)]) == 0
    assert list(tiny.parent.iterdir()) == [tiny]

    notebook = read(tiny)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3, 4]
    assert [output.text for output in notebook.cells[1].outputs] == ["1\ntwo\n"]
    assert notebook.cells[4].outputs[0].traceback == ["ZeroDivisionError: division by zero"]
    assert WIDGET_VIEW not in first.decode()

    assert rewrite(tiny, renew=True)
    assert len(pictures(notebook)) == 1
    assert pictures(read(tiny)) != pictures(notebook)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("value = {}\nvalue['absent']", r"cell 2 \(value = \{\}\): KeyError: 'absent'"),
        ("import os\nos._exit(3)", "cell 2"),
    ],
)
def test_failing_notebook_is_named_and_left_as_it_was(tmp_path, capsys, source, error):
    path = tmp_path / "01_fail_the_run.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Fail"), new_code_cell(source)]), path)
    before = path.read_bytes()
    assert main([str(path)]) == 1
    message = capsys.readouterr().err
    assert "01_fail_the_run.ipynb" in message
    assert re.search(error, message)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_is_no_notebook_is_named(tmp_path, capsys):
    (tmp_path / "01_not_a_notebook.ipynb").write_text("# text", encoding="utf-8")
    assert main([str(tmp_path / "01_not_a_notebook.ipynb")]) == 1
    assert "failed: " in capsys.readouterr().err


def test_measured_picture_is_kept_while_the_source_is_the_same():
    stored = new_notebook(cells=[measured_cell("a", "old a"), measured_cell("b", "old b"), measured_cell("a", "old c")])
    fresh = new_notebook(cells=[measured_cell("a", "A"), measured_cell("b  # new", "B"), measured_cell("a\n", "C")])
    keep_measured_pictures(stored, fresh)
    assert pictures(fresh) == ["old a", "B", "old c"]


def test_measured_pictures_are_replaced_when_their_number_changed():
    stored = new_notebook(cells=[measured_cell("a", "old")])
    fresh = new_notebook(cells=[measured_cell("a", "new", "newer")])
    keep_measured_pictures(stored, fresh)
    assert pictures(fresh) == ["new", "newer"]


def test_picture_of_an_untagged_cell_is_never_kept():
    stored = new_notebook(cells=[measured_cell("a", "old")])
    fresh = new_notebook(cells=[measured_cell("a", "new")])
    fresh.cells[0].metadata.tags = []
    keep_measured_pictures(stored, fresh)
    assert pictures(fresh) == ["new"]


def untidy():
    view = {WIDGET_VIEW: {"model_id": "a"}, PICTURE: "AAAA", "text/plain": "A panel."}
    outputs = [
        new_output("display_data", view, metadata={PICTURE: {"alt": "A panel."}, WIDGET_VIEW: {}}),
        new_output("display_data", {WIDGET_VIEW: {"model_id": "b"}}),
        new_output("error", ename="ValueError", evalue="no", traceback=["File folder/a.py", "ValueError: no"]),
    ]
    machine = {"execution": {"iopub.execute_input": "2020-01-01T00:00:00Z"}, "trusted": True, "tags": ["measured"]}
    notebook = new_notebook(
        cells=[
            new_markdown_cell("# A\n\n", id="f00"),
            new_code_cell("1\n", id="ba5", outputs=outputs, metadata=machine),
        ]
    )
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "venv", "display_name": "mine", "language": "python"},
            "language_info": {"name": "python", "version": "3.11.7"},
            "widgets": {"application/vnd.jupyter.widget-state+json": {}},
        }
    )
    return notebook


def test_canonical_form_holds_nothing_of_machine_editor_or_chance():
    notebook = canonical(untidy())
    assert [cell.id for cell in notebook.cells] == ["cell-01", "cell-02"]
    assert [cell.source for cell in notebook.cells] == ["# A", "1"]
    assert notebook.cells[1].metadata == {"tags": ["measured"]}
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    panel, error = notebook.cells[1].outputs
    assert panel.data == {PICTURE: "AAAA", "text/plain": "A panel."}
    assert panel.metadata == {PICTURE: {"alt": "A panel."}}
    assert error.traceback == ["ValueError: no"]
    nbformat.validate(notebook)


def test_canonical_form_is_a_fixed_point_and_leaves_its_argument_alone():
    notebook = untidy()
    before = copy.deepcopy(notebook)
    text = canonical_text(notebook)
    assert notebook == before
    assert canonical_text(nbformat.reads(text, as_version=4)) == text
    assert text.endswith("}\n")
    assert list(json.loads(text)) == sorted(json.loads(text))
