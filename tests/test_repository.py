"""Facts about the repository itself: what is packaged, what may be imported, what every file must have."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli", "compiler", "cost_models", "planner")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_folder_with_code_is_packaged() -> None:
    """An unlisted sub-package works in an editable install and is missing from the wheel."""
    folders = {file.parent.relative_to(ROOT) for file in SOURCES}
    assert sorted("autopar." + ".".join(folder.parts) for folder in folders) == sorted(
        PYPROJECT["tool"]["setuptools"]["packages"]
    )


def test_ranks_find_the_tests_whatever_starts_pytest(pytestconfig: pytest.Config) -> None:
    """`python -m pytest` puts the folder that it is called in on the path, `pytest` none."""
    assert ROOT in pytestconfig.getini("pythonpath")


def test_data_files_are_packaged() -> None:
    packaged = PYPROJECT["tool"]["setuptools"]["package-data"]["*"]
    suffixes = {
        file.suffix
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    missing = {suffix for suffix in suffixes if suffix and f"**/*{suffix}" not in packaged}
    assert missing <= {".typed"}
    assert "py.typed" in packaged
    assert (ROOT / "planner" / "plan.schema.json").is_file()


def imports(file: Path) -> set[str]:
    """Modules that a file imports by absolute name, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def test_packages_import_each_other_relatively() -> None:
    """`import planner` would find the folder only from the root of the tree; `autopar.planner` is for tests."""
    bad = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        for name in imports(file)
        if name.split(".")[0] in (*PACKAGES, "autopar")
    }
    assert not bad


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("torch.export", {"planner/capture"}),
        ("pulp", {"planner/search"}),
        ("highspy", {"planner/search"}),
        ("typer", {"cli"}),
        ("rich", {"cli"}),
        ("click", set()),
    ],
)
def test_only_one_place_imports(module: str, allowed: set[str]) -> None:
    users = {
        file.relative_to(ROOT).as_posix()
        for file in SOURCES
        for name in imports(file)
        if name == module or name.startswith(module + ".")
    }
    assert not {user for user in users if not any(user.startswith(place) for place in allowed)}


def test_cost_models_is_a_leaf() -> None:
    outside = {name for file in (ROOT / "cost_models").rglob("*.py") for name in imports(file)}
    assert not {name.split(".")[0] for name in outside} & {"torch", "numpy", "pulp", "autopar", "planner"}


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|opt|Users)/\w")
    bad = {
        f"{file.relative_to(ROOT)}:{number}"
        for file in tracked("*.py", "*.md", "*.toml", "*.json", ".ci")
        if file.name != Path(__file__).name
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    }
    assert not bad


def test_source_is_ascii() -> None:
    bad = [
        file.relative_to(ROOT).as_posix()
        for file in tracked("*.py", "*.toml", ".ci")
        if not file.read_bytes().isascii()
    ]
    assert not bad


def toml_files() -> list[Path]:
    return sorted((ROOT / "cost_models").rglob("*.toml"))


@pytest.mark.parametrize("file", toml_files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_toml_names_its_sources(file: Path) -> None:
    text = file.read_text()
    assert "source" in text.lower() or tomllib.loads(text).get("sources"), f"{file} has no source"


def test_modules_have_docstrings_and_fit_in_the_head() -> None:
    for file in SOURCES:
        text = file.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{file.relative_to(ROOT)} has no docstring"
        assert text.count("\n") <= 600, f"{file.relative_to(ROOT)} is longer than 600 lines"


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
    bad = [f"{file.relative_to(ROOT)}" for file in SOURCES if marks.search(file.read_text())]
    assert not bad


def test_changelog_fragments() -> None:
    """`changelog.d/<slug>.<kind>.md`, one or more sentences each."""
    for file in (ROOT / "changelog.d").glob("*"):
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", file.name), file.name
        assert file.read_text().strip().endswith((".", "`")), file.name


def test_readme_is_what_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "python -m pytest -n 2\n" in readme
    assert "python -m pytest -n 2\n" in ci
    assert "autopar plan sample_models/gpt.py --gpus 8" in readme
    assert "autopar plan sample_models/gpt.py --gpus 8" in ci
