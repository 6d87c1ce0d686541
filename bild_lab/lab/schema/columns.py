"""Names, labels, units and meanings of the numbers of a result: each is written once, at its field.

`sweep.csv`, the tables of report and terminal, the panels of Weights & Biases, the glossary and docs/outputs.md take
them from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from bild_lab.lab.formatting import number, percent, times

SHARE, TIMES = "share", "times"  # units: a fraction of 1, and a ratio to the baseline's
POINTS, NATS = "points", "nats/token"


@dataclass(frozen=True)
class Column:
    """One number, or word, of a result.

    explanation: what it means. name: in `sweep.csv`. path: the dotted attribute path in a `Result`. label: its name in
    words. heading: above a column of the report, if it differs from the label. short: above a column in the terminal,
    if it differs from the heading. unit: empty for words and plain counts. digits: decimals shown. scale: the shown
    number is the value divided by this. in_table: whether `sweep.csv` has it.
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

    @property
    def summary_key(self) -> str:
        """Its name in the summary of a Weights & Biases run, such as `speedup/value`."""
        return self.path.removeprefix("counts.").replace(".", "/")

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


def column(explanation: str, *, required: bool = False, **shown: Any) -> Any:
    """A field of a result that is a column, None unless it is required. shown: the other fields of `Column`."""
    default = dataclasses.MISSING if required else None
    return dataclasses.field(default=default, metadata={"column": Column(explanation, **shown)})


def low_end(of_what: str, unit: str) -> Any:
    """A field for the lower end of a number's interval."""
    return column(f"The lower end of the 95 % interval of {of_what}.", unit=unit)


def high_end(of_what: str, unit: str) -> Any:
    """A field for the upper end of a number's interval."""
    return column(f"The upper end of the 95 % interval of {of_what}.", unit=unit)


def group(prefix: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of a result whose own fields are columns, with this before their names."""
    return dataclasses.field(default=default, metadata={"prefix": prefix})


def columns_of(kind: type, prefix: str = "", path: str = "") -> Iterator[Column]:
    """The columns of a dataclass and of its groups, in the order of their fields."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        place = f"{path}{field.name}"
        if (one := field.metadata.get("column")) is not None:
            yield dataclasses.replace(one, name=one.name or f"{prefix}{field.name}", path=place)
        elif "prefix" in field.metadata:
            inner = next(one for one in (hints[field.name], *get_args(hints[field.name])) if hasattr(one, "columns"))
            yield from inner.columns(field.metadata["prefix"], f"{place}.")


class HasColumns:
    """A part of a result whose fields are columns."""

    @classmethod
    def columns(cls, prefix: str, path: str) -> Iterator[Column]:
        yield from columns_of(cls, prefix, path)
