"""An outputs folder with one of everything, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bild_lab.lab.results.progress import Progress
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from tests.report.sample import sample_example, sample_result, sample_sweep

TRAINED = {
    "start": "../models/small",
    "noun": "BiTA adapter",
    "data": "5,900 greedy answers of large to multi30k (train)",
    "steps": 400,
    "loss": 3.25,
    "metric": "accepted",
    "best": {"accepted": 0.5, "loss": 3.1, "step": 300},
    "history": [
        {"loss": 4.5, "step": 100},
        {"loss": 3.5, "step": 200},
        {"eval_loss": 3.4, "eval_accepted": 0.4, "step": 200},
        {"loss": 3.25, "step": 400},
    ],
    "environment": {"started": "2026-11-20T10:00:00+00:00"},
}
PLAN = {"model": {"path": "large"}, "dataset": {"name": "multi30k", "split": "train"}, "count": 6000}
CLAIMS = """Of the 40 printed numbers 36 were not measured.

| panel | row |
| --- | --- |
| toy | bild |

| claim of the paper | panel | rows | quantity | here |
| --- | --- | --- | --- | --- |
| alignment helps | toy | a ≥ b | speedup | holds |
| a \\| b is best | toy | a ≥ b | speedup | does not hold |
| rollback helps | toy | a ≥ b | speedup | not measured |
"""
RATES = {
    "settings": {"model.path": "large", "dataset.name": "toy", "dataset.split": "test"},
    "texts": 100,
    "tokens": 1655,
    "totals": [
        {"layer": layer, "top_k": k, "heads": "shared", "position": "all", "rate": 0.1 * layer * k}
        for layer in (2, 4)
        for k in (1, 2)
    ],
}


def write_sweep(folder: Path, results: list[Result] | None = None) -> Sweep:
    sweep = Sweep(folder)
    for result in sample_sweep() if results is None else results:
        sweep.write_point(result.point, "policy: {}\n", result, [sample_example()])
    return sweep


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def write_outputs(outputs: Path) -> None:
    """A folder of every kind and state."""
    write_sweep(outputs / "first")
    three = write_sweep(outputs / "stopped", [sample_result("bild", {"fallback": at}, 1.5) for at in (0.2, 0.4, 0.6)])
    Progress(9, 3).write(three.folder)
    write_sweep(outputs / "plane", [])
    write_json(outputs / "plane/screen.json", {"points": 380})
    write_json(outputs / "bita/metrics.json", TRAINED)
    write_json(outputs / "bita/adapter/metrics.json", TRAINED)
    write_json(outputs / "half/training/job.json", {"train.max_steps": 400})
    (outputs / "half/training/checkpoint-120").mkdir()
    (outputs / "both").mkdir()
    columns = "policy,latency_ratio,latency_ratio_low,latency_ratio_high"
    (outputs / "both/compare.csv").write_text(f"{columns}\nbild,0.8,0.7,0.9\nbild,,,\n")
    (outputs / "both/compare.html").write_text("<p>the comparison</p>")
    write_json(outputs / "both/compare.json", {"names": ["outputs/first", "outputs/stopped"], "summary": "2 compared."})
    (outputs / "figures").mkdir()
    for name in ("bild_fig4", "bild_fig5"):
        (outputs / f"figures/{name}.png").write_bytes(b"a picture")
    (outputs / "figures/bild_fig4.md").write_text("# Figure 4\n\nKim. Here: t5-large on iwslt.\n\n" + CLAIMS)
    write_json(outputs / "answers/plan.json", PLAN)
    for part in ("00000000-00000512", "00000512-00001024"):
        (outputs / f"answers/train-{part}.parquet").write_bytes(b"answers")
    write_json(outputs / "match/metrics.json", RATES)
    (outputs / "match/match_rates.csv").write_text("layer,rate\n")
    write_json(
        outputs / "bench/bench.json", {"environment": {"cpu": "a CPU"}, "rows": [{"shape": "t5"}, {"shape": "t5"}]}
    )
    (outputs / "notes").mkdir()
    (outputs / "notes/thoughts.txt").write_text("mine")
    (outputs / "nothing").mkdir()
    (outputs / ".hidden").mkdir()
    (outputs / "a file").write_text("not a folder")
