"""Quality against latency on the page: every point once, numbered front, and settings that share a
picture.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bild_lab.lab.store.groups import by_setting
from bild_lab.report.page.pareto_plot import (
    hover_text,
    overlay_figure,
    overlays,
    pareto_figure,
)
from bild_lab.report.style import marks
from tests.report.sample import (
    sample_baseline,
    sample_log_probability,
    sample_result,
    sample_sweep,
)

SIDES = ("arrayminus", "array")  # of an error bar, below and above
DECODING = {"max_new_tokens": 128, "temperature": 0.7, "top_k": None, "top_p": None}


def drawn(results: list) -> dict:
    (group,) = by_setting(results)
    return pareto_figure(group, marks(group.policies))


def test_the_figure_holds_every_point_once_and_each_mark_opens_its_point() -> None:
    traces = [trace for trace in drawn(sample_sweep())["data"] if "customdata" in trace]
    assert {trace["name"]: len(trace["x"]) for trace in traces} == {
        "bild": 12,
        "speculative": 4,
        "hf_assisted": 1,
        "hf_generate": 1,
        "hf_prompt_lookup": 1,
        "vanilla": 1,
    }
    assert {name for trace in traces for name in trace["customdata"]} == {
        result.point for result in sample_sweep()
    }


def test_the_front_is_numbered() -> None:
    (group,) = by_setting(sample_sweep())
    (numbers,) = [
        trace for trace in drawn(sample_sweep())["data"] if trace["mode"] == "markers+text"
    ]
    assert numbers["text"] == [f"<b>{place}</b>" for place in range(1, 7)]
    assert numbers["x"] == [group.position(result).x for result in group.front]


def test_bars_reach_the_ends_of_the_intervals_and_lines_lie_at_the_baseline_and_a_point_lower() -> (
    None
):
    figure = drawn([sample_result("bild", {}, 2.0, -0.5)])  # of −0.95 to 0 points
    (bars,) = [trace for trace in figure["data"] if "error_x" in trace]
    ends = [bars[error][side][0] for error in ("error_x", "error_y") for side in SIDES]
    assert ends == pytest.approx([0.5 - 1 / 2.05, 1 / 1.95 - 0.5, 0.45, 0.5])
    levels = [(line["y0"], line["y1"]) for line in figure["layout"]["shapes"]]
    assert levels == [(41.0, 41.0), (40.0, 40.0)]
    nats = drawn([sample_log_probability(2.0, -0.5)])["layout"]["shapes"]
    assert [line["y0"] for line in nats] == pytest.approx([-0.2315, -0.2415])
    speedups = figure["layout"]["xaxis2"]  # over an axis of latencies
    ticks = zip(speedups["tickvals"], speedups["ticktext"], strict=True)
    assert all(f"{1 / place:g}\N{MULTIPLICATION SIGN}" == text for place, text in ticks)
    names = [(name["y"], name["text"]) for name in figure["layout"]["annotations"]]
    assert names == [(41.0, "vanilla"), (40.0, "−1 point")]


def test_latencies_that_differ_much_are_drawn_on_logarithmic_axes() -> None:
    near = [sample_baseline(), sample_result("bild", {"fallback": 0.5}, 2.0)]
    far = [*near, sample_result("bild", {"fallback": 0.1}, 9.0)]
    low, high = by_setting(far)[0].limits()[0]
    layout = drawn(far)["layout"]
    assert (layout["xaxis"]["type"], layout["xaxis2"]["type"]) == ("log", "log")
    assert layout["xaxis"]["range"] == pytest.approx((math.log10(low), math.log10(high)))
    # named, as it would squeeze the others
    slow = drawn([*near, sample_result("hf_generate", {}, 0.04)])["layout"]
    assert drawn(near)["layout"]["xaxis2"]["type"] == slow["xaxis2"]["type"] == "linear"
    assert "; beyond the axis: hf_generate 0.04×)" in slow["xaxis"]["title"]["text"]


def test_hovering_shows_every_knob_and_number_escaped() -> None:
    result = next(result for result in sample_sweep() if result.policy == "bild")
    lines = hover_text(result).split("<br>")
    assert lines[:7] == [
        "<b>bild</b>",
        "fallback: 0.3",
        "rollback: 0.69",
        "window: 10",
        "verify_tail: on",
        "speedup: 1.46\u00d7 [1.41, 1.51]",
        "BLEU: 41.00 [38.70, 43.50]",
    ]
    assert "acceptance rate: 71.0 %" in lines
    assert not any(line.endswith(": –") for line in hover_text(sample_baseline()).split("<br>"))
    assert "<script>" not in hover_text(sample_result("<script>", {"<script>": "<script>"}, 1.5))


def test_drafters_are_drawn_together_relative_to_their_common_baseline() -> None:
    (picture,) = overlays(
        by_setting(sample_sweep() + sample_sweep(setting={"draft": "models/t5-mini"}))
    )
    assert picture.differing == ["draft"] and picture.all_points.relative
    assert [(part.number, part.label, part.baseline_s) for part in picture.settings] == [
        (1, "t5-tiny", None),
        (2, "t5-mini", None),
    ]
    figure = overlay_figure(picture)
    counts = {
        trace["name"]: len(trace["x"]) for trace in figure["data"] if len(trace.get("text", [])) > 1
    }
    assert counts["bild, t5-tiny"] == counts["bild, t5-mini"] == 12
    assert figure["layout"]["xaxis2"]["title"]["text"] == "Speedup"


def test_settings_with_baselines_of_their_own_are_drawn_in_seconds() -> None:
    (picture,) = overlays(
        by_setting(
            sample_sweep() + sample_sweep(setting={"dtype": "float32", "decoding": DECODING})
        )
    )
    assert picture.differing == ["dtype", "temperature"] and not picture.all_points.relative
    assert [part.label for part in picture.settings] == [
        "dtype bfloat16, temperature 0",
        "dtype float32, temperature 0.7",
    ]
    assert [part.baseline_s for part in picture.settings] == [0.11, 0.11]
    crosses = [
        trace
        for trace in overlay_figure(picture)["data"]
        if trace.get("marker", {}).get("symbol") == "x-thin"
    ]
    assert [trace["x"] for trace in crosses] == [[0.11], [0.11]]


def test_of_the_baselines_beside_the_points_of_a_setting_the_median_is_drawn() -> None:
    points = [
        sample_result("bild", {"fallback": at}, 1.5, setting={"dtype": dtype})
        for dtype in ("bfloat16", "float32")
        for at in (0.3, 0.5, 0.7)
    ]
    timed = [
        replace(one, baseline_latency_s=replace(one.baseline_latency_s, mean=mean_s))
        for one, mean_s in zip(points, (0.5, 0.1, 0.12) * 2, strict=True)
    ]
    (picture,) = overlays(by_setting(timed))
    assert [part.baseline_s for part in picture.settings] == [0.12, 0.12]


def test_the_baselines_of_several_settings_lie_inside_the_axes() -> None:
    fast = [
        sample_result("bild", {"fallback": fallback}, 2.0, 3.0, setting={"dtype": dtype})
        for fallback in (0.3, 0.5)
        for dtype in ("bfloat16", "float32")
    ]
    (picture,) = overlays(by_setting(fast))
    figure = overlay_figure(picture)
    left, right = figure["layout"]["xaxis"]["range"]
    bottom, top = figure["layout"]["yaxis"]["range"]
    assert left < fast[0].latency_s.mean < 0.11 < right and bottom < 41.0 < top


@pytest.mark.parametrize(
    "setting",
    [
        {"target": "t5-small"},
        {"n_examples": 50},
        {"device": "cuda"},
        {"hardware": "another CPU"},
        {"split": "validation"},
        {"data": "def456"},
        {"prompt_template": "{source}"},
        {"max_source_tokens": 7},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_of_other_targets_data_or_machines_share_no_picture(setting: dict) -> None:
    assert overlays(by_setting(sample_sweep() + sample_sweep(setting=setting))) == []


def test_a_setting_without_batches_has_batch_1() -> None:
    (picture,) = overlays(by_setting(sample_sweep() + sample_sweep(setting={"batch": 4})))
    assert [each.label for each in picture.settings] == ["batch 1", "batch 4"]
