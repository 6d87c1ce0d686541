"""Editing what measures makes a point anew; editing anything else keeps finished points."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

import run
from bild_lab.lab.measure.code import MEASURING, NOT_MEASURING, PACKAGE, code_hash, code_text, measuring_modules
from tests.thinned import thinned

ROLLBACK = "engine/acceptance/rollback.py"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to be edited."""
    return shutil.copytree(PACKAGE, tmp_path / "checkout" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="module")
def before() -> str:
    """The hash of the package as it is."""
    return code_hash(PACKAGE)


def edit(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source, f"{file} has changed: give this test another line to edit"
    file.write_text(source.replace(old, new))


def misnamed(package: Path) -> list[str]:
    """Modules that are not named exactly once, and names without a module."""
    modules = [file.relative_to(package).as_posix() for file in package.rglob("*.py")]
    entries = [*MEASURING, *NOT_MEASURING]
    holds = {entry: [each for each in modules if each == entry or each.startswith(f"{entry}/")] for entry in entries}
    named = [module for several in holds.values() for module in several]
    return sorted([entry for entry in entries if not holds[entry]] + [one for one in modules if named.count(one) != 1])


def test_every_module_is_said_once_to_measure_or_not() -> None:
    assert misnamed(PACKAGE) == [], "name these modules in MEASURING or NOT_MEASURING of bild_lab/lab/measure/code.py"


@pytest.mark.parametrize("module", ["lab/new.py", "lab/new/__init__.py", "new.py", "new/part.py", "lab/data/new.py"])
def test_a_new_module_or_folder_must_be_named(package: Path, module: str) -> None:
    (package / module).parent.mkdir(exist_ok=True)
    (package / module).write_text("")
    assert misnamed(package) == [module]


def test_a_name_without_a_module_is_found(package: Path) -> None:
    (package / "lab" / "runner.py").unlink()
    assert misnamed(package) == ["lab/runner.py"]


def test_comments_docstrings_and_layout_leave_the_hash(package: Path, before: str) -> None:
    """Every measuring module is written anew from its syntax tree: other line breaks, no comments, other docstrings."""
    changed = 0
    modules = [file for file in measuring_modules(package) if file.suffix == ".py"]
    for file in modules:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Expr(ast.Constant("Something else."))
        source = f"# a comment\n{ast.unparse(tree)}\n\n\n"
        changed += source != file.read_text()
        file.write_text(source)
    assert changed == len(modules)
    assert code_hash(package) == before


def test_code_outside_of_what_measures_leaves_the_hash(package: Path, before: str) -> None:
    measuring = set(measuring_modules(package))
    others = [file for file in package.rglob("*.py") if file not in measuring]
    assert {"report", "papers", "training", "lab"} <= {file.relative_to(package).parts[0] for file in others}
    for file in others:
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    (package / "report" / "new.py").write_text("CHANGED = True\n")
    (package / "conf" / "policy").mkdir(parents=True)
    (package / "conf" / "policy" / "bild.yaml").write_text("# a comment\n")
    assert code_hash(package) == before


@pytest.mark.parametrize(
    ("module", "old", "new"),
    thinned(
        [
            (ROLLBACK, "-self._threshold)", "-2 * self._threshold)"),
            ("engine/drafters/prompt_lookup.py", "longest_match, shortest_match - 1, -1", "longest_match, 0, -1"),
            ("engine/models/native/t5.py", "import torch\n", "import torch\n\nNEW = 1\n"),
            ("engine/models/native/cpu/forward.cpp", "float total = 0", "float total = 1"),
            ("lab/measure/timing.py", "time.perf_counter()", "time.monotonic()"),
            ("lab/metrics/measures.py", "RESAMPLES = 1000", "RESAMPLES = 999"),
            ("lab/analysis/statistics.py", "RESAMPLES = 2000", "RESAMPLES = 1000"),
            ("lab/decoder.py", "skip_special_tokens=True", "skip_special_tokens=False"),
        ],
        3,
    ),
)
def test_code_that_measures_changes_the_hash(package: Path, before: str, module: str, old: str, new: str) -> None:
    edit(package / module, old, new)
    assert code_hash(package) != before


def test_a_measuring_module_that_comes_goes_or_moves_changes_the_hash(package: Path, before: str) -> None:
    hashes = [before]
    (package / "engine" / "new.py").write_text("")
    hashes.append(code_hash(package))
    (package / "engine" / "new.py").rename(package / "engine" / "renamed.py")
    hashes.append(code_hash(package))
    assert len(set(hashes)) == 3


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


def sweep_with(checkout: Path, folder: Path, words: list[str], log: Path) -> None:
    """In a forked process: run the checkout's run.py, whose package takes the place of ours."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bild_lab", "run")]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    os.chdir(folder)
    sys.stdout = sys.stderr = log.open("w")
    sys.argv = ["run.py", *words]
    import bild_lab.lab.cli
    import run

    assert Path(bild_lab.__file__).is_relative_to(checkout)
    bild_lab.lab.cli.run_application(run.main)


@pytest.mark.slow
def test_a_sweep_measures_again_only_where_measuring_code_changed(
    package: Path, checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    checkout, source = package.parent, Path(run.__file__).parent
    shutil.copytree(source / "conf", checkout / "conf")
    shutil.copy(source / "run.py", checkout)
    words = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}", "dataset=multi30k"]
    words += [f"dataset.path={data}", "decoding.max_new_tokens=8", "measure.repeats=1"]
    words += ["measure.warmup=0", "policy=bild", "policy.rollback=2", "name=tested"]

    def sweep(log: str) -> tuple[str, list[dict]]:
        process = multiprocessing.get_context("fork").Process(
            target=sweep_with, args=(checkout, tmp_path, words, tmp_path / log)
        )
        process.start()
        process.join(300)
        printed = (tmp_path / log).read_text()
        assert process.exitcode == 0, printed
        files = (tmp_path / "outputs" / "tested" / "points").glob("*/result.json")
        return printed, sorted((json.loads(file.read_text()) for file in files), key=lambda result: result["stored_at"])

    printed, (first,) = sweep("first")
    assert "finished before" not in printed and first["counts"]["rollbacks"] == 0
    for module in ("report/terminal.py", "training/trainer.py", ROLLBACK):
        (package / module).write_text(f"# a new comment\n{(package / module).read_text()}")
    edit(checkout / "conf" / "policy" / "bild.yaml", "name: bild", "# a new comment\nname: bild")
    printed, results = sweep("prose")
    assert "finished before" in printed and results == [first]
    edit(package / ROLLBACK, "-self._threshold)", "-self._threshold + 1000)")
    printed, results = sweep("rule")
    assert "finished before" not in printed
    assert [result["counts"]["rollbacks"] > 0 for result in results] == [False, True]
