"""The code that a point can reach, and its hash.

A finished point stays valid while it is the same. A new drafter, a changed comment or another
report keep all points; a changed acceptance rule measures anew those whose policies use it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from bild_lab.files import existing_path, file_digest

PACKAGE = Path(__file__).resolve().parents[2]
# Folders and files of modules that can change a number. What lies elsewhere reads, stores or shows,
# or is part of a point's name.
MEASURING = (
    "benchmark",
    "engine",
    "lab/data/prompts.py",
    "lab/measure",
    "lab/metrics",
    "lab/point/build.py",
    "lab/point/decoder.py",
    "lab/point/environment.py",
    "lab/point/history.py",
    "lab/point/languages.py",
    "lab/point/load.py",
    "lab/point/processors.py",
    "lab/point/prompt_forms.py",
    "lab/point/read_model.py",
    "lab/point/streaming.py",
    "lab/schema/questions.py",
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
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CPP = (".cpp", ".h")
# folders of other packages, whose imports are not followed
INSTALLED = {"site-packages", "dist-packages"}
# the user's files that points of this process have reached, with their content then
_reached_of_user: dict[Path, str] = {}


@lru_cache(maxsize=64)
def code_hash(modules: tuple[str, ...] = ()) -> str:
    """A hash, 12 hexadecimal digits, of what every point runs and of what these modules reach.

    modules: where the parts of a policy are defined, by their dotted names; those of other packages
    count as well. Comments, docstrings and layout do not matter, nor where files outside the
    package lie. The hash of a module that no file holds, such as a notebook, is another
    one in each command, as nothing shows whether its code is the same.
    """
    package_contents: list[bytes] = []
    user_contents = _marks(modules)
    for file in reached((*EVERY_POINT, *modules)):
        content = _read(file).content.encode()
        if file.is_relative_to(PACKAGE):
            name = file.relative_to(PACKAGE).as_posix()
            package_contents.append(name.encode() + b"\0" + content + b"\0")
        else:
            user_contents.append(file.name.encode() + b"\0" + content + b"\0")
            if not INSTALLED.intersection(file.parts):
                _reached_of_user[file] = file_digest(file)
    return hashlib.sha256(b"".join([*package_contents, *sorted(user_contents)])).hexdigest()[:12]


def own_code_hash(*modules: str) -> str | None:
    """A hash of the user's own code that these modules reach, as `code_hash`; None for modules of
    ours.
    """
    own_files = [file for file in reached(modules) if not file.is_relative_to(PACKAGE)]
    contents = sorted(
        file.name.encode() + b"\0" + _read(file).content.encode() for file in own_files
    )
    contents += _marks(modules)
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12] if contents else None


def _marks(modules: Iterable[str]) -> list[bytes]:
    """The command's mark if one of these modules is in no file; nothing if all are."""
    return [_mark().encode()] if any(map(_is_in_no_file, modules)) else []


@lru_cache
def _mark() -> str:
    """A text that no other command has."""
    return uuid4().hex


def _is_in_no_file(module: str) -> bool:
    """Whether an imported module is a notebook, or a text that was typed in. Python's own may be
    built in.
    """
    if module not in sys.modules or module.partition(".")[0] in sys.stdlib_module_names:
        return False
    return getattr(sys.modules[module], "__file__", None) is None


def reread_sources() -> None:
    """Look at all sources again, as another command: in a process that goes on, they may have changed.

    Where one of the user's has, all of them are imported anew: a point would else be named by code
    that did not run.
    """
    for cached in (code_hash, _imported, _read, _mark):
        cached.cache_clear()
    if any(
        not file.is_file() or file_digest(file) != digest
        for file, digest in _reached_of_user.items()
    ):
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and Path(file) in _reached_of_user and name != "__main__":
                del sys.modules[name]
                package, _, module_name = name.rpartition(".")
                if package in sys.modules:  # which holds it as an attribute, too
                    vars(sys.modules[package]).pop(module_name, None)
        _reached_of_user.clear()


def reached(modules: Iterable[str]) -> list[Path]:
    """The files of these modules and of all that they import, as far as they can change a number,
    in a fixed order.

    Of our files only imports of ours count; of a user's all, but for Python's own modules and
    installed packages. C++ sources count beside their module, and so do files that a source names
    in a text of its own: beside it, or for a user's source in the working directory.
    """
    reached_files: set[Path] = set()
    waiting = [file for name in modules if (file := _file_of(name)) is not None]
    while waiting:
        file = waiting.pop()
        if file in reached_files:
            continue
        reached_files.add(file)
        reached_files.update(source for source in file.parent.iterdir() if source.suffix in CPP)
        for imported in _imported(file):
            if _measures(imported):
                waiting.append(imported)
    return sorted(reached_files)


def _measures(file: Path) -> bool:
    """Whether a file can change a number of a point."""
    if not file.is_relative_to(PACKAGE):
        return not INSTALLED.intersection(file.parts)
    return any(file.is_relative_to(PACKAGE / folder) for folder in MEASURING)


def _file_of(module: str) -> Path | None:
    """The module's file; that of another package where Python finds it, unless it is Python's own.

    Imports nothing.
    """
    top_level, *inner = module.split(".")
    if top_level == PACKAGE.name:
        return _source(PACKAGE.joinpath(*inner))
    if top_level in sys.stdlib_module_names:
        return None
    if (loaded := getattr(sys.modules.get(module), "__file__", None)) is not None:
        return Path(loaded)
    spec = None
    with suppress(ImportError, ValueError):  # the module of a script or a notebook has no spec
        spec = find_spec(top_level)
    if spec is None or not inner:
        return Path(spec.origin) if spec is not None and spec.has_location else None
    folders = [
        Path(location).joinpath(*inner) for location in spec.submodule_search_locations or ()
    ]
    return next((file for folder in folders if (file := _source(folder)) is not None), None)


def _source(path: Path) -> Path | None:
    """The source of the module or package that a path without a suffix names; None if there is
    none.
    """
    return next(
        (file for file in (Path(f"{path}.py"), path / "__init__.py") if file.is_file()), None
    )


@lru_cache(maxsize=1024)
def _imported(file: Path) -> tuple[Path, ...]:
    """The files that a source imports or names, anywhere but for type checking; of a file of ours
    those of ours.
    """
    in_package = file.is_relative_to(PACKAGE)
    if not in_package and INSTALLED.intersection(file.parts):
        return ()
    files: set[Path | None] = set(_named_in(file, in_package))
    for module, names in _read(file).imports:
        if in_package and module.split(".")[0] != PACKAGE.name:
            continue  # the versions of other packages are named beside this hash
        if module.startswith("."):
            files.update(_relative_sources(file, module, names))
        else:
            files.update(_file_of(name) for name in _importable_names(module, names))
    return tuple(sorted(imported for imported in files if imported is not None))


def _relative_sources(file: Path, module: str, names: Iterable[str]) -> Iterator[Path | None]:
    """The sources that `from .module import names` in this file may run."""
    inner = module.lstrip(".")
    levels = len(module) - len(inner)
    folder = file.parents[levels - 1]
    yield _source(folder)
    for package_name in filter(None, inner.split(".")):
        folder = folder / package_name
        yield _source(folder)
    for name in names:
        yield _source(folder / name)


def _importable_names(module: str, names: Iterable[str]) -> Iterator[str]:
    """The module, the packages that it is in, and the modules in it that the names may be."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
    for name in names:
        yield f"{module}.{name}"


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
            yield "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in IMPORTING and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, ()


def _called(node: ast.Call) -> str:
    """The last name of what is called: `import_module` of `importlib.import_module(…)`."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _named_in(file: Path, in_package: bool) -> Iterator[Path]:
    """Files that texts in a source name: data to read, and modules to load by their file.

    A source of the package names files beside it; a user's also files in the working directory.
    """
    folders = [file.parent] if in_package else [file.parent, Path.cwd()]
    names_beside = set(os.listdir(file.parent)) if in_package else set()
    for text in _read(file).texts:
        # most texts are none, and to ask the disk about each takes longer than all else here
        if in_package and text.rstrip("/").rpartition("/")[2] not in names_beside:
            continue
        for folder in folders:
            path = existing_path(text, folder)
            if path is None or not path.is_file():
                continue
            path = path.resolve()
            if not in_package or path.parent == file.parent:
                yield path


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
