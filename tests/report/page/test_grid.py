"""Maps of knobs and the screened grid hold every point with the numbers of its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.lab.schema.numbers import LOG_PROBABILITY_NAME
from bild_lab.lab.store.groups import by_setting
from bild_lab.report.page.grid import grids, knob_maps
from bild_lab.report.screened_points import screened_points
from bild_lab.report.style import COLOURS, marks
from bild_lab.screening.rows import TABLE, Row, read_table, with_front, write_rows
from tests.report.sample import (
    sample_baseline,
    sample_log_probability,
    sample_result,
    sample_sweep,
    with_quality,
)

LIVE = sample_sweep()[1].point  # of bild, in the setting of the sample


def maps(results: list) -> list[dict]:
    (group,) = by_setting(results)
    return knob_maps(group)


def test_each_point_is_in_the_cell_of_its_knobs() -> None:
    speeds, losses = maps(sample_sweep())  # speculative has one knob with several values
    assert (speeds["layout"]["title"]["text"], losses["layout"]["title"]["text"]) == (
        "bild: Speedup",
        "bild: BLEU, difference from vanilla",
    )
    assert speeds["layout"]["xaxis"]["ticktext"] == ["0.3", "0.5", "0.9"]
    assert speeds["layout"]["yaxis"]["ticktext"] == ["0.69", "1", "2", "5"]
    (trace,) = speeds["data"]
    cells = dict(zip(zip(trace["x"], trace["y"], strict=True), trace["text"], strict=True))
    assert sorted(cells) == [(a, b) for a in range(3) for b in range(4)] and cells[0, 3] == "1.83"
    opacities = trace["marker"]["opacity"]
    palest, strongest = (opacities.index(find(opacities)) for find in (min, max))
    slowest = min(trace["text"], key=float)
    assert (opacities[palest], trace["text"][palest]) == (0.08, slowest)
    assert trace["text"][strongest] == "1.83" and trace["customdata"][strongest] in {
        one.point for one in sample_sweep()
    }
    (trace,) = losses["data"]
    assert (
        "−1.31" in trace["text"]
        and "+0.21" in trace["text"]
        and len(set(trace["marker"]["color"])) == 2
    )
    # the largest loss has the strongest colour, and another one than a gain
    by_text = {
        text: (colour, opacity)
        for text, colour, opacity in zip(
            trace["text"], trace["marker"]["color"], trace["marker"]["opacity"], strict=True
        )
    }
    assert by_text["−1.31"] == (COLOURS[1], 0.68) and by_text["+0.21"][0] == COLOURS[0]


def test_a_map_of_a_log_probability_has_its_digits(tmp_path: Path) -> None:
    losses = {(1, 1): 0.0, (1, 2): -0.0031, (2, 1): 0.0012, (2, 2): -0.004}
    results = [
        replace(sample_log_probability(1.5, loss), knobs={"a": a, "b": b})
        for (a, b), loss in losses.items()
    ]
    _, (trace,) = (figure["data"] for figure in maps(results))
    assert set(trace["text"]) == {"0.0000", "−0.0031", "+0.0012", "−0.0040"}
    write_rows(
        tmp_path,
        [
            replace(
                row(a=a, b=b), quality_metric=LOG_PROBABILITY_NAME, quality_difference=difference
            )
            for (a, b), difference in losses.items()
        ],
    )
    (grid,) = grids(screened_points(tmp_path, []), marks(["bild"]))
    assert grid.maps[1]["data"][0]["text"] == trace["text"]


def test_without_a_baseline_the_palest_square_is_the_poorest() -> None:
    """Of qualities from 40 on, all squares would have one colour."""
    results = [
        with_quality(
            sample_result("bild", {"a": a, "b": b}, None, setting={"baseline": None}),
            value=40.0 + 2 * a + b,
        )
        for a in (0, 1)
        for b in (0, 1)
    ]
    (times,), (trace,) = (figure["data"] for figure in maps(results))
    assert trace["marker"]["opacity"] == [0.08, 0.28, 0.48, 0.68]
    assert set(times["text"]) == {f"{1000 * results[0].latency_s.mean:.2f}"}  # milliseconds


def test_a_menu_chooses_the_values_of_other_knobs() -> None:
    results = [
        sample_result("bild", {"a": a, "b": b, "c": c}, 1.2)
        for a in (1, 2)
        for b in (1, 2)
        for c in (5, 6)
    ]
    speeds, _ = maps([sample_baseline(), *results])
    (menu,) = speeds["layout"]["updatemenus"]
    assert [button["label"] for button in menu["buttons"]] == ["c 5", "c 6"]
    assert [button["args"][1] for button in menu["buttons"]] == [[True, False], [False, True]]
    assert [trace.get("visible", True) for trace in speeds["data"]] == [True, False]
    assert [len(trace["x"]) for trace in speeds["data"]] == [4, 4]


@pytest.mark.parametrize(("fallbacks", "rollbacks", "letters"), [(19, 10, True), (30, 20, False)])
def test_squares_of_a_large_grid_lie_beside_one_another(
    fallbacks: int, rollbacks: int, letters: bool
) -> None:
    results = [
        sample_result("bild", {"fallback": fallback, "rollback": rollback}, 1.2)
        for fallback in range(fallbacks)
        for rollback in range(rollbacks)
    ]
    for drawn in maps(results):
        layout, (trace,) = drawn["layout"], drawn["data"]
        assert len(layout["xaxis"]["ticktext"]) == rollbacks  # as the picture grows in height alone
        assert rollbacks * trace["marker"]["size"] <= 400  # pixels on a narrow screen
        assert layout["height"] >= 40 * fallbacks
        assert ("text" in trace["mode"]) is letters and len(trace["text"]) == len(results)


def row(policy: str = "bild", place: int = 0, **knobs: object) -> Row:
    quality = {
        "quality": 40.0 + place,
        "quality_low": 39.0,
        "quality_high": 42.0,
        "quality_metric": "BLEU",
    }
    difference = {
        "quality_difference": float(place),
        "quality_difference_low": -1.0,
        "quality_difference_high": 1.0,
    }
    counts = {
        "tokens_per_target_call": 2.5,
        "target_calls": 10 + place,
        "draft_calls": 30,
        "acceptance_rate": 0.75,
    }
    counts |= {"tokens": 25, "drafted": 30, "accepted": 15, "fallbacks": 4, "rollbacks": 3}
    own = {"policy": policy, "knobs": knobs, "split": "validation", "n_examples": 7}
    own |= {"data": "28a573986af1"}
    return Row(**own, **quality, **difference, **counts, predicted_speedup=2.0 - place / 10)


ROWS = [
    row(place=0, fallback=0.3, rollback=10.0),
    row(place=1, fallback=0.3, rollback=2),
    row(place=2, fallback=0.05, rollback=2),
    row("speculative", place=-1, window=5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(
        tmp_path,
        [replace(ROWS[0], confirmed=LIVE), replace(ROWS[1], certified="a small loss"), *ROWS[2:]],
    )
    return tmp_path


def test_every_screened_point_has_its_knobs_and_numbers(folder: Path) -> None:
    points = screened_points(folder, sample_sweep())
    assert [one.knobs for one in points] == [
        {"fallback": 0.3, "rollback": 10.0},
        {"fallback": 0.3, "rollback": 2.0},
        {"fallback": 0.05, "rollback": 2.0},
        {"window": 5.0},
    ]
    assert [(one.speedup, one.difference) for one in points] == [
        (2.0, 0.0),
        (1.9, 1.0),
        (1.8, 2.0),
        (2.1, -1.0),
    ]
    (grid,) = grids(points, marks(["bild", "speculative"]))
    assert (grid.split, grid.examples, grid.count, len(grid.maps)) == ("validation", 7, 4, 2)
    drawn = {trace["name"]: trace for trace in grid.cloud["data"]}
    assert drawn["bild"]["x"] == pytest.approx([1 / 2, 1 / 1.9, 1 / 1.8]) and drawn["bild"][
        "y"
    ] == [0, 1, 2]
    assert "11 target calls" in drawn["bild"]["text"][1]


def test_a_certified_point_has_a_ring_and_a_mark_in_the_maps(folder: Path) -> None:
    (grid,) = grids(screened_points(folder, []), marks(["bild", "speculative"]))
    (ring,) = [trace for trace in grid.cloud["data"] if trace["name"].startswith("certified")]
    assert (ring["name"], ring["x"], ring["y"]) == ("certified: a small loss", [1 / 1.9], [1.0])
    assert [one for trace in grid.maps[0]["data"] for one in trace["text"] if "✓" in one] == [
        "1.90<br>✓"
    ]


def test_a_table_from_before_certificates_and_hashes_is_drawn(folder: Path) -> None:
    table = read_table(folder / TABLE).drop(columns=["certified", "code", "data"])
    table.to_csv(folder / TABLE, index=False)
    (grid,) = grids(screened_points(folder, []), marks(["bild", "speculative"]))
    assert grid.count == len(ROWS)
    assert not [one for one in grid.cloud["data"] if one["name"].startswith("certified")]


def test_a_confirmed_point_has_the_numbers_of_its_live_run(folder: Path) -> None:
    points = screened_points(folder, sample_sweep())
    result = sample_sweep()[1]
    assert [one.live is not None for one in points] == [True, False, False, False]
    (grid,) = grids(points, marks(["bild", "speculative"]))
    (live,) = [trace for trace in grid.cloud["data"] if trace["name"] == "bild, measured"]
    assert (live["x"], live["y"]) == ([1 / result.speedup.value], [result.quality.difference])
    assert live["customdata"] == [LIVE]
    speedup = result.speedup
    ends = [live["error_x"][side][0] for side in ("arrayminus", "array")]
    latencies = [1 / end for end in (speedup.high, speedup.value, speedup.low)]
    assert ends == pytest.approx([latencies[1] - latencies[0], latencies[2] - latencies[1]])


def test_the_fastest_point_within_each_loss_is_named(folder: Path) -> None:
    (grid,) = grids(screened_points(folder, []), marks(["bild", "speculative"]))
    cells = [[cell.text for cell in row.cells] for row in grid.fastest.rows]
    assert cells[0] == ["0.0", "2.00×", "0.00", "not confirmed", "bild (fallback 0.3, rollback 10)"]
    assert cells[2] == ["1.0", "2.10×", "−1.00", "not confirmed", "speculative"]
    assert [cell.order for cell in grid.fastest.rows[2].cells[:3]] == [1.0, 2.1, -1.0]


def test_the_losses_that_are_allowed_are_in_the_metrics_unit(tmp_path: Path) -> None:
    own = {"quality_metric": LOG_PROBABILITY_NAME}
    several = [
        replace(row(place=place, fallback=place), quality_difference=difference, **own)
        for place, difference in ((1, -1e-12), (0, -0.008))  # a rounding is no loss
    ]
    write_rows(tmp_path, several)
    (grid,) = grids(screened_points(tmp_path, []), marks(["bild"]))
    found = [(cells[0].order, cells[1].order) for cells in (one.cells for one in grid.fastest.rows)]
    assert found == [(0.0, 1.9), (0.005, 1.9), (0.01, 2.0), (0.02, 2.0)]


def test_the_front_of_a_screening_leaves_out_what_another_point_beats(tmp_path: Path) -> None:
    slow = replace(row(place=1, fallback=0.5), predicted_speedup=1.0)
    rows = with_front([row(place=0, fallback=0.3), slow, row(place=2, fallback=0.7)])
    write_rows(tmp_path, rows)
    (grid,) = grids(screened_points(tmp_path, []), marks(["bild"]))
    (front,) = [trace for trace in grid.cloud["data"] if trace["name"] == "front"]
    assert (front["x"], front["y"]) == (pytest.approx([1 / 2.0, 1 / 1.8]), [0, 2])


def test_other_numbers_of_examples_and_other_splits_have_a_grid_of_their_own(
    tmp_path: Path,
) -> None:
    others = [replace(ROWS[0], n_examples=9), replace(ROWS[0], split="train")]
    write_rows(tmp_path, [*ROWS, *others])
    found = grids(screened_points(tmp_path, []), marks(["bild", "speculative"]))
    assert [(one.split, one.examples, one.count) for one in found] == [
        ("validation", 7, 4),
        ("validation", 9, 1),
        ("train", 7, 1),
    ]


def test_a_point_whose_speed_was_not_predicted_is_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path, [replace(one, predicted_speedup=None) for one in ROWS])
    assert screened_points(tmp_path, []) == [] == screened_points(tmp_path / "nowhere", [])
