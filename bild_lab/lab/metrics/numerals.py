"""Numbers in texts, as the metric `numeric` reads them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

# minus and plus of typesetting
_SIGNS = {"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+"}
_MARKS = {"\uff0c": ",", "\uff0e": ".", "\u066b": ".", "\u066c": "_"}  # full-width and Arabic ones
# that group digits, and never part words from words
_SPACES = dict.fromkeys("\u00a0\u2007\u2009\u202f", "_")
_APOSTROPHES = dict.fromkeys("'\u2019", "_")
_PLAIN = str.maketrans({**_SIGNS, **_MARKS, **_SPACES, **_APOSTROPHES})

_SIGN = r"(?:(?<!\d)[-+])?"
# thousands by "_", which stands for a space that does not break, an apostrophe or ٬; before either
# mark of decimals
_GROUPED = r"\d{1,3}(?:_\d{3})+(?!\d)(?:[.,]\d+)?"
# what is clear in any language: point and comma together, the same mark twice
_POINTS = r"[1-9]\d{0,2}(?:\.\d{3})+,\d+(?!\.?\d)|[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\.?\d)"
_COMMAS = r"[1-9]\d{0,2}(?:,\d{3})+\.\d+(?!,?\d)|[1-9]\d{0,2}(?:,\d{3}){2,}(?!,?\d)"
_ONE_POINT = r"(?:0\.\d+|\d+\.(?:\d{1,2}|\d{4,}))(?!\d)"  # which groups no thousands
_POINT_DECIMALS = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)"
_COMMA_DECIMALS = (
    r"(?:[1-9]\d{0,2}(?:\.\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?!\d)|\d+)?(?:,\d+)?(?<=\d)"
)
_WITH_POINT = re.compile(
    f"{_SIGN}(?:(?P<grouped>{_GROUPED})|(?P<comma>{_POINTS})|(?P<point>{_POINT_DECIMALS}))"
)
_WITH_COMMA = re.compile(
    f"{_SIGN}(?:(?P<grouped>{_GROUPED})|(?P<point>{_COMMAS}|{_ONE_POINT})|(?P<comma>{_COMMA_DECIMALS}))"
)


def last_number(text: str, decimal_comma: bool = False) -> Decimal | None:
    """The last number in a text; None if there is none.

    Digits of any script count, as do the minus of typesetting, and thousands grouped by apostrophes
    or by spaces that do not break. "1.234,56" and "1,234.56" are clear. Of what is not, "1,234" and
    "1,5", decimal_comma decides: whether commas come before decimals, and points or spaces between
    thousands. A fraction is two numbers.
    """
    pattern = _WITH_COMMA if decimal_comma else _WITH_POINT
    numbers = [match for match in pattern.finditer(_plain(text)) if match[0]]
    return _value(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    """The text with ASCII digits and signs.

    Other characters keep their places, so ² is no digit.
    """
    plain = text.translate(_PLAIN)
    if plain.isascii():
        return plain
    return "".join(
        str(unicodedata.decimal(character)) if character.isdecimal() else character
        for character in plain
    )


def _value(number: re.Match[str]) -> Decimal:
    if number["grouped"]:
        return Decimal(number[0].replace("_", "").replace(",", "."))
    if number["comma"]:
        return Decimal(number[0].replace(".", "").replace(" ", "").replace(",", "."))
    return Decimal(number[0].replace(",", ""))


def same_number(text: str, references: Sequence[str], decimal_comma: bool = False) -> bool:
    """Whether a text's last number is the last one of a reference (Cobbe et al., 2021).

    A text without a number is wrong. Marks between thousands, and zeros at the end of decimals, do
    not count.
    """
    number = last_number(text, decimal_comma)
    return number is not None and any(
        number == last_number(reference, decimal_comma) for reference in references
    )
