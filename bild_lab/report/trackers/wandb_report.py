"""A Weights & Biases report that compares groups of runs, that is, sweeps, through
wandb-workspaces.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError, one_line
from bild_lab.files import json_text
from bild_lab.lab.schema.result import COLUMNS
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.wandb import SWEEP, recorded_runs, sync_command
from bild_lab.report.trackers.wandb_panels import (
    ACCEPTANCE,
    EXAMPLES,
    LONGEST_TITLE,
    PICTURE,
    POINTS,
    SWEEP_POINTS,
    front_key,
    front_lines,
)

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.reports.v2 import Report

_TIMEOUT_S = 20
# one panel for each
_BARS = ("speedup", "acceptance_rate", "tokens_per_target_call", "quality_difference")
_BY = ("config.policy.name", "config.pair.name")
_HIGH = 12  # of a chart, in the report's rows
_FRONTS = (
    "A line is a policy's best quality within a latency, in one sweep; further left is faster."
    " Latency is relative to the baseline, or in seconds where the panel says so. Intervals are in"
    " the pictures and the table: lines have none."
)


def group_report(
    groups: Sequence[str],
    panels: Sequence[str],
    project: str,
    entity: str | None,
    title: str | None,
) -> Report:
    """Lay out a report: the Pareto panels of all groups, each panel's numbers, then curves and
    tables of each group.

    panels: as `logged_panels` finds them. Sends nothing. Raises UserError without wandb-workspaces,
    without groups, or for a group given twice.
    """
    _require_groups(groups)
    expr, wr = _report_parts()
    runs = partial(_runsets, expr, wr)
    fronts = wr.PanelGrid(
        runsets=runs(groups, expr.Metric("JobType") == SWEEP), panels=_fronts(wr, panels)
    )
    numbers = [
        block
        for panel in panels
        for block in (
            wr.H2(panel),
            wr.PanelGrid(
                runsets=runs(groups, expr.Summary("panel") == panel, groupby=_BY), panels=_bars(wr)
            ),
        )
    ]
    details = [block for group in groups for block in (wr.H2(group), _details(wr, runs([group])))]
    return wr.Report(
        project=project,
        entity=entity or "",
        title=_title(title, groups),
        description=(
            "Sweeps of bild_lab: every point is timed against its baseline, example by example in"
            " turn."
        ),
        blocks=[
            *(wr.H1("Quality against latency"), wr.P(text=_FRONTS), fronts),
            *(wr.H1("By policy and pair"), *numbers, wr.H1("By sweep"), *details),
        ],
        width="fluid",
    )


def _require_groups(groups: Sequence[str]) -> None:
    if not groups or len(set(groups)) < len(groups):
        raise UserError(
            f"names of different groups are wanted, got {', '.join(groups) or 'none'}; a group is a"
            " sweep's name=NAME, as in python scripts/wandb_report.py first second"
        )


def _report_parts() -> tuple[Any, Any]:
    """The modules of wandb-workspaces with filters and with a report's blocks. Raises UserError
    without it.
    """
    try:
        from wandb_workspaces import expr
        from wandb_workspaces.reports import v2 as wr
    except ImportError as error:
        raise UserError(
            "reports need wandb-workspaces, which is not installed; pip install 'bild_lab[reports]'"
        ) from error
    return expr, wr


def _runsets(
    expr: Any, wr: Any, groups: Sequence[str], *filters: Any, groupby: Sequence[str] = ()
) -> list[Any]:
    """The runs of each group that pass the filters. They are of the report's own project, which
    need not be looked up.
    """
    return [
        wr.Runset(
            name=group, filters=[expr.Metric("Group") == group, *filters], groupby=list(groupby)
        )
        for group in groups
    ]


def _title(title: str | None, groups: Sequence[str]) -> str:
    """The title that was given, or one that names the groups. Raises UserError for a long one."""
    compared = ", ".join(groups)
    title = title or f"bild_lab: {compared if len(compared) < 100 else f'{len(groups)} sweeps'}"
    if len(title) > LONGEST_TITLE:
        raise UserError(
            f"title must have at most {LONGEST_TITLE} characters, got {len(title)}; choose a"
            " shorter one"
        )
    return title


def report_spec(report: Report) -> str:
    """What `publish` would send, as JSON."""
    model = report._to_model()
    names = {
        "display_name": model.display_name,
        "project": model.project.name,
        "entity": model.project.entity_name,
    }
    spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return json_text({**names, "description": model.description, "spec": spec})


def connect() -> tuple[wandb.Api | None, str]:
    """The service's interface, if somebody is logged in and it answers; else None and the reason in
    one line.
    """
    import wandb

    try:
        api = wandb.Api(timeout=_TIMEOUT_S)
        _ = api.default_entity
    except (
        Exception
    ) as error:  # without a login or a network the client raises errors of many types
        return None, one_line(error).rstrip(".")
    return api, ""


def logged_panels(
    groups: Sequence[str], project: str, entity: str | None, outputs: Path, api: wandb.Api | None
) -> list[str]:
    """The Pareto panels of sweeps that were logged, each once. Raises UserError for a sweep that
    was not: it is empty.

    api: is asked for the sweeps' runs. With None the records and results under `outputs` decide.
    """
    panels: dict[str, None] = {}
    for group in groups:
        folder = outputs / group
        if api is None:
            shown = (
                list(front_lines(Sweep(folder).results(), group)) if recorded_runs(folder) else None
            )
        else:
            shown = _sent_panels(api, group, project, entity)
        if shown is None:
            raise UserError(
                f"sweep {group!r} has no runs in project {project!r}; log it: python"
                f" scripts/sweeps.py log {shlex.quote(str(folder))}, or if it was logged offline,"
                f" send it: {sync_command(folder)}"
            )
        panels |= dict.fromkeys(shown)
    return list(panels)


def _sent_panels(api: wandb.Api, group: str, project: str, entity: str | None) -> list[str] | None:
    """What the runs of whole sweeps in a group say on the server of their panels; None without such
    a run, or such a project.
    """
    place = f"{entity or api.default_entity}/{project}"
    try:
        runs = list(api.runs(place, filters={"group": group, "jobType": SWEEP}))
    except ValueError:  # the client's word for an unknown project
        return None
    except Exception as error:  # the client raises errors of many types
        raise UserError(
            f"the runs of {place} cannot be read: {one_line(error).rstrip('.')}"
        ) from error
    shown = [panels for run in runs if (panels := run.summary.get("panels")) is not None]
    return [panel for panels in shown for panel in panels] if shown else None


def publish(report: Report, api: wandb.Api) -> tuple[str | None, str]:
    """Save the report to its project and return its address; None and the reason in one line if
    that fails.
    """
    report.entity = report.entity or api.default_entity
    try:
        return report.save().url, ""
    except Exception as error:  # as for `connect`
        return None, one_line(error).rstrip(".")


def _fronts(wr: Any, panels: Sequence[str]) -> list[Any]:
    """A chart for each panel on the left, the picture of each sweep on the right, all points
    below.
    """
    charts = [
        wr.CustomChart(
            query={"summaryTable": {"tableKey": f"{front_key(panel)}_table"}},
            chart_name="wandb/lineseries/v0",  # that of wandb.plot.line_series, with its fields
            chart_fields={"step": "step", "lineKey": "lineKey", "lineVal": "lineVal"},
            chart_strings={"title": panel, "xname": "latency"},
            layout=wr.Layout(x=0, y=_HIGH * place, w=12, h=_HIGH),
        )
        for place, panel in enumerate(panels)
    ]
    below = _HIGH * max(1, len(panels))
    picture = wr.MediaBrowser(
        title="With intervals",
        media_keys=[PICTURE],
        num_columns=1,
        layout=wr.Layout(x=12, y=0, w=12, h=below),
    )
    points = wr.WeavePanelSummaryTable(
        table_name=SWEEP_POINTS, layout=wr.Layout(x=0, y=below, w=24, h=10)
    )
    return [*charts, picture, points]


def _bars(wr: Any) -> list[Any]:
    """A panel for each number: the mean of the points of a policy with a pair, and their range."""
    return [
        wr.BarPlot(
            title=f"{COLUMNS[name].words.capitalize()}, mean and range of the points",
            # as `flat_metrics` names it
            metrics=[
                wr.SummaryMetric(COLUMNS[name].path.removeprefix("counts.").replace(".", "/"))
            ],
            groupby_aggfunc="mean",
            groupby_rangefunc="minmax",
            layout=wr.Layout(x=12 * (place % 2), y=8 * (place // 2), w=12, h=8),
        )
        for place, name in enumerate(_BARS)
    ]


def _details(wr: Any, runsets: list[Any]) -> Any:
    """One group's acceptance curves and tables, which all its runs log under the same keys."""
    curves = wr.CustomChart(
        query={"summaryTable": {"tableKey": f"{ACCEPTANCE}_table"}},
        chart_name="wandb/line/v0",
        chart_fields={"x": "position", "y": "accepted"},
        chart_strings={"title": "Acceptance by position in the draft"},
        layout=wr.Layout(w=24, h=10),
    )
    tables = [
        wr.WeavePanelSummaryTable(table_name=name, layout=wr.Layout(w=24, h=10))
        for name in (POINTS, EXAMPLES)
    ]
    return wr.PanelGrid(runsets=runsets, panels=[curves, *tables])
