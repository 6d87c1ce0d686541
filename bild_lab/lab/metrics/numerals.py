"""Numbers as texts write them: with points or commas, groups of digits, currencies and TeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import regex

# minus and plus of typesetting
_SIGNS = {"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+"}
# full-width and Arabic marks
_MARKS = {"\uff0c": ",", "\uff0e": ".", "\u066b": ".", "\u066c": "_"}
# spaces that group digits, and never part words from words
_SPACES = dict.fromkeys("\u00a0\u2007\u2009\u202f", "_")
_APOSTROPHES = dict.fromkeys("'\u2019", "_")
# a comma without the space of a list, a thin space and its opposite, as TeX writes them
_TEX = {"{,}": ",", r"\,": "_", r"\!": ""}
# the mark of a currency between a sign and its number: -$5, in TeX -\$5
_SIGNED_CURRENCY = regex.compile(r"(?<=(?<!\w)[-+])\\?\p{Sc}(?=[\d.,])")
_PLAIN = str.maketrans({**_SIGNS, **_MARKS, **_SPACES, **_APOSTROPHES})
_SIGN = r"(?:(?<!\d)[-+])?"
# thousands by "_", which stands for a space that does not break, an apostrophe or ٬; before either
# mark of decimals
_GROUPED = r"\d{1,3}(?:_\d{3})+(?!\d)(?:[.,]\d+)?"
# numbers that are clear in any language: point and comma together, the same mark twice
_POINTS = r"[1-9]\d{0,2}(?:\.\d{3})+,\d+(?!\.?\d)|[1-9]\d{0,2}(?:\.\d{3}){2,}(?!\.?\d)"
_COMMAS = r"[1-9]\d{0,2}(?:,\d{3})+\.\d+(?!,?\d)|[1-9]\d{0,2}(?:,\d{3}){2,}(?!,?\d)"
_ONE_POINT = r"(?:0\.\d+|\d+\.(?:\d{1,2}|\d{4,}))(?!\d)"  # a point that groups no thousands
_POINT_DECIMALS = r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)"
_COMMA_DECIMALS = (
    r"(?:[1-9]\d{0,2}(?:\.\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?!\d)|\d+)?(?:,\d+)?(?<=\d)"
)
# 1.5e3 and 1e-05, as programs write numbers
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"
_WITH_POINT = re.compile(
    f"(?![eE]){_SIGN}"
    f"(?:(?P<grouped>{_GROUPED})|(?P<comma>{_POINTS})|(?P<point>{_POINT_DECIMALS})){_EXPONENT}"
)
_WITH_COMMA = re.compile(
    f"(?![eE]){_SIGN}"
    f"(?:(?P<grouped>{_GROUPED})|(?P<point>{_COMMAS}|{_ONE_POINT})|(?P<comma>{_COMMA_DECIMALS}))"
    f"{_EXPONENT}"
)
_FRACTION_BAR = re.compile(r"\s*[/\u2044\u2215]\s*")
_MIXED_NUMBER = re.compile(r"\d\s+$")  # before a fraction: 1 3/4
# what stands before a number that is only a part of one: of a date, a ratio, a time or a power
_PART_OF_A_NUMBER = re.compile(
    r"(?:\d\s*[/\u2044\u2215]\s*|\d:|\^\s*[{(]?\s*"
    r"|\\[dt]?frac\s*(?:(?:\{[^{}]*\}|\d)\s*\{\s*)?)$"
)
# 10**3 and 10 ** 3; marks of bold text have a space on one side at most
_STARS_OF_A_POWER = re.compile(r"[\d)](?:\*\*|\s+\*\*\s+)\(?$")


def last_number(text: str, decimal_comma: bool = False) -> Decimal | Fraction | None:
    """The last number in a text; None if there is none.

    Digits of any script count, as do the minus of typesetting, and thousands grouped by apostrophes
    or by spaces that do not break, also as TeX writes them. "1.234,56" and "1,234.56" are clear. Of
    what is not, "1,234" and "1,5", decimal_comma decides: whether commas come before decimals, and
    points or spaces between thousands. 1.5e3 is one number, and so is 3/4; 2 × 10^3 is two.
    """
    numbers = _numbers(text, decimal_comma)
    if not numbers:
        return None
    number, numerator = _value(numbers[-1]), _numerator(numbers)
    if numerator is None or not number:
        return number
    return Fraction(_value(numerator)) / Fraction(number)


def ends_within_a_number(text: str, decimal_comma: bool = False) -> bool:
    """Whether the last number in a text is a part of what is meant: the 3/4 of 1 3/4, the 3 of 10^3,
    the 1 of 1½, the 3 of 3万.
    """
    numbers = _numbers(text, decimal_comma)
    if not numbers:
        return False
    number, numerator = numbers[-1], _numerator(numbers)
    before, after = number.string[: number.start()], number.string[number.end() :]
    if numerator is not None:
        before = number.string[: numerator.start()]
        if _MIXED_NUMBER.search(before):
            return True
    is_factor = after != "" and unicodedata.numeric(after[0], None) is not None
    is_bold = after.startswith("**")
    is_exponent = not is_bold and _STARS_OF_A_POWER.search(before) is not None
    return is_factor or is_exponent or _PART_OF_A_NUMBER.search(before) is not None


def _numbers(text: str, decimal_comma: bool) -> list[re.Match[str]]:
    pattern = _WITH_COMMA if decimal_comma else _WITH_POINT
    return [match for match in pattern.finditer(_plain(text)) if match[0]]


def _numerator(numbers: Sequence[re.Match[str]]) -> re.Match[str] | None:
    """What the last number divides; None where it is no denominator. A date has two bars."""

    def has_bar_after(place: int) -> bool:
        left, right = numbers[place], numbers[place + 1]
        return _FRACTION_BAR.fullmatch(left.string[left.end() : right.start()]) is not None

    if len(numbers) < 2 or not has_bar_after(-2):
        return None
    return None if len(numbers) > 2 and has_bar_after(-3) else numbers[-2]


def _plain(text: str) -> str:
    """The text with ASCII digits and signs. ² and other powers are no digits."""
    for written, mark in _TEX.items():
        text = text.replace(written, mark)
    plain = _SIGNED_CURRENCY.sub("", text.translate(_PLAIN))
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
