"""The report of a sweep: one self-contained HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from bild_lab.files import write_atomically
from bild_lab.lab.formatting import duration, knob_label, knob_value
from bild_lab.lab.glossary import TERMS
from bild_lab.lab.results.batches import batch_curves
from bild_lab.lab.results.commands import read_commands
from bild_lab.lab.results.groups import FEW, Group, by_setting, differing_keys, setting_title
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import SETTING, Failure, Result
from bild_lab.report.bars import with_bars
from bild_lab.report.categories import category_table
from bild_lab.report.headline import sentences
from bild_lab.report.overlay import overlays
from bild_lab.report.page.batches import batch_figure, batch_rows
from bild_lab.report.page.certificates import divergence_figure, rounding_table
from bild_lab.report.page.change import change_table
from bild_lab.report.page.costs import cost_table, prediction_table
from bild_lab.report.page.heat import heat_maps
from bild_lab.report.page.interactive import acceptance_figure, stages_figure
from bild_lab.report.page.pareto_plot import overlay_figure, pareto_figure
from bild_lab.report.page.plane import planes, screened_policies
from bild_lab.report.page.plots import Figure, plotly_js
from bild_lab.report.page.shapes import budget_figure, tree_drawings
from bild_lab.report.page.tables import (
    MARGIN,
    baseline_row,
    best_columns,
    best_rows,
    environments,
    fixed_knobs,
    front_points,
    hypervolumes,
    name_of,
    point_columns,
    point_rows,
    time_shares,
)
from bild_lab.report.page.templates import page_environment
from bild_lab.report.page.texts import text_browser
from bild_lab.report.page.trace_viewer import viewer_data
from bild_lab.report.provenance import notes, sources
from bild_lab.report.reasons import reason_lines
from bild_lab.report.style import Mark, marks


def write_html(
    name: str,
    results: Sequence[Result],
    failures: Sequence[Failure],
    path: Path,
    older: int = 0,
    progress: str | None = None,
) -> None:
    """Write the report of the sweep `name`, and `hypervolume.csv` beside it.

    Everything that came from outside the package is escaped. older: how many earlier results of the same points are
    not shown. progress: how far the running command is; the page then reloads itself until it is touched.
    """
    groups = by_setting(results)
    folder = path.parent
    measured = {policy for group in groups for policy in group.policies}
    colours = marks(sorted(measured | set(screened_policies(folder))))
    figures: dict[str, Figure] = {}
    heat = [heat_maps(group) for group in groups]
    texts, traces, differing = _examples(groups)
    pictures, apart = overlays(groups)
    figures.update({f"overlay-{index}": overlay_figure(one) for index, one in enumerate(pictures)})
    curves = batch_curves(results)
    if (drawn := batch_figure(curves, colours)) is not None:
        figures["batches"] = drawn
    page = page_environment().get_template("report.html.j2")
    text = page.render(
        name=name,
        headline=sentences(results),
        progress=progress,
        written=datetime.now().astimezone().strftime("%H:%M:%S"),
        commands=read_commands(folder),
        sections=[_section(group, colours, index, figures, differing[index]) for index, group in enumerate(groups)],
        differing=_differing(groups),
        pictures=pictures,
        apart=apart,
        batches=batch_rows(curves),
        count=len(results),
        failures=[(failure, knob_label(failure, list(failure.knobs))) for failure in failures],
        shares=time_shares(results),
        total=duration(sum(result.total_s for result in results)),
        environment=environments(results),
        notes=notes(results, older),
        sources=sources(results),
        figures=figures,
        heat=heat,
        planes=planes(folder, results, colours),
        texts=texts,
        traces=traces,
        terms=TERMS,
        plotly=Markup(plotly_js()),  # the library itself: no part of it comes from a result
    )
    write_atomically(path, text.encode())
    if volumes := [row for group in groups for row in _volume_rows(group)]:
        write_atomically(path.with_name("hypervolume.csv"), pd.DataFrame(volumes).to_csv(index=False).encode())


def _examples(groups: Sequence[Group]) -> tuple[list[dict], list[dict], list[Figure | None]]:
    """What the example browser and the trace viewer show, and the histogram of texts that differ from the target's.

    Each point's examples are read once, and not kept.
    """
    texts, traces, differing = [], [], []
    for group in groups:
        certified = [one for one in group.results if one.certificate and one.certificate.ties + one.certificate.defects]
        chosen = {name_of(result): result for result in (*group.selected(), *certified)}
        stored = {name: read_examples(result.folder) for name, result in chosen.items()}
        differing.append(divergence_figure(group, stored))
        if (browser := text_browser(group, stored)) is not None:
            texts.append(browser)
        if points := viewer_data(group, stored):
            traces.append({"title": setting_title(group.setting), "points": points})
    return texts, traces, differing


def _section(
    group: Group, colours: dict[str, Mark], index: int, figures: dict[str, dict], differing: Figure | None
) -> dict:
    """Collect what the page shows of one setting, and add its figures to `figures` by their id.

    differing: the histogram of texts that differ from the target's.
    """
    drawn: dict[str, Figure | None] = {
        "pareto": pareto_figure(group, colours) if any(group.position(result) for result in group.results) else None,
        "stages": stages_figure(group),
        "acceptance": acceptance_figure(group, colours),
        "budgets": budget_figure(group, colours),
        "differing": differing,
    }
    ids = {kind: f"{kind}-{index}" for kind, figure in drawn.items() if figure is not None}
    figures.update({ids[kind]: drawn[kind] for kind in ids})
    columns = point_columns(group)
    rows, beside = point_rows(group, columns), baseline_row(group, columns)
    return {
        "title": setting_title(group.setting),
        "setting": group.setting,
        "details": [(key, _plain(value)) for key, value in group.setting.items()],
        "signatures": _signatures(group),
        "metric": group.metric,
        "relative": group.relative,
        "best": best_rows(group),
        "best_columns": best_columns(group),
        "reasons": reason_lines(group),
        "hypervolumes": hypervolumes(group),
        "margin": MARGIN,
        "columns": columns,
        "rows": rows if beside is None else [*rows, beside],
        "front": front_points(group),
        "others": len(with_bars(group)) < sum(not result.is_baseline for result in group.results),
        "fixed": fixed_knobs(group),
        "categories": category_table(group),
        "prediction": prediction_table(group),
        "cost": cost_table(group),
        "change": change_table(group),
        "rounding": rounding_table(group),
        "trees": tree_drawings(group),
        "count": len(group.results),
        "candidates": sum(not result.is_baseline for result in group.results),
        "few": FEW,
        "ids": ids,
    }


def _signatures(group: Group) -> list[tuple[str, str]]:
    """How each metric was computed."""
    first = group.results[0]
    qualities = (first.quality, *first.further_qualities.values())
    return [(one.metric, one.signature) for one in qualities if one.signature]


def _volume_rows(group: Group) -> list[dict]:
    """The rows of `hypervolume.csv`: the setting, the policy, its hypervolume and the reference point."""
    best = group.results[0]
    return [
        {
            **{column.name: column.of(best) for column in SETTING},
            "policy": one.policy,
            "points": one.points,
            "hypervolume": one.hypervolume,
            "reference_latency": 1.0,
            "reference_quality": group.baseline_quality - MARGIN,
        }
        for one in hypervolumes(group)
    ]


def _differing(groups: list[Group]) -> list[tuple[str, list[str]]]:
    """Say how the settings differ: each differing key with its value in every setting."""
    return [(key, [_plain(group.setting.get(key)) for group in groups]) for key in differing_keys(groups)]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {knob_value(part)}" for key, part in value.items())
    return knob_value(value)
