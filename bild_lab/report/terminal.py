"""What a sweep found, in the terminal: tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.lab.formatting import TIMES, interval, knob_label, number, percent, point_label, short_name, signed
from bild_lab.lab.results.groups import Group, by_setting, differing_keys
from bild_lab.lab.schema.result import COLUMNS, Failure, Result
from bild_lab.report.page.tables import CATEGORY, categories_of
from bild_lab.report.provenance import disturbance

WIDTH = 80
_ON_FRONT = "\u25cf"
_CROSS = TIMES
_DISTURBED = "!"
_NUMBERS = (  # the columns after the quality
    *("quality_difference", "speedup", "latency_s_median"),
    *("tokens_per_target_call", "acceptance_rate", "agreement_with_target"),
)
_SHORTENED = [COLUMNS[name] for name in _NUMBERS if COLUMNS[name].short]
_LEGEND = (
    f"{_ON_FRONT} on the Pareto front. Brackets: 95 % intervals. "
    + "; ".join(f"{column.short}: {column.words}" for column in _SHORTENED)
    + "."
)
_UNRELIABLE = "timed while the machine was busy with something else: do not rely on this speedup"
_MESSAGE_AT_MOST, _LONGEST = 300, 80  # characters of a message, of a value of the setting


def sweep_table(results: Sequence[Result], failures: Sequence[Failure]) -> Table:
    """Tabulate every point, fastest first, a section per setting, with the failed points at the end."""
    table = Table(box=SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=0, caption_justify="left")
    table.add_column("", width=1)
    table.add_column("policy, knobs", ratio=1, overflow="fold")
    groups = by_setting(results)
    metrics = {group.metric for group in groups}
    metric = metrics.pop() if len(metrics) == 1 else "quality"
    for title in (metric, *(COLUMNS[name].short_title for name in _NUMBERS)):
        table.add_column(title.replace("/", "/\n"), justify="right", no_wrap=True)
    for group in groups:
        if len(groups) > 1:
            table.add_row("", Text(f"setting {_difference(group, groups)}", style="bold"))
        for result in group.results:
            table.add_row(*_cells(group, result), style="dim" if result.is_baseline else "")
        table.add_section()
    for failure in failures:
        texts = (_CROSS, f"{failure.policy} {knob_label(failure, list(failure.knobs), ' ')}", "failed")
        table.add_row(*(Text(text) for text in texts), style="red")
    table.caption = Text(_LEGEND, style="dim", justify="left")
    if any(disturbance(result) for result in results):
        table.caption.append(f"\n{_DISTURBED} {_UNRELIABLE}", style="red")
    for failure in failures:
        table.caption.append(f"\n{_CROSS} {_message(failure)}", style="red")
    return table


def category_table(results: Sequence[Result]) -> Table | None:
    """Tabulate each setting's best point at no loss, or its fastest, by category; None without categories."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("category", overflow="fold")
    for name in CATEGORY:
        table.add_column(COLUMNS[name].short_title, justify="right", no_wrap=True)
    for group in by_setting(results):
        best = group.best(0.0) or group.results[0]
        if not best.categories:
            continue
        why = disturbance(best)
        table.add_row(Text(point_label(best, group.knobs(best)) + (f", {why}" if why else ""), style="bold"))
        for name, one in categories_of(best).items():
            faster = f"{number(one.speedup.value)} {interval(one.speedup.low, one.speedup.high)}".strip()
            cells = [name, number(one.n_examples, 0), faster, number(one.tokens_per_s, 1)]
            cells += [number(one.tokens_per_target_call), percent(one.acceptance_rate).replace(" ", "")]
            table.add_row(*map(Text, cells))
        table.add_section()
    return table if table.row_count else None


def _difference(group: Group, groups: list[Group]) -> str:
    """How the setting differs from the others."""
    words = [f"{key} {short_name(str(group.setting.get(key)), _LONGEST)}" for key in differing_keys(groups)]
    return ", ".join(words) or group.metric


def _cells(group: Group, result: Result) -> list[Text]:
    speedup, quality = result.speedup, result.quality
    mark = _DISTURBED if disturbance(result) else ""
    faster = f"{mark}{number(speedup.value)} {interval(speedup.low, speedup.high)}".strip()
    texts = [
        _ON_FRONT if any(result is other for other in group.front()) else "",
        f"{result.policy} {knob_label(result, group.knobs(result), ' ')}".strip(),
        number(quality.value),
        signed(quality.difference),
        "baseline" if result.is_baseline else faster,
        number(1000 * result.latency_s.median, 1),
        number(result.counts.tokens_per_target_call),
        percent(result.counts.acceptance_rate).replace(" ", ""),
        percent(result.agreement_with_target).replace(" ", ""),
    ]
    return [Text(text) for text in texts]


def _message(failure: Failure) -> str:
    """Return which point failed and why, cut to a few lines; failed.json has all of it."""
    text = f"{failure.point} {failure.error.type}: {failure.error.message}"
    return text if len(text) <= _MESSAGE_AT_MOST else f"{text[:_MESSAGE_AT_MOST]}\u2026"
