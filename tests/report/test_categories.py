"""Tests of the tables of speed by category."""

import io

from rich.console import Console

from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.schema.result import Result
from bild_lab.report.categories import category_table, terminal_table
from bild_lab.report.page.html import write_html
from tests.report.sample import sample_baseline, sample_drafted, sample_result


def part(speedup: float, examples: int) -> dict:
    return {
        "n_examples": examples,
        "tokens": 10 * examples,
        "tokens_per_s": 20 * speedup,
        "baseline_tokens_per_s": 20.0,
        "tokens_per_s_ratio": speedup,
        "speedup": {"value": speedup, "low": speedup - 0.2, "high": speedup + 0.3, "median": speedup},
        "tokens_per_target_call": 1.1 * speedup,
        "acceptance_rate": 0.5,
    }


def measured(window: int, speedup: float) -> Result:
    categories = {"writing": part(speedup - 0.5, 20), "coding": part(speedup + 0.5, 80)}
    own = {"categories": categories, "baseline_tokens_per_s": 150.0}
    return sample_drafted("speculative", {"window": window}, speedup, 0.0, (0.6, 1.0), **own)


def test_every_category_has_a_row_for_each_point_and_all_examples_the_last() -> None:
    (group,) = by_setting([sample_baseline(), measured(2, 1.5), measured(4, 2.0)])
    columns, rows = category_table(group)
    assert [column.title for column in columns[:4]] == ["category", "policy", "examples", "speedup"]
    told = [(row.cells[0].text, row.cells[1].detail, row.cells[2].text, row.cells[3].text) for row in rows]
    assert told == [
        ("writing", "window 4", "20", "1.50\u00d7"),
        ("writing", "window 2", "20", "1.00\u00d7"),
        ("coding", "window 4", "80", "2.50\u00d7"),
        ("coding", "window 2", "80", "2.00\u00d7"),
        ("overall", "window 4", "100", "2.00\u00d7"),
        ("overall", "window 2", "100", "1.50\u00d7"),
    ]
    coding = rows[2].cells
    assert (coding[3].detail, coding[4].text, coding[4].detail) == ("[2.30, 2.80]", "50.0", "20.0")
    assert (coding[5].text, coding[6].text) == ("2.75", "50.0 %")


def test_a_sweep_without_categories_has_no_such_table() -> None:
    results = [sample_baseline(), sample_result("bild", {}, 1.5)]
    assert category_table(by_setting(results)[0])[1] == []
    assert terminal_table(results) is None


def test_the_terminal_shows_the_best_point_by_category() -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(terminal_table([sample_baseline(), measured(2, 1.5), measured(4, 2.0)]))
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert lines[2] == ["speculative", "(window", "4)"]
    assert [line[0] for line in lines[3:]] == ["writing", "coding", "overall"]
    assert lines[4] == ["coding", "80", "2.50", "[2.30,", "2.80]", "50.0", "2.75", "50%"]


def test_the_report_shows_categories_where_there_are_some(tmp_path) -> None:
    write_html("first", [sample_baseline(), measured(2, 1.5)], [], tmp_path / "with.html")
    write_html("first", [sample_baseline()], [], tmp_path / "without.html")
    assert "By category" in (tmp_path / "with.html").read_text()
    assert "By category" not in (tmp_path / "without.html").read_text()
