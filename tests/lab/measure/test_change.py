"""What a method changed in the texts."""

from __future__ import annotations

import pytest

from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.summary import change_of
from bild_lab.lab.measure.timing import Timed


def of(*texts: list[int]) -> list[Timed]:
    return [Timed(text, [1.0], Trace()) for text in texts]


TIMED = {
    "method": of([1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [4, 5, 6]),
    "baseline": of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3], [5, 5]),
}
LIKELY = {"method": [-4.0, -4.0, -1.0, -4.0], "baseline": [-4.0, -2.0, -1.5, -1.0]}


def test_changed_texts_are_counted_with_where_they_part_and_how_long_they_are() -> None:
    found = change_of(TIMED, None, greedy=True, seed=0)
    assert (found.changed, found.first_difference) == (3 / 4, 2)  # behind 3, 2 and 0 tokens
    assert found.length_ratio == 1.0 and found.length_ratio_low < 1 < found.length_ratio_high
    assert found.log_probability is None


def test_the_log_probability_is_over_all_tokens_and_its_difference_is_paired() -> None:
    found = change_of(TIMED, LIKELY, greedy=True, seed=0)
    assert found.log_probability == pytest.approx(-13 / 13)
    assert found.log_probability_baseline == pytest.approx(-8.5 / 13)
    assert found.log_probability_difference == pytest.approx(-4.5 / 13)
    assert (
        found.log_probability_difference_low <= -4.5 / 13 <= found.log_probability_difference_high
    )
    same = change_of(
        dict.fromkeys(TIMED, TIMED["method"]), dict.fromkeys(TIMED, LIKELY["method"]), True, 0
    )
    assert (same.changed, same.first_difference, same.length_ratio) == (0, None, 1)
    assert (same.log_probability_difference, same.log_probability_difference_low) == (0, 0)


def test_turns_of_a_conversation_are_resampled_together() -> None:
    found = change_of(TIMED, LIKELY, True, 0, conversations=[0, 0, 0, 0])
    for name in ("length_ratio", "log_probability", "log_probability_difference"):
        assert getattr(found, f"{name}_low") == pytest.approx(getattr(found, name))
        assert getattr(found, f"{name}_high") == pytest.approx(getattr(found, name))


def test_sampled_texts_differ_anyway_and_without_a_baseline_nothing_is_compared() -> None:
    sampled = change_of(TIMED, LIKELY, greedy=False, seed=0)
    assert (
        sampled.changed is None and sampled.first_difference is None and sampled.length_ratio == 1.0
    )
    alone = change_of(
        {"method": TIMED["method"]}, {"method": LIKELY["method"]}, greedy=True, seed=0
    )
    assert (
        alone.length_ratio is None
        and alone.changed is None
        and alone.log_probability_difference is None
    )
    assert alone.log_probability == pytest.approx(-1)
