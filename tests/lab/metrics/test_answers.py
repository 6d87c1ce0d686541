"""Answers that must equal a text, or end with a number."""

from __future__ import annotations

from decimal import Decimal

import pytest

from bild_lab.lab.metrics import score
from bild_lab.lab.metrics.answers import exact_matches, last_number, numeric_matches


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = 7 apples.", "7"),
        ("#### 1,234", "1234"),
        ("It costs $1,234,567.50.", "1234567.50"),
        ("so 18.", "18"),
        ("-4", "-4"),
        ("16-4", "4"),  # a minus sign between two numbers is none of the second
        ("+.5", "0.5"),
        ("1,23", "23"),  # no comma between thousands
        ("72 clips\n\n", "72"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_an_answer_is_right_if_its_last_number_is_a_references() -> None:
    answers = ["The answer is 72.", "72.0", "72 of 80", "nothing", "80"]
    assert numeric_matches(answers, [["… #### 72"]] * 4 + [["x", "80"]]) == [100, 100, 0, 0, 100]
    assert numeric_matches(["nothing"], [["no number either"]]) == [0]
    assert score("numeric", answers[:2], [["72"]] * 2).metric == "numeric match"


def test_an_exact_answer_may_differ_in_white_space_only() -> None:
    assert exact_matches([" a\nb ", "A b", "a b."], [["a b"]] * 3) == [100, 0, 0]
