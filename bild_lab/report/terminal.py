"""What a sweep found as text: tables in the terminal, of 80 columns or as many as their numbers
need, in Markdown, in LaTeX for a paper.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from bild_lab.lab.schema.formatting import (
    MISSING,
    TIMES,
    interval,
    knob_label,
    markdown_table,
    number,
    percent,
    short_name,
)
from bild_lab.lab.schema.numbers import NON_INFERIORITY_LEVEL, Quality, Speedup
from bild_lab.lab.schema.result import COLUMNS, Failure, Result
from bild_lab.lab.schema.statistics import ENOUGH_EXAMPLES, are_enough, best_at_loss
from bild_lab.lab.store.groups import (
    Group,
    by_setting,
    differing_keys,
    setting_value,
    telling_knobs,
)
from bild_lab.report import tables
from bild_lab.report.phrases import machine_facts, signed_difference
from bild_lab.report.provenance import disturbance, unreliable
from bild_lab.report.tables import (
    CATEGORY_COLUMNS,
    NO_WORSE,
    TableCell,
    categories_of,
    is_tested,
    non_inferiority_cell,
    non_inferiority_title,
    points_table,
)

WIDTH = 80
_LEAST_NAME = 8  # letters of a line of a point's name
_LONGEST_TITLE = 9  # letters of a line of a metric's name
DISTURBED = "!"  # before a speed that cannot be relied on
_ON_FRONT = "\u25cf"
# the columns after the quality
_NUMBERS = (
    "quality_difference",
    "speedup",
    "latency_s_median",
    "tokens_per_target_call",
    "acceptance_rate",
    "agreement_with_target",
)
_SHORTENED = [COLUMNS[name] for name in _NUMBERS if COLUMNS[name].short]
_LEGEND = (
    f"{_ON_FRONT} on the Pareto front. Brackets: 95 % intervals. "
    + "; ".join(f"{column.short}: {column.words}" for column in _SHORTENED)
    + "."
)
_TESTED = (
    f"{NO_WORSE}: yes where at least {ENOUGH_EXAMPLES} examples show it at a one-sided p-value, below,"
    f" of at most {NON_INFERIORITY_LEVEL:g}."
)
_UNRELIABLE = "timed while the machine was busy with something else: do not rely on this speedup"
_LONGEST_MESSAGE = 300  # characters of a failure's message
_LONGEST_VALUE = 80  # characters of a value of the setting

_MARKDOWN_COLUMNS = (
    "policy",
    "speedup",
    "quality",
    "quality_difference",
    "latency_s_median",
    "tokens_per_s",
    "tokens_per_target_call",
    "acceptance_rate",
    "agreement_with_target",
)
_LATEX_COLUMNS = ("policy", "speedup", "quality", "quality_difference", "tokens_per_target_call")
_LATEX_OF_SIGN = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
    "…": r"\ldots{}",
    "’": "'",
}


def sweep_table(results: Sequence[Result], failures: Sequence[Failure]) -> Table:
    """Tabulate every point, fastest first, a section per setting, with the failed points at the
    end.
    """
    table = narrow_table()
    table.add_column("", width=1)
    table.add_column("policy, knobs", ratio=1, overflow="fold")
    groups = by_setting(results)
    metrics = {group.metric for group in groups}
    metric = metrics.pop() if len(metrics) == 1 else "quality"
    metric_title = "\n".join(textwrap.wrap(metric, _LONGEST_TITLE))
    titles = [metric_title, *(COLUMNS[name].short_title.replace("/", "/\n") for name in _NUMBERS)]
    tested = is_tested(results)
    margin_title = non_inferiority_title(results)
    one_margin = margin_title != NO_WORSE
    if tested:  # behind the difference
        titles.insert(2, margin_title.replace(" by", "\nby"))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        if len(groups) > 1:
            table.add_row("", Text(f"setting {_difference(group, groups)}", style="bold"))
        for result in group.results:
            cells = _cells(group, result)
            if tested:
                enough = are_enough(result.counted_texts)
                cells.insert(4, _non_inferiority_text(result.quality, enough, one_margin))
            table.add_row(*cells, style="dim" if result.is_baseline else "")
        table.add_section()
    telling = telling_knobs(failures)
    for failure in failures:
        knobs = knob_label(failure, telling(failure), " ", failures)
        table.add_row(Text(TIMES), Text(f"{failure.policy} {knobs}"), Text("failed"), style="red")
    widen(table)
    table.caption = _caption(results, failures, tested)
    return table


def _caption(results: Sequence[Result], failures: Sequence[Failure], tested: bool) -> Text:
    """The legend of the table, then what went wrong. tested: whether it has a column for that."""
    legend = f"{_LEGEND} {_TESTED}" if tested else _LEGEND
    caption = Text(f"{legend} {_precisions(results)}".strip(), style="dim", justify="left")
    if any(disturbance(result) for result in results):
        caption.append(f"\n{DISTURBED} {_UNRELIABLE}", style="red")
    for failure in failures:
        message = f"{failure.point} {failure.error.type}: {failure.error.message}"
        if len(message) > _LONGEST_MESSAGE:  # failed.json has all of it
            message = f"{message[:_LONGEST_MESSAGE]}\u2026"
        caption.append(f"\n{TIMES} {message}", style="red")
    return caption


def narrow_table() -> Table:
    """An empty table of `WIDTH`, with no space to spare, whose caption begins at the left."""
    return Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=0, caption_justify="left")


def widen(table: Table) -> None:
    """Make the table as wide as its numbers and short lines of names need, at least `WIDTH`: in
    fewer columns numbers would be cut.
    """
    needed = len(table.columns) + 1  # beside and between the columns
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        widest = max(cell_len(line) for cell in cells for line in [*cell.splitlines(), ""])
        needed += widest if column.no_wrap else min(widest, _LEAST_NAME)
    table.width = max(WIDTH, needed)


def _precisions(results: Sequence[Result]) -> str:
    """In which precisions, and where, the models ran, and what the machine gives to drafts; empty
    without results.
    """
    words = dict.fromkeys(
        f"{result.setting.dtype} on {result.setting.device}" for result in results
    )
    facts = [", ".join(words), machine_facts(results)]
    return f"Decoded in {'; '.join(filter(None, facts))}." if words else ""


def category_table(results: Sequence[Result]) -> Table | None:
    """Tabulate each setting's best point at no loss, or its fastest, by category; None without
    categories.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("category", overflow="fold")
    for name in CATEGORY_COLUMNS:
        table.add_column(COLUMNS[name].short_title, justify="right", no_wrap=True)
    for group in by_setting(results):
        best = best_at_loss(group.results, 0.0) or group.results[0]
        if not best.categories:
            continue
        title = ", ".join(filter(None, [group.label(best), disturbance(best)]))
        table.add_row(Text(title, style="bold"))
        for name, category in categories_of(best).items():
            texts = [
                name,
                number(category.n_examples, 0),
                speedup_text(category.speedup),
                number(category.tokens_per_s, 1),
                number(category.tokens_per_target_call),
                _share(category.acceptance_rate),
            ]
            table.add_row(*(Text(text) for text in texts))
        table.add_section()
    return table if table.row_count else None


def _difference(group: Group, groups: list[Group]) -> str:
    """How the setting differs from the others."""
    words = [
        f"{key} {short_name(str(setting_value(group.setting, key)), _LONGEST_VALUE)}"
        for key in differing_keys(groups)
    ]
    return ", ".join(words) or group.metric


def _cells(group: Group, result: Result) -> list[Text]:
    quality = result.quality
    speedup = "baseline"
    if not result.is_baseline:
        mark = DISTURBED if disturbance(result) else ""
        speedup = f"{mark}{speedup_text(result.speedup)}"
    texts = [
        _ON_FRONT if group.is_on_front(result) else "",
        f"{result.policy} {group.knob_label(result, ' ')}".strip(),
        number(quality.value, quality.scale.digits),
        signed_difference(quality),
        speedup,
        number(1000 * result.latency_s.median, 1) if result.timed else MISSING,
        number(result.counts.tokens_per_target_call),
        _share(result.counts.acceptance_rate),
        _share(result.agreement_with_target),
    ]
    return [Text(text) for text in texts]


def _non_inferiority_text(quality: Quality, enough: bool, one_margin: bool) -> Text:
    """The verdict, and its p-value below it, behind the margin where the title has none."""
    tested, scale = quality.non_inferiority, quality.scale
    verdict = non_inferiority_cell(tested, enough, scale).text
    if tested is None:
        return Text(verdict)
    margin = "" if one_margin else f"by {scale.amount(tested.margin)}: "
    return Text(f"{verdict}\n{margin}{number(tested.p_value, 3)}")


def speedup_text(speedup: Speedup) -> str:
    """A speedup with its interval: `1.53 [1.48, 1.58]`."""
    return f"{number(speedup.value)} {interval(speedup.low, speedup.high)}".strip()


def _share(value: float | None) -> str:
    return percent(value).replace(" ", "")


def points_text(group: Group, latex: bool) -> str:
    """The points of a setting, fastest first, with intervals and with what disturbed their
    timing.
    """
    table = points_table(group)

    def titles(names: Sequence[str]) -> list[str]:
        return [group.metric if name == "quality" else COLUMNS[name].title for name in names]

    if latex:
        return latex_table(table, titles(_LATEX_COLUMNS), unreliable(group.results))
    column_titles = titles(_MARKDOWN_COLUMNS)
    rows = [
        [f"{cell.text} {cell.detail}".strip() for cell in cells]
        for cells in _columns_of(table, column_titles)
    ]
    return markdown_table(column_titles, rows)


def latex_table(table: tables.Table, titles: Sequence[str], remarks: Sequence[str] = ()) -> str:
    """The columns with these titles as a `tabular` that needs `\\usepackage{booktabs}`.

    A cell's second line, mostly its interval, follows it in small letters. remarks: below the last
    rule.
    """
    columns = "r" * (len(titles) - 1)
    lines = [
        rf"\begin{{tabular}}{{@{{}}l{columns}@{{}}}}  % needs \usepackage{{booktabs}}",
        r"\toprule",
        _latex_row(_escaped(title) for title in titles),
        r"\midrule",
    ]
    for cells in _columns_of(table, titles):
        lines.append(_latex_row(_latex_cell(cell) for cell in cells))
    lines.append(r"\bottomrule")
    for remark in remarks:
        width = rf"\multicolumn{{{len(titles)}}}{{@{{}}p{{\linewidth}}@{{}}}}"
        lines.append(rf"{width}{{\footnotesize {_escaped(remark)}}} \\")
    lines.append(r"\end{tabular}")
    return "\n".join(lines)


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: TableCell) -> str:
    text = _escaped(cell.text)
    return rf"{text} {{\scriptsize {_escaped(cell.detail)}}}" if cell.detail else text


def _columns_of(table: tables.Table, titles: Sequence[str]) -> Iterator[list[TableCell]]:
    """The cells of each row below these titles; of two columns with one title, the first."""
    table_titles = [column.title for column in table.columns]
    for row in table.rows:
        yield [row.cells[table_titles.index(title)] for title in titles]


def _escaped(text: str) -> str:
    return re.sub(".", lambda sign: _LATEX_OF_SIGN.get(sign[0], sign[0]), text)
