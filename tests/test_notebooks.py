"""Every notebook of the course keeps the rules, and the rules reject a folder of bad ones, each by its own fault."""

import ast
import json
import os
import subprocess
import sys

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebook_rules import LIBRARY, RULES, SECTIONS, Notebook, Sections, faults, main
from tests.rewrite_notebooks import NOTEBOOKS, PICTURE, WIDGET_VIEW, canonical_text

# The notebooks of the course


@pytest.mark.parametrize("name", SECTIONS)
def test_notebook_keeps_the_rules(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.is_file(), f"{name}.ipynb is in the table SECTIONS and not in notebooks/"
    assert faults(path) == []


def test_every_notebook_is_in_the_table():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(SECTIONS)


# A small course that keeps the rules

TABLE = {
    "00_start_here": Sections(
        panel=True, ledger=True, prediction=False, practice=False, interview=False, open_questions=1
    ),
    "01_add_the_numbers": Sections(exercises=True),
}
OPENING = "**You will do**: {do}. **You will learn**: {learn}. **You need**: {need}. **5 minutes.**"
ALT = "Twice the number, drawn as a line that rises."
LIBRARY_CODE = '''\
"""A library of one function."""


def double(number: int, *, times: int = 1) -> int:
    """Return twice the number, `times` times over."""
    result: int = number
    for _ in range(times):  # once more
        result = 2 * result
    return result
'''
SHOWN_CODE = """\
def double(number, *, times=1):
    result = number
    for _ in range(times):
        result = 2 * result
    return result"""


def prose(text):
    return new_markdown_cell(text)


def code(source, *outputs, tags=()):
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)} if tags else {})


def printed(text):
    return new_output("stream", name="stdout", text=text)


def result(text, **data):
    pictured = {PICTURE: data["png"], "text/plain": text} if data else {"text/plain": text}
    metadata = {PICTURE: {"alt": text}} if data else {}
    return new_output("execute_result", pictured, metadata=metadata)


def start_here():
    claims = (
        "| # | claim | tested in | verdict | condition |\n| --- | --- | --- | --- | --- |\n"
        "| 1 | Doubling adds | [01](01_add_the_numbers.ipynb#First,-guess), 02 | true if | the number is finite |\n"
        "| 2 | Doubling is free | 02 | half true | |"
    )
    return [
        prose("# Start here\n\n" + OPENING.format(do="look", learn="the map", need="nothing")),
        prose("[Forward](01_add_the_numbers.ipynb)"),
        code("from course_lib.predictions import predict\n\npredict('left open', None)", printed("No guess yet.\n")),
        prose("Move it."),
        code(
            "from course_lib.explorers import hello_panel\n\nhello_panel()",
            result("A panel with two controls.", png="AA"),
        ),
        prose("## The claims\n\n" + claims),
    ]


def add_the_numbers():
    return [
        prose("# Add the numbers\n\n" + OPENING.format(do="add", learn="sums", need="00")),
        prose("[Back](00_start_here.ipynb)\n\n## First, guess\n\nHow many is twice 8?"),
        code(
            "from course_lib.predictions import confront, predict\n\npredict('how many', None)",
            printed("No guess yet.\n"),
        ),
        prose("A function, built in sight."),
        code(SHOWN_CODE),
        prose("The library has it too."),
        code("from course_lib.batches import double\n\ndouble(8)", result("16")),
        prose("It *is* right, and `double(0)` writes `![](nowhere.png)` as code."),
        code("assert double(2) == 4", tags=["claim-1"]),
        prose("Draw it."),
        code("draw(double)", result(ALT, png="AAAA")),
        prose("It fails where it should."),
        code("double('a', times=None)", failure("TypeError", "no"), tags=["raises-exception"]),
        prose("## Exercise\n\nYour turn."),
        code("def triple(number):\n    ...", tags=["exercise"]),
        code("check(triple)", printed("not attempted\n"), tags=["check"]),
        prose("And your guess?"),
        code("confront('how many', 16)", printed("It is 16. You made no guess.\n")),
        prose("## In practice\n\nSee [the manual](https://example.org/manual) and [the map](../README.md#the-map)."),
        prose(
            "## In an interview\n\n**Question**: Why?\n\n**Answer**: So.\n\n**Follow-up**: Always?\n\n"
            "**Evidence**: [the first cell](#First,-guess)."
        ),
    ]


def failure(name, text):
    return new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])


def store(cells, path):
    """Write cells as a notebook that was run from top to bottom, in canonical form unless a cell forbids it."""
    count = 0
    for cell in cells:
        if cell.cell_type == "code" and cell.execution_count is None and not cell.metadata.pop("unrun", False):
            count += 1
            cell.execution_count = count
    path.write_text(canonical_text(new_notebook(cells=cells)), encoding="utf-8")


@pytest.fixture
def course(tmp_path):
    (tmp_path / "course_lib").mkdir()
    (tmp_path / "course_lib" / "batches.py").write_text(LIBRARY_CODE, encoding="utf-8")
    (tmp_path / "README.md").write_text("# Read me\n\n## The map\n\n```\n## Not a heading\n```\n", encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    store(start_here(), tmp_path / "notebooks" / "00_start_here.ipynb")
    store(add_the_numbers(), tmp_path / "notebooks" / "01_add_the_numbers.ipynb")
    return tmp_path


def faults_in(course, name, table=TABLE):
    return faults(course / "notebooks" / name, table, course / "course_lib")


def test_good_notebooks_are_accepted(course):
    assert faults_in(course, "00_start_here.ipynb") == []
    assert faults_in(course, "01_add_the_numbers.ipynb") == []


# The folder of bad ones: a change to the cells of a good notebook, and what the rules must say about it

BAD = {}


def bad(fault, name="01_add_the_numbers.ipynb", **options):
    """Register a change of the good notebook `name`; every sentence about the result must hold the text `fault`."""

    def register(change):
        BAD[change.__name__] = (change, fault, name, options)
        return change

    return register


def at(cells, text):
    """Return the place of the first cell whose source holds `text`."""
    return next(place for place, cell in enumerate(cells) if text in cell.source)


def answers(cells, *outputs):
    cells[at(cells, "double(8)")].outputs = list(outputs)


def replace(cells, old, new):
    cell = cells[at(cells, old)]
    cell.source = cell.source.replace(old, new)


@bad("cell 7 was never run")
def never_run(cells):
    cell = cells[at(cells, "double(8)")]
    count = 0
    for one in cells:
        if one.cell_type == "code":
            count += 1
            one.execution_count = count
    cell.metadata["unrun"], cell.execution_count = True, None


@bad("ran out of order")
def run_out_of_order(cells):
    count = 0
    for cell in cells:
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = {3: 4, 4: 3}.get(count, count)


@bad("ran out of order")
def run_twice(cells):
    cells[at(cells, "confront('how many'")].execution_count = 10


@bad("cell 7 is an empty code cell")
def empty_code_cell(cells):
    cells[at(cells, "draw(double)")].source += "\ndouble(8)"
    cells[at(cells, "double(8)")].source = "from course_lib.batches import double"
    cells[at(cells, "from course_lib.batches")].source = ""


@bad("cell 7 has error output (ValueError) without the tag raises-exception")
def error_output(cells):
    answers(cells, failure("ValueError", "no"))


@bad("has the tag raises-exception and no error output")
def announced_error_missing(cells):
    cells[at(cells, "times=None")].outputs = []


@bad("cell 7 has output on stderr: UserWarning: careful")
def stderr(cells):
    answers(cells, new_output("stream", name="stderr", text="UserWarning: careful\n"))


@bad("cell 7 shows a memory address: 0x7f3a2c41b0d0")
def memory_address(cells):
    answers(cells, result("<object object at 0x7f3a2c41b0d0>"))


@bad("cell 13 shows a memory address")
def memory_address_in_an_error(cells):
    cells[at(cells, "times=None")].outputs = [failure("TypeError", "<function f at 0x7f3a2c41b0d0>")]


@bad("cell 7 shows a time or a speed: 12.3 ms")
def time(cells):
    answers(cells, printed("an update takes 12.3 ms here\n"))


@bad("cell 7 shows a time or a speed: 1840 samples/s")
def speed(cells):
    answers(cells, printed("1840 samples/s\n"))


@bad("cell 11 shows a time or a speed: 3.2 s")
def time_in_the_words_of_a_picture(cells):
    cells[at(cells, "draw(double)")].outputs = [result("A line that takes 3.2 s to draw.", png="AAAA")]


@bad("cell 7 shows a progress bar")
def progress_bar(cells):
    answers(cells, printed(" 45%|████▌     | 45/100\n"))


@bad("cell 7 shows a progress bar")
def progress_line(cells):
    answers(cells, printed("epoch 1\repoch 2\n"))


@bad("cell 7 shows a bare widget: IntSlider(value=")
def bare_widget(cells):
    answers(cells, result("IntSlider(value=4, max=16)"))


@bad("cell 7 shows a bare figure: <Figure size")
def bare_figure(cells):
    answers(cells, result("<Figure size 640x480 with 1 Axes>"))


@bad("cell 11 shows a picture", exactly=3)
def picture_without_words(cells):
    output = cells[at(cells, "draw(double)")].outputs[0]
    output.metadata, output.data["text/plain"] = {}, "<Figure size 640x480 with 1 Axes>"
    output.data["text/plain"] = "<Picture>"
    cells[at(cells, "draw(double)")].outputs.append(result("short", png="AAAA"))
    cells[at(cells, "draw(double)")].outputs[-1].metadata = {PICTURE: {"alt": ALT}}


@bad("cell 4 has a picture without alternative text", exactly=1)
def markdown_picture_without_words(cells):
    replace(cells, "A function, built in sight.", "![](../README.md)")


@bad("cell 7 has a line with a trailing semicolon: double(8);")
def trailing_semicolon(cells):
    replace(cells, "double(8)", "double(8);  # quiet")


@bad("cell 13 has a line with a trailing semicolon: double((8);")
def trailing_semicolon_in_broken_code(cells):
    cells[at(cells, "times=None")].source = "double((8);"


@bad("cell 7 has 26 lines of code, more than 25")
def cell_too_long(cells):
    replace(cells, "double(8)", "double(8)\n" * 24)


@bad("cells 9 and 10 are code with no prose between")
def two_code_cells(cells):
    del cells[at(cells, "Draw it.")]


@bad("cell 10 is prose without a word")
def prose_without_a_word(cells):
    replace(cells, "Draw it.", "<!-- nothing to say -->")


@bad("uses Output, which swallows errors")
def output_widget(cells):
    replace(cells, "draw(double)", "import ipywidgets\nipywidgets.Output()")


@bad("uses interact, which swallows errors")
def interact(cells):
    replace(cells, "draw(double)", "from ipywidgets import interact\ndraw(double)")


@bad("has a broken link to 02_not_there.ipynb: there is no such file")
def broken_link(cells):
    replace(cells, "Draw it.", "Draw it as [there](02_not_there.ipynb).")


@bad("has a broken link to 00_start_here.ipynb#the-claims: there is no such heading, but The-claims")
def broken_anchor_in_a_notebook(cells):
    replace(
        cells, "Draw it.", "See [the claims](00_start_here.ipynb#The-claims), [again](00_start_here.ipynb#the-claims)."
    )


@bad("has a broken link to ../README.md#not-a-heading")
def broken_anchor_in_markdown(cells):
    replace(cells, "#the-map", "#not-a-heading")


@bad("has a broken link to nowhere.png")
def broken_reference_and_picture(cells):
    replace(cells, "Draw it.", "![A line][1]\n\n[1]: nowhere.png")


@bad("a path from the root is another one on every machine")
def link_from_the_root(cells):
    replace(cells, "Draw it.", "[here](/tmp)")


@bad("it leaves the project")
def link_out_of_the_project(cells):
    replace(cells, "Draw it.", "[up](../../)")


@bad("the title 'Add numbers' and the file's name differ")
def other_title(cells):
    replace(cells, "# Add the numbers", "# Add numbers")


@bad("must begin with its one title, a heading of the first rank; it has 2")
def two_titles(cells):
    replace(cells, "Draw it.", "# Draw it")


@bad("nothing before the first code says", exactly=4)
def no_opening(cells):
    cells[0].source = "# Add the numbers"


@bad("nothing before the first code links back to 00_start_here.ipynb")
def no_way_back(cells):
    replace(cells, "[Back](00_start_here.ipynb)", "No way back.")


@bad("nothing before the first code links forward to 01_add_the_numbers.ipynb", "00_start_here.ipynb")
def no_way_forward(cells):
    replace(cells, "[Forward](01_add_the_numbers.ipynb)", "No way forward.")


@bad("asks for no prediction")
def no_prediction(cells):
    replace(cells, "predict('how many', None)", "print('No guess yet.')")
    replace(cells, "confront('how many', 16)", "print('It is 16.')")


@bad("asked with predict and never confronted: 'how many'")
def prediction_forgotten(cells):
    replace(cells, "confront('how many', 16)", "print('It is 16.')")


@bad("'how few'", exactly=1)
def other_question_confronted(cells):
    replace(cells, "predict('how many', None)", "predict('how many', None)\npredict('how few', None)")


@bad("confronts 'how many', which no earlier cell asks")
def confronted_too_early(cells):
    replace(cells, "predict('how many', None)", "confront('how many', 16)")
    replace(cells, "confront('how many', 16)", "confront('how many', 16)")
    cells[at(cells, "draw(double)")].source = "predict('how many', None)\ndraw(double)"


@bad("the stored guess must be None")
def guess_left_in(cells):
    replace(cells, "predict('how many', None)", "predict('how many', guess=16)")


@bad("out of sight on a narrow page")
def guess_far_to_the_right(cells):
    longer = "how many" + " in words" * 8
    replace(cells, "predict('how many', None)", f"predict('{longer}', None)")
    replace(cells, "confront('how many', 16)", f"confront('{longer}', 16)")


@bad("no cell shows a live panel", "00_start_here.ipynb")
def no_panel(cells):
    replace(cells, "hello_panel()", "print()")


@bad("cell 5 shows a live panel and stores no picture of it", "00_start_here.ipynb")
def panel_without_a_picture(cells):
    cells[at(cells, "hello_panel()")].outputs = [result("A panel with two controls.")]


@bad("is an exercise without a check in the next cell")
def exercise_without_a_check(cells):
    cells.insert(at(cells, "check(triple)"), prose("Later."))


@bad("the notebook has no exercise")
def no_exercise(cells):
    place = at(cells, "def triple")
    del cells[place : place + 2]
    del cells[at(cells, "And your guess?")]


@bad("there is no section In practice")
def no_practice(cells):
    replace(cells, "## In practice", "## Elsewhere")


@bad("In practice links to no source")
def practice_without_a_source(cells):
    replace(cells, "https://example.org/manual", "../README.md")


@bad("there is no section In an interview")
def no_interview(cells):
    replace(cells, "## In an interview", "## The end")


@bad("In an interview has no follow-up")
def interview_without_a_follow_up(cells):
    replace(cells, "**Follow-up**: Always?", "")


@bad("In an interview links to no cell as evidence")
def interview_without_evidence(cells):
    replace(cells, "[the first cell](#First,-guess)", "the first cell")


@bad("In an interview must come after In practice")
def interview_first(cells):
    cells[-1], cells[-2] = cells[-2], cells[-1]


@bad("shows a double that differs from course_lib.batches.double")
def shown_code_differs(cells):
    replace(cells, "2 * result", "result + 2")


@bad("shows course_lib.batches.halve, which the library does not have")
def shown_code_is_not_there(cells):
    cells[at(cells, "def double")].metadata = {"tags": ["shown:course_lib.batches.halve"]}


@bad("and does not define double")
def shown_code_is_not_shown(cells):
    cells[at(cells, "draw(double)")].metadata = {"tags": ["shown:course_lib.batches.double"]}


@bad("claim 1 has no evidence in 01_add_the_numbers.ipynb", "00_start_here.ipynb")
def claim_without_evidence(cells):
    replace(cells, "| 1 | Doubling adds", "| 1 | Doubling always adds")


@bad("row 2 of the claims has the number '3'", "00_start_here.ipynb")
def claim_miscounted(cells):
    replace(cells, "| 2 | ", "| 3 | ")


@bad("claim 2 has the verdict 'maybe'", "00_start_here.ipynb")
def claim_without_a_verdict(cells):
    replace(cells, "half true", "maybe")


@bad("claim 2 names notebook 01, which exists, without a link", "00_start_here.ipynb")
def claim_without_a_link(cells):
    replace(cells, "free | 02", "free | 01, 02")


@bad("there is no table of claims", "00_start_here.ipynb")
def no_claims(cells):
    replace(cells, "| claim |", "| sentence |")


@bad("cell 7 has the tag claim-2, but no such row of the claims links to this notebook")
def evidence_without_a_claim(cells):
    cells[at(cells, "double(8)")].metadata = {"tags": ["claim-2"]}


def write_bad_notebook(course, kind):
    change, fault, name, options = BAD[kind]
    cells = start_here() if name == "00_start_here.ipynb" else add_the_numbers()
    change(cells)
    store(cells, course / "notebooks" / name)
    if change is claim_without_evidence:
        other = add_the_numbers()
        other[at(other, "assert")].source = "double(2) == 4"
        store(other, course / "notebooks" / "01_add_the_numbers.ipynb")
    return name, fault, options.get("exactly")


@pytest.mark.parametrize("kind", BAD)
def test_bad_notebook_is_rejected_for_its_fault_and_no_other(course, kind):
    name, fault, exactly = write_bad_notebook(course, kind)
    sentences = faults_in(course, name)
    assert sentences
    assert [sentence for sentence in sentences if not sentence.startswith(f"{name}: ") or fault not in sentence] == []
    assert exactly in (None, len(sentences))


def widget_view(notebook):
    notebook["cells"][6]["outputs"][0]["data"][WIDGET_VIEW] = {"model_id": "a1", "version_major": 2}


def widget_metadata(notebook):
    notebook["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def random_cell_id(notebook):
    notebook["cells"][6]["id"] = "8f3b2c1d"


def machine_metadata(notebook):
    notebook["metadata"]["language_info"]["version"] = "3.11.7"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (widget_view, "cell 7 stores a widget view"),
        (widget_metadata, "the metadata hold widget state"),
        (random_cell_id, None),
        (machine_metadata, None),
    ],
)
def test_what_rewriting_takes_out_is_rejected(course, change, fault):
    path = course / "notebooks" / "01_add_the_numbers.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    change(notebook)
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    wanted = ["the file is not in canonical form"] + ([fault] if fault else [])
    sentences = faults_in(course, path.name)
    assert len(sentences) == len(wanted)
    assert all(any(one in sentence for sentence in sentences) for one in wanted)


def test_file_that_is_no_notebook_is_rejected(course):
    path = course / "notebooks" / "01_add_the_numbers.ipynb"
    path.write_text("# text", encoding="utf-8")
    assert "01_add_the_numbers.ipynb: not a valid notebook" in faults_in(course, path.name)[0]


@pytest.mark.parametrize("name", ["add_the_numbers", "01_add", "1_add_the_numbers", "01-add-the-numbers"])
def test_name_of_another_form_is_rejected(course, name):
    path = course / "notebooks" / f"{name}.ipynb"
    (course / "notebooks" / "01_add_the_numbers.ipynb").rename(path)
    sentences = faults_in(course, path.name)
    assert any("not of the form NN_verb_the_thing.ipynb" in sentence for sentence in sentences)
    assert any("not in the table SECTIONS" in sentence for sentence in sentences)


def test_every_rule_rejects_a_notebook_of_the_folder(course):
    rejecting = {"no_widget_state", "file_is_canonical"}  # seen to reject what rewriting takes out, above
    for kind in BAD:
        store(start_here(), course / "notebooks" / "00_start_here.ipynb")
        store(add_the_numbers(), course / "notebooks" / "01_add_the_numbers.ipynb")
        name, _, _ = write_bad_notebook(course, kind)
        notebook = Notebook(course / "notebooks" / name, TABLE, course / "course_lib")
        rejecting |= {rule.__name__ for rule in RULES if any(rule(notebook))}
    assert rejecting == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    "text",
    [
        "16 samples, 4 steps, 64 digits",
        "peak 12.5 MiB of 64 MiB",
        "4 x 16 = 64; agree to 1e-9: True",
        "3 sets of 2 samples",
        "0xff is 255",
        "| 45 % | 12 |",
        "Update(loss=2.3, count=64)",
    ],
)
def test_harmless_outputs_are_accepted(course, text):
    cells = add_the_numbers()
    answers(cells, printed(text + "\n"))
    store(cells, course / "notebooks" / "01_add_the_numbers.ipynb")
    assert faults_in(course, "01_add_the_numbers.ipynb") == []


def test_code_of_the_real_library_is_found_and_compared(course):
    tree = ast.parse((LIBRARY / "batches.py").read_text(encoding="utf-8"))
    source = ast.unparse(next(node for node in tree.body if getattr(node, "name", "") == "group_sizes"))
    path = course / "notebooks" / "01_add_the_numbers.ipynb"
    for shown, wanted in ((source, 0), (source.replace("+", "-").replace("//", "%"), 1)):
        cells = add_the_numbers()
        cells[at(cells, "def double")] = code(shown, tags=["shown:course_lib.batches.group_sizes"])
        cells[at(cells, "course_lib.batches import double")].source = "double = group_sizes"
        store(cells, path)
        sentences = faults(path, TABLE, LIBRARY)
        assert len(sentences) == wanted
        assert all("differs from course_lib.batches.group_sizes" in sentence for sentence in sentences)


def test_command_line_says_what_is_wrong(course, capsys):
    assert main([str(course / "notebooks" / "01_add_the_numbers.ipynb")]) == 1
    assert "not in the table SECTIONS" in capsys.readouterr().out


# That stored outputs are what the code gives is for nbval to say: see that it does


def test_nbval_rejects_a_changed_output(tmp_path):
    cells = [code("1 + 1", result("2")), prose("Now print."), code("print('two')", printed("two\n"))]
    store(cells, tmp_path / "01_good.ipynb")
    cells[0].outputs = [result("3")]
    store(cells, tmp_path / "02_bad.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 1
    assert "1 failed, 3 passed" in run.stdout
    assert "02_bad" in run.stdout.partition("short test summary")[2]
