"""The tables of the report say what was measured, with intervals and with what disturbed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bild_lab.lab.schema.numbers import NonInferiority, Streamed
from bild_lab.lab.schema.result import COLUMNS, Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.report.page.tables import setting_tables
from bild_lab.report.phrases import quality_claim
from bild_lab.report.tables import Table, cell_of, points_table
from tests.lab.store.test_table import FURTHER
from tests.report.sample import (
    ENVIRONMENT,
    sample_baseline,
    sample_drafted,
    sample_log_probability,
    sample_result,
    sample_sweep,
    sample_tested_quality,
    with_quality,
)

CHANGE = {
    **{"changed": 0.25, "first_difference": 7.0, "length_ratio": 1.02},
    **{"length_ratio_low": 0.98, "length_ratio_high": 1.06, "log_probability": -0.4321},
    **{"log_probability_low": -0.5, "log_probability_high": -0.4, "log_probability_baseline": -0.4},
    **{"log_probability_difference": -0.0321, "log_probability_difference_low": -0.05},
    **{"log_probability_difference_high": 0.001},
}


def shown(*results: Result) -> dict[str, Table]:
    (group,) = by_setting(results)
    return {"points": points_table(group), **setting_tables(group)}


def by_title(table: Table, row: int = 0) -> dict[str, tuple[str, str]]:
    cells = [(cell.text, cell.detail) for cell in table.rows[row].cells]
    return dict(zip([column.title for column in table.columns], cells, strict=True))


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in table.rows]


def test_the_table_says_what_changed_beside_what_was_lost() -> None:
    lossy = sample_result(
        "bild", {"rollback": 5.0}, 1.8, -0.9, change=CHANGE, further_qualities={"chrf": FURTHER}
    )
    change = shown(sample_baseline(), lossy, sample_result("speculative", {}, 1.4))["change"]
    (row,) = change.rows  # the baseline and older results have none
    cells = {
        column.title: (cell.text, cell.detail)
        for column, cell in zip(change.columns, row.cells, strict=True)
    }
    assert [cell.text for cell in row.cells][:2] == ["bild", "−0.90"]
    assert cells["chrF"] == ("61.00", "−0.50 [−1.00, +0.10]")
    assert cells["changed"] == ("25.0 %", "") and cells["first difference"] == ("7.0", "")
    assert cells["length"] == ("1.02×", "[0.98, 1.06]")
    assert cells["log-probability"] == ("−0.432", "[−0.500, −0.400]")
    assert cells["difference"] == ("−0.032", "[−0.050, +0.001]")


def test_the_table_of_points_says_which_are_no_worse_by_the_margin() -> None:
    tested = sample_result("bild", {}, 1.8, quality=sample_tested_quality(-1.0, 0.0112))
    points = shown(sample_baseline(), tested)["points"]
    assert by_title(points)["no worse by 5"] == ("yes", "p = 0.011, at least −4.20, margin 5")
    assert by_title(points, 1)["no worse by 5"] == ("–", "")  # the baseline
    plain = shown(sample_baseline(), sample_result("bild", {}, 1.8))["points"]
    assert not any("no worse" in column.title for column in plain.columns)
    other = sample_result("bild", {"a": 1}, 1.7, quality=sample_tested_quality(-1.0, 0.2, 3.0))
    mixed = shown(sample_baseline(), tested, other)["points"]
    assert by_title(mixed, 1)["no worse"][0] == "not shown"
    few = {"quality": sample_tested_quality(-1.0, 0.0112), "setting": {"n_examples": 19}}
    points = shown(sample_result("bild", {}, 1.8, **few))["points"]
    assert by_title(points)["no worse by 5"][0] == "not shown"  # whatever the p-value
    turns = {"quality": sample_tested_quality(-1.0, 0.0112), "independent_texts": 19}
    points = shown(sample_result("bild", {}, 1.8, **turns))["points"]
    assert by_title(points)["no worse by 5"][0] == "not shown"


def test_the_best_points_lose_nothing_and_at_most_a_point() -> None:
    best = shown(*sample_sweep())["best"]
    assert [by_title(best, row)["speedup"][0] for row in (0, 1)] == ["1.55×", "1.70×"]
    assert not shown(*sample_sweep(setting={"n_examples": 19}))["best"]
    few = sample_result(
        "server", {}, 9.0, independent_texts=3
    )  # a server failed to give the others
    best = shown(few, *sample_sweep())["best"]
    assert [by_title(best, row)["speedup"][0] for row in (0, 1)] == ["1.55×", "1.70×"]


def test_a_small_loss_is_in_the_metrics_unit() -> None:
    """A hundredth of a nat of a log-probability."""
    several = [
        sample_log_probability(speedup, loss)
        for speedup, loss in ((1.5, 0.0), (2.0, -0.009), (3.0, -0.02))
    ]
    best = shown(*several)["best"]
    assert [by_title(best, row)["speedup"][0] for row in (0, 1)] == ["1.50×", "2.00×"]


def test_the_margin_of_a_log_probability_is_in_nats_and_its_bound_has_its_digits() -> None:
    tested = NonInferiority(margin=0.01, lower_bound=-0.0042, p_value=0.02, test="bootstrap")
    result = with_quality(sample_log_probability(1.5, -0.003), non_inferiority=tested)
    points = shown(result)["points"]
    cell = by_title(points)["no worse by 0.01 nats"]
    assert cell == ("yes", "p = 0.020, at least −0.0042, margin 0.01 nats")


def test_what_was_not_measured_has_no_table() -> None:
    found = shown(*(replace(result, prediction=None, cost=None) for result in sample_sweep()))
    assert [name for name, table in found.items() if table] == ["points", "best"]


def test_a_baseline_that_is_no_point_has_a_row_of_what_was_timed_beside() -> None:
    beside = {"baseline_tokens_per_s": 150.0, "further_qualities": {"chrf": FURTHER}}
    sweep = [one for one in sample_sweep(**beside) if not one.is_baseline]
    quick = replace(sweep[0].baseline_latency_s, median=0.001, p95=0.001)  # beside one of them
    sweep[0] = replace(sweep[0], baseline_latency_s=quick)
    points = shown(*sweep)["points"]
    *others, last = points.rows
    assert len(others) == 19 and last.is_baseline and not any(row.is_baseline for row in others)
    cells = by_title(points, -1)
    assert cells["policy"] == ("vanilla", "timed beside 19 points")
    assert (cells["speedup"][0], cells["BLEU"][0], cells["tokens/s"][0]) == (
        "1.00×",
        "41.00",
        "150.0",
    )
    assert cells[COLUMNS["latency_s_median"].title] == ("102.3 ms", "p95 187.0 ms")
    assert cells["chrF"] == ("61.50", "")


def test_on_a_narrow_screen_the_first_columns_say_which_point_how_fast_and_how_good() -> None:
    table = shown(*sample_sweep())["points"]
    assert [column.title for column in table.columns[:5]] == [
        "policy",
        "speedup",
        "BLEU",
        "difference",
        "fallback",
    ]
    assert by_title(table)["policy"] == ("bild", "fallback 0.3, rollback 5")


def certified(policy: str, **counts: Any) -> Result:
    return sample_result(
        policy, {}, 1.4, certificate={"equal": 1, "ties": 2, "defects": 0, **counts}
    )


def test_certificates_have_a_column_where_there_are_any() -> None:
    assert "certificate" not in by_title(shown(*sample_sweep())["points"])
    assert by_title(shown(certified("bild"))["points"])["certificate"] == (
        "1 equal",
        "2 ties, 0 defects",
    )
    failed = replace(certified("bild", unjudged=3), streamed=Streamed(errors=3, retries=0))
    without_text = by_title(shown(failed)["points"])
    assert without_text["certificate"] == ("1 equal", "2 ties, 0 defects, 3 without a text")


def test_the_table_gives_the_variation_by_number_of_rows() -> None:
    sampled = certified("speculative", output=2e-16, rounding={"4": 3e-5, "10": 4.56e-4})
    lossy = certified("typical_acceptance", output=0.2, rounding={"1": 0.0, "4": 1e-5})
    rounding = shown(sample_baseline(), sampled, lossy, certified("bild"))["rounding"]
    assert [column.title for column in rounding.columns[1:]] == [
        "rule",
        "1 row",
        "4 rows",
        "10 rows",
    ]
    assert [row[1:] for row in texts(rounding)] == [
        ["2.0e-16", "–", "3.0e-05", "4.6e-04"],
        ["2.0e-01", "0", "1.0e-05", "–"],
    ]


def part(speedup: float, examples: int) -> dict:
    return {
        "n_examples": examples,
        "tokens": 10 * examples,
        "tokens_per_s": 20 * speedup,
        "baseline_tokens_per_s": 20.0,
        "tokens_per_s_ratio": speedup,
        "speedup": {
            "value": speedup,
            "low": speedup - 0.2,
            "high": speedup + 0.3,
            "median": speedup,
        },
        "tokens_per_target_call": 1.1 * speedup,
        "acceptance_rate": 0.5,
    }


def with_categories(window: int, speedup: float) -> Result:
    categories = {"writing": part(speedup - 0.5, 20), "coding": part(speedup + 0.5, 80)}
    own = {"categories": categories, "baseline_tokens_per_s": 150.0}
    return sample_drafted("speculative", {"window": window}, speedup, 0.0, (0.6, 1.0), **own)


def test_every_category_has_a_row_for_each_point_and_all_examples_the_last() -> None:
    table = shown(sample_baseline(), with_categories(2, 1.5), with_categories(4, 2.0))["categories"]
    assert [column.title for column in table.columns[:4]] == [
        "category",
        "policy",
        "examples",
        "speedup",
    ]
    rows = [
        (row.cells[0].text, row.cells[1].detail, row.cells[2].text, row.cells[3].text)
        for row in table.rows
    ]
    assert rows == [
        ("writing", "window 4", "20", "1.50\u00d7"),
        ("writing", "window 2", "20", "1.00\u00d7"),
        ("coding", "window 4", "80", "2.50\u00d7"),
        ("coding", "window 2", "80", "2.00\u00d7"),
        ("overall", "window 4", "100", "2.00\u00d7"),
        ("overall", "window 2", "100", "1.50\u00d7"),
    ]
    coding = by_title(table, 2)
    assert coding["speedup"] == ("2.50×", "[2.30, 2.80]") and coding["tokens/s"] == ("50.0", "20.0")
    assert (coding["tokens/call"][0], coding["acceptance"][0]) == ("2.75", "50.0 %")
    assert by_title(table, 4)["acceptance"][0] == "60.0 %"


def test_texts_that_never_came_are_none_of_the_examples_of_a_speedup() -> None:
    """Of the categories they were left out already."""
    failed = replace(with_categories(2, 1.5), streamed=Streamed(errors=40, retries=0))
    table = shown(sample_baseline(), failed)["categories"]
    assert table.rows[-1].cells[2].text == "60"
    claim = quality_claim(by_setting([failed])[0], replace(failed, agreement_with_target=0.9))
    assert "only 6 texts differ" in claim  # of those that came


def test_a_category_of_few_texts_has_no_interval() -> None:
    categories = {"one": part(1.5, 19), "turns": {**part(1.5, 20), "independent_texts": 10}}
    categories["enough"] = {**part(1.5, 40), "independent_texts": 20}
    table = shown(sample_result("bild", {}, 1.5, categories=categories))["categories"]
    details = {row.cells[0].text: row.cells[3].detail for row in table.rows}
    assert details == {
        "one": "",
        "turns": "",
        "enough": "[1.30, 1.80]",
        "overall": "[1.45, 1.55]",
    }


def test_a_speedup_of_a_busy_machine_says_so_in_every_table() -> None:
    own = {
        "environment": {**ENVIRONMENT, "busy_elsewhere_percent": 74.4},
        "categories": {"news": part(1.4, 20)},
    }
    found = shown(sample_result("bild", {}, 1.5, **own))
    for name, row in (
        ("points", 0),
        ("best", 0),
        ("best", 1),
        ("categories", 0),
        ("categories", 1),
    ):
        assert by_title(found[name], row)["speedup"][1].endswith("], machine 74 % busy"), name
    calm = shown(sample_result("bild", {}, 1.5))
    assert [one["best"].rows[0].cells[1].tone for one in (found, calm)] == ["", "big"]


@pytest.mark.parametrize(
    ("name", "text", "detail"),
    [
        ("speedup", "1.50×", "[1.45, 1.55]"),
        ("quality_difference", "+0.25", "[−0.20, +0.75]"),
        ("latency_s_median", "68.2 ms", "p95 124.7 ms"),
        ("tokens_per_s", "225.0", ""),
        ("acceptance_rate", "–", ""),
    ],
)
def test_a_number_has_its_interval_if_there_is_one(name: str, text: str, detail: str) -> None:
    cell = cell_of(sample_result("bild", {}, 1.5, 0.25), name)
    assert (cell.text, cell.detail) == (text, detail)
