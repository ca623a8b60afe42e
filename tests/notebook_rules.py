"""The rules that every stored notebook keeps, each a function that returns sentences about what breaks it.

    python -m tests.notebook_rules                          all of notebooks/
    python -m tests.notebook_rules notebooks/02_*.ipynb     these only

Nothing is run here: the rules read the file. That its outputs are still what the code gives is for nbval to say.
Tags of cells with a meaning: `raises-exception`, `measured`, `exercise`, `check`, `claim-N` (the evidence for row N of
the claims table in 00) and `shown:course_lib.module.name` (the cell shows the code of that function).
"""

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import ipywidgets
import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from tests.rewrite_notebooks import NOTEBOOKS, PICTURE, ROOT, WIDGET_VIEW, canonical_text, read

LIBRARY = ROOT / "course_lib"
MOST_LINES = 25
NARROW_COLUMNS = 72  # of code that a page of 800 pixels shows without scrolling
SHORTEST_TEXT = 20  # characters that a picture's words need at least
VERDICTS = ("true", "half true", "false")


@dataclass(frozen=True)
class Sections:
    """What one notebook must have. `open_questions` counts predictions that another notebook confronts."""

    opening: bool = True  # title, what you will do, learn and need, minutes
    links: bool = True  # to the notebooks before and after
    prediction: bool = True  # asked, and confronted later
    practice: bool = True
    interview: bool = True
    panel: bool = False
    exercises: bool = False
    ledger: bool = False  # the table of claims
    open_questions: int = 0


SECTIONS: dict[str, Sections] = {
    "00_start_here": Sections(panel=True, exercises=True, ledger=True, open_questions=5),
    "01_run_out_of_memory": Sections(panel=True, exercises=True),
    "02_accumulate_step_by_step": Sections(panel=True, exercises=True),
    "03_match_the_full_batch": Sections(panel=True, exercises=True),
    "04_count_the_effective_batch": Sections(panel=True, exercises=True),
    "05_take_the_controls": Sections(panel=True, exercises=True),
    "06_scale_the_loss": Sections(panel=True, exercises=True),
    "07_weigh_unequal_micro_batches": Sections(panel=True, exercises=True),
    "08_step_once_per_update": Sections(panel=True, exercises=True),
    "09_know_what_does_not_split": Sections(panel=True, exercises=True),
    "13_stack_the_memory_savers": Sections(panel=True, exercises=True),
    "14_plan_for_your_gpu": Sections(panel=True, exercises=True),
}


@dataclass(frozen=True)
class Cell:
    """A cell with its place in the notebook."""

    number: int
    node: NotebookNode

    @property
    def source(self) -> str:
        return self.node.source

    @property
    def tags(self) -> list[str]:
        return self.node.metadata.get("tags", [])

    @property
    def outputs(self) -> list[NotebookNode]:
        return self.node.get("outputs", [])

    def texts(self) -> Iterator[str]:
        """Yield every text of the outputs, pictures' alternative texts included."""
        for output in self.outputs:
            if output.output_type == "stream":
                yield output.text
            elif output.output_type == "error":
                yield output.evalue
                yield "\n".join(output.traceback)
            for mime, data in output.get("data", {}).items():
                if isinstance(data, str) and (mime.startswith("text/") or mime == "image/svg+xml"):
                    yield data
            of_mimes = output.get("metadata", {}).values()
            yield from (value["alt"] for value in of_mimes if isinstance(value, Mapping) and "alt" in value)

    @cached_property
    def tree(self) -> ast.Module:
        """The code as a syntax tree; empty if the cell is meant to hold code that cannot be parsed."""
        try:
            return ast.parse(TransformerManager().transform_cell(self.source))
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])

    def calls(self, name: str) -> Iterator[ast.Call]:
        """Yield the calls of the function `name`, by itself or as an attribute."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and name in (
                getattr(node.func, "id", None),
                getattr(node.func, "attr", None),
            ):
                yield node


@dataclass(frozen=True)
class Notebook:
    """A stored notebook, the table that says what it must have, and the library it shows code of."""

    path: Path
    table: Mapping[str, Sections]
    library: Path

    @cached_property
    def node(self) -> NotebookNode:
        return read(self.path)

    @cached_property
    def cells(self) -> list[Cell]:
        return [Cell(number, node) for number, node in enumerate(self.node.cells, start=1)]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.node.cell_type == "code"]

    @property
    def prose(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.node.cell_type == "markdown"]

    @property
    def opening(self) -> str:
        """The prose before the first code cell."""
        first_code = self.code[0].number if self.code else len(self.cells) + 1
        return "\n\n".join(cell.source for cell in self.prose if cell.number < first_code)

    @property
    def sections(self) -> Sections:
        return self.table.get(self.path.stem, Sections())

    @property
    def headings(self) -> list[str]:
        """All headings in order, in lower case."""
        text = "\n\n".join(_without_fences(cell.source) for cell in self.prose)
        return [heading.strip().lower() for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]

    def section(self, heading: str) -> str | None:
        """Return the prose under a heading, up to the next one of the same rank or higher; None if there is no such."""
        text = "\n\n".join(_without_fences(cell.source) for cell in self.prose)
        found = re.search(rf"^(#+) +{re.escape(heading)} *$", text, re.MULTILINE | re.IGNORECASE)
        if found is None:
            return None
        rest = text[found.end() :]
        end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
        return rest[: end.start()] if end else rest


Rule = Callable[[Notebook], Iterator[str]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule to RULES. It yields sentences that begin with the cell; the notebook's name is put before them."""
    RULES.append(function)
    return function


def faults(path: Path, table: Mapping[str, Sections] = SECTIONS, library: Path = LIBRARY) -> list[str]:
    """Return a sentence for each rule that the notebook at `path` breaks, naming notebook and cell."""
    notebook = Notebook(path, table, library)
    try:
        nbformat.validate(notebook.node)
    except (nbformat.ValidationError, nbformat.reader.NotJSONError) as error:
        return [f"{path.name}: not a valid notebook: {str(error).splitlines()[0]}"]
    return [f"{path.name}: {sentence}" for one in RULES for sentence in one(notebook)]


# How it was run


@rule
def code_was_run_once_in_order(notebook: Notebook) -> Iterator[str]:
    for place, cell in enumerate(notebook.code, start=1):
        count = cell.node.execution_count
        if not cell.source.strip():
            yield f"cell {cell.number} is an empty code cell"
        elif count is None:
            yield f"cell {cell.number} was never run"
        elif count != place:
            yield f"cell {cell.number} ran out of order: its execution count is {count}, not {place}"


@rule
def errors_are_announced(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        if errors and "raises-exception" not in cell.tags:
            yield f"cell {cell.number} has error output ({errors[0].ename}) without the tag raises-exception"
        if not errors and "raises-exception" in cell.tags:
            yield f"cell {cell.number} has the tag raises-exception and no error output"


@rule
def nothing_on_stderr(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                yield f"cell {cell.number} has output on stderr: {_start(output.text)}"


# What it shows

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_TIME = re.compile(
    r"\b\d+(?:[.,]\d+)?\s*(?:ns|[uµμ]s|ms|s|secs?|seconds?|minutes?|hours?)\b"
    r"|\b\d[\d.,]*\s*[\w ]{0,12}/s(?:ec|econd)?\b"
    r"|\b\d{1,2}:\d{2}:\d{2}\b|\b\d{4}-\d{2}-\d{2}\b|\bWall time\b"
)
_BAR = re.compile(r"\r|[▏▎▍▌▋▊▉█]{2,}|\d%\||\bit/s\b|\bs/it\b|\[[=#>.-]{5,}\]")
_BARE_PICTURE = re.compile(r"<Figure size|<Axes|<matplotlib\.|\bText\(-?[\d.]+, ")
_WIDGETS = "|".join(name for name, kind in vars(ipywidgets).items() if isinstance(kind, type))
_BARE_WIDGET = re.compile(rf"\b(?:{_WIDGETS})\((?:\)|children=|value=|description=|options=|layout=)")


def _no_text_like(name: str, pattern: re.Pattern, fault: str) -> Rule:
    """Make a rule out of what no text of an output may hold."""

    def look(notebook: Notebook) -> Iterator[str]:
        for cell in notebook.code:
            found = next(filter(None, map(pattern.search, cell.texts())), None)
            if found:
                yield f"cell {cell.number} shows {fault}: {_start(found[0])}"

    look.__name__ = name
    return rule(look)


_no_text_like("no_memory_address", _ADDRESS, "a memory address")
_no_text_like("no_time", _TIME, "a time or a speed")
_no_text_like("no_progress_bar", _BAR, "a progress bar")
_no_text_like("no_bare_picture", _BARE_PICTURE, "a bare figure")
_no_text_like("no_bare_widget", _BARE_WIDGET, "a bare widget")


@rule
def no_widget_state(notebook: Notebook) -> Iterator[str]:
    if "widgets" in notebook.node.metadata:
        yield "the metadata hold widget state"
    for cell in notebook.code:
        if any(WIDGET_VIEW in output.get("data", {}) for output in cell.outputs):
            yield f"cell {cell.number} stores a widget view"


@rule
def pictures_have_words(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for output in cell.outputs:
            for mime in (mime for mime in output.get("data", {}) if mime.startswith("image/")):
                if len(output.metadata.get(mime, {}).get("alt", "")) < SHORTEST_TEXT:
                    yield f"cell {cell.number} shows a picture without alternative text in its metadata"
                text = output.data.get("text/plain", "")
                if len(text) < SHORTEST_TEXT or text.startswith("<"):
                    yield f"cell {cell.number} shows a picture whose text is {text!r}, not what it shows"
    for cell in notebook.prose:
        prose = _without_code(cell.source)
        if re.search(r"!\[\s*\]\(", prose) or re.search(r"<img(?![^>]*\balt=\"[^\"]+\")[^>]*>", prose):
            yield f"cell {cell.number} has a picture without alternative text"


# How it reads


@rule
def no_semicolon_at_the_end(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        for line in _lines_ending_in_semicolon(cell.source):
            yield f"cell {cell.number} has a line with a trailing semicolon: {line.strip()}"


@rule
def cells_are_short(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.code:
        lines = len(cell.source.splitlines())
        if lines > MOST_LINES:
            yield f"cell {cell.number} has {lines} lines of code, more than {MOST_LINES}"


@rule
def prose_stands_between_code(notebook: Notebook) -> Iterator[str]:
    for before, cell in itertools.pairwise(notebook.cells):
        both_code = before.node.cell_type == cell.node.cell_type == "code"
        if both_code and not ("exercise" in before.tags and "check" in cell.tags):
            yield f"cells {before.number} and {cell.number} are code with no prose between"
    for cell in notebook.cells:
        if cell.node.cell_type != "code" and not re.sub(r"<!--.*?-->", "", cell.source, flags=re.DOTALL).strip():
            yield f"cell {cell.number} is prose without a word"


@rule
def no_output_widget_and_no_interact(notebook: Notebook) -> Iterator[str]:
    forbidden = {"Output", "interact", "interact_manual", "interactive", "interactive_output"}
    for cell in notebook.code:
        for node in ast.walk(cell.tree):
            names = {getattr(node, "id", None), getattr(node, "attr", None)}
            if isinstance(node, ast.alias):
                names = {node.name.rpartition(".")[2]}
            if names & forbidden:
                yield f"cell {cell.number} uses {', '.join(names & forbidden)}, which swallows errors"
                break


@rule
def file_is_canonical(notebook: Notebook) -> Iterator[str]:
    stored, wanted = notebook.path.read_text(encoding="utf-8"), canonical_text(notebook.node)
    if stored != wanted:
        lines = zip(stored.splitlines(), wanted.splitlines(), strict=False)
        number, line = next(((n, a) for n, (a, b) in enumerate(lines, start=1) if a != b), (0, "its length"))
        yield f"the file is not in canonical form (line {number}: {_start(line)}): run make notebooks"


# Links

_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)|^\s*\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)", re.MULTILINE)
_HTML_LINK = re.compile(r"\b(?:href|src)=[\"']([^\"']+)[\"']")


@rule
def local_links_lead_somewhere(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.prose:
        for target in _links(cell.source):
            if re.match(r"https?://|mailto:|data:", target):
                continue
            if target.startswith("attachment:"):
                problem = None if target[11:] in cell.node.get("attachments", {}) else "there is no such attachment"
            else:
                problem = _broken(target, notebook)
            if problem:
                yield f"cell {cell.number} has a broken link to {target}: {problem}"


def _links(markdown: str) -> list[str]:
    prose = _without_code(markdown)
    return [found[1] or found[2] for found in _LINK.finditer(prose)] + _HTML_LINK.findall(prose)


def _broken(target: str, notebook: Notebook) -> str | None:
    """Say what is wrong with a link that stays on this machine; None if nothing is."""
    name, _, anchor = unquote(target).partition("#")
    path = notebook.path
    if name:
        if name.startswith("/"):
            return "a path from the root is another one on every machine"
        path = (notebook.path.parent / name).resolve()
        if not path.is_relative_to(notebook.path.parent.parent.resolve()):
            return "it leaves the project"
        if not path.exists():
            return "there is no such file"
    if not anchor:
        return None
    if path.suffix not in (".ipynb", ".md"):
        return "only notebooks and Markdown files have headings to link to"
    anchors = _anchors(path)
    if anchor in anchors:
        return None
    alike = [one for one in anchors if one.lower() == anchor.lower()]
    return f"there is no such heading{', but ' + alike[0] if alike else ''}"


def _anchors(path: Path) -> set[str]:
    """Return the anchors in a file: of headings in a notebook as JupyterLab forms them, in Markdown as GitHub does.

    "Now, compare" has the anchor Now,-compare in a notebook (JupyterLab 4, nbconvert) and now-compare in Markdown.
    """
    notebook = path.suffix == ".ipynb"
    if notebook:
        text = "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    text = _without_fences(text)
    anchors = set(re.findall(r"<a [^>]*\b(?:id|name)=[\"']([^\"']+)[\"']", text))
    for heading in re.findall(r"^#{1,6} +(.*?)[ #]*$", text, re.MULTILINE):
        plain = re.sub(r"<[^>]+>|[`*]|\]\([^)]*\)|[\[]", "", heading).strip()
        if not notebook:
            plain = re.sub(r"[^\w\- ]", "", plain.lower())
        anchors.add(plain.replace(" ", "-"))
    return anchors


# Sections


@rule
def name_and_title_agree(notebook: Notebook) -> Iterator[str]:
    if not re.fullmatch(r"\d\d(_[a-z0-9]+){2,}", notebook.path.stem):
        yield "the file's name is not of the form NN_verb_the_thing.ipynb"
    if notebook.path.stem not in notebook.table:
        yield "the notebook is not in the table SECTIONS"
    titles = [
        title for cell in notebook.prose for title in re.findall(r"^# +(.+)$", _without_fences(cell.source), re.M)
    ]
    if not notebook.cells or not notebook.cells[0].source.startswith("# ") or len(titles) != 1:
        yield f"the notebook must begin with its one title, a heading of the first rank; it has {len(titles)}"
    elif re.findall(r"[a-z0-9]+", titles[0].lower()) != notebook.path.stem.split("_")[1:]:
        yield f"the title {titles[0]!r} and the file's name differ"


@rule
def opening_says_what_to_expect(notebook: Notebook) -> Iterator[str]:
    if notebook.sections.opening:
        for words in ("You will do", "You will learn", "You need"):
            if not re.search(rf"\*\*{words}:?\*\*", notebook.opening, re.IGNORECASE):
                yield f"nothing before the first code says **{words}**"
        if not re.search(r"\b\d+ minutes\b", notebook.opening):
            yield "nothing before the first code says how many minutes it takes"


@rule
def opening_links_to_the_neighbours(notebook: Notebook) -> Iterator[str]:
    if notebook.sections.links:
        names = sorted(path.name for path in notebook.path.parent.glob("*.ipynb"))
        place = names.index(notebook.path.name)
        linked = {target.partition("#")[0] for target in _links(notebook.opening)}
        for neighbour, side in ((names[place - 1 : place], "back"), (names[place + 1 : place + 2], "forward")):
            if neighbour and neighbour[0] not in linked:
                yield f"nothing before the first code links {side} to {neighbour[0]}"


@rule
def predictions_are_confronted(notebook: Notebook) -> Iterator[str]:
    asked: dict[str, int] = {}
    confronted = set()
    for cell in notebook.code:
        for call in cell.calls("confront"):
            question = _first_argument(call)
            if asked.get(question, cell.number) >= cell.number:
                yield f"cell {cell.number} confronts {question!r}, which no earlier cell asks with predict"
            confronted.add(question)
        for call in cell.calls("predict"):
            asked[_first_argument(call)] = cell.number
            guesses = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "guess")]
            if any(not (isinstance(guess, ast.Constant) and guess.value is None) for guess in guesses):
                yield f"cell {cell.number} predicts in the learner's place: the stored guess must be None"
            if any(guess.end_col_offset > NARROW_COLUMNS for guess in guesses):
                yield f"cell {cell.number} puts the guess out of sight on a narrow page: give it a line of its own"
    left_open = [question for question in asked if question not in confronted]
    if len(left_open) > notebook.sections.open_questions:
        yield f"asked with predict and never confronted: {', '.join(map(repr, left_open))}"
    if notebook.sections.prediction and not asked:
        yield "the notebook asks for no prediction"


@rule
def panel_is_live_and_still(notebook: Notebook) -> Iterator[str]:
    if not notebook.sections.panel:
        return
    names = {alias.asname or alias.name for alias in _imports(notebook, "course_lib.explorers")}
    panels = [cell for cell in notebook.code if any(True for name in names for _ in cell.calls(name))]
    if not panels:
        yield "no cell shows a live panel from course_lib.explorers"
    for cell in panels:
        if not any(PICTURE in output.get("data", {}) for output in cell.outputs):
            yield f"cell {cell.number} shows a live panel and stores no picture of it"


@rule
def exercises_are_checked(notebook: Notebook) -> Iterator[str]:
    exercises = [cell for cell in notebook.code if "exercise" in cell.tags]
    for cell in exercises:
        following = notebook.cells[cell.number : cell.number + 1]
        if not following or "check" not in following[0].tags:
            yield f"cell {cell.number} is an exercise without a check in the next cell"
    if notebook.sections.exercises and not exercises:
        yield "the notebook has no exercise"


@rule
def practice_and_interview_close_it(notebook: Notebook) -> Iterator[str]:
    practice, interview = notebook.section("In practice"), notebook.section("In an interview")
    if notebook.sections.practice:
        if practice is None:
            yield "there is no section In practice"
        elif not any(target.startswith("https://") for target in _links(practice)):
            yield "In practice links to no source"
    if notebook.sections.interview:
        if interview is None:
            yield "there is no section In an interview"
            return
        for words in ("question", "answer", "follow-up", "evidence"):
            if not re.search(rf"\b{words}\b", interview, re.IGNORECASE):
                yield f"In an interview has no {words}"
        if all(re.match(r"https?:", target) for target in _links(interview)):
            yield "In an interview links to no cell as evidence"
        if practice is not None and notebook.headings.index("in practice") > notebook.headings.index("in an interview"):
            yield "In an interview must come after In practice"
        elif practice is not None and interview in practice:
            yield "In an interview must be a section of its own, not part of In practice"


# Code that is shown, and claims


@rule
def shown_code_is_the_librarys(notebook: Notebook) -> Iterator[str]:
    imported: dict[str, tuple[str, int]] = {}  # what the notebook calls it: (the library's name of it, cell)
    for cell in notebook.code:
        for node in ast.walk(cell.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("course_lib"):
                for alias in node.names:
                    if alias.asname in (None, alias.name):
                        imported[alias.name] = (f"{node.module}.{alias.name}", cell.number)
    for cell in notebook.code:
        wanted = {tag.rpartition(".")[2]: tag.removeprefix("shown:") for tag in cell.tags if tag.startswith("shown:")}
        shown = {node.name: node for node in cell.tree.body if isinstance(node, _DEFINITIONS)}
        for name in shown:
            if name in imported and imported[name][1] > cell.number:
                wanted.setdefault(name, imported[name][0])
        for name, full_name in wanted.items():
            original = _library_definition(full_name, notebook.library)
            if original is None:
                yield f"cell {cell.number} shows {full_name}, which the library does not have"
            elif name not in shown:
                yield f"cell {cell.number} has the tag shown:{full_name} and does not define {name}"
            elif _bare(shown[name]) != _bare(original):
                yield f"cell {cell.number} shows a {name} that differs from {full_name}"


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _library_definition(full_name: str, library: Path) -> ast.AST | None:
    """Find the definition of course_lib.module.name in the library's source, without importing it."""
    _, *modules, name = full_name.split(".")
    folder = library.joinpath(*modules)
    # A folder passes on the names of its files.
    paths = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    body = [node for path in paths if path.is_file() for node in ast.parse(path.read_text(encoding="utf-8")).body]
    return next((node for node in body if isinstance(node, _DEFINITIONS) and node.name == name), None)


class _Bare(ast.NodeTransformer):
    """Take docstrings and annotations away: they are for the reader of the library and change nothing that runs."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.visit_ClassDef(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        # Without a value it declares a field of a class, which is not only an annotation.
        return ast.Assign(targets=[node.target], value=node.value, lineno=0) if node.value else node


def _bare(definition: ast.AST) -> str:
    return ast.dump(_Bare().visit(ast.parse(ast.unparse(definition))))


@rule
def claims_have_evidence(notebook: Notebook) -> Iterator[str]:
    folder = notebook.path.parent
    if not notebook.sections.ledger:
        yield from _claims_without_a_row(notebook)
        return
    rows = _ledger(notebook)
    if not rows:
        yield "there is no table of claims with the columns claim, tested in and verdict"
    for place, (number, row) in enumerate(rows, start=1):
        if number != str(place):
            yield f"row {place} of the claims has the number {number!r}"
        if not row["verdict"].strip("*_ ").lower().startswith(VERDICTS):
            yield f"claim {number} has the verdict {row['verdict']!r}, none of: true, true if, half true, false"
        linked = {target.partition("#")[0] for target in _links(row["tested in"])}
        for name in sorted(linked):
            if name.endswith(".ipynb") and (folder / name).is_file() and not _has_evidence(folder / name, number):
                yield f"claim {number} has no evidence in {name}: no cell with the tag claim-{number} and an assert"
        for mentioned in re.findall(r"\b\d\d\b", re.sub(r"\[[^\]]*\]\([^)]*\)", "", row["tested in"])):
            if any(folder.glob(f"{mentioned}_*.ipynb")):
                yield f"claim {number} names notebook {mentioned}, which exists, without a link to it"


def _ledger(notebook: Notebook) -> list[tuple[str, dict[str, str]]]:
    """Return the rows of the claims table, each as the text of its first column and its cells by heading."""
    for cell in notebook.prose:
        lines = [line.strip() for line in cell.source.splitlines() if line.strip().startswith("|")]
        table = [[part.strip() for part in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
        if table and {"claim", "tested in", "verdict"} <= {heading.lower() for heading in table[0]}:
            headings = [heading.lower() for heading in table[0]]
            return [(row[0], dict(zip(headings, row, strict=False))) for row in table[2:]]
    return []


def _claims_without_a_row(notebook: Notebook) -> Iterator[str]:
    ledgers = [name for name, sections in notebook.table.items() if sections.ledger]
    links = {
        number: _links(row["tested in"])
        for name in ledgers
        if (path := notebook.path.parent / f"{name}.ipynb").is_file()
        for number, row in _ledger(Notebook(path, notebook.table, notebook.library))
    }
    for cell in notebook.code:
        for tag in (tag for tag in cell.tags if tag.startswith("claim-")):
            targets = links.get(tag.removeprefix("claim-"), [])
            if notebook.path.name not in {target.partition("#")[0] for target in targets}:
                yield f"cell {cell.number} has the tag {tag}, but no such row of the claims links to this notebook"


def _has_evidence(path: Path, number: str) -> bool:
    cells = [Cell(place, node) for place, node in enumerate(read(path).cells, start=1) if node.cell_type == "code"]
    tagged = [cell for cell in cells if f"claim-{number}" in cell.tags]
    return any(isinstance(node, ast.Assert) for cell in tagged for node in ast.walk(cell.tree))


# Small things the rules share


def _first_argument(call: ast.Call) -> str:
    """Return the question of a call of predict or confront: its text, or its source if it is no literal."""
    first = call.args[0] if call.args else next((word.value for word in call.keywords if word.arg == "question"), None)
    if isinstance(first, ast.Constant):
        return str(first.value)
    return ast.unparse(first) if first else ""


def _imports(notebook: Notebook, module: str) -> Iterator[ast.alias]:
    for cell in notebook.code:
        for node in ast.walk(cell.tree):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                yield from node.names


def _lines_ending_in_semicolon(source: str) -> list[str]:
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return [line for line in lines if line.rstrip().endswith(";")]  # A magic or a broken line: go by its text.
    ends = (tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENDMARKER)
    pairs = itertools.pairwise(tokens)
    return [lines[token.start[0] - 1] for token, following in pairs if token.string == ";" and following.type in ends]


def _without_fences(markdown: str) -> str:
    return re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def _without_code(markdown: str) -> str:
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", _without_fences(markdown))


def _start(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else repr(text)
    return line if len(line) <= 60 else f"{line[:57]}..."


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong with the notebooks named on the command line; return 0 if nothing is."""
    parser = argparse.ArgumentParser(prog="python -m tests.notebook_rules", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks; by default all of notebooks/")
    paths = parser.parse_args(arguments).paths or sorted(NOTEBOOKS.glob("*.ipynb"))
    sentences = [sentence for path in paths for sentence in faults(path)]
    print("\n".join(sentences) or f"{len(paths)} notebooks keep every rule")
    return 1 if sentences or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
