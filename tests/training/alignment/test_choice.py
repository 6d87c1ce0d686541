"""BiLD's thresholds, chosen on validation for the drafter that is compared."""

from __future__ import annotations

from dataclasses import replace

from bild_lab.lab.screening.rows import NUMBERS, Row
from bild_lab.training.alignment.choice import fastest


def row(speedup: float, difference: float) -> Row:
    numbers = dict.fromkeys(NUMBERS, 0) | {"predicted_speedup": speedup, "quality_difference": difference}
    return Row(policy="bild", knobs={}, split="validation", n_examples=3, **numbers)


def test_the_fastest_point_within_a_loss_is_chosen() -> None:
    rows = [row(1.2, 0.3), row(1.5, 0.0), row(1.9, -1.0), row(2.5, -1.01)]
    assert [fastest(rows, loss) for loss in (0.0, 1.0, 2.0)] == [1, 2, 3]
    assert fastest(rows[2:], 0.0) is None
    assert fastest([replace(rows[0], quality=1.0), replace(rows[0], quality=2.0)], 0.0) == 1
