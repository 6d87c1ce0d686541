"""Settings share a picture only where target, data and machine are the same; else the reason is told."""

from __future__ import annotations

from bild_lab.lab.results.groups import by_setting
from bild_lab.report.overlay import overlays
from bild_lab.report.page.pareto_plot import overlay_figure
from tests.report.sample import sample_sweep

DECODING = {"max_new_tokens": 128, "temperature": 0.7, "top_k": None, "top_p": None}


def test_drafters_are_drawn_together_relative_to_their_common_baseline() -> None:
    groups = by_setting(sample_sweep() + sample_sweep(setting={"draft": "models/t5-mini"}))
    (picture,), reasons = overlays(groups)
    assert (picture.differing, reasons) == (["draft"], [])
    assert [(part.number, part.label, part.baseline_s) for part in picture.parts] == [
        (1, "t5-tiny", None),
        (2, "t5-mini", None),
    ]
    assert picture.whole.relative
    figure = overlay_figure(picture)
    marks = {trace["name"]: len(trace["x"]) for trace in figure["data"] if len(trace.get("text", [])) > 1}
    assert marks["bild, t5-tiny"] == marks["bild, t5-mini"] == 12
    assert figure["layout"]["xaxis2"]["title"]["text"] == "Speedup"


def test_settings_with_baselines_of_their_own_are_drawn_in_seconds() -> None:
    groups = by_setting(sample_sweep() + sample_sweep(setting={"dtype": "float32", "decoding": DECODING}))
    (picture,), _ = overlays(groups)
    assert picture.differing == ["dtype", "temperature"]
    assert [part.label for part in picture.parts] == ["dtype bfloat16, temperature 0", "dtype float32, temperature 0.7"]
    assert [part.baseline_s for part in picture.parts] == [0.11, 0.11]
    assert not picture.whole.relative
    figure = overlay_figure(picture)
    crosses = [trace for trace in figure["data"] if trace.get("marker", {}).get("symbol") == "x-thin"]
    assert [trace["x"] for trace in crosses] == [[0.11], [0.11]]
    assert "in seconds" in figure["layout"]["xaxis"]["title"]["text"]


def test_other_data_or_another_machine_stands_apart_with_the_reason() -> None:
    sweeps = [sample_sweep(), sample_sweep(setting={"dataset": "iwslt"}), sample_sweep(setting={"hardware": "a GPU"})]
    pictures, reasons = overlays(by_setting([one for sweep in sweeps for one in sweep]))
    assert pictures == []
    assert reasons == [
        "Setting 2 cannot be drawn with setting 1: they differ in data set.",
        "Setting 3 cannot be drawn with setting 1: they differ in hardware.",
    ]


def test_a_lone_setting_needs_neither_picture_nor_reason() -> None:
    assert overlays(by_setting(sample_sweep())) == ([], [])
    assert overlays([]) == ([], [])
