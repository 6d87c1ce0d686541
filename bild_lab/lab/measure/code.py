"""A hash of the code that can change a measured number. A finished point stays valid while this hash is the same."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGE = Path(__file__).resolve().parents[2]
# Modules and folders that decode, time, score or summarize.
MEASURING = (
    "engine",
    "lab/analysis/cost.py",
    "lab/analysis/pipeline.py",
    "lab/analysis/prediction.py",
    "lab/analysis/statistics.py",
    "lab/build.py",  # knobs become the parts of a method
    "lab/data/conversations.py",  # answers become part of the next prompt, after the data was hashed
    "lab/conversation_history.py",
    "lab/decoder.py",  # sets a request's limits, turns tokens into text
    "lab/generation_settings.py",  # chooses the processors that scores pass through
    "lab/languages.py",  # adds to prompts
    "lab/load.py",  # chooses the engine
    "lab/measure/batches.py",
    "lab/measure/certificate.py",
    "lab/measure/device_use.py",  # detects timings that shared a device
    "lab/measure/environment.py",  # peak memory and other load
    "lab/measure/likelihood.py",
    "lab/measure/sampled_certificate.py",
    "lab/measure/witness.py",
    "lab/measure/nan_check.py",  # decides which results are stored at all
    "lab/measure/timing.py",
    "lab/metrics",
    "lab/point.py",  # passes the configuration to the measuring code
    "lab/results/change.py",
    "lab/results/example_rows.py",
    "lab/results/summary.py",
    "lab/runner.py",
    "lab/tree_search.py",  # fits trees before a run
)
# Modules and folders whose changes leave finished points valid.
NOT_MEASURING = (
    "__init__.py",
    "errors.py",
    "files.py",
    "lab/__init__.py",
    "lab/analysis/__init__.py",
    "lab/analysis/machine.py",  # predicts from stored results
    "lab/analysis/paired.py",  # compares stored results
    "lab/analysis/pareto.py",
    "lab/analysis/reasons.py",  # explains stored results
    "lab/analysis/serving_names.py",
    "lab/cli.py",
    "lab/config.py",  # its values are part of the point's name
    "lab/data/__init__.py",
    "lab/data/hub_datasets.py",  # all prompts, references and categories are part of the point's name
    "lab/data/local_files.py",
    "lab/data/dataset_spec.py",
    "lab/data/examples.py",
    "lab/data/row_values.py",
    "lab/data/toy.py",
    "lab/data/toy_lexicon.py",
    "lab/data/toy_phrases.py",
    "lab/data/words.py",
    "lab/facts.py",  # facts that do not affect numbers
    "lab/formatting.py",
    "lab/glossary.py",
    "lab/hashing.py",
    "lab/measure/__init__.py",
    "lab/measure/bench.py",  # a separate benchmark, which makes no points
    "lab/measure/bench_models.py",
    "lab/measure/code.py",
    "lab/measure/cost_model.py",  # predicts, and measures nothing
    "lab/point_progress.py",
    "lab/results/__init__.py",
    "lab/results/batches.py",
    "lab/results/commands.py",
    "lab/results/commits.py",
    "lab/results/course.py",
    "lab/results/groups.py",
    "lab/results/records.py",  # stores what it is given
    "lab/results/table.py",
    "lab/schema",
    "lab/screening",  # chooses what is measured
    "lab/stop_signals.py",
    "lab/sweep.py",
    "lab/torchrun.py",
    "lab/toy_pair.py",  # a hash of the weights is part of the point's name
    "papers",
    "report",
    "training",
    "lab/usage.py",
)


@lru_cache(maxsize=1)
def measuring_code() -> str:
    """The hash of the installed package, 12 hexadecimal digits."""
    return code_hash(PACKAGE)


def code_hash(package: Path) -> str:
    """A hash of the modules of MEASURING in this folder, without their comments, docstrings and layout."""
    digest = hashlib.sha256()
    for file in measuring_modules(package):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0")
        text = file.read_text(encoding="utf-8")
        digest.update((code_text(ast.parse(text)) if file.suffix == ".py" else text).encode() + b"\0")
    return digest.hexdigest()[:12]


def measuring_modules(package: Path) -> Iterator[Path]:
    """The files that MEASURING names, in a fixed order."""
    for name in MEASURING:
        path = package / name
        yield from [path] if path.suffix == ".py" else sorted([*path.rglob("*.py"), *path.rglob("*.cpp")])


def code_text(node: object) -> str:
    """A syntax tree as text, without docstrings. The output of `ast.unparse` differs between versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(code_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    name = type(node).__name__
    if not node._fields:
        return f"{name}()"
    parts = []
    for field in node._fields:
        value = getattr(node, field, None)
        if field == "body" and isinstance(node, DOCUMENTED) and _documented(node):
            value = value[1:]
        if value is not None and value != []:  # newer Pythons add fields, empty in code that older ones can read
            parts.append(f"{field}={code_text(value)}")
    return f"{name}({','.join(parts)})"


def _documented(node: ast.AST) -> bool:
    return ast.get_docstring(node, clean=False) is not None
