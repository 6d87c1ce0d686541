"""Why a point is as fast as it is, on hand-made timings whose parts are known exactly."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bild_lab.engine.trace import Round, Trace
from bild_lab.lab.measure.prediction import predict, reasons
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.schema.result import Result
from tests.report.sample import sample_baseline, sample_result

STEP_S = 0.010  # a token by the target alone
PREFILL_S, DRAFT_S, VERIFY_S, HOST_S = 0.004, 0.002, 0.013, 0.001  # once; a token; a round; a round
ROUNDS, WINDOW_LENGTH = 4, 4
TOKENS = 16


def method_s(draft_s: float = DRAFT_S, verify_s: float = VERIFY_S, host_s: float = HOST_S) -> float:
    return PREFILL_S + ROUNDS * (WINDOW_LENGTH * draft_s + verify_s + host_s)


def traced(pace: float = 1.0) -> Result:
    """A text of 16 tokens in 4 rounds. pace: seconds of the traced pass over those of the timed
    one.
    """
    rounds = [Round(tuple(range(WINDOW_LENGTH)), 3, 9, WINDOW_LENGTH)] * ROUNDS
    own = Timed(list(range(TOKENS)), [method_s()], Trace(rounds))
    alone = Timed(
        list(range(TOKENS)), [PREFILL_S + TOKENS * STEP_S], Trace([Round((), 0, 9)] * TOKENS)
    )
    stages = {
        "prefill": pace * PREFILL_S,
        "draft": pace * ROUNDS * WINDOW_LENGTH * DRAFT_S,
        "verify": pace * ROUNDS * VERIFY_S,
        "host": pace * ROUNDS * HOST_S,
    }
    found = predict([own], [alone], stages, None)
    speedup = (PREFILL_S + TOKENS * STEP_S) / method_s()
    counts = {"drafted": ROUNDS * WINDOW_LENGTH, "acceptance_rate": None}
    return sample_result(
        "speculative", {}, speedup, stages_s=stages, prediction=asdict(found), **counts
    )


@pytest.mark.parametrize("pace", [1.0, 2.0, 0.5])
def test_costs_are_those_of_the_timed_pass_whatever_the_pace_of_the_traced_one(pace: float) -> None:
    why = reasons(traced(pace))
    assert why.drafter_cost == pytest.approx(DRAFT_S / STEP_S)
    assert why.drafter_cost == traced(pace).prediction.cost_ratio, (
        "one value in the sentence and in the table"
    )
    assert why.verification == pytest.approx((VERIFY_S + HOST_S) / STEP_S)
    assert why.shares["draft"] == pytest.approx(ROUNDS * WINDOW_LENGTH * DRAFT_S / method_s())


def test_what_was_not_traced_or_not_compared_has_no_reasons() -> None:
    assert reasons(sample_baseline()) is None
    assert reasons(sample_result("hf_generate", {}, 0.9, stages_s=None)) is None
    assert reasons(sample_result("bild", {}, None, setting={"baseline": None})) is None
