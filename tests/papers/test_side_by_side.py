"""An item of BiTA with two processes on the CPU: two divide the questions, two train together by
Accelerate, and two sweeps run side by side.
"""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest

from tests.papers.test_rehearsal import OWN_PINS, REHEARSALS, Rehearsal, endpoint, flat, rehearsal

__all__ = ["endpoint", "rehearsal"]  # fixtures

pytestmark = pytest.mark.slow

# paper_run.py whose adapters learn the answers to one data set, not to five
ONE_DATA_SET = (
    OWN_PINS
    + """
from bild_lab.papers.runs import recipes

recipes.BITA_ANSWERS = {"code_alpaca": ()}
run_application(paper_run.main, None)
"""
)


def test_an_item_of_bita_runs_on_two_processes(rehearsal: Rehearsal) -> None:
    overrides = flat(REHEARSALS["bita_fig7"]["overrides"])
    words = [*overrides, "part_size=1", "processes=2"]
    code, printed = rehearsal.run("bita/fig7", *words, script=ONE_DATA_SET)
    outputs = rehearsal.folder / "outputs"
    logs = [file.read_text() for file in sorted(outputs.glob(".steps/*.log"))]
    assert code == 0, "\n".join([printed, *logs])
    parts = (outputs / "calibration_vicuna_7b_code_alpaca").glob("*.parquet")
    assert {pq.read_schema(part).metadata[b"process"] for part in parts} == {b"0", b"1"}
    assert json.loads((outputs / "bita_vicuna_7b/metrics.json").read_text())["processes"] == 2
    assert rehearsal.figure("bita/fig7").startswith("# Figure 7")
    # the places of the sweeps, when they begin and when they are done
    said = " ".join(printed.split())
    begun = [match.start() for match in re.finditer(r"step \d+ of \d+: python run\.py", said)]
    done = [
        said.index(f"step {number} of {len(logs)} is done")
        for number in re.findall(r"step (\d+) of \d+: python run\.py", said)
    ]
    assert len(begun) == len(done) >= 2 and begun[1] < min(done)
    assert "accelerate launch --multi_gpu --num_processes=2 scripts/train_bita.py" in said
    code, printed = rehearsal.run("bita/fig7", *words, script=ONE_DATA_SET)
    assert code == 0 and "is done" not in printed, printed  # nothing is left to do
