"""What runs of Weights & Biases hold of results: configuration, numbers, tables, charts and
pictures.

Every run of a group logs its own rows under the same keys, so that a panel over the group shows all
of a sweep.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.lab.config.policies import changed_knobs
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.formatting import knob_label, point_label, short_name, shortened
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import pareto_front
from bild_lab.lab.store.groups import (
    Group,
    by_setting,
    pair_title,
)
from bild_lab.lab.store.table import to_row
from bild_lab.report.phrases import setting_words

if TYPE_CHECKING:
    import wandb

POINTS, EXAMPLES = "points", "examples"
ACCEPTANCE = "acceptance_by_position"
SWEEP_POINTS, PICTURE = "sweep_points", "pareto"
LONGEST_TITLE = 128  # the service's limit for the name of a run or a report
_EXAMPLE_COLUMNS = (
    "id",
    "prompt",
    "reference",
    "prediction",
    "baseline_prediction",
    "same_output",
    "tokens",
    "latency_s",
    "baseline_latency_s",
)
# what identifies a point; everything else in a result was measured
_NOT_METRICS = (
    "schema",
    "name",
    "point",
    "policy",
    "knobs",
    "composition",
    "setting",
    "facts",
    "environment",
    "stored_at",
)

Corners = list[tuple[float, float]]  # of a line: latency and quality


def run_title(result: Result) -> str:
    """The policy with the knobs that differ from its file: `bild (fallback 0.5, rollback 2)`."""
    label = point_label(result, changed_knobs(result.policy, result.knobs))
    return shortened(label, LONGEST_TITLE)


def run_config(result: Result, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a point's run has as its configuration: the point's own and how it was measured."""
    point_config = {key: value for key, value in config.items() if key != "logger"}
    # its name in conf/pair says nothing of models that were given by pair.target=PATH
    if pair := point_config.get("pair"):
        point_config["pair"] = {**pair, "name": pair_title(result.setting)}
    measured = {"composition": result.composition, "environment": dict(result.environment)}
    return {**point_config, "sweep": result.name, "point": result.point, **measured}


def flat_metrics(result: Result) -> dict[str, float | str | list]:
    """Return the numbers of a result under names like `speedup/value`, without those that do not
    exist.

    Counts of the rounds have no group, for example `acceptance_rate`. Further metrics are groups,
    such as `chrf/value`.
    """
    metrics: dict[str, float | str | list] = {}
    if result.relative_latency is not None:
        metrics["relative_latency"] = result.relative_latency
    content = {key: value for key, value in result.to_json().items() if key not in _NOT_METRICS}
    counts, further = content.pop("counts"), content.pop("further_qualities")
    for key, value in {**content, **counts, **further}.items():
        if isinstance(value, dict):
            metrics |= {f"{key}/{name}": number for name, number in value.items()}
        else:
            metrics[key] = value
    return {name: number for name, number in metrics.items() if number is not None and number != {}}


def point_panels(
    result: Result, examples: Sequence[MeasuredExample], dataset: Mapping[tuple[str, int], Example]
) -> dict[str, Any]:
    """Return what `Run.log` takes for a result and its examples: tables, and each chart that has
    values.

    dataset: the examples by id and turn, for prompts and references; what it lacks stays empty.
    """
    import wandb  # takes seconds

    logged: dict[str, Any] = {POINTS: logged_points([result])}
    if examples:
        rows = [_example_row(example, dataset.get(example.key)) for example in examples]
        logged[EXAMPLES] = wandb.Table(list(_EXAMPLE_COLUMNS), rows)
    rates = result.counts.acceptance_by_position
    if rates:
        rows = [[position, rate] for position, rate in enumerate(rates, 1)]
        curve = wandb.Table(["position", "accepted"], rows)
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
        xs = [[x for x, _ in line] for line in lines.values()]
        ys = [[y for _, y in line] for line in lines.values()]
        chart = wandb.plot.line_series(xs, ys, keys=list(lines), title=panel, xname="latency")
        logged[front_key(panel)] = chart
    points, fronts = [], []
    for group in by_setting(results):
        points += group.results
        fronts += [on_front(result, group) for result in group.results]
    logged[SWEEP_POINTS] = logged_points(points, on_pareto_front=fronts)
    if picture.is_file():
        logged[PICTURE] = wandb.Image(str(picture))
    return logged


def front_lines(results: Sequence[Result], sweep: str) -> dict[str, dict[str, Corners]]:
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
    lines_by_panel: dict[str, dict[str, Corners]] = {}
    for panel, groups in by_panel.items():
        lines = lines_by_panel[panel] = {}
        for group, label in zip(groups, _setting_labels(groups), strict=True):
            (_, right_edge), _ = group.limits()
            for policy, corners in _policy_fronts(group).items():
                name = ", ".join(filter(None, [policy, sweep, label]))
                lines[name] = _stairs(corners, right_edge)
    return lines_by_panel


def _stairs(corners: Corners, right_edge: float) -> Corners:
    """The corners with a level step from each to the next one, and to the edge."""
    line = []
    for (x, y), (next_x, _) in pairwise([*corners, (right_edge, 0.0)]):
        line += [(x, y), (next_x, y)]
    return line


def panel_of(group: Group) -> str:
    """The panel of a setting's points, that is, data set, split and metric: `multi30k test, BLEU`."""
    unit = "" if group.relative else ", in seconds"
    return f"{short_name(group.setting.dataset)} {group.setting.split}, {group.metric}{unit}"


def front_key(panel: str) -> str:
    """What a panel's chart is logged as."""
    return "front_" + re.sub(r"\W+", "_", panel)


def front_status(result: Result, group: Group) -> dict[str, Any]:
    """A point's `policy`, `panel`, and whether it is `on_front` among the points of its setting."""
    return {"policy": result.policy, "panel": panel_of(group), "on_front": on_front(result, group)}


def on_front(result: Result, group: Group) -> bool:
    """Whether no other point of the setting, nor the baseline, is as fast and as good, and better
    in one of the two.
    """
    from bild_lab.report.style import front_corners  # late: matplotlib takes a second

    if result.is_baseline:
        return (1.0, group.baseline_quality) in front_corners(group)
    return group.is_on_front(result)


def _policy_fronts(group: Group) -> dict[str, Corners]:
    """The undominated (latency, quality) of each policy, fastest first. An impossible speedup does
    not compete.
    """
    fronts = {}
    for policy in group.policies:
        possible = [result for result in group.of_policy(policy) if result.may_be_best]
        positions = [group.position(result) for result in possible]
        corners = [(position.x, position.y) for position in positions if position is not None]
        if corners:
            fronts[policy] = [corners[index] for index in pareto_front(corners)]
    if group.relative and group.baseline_quality is not None:
        fronts[f"{group.setting.baseline} (baseline)"] = [(1.0, group.baseline_quality)]
    return fronts


def _setting_labels(groups: Sequence[Group]) -> list[str]:
    """What tells settings from each other; empty for a single one."""
    labels = setting_words(groups, elsewhere=())
    if len(set(labels)) < len(labels):
        return [f"setting {number}" for number, _ in enumerate(groups, 1)]
    return labels


def logged_points(results: Sequence[Result], **leading: Sequence[Any]) -> wandb.Table:
    """The points' rows of `sweep.csv`, with all knobs in one column: the tables of a group need the
    same columns.

    leading: columns before them, a value for each result.
    """
    import wandb

    rows = [to_row(replace(result, knobs={})) for result in results]
    columns = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name != "policy"]
    data = []
    for index, (result, row) in enumerate(zip(results, rows, strict=True)):
        leading_values = [values[index] for values in leading.values()]
        knobs = knob_label(result, list(result.knobs))
        numbers = [row.get(name) for name in columns]
        data.append([*leading_values, row["policy"], knobs, *numbers])
    return wandb.Table([*leading, "policy", "knobs", *columns], data)


def _example_row(example: MeasuredExample, known: Example | None) -> list[Any]:
    """The values of `_EXAMPLE_COLUMNS`; several references have a line each."""
    prompt, reference, same_output = example.prompt, None, None
    if known is not None:
        prompt = prompt or str(known.prompt)  # wandb takes no other kind of text
        reference = "\n".join(known.references) or None
    if example.baseline_token_ids is not None:
        same_output = example.token_ids == example.baseline_token_ids
    return [
        example.id,
        prompt,
        reference,
        example.prediction,
        example.baseline_prediction,
        same_output,
        len(example.token_ids),
        _median(example.latency_s),
        _median(example.baseline_latency_s),
    ]


def _median(repeats: Sequence[float] | None) -> float | None:
    return statistics.median(repeats) if repeats else None
