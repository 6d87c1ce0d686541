"""Tests of the theory's figures: their files and their values."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import scripts.theory
from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    walltime_improvement,
)
from bild_lab.papers.speculative_curves import draw_expected_tokens, draw_optimal_window, draw_speed_and_operations


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


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


def test_the_script_draws_all_figures_and_takes_no_words(command: Callable[..., tuple[int, str]]) -> None:
    assert command(scripts.theory, "outputs/nowhere")[0] == 2
    assert not Path("outputs/theory").exists()
    assert command(scripts.theory)[0] == 0
    assert sorted(path.stem for path in Path("outputs/theory").glob("*.png")) == ["figure_2", "figure_3", "figure_4"]
