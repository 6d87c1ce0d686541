"""Hashes of content: of a point's inputs, of a dataset's examples, of files and of what a policy
names.

A finished point stays valid while these are the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from bild_lab.files import FilePath, NamesFile, existing_path, file_digest
from bild_lab.lab.config.policies import find_part
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.store.code import PACKAGE, code_hash


def content_hash(content: dict[str, Any]) -> str:
    """A hash of 12 hexadecimal digits.

    The order of the keys does not matter, and 2.0 counts as 2.
    """
    return hashlib.sha256(canonical_text(content).encode()).hexdigest()[:12]


def canonical_text(value: Any) -> str:
    """JSON that equal values share: the order of keys does not matter, and 2.0 counts as 2."""
    return json.dumps(plain_numbers(value), sort_keys=True, ensure_ascii=False, default=str)


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
        (example.id, example.prompt, example.references)
        + ((example.continues,) if example.continues else ())
        for example in examples
    ]
    return content_hash({"examples": rows})


def file_hash(path: str) -> str | None:
    """The hash of a file, or of all files in a folder; None if the path does not exist."""
    location = Path(path).expanduser()
    if location.is_file():
        return file_digest(location)
    if not location.is_dir():
        return None
    files = sorted(
        file for file in location.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return content_hash({str(file.relative_to(location)): file_digest(file) for file in files})


def parts_of(node: Any) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every part of a decoder: its class or function, and its `_target_` and values.

    node: resolved.
    """
    if isinstance(node, dict) and "_target_" in node:
        yield find_part(node["_target_"]), node
    for value in _values_of(node):
        yield from parts_of(value)


def modules_of(node: Any) -> Iterator[str]:
    """The dotted names of the modules that define a decoder's parts.

    The module that names a user's part counts as well, as the part may be a function's partial.
    node: resolved.
    """
    for factory, values in parts_of(node):
        yield factory.__module__
        if not values["_target_"].startswith(f"{PACKAGE.name}."):
            yield values["_target_"].rpartition(".")[0]


def parts_code_hash(node: Any) -> str:
    """The hash of what every point runs and of the code of these parts. node: resolved."""
    return code_hash(tuple(sorted(set(modules_of(node)))))


def content_of(node: Any) -> Any:
    """A policy, or other parts with their values, with the content of every file and folder that a
    value names.

    Of a parameter marked with `NamesFile` the content stands in place of the path, so that the file
    may move. A part of the user's own may have no marks: there every text that is the path of
    something counts with its content, too. Texts that are no paths stay as they are. node:
    resolved.
    """
    contents: dict[str, str] = {}
    for factory, values in parts_of(node):
        if values["_target_"].startswith(f"{PACKAGE.name}."):
            continue
        for text in _texts(values):
            if content := _content_at(text, factory):
                contents[text] = f"{text} {content}"
    for factory, values in parts_of(node):
        contents |= {path: file_hash(path) or path for path in _paths(factory, values)}
    return _replaced(node, contents)


def _replaced(node: Any, contents: Mapping[str, str]) -> Any:
    """The node with other texts in place of these."""
    if isinstance(node, dict):
        return {key: _replaced(value, contents) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_replaced(value, contents) for value in node]
    return contents.get(node, node) if isinstance(node, str) else node


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


def _content_at(text: str, factory: Callable[..., Any]) -> str | None:
    """The hash of the file or folder that a text names, in the working directory or beside the
    part's own source.

    None if there is neither, and for folders that hold the results of this run or the source.
    """
    folders = [Path.cwd()]
    if source := getattr(sys.modules.get(factory.__module__), "__file__", None):
        folders.append(Path(source).parent)
    folders_in_use = [Path.cwd() / "outputs", *folders[1:]]
    for folder in folders:
        path = existing_path(text, folder)
        if path is None:
            continue
        if not any(in_use.is_relative_to(path.resolve()) for in_use in folders_in_use):
            return file_hash(str(path))
    return None


def named_files(policy: Mapping[str, Any]) -> dict[str, str]:
    """The files and folders that a policy's knobs name, by knob; also the knobs of policies that it
    is composed of.

    Which knobs these are is said by the parameters that they are passed to: see `NamesFile`.
    policy: resolved.
    """
    paths = set()
    for factory, values in parts_of(policy["decoder"]):
        paths.update(_paths(factory, values))
    knobs = dict(policy)
    for name, group in policy.items():
        if isinstance(group, dict) and name != "decoder":
            knobs |= {f"{name}.{knob}": value for knob, value in group.items()}
    return {
        knob: value for knob, value in knobs.items() if isinstance(value, str) and value in paths
    }


def _paths(factory: Callable[..., Any], values: Mapping[str, Any]) -> Iterator[str]:
    """The values that parameters marked with `NamesFile` have."""
    parameters = inspect.signature(factory).parameters
    module_names = vars(sys.modules[factory.__module__])
    for name, value in values.items():
        if name in parameters and isinstance(value, str):
            marks = _marks(parameters[name].annotation, module_names)
            if any(value not in mark.words for mark in marks):
                yield value


def _marks(annotation: Any, module_names: dict[str, Any]) -> list[NamesFile]:
    """The marks of a parameter's annotation, which may be source text in its module."""
    if isinstance(annotation, str):
        try:
            # our own source, as `typing.get_type_hints` does for all at once
            annotation = eval(annotation, module_names)
        except NameError:  # the type is imported for type checking alone
            annotation = FilePath if "FilePath" in annotation else None
    marks = []
    for annotated in (annotation, *get_args(annotation)):
        marks += getattr(annotated, "__metadata__", ())
    return [mark for mark in marks if isinstance(mark, NamesFile)]
