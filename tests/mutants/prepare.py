"""A copy of the project in which mutmut changes some modules, with the tests that are to notice."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
KEPT = ("staticmethod", "classmethod")  # decorators that mutmut knows
SETTINGS = """
[tool.mutmut]
source_paths = ["bild_lab"]
only_mutate = {modules}
also_copy = ["conf", "scripts", "run.py"]
pytest_add_cli_args = [
    "-m", "not slow", "-p", "tests.mutants.plugin", "-p", "no:unraisableexception", "-p", "no:threadexception"
]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver"
use_git_change_detection = false
timeout_constant = 20
timeout_multiplier = 3
"""


def prepare(folder: Path, modules: Sequence[str], tests: Sequence[str]) -> None:
    """Copy the project into this folder, these modules ready for mutmut and these tests chosen."""
    for name in ("bild_lab", "conf", "scripts", "tests"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "run.py", folder)
    settings = SETTINGS.format(modules=list(modules), tests=list(tests))
    (folder / "pyproject.toml").write_text((PROJECT / "pyproject.toml").read_text() + settings)
    for module in modules:
        (folder / module).write_text(ready((folder / module).read_text()))


def ready(code: str) -> str:
    """The code with every function open to mutation, and the wording of errors closed to it.

    mutmut leaves decorated functions as they are: `@property` before a function becomes `f = property(f)` behind it.
    """
    tree, lines = ast.parse(code), code.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            for number in range(node.lineno, node.end_lineno + 1):
                lines[number - 1] += "  # pragma: no mutate"
    for node in sorted(decorated(tree), key=lambda one: -one.lineno):
        value = node.name
        for decorator in reversed(node.decorator_list):
            value = f"{ast.unparse(decorator)}({value})"
        lines.insert(node.end_lineno, f"{' ' * node.col_offset}{node.name} = {value}")
        del lines[node.decorator_list[0].lineno - 1 : node.lineno - 1]
    return "\n".join(lines)


def decorated(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """The decorated functions and methods of a module, but for those whose decorator mutmut knows."""
    for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in scope.body:
            names = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
            if isinstance(node, ast.FunctionDef) and names and names[0] not in KEPT:
                yield node
