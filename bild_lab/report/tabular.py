"""The report's tables as text: in Markdown, and in LaTeX with booktabs' rules for a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import COLUMNS
from bild_lab.report.page.tables import Table, TableCell, points_table
from bild_lab.report.provenance import unreliable

_NUMBERS = ("speedup", "quality", "quality_difference", "latency_s_median", "tokens_per_s")
_NUMBERS += ("tokens_per_target_call", "acceptance_rate", "agreement_with_target")
_FOR_PAPERS = ("policy", *_NUMBERS[:3], "tokens_per_target_call")
_WRITTEN = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"},
    **{"×": r"$\times$", "−": "$-$", "–": "--", "∞": r"$\infty$", "…": r"\ldots{}", "’": "'"},
}


def points_text(group: Group, latex: bool) -> str:
    """The points of a setting, fastest first, with intervals and with what disturbed their timing."""
    table = points_table(group)

    def titles(names: Sequence[str]) -> list[str]:
        return [group.metric if name == "quality" else COLUMNS[name].title for name in names]

    if latex:
        return latex_table(table, titles(_FOR_PAPERS), unreliable(group.results))
    chosen = titles(("policy", *_NUMBERS))
    rows = [[f"{one.text} {one.detail}".strip() for one in cells] for cells in _chosen(table, chosen)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (chosen, ["---"] * len(chosen), *rows))


def latex_table(table: Table, titles: Sequence[str], remarks: Sequence[str] = ()) -> str:
    """The columns with these titles as a `tabular` that needs `\\usepackage{booktabs}`.

    A cell's second line, mostly its interval, follows it in small letters. remarks: below the last rule.
    """
    head = [r"\toprule", " & ".join(map(_escaped, titles)) + r" \\", r"\midrule"]
    rows = [" & ".join(map(_latex, cells)) + r" \\" for cells in _chosen(table, titles)]
    width = rf"\multicolumn{{{len(titles)}}}{{@{{}}p{{\linewidth}}@{{}}}}"
    below = [rf"{width}{{\footnotesize {_escaped(remark)}}} \\" for remark in remarks]
    begin = rf"\begin{{tabular}}{{@{{}}l{'r' * (len(titles) - 1)}@{{}}}}  % needs \usepackage{{booktabs}}"
    return "\n".join([begin, *head, *rows, r"\bottomrule", *below, r"\end{tabular}"])


def _chosen(table: Table, titles: Sequence[str]) -> Iterator[list[TableCell]]:
    """The cells of each row below these titles; of two columns with one title, the first."""
    own = [column.title for column in table.columns]
    for row in table.rows:
        yield [row.cells[own.index(title)] for title in titles]


def _latex(cell: TableCell) -> str:
    return _escaped(cell.text) + (rf" {{\scriptsize {_escaped(cell.detail)}}}" if cell.detail else "")


def _escaped(text: str) -> str:
    return re.sub(".", lambda sign: _WRITTEN.get(sign[0], sign[0]), text)
