"""The columns lead to the fields of a result, and are documented with the units and words that the
report shows.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from bild_lab.lab.schema.glossary import TERMS
from bild_lab.lab.schema.numbers import (
    Change,
    Counts,
    DecodingCosts,
    Latency,
    Pipeline,
    Prediction,
)
from bild_lab.lab.schema.result import COLUMNS, TABLE, Environment, Result
from bild_lab.lab.store.table import to_row
from tests.report.sample import ENVIRONMENT, sample_drafted, sample_result


def whole_result() -> Result:
    """A result that has every part."""
    pipeline = {each.name: 1.0 for each in fields(Pipeline)} | {"layers": 2, "exit_layer": 1}
    certificate = {"equal": 97, "ties": 2, "defects": 1}
    parts = {
        "pipeline": pipeline,
        "certificate": certificate,
        "change": {each.name: 0.5 for each in fields(Change)},
    }
    return sample_drafted("ppd", {"window": 3}, 1.5, -0.2, (0.8, 0.9), **parts)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_leads_to_a_field_of_the_result(name: str) -> None:
    COLUMNS[name].of(whole_result())  # an AttributeError otherwise


def test_every_measured_number_has_a_column() -> None:
    """But those that are no single number, and the totals of what others are the mean of."""
    paths = {column.path for column in COLUMNS.values()}
    kinds = {"counts": Counts, "pipeline": Pipeline, "prediction": Prediction, "change": Change}
    for prefix, kind in kinds.items():
        missing = {each.name for each in fields(kind) if f"{prefix}.{each.name}" not in paths}
        positions = {"acceptance_by_position", "judged_by_position"}
        shapes = {Counts: positions, Pipeline: {"layers", "exit_layer"}}
        assert missing == shapes.get(kind, set())
    assert {
        each.name for each in fields(DecodingCosts) if f"cost.{each.name}" not in paths
    } == set()
    assert {each.name for each in fields(Latency) if f"latency_s.{each.name}" not in paths} == {
        "total"
    }


def test_how_busy_the_machine_was_is_a_column_of_the_table() -> None:
    busy = sample_result(
        "bild", {}, 1.5, environment={**ENVIRONMENT, "busy_elsewhere_percent": 74.4}
    )
    assert [
        to_row(one)["busy_elsewhere_percent"] for one in (busy, sample_result("bild", {}, 1.5))
    ] == [74.4, None]
    assert [Environment({"busy_elsewhere_percent": value}).busy for value in (9.9, 10, 10.1)] == [
        False,
        False,
        True,
    ]


def test_a_part_that_a_result_lacks_is_missing_and_no_error() -> None:
    bare = sample_result("hf_generate", {}, None, setting={"baseline": None}, cost=None)
    assert (
        COLUMNS["predicted_theorem"].of(bare) is None
        and COLUMNS["predicted_theorem"].text(bare) == "–"
    )
    assert COLUMNS["flops_per_token"].text(bare) == "–"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("acceptance_rate", "80.0 %"),
        ("predicted_rounds", "1.86×"),
        ("flops_per_token", "0.076"),  # in billions
        ("drafted", "1,500"),
        ("policy", "ppd"),
    ],
)
def test_a_value_is_shown_in_its_unit(name: str, text: str) -> None:
    assert COLUMNS[name].text(whole_result()) == text


def test_a_value_of_zero_is_shown() -> None:
    assert COLUMNS["fallbacks"].text(sample_result("bild", {}, 1.5, fallbacks=0)) == "0"


def test_names_are_unique_and_explanations_are_sentences() -> None:
    assert len({column.name for column in TABLE}) == len(TABLE)
    assert [
        column.name for column in COLUMNS.values() if not column.explanation.endswith(".")
    ] == []


def test_what_the_glossary_says_of_a_number_is_what_its_column_says() -> None:
    meanings = {term.meaning for term in TERMS}
    assert {
        COLUMNS[name].explanation for name in ("speedup", "acceptance_rate", "p_value")
    } <= meanings
