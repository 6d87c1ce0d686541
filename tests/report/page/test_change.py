"""The report's table of quality lost and what changed."""

from __future__ import annotations

from pathlib import Path

from bild_lab.lab.results.groups import by_setting
from bild_lab.report.page.change import change_table
from tests.lab.results.test_table import FURTHER
from tests.report.page.test_html import report
from tests.report.sample import sample_baseline, sample_result

CHANGE = {
    **{"changed": 0.25, "first_difference": 7.0, "length_ratio": 1.02},
    **{"length_ratio_low": 0.98, "length_ratio_high": 1.06, "log_probability": -0.4321},
    **{"log_probability_low": -0.5, "log_probability_high": -0.4, "log_probability_baseline": -0.4},
    **{"log_probability_difference": -0.0321, "log_probability_difference_low": -0.05},
    **{"log_probability_difference_high": 0.001},
}


def test_the_table_says_what_changed_beside_what_was_lost(tmp_path: Path) -> None:
    lossy = sample_result("bild", {"rollback": 5.0}, 1.8, -0.9, change=CHANGE, further_qualities={"chrf": FURTHER})
    results = [sample_baseline(), lossy, sample_result("speculative", {}, 1.4)]
    (group,) = by_setting(results)
    columns, (row,) = change_table(group)  # the baseline and older results have no row
    told = {column.title: (cell.text, cell.detail) for column, cell in zip(columns, row.cells, strict=True)}
    assert told["policy"][0] == "bild" and told["BLEU, difference"][0] == "−0.90"
    assert told["chrF"] == ("61.00", "−0.50 [−1.00, +0.10]")
    assert told["changed"] == ("25.0 %", "") and told["first difference"] == ("7.0", "")
    assert told["length"] == ("1.02×", "[0.98, 1.06]")
    assert told["log-probability"] == ("−0.432", "[−0.500, −0.400]")
    assert told["difference"] == ("−0.032", "[−0.050, +0.001]")
    page = report(tmp_path, results, [])
    assert "Quality lost, and what changed" in page.text and "chrF signature nc:6" in page.text


def test_older_results_have_no_such_table(tmp_path: Path) -> None:
    page = report(tmp_path, [sample_baseline(), sample_result("bild", {}, 1.4)], [])
    assert "Quality lost, and what changed" not in page.text
