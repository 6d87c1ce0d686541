"""Whether an answer is the expected one: as text, or by its last number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")


def exact_matches(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """100 for each answer that equals one of its references, white space aside, and 0 for others."""
    pairs = zip(answers, references, strict=True)
    return [100.0 * (_spaced(answer) in map(_spaced, several)) for answer, several in pairs]


def numeric_matches(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """100 for each answer whose last number is the last one of a reference (Cobbe et al., 2021), and 0 for others.

    An answer without a number is wrong. Commas between thousands, and zeros behind a point, do not count.
    """
    pairs = zip(answers, references, strict=True)
    return [100.0 * (last_number(answer) in _numbers(several)) for answer, several in pairs]


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none."""
    found = [match[0] for match in _NUMBER.finditer(text) if match[0]]
    if not found:
        return None
    return Decimal(found[-1].replace(",", ""))


def _numbers(references: Sequence[str]) -> list[Decimal]:
    return [number for number in map(last_number, references) if number is not None]


def _spaced(text: str) -> str:
    return " ".join(text.split())
