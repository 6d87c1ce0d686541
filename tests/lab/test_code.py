"""Editing what measures makes a point anew; editing anything else keeps finished points."""

from __future__ import annotations

import ast
import importlib
import shutil
from pathlib import Path

import pytest

from bild_lab.lab import hashing
from bild_lab.lab.hashing import EVERY_POINT, PACKAGE, code_hash, code_text, reached

ROLLBACK = "engine/acceptance/rollback.py"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to be edited."""
    return shutil.copytree(PACKAGE, tmp_path / "checkout" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))


def anew(modules: tuple[str, ...], package: Path) -> str:
    """The hash after files have changed."""
    for cached in (code_hash, hashing._imported, hashing._content):
        cached.cache_clear()
    return code_hash(modules, package)


def edit(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source, f"{file} has changed: give this test another line to edit"
    file.write_text(source.replace(old, new))


RULE = ("bild_lab.engine.acceptance.rollback",)


def test_comments_docstrings_and_layout_leave_the_hash(package: Path) -> None:
    """Every module that a point reaches is written anew from its syntax tree, with other docstrings."""
    modules = [file for file in reached((*EVERY_POINT, *RULE), package) if file.suffix == ".py"]
    before = code_hash(RULE, package)
    for file in modules:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Expr(ast.Constant("Something else."))
        file.write_text(f"# a comment\n{ast.unparse(tree)}\n\n\n")
    assert len(modules) > 50 and anew(RULE, package) == before


def test_code_that_a_point_does_not_reach_leaves_the_hash(package: Path) -> None:
    """Reports, papers, training, another rule, a new drafter, the configuration."""
    before, reaches = code_hash(RULE, package), reached((*EVERY_POINT, *RULE), package)
    others = [file for file in package.rglob("*.py") if file not in reaches]
    assert {"report", "papers", "training", "lab", "engine"} == {
        file.relative_to(package).parts[0] for file in others
    } - {"__init__.py", "__main__.py", "errors.py", "files.py"}
    assert package / "engine/acceptance/cascades.py" in others
    for file in others:
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    (package / "engine/drafters/mine.py").write_text("CHANGED = True\n")
    drafters = package / "engine/drafters/__init__.py"
    drafters.write_text(f"from bild_lab.engine.drafters.mine import CHANGED\n{drafters.read_text()}")
    assert anew(RULE, package) == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (ROLLBACK, "-self._threshold)", "-2 * self._threshold)"),
        ("engine/models/native/t5.py", "import torch\n", "import torch\n\nNEW = 1\n"),
        ("engine/models/native/cpu/attention.h", "float total = 0", "float total = 1"),
        ("lab/runner.py", "time.perf_counter()", "time.monotonic()"),
        ("lab/metrics/text_metrics.py", "RESAMPLES = 1000", "RESAMPLES = 999"),
        ("lab/analysis/statistics.py", "RESAMPLES = 2000", "RESAMPLES = 1000"),
        ("lab/decoding/decoder.py", "skip_special_tokens=True", "skip_special_tokens=False"),
    ],
)
def test_code_that_measures_changes_the_hash(package: Path, module: str, old: str, new: str) -> None:
    rule, every = code_hash(RULE, package), code_hash((), package)
    edit(package / module, old, new)
    assert anew(RULE, package) != rule
    assert (anew((), package) != every) == (module != ROLLBACK)  # a rule is the affair of policies with it


def test_a_part_of_another_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my_drafter.py"
    monkeypatch.syspath_prepend(tmp_path)
    hashes = set()
    for content in ("A = 1\n", "A = 2\n", "A = 2  # as before\n"):
        file.write_text(content)
        importlib.import_module("my_drafter")
        hashes.add(anew(("my_drafter",), PACKAGE))
    assert len(hashes) == 2


DIFFERENT = {
    "numbers": ("x = 1", "x = 1.0"),
    "flags": ("x = 1", "x = True"),
    "words": ("x = None", "x = 'None'"),
    "order": ("x = a, b", "x = b, a"),
    "comparisons": ("x = a < b", "x = a <= b"),
    "arguments": ("f(a)", "f(*a)"),
    "parameters": ("def f(a, *, b): pass", "def f(a, b): pass"),
    "slices": ("x[1:]", "x[:1]"),
    "signs": ("-1", "+1"),
    "no docstring": ("x = 1", "x = 1\n'a string below the first line'"),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_code_is_different_text(one: str, other: str) -> None:
    assert code_text(ast.parse(one)) != code_text(ast.parse(other))
