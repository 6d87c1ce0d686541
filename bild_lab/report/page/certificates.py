"""Certificates on the page: a histogram of greedy differences, and the rounding of sampled texts by number of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bild_lab.lab.formatting import MISSING
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.report.page.plots import Figure, figure_of
from bild_lab.report.page.tables import TableCell, TableColumn, TableRow, name_of, point_rows, policy_column

LOWEST, HIGHEST = -7, 2  # the decades of gaps that have a bar of their own, in nats
# the verdicts in `examples.jsonl`, and whether the number of rows alone gives the method's token
KINDS = (
    ("rounding by the number of rows", "#2a78b5"),
    ("another tie", "#7fb2d9"),
    ("defect", "#c23b22"),
    ("defect of the model’s session", "#7a1f12"),
)


def divergence_figure(group: Group, stored: Mapping[str, Sequence[MeasuredExample]]) -> Figure | None:
    """Count the greedy texts that differ from the target's, by the gap of its two likeliest tokens and by kind.

    None if no certified text differs. stored: the examples of each point, by its name.
    """
    found = [one for result in group.results for one in differing(stored.get(name_of(result), ()))]
    if not found:
        return None
    places = [gap_place(one["margin"]) for one in found]
    kinds = [kind_of(one) for one in found]
    labels = gap_labels()
    traces = []
    for kind, colour in KINDS:
        counts = [0] * len(labels)
        for place, own in zip(places, kinds, strict=True):
            counts[place] += own == kind
        if any(counts):
            hover = f"%{{x}} nats<br>{kind}: %{{y}} texts<extra></extra>"
            look = {"marker": {"color": colour}, "hovertemplate": hover}
            traces.append({"type": "bar", "name": kind, "x": labels, "y": counts, **look})
    layout = {
        "barmode": "stack",
        "xaxis": {"title": "gap between the target’s two likeliest tokens, nats", "type": "category"},
        "yaxis": {"title": "texts", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, 380)


def differing(examples: Sequence[MeasuredExample]) -> list[Mapping[str, Any]]:
    """The certificates of greedy texts that differ, where the target scored both tokens."""
    given = [one.certificate for one in examples if one.certificate is not None]
    return [one for one in given if one.get("margin") is not None]


def kind_of(certificate: Mapping[str, Any]) -> str:
    """Its name among `KINDS`."""
    by_rows, tie, defect, session = (kind for kind, _ in KINDS)
    if certificate["verdict"] == "numerical tie":
        wide = certificate.get("wide_gap")
        return by_rows if wide is not None and wide <= 0 < certificate["gap"] else tie
    return defect if certificate["verdict"] == "defect" else session


def gap_place(gap: float) -> int:
    """The bar of a gap: 0 for those below the lowest decade, the last for those above the highest."""
    if gap <= 0:
        return 0
    return min(max(math.floor(math.log10(gap)) - LOWEST + 1, 0), HIGHEST - LOWEST + 1)


def gap_labels() -> list[str]:
    """The names of the bars."""
    decades = [f"{10.0**at:g} to {10.0 ** (at + 1):g}" for at in range(LOWEST, HIGHEST)]
    return [f"below {10.0**LOWEST:g}", *decades, f"{10.0**HIGHEST:g} and more"]


def rounding_table(group: Group) -> tuple[list[TableColumn], list[TableRow]]:
    """Of each sampled point, what its rule and its rounding change of the target's distribution, by number of rows."""
    certified = [one for one in group.results if one.certificate is not None and one.certificate.rounding]
    rows = sorted({int(count) for one in certified for count in one.certificate.rounding})
    columns = [
        policy_column(group),
        TableColumn(
            "rule",
            "the largest total variation between what the rule emits and the target’s distribution",
            lambda one: variation(one.certificate.output),
        ),
        *(rows_column(count) for count in rows),
    ]
    return columns, point_rows(group, columns, certified)


def rows_column(count: int) -> TableColumn:
    """The rounding of forwards with so many rows."""
    hint = f"the largest total variation between a forward of {count} rows and one row after another"
    title = f"{count} row{'' if count == 1 else 's'}"
    return TableColumn(title, hint, lambda one: variation(one.certificate.rounding.get(str(count))))


def variation(value: float | None) -> TableCell:
    """A total variation, of which the order of magnitude counts."""
    if value is None:
        return TableCell(MISSING)
    return TableCell("0" if value == 0 else f"{value:.1e}", order=value)
