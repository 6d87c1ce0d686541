"""One point as native Weights & Biases panels: tables, and charts over them.

Every run of a group logs its own rows under the same keys, so that a panel over the group shows all of a sweep.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bild_lab.lab.formatting import knob_label
from bild_lab.lab.results.table import to_row
from bild_lab.lab.schema.measured_examples import MeasuredExample
from bild_lab.lab.schema.result import Result

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


def panels(result: Result, examples: Sequence[MeasuredExample]) -> dict[str, Any]:
    """Return what `Run.log` takes for a result and its examples: tables, and each chart that has values."""
    import wandb  # takes seconds

    logged: dict[str, Any] = {POINTS: point_table(result)}
    if examples:
        logged[EXAMPLES] = wandb.Table(list(_EXAMPLE_COLUMNS), [_example(one) for one in examples])
    if (latency := result.relative_latency) is not None:
        point = wandb.Table(["relative latency", "quality", "point"], [[latency, result.quality.value, _name(result)]])
        title = "Quality against relative latency"
        logged[PARETO] = wandb.plot.scatter(point, "relative latency", "quality", title=title)
    if rates := result.counts.acceptance_by_position:
        curve = wandb.Table(["position", "accepted"], [[position, rate] for position, rate in enumerate(rates, 1)])
        logged[ACCEPTANCE] = wandb.plot.line(curve, "position", "accepted", title="Acceptance by position in the draft")
    return logged


def point_table(result: Result) -> wandb.Table:
    """The point's row of `sweep.csv`, with all knobs in one column: the tables of a group need the same columns."""
    import wandb

    row = to_row(replace(result, knobs={}))
    columns = [key for key in row if key != "policy"]
    return wandb.Table(["policy", "knobs", *columns], [[row["policy"], _knobs(result), *(row[key] for key in columns)]])


def _example(one: MeasuredExample) -> list[Any]:
    """The values of `_EXAMPLE_COLUMNS`."""
    same = None if one.baseline_token_ids is None else one.token_ids == one.baseline_token_ids
    latencies = (_median(one.latency_s), _median(one.baseline_latency_s))
    return [one.id, one.prediction, one.baseline_prediction, same, len(one.token_ids), *latencies]


def _median(repeats: Sequence[float] | None) -> float | None:
    return None if repeats is None else statistics.median(repeats)


def _name(result: Result) -> str:
    return " ".join(filter(None, (result.policy, _knobs(result))))


def _knobs(result: Result) -> str:
    return knob_label(result, list(result.knobs))
