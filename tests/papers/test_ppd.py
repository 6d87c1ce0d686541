"""The simulated pipeline beside the theorem and Figure 3 of the PPD paper; its Figures 2 and 4 beside the equations."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bild_lab.engine.ppd.theory import compute_of_runs, expected_compute, expected_latency, latency_of_runs
from bild_lab.lab.cli import run_application
from bild_lab.papers import theory
from bild_lab.papers.theory import MAIN, Busy, draw_matches, match_rate, simulate
from scripts import figures as script

SHAPES = [(8, 4), (8, 6), (7, 4), (40, 35), (6, 6)]


@pytest.mark.parametrize(("layers", "exit_layer"), SHAPES)
@pytest.mark.parametrize("rate", [0, 1])
def test_without_chance_the_clock_agrees_with_the_theorem_exactly(layers: int, exit_layer: int, rate: int) -> None:
    for tokens in (1, 2, 9):
        text = simulate([bool(rate)] * (tokens - 1), layers, exit_layer, 3)
        assert text.latency == expected_latency(tokens, layers, exit_layer, rate)
        assert text.compute == expected_compute(tokens, layers, exit_layer, rate, 3)


@pytest.mark.parametrize(("layers", "exit_layer"), SHAPES)
def test_the_mean_over_many_texts_is_the_theorems(layers: int, exit_layer: int) -> None:
    tokens, rate, k, texts = 20, 0.6, 2, 200
    generator = np.random.default_rng(0)
    drawn = [simulate(draw_matches(tokens, rate, generator), layers, exit_layer, k) for _ in range(texts)]
    # a text's latency varies with the number of matches, which is binomial
    error = (layers - exit_layer) * (rate * (1 - rate) * (tokens - 1) / texts) ** 0.5
    latency, compute = np.mean([text.latency for text in drawn]), np.mean([text.compute for text in drawn])
    assert abs(latency - expected_latency(tokens, layers, exit_layer, rate)) <= 4 * error
    assert abs(compute - expected_compute(tokens, layers, exit_layer, rate, k)) <= 4 * error


def test_matches_from_data_give_the_times_of_their_runs() -> None:
    matches = [True, True, False, False, True]  # runs of 3, 1 and 2 tokens
    text = simulate(matches, 10, 6, 2)
    assert text.latency == latency_of_runs([3, 1, 2], 10, 6)
    assert text.compute == compute_of_runs([3, 1, 2], 10, 6, 2)


def test_the_run_of_figure_3_is_on_the_clock_where_the_figure_has_it() -> None:
    """X = 3 and k = 3: d + 2d̄ units, of which 3(d − d̄) engage four processes and the others one."""
    layers, exit_layer = 10, 6
    text = simulate([True, True], layers, exit_layer, 3)
    assert [each for each in text.busy if each.process == MAIN] == [
        Busy(MAIN, 0, 0, 10),
        Busy(MAIN, 1, 10, 16),
        Busy(MAIN, 2, 16, 22),
    ]
    assert [(each.start, each.end) for each in text.busy if each.process == 2] == [(6, 10), (12, 16), (18, 22)]
    engaged = Counter(sum(each.start <= unit < each.end for each in text.busy) for unit in range(text.latency))
    assert engaged == {4: 3 * (layers - exit_layer), 1: layers + 2 * exit_layer - 3 * (layers - exit_layer)}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script draws."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["figures.py", "ppd_fig2", "ppd_fig4"])
        patch.setattr(theory, "SIMULATED_TEXTS", 4)
        with pytest.raises(SystemExit):
            run_application(script.main, None)
    drawn = sorted((folder / "outputs" / "figures").glob("*_theory.*"))
    assert [file.name for file in drawn] == [f"ppd_fig{n}_theory.{kind}" for n in (2, 4) for kind in ("csv", "png")]
    assert all(Image.open(file).size == (1500, 690) for file in drawn[1::2])
    return drawn[0].parent


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def test_at_half_the_layers_the_values_are_those_of_equations_2_4_and_6(figures: Path) -> None:
    half = [row for row in rows(figures / "ppd_fig2_theory.csv") if row["exit_layer"] == "20"]
    assert len(half) == 18
    for row in half:
        k = int(row["top_k"])
        p = match_rate(row["dataset"], k, row["trained"] == "True", 20)
        assert float(row["latency"]) == pytest.approx(1 - p / 2)
        assert float(row["compute_per_time_unit"]) == pytest.approx((k + 2 - p) / (2 - p))
        assert float(row["compute_per_token"]) == pytest.approx((2 + k - p) / 2)


def test_simulated_texts_of_every_printed_match_rate_lie_on_the_curves(figures: Path) -> None:
    found = rows(figures / "ppd_fig4_theory.csv")
    assert found == rows(figures / "ppd_fig2_theory.csv")
    assert len({(row["dataset"], row["trained"], row["exit_layer"], row["top_k"]) for row in found}) == 3 * 2 * 4 * 3
    for row in found:
        assert float(row["simulated_latency"]) == pytest.approx(float(row["latency"]), abs=0.05)
        for compute in ("compute_per_time_unit", "compute_per_token"):
            assert float(row[f"simulated_{compute}"]) == pytest.approx(float(row[compute]), rel=0.08)
