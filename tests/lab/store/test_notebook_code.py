"""The code of a notebook's classes and functions is hashed as it is now, with all that it reaches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.lab.store.hashing import parts_code_hash
from bild_lab.lab.store.notebook_code import notebook_code

CELL = """
from bild_lab.engine.methods.vanilla import NoDraft
LIMIT, SPARE = 3, 4
WORDS = {"a", "b", "c"}

def helper(text):
    return text[:LIMIT]

def unrelated(text):
    return "unrelated"

class Mine(NoDraft):
    window = 2

    def propose(self, tokens):
        '''Drafts nothing.'''
        # a comment
        return [helper(token) for token in tokens if token in WORDS]

    @property
    def room(self):
        return self.window

def metric(text, references, scale=100):
    return scale * len(helper(text))
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Runs a cell in the module of a notebook, and gives what it then has."""
    module = ModuleType("of_a_notebook")
    monkeypatch.setitem(sys.modules, "of_a_notebook", module)

    def run(cell: str) -> ModuleType:
        exec(cell, vars(module))
        return module

    return run


def codes(module: ModuleType) -> list[str]:
    return [notebook_code([part])[0] for part in (module.Mine, module.metric)]


def test_a_cell_that_runs_again_leaves_the_code_as_it_was(notebook: Any) -> None:
    first = codes(notebook(CELL))
    assert codes(notebook(CELL.replace("# a comment", "# another one"))) == first
    assert codes(notebook(CELL.replace('return "unrelated"', "return 7"))) == first
    assert notebook_code([notebook(CELL).Mine])[1] == {"bild_lab.engine.methods.vanilla"}


def test_what_python_writes_into_a_class_that_is_used_is_no_change(notebook: Any) -> None:
    cell = CELL.replace(
        "class Mine", "class Base(NoDraft):\n    def __init__(self):\n        pass\n\nclass Mine"
    )
    module = notebook(cell.replace("class Mine(NoDraft)", "class Mine(Base)"))
    first = codes(module)
    used = copy.copy(module.Mine())  # now it has __slotnames__, and may have another __init__
    assert isinstance(used, NoDraft) and "__slotnames__" in vars(module.Mine)
    assert codes(module) == first


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("text[:LIMIT]", "text[1:LIMIT]", [True, True]),  # a function that both reach
        ("LIMIT, SPARE = 3", "LIMIT, SPARE = 5", [True, True]),  # a value that it reads
        ('"a", "b", "c"', '"a", "b"', [True, False]),
        ("window = 2", "window = 3", [True, False]),
        ("return self.window", "return self.window + 1", [True, False]),
        ("scale=100", "scale=1", [False, True]),
        ("for token in tokens if", "for token in tokens[1:] if", [True, False]),
    ],
)
def test_what_the_code_reaches_changes_it(
    old: str, new: str, changed: list[bool], notebook: Any
) -> None:
    first = codes(notebook(CELL))
    assert CELL.count(old) == 1
    second = codes(notebook(CELL.replace(old, new)))
    assert [one != other for one, other in zip(first, second, strict=True)] == changed


def test_equal_values_of_other_names_do_not_hide_a_change(notebook: Any) -> None:
    cell = "A, B, C = {}\ndef metric(text, references):\n    return A + B + C\n"
    found = [
        notebook_code([notebook(cell.format(values)).metric])[0]
        for values in ("3, 4, 3", "3, 4, 4")
    ]
    assert found[0] != found[1]


def test_of_a_module_that_a_notebook_imports_the_code_that_runs_counts(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "beside_the_notebook.py"
    file.write_text("def half(text):\n    return text[: len(text) // 2]\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell = "import beside_the_notebook\ndef metric(text, references):\n"
    cell += "    return len(beside_the_notebook.half(text))\n"
    first = notebook_code([notebook(cell).metric])
    file.write_text("def half(text):\n    return text\n")  # which the process has not read
    assert notebook_code([notebook(cell).metric]) == first
    del sys.modules["beside_the_notebook"]
    assert notebook_code([notebook(cell).metric]) != first
    del sys.modules["beside_the_notebook"]


def test_a_part_of_a_notebook_names_its_points(notebook: Any) -> None:
    node = {"_target_": "of_a_notebook.Mine"}
    notebook(CELL)
    first = parts_code_hash(node)
    assert parts_code_hash(node) == first
    notebook(CELL.replace("window = 2", "window = 3"))
    assert parts_code_hash(node) != first
    assert notebook_code([notebook_code]) == ("", set())  # which a file holds
