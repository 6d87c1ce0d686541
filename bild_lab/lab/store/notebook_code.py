"""The code of functions and classes that no file holds, as a notebook's: what they are made of, and
what they reach there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bild_lab.lab.store.code import INSTALLED, PACKAGE

# attributes of a class that Python writes itself, as functions: for protocols, and where they have no
# __init__ of their own
WRITTEN_BY_PYTHON = ("__subclasshook__", "__init__")


def notebook_code(parts: Iterable[Any]) -> tuple[str, set[str]]:
    """What those functions and classes are made of that no file holds, as text, and the modules of
    ours that they reach. Nothing for those that are in a file.

    What they reach are the names that their code reads: functions, classes, and values, with their
    content. Of the user's other modules it is what the process has of them, as that is what runs. A
    cell that runs again leaves all as it was.
    """
    texts: list[str] = []
    our_modules: set[str] = set()
    waiting = [
        part for part in parts if _is_of_user(part.__module__) and not _file(part.__module__)
    ]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, partial):
            waiting += [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, staticmethod | classmethod):
            waiting.append(part.__func__)
        elif isinstance(part, property):
            waiting += [function for function in (part.fget, part.fset) if function is not None]
        elif isinstance(part, FunctionType | type):
            if id(part) in seen:
                texts.append(f"again {part.__qualname__}")
            elif _is_of_user(part.__module__):
                seen.add(id(part))
                text, reached = _function(part) if isinstance(part, FunctionType) else _class(part)
                texts.append(text)
                waiting += reached
            elif part.__module__.partition(".")[0] == PACKAGE.name:
                our_modules.add(part.__module__)
        elif not isinstance(part, ModuleType):
            texts.append(_value(part))
    return "\n".join(texts), our_modules


def _is_of_user(module: str) -> bool:
    """Whether a module is neither Python's, nor ours, nor one of an installed package."""
    top_level = module.partition(".")[0]
    if top_level in sys.stdlib_module_names or top_level == PACKAGE.name:
        return False
    file = _file(module)
    return module in sys.modules and (file is None or not INSTALLED.intersection(Path(file).parts))


def _file(module: str) -> str | None:
    """The file of an imported module; None without."""
    return getattr(sys.modules.get(module), "__file__", None)


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
    """A function's code; its default values, and the values of the names that it reads."""
    codes = list(_codes(part.__code__))
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    read = {name: part.__globals__[name] for name in names if name in part.__globals__}
    for module in [value for value in read.values() if isinstance(value, ModuleType)]:
        if _is_of_user(module.__name__):
            attributes = vars(module)
            read |= {
                f"{module.__name__}.{name}": attributes[name]
                for name in names
                if name in attributes
            }
    closure = [cell.cell_contents for cell in part.__closure__ or () if _is_filled(cell)]
    defaults = [*(part.__defaults__ or ()), *(part.__kwdefaults__ or {}).values()]
    text = f"def {part.__qualname__} {[*read]} {[*map(_code, codes)]}"
    return text, [*defaults, *closure, *read.values(), *vars(part).values()]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType) -> str:
    """What code does, wherever it stands."""
    constants = [_value(value) for value in code.co_consts if not isinstance(value, CodeType)]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {constants} {names} {code.co_argcount} {code.co_flags}"


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return False
    return True


def _value(value: Any) -> str:
    """A value as text that equal values share; of one that cannot be written its type alone."""
    if isinstance(value, set | frozenset):  # whose order differs from process to process
        return f"{{{sorted(map(_value, value))}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[*map(_value, value)]}"
    if isinstance(value, dict):
        return f"dict{[(_value(key), _value(entry)) for key, entry in value.items()]}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    try:
        return f"{type(value).__qualname__} {pickle.dumps(value).hex()}"
    except Exception:  # whatever an object raises
        return type(value).__qualname__
