"""Policies: their knobs, the parts of their decoders, and their labels."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, cause_in_words, raised_at, suggestion, warn_once
from bild_lab.lab.config.compose import compose_policy, knob_values, policy_names
from bild_lab.lab.schema.formatting import knob_value


def require_policy(policy: Any) -> None:
    """Raise UserError unless a policy has a name, a decoder, and the knobs of its file with values
    of the right type.

    The parts themselves check ranges. A name without a file is the user's own policy, of which a
    knob that changes nothing is logged.
    """
    if not OmegaConf.is_dict(policy):
        raise UserError(f"policy must be one of {', '.join(policy_names())}, got {policy!r}")
    if not isinstance(policy.get("name"), str):
        raise UserError(
            f"policy must have a name, got {policy.get('name')!r}; write name: NAME into its file"
        )
    if not OmegaConf.is_dict(policy.get("decoder")) or not isinstance(
        policy.decoder.get("_target_"), str
    ):
        raise UserError(
            f"policy.decoder must name its class in _target_, got {policy.get('decoder')!r}"
        )
    values = knob_values(OmegaConf.to_container(policy, resolve=False))
    if (shipped := shipped_knobs(policy.name)) is None:
        _warn_of_unused(policy, values)
        return
    if differing := set(values) ^ set(shipped):
        knob_names = ", ".join(shipped) or "none"
        raise UserError(
            f"policy {policy.name} has the knobs {knob_names}, not {sorted(differing)[0]!r} or"
            " without it; a policy of your own needs another name"
        )
    for knob, value in values.items():
        default = shipped[knob]
        takes_anything = isinstance(default, bool | dict | None)
        is_group = isinstance(value, dict)
        is_switch = isinstance(value, bool) and isinstance(default, int | float | str)
        if not takes_anything and (is_group or is_switch):
            raise UserError(f"policy.{knob} must be a value such as {default!r}, got {value!r}")


def _warn_of_unused(policy: DictConfig, knobs: Mapping[str, Any]) -> None:
    """Log the knobs of the user's own policy that no other value of it refers to.

    None of a policy that is given them all for its baseline (`BringsBaseline`).
    """
    if hasattr(find_part(policy.decoder._target_), "baseline_knobs"):
        return
    file = OmegaConf.to_yaml(policy, resolve=False)
    for knob in knobs:
        if not re.search(rf"\$\{{[^\n]*\b{re.escape(knob)}\b", file):
            warn_once(
                f"policy {policy.name} has a knob {knob!r} that changes nothing in it: write"
                f" ${{policy.{knob}}} where its value belongs"
            )


@lru_cache
def shipped_knobs(name: str) -> dict[str, Any] | None:
    """The knobs in a policy's file with their values; None if there is no such file."""
    if name not in policy_names():
        return None
    return knob_values(OmegaConf.to_container(compose_policy(name), resolve=False))


def changed_knobs(policy: str, knobs: Mapping[str, Any]) -> list[str]:
    """The knobs whose values differ from those of the policy's file; all of them without such a
    file.

    policy: a name, or a label of `policy_label`.
    """
    shipped = shipped_knobs(policy.partition(" (changed")[0])
    if shipped is None:
        return list(knobs)
    usual = {knob: knob_value(value) for knob, value in shipped.items()}
    return [knob for knob, value in knobs.items() if knob_value(value) != usual.get(knob)]


def find_part(path: Any) -> Callable[..., Any]:
    """The class or function of a dotted path.

    Raises UserError for anything else, and for Python's own functions.
    """
    path = str(path)  # a file may have anything there
    if path.partition(".")[0] in sys.stdlib_module_names:  # a configuration must not run commands
        raise UserError(
            f"{path} belongs to Python itself, not to a decoder; give the dotted path of your own"
            " class"
        )
    try:
        class_or_function = _imported(path)
    except Exception as error:  # a module of the user's may fail in any way
        module_name, _, name = path.rpartition(".")
        known = suggestion(name, getattr(sys.modules.get(module_name), "__dict__", ()))
        # what is not found says so, and a syntax error its line
        is_told = module_name in sys.modules or isinstance(error, ImportError | SyntaxError)
        place = "" if is_told else f" ({raised_at(error)})"
        raise UserError(
            f"cannot find {path}: {cause_in_words(error)}{place}{known}; give the dotted path of a"
            " class; PYTHONPATH=DIR says where modules of your own lie"
        ) from error
    if not callable(class_or_function):
        raise UserError(
            f"{path} is a {type(class_or_function).__name__}: give the dotted path of a class"
        )
    return class_or_function


def _imported(path: str) -> Any:
    """What a dotted path names: its modules are imported, and the names in them looked up."""
    module_name, *names = path.split(".")
    found: Any = importlib.import_module(module_name)
    for name in names:
        if isinstance(found, ModuleType) and not hasattr(found, name):
            # a package that was imported anew does not hold its modules that were not
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def describe_decoder(node: Any) -> str:
    """A decoder's parts and values in one line, such as `ModelDrafter(window=10) +
    Rollback(threshold=2.0)`.

    A value that is null is left out, and a part with no other.
    """
    if not isinstance(node, dict):
        return str(node)
    name = node["_target_"].rsplit(".", 1)[-1] if "_target_" in node else ""
    parts, values = [], []
    for key, child in node.items():
        if key == "_target_" or child is None:
            continue
        if not isinstance(child, dict):
            values.append(f"{key}={child}")
        elif _says_something(child):
            parts.append(describe_decoder(child))
    if name == "DraftThenVerify":
        differing = [f", {value}" for value in values if value != "verify_tail=True"]
        return " + ".join(parts) + "".join(differing)
    return f"{name}({', '.join([*values, *parts])})"


def _says_something(node: dict[str, Any]) -> bool:
    """Whether a part has no values, or one that is not null."""
    values = [value for key, value in node.items() if key != "_target_"]
    return not values or any(value is not None for value in values)


def policy_label(policy: DictConfig) -> str:
    """The policy's name, with the parts or values that differ from its file."""
    try:
        shipped = compose_policy(policy.name).decoder
    except UserError:  # the user's own policy
        return policy.name
    values = flat_values(OmegaConf.to_container(policy.decoder))
    shipped_values = flat_values(OmegaConf.to_container(shipped))
    changed = [
        key for key in {**shipped_values, **values} if values.get(key) != shipped_values.get(key)
    ]
    return f"{policy.name} (changed: {', '.join(changed)})" if changed else policy.name


def flat_values(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    start = f"{prefix}." if prefix else ""
    values: dict[str, Any] = {}
    for name, child in node.items():
        values |= flat_values(child, f"{start}{name}")
    return values
