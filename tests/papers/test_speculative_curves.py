"""The theory's figures: the script's files, and their values beside the equations."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    walltime_improvement,
)
from scripts import figures


def rows(number: int) -> list[dict[str, float]]:
    with Path(f"outputs/figures/spec_fig{number}_theory.csv").open() as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


def test_the_script_draws_three_figures_with_the_values_of_the_equations(
    command: Callable[..., tuple[int, str]],
) -> None:
    assert command(figures, "spec_fig2_4", config=None)[0] == 0
    files = sorted(Path("outputs/figures").glob("*_theory.*"))
    names = [f"spec_fig{number}_theory.{kind}" for number in (2, 3, 4) for kind in ("csv", "png")]
    assert [file.name for file in files] == names
    for file in files[1::2]:
        assert Image.open(file).size in {(1200, 750), (1500, 750)}
        assert file.stat().st_size < 200_000
    assert sorted({row["window"] for row in rows(2)}) == [1, 3, 5, 7, 10, float("inf")]
    for row in rows(2):
        rate, window = row["acceptance_rate"], row["window"]
        expected = 1 / (1 - rate) if window == float("inf") else expected_tokens(rate, window)
        assert row["expected_tokens"] == pytest.approx(expected)
    assert {row["cost_ratio"] for row in rows(3)} == {0.01, 0.02, 0.05, 0.1, 0.2}
    for row in rows(3):  # no curve is cut at the figure's height
        window = optimal_window(row["acceptance_rate"], row["cost_ratio"], most=1000)
        assert row["optimal_window"] == window <= 42
    for row in rows(4):
        rate, window = row["acceptance_rate"], row["window"]
        assert row["walltime_improvement"] == pytest.approx(walltime_improvement(rate, window, 0.0))
        assert row["operations_increase"] == pytest.approx(operations_increase(rate, window, 0.0))
