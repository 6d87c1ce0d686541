"""The tables of the HTML report, as plain values for its template."""

from collections.abc import Callable
from dataclasses import dataclass

from bild_lab.lab.analysis.pareto import hypervolume, is_baseline
from bild_lab.lab.results.groups import Group
from bild_lab.report.formatting import (
    MISSING,
    duration,
    interval,
    knob_value,
    number,
    percent,
    signed,
    signed_interval,
    times,
)

MARGIN = 1.0  # points of quality below the baseline's, at which hypervolumes end


@dataclass(frozen=True)
class Cell:
    """One table cell: its text, a smaller second line, and what to sort it by."""

    text: str
    detail: str = ""
    order: float | str | None = None


@dataclass(frozen=True)
class Row:
    """One point: a link to its folder, its cells, and whether it stands out."""

    point: str
    cells: list[Cell]
    on_front: bool
    is_baseline: bool


@dataclass(frozen=True)
class Column:
    """One column of the table of points: its title, what the title means, how a cell is made."""

    title: str
    hint: str
    cell: Callable[[dict], Cell]


@dataclass(frozen=True)
class Share:
    """One part of the sweep's time."""

    name: str
    text: str
    share: float
    percent: str


def point_columns(group: Group) -> list[Column]:
    """Return the columns for a setting: policy, every knob that varies, then the numbers."""
    policy = Column("policy", "how tokens were decoded", lambda result: Cell(result["policy"], "", result["policy"]))
    knobs = [Column(knob, f"knob of the policy: {knob}", _knob_cell(knob)) for knob in group.varying_knobs()]
    speedup = Column("speedup", "times the baseline's speed, with its 95 % interval", _speedup)
    quality = Column(group.metric, f"{group.metric} with its 95 % interval", _quality)
    difference = Column("difference", "quality minus the baseline's, paired, with its 95 % interval", _difference)
    certified = [certificate_column()] if any(result.get("certificate") for result in group.results) else []
    counts = [_count(*told) for told in _COUNTS]
    return [policy, *knobs, speedup, quality, difference, *certified, *_NUMBERS, *counts]


def certificate_column() -> Column:
    """Return the column of lossless certificates."""

    def cell(result: dict) -> Cell:
        found = result.get("certificate")
        if found is None:
            return Cell(MISSING)
        return Cell(f"{found['equal']} equal", f"{found['ties']} ties, {found['defects']} defects", found["defects"])

    return Column("certificate", "examples equal to the target's own, differing by a numerical tie, by more", cell)


def point_rows(group: Group, columns: list[Column], results: list[dict] | None = None) -> list[Row]:
    """Return one row per point, or per given result of the group, fastest first."""
    front = {id(result) for result in group.front()}
    return [
        Row(
            result.get("folder", result["point"]),
            [column.cell(result) for column in columns],
            id(result) in front,
            is_baseline(result),
        )
        for result in (group.results if results is None else results)
    ]


def fixed_knobs(group: Group) -> list[str]:
    """Say which knobs had one value in all points of a policy: `bild: window 10, verify_tail on`."""
    varying = set(group.varying_knobs())
    lines: dict[str, str] = {}
    for result in group.results:
        fixed = [f"{knob} {knob_value(value)}" for knob, value in result["knobs"].items() if knob not in varying]
        if fixed:
            lines[result["policy"]] = f"{result['policy']}: {', '.join(fixed)}"
    return list(lines.values())


def best_rows(group: Group) -> list[dict]:
    """Return the rows "best speedup at no loss" and "at one point of loss"; none without a baseline."""
    if not group.relative:
        return []
    rows = []
    for title, loss in (("no loss", 0.0), ("one point of loss", 1.0)):
        best = group.best(loss)
        row = {"title": title, "best": best}
        if best is not None:
            row |= {"knobs": [(knob, knob_value(value)) for knob, value in best["knobs"].items()]}
            row |= {"speedup": _speedup(best), "quality": _quality(best), "difference": _difference(best)}
            row |= {"same": percent(best["agreement_with_target"])}
        rows.append(row)
    return rows


def hypervolume_rows(group: Group) -> list[dict]:
    """Return each policy's hypervolume up to relative latency 1 and `MARGIN` below the baseline, largest first.

    No rows without a baseline, whose own front is the reference's edge.
    """
    if not group.relative or group.baseline_quality is None:
        return []
    reference = (1.0, group.baseline_quality - MARGIN)
    rows = []
    for policy in group.policies:
        placed = [group.place(result) for result in group.results if result["policy"] == policy]
        points = [(place.x, place.y) for place in placed if place is not None]
        if points:
            volume = hypervolume(points, reference)
            rows.append({"policy": policy, "points": len(points), "hypervolume": volume, "text": number(volume, 3)})
    return sorted(rows, key=lambda row: -row["hypervolume"])


def time_shares(results: list[dict]) -> list[Share]:
    """Return where the time of all points went, largest part first, as shares of the total."""
    total = sum(result["seconds"]["total"] for result in results)
    names = dict.fromkeys(name for result in results for name in result["seconds"] if name != "total")
    parts = {name: sum(result["seconds"].get(name) or 0.0 for result in results) for name in names}
    rest = total - sum(parts.values())
    if rest > 0.001 * total:
        parts["other"] = rest
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [Share(name, duration(s), s / total, percent(s / total, 1)) for name, s in ordered] if total > 0 else []


def environments(results: list[dict]) -> list[tuple[str, str]]:
    """Return what the points were measured on; a value that differs is given with its counts."""
    lines = []
    for key in dict.fromkeys(key for result in results for key in result["environment"]):
        values = [_plain(result["environment"].get(key)) for result in results]
        counts = {value: values.count(value) for value in sorted(set(values))}
        if key in ("started", "load_average", "busy_elsewhere_percent") and len(counts) > 1:
            lines.append((key, f"{_least(results, key)} to {_most(results, key)}"))
        elif len(counts) == 1:
            lines.append((key, values[0]))
        else:
            lines.append((key, "; ".join(f"{value} ({count} points)" for value, count in counts.items())))
    return lines


def _plain(value: object) -> str:
    return "none" if value is None else str(value)


def _least(results: list[dict], key: str) -> object:
    return min(value for result in results if (value := result["environment"].get(key)) is not None)


def _most(results: list[dict], key: str) -> object:
    return max(value for result in results if (value := result["environment"].get(key)) is not None)


def _knob_cell(knob: str) -> Callable[[dict], Cell]:
    def cell(result: dict) -> Cell:
        if knob not in result["knobs"]:
            return Cell("")
        value = result["knobs"][knob]
        ordered = value if isinstance(value, int | float | str) else str(value)
        return Cell(knob_value(value), "", ordered)

    return cell


def _speedup(result: dict) -> Cell:
    speedup = result["speedup"]
    return Cell(times(speedup["value"]), interval(speedup["low"], speedup["high"]), speedup["value"])


def _quality(result: dict) -> Cell:
    quality = result["quality"]
    return Cell(number(quality["value"]), interval(quality["low"], quality["high"]), quality["value"])


def _difference(result: dict) -> Cell:
    quality = result["quality"]
    bounds = signed_interval(quality["difference_low"], quality["difference_high"])
    return Cell(signed(quality["difference"]), bounds, quality["difference"])


def _latency(result: dict) -> Cell:
    latency = result["latency_s"]
    return Cell(duration(latency["median"]), f"p95 {duration(latency['p95'])}", latency["median"])


def _plain_number(key: str, digits: int) -> Callable[[dict], Cell]:
    return lambda result: Cell(number(result.get(key), digits), "", result.get(key))


def _share(key: str) -> Callable[[dict], Cell]:
    return lambda result: Cell(percent(result.get(key), 1), "", result.get(key))


def _count(title: str, key: str, hint: str) -> Column:
    return Column(title, hint, _plain_number(key, 0))


_NUMBERS = [
    Column("latency", "median seconds per example, and the 95th percentile", _latency),
    Column("tokens/s", "emitted tokens per second", _plain_number("tokens_per_s", 1)),
    Column(
        "tokens/call",
        "emitted tokens per forward pass of the target",
        _plain_number("tokens_per_target_call", 2),
    ),
    Column("acceptance", "how often a drafted token stands if those before it do", _share("acceptance_rate")),
    Column("none stood", "rounds whose whole draft was dropped", _share("nothing_accepted")),
    Column(
        "same output",
        "examples whose tokens all equal the target's own output",
        _share("agreement_with_target"),
    ),
    Column(
        "p-value",
        "of the quality difference, paired",
        lambda r: Cell(_p_value(r), "", r["quality"]["p_value"]),
    ),
]
_COUNTS = [
    ("fallbacks", "fallbacks", "times the draft was handed over early, for low confidence"),
    ("rollbacks", "rollbacks", "times the target replaced a drafted token"),
    ("drafted", "drafted", "tokens drafted"),
    ("accepted", "accepted", "drafted tokens kept"),
    ("target calls", "target_calls", "forward passes of the target"),
    ("draft calls", "draft_calls", "forward passes of the drafter"),
    ("tokens", "tokens", "tokens emitted"),
    ("memory, MB", "peak_memory_mb", "peak memory"),
]


def _p_value(result: dict) -> str:
    value = result["quality"]["p_value"]
    return MISSING if value is None else number(value, 3)
