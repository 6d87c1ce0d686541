"""A Weights & Biases report that compares groups of runs, that is, sweeps, through wandb-workspaces."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import COLUMNS
from bild_lab.report.wandb.logger import noted, sync_command
from bild_lab.report.wandb.panels import ACCEPTANCE, EXAMPLES, LONGEST_TITLE, POINTS

if TYPE_CHECKING:
    import wandb
    from wandb_workspaces.reports.v2 import Report

_TIMEOUT_S = 20
_BARS = ("speedup", "acceptance_rate", "tokens_per_target_call", "quality_difference")  # one panel for each


def group_report(groups: Sequence[str], project: str, entity: str | None, title: str | None) -> Report:
    """Lay out a report: quality against latency for all groups, then numbers, acceptance curves and tables.

    Sends nothing. Raises UserError without wandb-workspaces, without groups, or for a group given twice.
    """
    if not groups or len(set(groups)) < len(groups):
        raise UserError(
            f"names of different groups are wanted, got {', '.join(groups) or 'none'}; a group is a sweep's name=NAME, "
            "as in python scripts/wandb_report.py first second"
        )
    wr, expr = _libraries()

    def runs(named: Sequence[str]) -> list[Any]:
        # no entity: the report's own project, which need not be looked up
        return [wr.Runset(name=group, filters=[expr.Metric("Group") == group]) for group in named]

    scatter = wr.ScatterPlot(
        title="Quality against relative latency (further left is faster)",
        x=wr.SummaryMetric("relative_latency"),
        y=wr.SummaryMetric(COLUMNS["quality"].summary_key),
        layout=wr.Layout(w=24, h=12),
    )
    bars = [
        wr.BarPlot(
            title=COLUMNS[name].words.capitalize(),
            metrics=[wr.SummaryMetric(COLUMNS[name].summary_key)],
            layout=wr.Layout(w=12, h=8),
        )
        for name in _BARS
    ]
    overview = wr.PanelGrid(runsets=runs(groups), panels=[scatter, *bars])
    details = [block for group in groups for block in (wr.H2(group), _details(wr, runs([group])))]
    compared = ", ".join(groups)
    title = title or f"bild_lab: {compared if len(compared) < 100 else f'{len(groups)} sweeps'}"
    if len(title) > LONGEST_TITLE:
        raise UserError(f"title must have at most {LONGEST_TITLE} characters, got {len(title)}; choose a shorter one")
    return wr.Report(
        project=project,
        entity=entity or "",
        title=title,
        description="Sweeps of bild_lab: every point is timed against its baseline, example by example in turn.",
        blocks=[wr.H1("Together"), overview, *details],
        width="fluid",
    )


def report_spec(report: Report) -> str:
    """What `publish` would send, as JSON."""
    model = report._to_model()
    names = {"display_name": model.display_name, "project": model.project.name, "entity": model.project.entity_name}
    spec = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return json.dumps({**names, "description": model.description, "spec": spec}, indent=2) + "\n"


def connect() -> tuple[wandb.Api | None, str]:
    """The service's interface, if somebody is logged in and it answers; else None and the reason in one line."""
    import wandb

    try:
        api = wandb.Api(timeout=_TIMEOUT_S)
        _ = api.default_entity
    except Exception as error:  # without a login or a network the client raises errors of many types
        return None, _line(error)
    return api, ""


def require_logged(
    groups: Sequence[str], project: str, entity: str | None, outputs: Path, api: wandb.Api | None
) -> None:
    """Raise UserError for a sweep without runs in the project: a report on it would be empty.

    api: is asked for the runs of each group. With None the records under `outputs` decide.
    """
    for group in groups:
        folder = outputs / group
        if not (noted(folder) if api is None else _count(api, group, project, entity)):
            raise UserError(
                f"sweep {group!r} has no runs in project {project!r}; log it: python scripts/sweeps.py log "
                f"{shlex.quote(str(folder))}, or if it was logged offline, send it: {sync_command(folder)}"
            )


def _count(api: wandb.Api, group: str, project: str, entity: str | None) -> int:
    """How many runs a group has on the server; none in a project that does not exist."""
    place = f"{entity or api.default_entity}/{project}"
    try:
        return len(api.runs(place, filters={"group": group}, per_page=1))
    except ValueError:  # the client's word for an unknown project
        return 0
    except Exception as error:  # the client raises errors of many types
        raise UserError(f"the runs of {place} cannot be read: {_line(error)}") from error


def publish(report: Report, api: wandb.Api) -> tuple[str | None, str]:
    """Save the report to its project and return its address; None and the reason in one line if that fails."""
    report.entity = report.entity or api.default_entity
    try:
        return report.save().url, ""
    except Exception as error:  # as for `connect`
        return None, _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _libraries() -> tuple[Any, Any]:
    try:
        from wandb_workspaces import expr
        from wandb_workspaces.reports import v2
    except ImportError as error:
        raise UserError(
            "reports need wandb-workspaces, which is not installed; pip install 'bild_lab[reports]'"
        ) from error
    return v2, expr


def _details(wr: Any, runsets: list[Any]) -> Any:
    """One group's acceptance curves and tables, which all its runs log under the same keys."""
    curves = wr.CustomChart(
        query={"summaryTable": {"tableKey": f"{ACCEPTANCE}_table"}},
        chart_name="wandb/line/v0",
        chart_fields={"x": "position", "y": "accepted"},
        chart_strings={"title": "Acceptance by position in the draft"},
        layout=wr.Layout(w=24, h=10),
    )
    tables = [wr.WeavePanelSummaryTable(table_name=name, layout=wr.Layout(w=24, h=10)) for name in (POINTS, EXAMPLES)]
    return wr.PanelGrid(runsets=runsets, panels=[curves, *tables])
