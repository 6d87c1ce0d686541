"""The theorem's forms against the paper's printed equations and numbers."""

from __future__ import annotations

from math import comb

import pytest

from bild_lab.engine.methods.ppd.theory import (
    compute_per_time_unit,
    compute_per_token,
    expected_compute,
    expected_latency,
    latency_per_token,
)
from bild_lab.errors import UserError
from bild_lab.papers.theory import DATASETS, LAYERS, TOP_KS, match_rate
from tests.engine.methods.ppd.runs import compute_of_runs, latency_of_runs

RATES = (0.0, 0.2163, 0.5, 0.7415, 1.0)


@pytest.mark.parametrize("rate", RATES)
def test_at_half_the_layers_a_long_text_follows_equations_2_4_and_6(rate: float) -> None:
    assert latency_per_token(40, 20, rate) == pytest.approx(40 * (1 - rate / 2))
    for k in TOP_KS:
        assert compute_per_time_unit(40, 20, rate, k) == pytest.approx((k + 2 - rate) / (2 - rate))
        assert compute_per_token(40, 20, rate, k) / 40 == pytest.approx((2 + k - rate) / 2)


def test_figure_2_has_the_numbers_that_the_paper_reads_from_it() -> None:
    """§4.3: latency 0.629 to 0.892, compute 1.561 to 4.973; SQuAD trained at k = 3:

    34 % for 3.2 times (truncated).
    """
    best, worst = match_rate("SQuAD", 5, True, 20), match_rate("WMT", 1, False, 20)
    assert round(latency_per_token(40, 20, best) / 40, 3) == 0.629
    assert round(latency_per_token(40, 20, worst) / 40, 3) == 0.892
    assert round(compute_per_time_unit(40, 20, worst, 1), 3) == 1.561
    assert round(compute_per_time_unit(40, 20, best, 5), 3) == 4.973
    example = match_rate("SQuAD", 3, True, 20)
    assert round(1 - latency_per_token(40, 20, example) / 40, 2) == 0.34
    assert int(10 * compute_per_time_unit(40, 20, example, 3)) / 10 == 3.2
    every = [
        match_rate(dataset, k, trained, 20)
        for dataset in DATASETS
        for k in TOP_KS
        for trained in (False, True)
    ]
    assert (min(every), max(every), LAYERS) == (worst, best, 40)


def test_the_run_of_figure_3_takes_d_plus_two_exits_and_four_processes_for_three_finishes() -> None:
    d, exit_layer, k = 40, 25, 3
    assert latency_of_runs([3], d, exit_layer) == d + 2 * exit_layer
    assert compute_of_runs([3], d, exit_layer, k) == d + 2 * exit_layer + 3 * (d - exit_layer) * k


@pytest.mark.parametrize("runs", [[1], [4], [1, 1, 1], [3, 1, 5, 2]])
def test_runs_at_half_the_layers_follow_equations_1_and_3(runs: list[int]) -> None:
    d, k = 40, 3
    assert latency_of_runs(runs, d, 20) == sum(d * (x + 1) / 2 for x in runs)
    assert compute_of_runs(runs, d, 20, k) == sum(((k + 1) * d * x + d) / 2 for x in runs)


@pytest.mark.parametrize("exit_layer", [4, 5, 6, 7])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_theorem_is_the_mean_over_all_patterns_of_runs(exit_layer: int, rate: float) -> None:
    """N − 1 of ℓ − 1 predictions fail (Appendix D); what a text takes depends on N alone."""
    tokens, layers, k = 6, 7, 2
    latency = compute = 0.0
    for failures in range(tokens):
        chance = (
            comb(tokens - 1, failures) * (1 - rate) ** failures * rate ** (tokens - 1 - failures)
        )
        runs = [1] * failures + [tokens - failures]
        latency += chance * latency_of_runs(runs, layers, exit_layer)
        compute += chance * compute_of_runs(runs, layers, exit_layer, k)
    assert expected_latency(tokens, layers, exit_layer, rate) == pytest.approx(latency)
    assert expected_compute(tokens, layers, exit_layer, rate, k) == pytest.approx(compute)


def test_one_token_takes_all_layers_whatever_is_predicted() -> None:
    assert expected_latency(1, 12, 7, 0.9) == 12
    assert expected_compute(1, 12, 7, 0.9, 3) == 12 + 3 * 5


def test_an_odd_number_of_layers_is_halved_upwards() -> None:
    assert expected_latency(1, 5, 3, 0.5) == 5
    with pytest.raises(UserError, match=">= 3 and <= 5, got 2; half of the 5 layers"):
        expected_latency(1, 5, 2, 0.5)
