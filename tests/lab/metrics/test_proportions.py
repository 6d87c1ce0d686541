"""Shares of right examples: their intervals hold, and equal shares seldom look different."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from scipy.stats import binom

from bild_lab.lab.metrics.proportions import (
    RIGHT,
    WRONG,
    are_right_or_wrong,
    difference_interval,
    exact_p_value,
    gained_and_lost,
    score_statistic,
    share_interval,
    two_sided_p_value,
)
from bild_lab.lab.metrics.quality import score_pool, score_values


def tables(examples: int, gained: float, lost: float) -> Iterator[tuple[int, int, float]]:
    """Every number of gained and lost examples, with its chance."""
    of_others = min(1.0, gained / (1 - lost))
    for fewer in range(int(binom.ppf(1 - 1e-9, examples, lost)) + 1):
        chance = binom.pmf(fewer, examples, lost)
        more = np.arange(examples - fewer + 1)
        for count, share in zip(more, binom.pmf(more, examples - fewer, of_others), strict=True):
            if chance * share > 1e-12:
                yield int(count), fewer, chance * share


def test_wilsons_interval_is_the_published_one() -> None:
    """Newcombe (1998), Statistics in Medicine 17, 857-872, Table I, method 3."""
    for right, count, ends in (
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ):
        found = share_interval([RIGHT] * right + [WRONG] * (count - right))
        assert found == pytest.approx(np.multiply(100, ends), abs=6e-3)
    assert share_interval([RIGHT] * 20) == pytest.approx((83.89, 100), abs=6e-3)
    for count in range(1, 60):  # fault: of 29 right ones it ended below 100, which they have
        assert share_interval([RIGHT] * count)[1] == 100 and share_interval([WRONG] * count)[0] == 0


def test_tangos_interval_is_the_published_one_and_turns_round_with_its_sides() -> None:
    """Fagerland, Lydersen and Laake (2017), chapter 8."""
    for gained, lost, pairs, ends, digits in (
        (6, 16, 161, (-12.40, -0.54), 6e-3),
        (1, 7, 21, (-51.7, -2.6), 6e-2),
    ):
        low, high = difference_interval(gained, lost, pairs)
        assert (low, high) == pytest.approx(ends, abs=digits)
        assert difference_interval(lost, gained, pairs) == pytest.approx((-high, -low))
    assert difference_interval(0, 9, 9)[0] == -100 and difference_interval(9, 0, 9)[1] == 100


def test_texts_that_differ_and_are_as_right_leave_a_difference_open() -> None:
    """Fault: the bootstrap of a hundred equal outcomes said [0, 0], and [0, +7.5] of one gained in
    forty.
    """
    right = [RIGHT] * 60 + [WRONG] * 40
    found = score_values("pass@1", right, right, different=30)
    assert (found.difference.low, found.difference.high) == pytest.approx((-3.70, 3.70), abs=0.01)
    assert found.difference.p_value == 1 and found.score.low < 60 < found.score.high
    gained = score_values("pass@1", [RIGHT] * 32 + [WRONG] * 8, [RIGHT] * 31 + [WRONG] * 9)
    assert gained.difference.low < -5 and gained.difference.high > 10
    all_right = score_values("pass@1", [RIGHT] * 20, [RIGHT] * 20, different=0)
    assert all_right.score.low < 84 and all_right.score.high == 100
    # texts that are the baseline's own are no sample of a difference
    assert (all_right.difference.low, all_right.difference.high) == (0, 0)
    # equal texts may be the own baseline's of one side alone
    agreeing = score_values("agreement", [RIGHT] * 20, [RIGHT] * 15 + [WRONG] * 5, different=0)
    assert 0 < agreeing.difference.low < 25 < agreeing.difference.high
    ((_, pooled), (_, same)) = score_pool(
        "exact_match", ["a", "a", "b"], [["a"]] * 3, [[0] * 50, [1] * 50], [1] * 50
    )
    assert pooled.low < -5 and (same.low, same.high) == (0, 0)


def test_turns_of_a_conversation_are_no_independent_examples() -> None:
    right = [RIGHT, WRONG] * 20
    turns = [place // 2 for place in range(40)]
    together = score_values("pass@1", right, right, conversations=turns, different=9)
    assert (together.score.low, together.score.high) == (50, 50)  # every conversation has one right


def test_a_length_of_a_hundred_tokens_is_no_right_example() -> None:
    """Fault: where the limit cut all texts at 100 tokens, they were tested as all right."""
    cut, shorter = [100.0] * 30, [100.0] * 20 + [0.0] * 10
    found = score_values("length", cut, shorter, margin=5)
    assert (found.score.low, found.score.high) == (100, 100) and found.difference.low > 0
    assert found.score.non_inferiority.test == "bootstrap"


def test_values_between_right_and_wrong_are_no_shares() -> None:
    assert are_right_or_wrong([0.0, 100.0], [100.0]) and not are_right_or_wrong([0.0, 99.9], [0.0])
    assert gained_and_lost([100.0, 0.0, 0.0, 100.0], [0.0, 100.0, 0.0, 100.0]) == (1, 1)


@pytest.mark.parametrize("difference", [-0.3, -0.05, 0.0, 0.2])
def test_an_exact_p_value_is_the_largest_that_any_shares_give(difference: float) -> None:
    examples = 12
    for gained, lost in ((0, 0), (1, 0), (0, 2), (3, 1), (12, 0), (0, 12), (5, 7)):
        observed = score_statistic(gained, lost, examples, difference) - 1e-9
        largest = 0.0
        least = max(0.0, -difference)
        for share in least + ((1 - difference) / 2 - least) * np.linspace(0, 1, 101) ** 2:
            chances = tables(examples, max(0.0, share + difference), share)
            largest = max(
                largest,
                sum(
                    chance
                    for more, fewer, chance in chances
                    if score_statistic(more, fewer, examples, difference) >= observed
                ),
            )
        found = exact_p_value(gained, lost, examples, difference)
        assert found == pytest.approx(largest, abs=1e-6), (gained, lost)


def test_examples_that_are_all_alike_show_what_chance_cannot_hide() -> None:
    """One that is lost with a chance of 5 % is missing among 58 in 5.1 of 100 cases."""
    assert exact_p_value(0, 0, 58, -0.05) == pytest.approx(0.95**58)
    assert exact_p_value(0, 0, 59, -0.05) == pytest.approx(0.95**59)
    assert 0.95**59 < 0.05 < 0.95**58
    assert two_sided_p_value(5, 0, 5) == pytest.approx(2 * 0.5**5)


@pytest.mark.parametrize(("examples", "margin"), [(25, 0.1), (52, 0.05), (100, 0.05)])
def test_a_loss_of_the_whole_margin_is_called_none_in_at_most_five_of_a_hundred(
    examples: int, margin: float
) -> None:
    """Fault: by the normal distribution in 6.9 at 52 examples, of which none was lost."""
    for gained in (0.0, 0.005, 0.02, 0.05, 0.15):
        error = sum(
            chance
            for more, fewer, chance in tables(examples, gained, gained + margin)
            if exact_p_value(more, fewer, examples, -margin) <= 0.05
        )
        assert error <= 0.0505, gained


@pytest.mark.slow
@pytest.mark.parametrize("examples", [20, 40, 100])
@pytest.mark.parametrize(("gained", "lost"), [(0.02, 0.02), (0.01, 0.05), (0.1, 0.1), (0.05, 0.2)])
def test_tangos_interval_and_the_two_sided_test_err_in_about_five_of_a_hundred(
    examples: int, gained: float, lost: float
) -> None:
    """Exactly, over all tables that such a system can give."""
    held = beyond = 0.0
    for more, fewer, chance in tables(examples, gained, lost):
        low, high = difference_interval(more, fewer, examples)
        held += chance * (low <= 100 * (gained - lost) <= high)
        beyond += chance * (two_sided_p_value(more, fewer, examples) < 0.05)
    assert 0.92 < held
    assert gained != lost or beyond <= 0.05
