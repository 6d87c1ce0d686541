"""One point as native Weights & Biases panels: tables, and charts over them.

Every run of a group logs its own rows under the same keys, so that a panel over the group shows all of a sweep.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bild_lab.lab.analysis.pareto import is_baseline
from bild_lab.lab.results.table import to_row
from bild_lab.report.formatting import knob_label

if TYPE_CHECKING:
    import wandb

POINTS, EXAMPLES = "points", "examples"
PARETO, ACCEPTANCE = "quality_against_latency", "acceptance_by_position"
_EXAMPLE_COLUMNS = (
    "id",
    "prediction",
    "baseline_prediction",
    "same_output",
    "tokens",
    "latency_s",
    "baseline_latency_s",
)


def panels(result: dict, rows: Sequence[dict]) -> dict[str, Any]:
    """A result and its stored examples as what `Run.log` takes: tables always, each chart where it has something."""
    import wandb  # takes seconds

    logged: dict[str, Any] = {POINTS: point_table(result)}
    if rows:
        logged[EXAMPLES] = wandb.Table(list(_EXAMPLE_COLUMNS), [_example(row) for row in rows])
    if (latency := relative_latency(result)) is not None:
        place = wandb.Table(
            ["relative latency", "quality", "point"], [[latency, result["quality"]["value"], _name(result)]]
        )
        title = "Quality against relative latency"
        logged[PARETO] = wandb.plot.scatter(place, "relative latency", "quality", title=title)
    if rates := result["acceptance_by_position"]:
        curve = wandb.Table(["position", "accepted"], [[place, rate] for place, rate in enumerate(rates, 1)])
        logged[ACCEPTANCE] = wandb.plot.line(curve, "position", "accepted", title="Acceptance by position in the draft")
    return logged


def point_table(result: dict) -> wandb.Table:
    """The point's row of `sweep.csv`; the knobs stand in one column, as tables of a group must have the same ones."""
    import wandb

    row = to_row({**result, "knobs": {}})
    columns = [key for key in row if key != "policy"]
    return wandb.Table(["policy", "knobs", *columns], [[row["policy"], _knobs(result), *(row[key] for key in columns)]])


def relative_latency(result: dict) -> float | None:
    """One over the speedup, 1 for the baseline; None where no baseline was timed."""
    if is_baseline(result):
        return 1.0
    speedup = result["speedup"]["value"]
    return None if speedup is None else 1 / speedup


def _example(row: dict) -> list[Any]:
    known = {
        **row,
        "same_output": row["token_ids"] == row["baseline_token_ids"] if "baseline_token_ids" in row else None,
        "tokens": len(row["token_ids"]),
        "latency_s": _median(row["latency_s"]),
        "baseline_latency_s": _median(row.get("baseline_latency_s")),
    }
    return [known.get(column) for column in _EXAMPLE_COLUMNS]


def _median(repeats: Sequence[float] | None) -> float | None:
    return None if repeats is None else statistics.median(repeats)


def _name(result: dict) -> str:
    return " ".join(filter(None, (result["policy"], _knobs(result))))


def _knobs(result: dict) -> str:
    return knob_label(result, list(result["knobs"]))
