"""Predicted beside measured, on hand-made timings whose account is known exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bild_lab.engine.methods.speculative.theory import walltime_improvement
from bild_lab.engine.trace import Round, StageTrace, Trace
from bild_lab.lab.measure import score
from bild_lab.lab.measure.prediction import fixed_window, predict
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.schema.numbers import Counts

STEP_S = 0.010  # a token by the target alone
DRAFT_S = 0.002


def round_of(drafted: int, accepted: int, calls: int | None = None) -> Round:
    return Round(tuple(range(drafted)), accepted, 9, drafted if calls is None else calls)


def text(rounds: list[Round], latency_s: float) -> Timed:
    emitted = sum(each.accepted + 1 for each in rounds)
    return Timed(list(range(emitted)), [latency_s, 9.0, latency_s], Trace(rounds))


def baseline_of(tokens: int, prefill_s: float = 0.0) -> Timed:
    return text([round_of(0, 0)] * tokens, prefill_s + tokens * STEP_S)


def test_each_step_of_the_account_adds_what_theory_leaves_out() -> None:
    # 16 tokens in 4 calls
    rounds = [round_of(4, 4), round_of(4, 1), round_of(4, 4), round_of(4, 3)]
    stages = {"prefill": 0.004, "draft": 16 * DRAFT_S, "verify": 4 * 0.013, "host": 4 * 0.001}
    found = predict([text(rounds, 0.092)], [baseline_of(16, 0.004)], stages, 12 / 14)
    assert found is not None
    assert (found.window, found.cost_ratio) == (4, pytest.approx(0.2))
    assert found.theorem == pytest.approx(walltime_improvement(12 / 14, 4, 0.2))
    assert found.rounds == pytest.approx(4 / (4 * 0.2 + 1))
    assert found.host == pytest.approx(4 / (4 * 0.2 + 1.3 + 0.1))
    assert found.prefill == pytest.approx(0.164 / 0.092)
    # a traced pass on a busy machine
    slower = {stage: 3 * seconds for stage, seconds in stages.items()}
    assert predict([text(rounds, 0.092)], [baseline_of(16, 0.004)], slower, 12 / 14) == found


def test_the_drafters_prompt_is_no_part_of_the_baseline() -> None:
    rounds = [round_of(4, 4), round_of(4, 1), round_of(4, 4), round_of(4, 3)]
    stages = {"prefill": 0.4, "draft": 16 * DRAFT_S, "verify": 4 * 0.013, "host": 4 * 0.001}
    method, baseline = [text(rounds, 0.488)], [baseline_of(16, 0.3)]
    found = predict(method, baseline, stages, 12 / 14, drafter_prompt_s=0.1)
    slower = {stage: 3 * seconds for stage, seconds in stages.items()}
    assert predict(method, baseline, slower, 12 / 14, drafter_prompt_s=0.3) == found
    assert found.cost_ratio == pytest.approx(0.2)
    assert found.host == pytest.approx(4 / (4 * 0.2 + 1.3 + 0.1))
    assert found.prefill == pytest.approx(0.46 / 0.488)


def test_rounds_without_drafts_cost_what_a_token_of_the_target_does() -> None:
    """As most of prompt lookup's: nothing is gained where verification is added, though it has host
    code of its own.
    """
    rounds = [round_of(0, 0)] * 15 + [round_of(1, 0)]
    stages = {"prefill": 0.004, "draft": 0.0, "verify": 16 * 0.009, "host": 16 * 0.001}
    found = predict([text(rounds, 0.164)], [baseline_of(16, 0.004)], stages, 0.0)
    assert [found.rounds, found.host, found.prefill] == pytest.approx([1.0, 1.0, 1.0])


def test_the_last_draft_of_a_text_may_be_shorter() -> None:
    assert fixed_window([text([round_of(4, 4), round_of(4, 0), round_of(1, 1)], 1.0)]) == 4
    assert fixed_window([text([round_of(4, 4), round_of(1, 1)], 1.0)]) == 4
    assert fixed_window([text([round_of(2, 2)], 1.0)]) is None


def test_nine_drafts_of_ten_fix_the_window() -> None:
    for short, window in ((1, 4), (2, None)):
        rounds = [round_of(2, 2)] * short + [round_of(4, 4)] * (10 - short)
        assert fixed_window([text([*rounds, round_of(4, 4)], 1.0)]) == window
    half = [round_of(0, 0), round_of(4, 4)] * 5  # those without a draft count
    assert fixed_window([text([*half, round_of(4, 4)], 1.0)]) is None


def test_a_draft_that_ends_in_an_end_token_does_not_count() -> None:
    several = [text([round_of(4, 1), round_of(2, 1), round_of(3, 1), round_of(4, 4)], 1.0)]
    assert fixed_window(several) is None
    assert fixed_window(several, end_tokens=frozenset([1, 2])) == 4  # round_of(n) drafts 0 … n − 1
    stages = {"prefill": 0.0, "draft": 13 * DRAFT_S, "verify": 0.04, "host": 0.0}
    assert predict(several, [baseline_of(11)], stages, 0.5, frozenset([1, 2])).window == 4


def test_nothing_is_predicted_without_drafts_or_against_another_baseline() -> None:
    stages = {"prefill": 0.0, "draft": 0.0, "verify": 0.04, "host": 0.0}
    drafting = text([round_of(4, 4), round_of(4, 4)], 0.05)
    assert predict([baseline_of(4)], [baseline_of(4)], stages, 0.5) is None
    assert predict([drafting], [drafting], stages, 0.5) is None
    # a peer's own loop
    assert predict([drafting], [Timed([1, 2], [0.1], Trace())], stages, 0.5) is None


@pytest.mark.parametrize("prefill_s", [0.05, 1.0])
def test_nothing_is_predicted_from_a_prefill_as_long_as_the_whole_text(prefill_s: float) -> None:
    stages = {"prefill": prefill_s, "draft": 0.01, "verify": 0.04, "host": 0.0}
    assert (
        predict([text([round_of(4, 4), round_of(4, 4)], 0.2)], [baseline_of(10)], stages, 0.5)
        is None
    )


def test_a_forward_whose_token_was_not_drafted_is_a_step_of_the_drafter_too() -> None:
    """As a fallback's is, where the drafter is not sure; a table drafts without forwards."""
    stages = {"prefill": 0.0, "draft": 0.02, "verify": 0.04, "host": 0.0}

    def cost_ratio(calls: int) -> float:
        rounds = [round_of(4, 4, calls), round_of(4, 4, calls)]
        return predict([text(rounds, 0.06)], [baseline_of(10)], stages, 0.5).cost_ratio

    assert cost_ratio(5) == pytest.approx(0.02 / 10 / STEP_S)
    assert cost_ratio(0) == pytest.approx(0.02 / 8 / STEP_S)


@pytest.mark.parametrize(("models", "target_prompt_s"), [(2, 2.0), (1, 8.0)])
def test_a_point_is_predicted_from_the_texts_that_were_traced(
    models: int, target_prompt_s: float
) -> None:
    """One with a drafter that reads a prompt in 8 s, or for itself and its target in 2 s."""
    rounds = [round_of(2, 2)] * 2
    spans = [("draft", 0, 9), ("verify", 9, 13), ("draft", 13, 14), ("verify", 14, 16)]
    stages = {"prefill": 10.0, "draft": 2.0, "verify": 4.0, "host": 0.0}
    steps = [round_of(0, 0)] * 10
    timed = {
        "method": [text(rounds, 16.0), text(rounds, 90.0)],
        "baseline": [text(steps, 20.0), text(steps, 900.0)],
    }
    target = SimpleNamespace(
        checkpoint=SimpleNamespace(end_tokens=frozenset(), encoder_decoder=False)
    )
    decoder = SimpleNamespace(target=target, models=[target] * models)
    found = score._stage_findings(
        SimpleNamespace(decoders={"method": decoder}),
        timed,
        stages,
        [StageTrace(rounds, spans=spans)],
        {"counts": Counts(acceptance_rate=0.5)},
    )
    assert found["first_token_s"] == 13
    assert found["prediction"].prefill == 20 / 16
    step_s = (20 - target_prompt_s) / 10
    assert found["prediction"].cost_ratio == pytest.approx(2 / 4 / step_s)


def test_the_first_token_comes_when_the_first_verification_of_the_median_text_ends() -> None:
    decoder = SimpleNamespace(target=SimpleNamespace(checkpoint=None))
    traces = [
        StageTrace(spans=[("draft", 0, 1), ("verify", 1, end), ("verify", end, 99)])
        for end in (3, 9, 4)
    ]
    found = score._stage_findings(
        SimpleNamespace(decoders={"method": decoder}),
        {"method": [text([round_of(1, 1)], 1.0)]},
        None,
        traces,
        {},
    )
    assert found == {"first_token_s": 4, "prediction": None, "pipeline": None}
