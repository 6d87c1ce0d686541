"""What equations alone draw: the script's files and their values; the simulated pipeline beside PPD's theorem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bild_lab.engine.ppd.theory import compute_of_runs, expected_compute, expected_latency, latency_of_runs
from bild_lab.engine.speculative_theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    walltime_improvement,
)
from bild_lab.papers import theory
from bild_lab.papers.theory import MAIN, Busy, draw_matches, match_rate, simulate
from scripts import figures

SHAPES = [(8, 4), (8, 6), (7, 4), (40, 35), (6, 6)]
Command = Callable[..., tuple[int, str]]


def drawn(command: Command, *names: str) -> dict[str, pd.DataFrame]:
    """The values of what the script draws by equations alone, by figure; each has a picture."""
    command(figures, *names, config=None)
    files = sorted(Path("outputs/figures").glob("*_theory.*"))
    assert {file.suffix for file in files} == {".csv", ".png"} and len({file.stem for file in files}) * 2 == len(files)
    for file in files[1::2]:
        assert Image.open(file).width in (1200, 1500) and file.stat().st_size < 200_000
    return {file.stem.removesuffix("_theory"): pd.read_csv(file) for file in files[::2]}


def test_the_figures_of_speculative_decoding_have_the_values_of_its_equations(command: Command) -> None:
    tables = drawn(command, "spec_fig2_4")
    assert list(tables) == ["spec_fig2", "spec_fig3", "spec_fig4"]
    assert sorted(set(tables["spec_fig2"]["window"])) == [1, 3, 5, 7, 10, float("inf")]
    for _, row in tables["spec_fig2"].iterrows():
        rate, window = row["acceptance_rate"], row["window"]
        expected = 1 / (1 - rate) if window == float("inf") else expected_tokens(rate, window)
        assert row["expected_tokens"] == pytest.approx(expected)
    assert set(tables["spec_fig3"]["cost_ratio"]) == {0.01, 0.02, 0.05, 0.1, 0.2}
    for _, row in tables["spec_fig3"].iterrows():  # no curve is cut at the figure's height
        assert row["optimal_window"] == optimal_window(row["acceptance_rate"], row["cost_ratio"], most=1000) <= 42
    for _, row in tables["spec_fig4"].iterrows():
        rate, window = row["acceptance_rate"], row["window"]
        assert row["walltime_improvement"] == pytest.approx(walltime_improvement(rate, window, 0.0))
        assert row["operations_increase"] == pytest.approx(operations_increase(rate, window, 0.0))


def test_the_figures_of_the_pipeline_have_the_values_of_its_equations_and_simulated_texts_lie_on_the_curves(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theory, "SIMULATED_TEXTS", 4)
    tables = drawn(command, "ppd_fig2", "ppd_fig4")
    found = tables["ppd_fig2"]
    assert list(tables) == ["ppd_fig2", "ppd_fig4"] and found.equals(tables["ppd_fig4"])
    assert len(found.groupby(["dataset", "trained", "exit_layer", "top_k"])) == len(found) == 3 * 2 * 4 * 3
    half = found[found["exit_layer"] == 20]
    for _, row in half.iterrows():
        k, p = row["top_k"], match_rate(row["dataset"], row["top_k"], row["trained"], 20)
        assert row["latency"] == pytest.approx(1 - p / 2)
        assert row["compute_per_time_unit"] == pytest.approx((k + 2 - p) / (2 - p))
        assert row["compute_per_token"] == pytest.approx((2 + k - p) / 2)
    assert found["simulated_latency"].to_numpy() == pytest.approx(found["latency"].to_numpy(), abs=0.05)
    for compute in ("compute_per_time_unit", "compute_per_token"):
        assert found[f"simulated_{compute}"].to_numpy() == pytest.approx(found[compute].to_numpy(), rel=0.08)


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
