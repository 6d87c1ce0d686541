"""The code of a notebook's classes and functions is hashed as it is now, with all that it reaches."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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


def code(part: Any) -> str:
    """The hash of one part of the notebook."""
    return notebook_code({"of_a_notebook.part": part})[0]


def codes(module: ModuleType) -> list[str]:
    return [code(part) for part in (module.Mine, module.metric)]


def test_a_cell_that_runs_again_leaves_the_code_as_it_was(notebook: Any) -> None:
    first = codes(notebook(CELL))
    assert codes(notebook(CELL.replace("# a comment", "# another one"))) == first
    assert codes(notebook(CELL.replace('return "unrelated"', "return 7"))) == first
    parts = {"of_a_notebook.Mine": notebook(CELL).Mine}
    assert notebook_code(parts)[1] == {"bild_lab.engine.methods.vanilla"}


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
    found = [code(notebook(cell.format(values)).metric) for values in ("3, 4, 3", "3, 4, 4")]
    assert found[0] != found[1]


def test_of_a_module_that_a_notebook_imports_the_code_that_runs_counts(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "beside_the_notebook.py"
    file.write_text("def half(text):\n    return text[: len(text) // 2]\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell = "import beside_the_notebook\ndef metric(text, references):\n"
    cell += "    return len(beside_the_notebook.half(text))\n"
    first = code(notebook(cell).metric)
    file.write_text("def half(text):\n    return text\n")  # which the process has not read
    assert code(notebook(cell).metric) == first
    del sys.modules["beside_the_notebook"]
    assert code(notebook(cell).metric) != first
    del sys.modules["beside_the_notebook"]


REACHED = """
import torch
from functools import cached_property, lru_cache, partial

class Rule:
    words = ["of a class"]

    def __init__(self, weights):
        self.weights, self.apart = weights, {"of an instance": (1, 2)}

    @cached_property
    def kept(self):
        return "of a kept property"

    @classmethod
    def made(cls):
        return cls("of a class method")

    def part(self, text):
        try:
            text = float(text)
            text = text + 1
        except ValueError:
            pass
        return text

@lru_cache
def cached(text):
    return "of a function that keeps its answers"

def in_a_list(text):
    return "of a function in a list"

RULE, LISTED = Rule(torch.tensor([1.5, 2.5])), {"a": [in_a_list, lambda text: "of a lambda"]}

def metric(text, references):
    return RULE.part(text) + cached(text) + LISTED["a"][0](text)

scaled = partial(metric, references="of a partial")
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('of a class"', 'other"'),
        ("of an instance", "other"),
        ("(1, 2)", "(1, 3)"),
        ("of a kept property", "other"),
        ("of a class method", "other"),
        ("of a function that keeps its answers", "other"),
        ("of a function in a list", "other"),
        ("of a lambda", "other"),
        ("of a partial", "other"),
        ("1.5, 2.5", "1.5, 2.25"),
        # code of equal instructions, of which one catches fewer errors
        (
            "text = text + 1\n        except ValueError:\n            pass",
            "\n        except ValueError:\n            pass\n        else:\n            text = text + 1",
        ),
    ],
)
def test_whatever_holds_code_or_values_is_looked_into(old: str, new: str, notebook: Any) -> None:
    """Fault: of an instance, a list of functions, a partial, a cached function or property, and a bound
    method only the name counted.
    """
    cell = REACHED
    first = code(notebook(cell).scaled)
    assert code(notebook(cell).scaled) == first  # its tensor lies elsewhere now
    assert cell.count(old) == 1
    assert code(notebook(cell.replace(old, new)).scaled) != first


def test_a_method_and_a_partial_of_a_notebook_are_parts_of_it(notebook: Any) -> None:
    cell = "from functools import partial\nfrom bild_lab.engine.methods.vanilla import NoDraft\n"
    cell += "made = partial(NoDraft, 3)\nclass Mine(NoDraft):\n    @classmethod\n"
    cell += "    def new(cls):\n        return cls()\n"
    for path, old, new in (("made", "3", "4"), ("Mine.new", "cls()", "cls(1)")):
        hashes = []
        for edited in (cell, cell, cell.replace(old, new)):
            notebook(edited)
            hashes.append(parts_code_hash({"_target_": f"of_a_notebook.{path}"}))
        assert hashes[0] == hashes[1] != hashes[2]


IN_A_PROCESS = """
import sys
from types import ModuleType
from bild_lab.lab.store.notebook_code import notebook_code
module = sys.modules["of_a_notebook"] = ModuleType("of_a_notebook")
exec(sys.stdin.read(), vars(module))
for _ in range(100 * int(sys.argv[1])):  # code that has run often is adapted to its values
    module.metric("3", [])
print(notebook_code({"of_a_notebook.metric": module.metric})[0])
"""


def test_every_process_gives_the_same_hash() -> None:
    cell = REACHED.replace(
        '["of a class"]', '{"some", "words", ("in", "a"), frozenset({"set", "which"})}'
    ).replace(' + cached(text) + LISTED["a"][0](text)', "")
    hashes = {
        subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, often],
            input=cell,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, often in (("1", "0"), ("2", "1"), ("3", "0"))
    }
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 64


def test_a_value_that_holds_itself_is_looked_into_once(notebook: Any) -> None:
    cell = "RING = [3]\nRING.append(RING)\ndef metric(text, references):\n    return RING\n"
    first = code(notebook(cell).metric)
    assert code(notebook(cell).metric) == first
    assert code(notebook(cell.replace("[3]", "[4]")).metric) != first


def test_a_part_of_a_notebook_names_its_points(notebook: Any) -> None:
    node = {"_target_": "of_a_notebook.Mine"}
    notebook(CELL)
    first = parts_code_hash(node)
    assert parts_code_hash(node) == first
    notebook(CELL.replace("window = 2", "window = 3"))
    assert parts_code_hash(node) != first
    in_a_file = {"bild_lab.lab.store.notebook_code.notebook_code": notebook_code}
    in_a_file["tests.lab.store.a_file_of_a_user.part"] = partial(NoDraft, 3)
    assert notebook_code(in_a_file) == ("", set())


READING = """
from bild_lab.engine import acceptance
from torch import nn
RULE, PART = acceptance.Rollback, nn.ReLU

def metric(text, references):
    import beside_the_notebook
    import inside.the_notebook
    places = beside_the_notebook.PLACE, inside.the_notebook.PLACE
    return [RULE, PART, *places]

def named(text, references):
    return acceptance.ExactMatch
"""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's modules `beside_the_notebook` and `inside.the_notebook`."""
    for name in ("beside_the_notebook", "inside", "inside.the_notebook"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name])["PLACE"] = name
    vars(sys.modules["inside"])["the_notebook"] = sys.modules["inside.the_notebook"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("acceptance.Rollback", "acceptance.ReleasedRollback"), ("nn.ReLU", "nn.GELU")],
)
@pytest.mark.usefixtures("beside")
def test_another_class_of_a_module_of_ours_or_of_a_package_is_another_value(
    old: str, new: str, notebook: Any
) -> None:
    """Fault: of classes in files the module alone counted, which both are in."""
    cells = READING, READING, READING.replace(old, new)
    codes = [notebook_code({"of_a_notebook.metric": notebook(cell).metric}) for cell in cells]
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize("module", ["beside_the_notebook", "inside.the_notebook"])
@pytest.mark.usefixtures("beside")
def test_what_a_function_imports_itself_is_reached(module: str, notebook: Any) -> None:
    parts = {"of_a_notebook.metric": notebook(READING).metric}
    first = notebook_code(parts)
    vars(sys.modules[module])["PLACE"] = "elsewhere"
    assert notebook_code(parts) != first


@pytest.mark.usefixtures("beside")
def test_a_module_of_ours_that_a_function_reads_is_reached_with_what_it_takes_of_it(
    notebook: Any,
) -> None:
    modules = notebook_code({"of_a_notebook.named": notebook(READING).named})[1]
    exact_match = "bild_lab.engine.methods.speculative.exact_match"
    assert modules == {"bild_lab.engine.acceptance", exact_match}
