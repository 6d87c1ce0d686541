"""BiLD's thresholds, chosen on validation for the drafter that is compared."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import OmegaConf

from bild_lab.lab.screening.rows import NUMBERS, Row
from bild_lab.training.alignment.choice import fastest, screening_of


def row(speedup: float, difference: float) -> Row:
    numbers = dict.fromkeys(NUMBERS, 0) | {"predicted_speedup": speedup, "quality_difference": difference}
    return Row(policy="bild", knobs={}, split="validation", n_examples=3, **numbers)


def test_the_fastest_point_within_a_loss_is_chosen() -> None:
    rows = [row(1.2, 0.3), row(1.5, 0.0), row(1.9, -1.0), row(2.5, -1.01)]
    assert [fastest(rows, loss) for loss in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert fastest(rows[2:], 0.0) is None
    assert fastest([replace(rows[0], quality=1.0), replace(rows[0], quality=2.0)], 0.0) == 1


def test_thresholds_are_chosen_on_more_texts_than_are_measured() -> None:
    config = OmegaConf.create({"name": "a", "policy": {"name": "bild"}, "dataset": {"split": "test", "limit": 3}})
    for limit in (None, 50):
        grid = screening_of([config], "validation", limit).grid
        (candidate,) = grid.candidates
        limits = {split: grid.config(candidate, split, "a").dataset.limit for split in ("validation", "test")}
        assert limits == {"validation": limit, "test": 3}
