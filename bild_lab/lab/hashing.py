"""Content hashes: of a point's inputs, of a dataset's examples, of files, and of the code that a point can reach.

A finished point stays valid while these are the same. A new drafter, a changed comment or another report keep all
points; a changed acceptance rule measures anew those whose policies use it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from bild_lab.files import FilePath, NamesFile, file_digest
from bild_lab.lab.config import find_part
from bild_lab.lab.data.examples import Example


def content_hash(content: dict[str, Any]) -> str:
    """A hash of 12 hexadecimal digits. The order of the keys does not matter, and 2.0 counts as 2."""
    canonical = json.dumps(plain_numbers(content), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def plain_numbers(value: Any) -> Any:
    """The value with 2.0 as 2, so that whole numbers are equal however they were written."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def data_hash(examples: Iterable[Example]) -> str:
    """The hash of all prompts and references.

    The answers that later turns continue are not part of it: they come from the target.
    """
    rows = [(one.id, one.prompt, one.references) + ((one.continues,) if one.continues else ()) for one in examples]
    return content_hash({"examples": rows})


def file_hash(path: str) -> str | None:
    """The hash of a file, or of all files in a folder; None if the path does not exist."""
    named = Path(path).expanduser()
    if not named.is_dir():
        return file_digest(named) if named.is_file() else None
    files = sorted(file for file in named.rglob("*") if file.is_file())
    return content_hash({str(file.relative_to(named)): file_digest(file) for file in files})


PACKAGE = Path(__file__).resolve().parents[1]
# Folders of modules that can change a number. What lies elsewhere reads, stores or shows, or is part of a point's name.
MEASURING = ("engine", "lab/analysis", "lab/decoding", "lab/measure", "lab/metrics")
EVERY_POINT = ("bild_lab.lab.runner", "bild_lab.lab.score", "bild_lab.lab.decoding.load", "bild_lab.engine.decode")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CPP = (".cpp", ".h")
INSTALLED = {"site-packages", "dist-packages"}  # folders of other packages, whose imports are not followed


@lru_cache(maxsize=64)
def code_hash(modules: tuple[str, ...] = (), package: Path = PACKAGE) -> str:
    """A hash, 12 hexadecimal digits, of what every point runs and of what these modules reach.

    modules: where the parts of a policy are defined, by their dotted names; those of other packages count as well.
    Comments, docstrings and layout do not matter, nor where files outside the package lie.
    """
    own, others = [], []
    for file in reached((*EVERY_POINT, *modules), package):
        inside = file.is_relative_to(package)
        name = file.relative_to(package).as_posix() if inside else file.name
        (own if inside else others).append(name.encode() + b"\0" + _content(file).encode() + b"\0")
    return hashlib.sha256(b"".join([*own, *sorted(others)])).hexdigest()[:12]


def reread_sources() -> None:
    """Look at all sources again: in a process that goes on, they may have changed."""
    for cached in (code_hash, _imported, _content):
        cached.cache_clear()


def reached(modules: Iterable[str], package: Path = PACKAGE) -> list[Path]:
    """The files of these modules and of all that they import, as far as they can change a number, in a fixed order.

    Of our package only the modules count whose names are imported from it; of a user's files all that they import, but
    for Python's own modules and installed packages. C++ sources count beside their module.
    """
    found: set[Path] = set()
    waiting = [file for name in modules if (file := _file_of(name, package)) is not None]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            found.update(one for one in file.parent.iterdir() if one.suffix in CPP)
            waiting += [one for one in _imported(file, package) if _measures(one, package)]
    return sorted(found)


def _measures(file: Path, package: Path) -> bool:
    if not file.is_relative_to(package):
        return not INSTALLED.intersection(file.parts)
    return any(file.is_relative_to(package / folder) for folder in MEASURING)


def _file_of(module: str, package: Path) -> Path | None:
    """The module's file; that of another package where Python finds it, unless it is Python's own. Imports nothing."""
    first, *inner = module.split(".")
    if first == PACKAGE.name:
        return _source(package.joinpath(*inner))
    if first in sys.stdlib_module_names:
        return None
    if (loaded := getattr(sys.modules.get(module), "__file__", None)) is not None:
        return Path(loaded)
    spec = None
    with suppress(ImportError, ValueError):  # the module of a script or a notebook has no spec
        spec = find_spec(first)
    if spec is None or not inner:
        return Path(spec.origin) if spec is not None and spec.has_location else None
    folders = [Path(one).joinpath(*inner) for one in spec.submodule_search_locations or ()]
    return next((file for folder in folders if (file := _source(folder)) is not None), None)


def _source(path: Path) -> Path | None:
    """The source of the module or package that a path without a suffix names; None if there is none."""
    return next((file for file in (Path(f"{path}.py"), path / "__init__.py") if file.is_file()), None)


@lru_cache(maxsize=1024)
def _imported(file: Path, package: Path) -> tuple[Path, ...]:
    """The sources that a file imports anywhere in it, but for type checking; of a file of ours those of ours."""
    found: set[Path | None] = set()
    ours = file.is_relative_to(package)
    if not ours and INSTALLED.intersection(file.parts):
        return ()
    for module, names in _imports(file):
        if module.split(".")[0] == PACKAGE.name:
            found.update(_file_of(name, package) for name in _defining(module, names, package))
        elif module.startswith(".") and not ours:
            inner = module.lstrip(".")
            start = file.parents[len(module) - len(inner) - 1]
            folders = list(accumulate(filter(None, inner.split(".")), Path.joinpath, initial=start))
            found.update(map(_source, (*folders, *(folders[-1] / name for name in names))))
        elif not ours:
            parts = module.split(".")
            packages = (".".join(parts[:count]) for count in range(1, len(parts)))
            several = (*packages, module, *(f"{module}.{name}" for name in names))
            found.update(_file_of(name, package) for name in several)
    return tuple(sorted(one for one in found if one is not None))


def _defining(module: str, names: Iterable[str], package: Path) -> Iterator[str]:
    """The modules in which the names are defined that are imported from a module of ours, which may be a package."""
    file = _file_of(module, package)
    if file is None or file.name != "__init__.py":
        yield module
        return
    passed_on = {
        name: source for source, several in _imports(file) if source.split(".")[0] == PACKAGE.name for name in several
    }
    for name in names:
        if _file_of(f"{module}.{name}", package) is not None:
            yield f"{module}.{name}"
        elif name in passed_on:
            yield from _defining(passed_on[name], (name,), package)
        else:
            yield module


def _imports(file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules that a source imports, but for type checking, each with the names taken from it."""
    waiting: list[ast.AST] = [ast.parse(file.read_bytes())] if file.suffix == ".py" else []
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.ImportFrom):
                yield "." * child.level + (child.module or ""), tuple(one.name for one in child.names)
            elif isinstance(child, ast.Import):
                yield from ((one.name, ()) for one in child.names)
            elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                waiting.append(child)


@lru_cache(maxsize=1024)
def _content(file: Path) -> str:
    content = file.read_bytes()  # a user's module may be a library
    return code_text(ast.parse(content)) if file.suffix == ".py" else content.decode(errors="backslashreplace")


def code_text(node: object) -> str:
    """A syntax tree as text, without docstrings. The output of `ast.unparse` differs between versions of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(code_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for field in node._fields:
        value = getattr(node, field, None)
        if field == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            value = value[1:]
        if value is not None and value != []:  # newer Pythons add fields, empty in code that older ones can read
            parts.append(f"{field}={code_text(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def parts_of(node: Any) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every part of a decoder, with its `_target_` and values. node: resolved."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield find_part(node["_target_"]), node
        for value in node.values():
            yield from parts_of(value)


def modules_of(node: Any) -> Iterator[str]:
    """Where the parts of a decoder are defined, by dotted names; and where a user's is named, as it may be a function's
    partial. node: resolved."""
    for part, values in parts_of(node):
        yield part.__module__
        if not values["_target_"].startswith(f"{PACKAGE.name}."):
            yield values["_target_"].rpartition(".")[0]


def named_files(policy: Mapping[str, Any]) -> dict[str, str]:
    """The files and folders that a policy's knobs name, by knob; also the knobs of policies that it is composed of.

    Which knobs these are is said by the parameters that they are passed to: see `NamesFile`. policy: resolved.
    """
    paths = {path for part, values in parts_of(policy["decoder"]) for path in _paths(part, values)}
    inner = {key: value for key, value in policy.items() if isinstance(value, dict) and key != "decoder"}
    groups = {"": policy, **{f"{key}.": value for key, value in inner.items()}}
    named = {f"{group}{knob}": value for group, knobs in groups.items() for knob, value in knobs.items()}
    return {knob: value for knob, value in named.items() if isinstance(value, str) and value in paths}


def _paths(part: Callable[..., Any], values: Mapping[str, Any]) -> Iterator[str]:
    """The values that parameters marked with `NamesFile` have."""
    parameters, names = inspect.signature(part).parameters, vars(sys.modules[part.__module__])
    for name, value in values.items():
        hint = parameters[name].annotation if name in parameters else None
        if isinstance(hint, str):
            try:
                hint = eval(hint, names)  # our own source, as `typing.get_type_hints` does for all at once
            except NameError:  # of types that are imported for type checking alone
                hint = FilePath if "FilePath" in hint else None
        marks = [mark for one in (hint, *get_args(hint)) for mark in getattr(one, "__metadata__", ())]
        if isinstance(value, str) and any(isinstance(one, NamesFile) and value not in one.words for one in marks):
            yield value
