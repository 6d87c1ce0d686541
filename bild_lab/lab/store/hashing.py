"""Content hashes: of a point's inputs, of a dataset's examples, of files, and of the code that a
point can reach.

A finished point stays valid while these are the same. A new drafter, a changed comment or another
report keep all points; a changed acceptance rule measures anew those whose policies use it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from bild_lab.files import FilePath, NamesFile, file_digest
from bild_lab.lab.config.groups import find_part
from bild_lab.lab.data.examples import Example


def content_hash(content: dict[str, Any]) -> str:
    """A hash of 12 hexadecimal digits.

    The order of the keys does not matter, and 2.0 counts as 2.
    """
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
    rows = [
        (one.id, one.prompt, one.references) + ((one.continues,) if one.continues else ())
        for one in examples
    ]
    return content_hash({"examples": rows})


def file_hash(path: str) -> str | None:
    """The hash of a file, or of all files in a folder; None if the path does not exist."""
    named = Path(path).expanduser()
    if not named.is_dir():
        return file_digest(named) if named.is_file() else None
    files = sorted(
        file for file in named.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return content_hash({str(file.relative_to(named)): file_digest(file) for file in files})


PACKAGE = Path(__file__).resolve().parents[2]
# Folders and files of modules that can change a number. What lies elsewhere reads, stores or shows,
# or is part of a point's name.
MEASURING = (
    "benchmark",
    "engine",
    "lab/data/prompts.py",
    "lab/data/turns.py",
    "lab/measure",
    "lab/metrics",
    "lab/point/decoder.py",
    "lab/point/environment.py",
    "lab/point/history.py",
    "lab/point/languages.py",
    "lab/point/load.py",
    "lab/point/prompt_forms.py",
    "lab/point/streaming.py",
    "lab/schema/statistics.py",
    "screening",
)
EVERY_POINT = (
    "bild_lab.lab.measure.runner",
    "bild_lab.lab.measure.score",
    "bild_lab.lab.point.load",
    "bild_lab.engine.decode",
)
IMPORTING = ("import_module", "__import__")  # functions that import the module that a text names
NOT_FILES = ("/dev", "/proc", "/sys")  # devices, and what the system says of itself
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CPP = (".cpp", ".h")
# folders of other packages, whose imports are not followed
INSTALLED = {"site-packages", "dist-packages"}


@lru_cache(maxsize=64)
def code_hash(modules: tuple[str, ...] = (), package: Path = PACKAGE) -> str:
    """A hash, 12 hexadecimal digits, of what every point runs and of what these modules reach.

    modules: where the parts of a policy are defined, by their dotted names; those of other packages
    count as well. Comments, docstrings and layout do not matter, nor where files outside the
    package lie.
    """
    own, others = [], []
    for file in reached((*EVERY_POINT, *modules), package):
        inside = file.is_relative_to(package)
        name = file.relative_to(package).as_posix() if inside else file.name
        (own if inside else others).append(
            name.encode() + b"\0" + _read(file).content.encode() + b"\0"
        )
    return hashlib.sha256(b"".join([*own, *sorted(others)])).hexdigest()[:12]


def parts_code_hash(node: Any) -> str:
    """The hash of what every point runs and of the code of these parts. node: resolved."""
    return code_hash(tuple(sorted(set(modules_of(node)))))


def reread_sources() -> None:
    """Look at all sources again: in a process that goes on, they may have changed."""
    for cached in (code_hash, _imported, _read):
        cached.cache_clear()


def reached(modules: Iterable[str], package: Path = PACKAGE) -> list[Path]:
    """The files of these modules and of all that they import, as far as they can change a number,
    in a fixed order.

    Of our package only the modules count whose names are imported from it; of a user's files all
    that they import, but for Python's own modules and installed packages. C++ sources count beside
    their module, and so do files that a source names in a text of its own: beside it, or for a
    user's source in the working directory.
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
    """The module's file; that of another package where Python finds it, unless it is Python's own.

    Imports nothing.
    """
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
    """The source of the module or package that a path without a suffix names; None if there is
    none.
    """
    return next(
        (file for file in (Path(f"{path}.py"), path / "__init__.py") if file.is_file()), None
    )


@lru_cache(maxsize=1024)
def _imported(file: Path, package: Path) -> tuple[Path, ...]:
    """The files that a source imports or names, anywhere but for type checking; of a file of ours
    those of ours.
    """
    ours = file.is_relative_to(package)
    if not ours and INSTALLED.intersection(file.parts):
        return ()
    found: set[Path | None] = set(
        _named_in(file, [file.parent] if ours else [file.parent, Path.cwd()])
    )
    if ours:
        found = {named for named in found if named.parent == file.parent}
    for module, names in _read(file).imports:
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
    """The modules in which the names are defined that are imported from a module of ours, which may
    be a package.
    """
    file = _file_of(module, package)
    if file is None or file.name != "__init__.py":
        yield module
        return
    passed_on = {
        name: source
        for source, several in _read(file).imports
        if source.split(".")[0] == PACKAGE.name
        for name in several
    }
    for name in names:
        if _file_of(f"{module}.{name}", package) is not None:
            yield f"{module}.{name}"
        elif name in passed_on:
            yield from _defining(passed_on[name], (name,), package)
        else:
            yield module


@dataclass(frozen=True)
class _Source:
    """What counts of a file: the modules that it imports, each with the names taken from it, its
    texts, its content.
    """

    imports: tuple[tuple[str, tuple[str, ...]], ...]
    texts: tuple[str, ...]
    content: str


@lru_cache(maxsize=1024)
def _read(file: Path) -> _Source:
    """What counts of a file as it was when it was first read, see `reread_sources`."""
    source = _parsed(file.read_bytes()) if file.suffix == ".py" else None
    return source or _Source((), (), file_digest(file))


@lru_cache(maxsize=1024)
def _parsed(content: bytes) -> _Source | None:
    """What counts of a Python source; None for another text, such as a template that ends in .py.

    Imports for type checking alone do not count.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return None
    nodes = list(_nodes(tree))
    texts = {
        node.value: None
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return _Source(tuple(_imports(nodes)), tuple(texts), code_text(tree))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules that these nodes of a source import, each with the names taken from it."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), tuple(one.name for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, ()) for one in node.names)
        elif isinstance(node, ast.Call) and _called(node) in IMPORTING and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, ()


def _called(node: ast.Call) -> str:
    """The last name of what is called: `import_module` of `importlib.import_module(…)`."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _named_in(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Files that texts in a source name, in these folders: data to read, and modules to load by
    their file.
    """
    for text in _read(file).texts:
        for folder in folders:
            named = _existing(text, folder)
            if named is not None and named.is_file():
                yield named.resolve()


def _nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes of a Python source, but for type checking."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            yield child
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                waiting.append(child)


def code_text(node: object) -> str:
    """A syntax tree as text, without docstrings.

    The output of `ast.unparse` differs between versions of Python.
    """
    if isinstance(node, list):
        return f"[{','.join(map(code_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for field in node._fields:
        value = getattr(node, field, None)
        if (
            field == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            value = value[1:]
        # newer Pythons add fields, empty in code that older ones can read
        if value is not None and value != []:
            parts.append(f"{field}={code_text(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def parts_of(node: Any) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every part of a decoder, with its `_target_` and values. node: resolved."""
    if isinstance(node, dict) and "_target_" in node:
        yield find_part(node["_target_"]), node
    for value in _values_of(node):
        yield from parts_of(value)


def modules_of(node: Any) -> Iterator[str]:
    """Where the parts of a decoder are defined, by dotted names; and where a user's is named, as it
    may be a function's partial. node: resolved."""
    for part, values in parts_of(node):
        yield part.__module__
        if not values["_target_"].startswith(f"{PACKAGE.name}."):
            yield values["_target_"].rpartition(".")[0]


def content_of(node: Any) -> Any:
    """A policy, or other parts with their values, with the content of every file and folder that a
    value names.

    Of a parameter marked with `NamesFile` the content stands in place of the path, so that the file
    may move. A part of the user's own may have no marks: there every text that is the path of
    something counts with its content, too. Texts that are no paths stay as they are. node:
    resolved.
    """
    contents: dict[str, str] = {}
    for part, values in parts_of(node):
        if not values["_target_"].startswith(f"{PACKAGE.name}."):
            contents |= {
                text: f"{text} {found}"
                for text in _texts(values)
                if (found := _content_at(text, part))
            }
    for part, values in parts_of(node):
        contents |= {path: file_hash(path) or path for path in _paths(part, values)}
    return _replaced(node, contents)


def _replaced(node: Any, others: Mapping[str, str]) -> Any:
    """The node with other texts in place of these."""
    if isinstance(node, dict):
        return {key: _replaced(value, others) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_replaced(value, others) for value in node]
    return others.get(node, node) if isinstance(node, str) else node


def _texts(node: Any) -> Iterator[str]:
    """All texts in a part's values, without its `_target_` and without those of the parts inside
    it.
    """
    if isinstance(node, str):
        yield node
    for value in _values_of(node):
        if not (isinstance(value, dict) and "_target_" in value):
            yield from _texts(value)


def _values_of(node: Any) -> list[Any]:
    """What a mapping or a list holds, without a part's `_target_`; nothing for plain values."""
    if isinstance(node, dict):
        return [value for key, value in node.items() if key != "_target_"]
    return node if isinstance(node, list) else []


def _content_at(text: str, part: Callable[..., Any]) -> str | None:
    """The hash of the file or folder that a text names, in the working directory or beside the
    part's own source.

    None if there is neither, and for folders that hold the results of this run or the source.
    """
    folders = [Path.cwd()]
    if source := getattr(sys.modules.get(part.__module__), "__file__", None):
        folders.append(Path(source).parent)
    holding = [Path.cwd() / "outputs", *folders[1:]]
    for folder in folders:
        named = _existing(text, folder)
        if named is not None and not any(one.is_relative_to(named.resolve()) for one in holding):
            return file_hash(str(named))
    return None


def _existing(text: str, folder: Path) -> Path | None:
    """The file or folder that a text names, relative to this folder; None for a text that is no
    path.
    """
    try:
        named = folder / Path(text).expanduser()
        known = text.strip() and named.exists() and not any(map(named.is_relative_to, NOT_FILES))
        return named if known else None
    except (OSError, RuntimeError, ValueError):
        # too long for a path, a user that there is not, a zero byte
        return None


def named_files(policy: Mapping[str, Any]) -> dict[str, str]:
    """The files and folders that a policy's knobs name, by knob; also the knobs of policies that it
    is composed of.

    Which knobs these are is said by the parameters that they are passed to: see `NamesFile`.
    policy: resolved.
    """
    paths = {path for part, values in parts_of(policy["decoder"]) for path in _paths(part, values)}
    inner = {
        key: value for key, value in policy.items() if isinstance(value, dict) and key != "decoder"
    }
    groups = {"": policy, **{f"{key}.": value for key, value in inner.items()}}
    named = {
        f"{group}{knob}": value for group, knobs in groups.items() for knob, value in knobs.items()
    }
    return {
        knob: value for knob, value in named.items() if isinstance(value, str) and value in paths
    }


def _paths(part: Callable[..., Any], values: Mapping[str, Any]) -> Iterator[str]:
    """The values that parameters marked with `NamesFile` have."""
    parameters, names = inspect.signature(part).parameters, vars(sys.modules[part.__module__])
    for name, value in values.items():
        hint = parameters[name].annotation if name in parameters else None
        if isinstance(hint, str):
            try:
                # our own source, as `typing.get_type_hints` does for all at once
                hint = eval(hint, names)
            except NameError:  # of types that are imported for type checking alone
                hint = FilePath if "FilePath" in hint else None
        marks = [
            mark for one in (hint, *get_args(hint)) for mark in getattr(one, "__metadata__", ())
        ]
        if isinstance(value, str) and any(
            isinstance(one, NamesFile) and value not in one.words for one in marks
        ):
            yield value
