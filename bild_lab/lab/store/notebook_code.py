"""The code of functions and classes that no file holds, as a notebook's: what they are made of, and
what they reach there.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import (
    CodeType,
    EllipsisType,
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any

from bild_lab.lab.store.code import INSTALLED, PACKAGE

# values that their text tells apart
PLAIN = (NoneType, EllipsisType, bool, int, float, complex, str, bytes)
# attributes of a class that Python writes itself, as functions: for protocols, and where they have no
# __init__ of their own
WRITTEN_BY_PYTHON = ("__subclasshook__", "__init__")


def notebook_code(parts: Mapping[str, Any]) -> tuple[str, set[str]]:
    """A hash of what those functions and classes are made of that no file holds, and the modules of
    ours that they reach. An empty text and nothing where all are in files.

    parts: by their dotted names. What they reach are the names that their code reads: functions,
    classes, and values, with their content. Of the user's other modules it is what the process has
    of them, as that is what runs. A cell that runs again leaves all as it was.
    """
    waiting = deque(part for name, part in parts.items() if _in_no_file(name, part))
    texts: list[str] = []
    our_modules: set[str] = set()
    # what was looked at, and its place, by its identity; it is held, so that no identity comes twice
    seen: dict[int, tuple[int, Any]] = {}
    while waiting:
        part = waiting.popleft()
        if type(part) in PLAIN:
            texts.append(repr(part))
        elif id(part) in seen:
            texts.append(f"again {seen[id(part)][0]}")
        elif isinstance(part, ModuleType):
            if _is_ours(part.__name__):
                our_modules.add(part.__name__)
        else:
            seen[id(part)] = len(seen), part
            if not isinstance(part, FunctionType | type) or _is_of_user(part.__module__):
                text, reached = _described(part)
                texts.append(text)
                waiting += reached
            else:
                texts.append(f"{part.__module__}.{part.__qualname__}")
                if _is_ours(part.__module__):
                    our_modules.add(part.__module__)
    code_hash = hashlib.sha256("\n".join(texts).encode()).hexdigest() if texts else ""
    return code_hash, our_modules


def _in_no_file(name: str, part: Any) -> bool:
    """Whether a part, or the name for a part that is defined elsewhere, is of a notebook."""
    return any(
        _is_of_user(module) and not _file(module)
        for module in (getattr(part, "__module__", None), name.partition(".")[0])
    )


def _is_ours(module: str | None) -> bool:
    return str(module).partition(".")[0] == PACKAGE.name


def _is_of_user(module: str | None) -> bool:
    """Whether a module is neither Python's, nor ours, nor one of an installed package. None: of what
    names no module.
    """
    if module not in sys.modules or module.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = _file(module)
    in_package = file is not None and INSTALLED.intersection(Path(file).parts)
    return not in_package and not _is_ours(module)


def _file(module: str) -> str | None:
    """The file of an imported module, or the first folder of a package without one; None for a
    notebook.
    """
    loaded = sys.modules.get(module)
    return getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), None)


def _described(part: Any) -> tuple[str, list[Any]]:
    """What a part is, as text, and what it reaches in turn, in an order that is the same in every
    process.
    """
    kind = type(part).__qualname__
    if isinstance(part, FunctionType):
        return _function(part)
    if isinstance(part, type):
        return _class(part)
    if isinstance(part, partial | partialmethod):
        return f"{kind} {[*part.keywords]}", [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, MethodType):
        return kind, [part.__func__, part.__self__]
    if isinstance(part, property):
        return kind, [part.fget, part.fset, part.fdel]
    if isinstance(part, cached_property):
        return kind, [part.func]
    if isinstance(part, staticmethod | classmethod):
        return kind, [part.__func__]
    attributes = getattr(part, "__dict__", {})
    if "__wrapped__" in attributes:  # a function that keeps its answers
        return kind, [attributes["__wrapped__"]]
    return _value(part, attributes)


def _value(part: Any, attributes: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """As `_described`, of what is neither a function nor a class."""
    kind = type(part)
    is_of_user = _is_of_user(kind.__module__)
    if not is_of_user and kind.__module__ != "builtins":
        return _stored(part)
    # of a user's class its code and all attributes count
    reached = [kind, *attributes.values()] if is_of_user else []
    text = f"{kind.__qualname__} {[*attributes]}"
    if isinstance(part, list | tuple):
        return f"{text} {len(part)}", [*reached, *part]
    if isinstance(part, set | frozenset):
        return f"{text} {len(part)}", [*reached, *sorted(part, key=_place_in_set)]
    if isinstance(part, dict):
        return f"{text} {len(part)}", [*reached, *part.keys(), *part.values()]
    is_stored_by_attributes = all(
        getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__")
    )
    if attributes and is_stored_by_attributes and not isinstance(part, PLAIN):
        return text, reached
    return _stored(part)


def _place_in_set(element: Any) -> str:
    """A text that orders the elements of a set, whose own order differs from process to process."""
    if isinstance(element, frozenset):
        return str(sorted(map(_place_in_set, element)))
    if isinstance(element, tuple):
        return str([*map(_place_in_set, element)])
    if type(element) in PLAIN:
        return repr(element)
    return getattr(element, "__qualname__", type(element).__qualname__)


def _class(part: type) -> tuple[str, list[Any]]:
    """A class's name and those of its attributes; its bases and attributes."""
    attributes = {
        name: value for name, value in vars(part).items() if _is_of_author(part, name, value)
    }
    return f"class {part.__qualname__} {[*attributes]}", [*part.__bases__, *attributes.values()]


def _is_of_author(part: type, name: str, value: Any) -> bool:
    """Whether the author of a class wrote this attribute; Python writes others, also later."""
    if not name.startswith("__"):
        return name not in ("_abc_impl", "_is_protocol", "_is_runtime_protocol")
    if not isinstance(value, FunctionType | staticmethod | classmethod | property):
        return False
    return name not in WRITTEN_BY_PYTHON or value.__qualname__ == f"{part.__qualname__}.{name}"


def _function(part: FunctionType) -> tuple[str, list[Any]]:
    """A function's code; its constants and default values, and the values of the names that it
    reads.
    """
    codes = list(_codes(part.__code__))
    constants = [
        constant
        for code in codes
        for constant in code.co_consts
        if not isinstance(constant, CodeType)
    ]
    defaults = [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
    closure = [cell.cell_contents for cell in part.__closure__ or () if _is_filled(cell)]
    read = _read_names(part, dict.fromkeys(name for code in codes for name in code.co_names))
    text = f"def {part.__qualname__} {[*read]} {len(defaults)} {[*map(_code, codes)]}"
    return text, [*constants, *defaults, *closure, *read.values(), *vars(part).values()]


def _read_names(part: FunctionType, names: Collection[str]) -> dict[str, Any]:
    """What a function may read by these names: of its module, modules that it imports itself, and
    attributes of those modules among them that are ours or the user's.
    """
    read = {name: part.__globals__[name] for name in names if name in part.__globals__}
    read |= {name: sys.modules[name] for name in names if name not in read and _is_of_user(name)}
    waiting = deque(read.values())
    while waiting:
        module = waiting.popleft()
        if isinstance(module, ModuleType) and (
            _is_of_user(module.__name__) or _is_ours(module.__name__)
        ):
            attributes = {
                f"{module.__name__}.{name}": vars(module)[name]
                for name in names
                if name in vars(module)
            }
            waiting += [value for name, value in attributes.items() if name not in read]
            read |= attributes
    return read


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType) -> str:
    """What code does with its constants, wherever it stands."""
    names = (code.co_names, code.co_varnames, code.co_freevars)
    # which errors it catches is in a table of its own
    instructions = f"{code.co_code.hex()} {code.co_exceptiontable.hex()}"
    return f"{instructions} {len(code.co_consts)} {names} {code.co_argcount} {code.co_flags}"


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return False
    return True


def _stored(value: Any) -> tuple[str, list[Any]]:
    """A value as its type and a hash that equal values share, and the functions and classes in it; of
    one that cannot be stored the type alone.
    """
    kind, content = type(value).__qualname__, hashlib.sha256()
    pickler = _Pickler(content)
    try:
        pickler.dump(value)
    except Exception:  # whatever an object raises
        return kind, pickler.reached
    return f"{kind} {content.hexdigest()}", pickler.reached


class _Pickler(pickle.Pickler):
    """Feeds a hash with pickles that are the same in every process, of functions and classes with
    their names alone. reached: these.
    """

    def __init__(self, content: Any) -> None:
        super().__init__(SimpleNamespace(write=content.update))
        self.reached: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # reading results does not need it
        if isinstance(value, FunctionType | type) and (
            _is_ours(value.__module__) or _is_of_user(value.__module__)
        ):
            self.reached.append(value)
            return str, (value.__qualname__,)
        if torch is not None and isinstance(value, torch.Tensor):  # else by its place in memory
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return tuple, ((str(value.dtype), tuple(value.shape), numbers.tobytes()),)
        return NotImplemented
