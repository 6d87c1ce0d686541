"""The cost of a round is put together from parts, and keeps the steps that were measured."""

from __future__ import annotations

import pytest

from bild_lab.lab.shapes.acceptance import WatchedRound
from bild_lab.lab.shapes.costs import Costs, TimedRound, host_line, measured_rows, timed_rounds
from bild_lab.lab.shapes.window import DraftedRound, by_position, by_window


def test_both_sides_of_every_tile_are_measured() -> None:
    rows = measured_rows(64)
    assert {1, 2, 4, 8, 16, 17, 32, 33, 48, 49, 64} <= set(rows)
    assert max(measured_rows(20)) == 20


def test_a_measured_step_stays_a_step() -> None:
    costs = Costs({1: 1.0, 16: 2.0, 17: 5.0, 33: 4.0}, {1: 0.5, 2: 0.7}, (0.1, 0.01), plain_s=0.9)
    seconds = costs.round_s(33, 2)
    assert seconds[0] == 0.9  # the target alone has no drafter
    assert seconds[15] == pytest.approx(2.0 + 0.7 + 0.1 + 0.16)
    assert seconds[16] == pytest.approx(5.0 + 0.7 + 0.1 + 0.17)
    assert seconds[32] < seconds[16]


def test_a_round_lasts_until_the_next_one_begins() -> None:
    rounds = [WatchedRound(0, [], started, 0.1, rows) for started, rows in ((0.0, 9), (5.0, 3), (6.0, 4), (8.0, 1))]
    assert timed_rounds(rounds) == [TimedRound(3, 1.0, 0.1), TimedRound(4, 2.0, 0.1)]


def test_what_the_host_costs_is_what_forward_and_drafter_leave() -> None:
    forward_s = {1: 1.0, 16: 2.0}
    rounds = [TimedRound(1, 1.0 + 0.3 + 0.21, 0.3)] * 3 + [TimedRound(16, 2.0 + 0.3 + 0.2 + 0.16, 0.3)] * 5
    assert host_line(rounds, forward_s) == pytest.approx((0.2, 0.01))
    falling = [TimedRound(1, 1.5, 0.0), TimedRound(16, 2.1, 0.0)]  # noise: more rows cannot cost the host less
    assert host_line(falling, forward_s) == pytest.approx((0.3, 0.0))


def test_a_smaller_window_cuts_drafts_and_what_was_accepted_of_them() -> None:
    rounds = [DraftedRound(4, 4, 4), DraftedRound(4, 1, 4), DraftedRound(2, 0, 3)]
    costs = Costs({1: 1.0, 5: 1.0}, {1: 0.25}, (0.0, 0.0), plain_s=0.8)
    alone, one, two, three, four = by_window(rounds, 4, costs)
    assert (alone.tokens, alone.seconds) == (1.0, 0.8)
    assert [each.tokens for each in (one, two, three, four)] == pytest.approx([1 + 2 / 3, 2, 1 + 4 / 3, 1 + 5 / 3])
    assert [each.seconds for each in (one, two, three, four)] == pytest.approx([1.25, 1.5, 1.75, 1 + 11 / 12])
    assert by_position(rounds, 5) == pytest.approx([2 / 3, 1 / 2, 1, 1, 0])
