"""Estimates from timings and from rounds, on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.statistics import (
    acceptance_by_position,
    acceptance_rate,
    clock_noise,
    conversations_of,
    corrected_for_choice,
    error_of_median,
    judged_by_position,
    latency_summary,
    nothing_accepted,
    paired_speedup,
    ratio_of_totals,
    with_clock_noise,
)
from tests.report.sample import sample_result, with_quality


def test_a_speedup_is_total_time_over_total_time_of_the_median_repeats() -> None:
    baseline = np.array([[2.0, 0.1, 90.0], [6.0, 6.0, 6.0]])
    method = np.array([[1.0, 1.0, 1.0], [3.0, 0.1, 90.0]])
    speedup = paired_speedup(baseline, method)
    assert speedup.value == 2.0
    assert (speedup.low, speedup.high, speedup.median) == (2.0, 2.0, 2.0)


def test_the_interval_of_a_speedup_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        work = rng.uniform(0.5, 2.0, size=(60, 1))
        baseline = work * rng.lognormal(0, 0.1, size=(60, 3))
        method = (
            work / 1.5 * rng.lognormal(0, 0.3, size=(60, 1)) * rng.lognormal(0, 0.1, size=(60, 3))
        )
        speedup = paired_speedup(baseline, method)
        covered += speedup.low <= 1.5 / np.exp(0.3**2 / 2) <= speedup.high
    assert 0.88 < covered / 200 < 0.99


@pytest.mark.parametrize("texts", [8, 20, 100])
def test_the_interval_of_few_texts_of_unequal_lengths_holds_as_well(texts: int) -> None:
    """Fault: a bootstrap of 8 texts held in 86 of 100 cases."""
    rng, covered, trials = np.random.default_rng(0), 0, 2000
    for _ in range(trials):
        work = 0.05 + rng.lognormal(0, 0.5, texts)
        method = work / 1.5 * rng.lognormal(0, 0.2, texts)
        _, low, high = ratio_of_totals([work], [method])
        covered += low <= 1.5 / np.exp(0.2**2 / 2) <= high
    assert 0.92 < covered / trials < 0.97


def test_pairing_takes_the_length_of_examples_out_of_the_interval() -> None:
    work = np.linspace(0.1, 10, 50)[:, None]
    speedup = paired_speedup(2 * work, work)
    assert speedup.low == pytest.approx(2.0) == speedup.high


def test_an_interval_is_that_of_how_far_each_text_is_from_the_mean() -> None:
    """By hand: of the shares 0.5 and 1.5 of the mean, beside 1 and 1, the error is 0.5."""
    value, low, high = ratio_of_totals([np.array([1.0, 3.0])], [np.array([1.0, 1.0])])
    reach = np.exp(12.7062 * 0.5)  # Student's quantile of one degree of freedom
    assert (value, low, high) == pytest.approx((2.0, 2.0 / reach, 2.0 * reach), rel=1e-4)
    three = [np.array([1.0, 2.0, 6.0]), np.array([4.0, 4.0, 1.0])]
    product = ratio_of_totals(three, [np.array([2.0, 2.0, 2.0])])
    terms = np.array([1 / 3 + 4 / 3, 2 / 3 + 4 / 3, 2 + 1 / 3])
    reach = np.exp(4.30265 * terms.std(ddof=1) / np.sqrt(3))
    assert product == pytest.approx((13.5, 13.5 / reach, 13.5 * reach), rel=1e-5)


def test_one_text_has_an_interval_of_no_width_and_so_has_a_total_of_nothing() -> None:
    assert ratio_of_totals([np.array([3.0])], [np.array([2.0])]) == (1.5, 1.5, 1.5)
    assert ratio_of_totals([np.zeros(3)], [np.ones(3)]) == (0.0, 0.0, 0.0)


def test_turns_of_a_conversation_are_no_independent_examples() -> None:
    """A second turn that is the first once more says nothing new, so the interval stays."""
    rng = np.random.default_rng(5)
    baseline, method = rng.uniform(1, 2, (2, 30, 1))
    once = paired_speedup(baseline, method)
    twice = [np.repeat(seconds, 2, axis=0) for seconds in (baseline, method)]
    conversations = conversations_of([str(turn // 2) for turn in range(60)])
    together = paired_speedup(*twice, conversations=conversations)
    assert [together.low, together.high] == pytest.approx([once.low, once.high])
    apart = paired_speedup(*twice)
    assert apart.high - apart.low < 0.8 * (once.high - once.low)
    assert conversations_of(["b", "a", "b", "c"]) == [0, 1, 0, 2]
    assert conversations_of(["81", "82", "81/2", "81/3"]) == [0, 1, 0, 0]
    assert conversations_of(["b", "a"]) is None  # draws are those of single texts


def test_latency_is_summed_up_over_examples() -> None:
    summary = latency_summary(np.array([[1.0, 9.0, 0.5], [3.0, 3.0, 3.0]]))
    assert (summary.median, summary.p95, summary.mean, summary.total) == (
        2.0,
        pytest.approx(2.9),
        2.0,
        4.0,
    )


def test_the_acceptance_rate_leaves_out_tokens_that_were_never_judged() -> None:
    assert acceptance_rate([(5, 5), (5, 1), (0, 0)]) == 6 / 7
    assert acceptance_rate([(0, 0)]) is None


def test_acceptance_by_position_counts_rounds_that_got_there() -> None:
    assert acceptance_by_position([(3, 3), (3, 1), (2, 2), (3, 0)]) == [3 / 4, 2 / 3, 1.0]
    assert acceptance_by_position([(3, 0)]) == [0.0]
    assert acceptance_by_position([(2, 2), (2, 0)]) == [1 / 2, 1.0]
    assert acceptance_by_position([(0, 0)]) == acceptance_by_position([]) == []


def test_rounds_that_drafted_nothing_do_not_count_as_nothing_accepted() -> None:
    assert nothing_accepted([(3, 0), (0, 0), (3, 1), (2, 2), (1, 0)]) == 0.5
    assert nothing_accepted([(0, 0)]) is None


def test_positions_behind_a_rejection_are_unobserved_and_not_rejected() -> None:
    assert judged_by_position([(3, 3), (3, 1), (2, 2), (3, 0), (0, 0)]) == [
        [3, 1, 0],
        [2, 1, 1],
        [1, 0, 2],
    ]
    assert judged_by_position([(0, 0)]) == judged_by_position([]) == []


def test_the_error_of_the_clock_is_half_the_interval_over_the_repeats_and_not_over_the_texts() -> (
    None
):
    work = np.array([[1.0], [9.0]])  # texts of very different speedups
    method = np.array([[1.0], [3.0]])
    steady = [work * [1, 2, 3], method * [1, 2, 3]]
    assert clock_noise(*steady) == pytest.approx(0, abs=1e-12) and paired_speedup(*steady).low < 2
    shaken = clock_noise(work * [1.0, 1.1, 1.21], method * [1, 1, 1])
    # Student's t of two degrees of freedom, 4.3027; the logarithms' standard deviation is that of
    # 0, 1 and 2 steps
    wider = error_of_median(3)
    assert shaken == pytest.approx(1.1 ** (4.30265 / np.sqrt(3) * wider) - 1, rel=1e-5)
    assert clock_noise(work, method) is None


def test_the_clock_of_a_batch_is_as_good_as_all_repeats_of_all_its_blocks_show() -> None:
    rng = np.random.default_rng(1)
    blocks = [0, 0, 0, 1, 1, 2]
    method = rng.uniform(1, 2, size=(6, 1)) * np.ones(4)
    shaken = method * rng.lognormal(0, 0.1, size=(3, 4))[blocks]
    ratios = np.log(
        np.array([shaken[[0, 3, 5], repeat] for repeat in range(4)]) / method[[0, 3, 5], 0]
    )
    shares = np.array([method[:3].sum(), method[3:5].sum(), method[5:].sum()]) / method.sum()
    squares = (ratios - ratios.mean(0)) ** 2
    variance = (
        squares.sum() / 9 * (shares**2).sum() / 4
    )  # three blocks have nine degrees of freedom
    found = clock_noise(shaken, method, blocks)
    wider = error_of_median(4)
    assert found == pytest.approx(np.exp(2.26216 * np.sqrt(variance) * wider) - 1, rel=1e-4)


def test_a_median_is_known_less_well_than_a_mean() -> None:
    """Of three normal values its variance is 1 - √3/π, of many π/2 of the mean's."""
    assert error_of_median(2) == pytest.approx(1)
    assert error_of_median(3) == pytest.approx(np.sqrt(3 * (1 - np.sqrt(3) / np.pi)), rel=5e-3)
    assert 1.2 < error_of_median(15) < np.sqrt(np.pi / 2)


def test_the_error_of_the_clock_covers_the_truth_although_medians_of_repeats_count() -> None:
    rng, covered, trials, blocks = np.random.default_rng(0), 0, 600, np.arange(16)
    for _ in range(trials):
        shaken = rng.lognormal(0, 0.05, size=(2, 16, 9))
        noise = clock_noise(*shaken, blocks)
        error = abs(np.log(paired_speedup(*shaken, blocks=blocks).value))
        covered += error <= np.log1p(noise)
    assert covered / trials > 0.93  # 0.88 by the error of a mean


def test_the_interval_of_a_batch_covers_the_truth_although_its_texts_share_their_clock() -> None:
    """A timing of a block is off by two percent, for all of its texts alike."""
    rng = np.random.default_rng(0)
    blocks = np.repeat([0, 1], 50)
    covered = {"in blocks": 0, "each for itself": 0}
    for _ in range(200):
        work = rng.uniform(0.5, 2.0, size=(100, 1))
        baseline, method = (
            work / speed * rng.lognormal(0, 0.02, size=(2, 3))[blocks] for speed in (1, 1.5)
        )
        intervals = {
            "in blocks": paired_speedup(baseline, method, blocks=blocks),
            "each for itself": paired_speedup(baseline, method),
        }
        for name, speedup in intervals.items():
            covered[name] += speedup.low <= 1.5 <= speedup.high
    assert covered["in blocks"] > 180 > 140 > covered["each for itself"]


def test_a_batch_that_was_timed_once_has_the_interval_of_its_texts() -> None:
    work, method = np.array([[1.0], [9.0]]), np.array([[1.0], [3.0]])
    once = paired_speedup(work, method, blocks=[0, 0])
    assert once == paired_speedup(work, method) and (once.noise, once.repeats) == (None, 1)


def test_an_interval_leaves_out_two_and_a_half_percent_on_either_side() -> None:
    """The mean of many values has 1.96 of its deviations on either side."""
    baseline = np.random.default_rng(3).normal(10, 1, size=(400, 1))
    speedup = paired_speedup(baseline, np.ones((400, 1)))
    expected = 1.96 * baseline.std() / np.sqrt(400)
    assert speedup.value - speedup.low == pytest.approx(expected, rel=0.08)
    assert speedup.high - speedup.value == pytest.approx(expected, rel=0.08)


def test_beside_the_total_stands_the_median_of_the_speedups_of_single_examples() -> None:
    speedup = paired_speedup(np.array([[1.0], [2.0], [9.0]]), np.ones((3, 1)))
    assert (speedup.value, speedup.median) == (4.0, 2.0)


def test_the_error_of_a_clock_widens_each_side_from_its_own_width() -> None:
    wider = with_clock_noise(Speedup(2.0, 1.0, 2.5), [0.1])
    below, above = (np.hypot(np.log(ratio), np.log(1.1)) for ratio in (2.0, 1.25))
    assert (wider.low, wider.high) == pytest.approx((2 * np.exp(-below), 2 * np.exp(above)))


def test_a_choice_widens_what_a_point_has_an_interval_of_and_nothing_of_few_texts() -> None:
    point = sample_result("bild", {}, 1.5, -0.5)
    chosen = corrected_for_choice(point, 5)
    assert chosen.speedup.low < 1.45 and 1.55 < chosen.speedup.high
    assert chosen.quality.difference_low < point.quality.difference_low
    assert chosen.quality.difference_high > point.quality.difference_high
    alone = with_quality(point, difference=None, difference_low=None, difference_high=None)
    assert corrected_for_choice(alone, 5).speedup == chosen.speedup
    untimed = replace(point, speedup=Speedup())
    assert corrected_for_choice(untimed, 5).quality == chosen.quality
    assert corrected_for_choice(point, 1) == point
    few = replace(point, independent_texts=19)
    assert corrected_for_choice(few, 5) == few
    turns = corrected_for_choice(replace(point, independent_texts=25), 5)
    assert turns.speedup.low < chosen.speedup.low and turns.speedup.high > chosen.speedup.high
