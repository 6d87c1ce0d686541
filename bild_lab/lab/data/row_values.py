"""Values of a row by the names of its columns, where `a.b` is a field inside a column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def first_value(row: Row, columns: Sequence[str]) -> tuple[bool, object]:
    """Whether the row has any of the columns, and the first value that is not null."""
    found = [place for place in (lookup(row, column) for column in columns) if place]
    values = [value for (value,) in found if value is not None]
    return bool(found), values[0] if values else None


def lookup(row: Row, column: str) -> tuple[object] | None:
    """The value at a dotted path in a one-tuple, or None if the path is absent."""
    if column in row:
        return (row[column],)
    value: object = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return (value,)


def column_paths(row: Row, prefix: str = "") -> list[str]:
    """The names of all columns, and of the fields inside them."""
    paths: list[str] = []
    for key, value in row.items():
        nested = isinstance(value, Mapping) and value
        paths += column_paths(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return paths


def filled(template: str, row: Row, kept: str) -> tuple[str, list[str]]:
    """The template with {COLUMN} replaced by the row's texts, and the columns that the row lacks or that are no text.

    kept: a placeholder that stays, such as {answer}. Braces around anything but a name stay as well.
    """
    missing: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[0] == kept:
            return kept
        found = lookup(row, match[1])
        if found is None or not isinstance(found[0], str):
            missing.append(match[1])
            return ""
        return found[0]

    return re.sub(r"\{([A-Za-z_][\w.]*)\}", value, template), missing
