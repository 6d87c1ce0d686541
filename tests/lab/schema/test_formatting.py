"""Tests of how numbers and knobs are written."""

import math

import pytest

from bild_lab.lab.schema.formatting import (
    duration,
    knob_value,
    markdown_table,
    number,
    number_range,
    point_label,
    short_name,
    short_value,
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


@pytest.mark.parametrize(
    ("values", "digits", "text"),
    [
        ([], 2, ""),
        ([None], 2, ""),
        ([1.5, None, 0.25], 2, "0.25 to 1.50"),
        ([1.501, 1.499], 2, "1.50"),
        ([11332, 888], 0, "888 to 11,332"),
    ],
)
def test_a_range_names_its_ends_once_if_they_read_the_same(values, digits, text):
    assert number_range(values, digits) == text


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


HERE, THERE = "http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1"
PLAIN = "llama-server -m /models/a.gguf --port 8001"
DRAFTING = "llama-server -m /models/a.gguf --port 8000 -md /models/b.gguf -np 1"


@pytest.mark.parametrize(
    ("value", "others", "text"),
    [
        (HERE, [HERE, THERE], "127.0.0.1:8000"),
        (HERE, ["http://127.0.0.1:8000/v2"], HERE),
        ("outputs/first/heads", ["outputs/second/heads"], "first"),
        ("a/x/tree.json", ["b/x/tree.json"], "a/x/tree.json"),
        ("c/a/tree.json", ["c/b/tree.json", "dynamic"], "a/tree.json"),
        ("c/dynamic", ["dynamic"], "c/dynamic"),
        ({"speculative.n_max": 0}, [{}, None], "speculative.n_max 0"),
        ({"window": 7, "ranking": "a/table.json"}, [None], "window 7, ranking table.json"),
        ({"ranking": "a/table.json"}, [{"ranking": "b/table.json"}], "ranking a/table.json"),
        (PLAIN, [], "llama-server \u2026"),
        (PLAIN, [DRAFTING], "--port 8001"),
        (DRAFTING, [PLAIN, None], "--port 8000 -md b.gguf -np 1"),
        (PLAIN, [PLAIN + " -np 1", None], "llama-server \u2026"),
        ("serve /a/m.gguf", ["serve /b/m.gguf"], "/a/m.gguf"),
        ("serve 'open", ["serve open"], "'open"),
        (0.5, ["c/0.5"], "0.5"),
        ("c/0.5", [0.5], "c/0.5"),
    ],
)
def test_long_values_are_short_and_still_tell_points_apart(value, others, text):
    assert short_value(value, others) == text
    assert text not in [short_value(other, [value, *others]) for other in others if other != value]


def test_names_lose_their_folders_and_owners():
    assert short_name("/home/someone/models/t5-large/") == "t5-large"
    assert short_name("a" * 40) == "a" * 27 + "\u2026"
    assert short_name("outputs/mine/checkpoint") == "mine" and short_name("heads") == "heads"


def test_a_cell_of_a_markdown_table_ends_no_row_and_begins_no_tag():
    table = markdown_table(["name"], [["a|b"], ["two\nlines"], ["<b>"]])
    assert table.splitlines()[2:] == [r"| a\|b |", "| two lines |", "| &lt;b> |"]
