"""The repository itself: dependencies agree, tiers hold, the README is true; lint, format and spelling are clean."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"

# The modules of design.md, planned ones too. A module imports only from tiers below its own.
TIERS = [
    {"batches"},
    {"losses", "models", "datasets", "replay"},
    {"accumulation", "gradients", "memory", "interactions", "architectures"},
    {"training", "planning", "audit", "contract", "savers", "trials", "distributed"},
    {"plots"},
    {"predictions", "explorers", "exercises", "interview"},
]
NEEDS_WIDGETS = {"explorers"}

# Where conda-forge uses another name than PyPI.
CONDA_NAMES = {"pytorch": "torch"}
# Where the name to import is not the name to install.
IMPORT_NAMES = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}
# Folders that no clone has: what Python, git and the tools leave behind.
LEFT_BEHIND = {".git", "__pycache__", "build", "dist"}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a command in the root as a person would: not as a part of the make or pytest that runs this test."""
    ours = ("MAKE", "MFLAGS", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


def project_files(*suffixes: str) -> list[Path]:
    """Return the files that git knows or would add; without git, those of a clone. With these suffixes, or all."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0:
        files = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        hidden = re.compile(r"\.(?!ci$|gitignore$|gitattributes$)|.*\.egg-info$")
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(part in LEFT_BEHIND or hidden.match(part) for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in files if path.is_file() and (not suffixes or path.suffix in suffixes))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tables_below(heading: str) -> list[list[str]]:
    """Return the rows of the tables in one section of the README, their header rows left out."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", read("README.md"), re.M | re.S)
    assert section, f"the README has no section '{heading}'"
    lines = section[1].splitlines()
    rows = [line for line, below in zip(lines, [*lines[1:], ""], strict=True) if not re.match(r"\| *-", below)]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in rows
        if line.startswith("|") and not re.match(r"\| *-", line)
    ]


# ---- dependencies ----------------------------------------------------------------------------------------------------

PYPROJECT = tomllib.loads(read("pyproject.toml"))
GROUPS = PYPROJECT["project"]["optional-dependencies"]


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    requirements = map(Requirement, lines)
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in requirements}


def pinned(name: str) -> dict[str, Version]:
    """Return what one requirements file pins, with what it includes; anything but comments and pins is an error."""
    pins = {}
    for line in read(name).splitlines():
        if line.startswith("-r "):
            pins |= pinned(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
            assert match, f"{name}: not a plain pin: {line}"
            package = canonicalize_name(match[1])
            assert package not in pins, f"{name}: {package} is pinned twice"
            pins[package] = Version(match[2])
    return pins


def needed_by(lines: list[str]) -> set[str]:
    """Return the packages that requirements need here, all the way down, as the installed packages say."""
    seen, waiting = set(), [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        package = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for name, extra in seen if name == package}:
            seen.add((package, extra))
            inner = map(Requirement, importlib.metadata.requires(package) or [])
            waiting += [one for one in inner if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


@pytest.mark.parametrize(
    ("pins", "dependencies"),
    [
        ("requirements.txt", PYPROJECT["project"]["dependencies"]),
        ("requirements-test.txt", GROUPS["test"] + GROUPS["bench"]),
    ],
)
def test_each_dependency_is_pinned_within_its_range(pins, dependencies):
    versions = pinned(pins)
    wrong = {
        name: f"range {allowed or 'any'}, pin {versions.get(name)}"
        for name, allowed in ranges(dependencies).items()
        if name not in versions or versions[name] not in allowed
    }
    assert not wrong


@pytest.mark.parametrize(
    ("pins", "dependencies"),
    [
        ("requirements.txt", PYPROJECT["project"]["dependencies"]),
        ("requirements-test.txt", PYPROJECT["project"]["dependencies"] + GROUPS["test"] + GROUPS["bench"]),
    ],
)
def test_the_pins_are_what_the_dependencies_need_no_more_and_no_less(pins, dependencies):
    versions, needed = set(pinned(pins)), needed_by(dependencies)
    assert needed - versions == set(), "needed but not pinned"
    assert versions - needed == set(), "pinned but needed by nothing"


def test_each_pin_is_installed_and_runs_on_the_oldest_python_allowed():
    # 3.11.0: Debian 12 has 3.11.2, and a release that asks for 3.11.5 would break `make lab` there.
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=") + ".0"
    pins = pinned("requirements-test.txt")
    installed = {name: importlib.metadata.metadata(name) for name in pins}
    other = {
        name: data["Version"] for name, data in installed.items() if Version(data["Version"]).public != str(pins[name])
    }
    assert other == {}, "another version than the pinned one is installed: run `make env`"
    asks = {name: data["Requires-Python"] for name, data in installed.items() if data["Requires-Python"]}
    assert {name: asked for name, asked in asks.items() if oldest not in SpecifierSet(asked)} == {}


def test_torch_is_pinned_as_a_release_that_has_a_cpu_build():
    pins = pinned("requirements-test.txt")
    assert pins["torch"] == Version(TORCH)
    assert f"TORCH := {TORCH}\n" in read("Makefile")
    assert [name for name in pins if name.startswith(("nvidia", "triton", "cuda"))] == []


def test_each_dependency_says_what_it_is_for():
    lines = re.findall(r'^    "([^"]+)",(.*)$', read("pyproject.toml"), re.M)
    assert len(lines) == len(PYPROJECT["project"]["dependencies"] + GROUPS["test"])
    assert [name for name, comment in lines if not re.search(r"# \w+", comment)] == []


def test_conda_gets_the_same_dependencies():
    environment = yaml.safe_load(read("environment.yml"))
    entries = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    conda = {}
    for entry in entries:
        name, version = re.fullmatch(r"([a-z0-9_-]+)(.*)", entry).groups()
        conda[CONDA_NAMES.get(name, name)] = SpecifierSet(re.sub(r"^=(?!=)", "==", version))
    python, torch = conda.pop("python"), conda.pop("torch")
    conda.pop("pip")
    expected = ranges(PYPROJECT["project"]["dependencies"])
    assert Version(TORCH) in torch
    assert Version(TORCH) in expected.pop("torch")
    assert conda == expected
    assert Version(str(python).removeprefix("==")) in SpecifierSet(PYPROJECT["project"]["requires-python"])
    # The package itself. Options such as --no-deps are no part of a line here: pip refuses them.
    assert [entry for entry in environment["dependencies"] if isinstance(entry, dict)] == [{"pip": ["-e ."]}]


def test_every_import_belongs_to_a_declared_dependency():
    declared = set(ranges(PYPROJECT["project"]["dependencies"] + [line for group in GROUPS.values() for line in group]))
    own = {"course_lib", "tests"}
    undeclared = set()
    for path in project_files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names:
                if canonicalize_name(IMPORT_NAMES.get(top, top)) not in declared:
                    undeclared.add(f"{path.relative_to(ROOT)}: {top}")
    assert undeclared == set()


# ---- tiers -----------------------------------------------------------------------------------------------------------


def tier_of(module: str) -> int:
    found = [tier for tier, modules in enumerate(TIERS) if module in modules]
    assert found, f"course_lib.{module} is in no tier: add it to TIERS"
    return found[0]


def imported_modules(source: str) -> set[str]:
    """Return the modules of course_lib that `source` imports, wherever in it and in whatever form."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(["course_lib"] * bool(node.level) + [node.module] * bool(node.module))
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        imported |= {name.split(".")[1] for name in names if name.startswith("course_lib.")}
    return imported


def package_sources() -> dict[str, list[Path]]:
    """Return the files of each module of course_lib: one, or those of a folder."""
    sources = {}
    for path in project_files(".py"):
        if path.is_relative_to(ROOT / "course_lib") and path != ROOT / "course_lib" / "__init__.py":
            module = path.relative_to(ROOT / "course_lib").parts[0].removesuffix(".py")
            sources.setdefault(module, []).append(path)
    return sources


def package_modules() -> list[str]:
    return sorted(package_sources())


def test_imports_are_found_in_every_form():
    for source in (
        "import course_lib.plots",
        "from course_lib.plots import Picture",
        "from course_lib import plots",
        "from . import plots",
        "from .plots import Picture",
        "def draw():\n    from course_lib.plots import Picture",
    ):
        assert imported_modules(source) == {"plots"}, source


def test_each_module_has_a_tier_and_imports_only_from_lower_ones():
    wrong = []
    for module, paths in package_sources().items():
        own_tier = tier_of(module)
        others = set().union(*(imported_modules(path.read_text(encoding="utf-8")) for path in paths))
        for other in sorted(others - ({module} if len(paths) > 1 else set())):
            if tier_of(other) >= own_tier:
                wrong.append(f"{module} (tier {own_tier}) imports {other} (tier {tier_of(other)})")
    assert wrong == []


def test_the_package_imports_without_ipywidgets():
    modules = [module for module in package_modules() if module not in NEEDS_WIDGETS]
    assert "batches" in modules
    program = f"""
import sys
sys.modules["ipywidgets"] = None
import importlib
for name in ["course_lib", *("course_lib." + module for module in {modules})]:
    importlib.import_module(name)
"""
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, result.stdout


# ---- the README ------------------------------------------------------------------------------------------------------


def test_the_python_in_the_readme_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", read("README.md"), re.M | re.S)
    assert blocks
    namespace = {}
    for number, block in enumerate(blocks, start=1):
        assert "assert " in block or number < len(blocks), f"block {number} checks nothing"
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)


def makefile_targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.M)[1].split())


def test_every_make_target_in_the_readme_exists():
    # In code only: a word such as "make lab" in a sentence stands between backticks or on a line of its own.
    code = re.findall(r"`([^`\n]+)`", read("README.md")) + re.findall(r"^make .*$", read("README.md"), re.M)
    named = {match[1] for text in code if (match := re.match(r"make ([a-z]+)", text))}
    assert {"lab", "test"} <= named
    assert named - makefile_targets() == set()


def test_make_help_lists_every_target():
    result = run("make", "--no-print-directory", "help")
    assert result.returncode == 0, result.stdout
    assert set(re.findall(r"^make ([a-z]+) +\w", result.stdout, re.M)) == makefile_targets()
    rules = {target for target in re.findall(r"^([a-z]+):(?!=)", read("Makefile"), re.M)}
    assert rules == makefile_targets()


def heading_anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", project_files(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_local_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (
            anchor and linked.suffix == ".md" and anchor not in heading_anchors(linked.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    assert broken == []


def test_pictures_in_the_readme_have_a_text_for_those_who_do_not_see_them():
    pictures = re.findall(r"!\[([^\]]*)\]\(", read("README.md"))
    assert pictures
    assert [text for text in pictures if len(text.split()) < 5] == []


def names_in_code(heading: str) -> list[str]:
    """Return what stands between backticks in the first column of the tables of one section of the README."""
    return [name for cells in tables_below(heading) for name in re.findall(r"`([^`]+)`", cells[0])]


def test_the_file_map_names_what_is_there():
    named = names_in_code("Where things are")
    assert [name for name in named if not (ROOT / name).exists()] == []
    said_elsewhere = {"README.md", "LICENSE", "LICENSE-TEXT", "CITATION.cff", ".gitignore", ".gitattributes"}
    top = {path.relative_to(ROOT).parts[0] for path in project_files()}
    assert top - said_elsewhere - {name.partition("/")[0] for name in named} == set(), "at the top, but not in the map"


def test_the_map_of_the_package_has_every_module_below_those_that_import_it():
    rows = [re.findall(r"`([^`]+)`", cells[0]) for cells in tables_below("Inside the package")]
    assert sorted(module for row in rows for module in row) == package_modules()
    assert [len({tier_of(module) for module in row}) for row in rows] == [1] * len(rows)
    assert [tier_of(row[0]) for row in rows] == sorted(tier_of(row[0]) for row in rows)


def stated_minutes() -> dict[str, str]:
    """The minutes that each notebook's first cell states, by the notebook's file name."""
    stated = {}
    for path in (path for path in project_files(".ipynb") if path.parent == ROOT / "notebooks"):
        first_cell = "".join(yaml.safe_load(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        minutes = re.search(r"(\d+) minutes", first_cell)
        stated[path.name] = minutes[1] if minutes else "not stated"
    return stated


def test_the_map_of_the_course_has_every_notebook_with_its_minutes():
    mapped = {}
    for link, _, minutes in tables_below("The map"):
        name, path = re.fullmatch(r"\[(\w+)\]\((.+)\)", link).groups()
        assert path == f"notebooks/{name}.ipynb"
        mapped[f"{name}.ipynb"] = minutes
    assert mapped == stated_minutes()
    assert list(mapped) == sorted(mapped)


def test_the_map_in_the_first_notebook_links_every_other_one_with_its_minutes():
    first = (ROOT / "notebooks/00_start_here.ipynb").read_text(encoding="utf-8")
    text = "\n".join("".join(cell["source"]) for cell in yaml.safe_load(first)["cells"])
    rows = re.findall(r"^\|[^|]*\| \[\w+\]\((\w+\.ipynb)\) \|[^|]*\| (\d+) \|$", text, flags=re.MULTILINE)
    stated = stated_minutes()
    stated.pop("00_start_here.ipynb")
    assert dict(rows) == stated


# ---- every file ------------------------------------------------------------------------------------------------------

# Written so that this file does not contain what it looks for.
ONE_MACHINE = re.compile(r"(?<![\w.)}>-])(?:/(?:wor[k]|roo[t]|hom[e]|tm[p]|op[t]|User[s])/\w|[A-Z]:\\User[s])")
REGISTRIES = re.compile(
    r"(?<!\w)(?:pyp[i]\.org|pythonhoste[d]\.org|pyp[i]\.python\.org|registry\.npmj[s]|de[b]\.debian\.org|con[d]a\.anaconda)"
)
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X]|coming[ ]soon|to[ ]be[ ]written|raise NotImplementedErro[r])\b")
PICTURE = re.compile(r"[A-Za-z0-9+/=\\]{200,}")


def test_what_must_not_be_in_a_file_is_recognised():
    slash = "/"
    for text in (f"{slash}work/main", f"open('{slash}tmp/x')", f"{slash}home/ada", "C:\\" + "Users\\ada"):
        assert ONE_MACHINE.search(text), text
    for text in ("course_lib/work/x", "https://example.org/home/x", "{path}/tmp/x", "5 /tmp"):
        assert not ONE_MACHINE.search(text), text
    assert REGISTRIES.search("https://" + "pyp" + "i.org/project/x")
    assert UNFINISHED.search("# TO" + "DO: more")


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the path of one machine", ONE_MACHINE),
        ("a registry's host", REGISTRIES),
        ("a word of unfinished work", UNFINISHED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_file_contains(what, pattern):
    found = []
    for path in project_files():
        if path.suffix not in {".png", ".npz"}:
            lines = PICTURE.sub("", path.read_text(encoding="utf-8")).splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{number}" for number, line in enumerate(lines, 1) if pattern.search(line)
            ]
    assert not found, f"{what}: {', '.join(found)}"


def test_no_check_is_switched_off():
    found = []
    for path in project_files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in {"skip", "skipif", "xfail", "importorskip"}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_the_citation_is_complete():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["version"] == PYPROJECT["project"]["version"]


def test_lint_is_clean():
    result = run(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", ".")
    assert result.returncode == 0, result.stdout


def test_format_is_clean():
    result = run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")
    assert result.returncode == 0, result.stdout


def test_spelling_is_clean():
    files = [str(path.relative_to(ROOT)) for path in project_files(".py", ".md", ".ipynb", ".toml", ".yml", ".cff")]
    result = run(
        sys.executable, "-m", "codespell_lib", *files, "Makefile", ".ci/run", ".ci/find-python", "LICENSE-TEXT"
    )
    assert result.returncode == 0, result.stdout


# ---- the set-up ------------------------------------------------------------------------------------------------------


def find_python(**variables: str) -> subprocess.CompletedProcess:
    return run("/bin/sh", ".ci/find-python", **variables)


def fake_python(folder: Path, exit_code: int) -> Path:
    """Make a `python3` that answers the probe of .ci/find-python with `exit_code`."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\ncase $1 in --version) echo Python 3.9.2;; *) exit {exit_code};; esac\n")
    path.chmod(0o755)
    return path


def test_a_python_is_found_and_can_build_an_environment():
    result = find_python(PYTHON=sys.executable)
    assert result.returncode == 0, result.stdout
    assert Path(result.stdout.strip()).samefile(sys.executable)


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(3, ["3.9.2", "needs Python 3.11 or newer", "PYTHON="]), (4, ["ensurepip", "apt-get install python3-venv"])],
)
def test_a_python_that_will_not_do_is_refused_with_what_to_do(tmp_path, exit_code, words):
    result = find_python(PYTHON="", PATH=str(fake_python(tmp_path, exit_code).parent))
    assert result.returncode == 1
    assert [word for word in words if word not in result.stdout] == []


def test_no_python_at_all_is_said(tmp_path):
    result = find_python(PYTHON="", PATH=str(tmp_path))
    assert result.returncode == 1
    assert "No Python" in result.stdout


def test_jupyterlab_is_started_on_this_machine_only_and_as_root_only_for_root():
    result = run("make", "--no-print-directory", "--dry-run", "lab", "ARGS=--no-browser")
    command = re.sub(r"\\\n", "", result.stdout)
    assert "--ServerApp.ip=127.0.0.1" in command, result.stdout
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb --no-browser" in command
    assert ("--allow-root" in command) == (os.getuid() == 0)
    assert not re.search(r"token|password", command)
