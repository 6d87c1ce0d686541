"""Tests of the theory's figures: their files, their values, and measured points in the right place."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import scripts.theory
from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    walltime_improvement,
)
from bild_lab.errors import UserError
from bild_lab.lab.cli import run_application
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result, Speedup
from bild_lab.papers.speculative_curves import (
    Measured,
    draw_among_curves,
    draw_expected_tokens,
    draw_measured,
    draw_optimal_window,
    draw_speed_and_operations,
    measured_points,
    spread,
)
from tests.report.sample import sample_drafted, sample_prediction, sample_sweep


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def predicted(window: int | None = 5, cost_ratio: float = 0.1) -> dict:
    return {**sample_prediction("speculative", {"window": 5}, 1.5, 0.8), "window": window, "cost_ratio": cost_ratio}


def judged_by(rule: str) -> dict:
    return {"pair": "toy", "aligned": False, "acceptance": rule, "trained": {}}


def point(window: int = 5, rate: float = 0.8, speedup: float = 1.5, **changes: object) -> Result:
    own = {"facts": judged_by("SpeculativeSampling"), "prediction": predicted(window), **changes}
    return sample_drafted("speculative", {"window": window}, speedup, 0.0, (rate, 1.0), **own)


@pytest.mark.parametrize("draw", [draw_expected_tokens, draw_optimal_window, draw_speed_and_operations])
def test_a_theory_figure_is_a_small_png_with_its_values_beside_it(draw: Callable, tmp_path: Path) -> None:
    draw(tmp_path / "new" / "figure.png")
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == ["figure.csv", "figure.png"]
    width, height = Image.open(tmp_path / "new" / "figure.png").size
    assert (width, height) in {(1200, 750), (1500, 750)}
    assert (tmp_path / "new" / "figure.png").stat().st_size < 200_000


def test_the_values_of_figure_2_are_those_of_equation_1(tmp_path: Path) -> None:
    draw_expected_tokens(tmp_path / "figure.png")
    found = rows(tmp_path / "figure.csv")
    assert sorted({float(row["window"]) for row in found}) == [1, 3, 5, 7, 10, float("inf")]
    for row in found:
        rate, window = float(row["acceptance_rate"]), float(row["window"])
        expected = 1 / (1 - rate) if window == float("inf") else expected_tokens(rate, window)
        assert float(row["expected_tokens"]) == pytest.approx(expected)


def test_the_values_of_figure_3_are_the_best_windows_and_no_curve_is_cut(tmp_path: Path) -> None:
    draw_optimal_window(tmp_path / "figure.png")
    found = rows(tmp_path / "figure.csv")
    assert {float(row["cost_ratio"]) for row in found} == {0.01, 0.02, 0.05, 0.1, 0.2}
    for row in found:
        window = optimal_window(float(row["acceptance_rate"]), float(row["cost_ratio"]), most=1000)
        assert int(row["optimal_window"]) == window <= 42  # the figure's height


def test_the_values_of_figure_4_are_those_of_both_theorems(tmp_path: Path) -> None:
    draw_speed_and_operations(tmp_path / "figure.png")
    for row in rows(tmp_path / "figure.csv"):
        rate, window = float(row["acceptance_rate"]), float(row["window"])
        assert float(row["walltime_improvement"]) == pytest.approx(walltime_improvement(rate, window, 0.0))
        assert float(row["operations_increase"]) == pytest.approx(operations_increase(rate, window, 0.0))


def test_measured_points_are_written_with_what_the_theorem_gives_for_them(tmp_path: Path) -> None:
    draw_measured([point(5, 0.8, 1.5), point(3, 0.7, 1.4)], tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").size == (1200, 735)
    first, second = rows(tmp_path / "figure.csv")
    setting = "t5-large drafted by t5-tiny, multi30k test, 100 examples, temperature 0, bfloat16 on cpu"
    assert (first["policy"], first["setting"], first["window"]) == ("speculative", setting, "5")
    assert [float(first[key]) for key in ("speedup", "low", "high")] == pytest.approx([1.5, 1.45, 1.55])
    assert float(first["predicted"]) == pytest.approx(walltime_improvement(0.8, 5, 0.1))
    assert float(second["predicted"]) == pytest.approx(walltime_improvement(0.7, 3, 0.1))


@pytest.mark.parametrize(
    ("prediction", "cost", "expected"),
    [(None, None, None), (predicted(cost_ratio=0.0), 0.0, expected_tokens(0.8, 5))],
    ids=["not traced", "a drafter that costs nothing"],
)
def test_what_the_theorem_gives_needs_a_cost(prediction: dict | None, cost: float | None, expected: float) -> None:
    ((one,),) = measured_points([point(prediction=prediction)]).values()
    assert (one.window, one.cost_ratio) == (5, cost)
    assert one.predicted == (None if expected is None else pytest.approx(expected))


def test_points_of_other_settings_and_policies_get_panels_of_their_own(tmp_path: Path) -> None:
    sampled = point(setting={"decoding": {"temperature": 1.0}})
    results = [point(), sampled, replace(point(), policy="bigram")]
    panels = [(policy, "temperature 1" in setting) for policy, setting in measured_points(results)]
    assert panels == [("bigram", False), ("speculative", False), ("speculative", True)]
    draw_measured(results, tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").size == (1200, 1995)


@pytest.mark.parametrize(
    "left_out",
    [
        point(facts=judged_by("Rollback")),
        point(facts=None),
        point(facts=judged_by("ExactMatch"), acceptance_rate=None),
        point(prediction=predicted(None)),  # drafts that differ
        replace(point(), speedup=Speedup()),
    ],
)
def test_points_that_the_theorem_does_not_speak_of_are_left_out(left_out: Result) -> None:
    kept = point(facts=judged_by("ExactMatch"))
    assert measured_points([left_out]) == {}
    assert [len(points) for points in measured_points([left_out, kept]).values()] == [1]


def test_sweeps_without_such_points_are_refused_with_a_remedy(tmp_path: Path) -> None:
    rollback = [replace(result, facts=judged_by("Rollback")) for result in sample_sweep()]
    with pytest.raises(UserError, match=r"got none in 20 finished points; run python run\.py -m policy=speculative"):
        draw_measured(rollback, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


def drawn(points: list[Measured]) -> tuple[Axes, str]:
    axes = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    return axes, draw_among_curves(axes, points)


def test_curves_are_drawn_for_the_measured_windows_at_the_median_cost_ratio() -> None:
    points = [
        Measured(window, 0.8, cost, 1.5, 1.4, 1.6, walltime_improvement(0.8, window, cost))
        for window, cost in ((3, 0.1), (5, 0.2), (5, 0.6))
    ]
    axes, note = drawn(points)
    curves = [line for line in axes.lines if len(line.get_xdata()) == 101]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in curves]
    assert ends == [pytest.approx((0.85, walltime_improvement(0.85, window, 0.2))) for window in (3, 5)]
    marks = {
        tuple(float(value) for value in line.get_xydata()[0]) for line in axes.lines if line.get_marker() != "None"
    }
    assert {(0.8, 1.5), *((0.8, one.predicted) for one in points)} <= marks
    assert ({text.get_text() for text in axes.texts}, note) == ({"window 3", "window 5"}, "c = 0.2")


def test_a_cost_ratio_of_nothing_is_not_a_missing_one() -> None:
    assert drawn([Measured(5, 0.3, 0.0, 1.2, 1.1, 1.3, 1.4)])[1] == "c = 0"
    axes, note = drawn([Measured(5, rate, None, 2.0, 1.5, 9.0, None) for rate in (0.7, 1.0)])
    assert note == "no cost ratio recorded, curves for c = 0"
    assert axes.get_xlim() == pytest.approx((0.68, 1.0))
    low, high = axes.get_ylim()
    assert low < 1.0 and high > 9.0  # every point, and the target alone


def test_labels_do_not_overlap_and_stay_below_the_top() -> None:
    assert spread([1.0, 5.0], 2.0, 9.0) == [1.0, 5.0]
    assert spread([1.0, 2.0, 2.5], 2.0, 9.0) == [1.0, 3.0, 5.0]
    assert spread([1.0, 8.0, 8.5], 2.0, 9.0) == [1.0, 7.0, 9.0]


def test_the_script_draws_all_figures_and_lays_sweeps_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep(tmp_path / "outputs" / "first")
    sweep.write_point("abc", "", point(), [])
    sweep.write_point("def", "", point(3, facts=None), [])  # without its acceptance rule

    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["theory.py", *words])
        with pytest.raises(SystemExit) as ended:
            run_application(scripts.theory.main)
        return ended.value.code

    assert call("outputs/nowhere") == 2
    assert "outputs/nowhere has no finished points" in capfd.readouterr().err
    assert not Path("outputs/theory").exists()
    figures = ["figure_2", "figure_3", "figure_4"]
    assert call() == 0
    assert sorted(path.stem for path in Path("outputs/theory").glob("*.png")) == figures
    assert call("outputs/first") == 0
    assert sorted(path.stem for path in Path("outputs/theory").glob("*.csv")) == [*figures, "figure_4_measured"]
    assert len(rows(Path("outputs/theory/figure_4_measured.csv"))) == 1
