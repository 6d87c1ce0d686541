"""Tests of the table in the terminal."""

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from bild_lab.lab.schema.formatting import MISSING
from bild_lab.lab.schema.numbers import LOG_PROBABILITY_NAME
from bild_lab.lab.store import groups
from bild_lab.report.terminal import category_table, sweep_table
from tests.report.page.test_tables import with_categories
from tests.report.sample import (
    ENVIRONMENT,
    sample_baseline,
    sample_failure,
    sample_replayed,
    sample_result,
    sample_sweep,
    sample_tested_quality,
    with_quality,
    with_speedup,
)


def rendered(results, failures, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(sweep_table(results, failures))
    return console.file.getvalue().splitlines()


def test_table_has_a_row_per_point_within_eighty_columns():
    lines = rendered(sample_sweep(), [sample_failure()])
    assert max(map(len, lines)) <= 80
    assert (
        len(
            [
                line
                for line in lines
                if " 41.00 " in line or " 40." in line or " 39." in line or " 41." in line
            ]
        )
        == 20
    )


def test_front_and_names_of_a_settings_points_are_found_once_and_not_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
):
    """Fault: of 1,000 points, a front of 1,000 points for each row."""
    calls: Counter[str] = Counter()

    def counted(name, function):
        return lambda *given: calls.update([name]) or function(*given)

    for name in ("pareto_front", "varying_knobs"):
        monkeypatch.setattr(groups, name, counted(name, getattr(groups, name)))
    rendered(sample_sweep(), [])
    assert calls == {"pareto_front": 1, "varying_knobs": 2}  # of speculative and of bild


def test_table_rows_read_from_the_fastest():
    first, rest = rendered(sample_sweep(), [])[4:6]
    assert (
        " ".join(first.split())
        == "\u25cf bild fallback 0.3 39.69 \u22121.31 1.83 [1.78, 1.88] 55.9 3.92 91% 49%"
    )
    assert rest.strip() == "rollback 5"


def test_table_separates_settings():
    lines = rendered(sample_sweep() + sample_sweep(setting={"dataset": "iwslt"}), [])
    assert [line.split()[-1] for line in lines if line.strip().startswith("setting")] == [
        "multi30k",
        "iwslt",
    ]


def test_the_precision_that_the_models_ran_in_is_said():
    lines = rendered([sample_result("bild", {"fallback": 0.3}, 1.7)], [])
    assert "Decoded in bfloat16 on " in " ".join(line.strip() for line in lines)


def test_what_the_machine_gives_to_drafts_is_said_beside_the_precision():
    slow, fast = (
        sample_result(
            "bild",
            {"fallback": at},
            1.7,
            environment={**ENVIRONMENT, "read_gb_per_s": read, "eight_rows_cost": 1.46},
        )
        for at, read in ((0.3, 13.24), (0.5, 20.0))
    )
    words = " ".join(line.strip() for line in rendered([slow, fast], []))
    assert "on cpu; memory read at 13.2 to 20.0 GB/s, eight rows cost 1.46 tokens." in words
    older = " ".join(line.strip() for line in rendered([sample_sweep()[0]], []))
    assert "Decoded in bfloat16 on cpu." in older


def test_neither_a_name_nor_a_number_is_cut_where_the_numbers_are_wide():
    wide = with_speedup(sample_result("bild", {"fallback": 0.3}, 16.34), low=10.12, high=100.98)
    wide = replace(wide, latency_s=replace(wide.latency_s, median=123.456))
    wide = with_quality(wide, metric="evaluate:rouge@rougeLsum")
    text = "\n".join(rendered([wide], []))
    assert "16.34 [10.12, 100.98] 123,456.0" in text and "100%" in text
    assert "\u2026" not in text and "bild" in text and "fallback" in text


def test_the_metric_that_needs_no_references_stands_on_one_line():
    agreeing = with_quality(sample_result("bild", {"fallback": 0.3}, 1.6), metric="agreement")
    assert any("agreement" in line for line in rendered([agreeing], []))


def test_table_of_only_failures_renders():
    assert any("failed" in line for line in rendered([], [sample_failure()]))


def test_a_failure_is_told_whole_unless_it_is_long():
    told = " ".join(line.strip() for line in rendered([], [sample_failure()]))
    assert "use .inf to switch it off" in told and "\u2026" not in told
    told = "".join(line.strip() for line in rendered([], [sample_failure("word" * 200)]))
    assert 60 < told.count("word") < 75 and told.endswith("\u2026")


def test_a_speedup_timed_on_a_busy_machine_is_marked_and_the_mark_explained():
    busy = sample_result(
        "bild", {"fallback": 0.3}, 1.7, environment={**ENVIRONMENT, "busy_elsewhere_percent": 74.2}
    )
    quiet = sample_result(
        "bild", {"fallback": 0.5}, 1.6, environment={**ENVIRONMENT, "busy_elsewhere_percent": 9.9}
    )
    lines = rendered([busy, quiet], [])
    assert [("!1.70" in line, " 1.60" in line) for line in lines if "fallback 0." in line] == [
        (True, False),
        (False, True),
    ]
    assert any(line.startswith("! timed while the machine was busy") for line in lines)
    assert not any("busy" in line for line in rendered([quiet], []))


def test_the_best_point_has_its_numbers_by_category():
    console = Console(width=100, file=io.StringIO())
    faster = with_quality(with_categories(6, 2.5), value=38.0, difference=-3.0)
    points = [with_categories(2, 1.5), with_categories(4, 2.0), faster]
    console.print(category_table([sample_baseline(), *points]))
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[2] == ["speculative", "(window", "4)"]
    assert [line[0] for line in lines[3:]] == ["writing", "coding", "overall"]
    assert lines[4] == ["coding", "80", "2.50", "[2.30,", "2.80]", "50.0", "2.75", "50%"]
    assert category_table([sample_baseline(), sample_result("bild", {}, 1.5)]) is None


def test_replayed_texts_come_last_without_numbers_of_a_clock():
    line = rendered([sample_replayed(), *sample_sweep()], [])[-6:]
    assert ["answers file theirs.jsonl 40.80 \u22120.20 – – – – 97%"] == [
        " ".join(one.split()) for one in line if "answers" in one
    ]


def test_points_that_were_tested_by_several_margins_say_theirs() -> None:
    points = [
        sample_result(
            "bild", {"fallback": margin}, 1.5, quality=sample_tested_quality(-1.0, 0.01, margin)
        )
        for margin in (5.0, 2.0)
    ]
    printed = " ".join(rendered(points, [], width=80))
    assert "by 5: 0.010" in printed and "by 2: 0.010" in printed
    assert "by 5" not in " ".join(rendered(points[1:], [], width=80))
    nats = with_quality(points[0], metric=LOG_PROBABILITY_NAME)
    assert "by 5 nats" in " ".join(rendered([nats], [], width=80))


def test_points_that_were_tested_say_whether_they_are_no_worse_by_the_margin():
    shown, open_question = (
        sample_result(
            "bild", {"fallback": at}, 1.7 - at, quality=sample_tested_quality(-1.0, p_value)
        )
        for at, p_value in ((0.3, 0.0112), (0.5, 0.344))
    )
    table = sweep_table([shown, open_question, sample_baseline()], [])
    (column,) = (one for one in table.columns if one.header == "no worse\nby 5")
    assert [str(cell) for cell in column.cells] == ["yes\n0.011", "not shown\n0.344", MISSING]
    lines = rendered([shown, open_question, sample_baseline()], [])
    assert max(map(len, lines)) <= 80
    title = next(index for index, line in enumerate(lines) if "no worse" in line)
    assert "by 5" in lines[title + 1]
    text = "\n".join(lines)
    assert text.index("yes") < text.index("0.011") < text.index("not shown") < text.index("0.344")
    legend = " ".join(text.split())
    assert "no worse: yes where at least 20 examples show it" in legend
    assert "of at most 0.05" in legend
    few = sample_result(
        "bild", {}, 1.4, quality=sample_tested_quality(-1.0, 0.0112), setting={"n_examples": 19}
    )
    assert "not shown" in "\n".join(rendered([few], []))
    assert not any("no worse" in line for line in rendered(sample_sweep(), []))
