"""Tests of the figures: sizes, ticks, labels that keep apart, and escaped names."""

import math
from pathlib import Path

import pytest
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.results.groups import by_setting
from bild_lab.report.axes import front_corners, log_ticks, speedup_ticks
from bild_lab.report.labels import place_labels
from bild_lab.report.page.interactive import acceptance_figure, hover_text, stages_figure
from bild_lab.report.page.pareto_plot import FRONT, OTHERS, pareto_figure
from bild_lab.report.pareto_figure import draw_pareto
from bild_lab.report.style import marks
from tests.report.sample import ENVIRONMENT, sample_baseline, sample_result, sample_sweep, with_quality


def test_the_static_figure_is_a_small_png_of_the_promised_size(tmp_path):
    path = tmp_path / "new" / "pareto.png"
    draw_pareto(sample_sweep(), path)
    assert Image.open(path).size == (1200, 750)
    assert path.stat().st_size < 150_000
    assert [entry.name for entry in path.parent.iterdir()] == ["pareto.png"]  # no temporary file is left


def test_each_setting_gets_its_own_panel(tmp_path):
    draw_pareto(sample_sweep() + sample_sweep(setting={"dataset": "iwslt"}), tmp_path / "pareto.png")
    assert Image.open(tmp_path / "pareto.png").size == (1200, 1500)


def test_a_name_with_a_dollar_sign_is_drawn_as_it_is(tmp_path):
    draw_pareto([sample_result("a$b_{$", {"k": "$x^{"}, 1.5)], tmp_path / "pareto.png")


def test_a_lone_point_without_a_baseline_is_drawn(tmp_path):
    draw_pareto([sample_result("bild", {"fallback": 0.5}, None, setting={"baseline": None})], tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").exists()


def test_a_figure_of_nothing_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(UserError, match="a point with latency and quality, got none; run a point first"):
        draw_pareto([], tmp_path / "pareto.png")


def test_points_timed_on_a_busy_machine_are_told_below_the_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    monkeypatch.setattr("matplotlib.figure.Figure.text", lambda *given, **_: texts.append(given[3]))
    busy = sample_result("bild", {}, 1.5, environment={**ENVIRONMENT, "busy_elsewhere_percent": 74.4})
    draw_pareto([sample_baseline(), busy], tmp_path / "pareto.png")
    draw_pareto([sample_baseline()], tmp_path / "pareto.png")
    assert [text == "1 of 2 points timed on a busy machine" for text in texts] == [False, False, True, False, False]


def test_speedup_ticks_are_round_and_within_the_axis():
    assert speedup_ticks(0.5, 1.1) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert speedup_ticks(0.9, 1.02) == [1.0, 1.1]
    assert log_ticks(0.03, 4.0) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]


def test_latencies_that_differ_much_are_drawn_on_logarithmic_axes(tmp_path: Path) -> None:
    near = [sample_baseline(), sample_result("bild", {"fallback": 0.5}, 2.0)]
    far = [*near, sample_result("hf_generate", {}, 0.04)]
    (narrow,), (wide,) = by_setting(near), by_setting(far)
    assert (narrow.wide, wide.wide) == (False, True)
    low, high = wide.limits()[0]
    assert 0 < low < 0.5 and high > 25
    draw_pareto(far, tmp_path / "pareto.png")
    colours = marks(wide.policies)
    drawn = pareto_figure(wide, colours)["layout"]
    assert (drawn["xaxis"]["type"], drawn["xaxis2"]["type"]) == ("log", "log")
    assert drawn["xaxis"]["range"] == pytest.approx((math.log10(low), math.log10(high)))
    assert pareto_figure(narrow, colours)["layout"]["xaxis2"]["type"] == "linear"


def test_the_front_ends_at_the_baseline_when_nothing_faster_is_as_good():
    (group,) = by_setting([sample_baseline(), sample_result("bild", {}, 2.0, -0.5)])
    assert front_corners(group) == [(0.5, 40.5), (1.0, 41.0)]


def test_labels_overlap_neither_each_other_nor_points():
    anchors = [(100.0 + 6 * i, 100.0) for i in range(5)]
    hard = [(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    centers = place_labels(anchors, [(60.0, 20.0)] * 5, hard, [], (0, 0, 400, 300))
    boxes = [(x - 30, y - 10, x + 30, y + 10) for x, y in centers] + hard
    pairs = [(a, b) for i, a in enumerate(boxes[:5]) for b in boxes[i + 1 :]]
    assert not [1 for a, b in pairs if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]


def test_a_label_without_a_free_place_is_left_out():
    assert place_labels([(10.0, 10.0)], [(60.0, 20.0)], [], [], (0, 0, 20, 20)) == [None]


def test_policies_are_told_apart_by_colour_or_marker():
    looks = marks([f"policy {index}" for index in range(30)]).values()
    assert len({(mark.colour, mark.marker) for mark in looks}) == 30


def test_the_interactive_figure_holds_every_point_once():
    (group,) = by_setting(sample_sweep())
    figure = pareto_figure(group, marks(group.policies))
    drawn = {trace["name"]: len(trace["x"]) for trace in figure["data"] if "customdata" in trace}
    assert drawn == {
        "bild": 12,
        "speculative": 4,
        "hf_assisted": 1,
        "hf_generate": 1,
        "hf_prompt_lookup": 1,
        "vanilla": 1,
    }


def test_each_mark_opens_its_point_and_the_front_is_numbered():
    (group,) = by_setting(sample_sweep())
    figure = pareto_figure(group, marks(group.policies))
    opened = {name for trace in figure["data"] for name in trace.get("customdata", ())}
    assert opened == {result.point for result in group.results}
    numbers = [note for note in figure["layout"]["annotations"] if note.get("name") == FRONT]
    assert [note["text"] for note in numbers] == [f"<b>{place}</b>" for place in range(1, 7)]
    assert [note["x"] for note in numbers] == [group.position(result).x for result in group.front()]


def test_bars_of_other_points_wait_to_be_asked_for():
    (group,) = by_setting(sample_sweep())
    figure = pareto_figure(group, marks(group.policies))
    bars = [trace for trace in figure["data"] if "error_x" in trace]
    waiting = [trace for trace in bars if trace.get("meta") == OTHERS]
    assert sum(len(trace["x"]) for trace in bars) == len(group.results) - 1
    assert waiting and all(trace["visible"] is False for trace in waiting)
    assert {trace["error_x"]["color"] for trace in bars} <= {mark.colour for mark in marks(group.policies).values()}


def test_a_bar_that_leaves_the_axes_gets_an_arrow():
    far = with_quality(sample_result("bild", {}, 1.5), difference_low=-30.0)
    (group,) = by_setting([sample_baseline(), far])
    figure = pareto_figure(group, marks(group.policies))
    (arrows,) = [trace for trace in figure["data"] if trace.get("cliponaxis") is False]
    (bars,) = [trace for trace in figure["data"] if "error_y" in trace]
    bottom = group.limits()[1][0]
    assert arrows["marker"]["symbol"] == ["triangle-down"]
    assert arrows["y"] == [bottom] and "11.00" in arrows["text"][0]
    assert bars["y"][0] - bars["error_y"]["arrayminus"][0] == pytest.approx(bottom)


def test_hovering_tells_every_knob_and_number():
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


def test_hovering_escapes_names():
    assert "<script>" not in hover_text(sample_result("<script>", {"<script>": "<script>"}, 1.5))


def test_stage_bars_add_up_to_the_mean_latency_however_few_examples_were_traced():
    stages = {"prefill": 0.1, "draft": 0.0, "verify": 0.8, "host": 0.1}
    (group,) = by_setting([sample_baseline(stages_s=stages)])
    figure = stages_figure(group)
    assert [trace["name"] for trace in figure["data"]] == ["prefill", "draft", "verify", "host"]
    assert [trace["x"][0] for trace in figure["data"]] == pytest.approx([11.0, 0.0, 88.0, 11.0])


def test_stages_and_acceptance_are_left_out_where_unknown():
    (group,) = by_setting([sample_result("hf_generate", {}, 0.9, stages_s=None)])
    assert stages_figure(group) is None
    assert acceptance_figure(group, marks(group.policies)) is None


def test_acceptance_is_drawn_in_percent_from_position_one():
    (group,) = by_setting([sample_result("bild", {}, 1.5, acceptance_by_position=[0.9, None, 0.8])])
    (trace,) = acceptance_figure(group, marks(group.policies))["data"]
    assert (trace["x"], trace["y"]) == ([1, 2, 3], [90.0, None, 80.0])
