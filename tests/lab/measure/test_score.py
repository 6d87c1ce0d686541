"""From finished texts to a result: which numbers it has, of which texts, and under whose name."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import EngineReport, ReportedRounds, Round, StageTrace, Trace
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure import score
from bild_lab.lab.measure.score import (
    baseline_is_target,
    measured_examples,
    measured_round,
    parameters_of,
    precision_of,
    token_stats,
)
from bild_lab.lab.measure.text_faults import text_faults
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.point.decoder import BASELINE, METHOD

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
END = 1


def timed(*tokens: int, error: str | None = None) -> Timed:
    reports = [] if error is None else [EngineReport(error=error)]
    return Timed(list(tokens), [0.1], Trace([Round(next_token=7)]), reports=reports)


def point_of(
    baseline: str | None = "vanilla", sampling: Sampling = GREEDY, **more: Any
) -> SimpleNamespace:
    measure = SimpleNamespace(baseline=baseline, certify=False)
    plain = {"measure": measure, "sampling": sampling, "batch": 1, "seed": 3}
    return SimpleNamespace(**{**plain, **more})


def test_only_a_greedy_vanilla_baseline_is_what_the_target_says() -> None:
    found = [
        baseline_is_target(point_of(baseline, sampling))
        for baseline, sampling in (("vanilla", GREEDY), ("vanilla", SAMPLED), ("hf", GREEDY))
    ]
    assert found == [True, False, False]


def test_in_a_batch_no_text_has_a_cost_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "decoding_costs", lambda timed, width: width)
    setting = {"dtype": "bfloat16"}
    assert score._cost(point_of(setting=setting), {}) == 2
    assert score._cost(point_of(setting=setting, batch=4), {}) is None


def test_texts_that_an_engine_failed_to_give_are_left_out_of_what_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a conversation's turns stay together among the others."""
    compared: dict[str, Any] = {}

    def change_of(texts: Any, nats: Any, greedy: bool, seed: int, conversations: Any) -> str:
        compared.update(texts=texts, nats=nats, conversations=conversations)
        return "the change"

    def score_all(_: Any, __: Any, texts: Any, seed: int, tokens: Any) -> tuple[dict, list]:
        compared["tokens"] = tokens
        return {"bleu": "leading", "chrf": "further"}, [{}] * 3

    monkeypatch.setattr(score, "change_of", change_of)
    monkeypatch.setattr(score, "score_all", score_all)
    names = {"a": None, "b": None, "c": "b"}  # the third has the second's source
    examples = [Example(name, "", "", same_source=first) for name, first in names.items()]
    texts = {
        METHOD: [timed(5, error="timed out"), timed(5, 6), timed(7)],
        BASELINE: [timed(5), timed(5, 6, 8), timed(7)],
    }
    nats = {METHOD: [-1.0, -2.0, -3.0], BASELINE: [-4.0, -5.0, -6.0]}
    point = point_of(scoring=SimpleNamespace(lead="bleu"))
    fields, _ = score._scored(point, examples, texts, {}, nats)
    assert fields["quality"] == "leading" and fields["further_qualities"] == {"chrf": "further"}
    assert fields["change"] == "the change" and fields["agreement_with_target"] == 0.5
    assert [text.token_ids for text in compared["texts"][METHOD]] == [[5, 6], [7]]
    assert compared["nats"] == {METHOD: [-2.0, -3.0], BASELINE: [-5.0, -6.0]}
    assert compared["conversations"] == [0, 0]
    # the method's tokens and nats first
    assert compared["tokens"] == (
        [(1, -1.0), (2, -2.0), (1, -3.0)],
        [(1, -4.0), (3, -5.0), (1, -6.0)],
    )
    assert token_stats(texts[METHOD], None) == [(1, None), (2, None), (1, None)]
    assert token_stats(None, None) is None
    sampled, _ = score._scored(point_of(None, scoring=point.scoring), examples, texts, {}, nats)
    assert sampled["agreement_with_target"] is None


def requests_of(*lengths: int) -> list[Request]:
    source = Source((0,))
    return [Request(source, Limits(1, length, frozenset([END]))) for length in lengths]


def test_empty_texts_and_those_that_the_limit_cut_are_shares_of_all() -> None:
    texts = {
        METHOD: [timed(5), timed(6), timed(9, error="timed out"), timed(7)],
        # cut; at the limit by its end token; shorter by its end token; by another engine's own end
        BASELINE: [timed(5, 6), timed(5, END), timed(END), timed(5)],
    }
    words = {METHOD: ["one", " \n", "", "two"], BASELINE: ["", "", "one", "two"]}
    found = text_faults(texts, words, requests_of(2, 2, 2, 2))
    # of the method's texts that came
    assert found == {
        "empty": pytest.approx(1 / 3),
        "looping": 0.0,
        "baseline_empty": 0.5,
        "baseline_looping": 0.0,
        "baseline_cut": 0.25,
    }
    alone = text_faults({METHOD: texts[METHOD]}, words, requests_of(2, 2, 2, 2))
    assert alone == {"empty": pytest.approx(1 / 3), "looping": 0.0}


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([*range(10, 20), *[7] * 33], True),
        ([*range(10, 20), *[7] * 32], False),  # of which 31 repeat the one before
        ([*[7, 8, 9] * 12, END], True),  # also before an end token
        ([*[7, 8, 9] * 12, 10, END], False),  # it went on
        ([*range(40)] * 2, False),  # twice is no loop
        ([5, *[*range(40)] * 3], True),
        ([5, *[*range(40)] * 2, *range(39)], False),
        ([], False),
    ],
)
def test_texts_that_end_with_the_same_block_over_and_over_are_counted(
    tokens: list[int], looping: bool
) -> None:
    texts = {METHOD: [timed(9, error="timed out"), timed(*tokens)], BASELINE: [timed(5)] * 2}
    texts[BASELINE][0] = timed(*tokens)
    found = text_faults(texts, {METHOD: ["", "a"], BASELINE: ["a", "a"]}, requests_of(99, 99))
    assert (found["looping"], found["baseline_looping"]) == (looping, looping / 2)


def model_of(engine: str = "native", **shapes: Sequence[int]) -> SimpleNamespace:
    files = SimpleNamespace(shapes=shapes) if shapes else None
    checkpoint = SimpleNamespace(weight_files=files, precision="q4_k_m")
    return SimpleNamespace(engine=engine, bits=None, checkpoint=checkpoint, device="cpu")


def test_parameters_are_those_of_each_model_by_its_role() -> None:
    models = [model_of(a=(2, 3), b=(4,)), model_of(), model_of(c=(5, 2))]
    assert parameters_of(SimpleNamespace(models=models)) == {"target": 10, "second_draft": 10}
    assert parameters_of(SimpleNamespace(models=[model_of(a=()), model_of(b=(7,))])) == {
        "target": 1,
        "draft": 7,
    }


def test_an_engine_of_another_process_drafts_with_none_of_the_models_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "peak_memory_mb", lambda device, device_map: 12.0)
    running = [model_of(), model_of("kernels"), model_of("kernels")]
    for engine, models, drafting in (
        ("native", running, "kernels"),
        ("native", running[:1], None),
        ("llama.cpp", running, None),
    ):
        decoder = SimpleNamespace(
            method=SimpleNamespace(engine=engine), running=models, target=models[0]
        )
        found = score._engine_facts(
            point_of(
                decoders={METHOD: decoder},
                setting={"dtype": "float32"},
                specs=SimpleNamespace(runtime=SimpleNamespace(device_map=None)),
            )
        )
        assert (found["engine"], found["draft_engine"]) == (engine, drafting)
        assert (found["precision"], found["peak_memory_mb"]) == ("float32", 12.0)


@pytest.mark.parametrize(
    ("bits", "precision"), [(None, "bfloat16"), (8, "int8"), (4, "int4"), ("gguf", "q4_k_m")]
)
def test_the_precision_is_that_of_the_weights_that_are_read(
    bits: int | str | None, precision: str
) -> None:
    target = model_of()
    target.bits = bits
    assert precision_of(SimpleNamespace(), target, "bfloat16") == precision


def test_a_sampled_text_is_certified_with_the_random_numbers_of_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[int] = []

    def certify(method: object, target: object, request: Request, text: list[int]) -> str:
        seeds.append(request.generator.initial_seed())
        return "a certificate"

    monkeypatch.setattr(score, "certify_sampled", certify)
    monkeypatch.setattr(score, "judge_together", list)
    decoder = SimpleNamespace(target=model_of(), method=SimpleNamespace(engine="native"))
    requests = [
        Request(Source((0,), device=torch.device("cpu")), Limits(1, 4), SAMPLED) for _ in range(2)
    ]
    point = point_of(sampling=SAMPLED, decoders={METHOD: decoder})
    score._certified(point, requests, {METHOD: [timed(5), timed(6)]})
    assert seeds == [requests[place].seeded(3, place).generator.initial_seed() for place in (0, 1)]


def test_a_greedy_text_of_another_engine_is_certified_as_one_that_was_written_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "certify", lambda *_: "by its rounds")
    monkeypatch.setattr(score, "certify_replayed", lambda *_: "by its text")
    texts = {METHOD: [timed(5), timed(error="timed out")], BASELINE: [timed(5), timed(6)]}
    for engine, expected in (("native", ["by its rounds"] * 2), ("llama.cpp", ["by its text"])):
        decoder = SimpleNamespace(target=model_of(), method=SimpleNamespace(engine=engine))
        found = score._certified(point_of(decoders={METHOD: decoder}), requests_of(2, 2), texts)
        assert found[: len(expected)] == expected
        if engine != "native":
            assert found[1].verdict == score.NO_TEXT


def test_replayed_texts_are_certified_where_the_baseline_has_the_targets_own() -> None:
    replays = SimpleNamespace(method=SimpleNamespace(require_answer=print))
    decodes = SimpleNamespace(method=SimpleNamespace())
    found = [
        score._certifies(point_of(baseline, decoders={METHOD: decoder}))
        for decoder, baseline in ((replays, "vanilla"), (replays, "hf"), (decodes, "vanilla"))
    ]
    assert found == [True, False, False]


def test_stages_of_a_timed_text_are_those_of_its_first_repeat() -> None:
    spans = [("draft", 0, 3), ("verify", 3, 7), ("draft", 7, 8), ("verify", 8, 9)]
    rounds = [Round(next_token=7, draft_calls=1)] * 2
    text = Timed([5, 6], [10.0, 90.0], StageTrace(rounds, spans=spans))

    def stages(encoder_decoder: bool, batch: int = 1) -> dict[str, float] | None:
        target = SimpleNamespace(checkpoint=SimpleNamespace(encoder_decoder=encoder_decoder))
        point = point_of(decoders={METHOD: SimpleNamespace(target=target)}, batch=batch)
        point.measure.traced_examples = 1
        return score._traced(point, [], {METHOD: [text, text]})[0]

    # the first draft and verification read the prompt, for 2 and 3 seconds
    assert stages(False) == {"prefill": 5.0, "draft": 2.0, "verify": 2.0, "host": 1.0}
    assert stages(True) == {"prefill": 0.0, "draft": 4.0, "verify": 5.0, "host": 1.0}
    assert stages(False, batch=2) is None


def test_the_loops_share_is_that_of_a_vanilla_baseline_whose_rounds_are_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "loop_share", lambda method, request: method)
    decoders = {name: SimpleNamespace(method=f"{name}'s") for name in (METHOD, BASELINE)}
    slow, fast = (Timed([5, 6], [seconds], Trace()) for seconds in (9.0, 0.01))

    def share(ours: Timed, theirs: Timed, **more: Any) -> float | None:
        point = point_of(decoders=decoders, **more)
        return score._baseline_loop_share(
            point, requests_of(2), {METHOD: [ours], BASELINE: [theirs]}
        )

    assert share(slow, fast) == f"{BASELINE}'s" and share(fast, slow) is None
    assert share(slow, fast, baseline="hf") is share(slow, fast, batch=2) is None


def test_the_first_token_of_a_stream_came_when_the_engine_sent_it() -> None:
    decoder = SimpleNamespace(target=SimpleNamespace(checkpoint=None))
    streamed = SimpleNamespace(first_token_p50=0.7)
    point = point_of(decoders={METHOD: decoder})
    found = score._stage_findings(point, {METHOD: [timed(5)]}, None, [], {"streamed": streamed})
    assert found["first_token_s"] == 0.7


def test_what_another_engine_told_is_stored_for_each_side() -> None:
    ours = EngineReport((0.12345678,), ReportedRounds(2, steps={(3, 2): 5, (3, 0): 1}))
    theirs = EngineReport((0.5,))
    texts = {METHOD: [timed(5)], BASELINE: [timed(5)]}
    texts[METHOD][0].reports.append(ours)
    texts[BASELINE][0].reports.append(theirs)
    example = Example("a", "", "", ())
    (row,) = measured_examples([example], texts, {METHOD: ["x"], BASELINE: ["x"]})
    assert row.reports[0]["pieces_s"] == [0.123457]
    assert row.reports[0]["rounds"]["steps"] == {"3/2": 5, "3/0": 1}
    assert row.baseline_reports[0]["pieces_s"] == [0.5]
    assert row.baseline_reports[0]["rounds"] is None


def test_numbers_of_a_round_are_stored_with_four_digits() -> None:
    stats = {"largest": 0.123456, "nats": [1234.56, 0.00012345], "depth": 123456}
    found = measured_round(Round(stats=stats)).statistics
    assert found == {"largest": 0.1235, "nats": [1235.0, 0.0001234], "depth": 123456}


def test_a_number_that_is_zero_is_stored() -> None:
    stats = {"exit_layer": 0, "sure": False}
    assert measured_round(Round(stats=stats)).statistics == stats
    (row,) = measured_examples(
        [Example("a", "", "", ())],
        {METHOD: [timed(5)]},
        {METHOD: ["x"]},
        log_probabilities={METHOD: [0.0]},
    )
    assert row.log_probability == 0.0
