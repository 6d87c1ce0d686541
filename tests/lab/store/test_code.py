"""Editing what measures makes a point anew; editing anything else keeps finished points."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hydra.utils import get_object
from transformers import LogitsProcessor

from bild_lab.lab.config.policies import find_part
from bild_lab.lab.store import code as code_module
from bild_lab.lab.store.code import (
    EVERY_POINT,
    PACKAGE,
    code_hash,
    code_text,
    own_code_hash,
    reached,
    reread_sources,
)
from bild_lab.lab.store.hashing import modules_of

ROLLBACK = "engine/methods/bild.py"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, to be edited."""
    copy = tmp_path / "checkout" / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    yield from in_place_of_the_package(copy, monkeypatch)


def in_place_of_the_package(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(code_module, "PACKAGE", copy)
    code_module.reread_sources()
    yield copy
    code_module.reread_sources()


def anew(modules: tuple[str, ...]) -> str:
    """The hash after files have changed."""
    code_module.reread_sources()
    return code_hash(modules)


def edit(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source, f"{file} has changed: give this test another line to edit"
    file.write_text(source.replace(old, new))


RULE = ("bild_lab.engine.methods.bild",)


def test_comments_docstrings_and_layout_leave_the_hash(package: Path) -> None:
    """Every module that a point reaches is written anew from its syntax tree, with other
    docstrings.
    """
    modules = [file for file in reached((*EVERY_POINT, *RULE)) if file.suffix == ".py"]
    before = code_hash(RULE)
    for file in modules:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Expr(ast.Constant("Something else."))
        file.write_text(f"# a comment\n{ast.unparse(tree)}\n\n\n")
    assert len(modules) > 50 and anew(RULE) == before


def test_code_that_a_point_does_not_reach_leaves_the_hash(package: Path) -> None:
    """Reports, papers, training, another rule, a new drafter, the configuration."""
    before, reaches = code_hash(RULE), reached((*EVERY_POINT, *RULE))
    others = [file for file in package.rglob("*.py") if file not in reaches]
    assert {
        "report",
        "papers",
        "training",
        "screening",
        "benchmark",
        "servers",
        "lab",
        "engine",
    } == {file.relative_to(package).parts[0] for file in others} - {
        "__init__.py",
        "__main__.py",
        "errors.py",
        "files.py",
        "ranks.py",
    }
    assert package / "engine/methods/speculative/cascades.py" in others
    for file in others:
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    (package / "engine/methods/mine.py").write_text("CHANGED = True\n")
    assert anew(RULE) == before


@pytest.mark.fast(
    "engine/methods/bild.py--self._threshold)--2 * self._threshold)",
    "lab/metrics/program_worker.py-import -NEW = 1\\nimport ",
)
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (ROLLBACK, "-self._threshold)", "-2 * self._threshold)"),
        ("engine/models/native/t5.py", "import torch\n", "import torch\n\nNEW = 1\n"),
        ("engine/models/native/cpu/attention.h", "float mixed = 0", "float mixed = 1"),
        ("lab/measure/timing.py", "time.perf_counter()", "time.monotonic()"),
        ("lab/metrics/bootstrap.py", "RESAMPLES = 1000", "RESAMPLES = 999"),
        ("lab/schema/statistics.py", "(above - below).std(ddof=1)", "(above - below).std(ddof=0)"),
        (
            "lab/point/decoder.py",
            "request.limits.prompt_length :]",
            "request.limits.prompt_length + 1 :]",
        ),
        # in a process of its own, never imported
        ("lab/metrics/program_worker.py", "import ", "NEW = 1\nimport "),
        ("lab/data/prompts.py", "        + answers[earlier]\n", ""),
        ("lab/measure/score.py", "request.seeded(point.seed, index)", "request.seeded(0, index)"),
    ],
)
def test_code_that_measures_changes_the_hash(
    package: Path, module: str, old: str, new: str
) -> None:
    rule, every = code_hash(RULE), code_hash(())
    edit(package / module, old, new)
    assert anew(RULE) != rule
    # a rule is the affair of policies with it
    assert (anew(()) != every) == (module != ROLLBACK)


PARTLY = {  # code that some points reach, by the modules that these name
    "benchmark/peer_worker.py": ("bild_lab.benchmark.peer_methods",),
    "screening/recorded_model.py": ("bild_lab.screening.recorded_model",),
}


@pytest.mark.parametrize("module", PARTLY)
def test_code_that_some_points_reach_is_their_affair(package: Path, module: str) -> None:
    these, every = code_hash(PARTLY[module]), code_hash(())
    (package / module).write_text(f"{(package / module).read_text()}\nCHANGED = True\n")
    assert anew(PARTLY[module]) != these and anew(()) == every


USERS = {  # files of a user's own, outside the package
    "outside_mine/__init__.py": "",
    "outside_mine/drafter.py": (
        "import numpy, outside_installed\nfrom outside_helper import SCALE\nfrom . import"
        " beside\nfrom bild_lab.engine.methods.bild import Rollback\ndef propose():\n   "
        " import outside_space.late\ndef load():\n    importlib.import_module('outside_named')\n   "
        " importlib.import_module('.relative', __package__)\n   "
        " importlib.util.spec_from_file_location('any', Path(__file__).with_name('plugin.py'))\n   "
        " open('/dev/null'), open('table.json'), open('in_the_working_directory.txt'),"
        " open('template.py')\n"
    ),
    "outside_mine/relative.py": "",
    "outside_mine/plugin.py": "import outside_of_plugin\n",
    "outside_mine/template.py": "{% this is no Python %}",
    "outside_mine/table.json": "[1]",
    "outside_named.py": "",
    "outside_of_plugin.py": "",
    "in_the_working_directory.txt": "a table",
    "outside_mine/beside.py": "from .deep.inner import DEPTH\n",
    "outside_mine/deep/__init__.py": "",
    "outside_mine/deep/inner.py": "DEPTH = 1\n",
    "outside_mine/unused.py": "",
    "outside_helper.py": (
        "import typing\nSCALE = 1\nif typing.TYPE_CHECKING:\n    import outside_mine.unused\n"
    ),
    # in a namespace, imported late; what it imports is not there
    "outside_space/late.py": "import outside_lost\n",
    "site-packages/outside_installed.py": "",
}
PART = ("outside_mine.drafter",)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a user's own files, on Python's path and imported, as the part of a policy
    is.
    """
    for name, content in USERS.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text(content)
    monkeypatch.chdir(tmp_path / "own")
    monkeypatch.syspath_prepend(tmp_path / "own" / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "own")
    importlib.import_module(PART[0])
    yield tmp_path / "own"
    for name in [name for name in sys.modules if name.startswith("outside_")]:
        del sys.modules[name]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One file of the package: enough, and fast."""
    (tmp_path / PACKAGE.name / ROLLBACK).parent.mkdir(parents=True)
    shutil.copy(PACKAGE / ROLLBACK, tmp_path / PACKAGE.name / ROLLBACK)
    yield from in_place_of_the_package(tmp_path / PACKAGE.name, monkeypatch)


def test_a_users_file_counts_with_all_of_the_users_that_it_imports(
    users: Path, small: Path
) -> None:
    package, others = small, ("outside_helper", "outside_installed")
    before, helper, installed = (anew(modules) for modules in (PART, others[:1], others[1:]))
    assert "outside_space" not in sys.modules, "reading imports nothing"
    for name, content in USERS.items():
        if name.endswith(".py") and "template" not in name:
            (users / name).write_text(f"{content}# a comment\n")
            assert anew(PART) == before, f"a comment in {name}"
        (users / name).write_text(f"{content}CHANGED = 1\n")
        counts = "unused" not in name and "installed" not in name
        assert (anew(PART) != before) == counts, name
        assert (anew(others[1:]) != installed) == ("installed" in name), "named itself, it counts"
        (users / name).write_text(content)
    edit(package / ROLLBACK, "-self._threshold)", "-2 * self._threshold)")
    assert anew(PART) != before and anew(others[:1]) == helper


def test_a_users_modules_are_imported_anew_when_one_of_them_has_changed(
    users: Path, small: Path
) -> None:
    """Also one that has not changed itself: it holds names of the other. Not those of an installed
    package, whose names other modules hold.
    """
    names, installed = (PART[0], "outside_mine.deep.inner"), LogitsProcessor.__module__
    reaching = (*PART, installed)
    before = anew(reaching)
    old = [sys.modules[name] for name in names]
    assert anew(reaching) == before and [sys.modules[name] for name in names] == old
    (users / "outside_mine/deep/inner.py").write_text("DEPTH = 22\n")
    assert anew(reaching) != before
    importlib.import_module(PART[0])
    assert sys.modules[names[1]].DEPTH == 22 and sys.modules[names[0]] is not old[0]
    assert get_object("outside_mine.deep.inner.DEPTH") == 22  # by way of the package
    assert installed in sys.modules


def test_a_part_in_a_folder_of_a_package_is_found_again_once_the_package_is_imported_anew(
    users: Path,
) -> None:
    """Planted: the new package does not hold the folder, which nothing imports by name, and so stays."""
    (users / "outside_mine/apart").mkdir()
    (users / "outside_mine/apart/__init__.py").touch()
    (users / "outside_mine/apart/part.py").write_text(
        "from outside_mine import relative\nclass Own: ...\n"
    )
    old = find_part("outside_mine.apart.part.Own")
    anew(("outside_mine.apart.part",))
    (users / "outside_mine/relative.py").write_text("CHANGED = 1\n")
    code_module.reread_sources()
    assert find_part("outside_mine.apart.part.Own") is not old


def test_of_a_users_module_its_own_code_can_be_told_from_ours(users: Path) -> None:
    before = code_module.own_code_hash(PART[0])
    (users / "outside_mine/deep/inner.py").write_text("DEPTH = 22\n")
    code_module.reread_sources()
    assert before is not None and code_module.own_code_hash(PART[0]) not in (before, None)
    assert code_module.own_code_hash(RULE[0]) is None


def test_a_part_counts_where_it_is_defined_and_a_users_also_where_it_is_named(users: Path) -> None:
    (users / "outside_mine" / "made.py").write_text(
        "import functools\nmake = functools.partial(dict)\n"
    )
    assert set(modules_of({"_target_": "outside_mine.made.make"})) == {
        "functools",
        "outside_mine.made",
    }
    rollback = {"_target_": "bild_lab.engine.methods.bild.Rollback", "threshold": 1.0}
    assert list(modules_of({"rule": rollback})) == [*RULE]


def test_a_users_files_may_move(users: Path, small: Path) -> None:
    before = anew(PART)
    moved = shutil.copytree(users, users.with_name("away"))
    sys.path[sys.path.index(str(users))] = str(moved)
    os.chdir(moved)
    for name in [name for name in sys.modules if name.startswith("outside_")]:
        del sys.modules[name]
    importlib.import_module(PART[0])
    assert anew(PART) == before and any(one.is_relative_to(moved) for one in reached(PART))


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


def test_code_in_no_file_is_another_one_in_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a class of a notebook that was redefined was taken for measured."""
    monkeypatch.setitem(sys.modules, "typed_in", ModuleType("typed_in"))
    hashes = []
    for _ in range(2):
        reread_sources()
        assert code_hash(("typed_in",)) == code_hash(("typed_in",)) != code_hash()
        hashes += [code_hash(("typed_in",)), own_code_hash("typed_in")]
    assert len({*hashes}) == 4
    # of modules that are built in, or not imported, nobody can change the code meanwhile
    assert code_hash(("builtins", "_operator", "nowhere.at_all")) == code_hash()
    assert own_code_hash("builtins") is None
