"""Exercises: a learner's answer is checked in the next cell, at once and by name; hints and a solution are at hand.

An exercise is declared once, as an `Exercise`, in a file of this folder named after its notebook. The notebook shows a
stub in a cell tagged `exercise`, and `check("02.1", answer)` in the next, tagged `check`. What a check prints is plain
text that depends on the answer only: a stub that nobody touched is *not attempted*, in every kernel and on every day.
"""

from __future__ import annotations

import dis
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from course_lib.audit import MEANINGS, AuditReport, audit
from course_lib.audit.limits import Deadline, call_guarded, shown
from course_lib.exercises.progress import keep, read_progress

NUM_HINTS = 3
SECONDS = 20.0  # that an answer may take
NOTHING = {"RESUME", "NOP", "LOAD_CONST", "LOAD_COMMON_CONSTANT", "POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


class NotYet(Exception):
    """What is wrong with an answer, as a sentence for the learner."""


@dataclass(frozen=True)
class Exercise:
    """One exercise, with everything that its notebook shows and its tests run.

    number: notebook and place, "02.1". title, task: Markdown; the task says what is given and what is wanted.
    difficulty, importance: 1 to 5. minutes: of a first attempt.
    answer: the name of what the learner writes. stub: the code of the exercise cell, which defines it; a function that
    returns nothing, a name set to None or `...`, or a broken function to mend.
    judge: called with the answer; returns None where it is right, or a sentence that says what is wrong (or raises
    NotYet with it). It is never called with an untouched stub.
    hints: three, of rising strength. solution: code that defines the answer. closing: a sentence for a right answer.
    right: further right answers, built otherwise, two with the solution at least. wrong: answers by a phrase that their
    message holds; eight at least. setup: imports that the notebook has made before the stub.
    """

    number: str
    title: str
    task: str
    difficulty: int
    importance: int
    minutes: int
    answer: str
    stub: str
    judge: Callable[[Any], str | None]
    hints: Sequence[str]
    solution: str
    closing: str
    right: Sequence[Any]
    wrong: Mapping[str, Any]
    setup: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d\d\.\d", self.number):
            raise ValueError(f"number must be like '02.1'; got {self.number!r}")
        if len(self.hints) != NUM_HINTS:
            raise ValueError(f"hints must be {NUM_HINTS}; exercise {self.number} has {len(self.hints)}")
        for name in ("difficulty", "importance"):
            if getattr(self, name) not in range(1, 6):
                raise ValueError(f"{name} must be 1 to 5; exercise {self.number} has {getattr(self, name)!r}")

    @property
    def call(self) -> str:
        """The code of the check cell."""
        first = "from course_lib.exercises import check\n\n" if self.number.endswith(".1") else ""
        return f'{first}check("{self.number}", {self.answer})'

    @property
    def heading(self) -> str:
        """The Markdown before the stub: what to do, and what it takes."""
        scale = f"Difficulty {self.difficulty} of 5, importance {self.importance} of 5, about {self.minutes} minutes."
        return f"### Exercise {self.number}: {self.title}\n\n*{scale}*\n\n{self.task.strip()}"

    @property
    def help(self) -> str:
        """The Markdown after the check: hints and solution, folded away."""
        parts = [folded(f"Hint {place}", hint.strip()) for place, hint in enumerate(self.hints, start=1)]
        return "\n\n".join([*parts, folded("Solution", f"```python\n{self.solution.strip()}\n```")])

    def define(self, code: str) -> Any:
        """Run code that defines the answer, and return it."""
        namespace: dict[str, Any] = {}
        exec(compile(f"{self.setup}\n{code}", f"exercise {self.number}", "exec", dont_inherit=True), namespace)
        return namespace[self.answer]


def folded(summary: str, text: str) -> str:
    """Fold a text away behind its summary, in Markdown."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


# What a learner calls.


def check(number: str, answer: Any = None) -> None:
    """Say of an answer that it is right, what is wrong with it, or that nothing was attempted; never an error.

    A right or attempted answer is noted in the progress file beside the notebook. Raises ValueError for an unknown
    exercise only.
    """
    exercise = find(number)
    if is_untouched(exercise, answer):
        print(f"Not attempted yet. Write {exercise.answer} in the cell above, run it, then run this cell.")
        return
    message = verdict(exercise, answer)
    note = keep(number, right=message is None)
    if message is None:
        print(f"Right. {exercise.closing.strip()}")
    else:
        print(f"Not yet. {message}")
        print("Hints are folded away below this cell.")
    if note:
        print(note)


def hint(number: str, strength: int = 1) -> None:
    """Print a hint, from 1 (a nudge) to 3 (nearly the answer)."""
    exercise = find(number)
    if strength not in range(1, NUM_HINTS + 1):
        raise ValueError(f"strength must be 1 to {NUM_HINTS}; got {strength!r}")
    print(exercise.hints[strength - 1].strip())


def solution(number: str) -> None:
    """Print the solution."""
    print(find(number).solution.strip())


def progress() -> None:
    """Print which exercises are right, which were attempted and which are left."""
    kept, all_of_them = read_progress(), exercises()
    right = [number for number in all_of_them if kept.get(number, {}).get("right")]
    tried = [number for number in all_of_them if number in kept and number not in right]
    left = [number for number in all_of_them if number not in kept]
    print(f"{len(right)} of {len(all_of_them)} exercises are right.")
    for name, numbers in (("right", right), ("attempted", tried), ("left", left)):
        if numbers:
            print(f"{name}: {', '.join(numbers)}")


# How an answer is judged.


def verdict(exercise: Exercise, answer: Any) -> str | None:
    """Return None for a right answer, else what is wrong with it. Whatever the answer does, this returns."""
    try:
        return exercise.judge(answer)
    except NotYet as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"The check could not use your answer: {type(error).__name__}: {shown(error, quoted=False)}"


def is_untouched(exercise: Exercise, answer: Any) -> bool:
    """Say whether an answer is still the stub: None, `...`, an empty function, or the code that was given."""
    if answer is None or answer is ...:
        return True
    if not isinstance(answer, FunctionType):
        return False
    given = exercise.define(exercise.stub)
    if isinstance(given, FunctionType) and _same_code(answer.__code__, given.__code__):
        return True
    return _does_nothing(answer)


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Compare what two functions do, not where they stand."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_flags")
    if any(getattr(a, part) != getattr(b, part) for part in parts) or len(a.co_consts) != len(b.co_consts):
        return False
    return all(
        _same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else repr(x) == repr(y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _does_nothing(function: FunctionType) -> bool:
    """Say whether a function only returns None or `...`."""
    does = {instruction.opname for instruction in dis.get_instructions(function)}
    returns = [value for value in function.__code__.co_consts if value is not None and value is not ...]
    return does <= NOTHING and returns in ([], [function.__doc__])


def expect(condition: Any, sentence: str) -> None:
    """Raise NotYet with a sentence where a condition does not hold."""
    if not condition:
        raise NotYet(sentence)


def run_answer(function: Any, *arguments: Any, seconds: float = SECONDS) -> Any:
    """Call a learner's function and return what it returns; raise NotYet where it can't be called, fails or hangs."""
    expect(callable(function), f"It must be a function; it is {shown(function)}.")
    returned, findings = call_guarded(function, arguments, Deadline(seconds))
    for finding in findings:
        raise NotYet(f"With {called_with(arguments)}, {finding.sentence}.")
    return returned


def called_with(arguments: Sequence[Any]) -> str:
    """Write the arguments of a call, in at most a line."""
    return shown(arguments[0]) if len(arguments) == 1 else shown(tuple(arguments))


def judge_update(update: Any, **problem: Any) -> str | None:
    """Judge an update by an audit; arguments as for `audit`."""
    expect(callable(update), f"It must be a function (model, optimizer, micro_batches); it is {shown(update)}.")
    return by_name(audit(update, seconds=SECONDS, **problem))


def by_name(report: AuditReport) -> str | None:
    """Put a report into a message: the main finding with its meaning, then the codes of the others."""
    if report.passed:
        return None
    main, *others = report.findings
    lines = [f"{main.code}: {main.sentence}. {MEANINGS[main.code][0]}"]
    lines += [f"Also {finding.code}: {finding.sentence}." for finding in others]
    return "\n".join(lines)


# Where the exercises are.


def exercises(notebook: str | None = None) -> dict[str, Exercise]:
    """Return the declared exercises by number, of one notebook ("02") or of all."""
    package = importlib.import_module("course_lib.exercises")
    found: dict[str, Exercise] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        match = re.match(r"n(\d\d)_", module)
        if match and notebook in (None, match[1]):
            for exercise in importlib.import_module(f"course_lib.exercises.{module}").EXERCISES:
                if exercise.number in found or not exercise.number.startswith(f"{match[1]}."):
                    raise ValueError(f"{module} declares exercise {exercise.number}, which is another's number")
                found[exercise.number] = exercise
    return dict(sorted(found.items()))


def find(number: str) -> Exercise:
    """Return an exercise by its number. Raises ValueError for one that is not there."""
    known = exercises(str(number)[:2])
    if number not in known:
        raise ValueError(f"number must be that of an exercise; got {number!r}; there are {', '.join(exercises())}")
    return known[number]
