"""From a policy's configuration to the objects that decode."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.engine.protocols import Method
from bild_lab.errors import UserError
from bild_lab.lab.config import compose_policy


def build_method(policy: DictConfig, models: dict[str, Callable[[], Any]]) -> Method:
    """The policy's `decoder`: every part built from its `_target_` and values.

    A part with a parameter named like one of `models` ("target", "draft") gets that model.
    Raises UserError for wrong knobs.
    """
    try:
        # the interpolations of a policy start at the root of the configuration
        root = OmegaConf.create({"policy": OmegaConf.to_container(policy)})
        node = OmegaConf.to_container(root.policy.decoder, resolve=True)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):  # of a policy that this one is composed of
            raise error.__cause__ from error
        raise UserError(f"policy {policy.name}: {str(error).splitlines()[0]}") from error
    return build(node, models)


def build(node: Any, models: dict[str, Callable[[], Any]]) -> Any:
    """Turn nested `_target_` mappings into objects, innermost first. Other values are unchanged.

    Raises UserError for a `_target_` that cannot be used, and for values that a part cannot take.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    # values first, so that a threshold out of range is found before a model is read
    values = {key: build(value, models) for key, value in node.items() if key != "_target_"}
    part = _part(node["_target_"])
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


def _part(path: Any) -> Callable[..., Any]:
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
