"""Bars that leave the axes end at them with an arrow; the axes make room for bars, within limits."""

from __future__ import annotations

from bild_lab.lab.results.groups import Position, by_setting
from bild_lab.report.bars import Cut, cut_at, with_bars
from tests.report.sample import sample_baseline, sample_result, sample_sweep, with_quality

LIMITS = ((0.5, 1.5), (30.0, 40.0))


def test_a_bar_inside_the_axes_is_drawn_whole() -> None:
    position = Position(1.0, 0.9, 1.1, 35.0, 34.0, 36.0)
    assert cut_at(position, LIMITS) == (position, [])


def test_a_bar_that_leaves_the_axes_ends_there_with_an_arrow() -> None:
    inside, cuts = cut_at(Position(1.0, 0.4, 1.6, 35.0, 20.0, 45.0), LIMITS)
    assert inside == Position(1.0, 0.5, 1.5, 35.0, 30.0, 40.0)
    assert cuts == [
        Cut(0.5, 35.0, "left", 0.4),
        Cut(1.5, 35.0, "right", 1.6),
        Cut(1.0, 30.0, "down", 20.0),
        Cut(1.0, 40.0, "up", 45.0),
    ]


def test_axes_make_room_for_bars_by_half_of_their_length_at_most() -> None:
    def vertical(low: float, high: float) -> tuple[float, float]:
        result = with_quality(sample_result("bild", {}, 1.5), difference_low=low, difference_high=high)
        (group,) = by_setting([sample_baseline(), result])
        return group.limits()[1]

    narrow = vertical(-0.1, 0.1)
    length = narrow[1] - narrow[0]
    some, wide = vertical(-1.5, 0.1), vertical(-30, 30)
    assert some[1] == narrow[1] and narrow[0] - length / 2 < some[0] < 41.0 - 1.5
    assert wide == (narrow[0] - length / 2, narrow[1] + length / 2)


def test_of_many_points_the_front_and_the_notable_ones_have_bars() -> None:
    (group,) = by_setting(sample_sweep())
    barred = with_bars(group)
    assert {id(one) for one in group.front()} <= {id(one) for one in barred}
    assert 0 < len(barred) < len(group.results) - 1
    (few,) = by_setting(sample_sweep()[:6])
    assert len(with_bars(few)) == 5  # without the baseline
