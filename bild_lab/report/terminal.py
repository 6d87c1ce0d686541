"""What a sweep found, in the terminal: a headline and a table of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.lab.formatting import (
    TIMES,
    duration,
    interval,
    knob_label,
    number,
    percent,
    point_label,
    signed,
    times,
)
from bild_lab.lab.results.groups import Group, by_setting, differing_keys
from bild_lab.lab.schema.columns import COLUMNS
from bild_lab.lab.schema.result import Failure, Result

WIDTH = 80
_ON_FRONT = "\u25cf"
_CROSS = TIMES
_NUMBERS = (  # the columns after the quality
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
_MESSAGE_AT_MOST = 300


def headline(results: Sequence[Result]) -> str:
    """Return what the sweep found, in one or two sentences, with intervals.

    Of several settings it names the one with the greatest speedup at no loss.
    """
    groups = by_setting(results)
    if not groups:
        return "No point finished, so there is nothing to report."
    leader = max(groups, key=_speed_at_no_loss)
    keys = differing_keys(groups)
    if len(groups) == 1 or not keys:
        return _verdict(leader)
    named = ", ".join(f"{key} {leader.setting.get(key)}" for key in keys[:3])
    return f"Best of {len(groups)} settings ({named}): {_verdict(leader)}"


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
    for failure in failures:
        table.caption.append(f"\n{_CROSS} {_message(failure)}", style="red")
    return table


def _verdict(group: Group) -> str:
    candidates = [result for result in group.results if not result.is_baseline]
    if not group.relative or not candidates or group.baseline_quality is None:
        return _without_comparison(group)
    free, cheap = group.best(0.0), group.best(1.0)
    baseline = f"{group.setting.baseline} ({number(group.baseline_quality)})"
    if cheap is None:
        return f"No point came within one point of the {group.metric} of {baseline}."
    if free is None:
        fast = f"{_fast(group, cheap)} as fast ({_bounds(group, cheap)})"
        return f"No point kept the {group.metric} of {baseline}. Within one point of loss, {fast}."
    bounds = f"({_bounds(group, free)} against {number(free.quality.baseline)})"
    faster = f"{_fast(group, free)} as fast as {group.setting.baseline} {bounds}{_caution(free)}"
    first = f"At no loss of {group.metric}, {faster}."
    if cheap is free:
        return f"{first} Allowing one point of loss finds nothing faster."
    return f"{first} Within one point of loss, {_fast(group, cheap)} as fast ({_bounds(group, cheap)})."


def _fast(group: Group, best: Result) -> str:
    return f"{point_label(best, group.knobs(best))} decodes {times(best.speedup.value)}"


def _bounds(group: Group, best: Result) -> str:
    speedup = best.speedup
    bounds = f"95 % interval {number(speedup.low)} to {number(speedup.high)}; " if speedup.low is not None else ""
    return f"{bounds}{group.metric} {number(best.quality.value)}"


def _caution(best: Result) -> str:
    """Return a warning if the point is not faster than the baseline, or if its interval includes 1."""
    speedup = best.speedup
    if speedup.value <= 1:
        return ": nothing was faster than the baseline"
    if speedup.low is not None and speedup.low <= 1:
        return ": not clearly faster, as the interval holds 1"
    return ""


def _without_comparison(group: Group) -> str:
    fastest = min(group.results, key=lambda result: result.latency_s.median)
    label = point_label(fastest, group.knobs(fastest))
    quality = f"{group.metric} {number(fastest.quality.value)}"
    reason = "Only the baseline was measured" if group.relative else "No baseline was measured"
    latency = duration(fastest.latency_s.median)
    fact = f"{label}, {latency} an example (median), {quality}"
    return f"{reason}, so there is no speedup to report. Fastest: {fact}."


def _speed_at_no_loss(group: Group) -> float:
    best = group.best(0.0)
    return best.speedup.value if best is not None else 0.0


def _difference(group: Group, groups: list[Group]) -> str:
    return ", ".join(f"{key} {group.setting.get(key)}" for key in differing_keys(groups)) or group.metric


def _cells(group: Group, result: Result) -> list[Text]:
    speedup, quality = result.speedup, result.quality
    faster = f"{number(speedup.value)} {interval(speedup.low, speedup.high)}".strip()
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
