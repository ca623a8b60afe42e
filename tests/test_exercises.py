"""Every declared exercise: its stub, hints, solution, right and wrong answers; the engine and the progress file."""

import os
import subprocess
import sys

import nbformat
import pytest

from course_lib.exercises import check, exercises, hint, progress, solution
from course_lib.exercises import engine as engine_module
from course_lib.exercises.engine import Exercise, find, is_untouched, run_answer, verdict
from course_lib.exercises.progress import FILE_NAME, read_progress
from tests.rewrite_notebooks import NOTEBOOKS, ROOT

ALL = exercises()
EACH = pytest.mark.parametrize("number", ALL)
UNTOUCHED = "Not attempted yet. "


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Keep progress in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- every exercise --------------------------------------------------------------------------------------------------


@EACH
def test_the_stub_is_not_attempted_and_leaves_no_trace(number, capsys, own_folder):
    exercise = ALL[number]
    check(number, exercise.define(exercise.stub))
    assert capsys.readouterr().out.startswith(UNTOUCHED)
    assert list(own_folder.iterdir()) == []


@EACH
def test_the_stub_is_not_attempted_where_a_kernel_compiles_it_too(number):
    exercise, namespace = ALL[number], {}
    exec(f"{exercise.setup}\n{exercise.stub}", namespace)  # this file has no `from __future__`, as a kernel has none
    assert is_untouched(exercise, namespace[exercise.answer])


@EACH
def test_the_solution_and_at_least_two_other_right_answers_are_accepted(number):
    exercise = ALL[number]
    answers = [exercise.define(exercise.solution), *exercise.right]
    assert len(answers) >= 3
    for answer in answers:
        assert not is_untouched(exercise, answer)
        assert verdict(exercise, answer) is None, getattr(answer, "__name__", answer)


@EACH
def test_at_least_eight_wrong_answers_each_get_a_message_of_their_own(number):
    exercise = ALL[number]
    messages = {}
    for phrase, answer in exercise.wrong.items():
        message = verdict(exercise, answer)
        assert message is not None, f"accepted: {answer}"
        assert phrase in message, f"{getattr(answer, '__name__', answer)}: {message}"
        assert "The check could not use" not in message
        messages[phrase] = message
    assert len(messages) >= 8
    assert len(set(messages.values())) == len(messages)


@EACH
def test_the_stub_itself_is_no_right_answer(number):
    exercise = ALL[number]
    assert verdict(exercise, exercise.define(exercise.stub)) is not None


@EACH
def test_what_a_notebook_shows_of_an_exercise_is_complete(number):
    exercise = ALL[number]
    assert len(exercise.stub.strip().splitlines()) <= 20
    assert exercise.number in exercise.heading
    assert f"about {exercise.minutes} minutes" in exercise.heading
    assert exercise.help.count("<details>") == exercise.help.count("</details>") == 4
    assert exercise.solution.strip() in exercise.help
    assert len(set(exercise.hints)) == 3


def notebook_cells(name):
    return nbformat.read(NOTEBOOKS / name, as_version=4).cells


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_the_exercises_as_they_are_declared(path):
    cells = notebook_cells(path.name)
    tagged = [place for place, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])]
    declared = list(exercises(path.stem[:2]).values())
    if not tagged:
        return
    assert len(tagged) == len(declared)
    for place, exercise in zip(tagged, declared, strict=True):
        assert cells[place].source.strip() == exercise.stub.strip()
        assert cells[place - 1].source.strip() == exercise.heading.strip()
        assert cells[place + 1].source.strip() == exercise.call
        assert "check" in cells[place + 1].metadata.tags
        assert cells[place + 1].outputs[0].text.startswith(UNTOUCHED)
        assert cells[place + 2].source.strip() == exercise.help.strip()


# ---- the engine ------------------------------------------------------------------------------------------------------


def an_exercise(judge=lambda answer: None, **changes):
    fields = dict(
        number="99.1",
        title="try",
        task="Do.",
        difficulty=1,
        importance=1,
        minutes=1,
        answer="answer",
        stub="def answer(x): ...",
        judge=judge,
        hints=("a", "b", "c"),
        solution="def answer(x): return x",
        closing="Well.",
        right=(),
        wrong={},
    )
    return Exercise(**{**fields, **changes})


@pytest.fixture
def one(monkeypatch):
    """Put an exercise of the test's own in the place of the declared ones."""

    def put(*args, **changes):
        exercise = an_exercise(*args, **changes)
        monkeypatch.setattr(engine_module, "find", lambda number: exercise)
        monkeypatch.setattr(engine_module, "exercises", lambda notebook=None: {"99.1": exercise})
        return exercise

    return put


def test_empty_functions_of_every_form_are_not_attempted():
    exercise = an_exercise()
    for body in ("...", "pass", "return None", "return ...", "return", "'Do it.'", "'Do it.'\n    return ..."):
        assert is_untouched(exercise, exercise.define(f"def answer(x):\n    {body}")), body
    assert is_untouched(exercise, None)
    assert is_untouched(exercise, ...)
    for body in ("return 0", "return x", "print(x)", "x = 1", "return 'text'", "raise ValueError"):
        assert not is_untouched(exercise, exercise.define(f"def answer(x):\n    {body}")), body


def test_a_given_function_is_touched_by_a_change_of_one_string_or_number():
    stub = "def answer(x):\n    return f(x, reduction='mean', n=1)"
    exercise = an_exercise(stub=stub)
    assert is_untouched(exercise, exercise.define("\n\n" + stub + "  # my note"))
    for old, new in (("mean", "sum"), ("n=1", "n=1.0"), ("f(x", "g(x"), ("n=1", "m=1")):
        assert not is_untouched(exercise, exercise.define(stub.replace(old, new))), new


def test_a_check_never_raises_whatever_the_judge_meets(one, capsys):
    class Strange(BaseException):
        def __str__(self):
            raise ValueError

    def judge(answer):
        raise Strange

    one(judge)
    check("99.1", 5)
    assert "The check could not use your answer: Strange" in capsys.readouterr().out


def test_an_unknown_exercise_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'77\.7'.*02\.1"):
        check("77.7", 1)
    assert find("02.1").answer == "my_update"


def test_run_answer_says_what_a_function_did_and_stops_one_that_hangs():
    def hangs(x):
        while True:
            pass

    for function, phrase in (
        (hangs, r"With 3, it was still running after 0\.2 seconds"),
        (lambda x: 1 / 0, "ZeroDivisionError in line"),
        (lambda: 0, "raised TypeError"),
        (7, "It must be a function; it is 7"),
    ):
        with pytest.raises(engine_module.NotYet, match=phrase):
            run_answer(function, 3, seconds=0.2)
    assert run_answer(lambda x: x + 1, 3) == 4


def test_hints_and_solution_are_printed_on_request(capsys):
    for strength in (1, 2, 3):
        hint("02.1", strength)
        assert capsys.readouterr().out.strip() == ALL["02.1"].hints[strength - 1]
    solution("02.1")
    assert "optimizer.zero_grad()" in capsys.readouterr().out
    with pytest.raises(ValueError, match="strength must be 1 to 3; got 4"):
        hint("02.1", 4)


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_counts_attempts_and_stays_right(one, capsys, own_folder):
    one(lambda answer: None if answer == 1 else "It is 1.")
    check("99.1", 2)
    assert capsys.readouterr().out.startswith("Not yet. It is 1.")
    assert read_progress() == {"99.1": {"right": False, "attempts": 1}}
    check("99.1", 1)
    assert capsys.readouterr().out == "Right. Well.\n"
    check("99.1", 3)
    assert read_progress() == {"99.1": {"right": True, "attempts": 3}}
    capsys.readouterr()
    progress()
    assert capsys.readouterr().out == "1 of 1 exercises are right.\nright: 99.1\n"
    assert [path.name for path in own_folder.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"exercises": 3}', '{"exercises": {"99.1": {"right": 1}}}', "\udcff", "[" * 9999],
)
def test_a_broken_progress_file_counts_as_empty_and_is_replaced(one, content, own_folder, capsys):
    one()
    (own_folder / FILE_NAME).write_bytes(content.encode("utf-8", "surrogateescape"))
    check("99.1", 1)
    assert capsys.readouterr().out == "Right. Well.\n"
    assert read_progress() == {"99.1": {"right": True, "attempts": 1}}


def test_a_check_works_where_nothing_can_be_written(one, own_folder, capsys, monkeypatch):
    one()
    (own_folder / FILE_NAME).mkdir()  # a folder in its place can't be replaced, for root neither
    check("99.1", 1)
    assert capsys.readouterr().out == "Right. Well.\n(Your progress could not be written to the notebook's folder.)\n"
    assert [path.name for path in own_folder.iterdir()] == [FILE_NAME]


def test_an_interrupted_write_leaves_the_old_file(one, own_folder, monkeypatch):
    one()
    check("99.1", 1)
    before = (own_folder / FILE_NAME).read_text()

    def fails(*args):
        raise OSError

    monkeypatch.setattr(os, "replace", fails)
    check("99.1", 1)
    assert (own_folder / FILE_NAME).read_text() == before
    assert [path.name for path in own_folder.iterdir()] == [FILE_NAME]


def test_git_ignores_the_progress_file():
    assert f"{FILE_NAME}*" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_exercises_work_without_ipywidgets(own_folder):
    program = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from course_lib.exercises import check\n"
        "check('04.1', lambda loader, steps: [list(loader)])"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, timeout=120)
    assert result.stdout.startswith("Not yet. 4 micro-batches and K = 2 gave groups of [4]"), result.stderr
