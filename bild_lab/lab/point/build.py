"""How a policy's decoder, or a part of it, becomes objects: each `_target_` with its values and models."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Container
from typing import Any

from omegaconf import DictConfig

from bild_lab.engine.protocols import Method
from bild_lab.errors import UserError, raised_at
from bild_lab.lab.config.compose import resolved_policy
from bild_lab.lab.config.policies import describe_decoder, find_part

METHOD_PARTS = ("engine", "draft_shape", "lossless", "decode")  # of `Method`


def build_method(policy: DictConfig, models: dict[str, Callable[[], Any]]) -> Method:
    """The policy's `decoder`: every part built from its `_target_` and values.

    A part with a parameter named like one of `models` ("target", "draft") gets that model.
    Raises UserError for wrong knobs, and for a class that is no method.
    """
    try:
        method = build(resolved_policy(policy)["decoder"], models)
    except UserError as error:
        raise UserError(_to_knobs_of_parts(str(error), policy)) from error
    if lacking := [name for name in METHOD_PARTS if not hasattr(method, name)]:
        raise UserError(
            f"the decoder of policy {policy.get('name')}, a {type(method).__name__}, lacks"
            f" {lacking[0]}; a method has {', '.join(METHOD_PARTS)}, and DraftThenVerify makes one of"
            " a drafter and a rule"
        )
    return method


def _to_knobs_of_parts(message: str, policy: DictConfig) -> str:
    """The message of a part of the policy: a knob of another policy, whose drafter this one takes,
    is set among the knobs for that drafter.
    """
    named = set(re.findall(r"\bpolicy\.(\w+)", message)) - policy.keys()
    if not named:
        return message
    for knob in named:
        message = re.sub(rf"\bpolicy\.{knob}\b", knob, message)
    places = [f"policy.{key}={{{min(named)}:…}}" for key in policy if key.endswith("knobs")]
    where = f"; those of its drafters are set in {' or '.join(places)}" if places else ""
    return f"{message}; policy {policy.get('name')} has no such knob{where}"


def build(node: Any, models: dict[str, Callable[[], Any]]) -> Any:
    """Turn nested `_target_` mappings into objects, innermost first. Other values are unchanged.

    Raises UserError for a `_target_` that cannot be used, and for values that a part cannot take.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        return node
    # values first, so that a threshold out of range is found before a model is read
    values = {key: build(value, models) for key, value in node.items() if key != "_target_"}
    constructor = find_part(node["_target_"])
    parameters = inspect.signature(constructor).parameters
    if unknown := sorted(set(values) - set(parameters)):
        known = ", ".join(sorted(set(parameters) - set(models)))
        raise UserError(
            f"{constructor.__name__} has no parameter {unknown[0]!r}; it has {known or 'none'}"
        )
    for name in set(parameters) & set(models) - set(values):
        values[name] = models[name]()
    _require_parts(constructor, values, models)
    try:
        return constructor(**values)
    except UserError:
        raise
    # how a part of a user's refuses values, and a file that is missing
    except (TypeError, AttributeError, ValueError, OSError) as error:
        hint = ""
        if isinstance(error, TypeError | AttributeError):  # of its own code, or of the call
            is_call = error.__traceback__.tb_next is None
            names = f"{', '.join(models) or 'no models'} come by name"
            hint = f"; {names if is_call else raised_at(error)}"
        raise UserError(
            f"{constructor.__name__}: {error}; got {describe_decoder(node)}{hint}"
        ) from error


def _require_parts(
    constructor: Callable[..., Any], values: dict[str, Any], models: Container[str]
) -> None:
    """Raise UserError if a parameter declares one of our protocols and gets plain data, or a part of
    another kind. models: parameters that hold a model, which may read files where it is looked at.
    """
    module = sys.modules[constructor.__module__]
    for name, parameter in inspect.signature(constructor).parameters.items():
        annotation = getattr(module, str(parameter.annotation), None)
        value = values.get(name)
        is_plain = value is None or isinstance(value, bool | int | float | str | list | dict)
        if not getattr(annotation, "_is_protocol", False):
            continue
        kind = f"{annotation.__module__}.{annotation.__name__}"
        needed = f"the {name} of {constructor.__name__} must be a {kind}, got"
        if is_plain:
            raise UserError(f"{needed} {value!r}; give its _target_")
        members = () if name in models else vars(annotation)
        public = [member for member in members if not member.startswith("_")]
        lacking = [member for member in public if not hasattr(value, member)]
        if lacking:
            raise UserError(
                f"{needed} {type(value).__name__}, which lacks {lacking[0]}; derive your own from it"
            )
