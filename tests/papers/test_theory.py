"""What equations alone draw: the script's files and their values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from bild_lab.engine.methods.speculative.theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    walltime_improvement,
)
from bild_lab.papers import theory
from bild_lab.papers.theory import match_rate
from scripts import figures

Command = Callable[..., tuple[int, str]]


def drawn(command: Command, *names: str) -> dict[str, pd.DataFrame]:
    """The values of what the script draws by equations alone, by figure; each has a picture."""
    command(figures, *names, config=None)
    files = sorted(Path("outputs/figures").glob("*_theory.*"))
    assert {file.suffix for file in files} == {".csv", ".png"} and len(
        {file.stem for file in files}
    ) * 2 == len(files)
    for file in files[1::2]:
        assert Image.open(file).width in (1200, 1500) and file.stat().st_size < 200_000
    return {file.stem.removesuffix("_theory"): pd.read_csv(file) for file in files[::2]}


@pytest.mark.slow
def test_the_figures_of_speculative_decoding_have_the_values_of_its_equations(
    command: Command,
) -> None:
    tables = drawn(command, "spec_fig2_4")
    assert list(tables) == ["spec_fig2", "spec_fig3", "spec_fig4"]
    assert sorted(set(tables["spec_fig2"]["window"])) == [1, 3, 5, 7, 10, float("inf")]
    for _, row in tables["spec_fig2"].iterrows():
        rate, window = row["acceptance_rate"], row["window"]
        expected = 1 / (1 - rate) if window == float("inf") else expected_tokens(rate, window)
        assert row["expected_tokens"] == pytest.approx(expected)
    assert set(tables["spec_fig3"]["cost_ratio"]) == {0.01, 0.02, 0.05, 0.1, 0.2}
    for _, row in tables["spec_fig3"].iterrows():  # no curve is cut at the figure's height
        assert (
            row["optimal_window"]
            == optimal_window(row["acceptance_rate"], row["cost_ratio"], max_window=1000)
            <= 42
        )
    for _, row in tables["spec_fig4"].iterrows():
        rate, window = row["acceptance_rate"], row["window"]
        assert row["walltime_improvement"] == pytest.approx(walltime_improvement(rate, window, 0.0))
        assert row["operations_increase"] == pytest.approx(operations_increase(rate, window, 0.0))


def test_single_values_of_speculative_decodings_equations_are_those_worked_out_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theory, "paper_figure", lambda *_: nullcontext(Figure()))
    file = tmp_path / "theory.csv"

    theory.draw_expected_tokens(file)
    tokens = pd.read_csv(file).set_index(["window", "acceptance_rate"]).expected_tokens
    assert tokens[3, 0.8] == pytest.approx((1 - 0.8**4) / 0.2)
    assert tokens[3, 1.0] == 4 and tokens[float("inf"), 0.8] == pytest.approx(5)
    assert tokens[float("inf")].index.max() == 0.995  # at 1 without bound

    theory.draw_speed_and_operations(file)
    both = pd.read_csv(file).set_index(["window", "acceptance_rate"]).loc[(3, 0.8)]
    assert both.walltime_improvement == pytest.approx((1 - 0.8**4) / 0.2)
    assert both.operations_increase == pytest.approx(0.2 * 4 / (1 - 0.8**4))

    theory.draw_optimal_window(file)
    windows = pd.read_csv(file).set_index(["cost_ratio", "acceptance_rate"]).optimal_window
    assert windows[0.1].index.max() == 0.95
    assert windows[0.1, 0.8] == 6  # 2.460, 2.470 and 2.448 times as fast with 5, 6 and 7


def test_the_figures_of_the_pipeline_have_the_values_of_its_equations(command: Command) -> None:
    tables = drawn(command, "ppd_fig2", "ppd_fig4")
    found = tables["ppd_fig2"]
    assert list(tables) == ["ppd_fig2", "ppd_fig4"] and found.equals(tables["ppd_fig4"])
    assert (
        len(found.groupby(["dataset", "trained", "exit_layer", "top_k"]))
        == len(found)
        == 3 * 2 * 4 * 3
    )
    half = found[found["exit_layer"] == 20]
    for _, row in half.iterrows():
        k, p = row["top_k"], match_rate(row["dataset"], row["top_k"], row["trained"], 20)
        assert row["latency"] == pytest.approx(1 - p / 2)
        assert row["compute_per_time_unit"] == pytest.approx((k + 2 - p) / (2 - p))
        assert row["compute_per_token"] == pytest.approx((2 + k - p) / 2)
