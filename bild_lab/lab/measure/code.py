"""A hash of the code that can change a measured number. A finished point counts as long as this hash is the same."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
# what decodes, times, scores and summarizes; not what composes configurations, stores results, reports or trains
MEASURING = (
    "engine",
    "lab/data",
    "lab/measure",
    "lab/metrics",
    "lab/analysis/cost.py",
    "lab/analysis/pipeline.py",
    "lab/analysis/prediction.py",
    "lab/analysis/statistics.py",
    "lab/history.py",
    "lab/results/summary.py",
    "lab/runner.py",
)


@lru_cache(maxsize=1)
def measuring_code() -> str:
    """The hash of the installed package, 12 hexadecimal digits."""
    return code_hash(PACKAGE)


def code_hash(package: Path) -> str:
    """A hash of the modules of MEASURING in this folder, without their comments, docstrings and layout."""
    digest = hashlib.sha256()
    for file in _modules(package):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0")
        digest.update(without_prose(file.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:12]


def without_prose(source: str) -> str:
    """Python code without comments and docstrings, in one layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _modules(package: Path) -> Iterator[Path]:
    for name in MEASURING:
        path = package / name
        yield from [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
