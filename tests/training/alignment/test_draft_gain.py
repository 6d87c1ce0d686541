"""The gains that an alignment's sweep shows."""

from __future__ import annotations

import pytest

from bild_lab.lab.analysis.pareto import best_at_loss
from bild_lab.lab.schema.result import Result
from bild_lab.training.alignment.draft_gain import gains
from tests.report.sample import sample_result, with_quality


def point(policy: str, speedup: float, quality: float, **knobs: float) -> Result:
    result = sample_result(policy, knobs, speedup, acceptance_rate=0.8, tokens_per_target_call=3.5)
    return with_quality(result, value=quality, baseline=40.0, difference=quality - 40)


def test_without_a_point_at_a_loss_there_is_no_gain() -> None:
    found = gains(point("speculative", 1.4, 40.0), [], [None, None])
    assert found["bild_speedup_at_no_loss"] is found["bild_difference_at_one_point"] is None


def test_gains_are_the_best_points_and_the_undominated_ones() -> None:
    results = [
        point("speculative", 1.4, 40.0),
        point("bild", 1.5, 40.0, fallback=0.7),
        point("bild", 2.0, 39.1, fallback=0.5),
        point("bild", 1.9, 39.0, fallback=0.6),
        point("bild", 2.5, 30.0, fallback=0.3),
    ]
    best = [best_at_loss(results[1:], loss) for loss in (0.0, 1.0)]
    assert gains(results[0], results[1:], best) == {
        "target_quality": 40.0,
        "acceptance_rate": 0.8,
        "tokens_per_target_call": 3.5,
        "speculative_speedup": 1.4,
        "bild_speedup_at_no_loss": 1.5,
        "bild_difference_at_no_loss": 0.0,
        "bild_speedup_at_one_point": 2.0,
        "bild_difference_at_one_point": pytest.approx(-0.9),
        "pareto": [
            {"fallback": 0.3, "latency": 0.4, "quality": 30.0},
            {"fallback": 0.5, "latency": 0.5, "quality": 39.1},
            {"fallback": 0.7, "latency": 1 / 1.5, "quality": 40.0},
        ],
    }
