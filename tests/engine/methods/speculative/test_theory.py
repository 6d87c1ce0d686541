"""The closed forms of speculative decoding against simulation, against our acceptance rule and
against the paper.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.theory import (
    expected_tokens,
    operations_increase,
    optimal_window,
    oracle_improvement,
    walltime_improvement,
)
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling

ROUNDS = 400_000
CASES = [(0.3, 1), (0.6, 2), (0.8, 5), (0.9, 10)]


def simulated_tokens(acceptance_rate: float, window: int) -> float:
    """Tokens per target call: the drafted ones before the first rejection, and the target's own."""
    accepted = np.random.default_rng(0).random((ROUNDS, window)) < acceptance_rate
    return float(np.cumprod(accepted, axis=1).sum(axis=1).mean()) + 1


def distributions(n: int, vocab: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q that overlap, but not everywhere: [n, vocab] each."""
    logits = torch.randn(
        2, n, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    p, q = (2 * logits).softmax(-1)
    return p, (p + q) / 2


@pytest.mark.parametrize(("acceptance_rate", "window"), CASES)
def test_expected_tokens_are_those_of_simulated_rounds(acceptance_rate: float, window: int) -> None:
    assert expected_tokens(acceptance_rate, window) == pytest.approx(
        simulated_tokens(acceptance_rate, window), rel=0.006
    )


@pytest.mark.parametrize(("acceptance_rate", "window"), CASES)
@pytest.mark.parametrize("cost_ratio", [0.05, 0.3])
def test_walltime_and_operations_are_those_of_a_simulated_clock(
    acceptance_rate: float, window: int, cost_ratio: float
) -> None:
    tokens = simulated_tokens(acceptance_rate, window)
    # drafter steps one by one, all verified in the time of one token
    round_s = window * cost_ratio + 1.0
    round_operations = window * cost_ratio + (window + 1)
    assert walltime_improvement(acceptance_rate, window, cost_ratio) == pytest.approx(
        tokens / round_s, rel=0.006
    )
    assert operations_increase(acceptance_rate, window, cost_ratio) == pytest.approx(
        round_operations / tokens, rel=0.006
    )


def test_an_oracle_drafts_exactly_what_will_be_accepted() -> None:
    acceptance_rate, cost_ratio = 0.8, 0.1
    accepted = np.random.default_rng(0).geometric(1 - acceptance_rate, ROUNDS) - 1
    simulated = (accepted + 1).sum() / (1 + cost_ratio * accepted).sum()
    assert oracle_improvement(acceptance_rate, cost_ratio) == pytest.approx(simulated, rel=0.004)


@pytest.mark.slow
def test_our_rule_emits_as_many_tokens_per_call_as_theory_predicts_from_p_and_q() -> None:
    p, q = distributions(1)
    window, rounds = 3, 4000
    generator = torch.Generator().manual_seed(0)
    request = Request(Source((0,)), Limits(1, 1), Sampling(temperature=1.0), generator)
    # [rounds, window]
    drafted = torch.multinomial(q.expand(rounds, -1), window, replacement=True, generator=generator)
    logits, probs = p.log().expand(window + 1, -1), q.expand(window, -1)
    rule = SpeculativeSampling()
    emitted = [
        len(rule(Draft(tokens, probs=probs), logits, request).path) + 1 for tokens in drafted
    ]
    predicted = expected_tokens(float(p.minimum(q).sum()), window)  # Corollary 3.6
    assert sum(emitted) / rounds == pytest.approx(predicted, abs=0.06)  # three standard errors


@pytest.mark.parametrize(
    ("acceptance_rate", "window", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_the_paper(
    acceptance_rate: float, window: int, operations: float, speed: float
) -> None:
    assert round(operations_increase(acceptance_rate, window, 0.0), 2) == operations
    assert round(walltime_improvement(acceptance_rate, window, 0.0), 2) == speed


def test_the_speed_of_a_bigram_drafter_in_the_paper() -> None:
    assert round(walltime_improvement(0.2, 3, 0.0), 2) == 1.25  # §3.6 and §4.2


def test_the_speeds_of_lenient_argmax_decoding_in_the_paper() -> None:
    speeds = [
        walltime_improvement(acceptance_rate, 8, 0.015)
        for acceptance_rate in (0.75, 0.75, 0.8, 0.87)
    ]
    assert [round(speed, 1) for speed in speeds] == [3.3, 3.3, 3.9, 4.9]  # §A.5


def test_an_oracle_is_up_to_60_percent_faster_than_a_fixed_window() -> None:
    gains = [
        oracle_improvement(rate, cost)
        / walltime_improvement(rate, optimal_window(rate, cost), cost)
        for rate in np.linspace(0.5, 0.98, 49).tolist()
        for cost in (0.01, 0.02, 0.05, 0.1)
    ]
    assert min(gains) > 1
    assert 1.55 < max(gains) < 1.6  # §3.5


@pytest.mark.parametrize("cost_ratio", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_no_window_is_faster_than_the_optimal_one(cost_ratio: float) -> None:
    for acceptance_rate in np.linspace(0, 1, 41).tolist():
        speeds = [walltime_improvement(acceptance_rate, window, cost_ratio) for window in range(13)]
        found = optimal_window(acceptance_rate, cost_ratio, max_window=12)
        assert speeds[found] == pytest.approx(max(speeds), rel=1e-12)
        assert max(speeds[:found], default=0.0) < speeds[found]  # the smallest of equally good ones


def test_drafting_pays_only_above_the_cost_ratio() -> None:
    assert [optimal_window(rate, 0.3) for rate in (0.0, 0.29)] == [0, 0]
    # whatever the rounding
    assert {optimal_window(rate, rate) for rate in np.linspace(0, 1, 201).tolist()} == {0}
    assert optimal_window(0.31, 0.3) == 1
    assert optimal_window(0.8, 0.05) == 8
    assert (
        optimal_window(1.0, 0.3, max_window=7) == 7 and optimal_window(1.0, 0.3, max_window=0) == 0
    )


def test_a_window_between_whole_ones_follows_the_closed_form() -> None:
    assert expected_tokens(0.5, 1.5) == pytest.approx((1 - 0.5**2.5) / 0.5)
    assert walltime_improvement(0.5, 1.5, 0.2) == pytest.approx((1 - 0.5**2.5) / 0.5 / 1.3)


def test_certain_acceptance_and_certain_rejection_are_exact() -> None:
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0
    assert walltime_improvement(1.0, 4, 0.25) == 2.5
    assert oracle_improvement(1.0, 0.25) == 4.0
    assert oracle_improvement(1.0, 0.0) == math.inf


def test_an_acceptance_rate_next_to_one_loses_no_digits() -> None:
    assert expected_tokens(1 - 1e-13, 9) == pytest.approx(10 - 45e-13, rel=1e-14)


def test_a_window_is_at_most_100_unless_asked_for_another() -> None:
    assert (optimal_window(1, 0.001), optimal_window(1, 0.001, max_window=7)) == (100, 7)
