"""Where the time of one text goes, call by call: Figure 5 of speculative decoding (Leviathan et
al., 2023).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.formatting import knob_label, number
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.store.groups import Group, by_setting, setting_title
from bild_lab.lab.store.records import Sweep
from bild_lab.report.style import (
    MUTED,
    STAGE_COLOURS,
    SUBTITLE_LINE,
    as_panel,
    paper_figure,
    subtitle_lines,
)

MOST_LANES = 6

_REJECTED = "#D55E00"
_INCHES = 10.0
_LEFT, _RIGHT, _HEADING, _FOOT, _LANE = 1.75, 1.0, 0.95, 0.5, 0.78  # inches
_HALF = 0.24  # half of a bar's height; the distance of two lanes is 1
_LABEL_WIDTH = 22  # characters

Interval = tuple[float, float]  # start and end in ms


@dataclass(frozen=True)
class Lane:
    """One point's calls on the example, in ms.

    calls: by stage; a draft is in equal parts, one for each call of the drafter. end: of the last
    round. tokens: of the text. rejected: the middle of each verification that refused a drafted
    token.
    """

    policy: str
    knobs: str
    calls: Mapping[str, list[Interval]]
    end: float
    tokens: int
    rejected: list[float]


@dataclass(frozen=True)
class Timelines:
    """What is drawn: the lanes of one example in one setting."""

    example: str
    setting: Setting
    lanes: tuple[Lane, ...]


def timelines_of(sweep: Sweep, example: str | None = None) -> Timelines:
    """The traced points of a sweep in one setting, at most six of them, on one example.

    Of several settings it takes the one with the most points. Without an `example` it takes the
    traced one of median length. Raises UserError if nothing was traced, or if a lane has no trace
    of the example.
    """
    results = sweep.results()
    texts = {result.point: traced_examples(result) for result in results}
    traced = [result for result in results if texts[result.point]]
    if not traced:
        raise UserError(
            f"{sweep.folder} holds no traced example; measure a policy of ours there with "
            "measure.traced_examples=1 (and resume=false, where its points were measured before)"
        )
    group = max(by_setting(traced), key=lambda group: len(group.results))
    shown = selected(group)
    first_examples = texts[shown[0].point]
    common = [
        example_id
        for example_id in first_examples
        if all(example_id in texts[result.point] for result in shown)
    ]
    if not common or example not in (None, *common):
        description = "one example" if example is None else f"example {example!r}"
        raise UserError(
            f"{description} is wanted that every lane has a trace of, got {', '.join(common) or 'none'}"
        )
    if example is None:
        example = sorted(common, key=lambda example_id: len(first_examples[example_id].token_ids))[
            (len(common) - 1) // 2
        ]
    lanes = tuple(lane_of(group, result, texts[result.point][example]) for result in shown)
    return Timelines(example, group.setting, lanes)


def traced_examples(result: Result) -> dict[str, MeasuredExample]:
    """A point's examples that can be drawn, by their ids."""
    examples = read_examples(result.folder)
    return {
        text.id: text
        for text in examples
        if text.rounds and len(intervals(text, "draft")) == len(text.rounds)
    }


def selected(group: Group) -> list[Result]:
    """The baseline and at most five others, the fastest last: each policy's fastest first, then the
    Pareto front.
    """
    baseline = [result for result in group.results if result.is_baseline][:1]
    policies = [result for result in group.results if not result.is_baseline]
    distinct: list[Result] = []
    for result in [*group.notable(), *group.front, *policies]:
        if (
            not result.is_baseline
            and len(baseline) + len(distinct) < MOST_LANES
            and result not in distinct
        ):
            distinct.append(result)
    return [*baseline, *(result for result in reversed(policies) if result in distinct)]


def lane_of(group: Group, result: Result, example: MeasuredExample) -> Lane:
    verifies = intervals(example, "verify")
    calls = {"prefill": intervals(example, "prefill")[:1], "draft": [], "verify": verifies}
    rejected = []
    for index, (call, (start, end)) in enumerate(
        zip(example.rounds, intervals(example, "draft"), strict=True)
    ):
        parts = call.draft_calls or bool(call.drafted)  # a drafter without a model makes no calls
        ends = [
            start + (end - start) * part_index / max(parts, 1) for part_index in range(parts + 1)
        ]
        calls["draft"] += pairwise(ends)
        # None for an unverified tail, which ends the text
        verify = verifies[index] if index < len(verifies) else None
        if verify is not None and call.accepted < len(call.drafted):
            rejected.append(sum(verify) / 2)
    knobs = ", ".join(
        knob_label(result, [knob]).replace(" ", "\N{NO-BREAK SPACE}")
        for knob in group.knobs(result)
    )
    return Lane(
        result.policy, knobs, calls, 1000 * example.spans[-1][2], len(example.token_ids), rejected
    )


def intervals(example: MeasuredExample, stage: str) -> list[Interval]:
    """When this stage ran, in ms."""
    return [(1000 * start, 1000 * end) for name, start, end in example.spans if name == stage]


def draw_trace(timelines: Timelines, path: Path) -> None:
    """Write the lanes, one below the other over a common axis of time, 10 inches wide, as a .png,
    .pdf or .svg.
    """
    setting, count = timelines.setting, len(timelines.lanes)
    sampling = f"temperature {setting.temperature:g}, {setting.dtype} on {setting.device}"
    subtitle = (
        f"Example {timelines.example} of {setting_title(setting)}, {sampling}; every stage waits"
        " for the device"
    )
    more_lines = SUBTITLE_LINE * (len(subtitle_lines(subtitle, _INCHES)) - 1)
    height = _HEADING + more_lines + _LANE * count + _FOOT
    width = _INCHES - _LEFT - _RIGHT
    with paper_figure(
        path, (_INCHES, height), "Where the time of one text goes", subtitle, (path.suffix[1:],)
    ) as figure:
        figure.set_layout_engine("none")  # names and the legend have places of their own
        end = max(lane.end for lane in timelines.lanes)
        area = (_LEFT / _INCHES, _FOOT / height, width / _INCHES, _LANE * count / height)
        limits = {"xlim": (0, end), "ylim": (count - 0.5, -0.5), "yticks": []}
        axes = as_panel(
            figure.add_axes(area), grid="x", xlabel="milliseconds since decoding began", **limits
        )
        axes.spines["left"].set_visible(False)
        for row, lane in enumerate(timelines.lanes):
            draw_lane(axes, row, lane, points_per_ms=width * 72 / end)
        place = (0.48 / _INCHES, 1 - (0.68 + more_lines) / height)
        look = {
            "frameon": False,
            "borderpad": 0,
            "borderaxespad": 0,
            "handlelength": 1.1,
            "columnspacing": 1.5,
        }
        figure.legend(
            handles=key(), ncols=len(key()), loc="upper left", bbox_to_anchor=place, **look
        )


def draw_lane(axes: Axes, row: int, lane: Lane, points_per_ms: float) -> None:
    """The bars of a lane, its rejections below, its name and its end beside it."""
    for stage, calls in lane.calls.items():
        widths = [(start, end - start) for start, end in calls]
        # a wide one would hide a thin bar
        outlines = [min(0.7, 0.2 * width * points_per_ms) for _, width in widths]
        look = {"facecolor": STAGE_COLOURS[stage], "edgecolor": "white", "linewidths": outlines}
        axes.broken_barh(widths, (row - _HALF, 2 * _HALF), **look)
    below = [row + _HALF + 0.1] * len(lane.rejected)
    axes.plot(lane.rejected, below, "x", color=_REJECTED, ms=4.5, mew=1.4, clip_on=False)
    beside_lane = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(
        f"{number(lane.end, 1)} ms\n{lane.tokens} tokens", (lane.end, row), (7, 0), **beside_lane
    )
    left = {"xycoords": ("axes fraction", "data"), "ha": "right", **beside_lane}
    knobs = textwrap.wrap(lane.knobs, _LABEL_WIDTH, max_lines=2, placeholder=" …")
    policy = textwrap.shorten(lane.policy, _LABEL_WIDTH, placeholder=" …")
    axes.annotate(policy, (0, row), (-8, 6 * len(knobs)), weight="bold", **left)
    axes.annotate("\n".join(knobs), (0, row), (-8, -6), color=MUTED, **left)


def key() -> list[Patch | Line2D]:
    """What the bars and marks mean."""
    stages = {"prefill": "prefill", "draft": "one drafter call", "verify": "one target call"}
    bars = [Patch(facecolor=STAGE_COLOURS[stage], label=label) for stage, label in stages.items()]
    host = Patch(facecolor="white", edgecolor=MUTED, linewidth=0.6, label="host code")
    refused = Line2D(
        [], [], ls="", marker="x", ms=4.5, mew=1.4, color=_REJECTED, label="rejects a drafted token"
    )
    return [*bars, host, refused]
