"""From a policy's configuration to the objects that decode."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.protocols import Method
from bild_lab.errors import UserError
from bild_lab.files import FilePath, NamesFile
from bild_lab.lab.config import compose_policy, resolved


def build_method(policy: DictConfig, models: dict[str, Callable[[], Any]]) -> Method:
    """The policy's `decoder`: every part built from its `_target_` and values.

    A part with a parameter named like one of `models` ("target", "draft") gets that model.
    Raises UserError for wrong knobs.
    """
    return build(resolved(policy)["decoder"], models)


def build(node: Any, models: dict[str, Callable[[], Any]]) -> Any:
    """Turn nested `_target_` mappings into objects, innermost first. Other values are unchanged.

    Raises UserError for a `_target_` that cannot be used, and for values that a part cannot take.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    # values first, so that a threshold out of range is found before a model is read
    values = {key: build(value, models) for key, value in node.items() if key != "_target_"}
    part = find_part(node["_target_"])
    parameters = inspect.signature(part).parameters
    if unknown := sorted(set(values) - set(parameters)):
        known = ", ".join(sorted(set(parameters) - set(models)))
        raise UserError(f"{part.__name__} has no parameter {unknown[0]!r}; it has {known or 'none'}")
    for name in set(parameters) & set(models) - set(values):
        values[name] = models[name]()
    _require_parts(part, values)
    try:
        return part(**values)
    except (TypeError, AttributeError) as error:
        raise UserError(f"{part.__name__}: {error}; got {describe_decoder(node)}") from error


def find_part(path: Any) -> Callable[..., Any]:
    """The class or function of a dotted path. Raises UserError for anything else, and for Python's own functions."""
    if not isinstance(path, str):
        raise UserError(f"cannot find {path}: give the dotted path of a class")
    if path.partition(".")[0] in sys.stdlib_module_names:  # a configuration must not run commands
        raise UserError(f"{path} belongs to Python itself, not to a decoder; give the dotted path of your own class")
    try:
        part = get_object(path)
    except Exception as error:  # Hydra raises errors of its own as well as ImportError
        raise UserError(f"cannot find {path}: give the dotted path of a class") from error
    if not callable(part):
        raise UserError(f"{path} is a {type(part).__name__}: give the dotted path of a class")
    return part


def _require_parts(part: Callable[..., Any], values: dict[str, Any]) -> None:
    """Raise UserError if a parameter declares one of our protocols and gets plain data."""
    module = sys.modules[part.__module__]
    for name, parameter in inspect.signature(part).parameters.items():
        wanted = getattr(module, str(parameter.annotation), None)
        data = values.get(name) is None or isinstance(values[name], bool | int | float | str | list | dict)
        if getattr(wanted, "_is_protocol", False) and data:
            got = values.get(name)
            raise UserError(f"{part.__name__} needs a {wanted.__name__} as its {name}, got {got!r}; give its _target_")


def parts_of(node: Any) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every part of a decoder, with its values. node: resolved."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield find_part(node["_target_"]), {key: value for key, value in node.items() if key != "_target_"}
        for value in node.values():
            yield from parts_of(value)


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
                hint = eval(hint, names)  # noqa: S307: our own source, as `typing.get_type_hints` does for all at once
            except NameError:  # of types that are imported for type checking alone
                hint = FilePath if "FilePath" in hint else None
        marks = [mark for one in (hint, *get_args(hint)) for mark in getattr(one, "__metadata__", ())]
        if isinstance(value, str) and any(isinstance(one, NamesFile) and value not in one.words for one in marks):
            yield value


def describe_decoder(node: Any) -> str:
    """A decoder's parts and values in one line, such as `ModelDrafter(window=10) + Rollback(threshold=2.0)`.

    A part is left out if all its values are null, which switches it off.
    """
    if not isinstance(node, dict):
        return str(node)
    name = node["_target_"].rsplit(".", 1)[-1] if "_target_" in node else ""
    parts = [
        describe_decoder(value) for value in node.values() if isinstance(value, dict) and not is_switched_off(value)
    ]
    values = [f"{key}={value}" for key, value in node.items() if key != "_target_" and not isinstance(value, dict)]
    if name == "DraftThenVerify":
        return " + ".join(parts) + "".join(f", {value}" for value in values if value != "verify_tail=True")
    return f"{name}({', '.join([*values, *parts])})"


def is_switched_off(node: dict[str, Any]) -> bool:
    """Whether a part has values, and all of them are null."""
    values = [value for key, value in node.items() if key != "_target_"]
    return bool(values) and all(value is None for value in values)


def policy_label(policy: DictConfig) -> str:
    """The policy's name, with the parts or values that differ from its file."""
    try:
        shipped = compose_policy(policy.name).decoder
    except UserError:  # the user's own policy
        return policy.name
    ours, theirs = (flatten(OmegaConf.to_container(node)) for node in (policy.decoder, shipped))
    changed = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    return f"{policy.name} (changed: {', '.join(changed)})" if changed else policy.name


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    start = f"{prefix}." if prefix else ""
    return {key: value for name, item in node.items() for key, value in flatten(item, f"{start}{name}").items()}
