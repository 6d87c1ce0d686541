"""Tests of how numbers and knobs are written."""

import math

import pytest

from bild_lab.lab.schema.formatting import (
    duration,
    knob_value,
    number,
    point_label,
    short_name,
    signed,
)
from tests.report.sample import sample_result


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (math.nan, "\u2013"),
        (0.0, "0.00"),
        (-0.001, "0.00"),
        (-1.5, "\u22121.50"),
        (1234.5, "1,234.50"),
    ],
)
def test_numbers_have_fixed_decimals_and_missing_ones_are_a_dash(value, text):
    assert number(value) == text


def test_differences_carry_their_sign():
    assert [signed(value) for value in (0.2, 0.0, -0.2, None)] == [
        "+0.20",
        "0.00",
        "\u22120.20",
        "\u2013",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "50.0 ms"), (1.0, "1.0 s"), (119.0, "119.0 s"), (180, "3.0 min"), (7200, "2.0 h")],
)
def test_durations_choose_their_unit(value, text):
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "on"),
        (False, "off"),
        (None, "none"),
        (1.0, "1"),
        (0.69, "0.69"),
        (math.inf, "\u221e"),
        ("inf", "\u221e"),
    ],
)
def test_knob_values_read_plainly(value, text):
    assert knob_value(value) == text


def test_a_point_is_named_by_its_policy_and_the_asked_knobs_it_has():
    result = sample_result("bild", {"fallback": 0.5, "rollback": 1.0, "window": 10}, 1.5)
    assert (
        point_label(result, ["fallback", "rollback", "lenience"])
        == "bild (fallback 0.5, rollback 1)"
    )
    assert point_label(result, []) == "bild"


def test_names_lose_their_folders_and_owners():
    assert short_name("/home/someone/models/t5-large/") == "t5-large"
    assert short_name("a" * 40) == "a" * 27 + "\u2026"
