"""Tests of what is said beside a comparison."""

from bild_lab.lab.analysis.paired import Compared, Pair
from bild_lab.report.comparison import notes
from tests.report.sample import ENVIRONMENT, sample_result


def compared(**environment: object) -> Compared:
    a, b = sample_result("bild", {}, 1.4), sample_result("bild", {}, 1.5, environment={**ENVIRONMENT, **environment})
    over = {"n_examples": 100, "decoded": (100, 100), "speedups": (a.speedup, b.speedup), "qualities": (41.0, 41.0)}
    return Compared(Pair(a, b, {}), **over, latency=None, baseline_latency=None, unfit=None, quality=None)


def test_a_side_that_was_timed_on_a_busy_machine_is_named() -> None:
    (note,) = notes([compared(busy_elsewhere_percent=74.4)], {}, {}, "")
    assert note.startswith("B: 1 of 1 point was timed while other programs used 74 % of the machine")
    assert notes([compared()], {}, {}, "") == []
