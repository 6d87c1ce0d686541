"""Explanations of terms, from `glossary.yaml`; a term that names a number of a result is explained
at its field.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from bild_lab.lab.schema.result import COLUMNS, COSTS, PREDICTION


class Term(NamedTuple):
    """One or more related words, and what they mean."""

    words: str
    meaning: str


def explained(name: str) -> Term:
    """The term for the column with this name: its label and heading, and its explanation."""
    column = COLUMNS[name]
    heading = "" if column.title == column.words else f" ({column.title})"
    return Term(column.words[0].upper() + column.words[1:] + heading, column.explanation)


def _terms() -> Iterator[Term]:
    groups = {"costs": COSTS, "prediction": PREDICTION}
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
        if "columns" in entry:
            yield from (explained(column.name) for column in groups[entry["columns"]])
        else:
            yield explained(entry["column"]) if "column" in entry else Term(**entry)


TERMS = tuple(_terms())


def terms_text(width: int = 100) -> str:
    """The terms as paragraphs for a terminal, `width` columns wide."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False)
    return "\n".join(wrapper.fill(f"{term.words}: {term.meaning}") for term in TERMS)
