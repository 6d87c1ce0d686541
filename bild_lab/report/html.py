"""The report of a sweep: one self-contained HTML file that needs no network."""

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from bild_lab.files import write_atomically
from bild_lab.report.accounts import cost_table, prediction_table
from bild_lab.report.interactive import acceptance_figure, pareto_figure, stages_figure
from bild_lab.report.settings import FEW, Group, by_setting, differing_keys, setting_title
from bild_lab.report.style import Mark, marks
from bild_lab.report.tables import (
    best_rows,
    environments,
    fixed_knobs,
    point_columns,
    point_rows,
    time_shares,
)
from bild_lab.report.terminal import headline
from bild_lab.report.wording import duration, knob_label, knob_value

_TEMPLATES = Path(__file__).parent


def write_html(name: str, results: list[dict], failures: list[dict], path: Path) -> None:
    """Write the report of the sweep `name`. Everything that came from outside the package is escaped."""
    groups = by_setting(results)
    colours = marks(sorted({policy for group in groups for policy in group.policies}))
    figures: dict[str, dict] = {}
    page = _environment().get_template("report.html.j2")
    text = page.render(
        name=name,
        headline=headline(results),
        sections=[_section(group, colours, index, figures) for index, group in enumerate(groups)],
        differing=_differing(groups),
        count=len(results),
        failures=[{**failure, "label": knob_label(failure, list(failure["knobs"]))} for failure in failures],
        shares=time_shares(results),
        total=duration(sum(result["seconds"]["total"] for result in results)),
        environment=environments(results),
        figures=figures,
        plotly=Markup(get_plotlyjs()),  # the library itself, nothing from a result
    )
    write_atomically(path, text.encode())


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _section(group: Group, colours: dict[str, Mark], index: int, figures: dict[str, dict]) -> dict:
    """Collect what the page shows of one setting, and add its figures to `figures` by their id."""
    drawn = {
        "pareto": pareto_figure(group, colours) if any(group.place(result) for result in group.results) else None,
        "stages": stages_figure(group),
        "acceptance": acceptance_figure(group, colours),
    }
    ids = {kind: f"{kind}-{index}" for kind, figure in drawn.items() if figure is not None}
    figures.update({ids[kind]: json.loads(drawn[kind].to_json()) for kind in ids})
    columns = point_columns(group)
    return {
        "title": setting_title(group.setting),
        "setting": group.setting,
        "details": [(key, _plain(value)) for key, value in group.setting.items()],
        "signature": group.results[0]["quality"]["signature"],
        "metric": group.metric,
        "relative": group.relative,
        "best": best_rows(group),
        "columns": columns,
        "rows": point_rows(group, columns),
        "fixed": fixed_knobs(group),
        "prediction": prediction_table(group),
        "cost": cost_table(group),
        "count": len(group.results),
        "few": FEW,
        "ids": ids,
    }


def _differing(groups: list[Group]) -> list[tuple[str, list[str]]]:
    """Say how the settings differ: each differing key with its value in every setting."""
    return [(key, [_plain(group.setting.get(key)) for group in groups]) for key in differing_keys(groups)]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {knob_value(part)}" for key, part in value.items())
    return knob_value(value)
