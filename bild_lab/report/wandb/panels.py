"""Results as native Weights & Biases panels: tables, charts and pictures.

Every run of a group logs its own rows under the same keys, so that a panel over the group shows all of a sweep.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.lab.data.examples import Example
from bild_lab.lab.formatting import knob_label, point_label, short_name
from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.results.records import to_row
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result

if TYPE_CHECKING:
    import wandb

POINTS, EXAMPLES = "points", "examples"
PARETO, ACCEPTANCE = "quality_against_latency", "acceptance_by_position"
SWEEP_POINTS, PICTURE = "sweep_points", "pareto"
LONGEST_TITLE = 128  # the service's limit for the name of a run or a report
_RESULTS = ("checkpoint", "adapter", "heads")  # what trainings call their results
_EXAMPLE_COLUMNS = (
    *("id", "prompt", "reference", "prediction", "baseline_prediction", "same_output"),
    *("tokens", "latency_s", "baseline_latency_s"),
)


def title(result: Result) -> str:
    """The policy with all its knobs, `bild (fallback 0.5, rollback 2)`; of paths the `path_name`."""
    knobs = {knob: path_name(value) if isinstance(value, str) else value for knob, value in result.knobs.items()}
    label = point_label(replace(result, knobs=knobs), list(knobs))
    return label if len(label) <= LONGEST_TITLE else f"{label[: LONGEST_TITLE - 1]}…"


def path_name(path: str) -> str:
    """The last part of a path; of a training's result the training's name, as in outputs/NAME/checkpoint."""
    *folders, last = path.rstrip("/").split("/")
    return short_name(folders[-1] if folders and last in _RESULTS else last)


def panels(
    result: Result, examples: Sequence[MeasuredExample], dataset: Mapping[tuple[str, int], Example]
) -> dict[str, Any]:
    """Return what `Run.log` takes for a result and its examples: tables, and each chart that has values.

    dataset: the examples by id and turn, for prompts and references; what it lacks stays empty.
    """
    import wandb  # takes seconds

    logged: dict[str, Any] = {POINTS: points_table([result])}
    if examples:
        rows = [_example(one, dataset.get(one.key)) for one in examples]
        logged[EXAMPLES] = wandb.Table(list(_EXAMPLE_COLUMNS), rows)
    if (latency := result.relative_latency) is not None:
        point = wandb.Table(["relative latency", "quality", "point"], [[latency, result.quality.value, title(result)]])
        chart = "Quality against relative latency"
        logged[PARETO] = wandb.plot.scatter(point, "relative latency", "quality", title=chart)
    if rates := result.counts.acceptance_by_position:
        curve = wandb.Table(["position", "accepted"], [[position, rate] for position, rate in enumerate(rates, 1)])
        logged[ACCEPTANCE] = wandb.plot.line(curve, "position", "accepted", title="Acceptance by position in the draft")
    return logged


def sweep_panels(results: Sequence[Result], picture: Path) -> dict[str, Any]:
    """Return what `Run.log` takes for a sweep: a table of all points, and the picture of the curve if it exists."""
    import wandb

    groups = by_setting(results)
    ordered = [result for group in groups for result in group.results]
    front = {id(result) for group in groups for result in group.front()}
    table = points_table(ordered, on_pareto_front=[id(result) in front for result in ordered])
    return {SWEEP_POINTS: table, **({PICTURE: wandb.Image(str(picture))} if picture.is_file() else {})}


def points_table(results: Sequence[Result], **first: Sequence[Any]) -> wandb.Table:
    """The points' rows of `sweep.csv`, with all knobs in one column: the tables of a group need the same columns.

    first: columns before them, a value for each result.
    """
    import wandb

    rows = [to_row(replace(result, knobs={})) for result in results]
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "policy"]
    data = [
        [*own, row["policy"], knob_label(result, list(result.knobs)), *(row.get(key) for key in columns)]
        for result, row, *own in zip(results, rows, *first.values(), strict=True)
    ]
    return wandb.Table([*first, "policy", "knobs", *columns], data)


def _example(one: MeasuredExample, known: Example | None) -> list[Any]:
    """The values of `_EXAMPLE_COLUMNS`; several references on a line each."""
    prompt, reference = one.prompt, None
    if known is not None:
        prompt = prompt or known.prompt
        reference = "\n".join(known.references) or None
    same = None if one.baseline_token_ids is None else one.token_ids == one.baseline_token_ids
    latencies = (_median(one.latency_s), _median(one.baseline_latency_s))
    texts = (prompt, reference, one.prediction, one.baseline_prediction)
    return [one.id, *texts, same, len(one.token_ids), *latencies]


def _median(repeats: Sequence[float] | None) -> float | None:
    return None if repeats is None else statistics.median(repeats)
