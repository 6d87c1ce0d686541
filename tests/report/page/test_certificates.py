"""The histogram of texts that differ from the target's, and the table of roundings."""

from __future__ import annotations

from typing import Any

import pytest

from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.schema.result import Result
from bild_lab.report.page.certificates import divergence_figure, gap_labels, gap_place, rounding_table
from bild_lab.report.page.tables import name_of
from tests.report.sample import sample_baseline, sample_example, sample_result

BY_ROWS = {"verdict": "numerical tie", "gap": 1e-3, "margin": 2e-4, "wide_gap": -1e-3}
OTHER_TIE = {**BY_ROWS, "wide_gap": 1e-3}
DEFECT = {"verdict": "defect", "gap": 0.5, "margin": 0.4, "wide_gap": 0.5}
SESSION = {"verdict": "defect of the model's session", "gap": 1e-3, "margin": 9.0, "wide_gap": -4.0}
EQUAL = {"verdict": "equal", "margin": None}
FURTHER = {"verdict": "defect", "margin": None}  # one text goes on where the other ends


def drawn(*certificates: dict[str, Any] | None) -> Any:
    (group,) = by_setting([sample_baseline(), result := sample_result("speculative", {}, 1.4)])
    examples = [sample_example(str(at), certificate=one) for at, one in enumerate(certificates)]
    return divergence_figure(group, {name_of(result): examples})


def test_differences_are_counted_by_gap_and_by_kind() -> None:
    figure = drawn(BY_ROWS, BY_ROWS, OTHER_TIE, DEFECT, SESSION, EQUAL, FURTHER, None)
    counted = {
        trace["name"]: {label: count for label, count in zip(trace["x"], trace["y"], strict=True) if count}
        for trace in figure["data"]
    }
    assert counted == {
        "rounding by the number of rows": {"0.0001 to 0.001": 2},
        "another tie": {"0.0001 to 0.001": 1},
        "defect": {"0.1 to 1": 1},
        "defect of the model’s session": {"1 to 10": 1},
    }


def test_there_is_no_histogram_where_nothing_differs() -> None:
    assert drawn(EQUAL, FURTHER, None) is None


@pytest.mark.parametrize(
    ("gap", "label"),
    [(0.0, "below 1e-07"), (9e-8, "below 1e-07"), (2e-7, "1e-07 to 1e-06"), (99.0, "10 to 100"), (1e5, "100 and more")],
)
def test_every_gap_has_a_bar(gap: float, label: str) -> None:
    assert gap_labels()[gap_place(gap)] == label


def certified(policy: str, **counts: Any) -> Result:
    return sample_result(policy, {}, 1.4, certificate={"equal": 1, "ties": 2, "defects": 0, **counts})


def test_the_table_gives_the_variation_by_number_of_rows() -> None:
    sampled = certified("speculative", output=2e-16, rounding={"4": 3e-5, "10": 4.56e-4})
    lossy = certified("typical_acceptance", output=0.2, rounding={"1": 0.0, "4": 1e-5})
    (group,) = by_setting([sample_baseline(), sampled, lossy, certified("bild")])
    columns, rows = rounding_table(group)
    assert [column.title for column in columns[1:]] == ["rule", "1 row", "4 rows", "10 rows"]
    assert [[cell.text for cell in row.cells[1:]] for row in rows] == [
        ["2.0e-16", "–", "3.0e-05", "4.6e-04"],
        ["2.0e-01", "0", "1.0e-05", "–"],
    ]
