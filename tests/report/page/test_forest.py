"""The plot of a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bild_lab.lab.analysis.paired import Compared, Pair
from bild_lab.lab.metrics import Difference
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.report.page.forest import LABELS, Forest, forest
from tests.report.sample import sample_result


def compared(latency: tuple | None = (0.8, 0.7, 0.9), quality: tuple | None = (0.5, 0.1, 0.9, 0.01)) -> Compared:
    result = sample_result("bild", {}, 1.5)
    none = Speedup()
    return Compared(
        pair=Pair(result, result, {}),
        n_examples=3,
        decoded=(3, 3),
        speedups=(none, none),
        qualities=(None, None),
        latency=None if latency is None else Speedup(*latency),
        baseline_latency=None,
        unfit=None,
        quality=None if quality is None else Difference("BLEU", *quality),
    )


def drawn(*several: Compared) -> Forest:
    return forest(several, [f"point {number}" for number in range(len(several))])


def test_every_point_has_a_row_with_both_intervals_and_its_verdicts() -> None:
    plot = drawn(
        compared(), compared((1.3, 1.2, 1.5), (-2.0, -3.0, -1.0, 0.001)), compared((1.0, 0.9, 1.1), (0.1, -1, 1, 0.8))
    )
    latency, quality = plot.panels
    assert [one.kind for one in latency.intervals] == ["good", "bad", "same"]
    assert [one.kind for one in quality.intervals] == ["good", "bad", "same"]
    assert (
        [y for y, _, _ in plot.labels] == [one.y for one in latency.intervals] == [one.y for one in quality.intervals]
    )
    fast, slow, equal = latency.intervals
    assert fast.xs[2] < latency.middle < slow.xs[0] and equal.xs[1] == latency.middle
    assert quality.intervals[1].xs[2] < quality.middle < quality.intervals[0].xs[0]
    assert fast.words == "0.800 [0.700, 0.900]" and quality.intervals[1].words == "−2.00 [−3.00, −1.00]"


@pytest.mark.parametrize("latency", [(0.8, 0.7, 0.9), (12.0, 0.5, 90.0), (0.999, 0.998, 0.9995), (1.0, 1.0, 1.0)])
def test_all_of_it_is_inside_its_panel_and_the_ticks_are_round(latency: tuple) -> None:
    plot = drawn(compared(latency), compared((1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0)))
    for panel in plot.panels:
        places = [panel.middle, *(x for one in panel.intervals for x in one.xs), *(x for x, _ in panel.ticks)]
        assert all(panel.left <= x <= panel.right for x in places)
        assert 2 <= len(panel.ticks) <= 12 and len({text for _, text in panel.ticks}) == len(panel.ticks)
    assert plot.panels[0].left == LABELS and plot.panels[1].left > plot.panels[0].right
    assert plot.width > plot.panels[1].right


def test_what_was_not_compared_has_no_panel() -> None:
    plot = drawn(compared(latency=None), compared())
    assert [len(panel.intervals) for panel in plot.panels] == [1, 2]
    only_quality = drawn(compared(latency=None))
    assert [panel.title for panel in only_quality.panels] == ["BLEU, B minus A: right of the line B is better"]
    assert only_quality.panels[0].left == LABELS
    assert drawn(compared(latency=None, quality=None)) is None


def test_a_long_label_is_cut_and_kept_whole_beside() -> None:
    (label,) = forest([replace(compared())], ["bild " + "x" * 90]).labels
    assert label[1].endswith("…") and len(label[1]) == 50 and label[2] == "bild " + "x" * 90
