"""The gains that an alignment's sweep shows, and how BiLD's thresholds are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from bild_lab.lab.analysis.statistics import best_at_loss
from bild_lab.lab.schema.result import Result
from bild_lab.lab.screening.rows import Row
from bild_lab.training.comparison import Comparison, fastest, gains
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


def row(speedup: float, difference: float) -> Row:
    own = {"policy": "bild", "knobs": {}, "predicted_speedup": speedup, "quality_difference": difference}
    return Row(**dict.fromkeys(Row.__dataclass_fields__, 0) | own)


def test_the_fastest_point_within_a_loss_is_chosen() -> None:
    rows = [row(1.2, 0.3), row(1.5, 0.0), row(1.9, -1.0), row(2.5, -1.01)]
    assert [fastest(rows, loss) for loss in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert fastest(rows[2:], 0.0) is None
    assert fastest([replace(rows[0], quality=1.0), replace(rows[0], quality=2.0)], 0.0) == 1


def test_thresholds_are_chosen_on_more_texts_than_are_measured() -> None:
    config = OmegaConf.create({"name": "a", "policy": {"name": "bild"}, "dataset": {"split": "test", "limit": 3}})
    values = {"path": None, "limit": 3, "window": 5, "fallback": [0.5], "rollback": [1.0]}
    for limit in (None, 50):
        comparison = Comparison(split="test", select="validation", select_limit=limit, **values)
        grid = comparison.grid([config])
        (candidate,) = grid.candidates
        limits = {split: grid.config(candidate, split, "a").dataset.limit for split in ("validation", "test")}
        assert limits == {"validation": limit, "test": 3}
