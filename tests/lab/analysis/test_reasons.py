"""Why a point is as fast as it is, on hand-made timings whose parts are known exactly."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from bild_lab.engine.speculative_theory import expected_tokens, optimal_window, walltime_improvement
from bild_lab.engine.trace import Round, Trace
from bild_lab.lab.analysis.prediction import DRAFTER, HOST, MISSES, REJECTIONS, VERIFICATION, WINDOW, predict, reasons
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.timed import Timed
from tests.report.sample import sample_baseline, sample_result

STEP_S = 0.010  # a token by the target alone
PREFILL_S, DRAFT_S, VERIFY_S, HOST_S = 0.004, 0.002, 0.013, 0.001  # once; a token; a round; a round
ROUNDS, WINDOW_LENGTH = 4, 4
TOKENS = 16


def method_s(draft_s: float = DRAFT_S, verify_s: float = VERIFY_S, host_s: float = HOST_S) -> float:
    return PREFILL_S + ROUNDS * (WINDOW_LENGTH * draft_s + verify_s + host_s)


def traced(pace: float = 1.0) -> Result:
    """A text of 16 tokens in 4 rounds. pace: seconds of the traced pass over those of the timed one."""
    rounds = [Round(tuple(range(WINDOW_LENGTH)), 3, 9, WINDOW_LENGTH)] * ROUNDS
    own = Timed(list(range(TOKENS)), [method_s()], Trace(rounds))
    alone = Timed(list(range(TOKENS)), [PREFILL_S + TOKENS * STEP_S], Trace([Round((), 0, 9)] * TOKENS))
    stages = {
        "prefill": pace * PREFILL_S,
        "draft": pace * ROUNDS * WINDOW_LENGTH * DRAFT_S,
        "verify": pace * ROUNDS * VERIFY_S,
        "host": pace * ROUNDS * HOST_S,
    }
    found = predict([own], [alone], stages)
    speedup = (PREFILL_S + TOKENS * STEP_S) / method_s()
    counts = {"drafted": ROUNDS * WINDOW_LENGTH, "acceptance_rate": None}
    return sample_result("speculative", {}, speedup, stages_s=stages, prediction=asdict(found), **counts)


def speedups(result: Result) -> dict[str, float]:
    return {change.what: change.speedup for change in reasons(result).changes}


@pytest.mark.parametrize("pace", [1.0, 2.0, 0.5])
def test_costs_are_those_of_the_timed_pass_whatever_the_pace_of_the_traced_one(pace: float) -> None:
    why = reasons(traced(pace))
    assert why.drafter_cost == pytest.approx(DRAFT_S / STEP_S)
    assert why.verification == pytest.approx(VERIFY_S / STEP_S)
    assert why.shares["draft"] == pytest.approx(ROUNDS * WINDOW_LENGTH * DRAFT_S / method_s())


def test_halving_a_cost_gives_the_speedup_of_a_text_that_costs_so_much_less() -> None:
    baseline_s = PREFILL_S + TOKENS * STEP_S
    assert speedups(traced()) == pytest.approx(
        {
            DRAFTER: baseline_s / method_s(draft_s=DRAFT_S / 2),
            VERIFICATION: baseline_s / method_s(verify_s=(STEP_S + VERIFY_S) / 2),
            HOST: baseline_s / method_s(host_s=HOST_S / 2),
        }
    )
    why = reasons(traced())
    assert [change.what for change in why.changes] == [DRAFTER, VERIFICATION, HOST]  # what helps most comes first
    assert [change.value for change in why.changes] == pytest.approx([0.1, 1.15, None])


def drafted(rate: float, length: int, share: float = 1.0, cost: float = 0.1, **knobs: int) -> Result:
    """Drafts of one length in a share of the rounds. The target verifies in the time of one token."""
    kept = [share * rate**depth for depth in range(1, length + 1)]
    tokens = 1 + sum(kept)
    parts = {"prefill": 0.0, "draft": length * cost, "verify": 1.0, "host": 0.0}
    speedup = tokens / (length * cost + 1)
    names = ("theorem", "rounds", "verify", "host", "prefill", "measured")
    predicted = {"acceptance_rate": rate, "window": length, "cost_ratio": cost, **dict.fromkeys(names, speedup)}
    counts = {"acceptance_by_position": [rate] * length, "accepted_by_depth": kept, "acceptance_rate": rate}
    return sample_result("speculative", knobs, speedup, stages_s=parts, prediction=predicted, drafted=10, **counts)


def test_half_as_many_rejections_give_the_tokens_of_the_better_rate() -> None:
    ratio = expected_tokens(0.8, 4) / expected_tokens(0.6, 4)
    assert speedups(drafted(0.6, 4))[REJECTIONS] == pytest.approx(drafted(0.6, 4).speedup.value * ratio)


def test_rounds_without_a_draft_gain_nothing_from_a_better_drafter() -> None:
    result = drafted(0.6, 1, share=0.5)
    assert speedups(result)[REJECTIONS] == pytest.approx(result.speedup.value * (1 + 0.5 * 0.8) / (1 + 0.5 * 0.6))


def test_no_rejections_cannot_be_halved() -> None:
    assert REJECTIONS not in speedups(drafted(1.0, 4))


@pytest.mark.parametrize(("rate", "window"), [(0.6, 8), (0.9, 5)])
def test_the_window_is_the_one_of_theory_where_theory_holds(rate: float, window: int) -> None:
    found = {change.what: change for change in reasons(drafted(rate, window, window=window)).changes}[WINDOW]
    assert found.value == optimal_window(rate, 0.1, 2 * window)
    assert found.speedup == pytest.approx(walltime_improvement(rate, found.value, 0.1))


def test_behind_positions_that_no_draft_reached_no_window_is_proposed() -> None:
    result = drafted(0.6, 8, window=8)
    counts = replace(result.counts, acceptance_by_position=[0.6] * 7 + [None], accepted_by_depth=[0.6, 0.36])
    assert WINDOW not in speedups(replace(result, counts=counts))


def test_a_window_that_is_no_knob_is_not_proposed() -> None:
    assert WINDOW not in speedups(drafted(0.6, 8))
    assert WINDOW not in speedups(drafted(0.6, 8, window=9))


def test_a_pipeline_gains_from_fewer_wrong_predictions() -> None:
    pipeline = {"match_rate": 0.5, "latency_units": 4.6, "compute_units": 9.0, "predicted_latency_units": 4.5}
    pipeline |= {"predicted_compute_units": 9.1, "layers": 6, "exit_layer": 3}
    parts = {"prefill": 0.0, "draft": 0.5, "verify": 0.4, "host": 0.1}
    result = sample_result("ppd", {}, 1.2, pipeline=pipeline, stages_s=parts)
    assert speedups(result)[MISSES] == pytest.approx(1.2 / (0.1 + 0.9 * 3.75 / 4.5))
    assert DRAFTER not in speedups(result)


def test_what_was_not_traced_or_not_compared_has_no_reasons() -> None:
    assert reasons(sample_baseline()) is None
    assert reasons(sample_result("hf_generate", {}, 0.9, stages_s=None)) is None
    assert reasons(sample_result("bild", {}, None, setting={"baseline": None})) is None
