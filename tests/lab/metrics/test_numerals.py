"""The last number of a text, however numbers are written."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from bild_lab.lab.metrics.numerals import ends_within_a_number, last_number, same_number
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.metrics.writing import Writing


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = 7 apples.", "7"),
        ("#### 1,234", "1234"),
        ("It costs $1,234,567.50.", "1234567.50"),
        ("so 18.", "18"),
        ("-4", "-4"),
        ("a loss of -$1,234.50", "-1234.50"),
        ("\u2212€5", "-5"),
        (r"-\$5", "-5"),
        ("$-5", "-5"),
        ("$3-$5", "5"),
        ("US-$5", "5"),
        ("16-4", "4"),  # a minus sign between two numbers is none of the second
        ("+.5", "0.5"),
        ("1,23", "23"),  # no comma between thousands
        ("72 clips\n\n", "72"),
        ("1e-05", "0.00001"),  # as pandas writes a small number
        ("about 1.5e3 clips", "1500"),
        ("2E+2.", "200"),
        ("1,234.5e2", "123450"),
        ("3e and e5", "5"),  # no exponents
        ("4e5x", "5"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_an_answer_is_right_if_its_last_number_is_a_references() -> None:
    answers = ["The answer is 72.", "72.0", "72 of 80", "nothing", "80"]
    references = [["… #### 72"]] * 4 + [["x", "80"]]
    assert list(map(same_number, answers, references)) == [True, True, False, False, True]
    assert not same_number("nothing", ["no number either"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\u22125", "-5"),  # the minus of typesetting
        ("8\u22125", "5"),
        ("1'234", "1234"),
        ("1\u2019234\u2019567.5", "1234567.5"),
        ("1\u202f234", "1234"),
        ("1\u00a0234,5", "1234.5"),
        ("１２３", "123"),  # full width
        ("١٬٢٣٤٫٥", "1234.5"),  # Arabic
        ("१२", "12"),  # Devanagari
        ("1.234,56", "1234.56"),
        ("1.234.567", "1234567"),
        ("1,234.56", "1234.56"),
        ("10 m²", "10"),
        ("in 2020 100", "100"),
        (r"\boxed{1{,}234{,}567}", "1234567"),
        (r"$1,\!234,\!567.5$", "1234567.5"),
        (r"\(12\,345\,\text{m}\)", "12345"),
    ],
)
def test_a_number_that_is_clear_in_any_language_is_read_in_all(text: str, number: str) -> None:
    assert last_number(text) == last_number(text, decimal_comma=True) == Decimal(number)


@pytest.mark.parametrize(
    ("text", "with_point", "with_comma"),
    [
        ("1,234", "1234", "1.234"),
        ("1.234", "1.234", "1234"),
        ("0,5", "5", "0.5"),
        ("0.123", "0.123", "0.123"),
        ("3.14159", "3.14159", "3.14159"),
        ("1 234 567", "567", "1234567"),
        ("1,234,567", "1234567", "1234567"),
        ("1,5e3", "5000", "1500"),
        ("1.5e3", "1500", "1500"),
    ],
)
def test_a_number_that_is_not_clear_is_read_as_the_language_writes_it(
    text: str, with_point: str, with_comma: str
) -> None:
    assert last_number(text) == Decimal(with_point)
    assert last_number(text, decimal_comma=True) == Decimal(with_comma)


def test_a_fraction_is_one_number() -> None:
    for text in ("3/4", "x = 3 / 4.", "3\u20444", "6/8", "0.75"):
        assert last_number(text) == Fraction(3, 4), text
    assert last_number("x = -12 / 35.") == Fraction(-12, 35)
    assert not same_number("1/36", ["35/36"]) and same_number("70/72", ["35/36"])
    # planted: no fractions
    assert last_number("on 12/25/2024") == 2024
    assert last_number("5/0") == 0
    assert last_number("16/2=<<16/2=8>>8 in all") == 8


@pytest.mark.parametrize(
    ("text", "within"),
    [
        ("1 3/4", True),
        ("on 12/25/2024", True),
        (r"$\frac{3}{4}$", True),
        (r"\boxed{\dfrac{3}{14}}", True),
        ("2 × 10^3", True),
        ("2 * 10**-3", True),
        ("10^{12}", True),
        ("2:3", True),
        ("at 10:30", True),
        ("10² m", True),
        ("1½ cups", True),
        ("3万", True),
        ("10 ** 3", True),
        ("(2 * 5)**(3)", True),
        (r"\frac34", True),
        (r"\tfrac3{4}", True),
        # planted: numbers of their own
        ("3/4", False),
        ("so it is 35/36", False),
        ("16/2=<<16/2=8>>8 in all\n#### 18", False),
        ("Step 2: 18", False),
        ("and/or 18", False),
        ("half (1/2) of 36 is 18", False),
        ("1,234.5", False),
        ("none", False),
        # planted: marks of bold text
        ("The answer is **72**", False),
        ("In 2024 **72** came", False),
        ("**72**.", False),
        ("答案是**72**", False),
        ("**Answer:** 72", False),
        ("**Part 2** 72", False),
        ("1. **5** 2. **6**", False),
    ],
)
def test_a_part_of_a_number_is_told_from_a_number(text: str, within: bool) -> None:
    assert ends_within_a_number(text) is within
    assert ends_within_a_number(text, decimal_comma=True) is within


def test_a_language_with_a_decimal_comma_is_known_by_its_code() -> None:
    answers, references = [r"rund 3{,}5\,km"], [["3.5"]]
    for code, value in ((None, 0), ("en", 0), ("de", 100), ("de_DE", 100)):
        quality = score("numeric", answers, references, writing=Writing(language=code))
        assert (quality.value, "decimals:comma" in str(quality.signature)) == (value, value == 100)
