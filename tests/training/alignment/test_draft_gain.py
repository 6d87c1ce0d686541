"""The gains that an alignment's sweep shows."""

from __future__ import annotations

from bild_lab.lab.schema.result import Result
from bild_lab.training.alignment.draft_gain import gains
from tests.report.sample import sample_result, with_quality


def point(policy: str, speedup: float, quality: float, **knobs: float) -> Result:
    result = sample_result(policy, knobs, speedup, acceptance_rate=0.8, tokens_per_target_call=3.5)
    return with_quality(result, value=quality, baseline=40.0)


def test_gains_are_the_best_points_and_the_undominated_ones() -> None:
    results = [
        point("speculative", 1.4, 40.0),
        point("bild", 1.5, 40.0, fallback=0.7),
        point("bild", 2.0, 39.1, fallback=0.5),
        point("bild", 1.9, 39.0, fallback=0.6),
        point("bild", 2.5, 30.0, fallback=0.3),
    ]
    assert gains(results) == {
        "target_quality": 40.0,
        "acceptance_rate": 0.8,
        "tokens_per_target_call": 3.5,
        "speculative_speedup": 1.4,
        "bild_speedup_at_no_loss": 1.5,
        "bild_speedup_at_one_point": 2.0,
        "pareto": [
            {"fallback": 0.3, "latency": 0.4, "quality": 30.0},
            {"fallback": 0.5, "latency": 0.5, "quality": 39.1},
            {"fallback": 0.7, "latency": 1 / 1.5, "quality": 40.0},
        ],
    }
