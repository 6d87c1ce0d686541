"""The report of a sweep: one self-contained HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.schema.examples import MeasuredExample, read_certificates, read_examples
from bild_lab.lab.schema.formatting import duration, knob_label, knob_value, percent
from bild_lab.lab.schema.glossary import TERMS
from bild_lab.lab.schema.result import Failure, Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.batch_curves import batch_curves
from bild_lab.lab.store.commands import read_commands
from bild_lab.lab.store.groups import (
    FEW,
    Group,
    by_setting,
    differing_keys,
    points_of_choice,
    setting_value,
    telling_knobs,
)
from bild_lab.report.headline import headline_sentences
from bild_lab.report.page import figures
from bild_lab.report.page.base import Figure, page_environment, plotly_js
from bild_lab.report.page.examples import Stored, text_browser, traced_points
from bild_lab.report.page.grid import grids, knob_maps
from bild_lab.report.page.pareto_plot import overlay_figure, overlays, pareto_figure
from bild_lab.report.page.tables import batch_table, setting_tables
from bild_lab.report.phrases import front_in_words, reason_lines, setting_titles
from bild_lab.report.provenance import notes, sources
from bild_lab.report.review import review_answers
from bild_lab.report.screened_points import screened_on, screened_points
from bild_lab.report.style import Mark, marks
from bild_lab.report.tables import Table, TableCell, folder_name, plain_table, points_table


def write_html(
    name: str,
    results: Sequence[Result],
    failures: Sequence[Failure],
    path: Path,
    older: int = 0,
    progress: str | None = None,
) -> list[str]:
    """Write the report of the sweep `name`. Returns a sentence for each point whose texts cannot be
    read.

    Everything that came from outside the package is escaped. older: how many earlier results of the
    same points are not shown. progress: how far the running command is; the page then reloads
    itself until it is touched.
    """
    groups, folder = by_setting(results), path.parent
    titles = setting_titles(groups)
    screened, curves = screened_points(folder, results), batch_curves(results)
    policies = {policy for group in groups for policy in group.policies}
    policies |= {point.policy for point in screened}
    colours = marks(sorted(policies))
    sections, stored_of_groups, unreadable = [], [], []
    for group, title in zip(groups, titles, strict=True):
        stored = _stored_examples(group, unreadable)
        stored_of_groups.append(stored)
        section = _section(group, colours, stored, _certificates(group, unreadable))
        answers = review_answers(group, screened)
        sections.append({**section, "title": title, "answers": answers})
    telling = telling_knobs(failures)
    page = page_environment().get_template("report.html.j2")
    text = page.render(
        name=name,
        headline=headline_sentences(results),
        progress=progress,
        written=datetime.now().astimezone().strftime("%H:%M:%S"),
        commands=read_commands(folder),
        grids=grids(screened, colours),
        batches=batch_table(curves),
        batch_figure=figures.batch_figure(curves, colours),
        differing=_differing(groups),
        pictures=[(overlay, overlay_figure(overlay)) for overlay in overlays(groups)],
        sections=sections,
        count=len(results),
        failures=[
            (failure, knob_label(failure, telling(failure), among=failures)) for failure in failures
        ],
        shares=time_shares(results),
        total=duration(sum(result.total_s for result in results)),
        duration=duration,
        environment=environments(results),
        notes=[*notes(results, older), *unreadable],
        sources=plain_table(sources(results)),
        texts=_text_browsers(groups, titles, stored_of_groups),
        traces=_trace_viewers(groups, titles, stored_of_groups),
        terms=TERMS,
        few=FEW,
        plotly=plotly_js(),
    )
    write_atomically(path, text.encode())
    return unreadable


def _text_browsers(
    groups: Sequence[Group], titles: Sequence[str], stored_of_groups: Sequence[Stored]
) -> list[dict[str, Any]]:
    """The browser of texts of each setting that has one."""
    browsers = []
    for group, title, stored in zip(groups, titles, stored_of_groups, strict=True):
        browser = text_browser(group, stored)
        if browser is not None:
            browsers.append({**browser, "title": title})
    return browsers


def _trace_viewers(
    groups: Sequence[Group], titles: Sequence[str], stored_of_groups: Sequence[Stored]
) -> list[dict[str, Any]]:
    """The points with traced texts of all settings, which their labels name if there are several."""
    viewers = []
    for group, title, stored in zip(groups, titles, stored_of_groups, strict=True):
        prefix = f"{title}: " if len(groups) > 1 else ""
        for point in traced_points(group, stored):
            viewers.append({**point, "label": prefix + point["label"]})
    return viewers


def _stored_examples(group: Group, unreadable: list[str]) -> Stored:
    """The examples of the points whose texts are shown.

    unreadable: gets a sentence for each point whose examples cannot be read.
    """
    stored: dict[str, list[MeasuredExample]] = {}
    for result in group.selected():
        try:
            stored[folder_name(result)] = read_examples(result.folder)
        except UserError as error:
            stored[folder_name(result)] = []
            unreadable.append(_not_shown(group, result, error))
    return stored


def _certificates(group: Group, unreadable: list[str]) -> list[Mapping[str, Any]]:
    """The certificates of the texts of all points that have texts which differ from the target's.

    unreadable: as in `_stored_examples`.
    """
    certificates = []
    for result in group.results:
        verdicts = result.certificate
        if verdicts is None or not verdicts.ties + verdicts.defects:
            continue
        try:
            certificates += read_certificates(result.folder)
        except UserError as error:
            sentence = _not_shown(group, result, error)
            if sentence not in unreadable:  # of a point whose texts are shown, too
                unreadable.append(sentence)
    return certificates


def _not_shown(group: Group, result: Result, error: UserError) -> str:
    return f"The texts of {group.label(result)} are not shown: {error}"


def _section(
    group: Group,
    colours: dict[str, Mark],
    stored: Stored,
    certificates: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the page shows of one setting.

    Its figures and tables are by the name of their part of the page.
    """
    trees = figures.fitted_trees(group)
    drawable = any(map(group.position, group.results))
    part_figures: dict[str, list[Figure | None]] = {
        "pareto": [pareto_figure(group, colours)] if drawable else [],
        "knobs": knob_maps(group),
        "stages": [figures.stages_figure(group)],
        "acceptance": [figures.acceptance_figure(group, colours)],
        "along_text": [figures.along_text_figure(group, stored, colours)],
        "differing": [figures.divergence_figure(certificates)],
        "trees": [figures.tree_figure(group.label(result), content) for result, content in trees],
    }
    best = best_at_loss(group.judged, group.scale.small_loss)
    return {
        "group": group,
        "details": _details(group),
        "reasons": reason_lines(group),
        "points": points_table(group),
        "tables": setting_tables(group),
        "figures": {
            name: [figure for figure in drawn if figure is not None]
            for name, drawn in part_figures.items()
        },
        "front": [
            (folder_name(result), label, numbers)
            for result, label, numbers in front_in_words(group)
        ],
        "fixed": fixed_knobs(group),
        "candidates": len(points_of_choice(group.results)),
        "screened_on": None if best is None else screened_on(best),
    }


def _details(group: Group) -> list[tuple[str, str]]:
    """The keys of the setting with their values, and how each metric was computed."""
    details = [(key, _plain(value)) for key, value in group.setting.items()]
    fastest = group.results[0]
    for quality in (fastest.quality, *fastest.further_qualities.values()):
        if quality.signature:
            details.append((f"{quality.metric} signature", quality.signature))
    return details


def fixed_knobs(group: Group) -> list[str]:
    """Say which knobs had one value in all points of a policy: `bild: window 10, verify_tail on`."""
    varying = set(group.varying_knobs())
    lines = {
        result.policy: knob_label(result, [knob for knob in result.knobs if knob not in varying])
        for result in group.results
    }
    return [f"{policy}: {knobs}" for policy, knobs in lines.items() if knobs]


def time_shares(results: Sequence[Result]) -> list[tuple[str, float, str]]:
    """Where the time of all points went, largest part first: the part, its seconds, its share in
    percent.
    """
    total = sum(result.total_s for result in results)
    names = dict.fromkeys(name for result in results for name in result.seconds if name != "total")
    if total <= 0:
        return []
    seconds_of = {name: sum(result.seconds.get(name, 0.0) for result in results) for name in names}
    largest_first = sorted(seconds_of, key=lambda name: -seconds_of[name])
    return [
        (name, seconds_of[name], percent(seconds_of[name] / total, 1)) for name in largest_first
    ]


def environments(results: Sequence[Result]) -> list[tuple[str, str]]:
    """What the points were measured on; a value that differs is given with its counts."""
    lines = []
    for key in dict.fromkeys(key for result in results for key in result.environment):
        values = [result.environment.get(key) for result in results]
        texts = ["none" if value is None else str(value) for value in values]
        counts = {text: texts.count(text) for text in sorted(set(texts))}
        if key in ("started", "load_average", "busy_elsewhere_percent") and len(counts) > 1:
            known = [value for value in values if value is not None]
            summary = f"{min(known)} to {max(known)}"
        elif len(counts) == 1:
            summary = texts[0]
        else:
            summary = "; ".join(f"{text} ({count} points)" for text, count in counts.items())
        lines.append((key, summary))
    return lines


def _differing(groups: Sequence[Group]) -> Table:
    """A row for each key in which the settings differ."""
    rows = []
    for key in differing_keys(groups):
        row: dict[str, str | TableCell] = {"": TableCell(key, tone="title")}
        for number, group in enumerate(groups, start=1):
            row[f"Setting {number}"] = _plain(setting_value(group.setting, key))
        rows.append(row)
    return plain_table(rows)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {knob_value(member)}" for key, member in value.items())
    return knob_value(value)
