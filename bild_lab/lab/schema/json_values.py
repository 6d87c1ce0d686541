"""Dataclasses to JSON and back. Reading checks the types of the fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_INFINITIES = {"inf": math.inf, "-inf": -math.inf}  # JSON has no infinities
NOT_STORED = {"stored": False}  # the metadata of a field that is left out of the file


def to_json(value: Any) -> Any:
    """The value for JSON: dataclasses become objects, NaN becomes null, and infinity becomes "inf"."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in stored_fields(type(value))}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """A JSON value as a dataclass, or as the type of one of its fields.

    Keys without a field are ignored. where: the path of keys to the value, for messages. Raises ValueError for a
    missing field or a value of another type.
    """
    if kind is Any:
        return value
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)  # unions here are X | None
        return None if value is None else from_json(kind, value, where)
    if origin in (Mapping, dict):
        return {
            key: from_json(get_args(kind)[1], item, f"{where}.{key}") for key, item in _object(value, where).items()
        }
    if origin in (Sequence, list):
        return [from_json(get_args(kind)[0], item, f"{where}[{at}]") for at, item in enumerate(_list(value, where))]
    if issubclass(kind, Mapping):
        return kind(_object(value, where))
    if is_dataclass(kind):
        return _dataclass(kind, _object(value, where), where)
    return _number(value, where) if kind is float else _plain(kind, value, where)


@lru_cache(maxsize=64)
def stored_fields(kind: type) -> tuple[Field, ...]:
    """The fields that are stored in the file."""
    return tuple(each for each in fields(kind) if each.metadata.get("stored", True))


@lru_cache(maxsize=64)
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _dataclass(kind: type[T], value: Mapping[str, Any], where: str) -> T:
    found = {}
    for each in stored_fields(kind):
        if each.name in value:
            found[each.name] = from_json(_types(kind)[each.name], value[each.name], f"{where}.{each.name}".lstrip("."))
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing in {where or 'the file'}")
    return kind(**found)


def _object(value: Any, where: str) -> dict[str, Any]:
    return _plain(dict, value, where)


def _list(value: Any, where: str) -> list[Any]:
    return _plain(list, value, where)


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _INFINITIES:
        return _INFINITIES[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} must be a number, got {value!r}")
    return value


def _plain(kind: type[T], value: Any, where: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where or 'the file'} must hold a {kind.__name__}, got {value!r:.60}")
    return value
