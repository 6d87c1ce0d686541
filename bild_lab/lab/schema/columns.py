"""Names, labels, units and meanings of the numbers of a result: each is written once, at its field.

`sweep.csv`, the tables of report and terminal, the panels of Weights & Biases, the glossary and
docs/outputs.md take them from here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bild_lab.lab.schema.formatting import number, percent, times

T = TypeVar("T")

SHARE, TIMES = "share", "times"  # units: a fraction of 1, and a ratio to the baseline's
NATS, OF_METRIC = "nats/token", "the metric’s"


@dataclass(frozen=True)
class Column:
    """One number, or word, of a result.

    explanation: what it means. name: in `sweep.csv`. path: the dotted attribute path in a `Result`.
    label: its name in words. heading: above a column of the report, if it differs from the label.
    short: above a column in the terminal, if it differs from the heading. unit: empty for words and
    plain counts. digits: decimals shown. scale: the shown number is the value divided by this.
    in_table: whether `sweep.csv` has it.
    """

    explanation: str
    name: str = ""
    path: str = ""
    label: str = ""
    heading: str = ""
    short: str = ""
    unit: str = ""
    digits: int = 2
    scale: float = 1.0
    in_table: bool = True

    @property
    def words(self) -> str:
        return self.label or self.name.replace("_", " ")

    @property
    def title(self) -> str:
        return self.heading or self.words

    @property
    def short_title(self) -> str:
        return self.short or self.title

    def of(self, result: Any) -> Any:
        """The value; None if the result has none."""
        value: Any = result
        for name in self.path.split("."):
            value = None if value is None else getattr(value, name)
        return value

    def text(self, result: Any) -> str:
        """The value as the report shows it; a dash if there is none."""
        value = self.of(result)
        if value is None or isinstance(value, str):
            return number(None) if value is None else value
        if self.unit == SHARE:
            return percent(value, self.digits)
        return times(value) if self.unit == TIMES else number(value / self.scale, self.digits)


def column(explanation: str, **shown: Any) -> Any:
    """A field of a result that is a column; None where it was not measured. shown: the other fields
    of `Column`.
    """
    return dataclasses.field(default=None, metadata={"column": Column(explanation, **shown)})


def required(explanation: str, **shown: Any) -> Any:
    """A field that is a column, and that every result has."""
    return dataclasses.field(metadata={"column": Column(explanation, **shown)})


def share(explanation: str, **shown: Any) -> Any:
    """A column with a fraction of 1, shown in percent."""
    return column(explanation, **{"unit": SHARE, "digits": 1, **shown})


def count(explanation: str, **shown: Any) -> Any:
    """A column with a whole number."""
    return column(explanation, digits=0, **shown)


def ratio(explanation: str, **shown: Any) -> Any:
    """A column with a ratio to the baseline's."""
    return column(explanation, unit=TIMES, **shown)


def end(which: str, of_what: str, unit: str) -> Any:
    """A field for the lower or upper end of a number's interval."""
    return column(f"The {which} end of the 95 % interval of {of_what}.", unit=unit)


def group(prefix: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of a result whose own fields are columns, with this before their names."""
    return dataclasses.field(default=default, metadata={"prefix": prefix})


def columns_of(kind: type, prefix: str = "", path: str = "") -> Iterator[Column]:
    """The columns of a dataclass and of its groups, in the order of their fields.

    A mapping's columns are in its KEYS, by the keys that they show.
    """
    for key_column in getattr(kind, "KEYS", ()):
        yield dataclasses.replace(key_column, path=f"{path}{key_column.name}")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if (field_column := field.metadata.get("column")) is not None:
            name = field_column.name or f"{prefix}{field.name}"
            attribute_path = field_column.path or field.name
            yield dataclasses.replace(field_column, name=name, path=f"{path}{attribute_path}")
        elif "prefix" in field.metadata:
            hint = hints[field.name]
            members = get_args(hint) or [hint]
            (group_type,) = (member for member in members if member is not NoneType)
            yield from columns_of(group_type, field.metadata["prefix"], f"{path}{field.name}.")


def knob_columns(knobs: Mapping[str, T], taken: Container[str]) -> dict[str, T]:
    """Knobs by their own names as columns of a table, or knob_NAME where it has another column with
    that name, such as `acceptance_rate`.
    """
    return {f"knob_{knob}" if knob in taken else knob: value for knob, value in knobs.items()}


_INFINITIES = {"inf": math.inf, "-inf": -math.inf}  # JSON has no infinities


def to_json(value: Any) -> Any:
    """The value for JSON: dataclasses become objects, NaN becomes null, and infinity becomes
    "inf".
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if is_dataclass(value):
        return {
            stored_field.name: to_json(getattr(value, stored_field.name))
            for stored_field in stored_fields(type(value))
        }
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """A JSON value as a dataclass, or as the type of one of its fields.

    Keys without a field are ignored. where: the path of keys to the value, for messages. Raises
    ValueError for a missing field or a value of another type.
    """
    return _reader(kind)(value, where)


@lru_cache(maxsize=256)
def _reader(kind: type[T]) -> Callable[[Any, str], T]:
    """What makes a value of this type of a JSON value and the path to it. Looked up once for each
    type, as a list of runs reads thousands of results.
    """
    if kind is Any:
        return lambda value, where: value
    origin, members = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        # unions here are X | None
        (kind,) = (member for member in members if member is not NoneType)
        read = _reader(kind)
        return lambda value, where: None if value is None else read(value, where)
    if origin in (Mapping, dict):
        read = _reader(members[1])
        return lambda value, where: {
            key: read(item, f"{where}.{key}") for key, item in _plain(dict, value, where).items()
        }
    if origin in (Sequence, list):
        read = _reader(members[0])
        return lambda value, where: [
            read(item, f"{where}[{index}]") for index, item in enumerate(_plain(list, value, where))
        ]
    if issubclass(kind, Mapping):
        return lambda value, where: kind(_plain(dict, value, where))
    if is_dataclass(kind):
        return lambda value, where: _dataclass(kind, _plain(dict, value, where), where)
    return _number if kind is float else partial(_plain, kind)


@lru_cache(maxsize=64)
def stored_fields(kind: type) -> tuple[Field, ...]:
    """The fields that are stored in the file: all without `"stored": False` in their metadata."""
    return tuple(field for field in fields(kind) if field.metadata.get("stored", True))


@lru_cache(maxsize=64)
def _field_readers(kind: type) -> list[tuple[Field, Callable[[Any, str], Any]]]:
    types = get_type_hints(kind)
    return [(field, _reader(types[field.name])) for field in stored_fields(kind)]


def _dataclass(kind: type[T], value: Mapping[str, Any], where: str) -> T:
    values = {}
    for stored_field, read in _field_readers(kind):
        name = stored_field.name
        if name in value:
            values[name] = read(value[name], f"{where}.{name}" if where else name)
        elif stored_field.default is MISSING and stored_field.default_factory is MISSING:
            raise ValueError(f"{name} is missing in {where or 'the file'}")
    return kind(**values)


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
