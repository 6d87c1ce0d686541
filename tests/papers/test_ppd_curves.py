"""Tests of the PPD paper's figures: their files, and their values beside the printed equations."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from PIL import Image

from bild_lab.papers import ppd_curves as ppd_figures
from bild_lab.papers.ppd_table1 import match_rate
from scripts.figures import draw_theory


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What scripts/figures.py draws by equations."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppd_figures, "SIMULATED_TEXTS", 4)
        for name in ("ppd_fig2", "ppd_fig4"):
            assert draw_theory(name, folder) == [folder / f"{name}_theory.png"]
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


def test_the_script_draws_both_figures_with_their_values_beside_them(figures: Path) -> None:
    names = [f"ppd_fig{number}_theory.{kind}" for number in (2, 4) for kind in ("csv", "png")]
    assert sorted(entry.name for entry in figures.iterdir()) == names
    for name in names[1::2]:
        assert Image.open(figures / name).size == (1500, 690)
        assert (figures / name).stat().st_size < 200_000


@pytest.mark.parametrize("name", ["ppd_fig2_theory", "ppd_fig4_theory"])
def test_every_printed_match_rate_from_half_the_layers_on_is_there(figures: Path, name: str) -> None:
    found = {(row["dataset"], row["trained"], row["exit_layer"], row["top_k"]) for row in rows(figures / f"{name}.csv")}
    assert len(found) == 3 * 2 * 4 * 3


def test_at_half_the_layers_the_values_are_those_of_equations_2_4_and_6(figures: Path) -> None:
    for name, compute in (
        ("ppd_fig2_theory", lambda p, k: (k + 2 - p) / (2 - p)),
        ("ppd_fig4_theory", lambda p, k: (2 + k - p) / 2),
    ):
        half = [row for row in rows(figures / f"{name}.csv") if row["exit_layer"] == "20"]
        assert len(half) == 18
        for row in half:
            k = int(row["top_k"])
            p = match_rate(row["dataset"], k, row["trained"] == "True", 20)
            assert float(row["latency"]) == pytest.approx(1 - p / 2)
            assert float(row["compute"]) == pytest.approx(compute(p, k))


@pytest.mark.parametrize("name", ["ppd_fig2_theory", "ppd_fig4_theory"])
def test_simulated_texts_lie_on_the_curves(figures: Path, name: str) -> None:
    for row in rows(figures / f"{name}.csv"):
        assert float(row["simulated_latency"]) == pytest.approx(float(row["latency"]), abs=0.05)
        assert float(row["simulated_compute"]) == pytest.approx(float(row["compute"]), rel=0.08)
