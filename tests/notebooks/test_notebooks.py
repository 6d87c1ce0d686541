"""The notebooks run from top to bottom, with a sweep's outputs and without any, and are committed
without their own.
"""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from nbclient import NotebookClient

from bild_lab.lab.store.table import write_table
from tests.report.sample import sample_drafted, sample_sweep

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(file.stem for file in (ROOT / "notebooks").glob("*.ipynb"))
PAPERS = ["bild", "bita", "ppd", "speculative"]


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def checkout(folder: Path) -> Path:
    """A checkout with the committed results and no outputs."""
    folder.mkdir()
    for name in ("run.py", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def with_outputs(folder: Path) -> Path:
    """Put there what sweeps and a measurement of match rates leave."""
    sweeps = {
        "multi30k": sample_sweep(),
        "spec_tab2_small": sample_sweep(),
        "bita": [sample_drafted("bita", {"top_k": 5}, 2.25, 0.0, (0.6, 1.0))],
    }
    for name, results in sweeps.items():
        (folder / "outputs" / name).mkdir(parents=True)
        write_table(results, folder / "outputs" / name / "sweep.csv")
    (folder / "outputs/match").mkdir()
    rates = {
        "layer": [4, 4, 6],
        "top_k": 1,
        "heads": "shared",
        "position": [0, 1, 0],
        "matches": [1, 2, 3],
        "count": 4,
    }
    pd.DataFrame(rates).to_csv(folder / "outputs/match/match_rates.csv", index=False)
    return folder


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def code(name: str) -> list[str]:
    return [cell.source for cell in read(name).cells if cell.cell_type == "code"]


def names_after(name: str, folder: Path) -> dict[str, Any]:
    """What a notebook's cells leave behind, run as plain Python in this folder: a kernel would take
    seconds more.
    """
    with chdir(folder):
        plt.switch_backend("agg")
        names: dict[str, Any] = {}
        for cell in code(name):
            exec(cell, names)  # the project's own notebooks
        plt.close("all")
    return names


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return checkout(tmp_path / "bare")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return with_outputs(checkout(tmp_path / "measured"))


def test_the_bild_notebook_reads_the_sweep_or_else_the_committed_results(
    bare: Path, measured: Path
) -> None:
    own, committed = names_after("bild", measured), names_after("bild", bare)
    kept = pd.read_csv(ROOT / "docs/results/translation_grid.csv")
    free = kept.query("policy == 'bild' and quality_difference >= 0")["speedup"]
    assert (len(committed["bild"]), committed["kept"]["speedup"].max()) == (20, max(free))
    assert own["kept"]["speedup"].max() == 1.55
    assert (committed["baseline"], own["baseline"]) == pytest.approx(
        (kept.set_index("policy")["quality"]["vanilla"], 41.0)
    )
    assert own["front"][0] == (1 / 1.83, pytest.approx(39.69))
    assert committed["axes"].get_xlim()[1] < 1.2  # nothing far slower squeezes the plane


def test_the_speculative_notebook_reads_the_sweep_or_else_the_committed_results(
    bare: Path, measured: Path
) -> None:
    names = [names_after("speculative", folder) for folder in (bare, measured)]
    committed, own = (each["points"] for each in names)
    assert len(committed) == 12
    told_by = ["draft", "temperature", "window"]
    assert not committed.duplicated(told_by).any() and {*told_by[1:]} <= {
        *names[0]["NAMES"].values()
    }
    (last,) = committed.query("draft == 't5-small' and temperature == 1 and window == 7").to_dict(
        "records"
    )
    assert [round(last[name], 2) for name in ("predicted_theorem", "speedup")] == [1.86, 1.29]
    assert own["speedup"].tolist() == [1.21, 1.38, 1.34, 1.12]


@pytest.mark.filterwarnings("error")
def test_the_bita_notebook_finds_sweeps_of_bita(bare: Path, measured: Path) -> None:
    committed, own = (names_after("bita", folder)["measured"] for folder in (bare, measured))
    assert committed == "no sweep with policy=bita in outputs/ yet"
    assert own[["sweep", "speedup"]].to_numpy().tolist() == [["bita", 2.25]]


def test_the_ppd_notebook_adds_measured_match_rates_up(bare: Path, measured: Path) -> None:
    committed, own = (names_after("ppd", folder)["measured"] for folder in (bare, measured))
    assert committed == "none in outputs/match yet"
    assert own.loc[("shared", 1)].to_dict() == {4: 0.375, 6: 0.75}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_runs_in_a_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))  # not the user's home
    notebook = read(name)
    NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(ROOT / "notebooks")}}
    ).execute()
    # no warning either
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []
    kinds = {kind for output in outputs(notebook) for kind in output.get("data", {})}
    assert ({"text/html"} if name == "tour" else {"image/png", "text/html"}) <= kinds


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_committed_without_outputs(name: str) -> None:
    notebook = read(name)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_there_is_a_notebook_for_every_paper_and_a_tour() -> None:
    assert NAMES == [*PAPERS, "tour"]


@pytest.mark.parametrize("name", NAMES)
def test_links_of_notebooks_lead_somewhere(name: str) -> None:
    told = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#:]+)\)", told)
    assert [target for target in targets if not (ROOT / "notebooks" / target).exists()] == []
