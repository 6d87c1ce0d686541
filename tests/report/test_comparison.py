"""Tests of what is said beside a comparison."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bild_lab.lab.metrics.quality import Difference
from bild_lab.lab.schema.numbers import LOG_PROBABILITY_NAME, NonInferiority, Speedup
from bild_lab.report.comparison import (
    comparison_frame,
    comparison_table,
    latex_comparison,
    notes,
    write_comparison,
)
from bild_lab.report.matching import MatchedPoint
from bild_lab.report.paired_comparison import MetricComparison, PointComparison
from tests.report.sample import ENVIRONMENT, sample_result


def compared(**environment: object) -> PointComparison:
    a, b = (
        sample_result("bild", {}, 1.4),
        sample_result("bild", {}, 1.5, environment={**ENVIRONMENT, **environment}),
    )
    over = {"n_examples": 100, "n_decoded": (100, 100), "speedups": (a.speedup, b.speedup)}
    judged = (MetricComparison("BLEU", (41.0, 41.0), None),)
    return PointComparison(
        MatchedPoint(a, b, {}),
        **over,
        latency_ratio=None,
        baseline_latency_ratio=None,
        not_compared_reason=None,
        metric_comparisons=judged,
    )


def test_a_side_that_was_timed_on_a_busy_machine_is_named() -> None:
    (note,) = notes([compared(busy_elsewhere_percent=74.4)], {}, {}, "")
    assert note.startswith(
        "B: 1 of 1 point was timed while other programs used 74 % of the machine"
    )
    assert notes([compared()], {}, {}, "") == []


@pytest.mark.parametrize(("ratio", "said"), [(0.5, "0.50"), (1.5, "1.50"), (0.95, "")])
def test_a_baseline_that_took_more_time_or_less_is_told(ratio: float, said: str) -> None:
    drifted = Speedup(ratio, ratio - 0.01, ratio + 0.01)
    found = notes([replace(compared(), baseline_latency_ratio=drifted)], {}, {}, "")
    words = f"The baseline itself took {said} times as long in B at 1 of 1 points."
    assert [note.startswith(words) for note in found] == [True] * bool(said)


def test_each_side_has_its_examples_in_the_table() -> None:
    frame = comparison_frame([replace(compared(), n_decoded=(100, 120))])
    assert (frame["examples_a"][0], frame["examples_b"][0]) == (100, 120)


def test_it_says_of_how_many_points_latencies_are_not_compared() -> None:
    apart = replace(compared(), not_compared_reason="replayed texts were not timed")
    (note,) = notes([apart, compared(), compared()], {}, {}, "")
    assert note == "Latencies of 1 of 3 points are not compared: replayed texts were not timed."
    (note,) = notes([apart, apart], {}, {}, "")
    assert note == "Latencies are not compared: replayed texts were not timed."


def test_of_latencies_that_are_compared_an_unknown_clock_is_told() -> None:
    batch = replace(compared(), clock_is_known=False)
    assert notes([batch], {}, {}, "") == []
    (note,) = notes([replace(batch, latency_ratio=Speedup(0.9, 0.8, 0.95))], {}, {}, "")
    assert note.startswith("Texts of a batch share their clock, so nothing is called faster where")


def test_sides_that_were_scored_in_two_ways_are_told() -> None:
    one = compared()
    newer = replace(one.pair.b.quality, signature="nrefs:1|version:2.6.0|bs:1000|seed:0")
    further = replace(one, pair=replace(one.pair, b=replace(one.pair.b, quality=newer)))
    (note,) = notes([further, further], {}, {}, "")
    assert note.startswith("BLEU was computed in 2 ways (nrefs:1|case:mixed") and "2.6.0" in note
    redrawn = replace(one.pair.a.quality, signature=f"{one.pair.a.quality.signature}|bs:9|seed:1")
    again = replace(one, pair=replace(one.pair, b=replace(one.pair.b, quality=redrawn)))
    assert notes([again], {}, {}, "") == []


def test_a_paper_gets_both_speedups_with_their_intervals_and_what_disturbed_them() -> None:
    remarks = notes([compared(busy_elsewhere_percent=74.4)], {}, {}, "")
    lines = latex_comparison([compared()], remarks).splitlines()
    assert lines[2] == r"point & speedup A & speedup B & latency B/A & BLEU, B minus A \\"
    cells = [
        r"1.40$\times$ {\scriptsize [1.35, 1.45]}",
        r"1.50$\times$ {\scriptsize [1.45, 1.55]}",
        "--",
        r"-- \\",
    ]
    assert lines[4] == " & ".join(["bild", *cells])
    assert r"used 74 \% of the machine" in lines[6] and lines[5] == r"\bottomrule"


def test_every_metric_has_its_columns_and_its_line(tmp_path: Path) -> None:
    one = compared()
    chrf = MetricComparison("chrF", (61.0, 60.0), Difference("chrF", -1.0, -1.5, -0.5, 0.001))
    both = [replace(one, metric_comparisons=(*one.metric_comparisons, chrf)), one]
    frame = comparison_frame(both)
    assert frame["chrF_a"].tolist()[0] == 61 and frame["chrF_difference_low"].tolist()[0] == -1.5
    assert frame["chrF_b"].tolist()[0] == 60 and frame["chrF_difference_high"].tolist()[0] == -0.5
    assert frame["chrF_verdict"].tolist()[0] == "worse" and frame["chrF_verdict"].isna()[1]
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_table(both))
    assert any(
        line.split()[:1] == ["chrF"] and "−1.00" in line and "worse" in line
        for line in console.export_text().splitlines()
    )
    write_comparison(tmp_path, ("a", "b"), both, [])
    page = (tmp_path / "compare.html").read_text()
    titles, rows = page[page.index("<thead>") :].split("<tbody>")
    assert ">BLEU, verdict</button>" in titles and ">chrF, verdict</button>" in titles
    counts = [row.count("<td") for row in rows.split("</tr>")[:2]]
    # the point, five of speed, four of BLEU and four of chrF, also where it is missing
    assert counts == [14, 14]


def test_a_margin_has_its_columns_and_its_words() -> None:
    tested = NonInferiority(margin=5.0, lower_bound=-2.6, p_value=0.0109, test="score")
    metric = MetricComparison("BLEU", (41.0, 41.0), Difference("BLEU", 0.0, -1.0, 1.0, 1.0), tested)
    both = [replace(compared(), metric_comparisons=(metric,)), compared()]
    frame = comparison_frame(both)
    assert frame["non_inferiority_p_value"].tolist()[0] == 0.0109
    assert frame["non_inferiority_lower_bound"].isna().tolist() == [False, True]
    console = Console(width=80, record=True, file=StringIO())
    console.print(comparison_table(both))
    lines = console.export_text()
    assert "no worse" in lines and "by 5: p 0.011" in lines
    nats = replace(
        metric, metric=LOG_PROBABILITY_NAME, non_inferiority=replace(tested, margin=0.01)
    )
    console.print(comparison_table([replace(both[0], metric_comparisons=(nats,))]))
    assert "by 0.01 nats:" in console.export_text()
    few = replace(both[0], metric_comparisons=(replace(metric, enough=False),))
    console.print(comparison_table([few]))
    assert "not shown" in console.export_text()
    (note,) = notes([few], {}, {}, "")
    assert note.startswith("Below 20 examples")
    assert "non_inferiority_margin" not in comparison_frame([compared()])
