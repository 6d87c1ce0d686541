"""From a policy's configuration to the objects that decode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bild_lab.config import compose_policy
from bild_lab.decode import Method
from bild_lab.errors import UserError


def build_method(policy: DictConfig, models: dict[str, Callable[[], Any]]) -> Method:
    """The policy's `decoder`, every part built from its `_target_` and values.

    A part that names a parameter after one of `models` ("target", "draft") is given that model, so
    a part asks for what it needs in its signature. Raises UserError for wrong knobs.
    """
    try:
        # a policy's interpolations are written from the root of the configuration
        root = OmegaConf.create({"policy": OmegaConf.to_container(policy)})
        node = OmegaConf.to_container(root.policy.decoder, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"policy {policy.name}: {str(error).splitlines()[0]}") from error
    return build(node, models)


def build(node: Any, models: dict[str, Callable[[], Any]]) -> Any:
    """Nested `_target_` mappings as objects, innermost first; other values as they are."""
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    # values first: a threshold out of range is told before a model is touched
    values = {key: build(value, models) for key, value in node.items() if key != "_target_"}
    try:
        part = get_object(node["_target_"])
    except Exception as error:  # hydra raises its own and ImportError alike
        raise UserError(f"cannot find {node['_target_']}: give the dotted path of a class") from error
    parameters = inspect.signature(part).parameters
    if unknown := sorted(set(values) - set(parameters)):
        known = ", ".join(sorted(set(parameters) - set(models)))
        raise UserError(f"{part.__name__} has no parameter {unknown[0]!r}; it has {known or 'none'}")
    for name in set(parameters) & set(models) - set(values):
        values[name] = models[name]()
    try:
        return part(**values)
    except (TypeError, AttributeError) as error:
        raise UserError(f"{part.__name__}: {error}; got {described(node)}") from error


def described(node: Any) -> str:
    """A decoder's parts and values in one line, such as `ModelDrafter(window=10) + Rollback(threshold=2.0)`.

    A part whose every value is null is switched off and left out.
    """
    if not isinstance(node, dict):
        return str(node)
    name = node["_target_"].rsplit(".", 1)[-1] if "_target_" in node else ""
    parts = [described(value) for value in node.values() if isinstance(value, dict) and not switched_off(value)]
    values = [f"{key}={value}" for key, value in node.items() if key != "_target_" and not isinstance(value, dict)]
    if name == "DraftThenVerify":
        return " + ".join(parts) + "".join(f", {value}" for value in values if value != "verify_tail=True")
    return f"{name}({', '.join([*values, *parts])})"


def switched_off(node: dict[str, Any]) -> bool:
    """Whether a part was given values, and all of them null."""
    values = [value for key, value in node.items() if key != "_target_"]
    return bool(values) and all(value is None for value in values)


def policy_label(policy: DictConfig) -> str:
    """The policy's name, marked where its parts or their values are not those of its file."""
    try:
        shipped = compose_policy(policy.name).decoder
    except UserError:  # a name of the user's own
        return policy.name
    ours, theirs = (flat(OmegaConf.to_container(node)) for node in (policy.decoder, shipped))
    changed = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    return f"{policy.name} (changed: {', '.join(changed)})" if changed else policy.name


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    start = f"{prefix}." if prefix else ""
    return {key: value for name, item in node.items() for key, value in flat(item, f"{start}{name}").items()}
