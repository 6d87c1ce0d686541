"""Results as native Weights & Biases panels: tables, charts and pictures.

Every run of a group logs its own rows under the same keys, so that a panel over the group shows all
of a sweep.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.lab.config.policies import changed_knobs
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.formatting import knob_label, point_label, short_name
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import pareto_front
from bild_lab.lab.store.groups import Group, by_setting, differing_keys
from bild_lab.lab.store.records import to_row

if TYPE_CHECKING:
    import wandb

POINTS, EXAMPLES = "points", "examples"
ACCEPTANCE = "acceptance_by_position"
SWEEP_POINTS, PICTURE = "sweep_points", "pareto"
_HASHES = ("code", "data", "weights")  # of a setting: they mean nothing to a reader
LONGEST_TITLE = 128  # the service's limit for the name of a run or a report
_RESULTS = ("checkpoint", "adapter", "heads")  # what trainings call their results
_EXAMPLE_COLUMNS = (
    *("id", "prompt", "reference", "prediction", "baseline_prediction", "same_output"),
    *("tokens", "latency_s", "baseline_latency_s"),
)


def title(result: Result) -> str:
    """The policy with the knobs that differ from its file: `bild (fallback 0.5, rollback 2)`.

    Of a path the `path_name`.
    """
    told = {knob: result.knobs[knob] for knob in changed_knobs(result.policy, result.knobs)}
    knobs = {
        knob: path_name(value) if isinstance(value, str) else value for knob, value in told.items()
    }
    label = point_label(replace(result, knobs=knobs), list(knobs))
    return label if len(label) <= LONGEST_TITLE else f"{label[: LONGEST_TITLE - 1]}…"


def path_name(path: str) -> str:
    """The last part of a path; of a training's result the training's name, as in
    outputs/NAME/checkpoint.
    """
    *folders, last = path.rstrip("/").split("/")
    return short_name(folders[-1] if folders and last in _RESULTS else last)


def panels(
    result: Result, examples: Sequence[MeasuredExample], dataset: Mapping[tuple[str, int], Example]
) -> dict[str, Any]:
    """Return what `Run.log` takes for a result and its examples: tables, and each chart that has
    values.

    dataset: the examples by id and turn, for prompts and references; what it lacks stays empty.
    """
    import wandb  # takes seconds

    logged: dict[str, Any] = {POINTS: points_table([result])}
    if examples:
        rows = [_example(one, dataset.get(one.key)) for one in examples]
        logged[EXAMPLES] = wandb.Table(list(_EXAMPLE_COLUMNS), rows)
    if rates := result.counts.acceptance_by_position:
        curve = wandb.Table(
            ["position", "accepted"], [[position, rate] for position, rate in enumerate(rates, 1)]
        )
        logged[ACCEPTANCE] = wandb.plot.line(
            curve, "position", "accepted", title="Acceptance by position in the draft"
        )
    return logged


def sweep_panels(results: Sequence[Result], picture: Path, sweep: str) -> dict[str, Any]:
    """Return what `Run.log` takes for a sweep: the fronts, a table of all points, the picture if it
    exists.
    """
    import wandb

    logged: dict[str, Any] = {}
    for panel, lines in front_lines(results, sweep).items():
        xs, ys = ([[corner[axis] for corner in line] for line in lines.values()] for axis in (0, 1))
        chart = wandb.plot.line_series(xs, ys, keys=list(lines), title=panel, xname="latency")
        logged[front_key(panel)] = chart
    groups = by_setting(results)
    ordered = [(result, on_front(result, group)) for group in groups for result in group.results]
    points, front = zip(*ordered, strict=True)
    logged[SWEEP_POINTS] = points_table(points, on_pareto_front=front)
    return {**logged, **({PICTURE: wandb.Image(str(picture))} if picture.is_file() else {})}


def front_lines(
    results: Sequence[Result], sweep: str
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The corners (latency, quality) of the lines of each panel, by panel and line, each line
    fastest first.

    A line is one policy's Pareto front in one setting, the baseline's own included: the best
    quality within a latency, as stairs that end at the panel's right edge. latency: relative to the
    baseline; in seconds where the panel says so.
    """
    by_panel: dict[str, list[Group]] = {}
    for group in by_setting(results):
        if any(group.position(result) for result in group.results):
            by_panel.setdefault(panel_of(group), []).append(group)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for panel, groups in by_panel.items():
        found[panel] = {}
        for group, label in zip(groups, _labels(groups), strict=True):
            end = group.limits()[0][1]
            for policy, corners in _fronts(group).items():
                steps = pairwise([*corners, (end, 0.0)])
                line = [place for (x, y), (right, _) in steps for place in ((x, y), (right, y))]
                found[panel][", ".join(filter(None, [policy, sweep, label]))] = line
    return found


def panel_of(group: Group) -> str:
    """The panel of a setting's points, that is, data set, split and metric:

    `multi30k test, BLEU`.
    """
    unit = "" if group.relative else ", in seconds"
    return f"{short_name(group.setting.dataset)} {group.setting.split}, {group.metric}{unit}"


def front_key(panel: str) -> str:
    """What a panel's chart is logged as."""
    return "front_" + re.sub(r"\W+", "_", panel)


def standing(result: Result, group: Group) -> dict[str, Any]:
    """A point's `policy`, `panel`, and whether it is `on_front` among the points of its setting."""
    return {"policy": result.policy, "panel": panel_of(group), "on_front": on_front(result, group)}


def on_front(result: Result, group: Group) -> bool:
    """Whether no other point of the setting, nor the baseline, is as fast and as good, and better
    in one of the two.
    """
    from bild_lab.report.style import front_corners  # late: matplotlib takes a second

    if result.is_baseline:
        return (1.0, group.baseline_quality) in front_corners(group)
    return any(one is result for one in group.front())


def _fronts(group: Group) -> dict[str, list[tuple[float, float]]]:
    """The undominated (latency, quality) of each policy, fastest first."""
    fronts = {}
    for policy in group.policies:
        placed = [
            at for result in group.of_policy(policy) if (at := group.position(result)) is not None
        ]
        corners = [(at.x, at.y) for at in placed]
        fronts[policy] = [corners[index] for index in pareto_front(corners)]
    if group.relative and group.baseline_quality is not None:
        fronts[f"{group.setting.baseline} (baseline)"] = [(1.0, group.baseline_quality)]
    return {policy: corners for policy, corners in fronts.items() if corners}


def _labels(groups: Sequence[Group]) -> list[str]:
    """What tells settings from each other; empty for a single one."""
    keys = [key for key in differing_keys(groups) if key not in _HASHES]
    labels = [
        ", ".join(
            f"{key} {short_name(value)}"
            for key in keys
            if (value := group.setting.get(key)) is not None
        )
        for group in groups
    ]
    return (
        labels
        if len(set(labels)) == len(labels)
        else [f"setting {place}" for place, _ in enumerate(groups, 1)]
    )


def points_table(results: Sequence[Result], **first: Sequence[Any]) -> wandb.Table:
    """The points' rows of `sweep.csv`, with all knobs in one column: the tables of a group need the
    same columns.

    first: columns before them, a value for each result.
    """
    import wandb

    rows = [to_row(replace(result, knobs={})) for result in results]
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "policy"]
    data = [
        [
            *own,
            row["policy"],
            knob_label(result, list(result.knobs)),
            *(row.get(key) for key in columns),
        ]
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
    return statistics.median(repeats) if repeats else None
