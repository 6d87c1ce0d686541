"""A measured point tells the method's numbers as the method's, and the baseline's as the baseline's."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bild_lab
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.ranks import Ranks
from bild_lab.lab import point as points
from bild_lab.lab import runner
from bild_lab.lab.analysis.prediction import pipeline_summary, predict
from bild_lab.lab.config import compose_config
from bild_lab.lab.decoder import Decoder
from bild_lab.lab.measure.timing import time_methods, trace_stages, warm_up
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.point import Point, prepare
from bild_lab.lab.results.change import change_of
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.results.summary import summarize
from bild_lab.lab.runner import PARTS, Clock, run_point
from bild_lab.lab.schema.measured_examples import MeasuredExample, read_examples
from bild_lab.lab.schema.result import Prediction, Result

NEW = 8
PROMPTS = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20", "w11 w4 w6"]


@pytest.fixture(scope="module")
def texts(checkpoints: Path) -> dict[str, list[str]]:
    """What BiLD without rollback and the target alone say to four prompts. The former's texts are not the target's."""
    pair = (str(checkpoints / "llama"), str(checkpoints / "llama-draft"))
    several = {
        "method": bild_lab.load(*pair, policy="bild", fallback=0.1, rollback=float("inf")),
        "baseline": bild_lab.load(*pair, policy="vanilla"),
    }
    return {
        name: [decoder.generate(prompt, max_new_tokens=NEW).text for prompt in PROMPTS]
        for name, decoder in several.items()
    }


@pytest.fixture(scope="module")
def words(checkpoints: Path, texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same as a configuration. The references are the target's texts."""
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    rows = zip(PROMPTS, texts["baseline"], strict=True)
    file.write_text("".join(json.dumps({"de": prompt, "en": text}) + "\n" for prompt, text in rows))
    words = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    words += ["dataset=multi30k", f"dataset.path={file}", f"decoding.max_new_tokens={NEW}"]
    words += ["policy=bild", "policy.fallback=0.1", "policy.rollback=inf", "runtime.threads=1", "runtime.seed=3"]
    words += ["measure.repeats=2", "measure.warmup=1", "measure.traced_examples=1"]
    return [*words, "dataset.metrics=[bleu,exact_match]"]


@pytest.fixture(scope="module")
def point(words: list[str]) -> Point:
    points.cached_examples.cache_clear()
    return prepare(compose_config(words))


@pytest.fixture(scope="module")
def measured(point: Point, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[MeasuredExample], dict]:
    """The result, its examples, and what was passed on to the clock."""
    passed = {}

    def noted(name: str, call: object) -> object:
        def run(*given: object) -> object:
            passed[name] = given
            return call(*given)

        return run

    def predicted(**given: object) -> Prediction | None:
        passed["predict"] = given, predict(**given)
        return passed["predict"][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "time_methods", noted("time", time_methods))
        patch.setattr(runner, "warm_up", noted("warm up", warm_up))
        patch.setattr(runner, "trace_stages", noted("trace", trace_stages))
        patch.setattr(runner, "predict", predicted)
        patch.setattr(runner, "summarize", noted("summary", summarize))
        patch.setattr(runner, "change_of", noted("change", change_of))
        patch.setattr(runner, "pipeline_summary", noted("pipeline", pipeline_summary))
        patch.setattr(runner, "OtherLoad", lambda ranks, external: SimpleNamespace(percent=lambda: 18.16))
        patch.setattr(runner, "DeviceUse", lambda device: SimpleNamespace(shared=lambda: True, close=lambda: None))
        folder = tmp_path_factory.mktemp("sweep")
        result = run_point(point, Sweep(folder), setup_s=1000.0, stage=passed.setdefault("stages", []).append)
    return result, read_examples(result.folder), passed


def test_the_quality_is_the_methods_and_beside_it_is_the_baselines(texts: dict, measured: tuple) -> None:
    result, examples, _ = measured
    assert [one.prediction for one in examples] == texts["method"] != texts["baseline"]
    assert [one.baseline_prediction for one in examples] == texts["baseline"]
    own = score("bleu", texts["method"], [[text] for text in texts["baseline"]], seed=3)
    quality = result.quality
    assert (quality.value, quality.low, quality.high) == (own.value, own.low, own.high)
    assert quality.value < 99 and quality.baseline == pytest.approx(100)
    assert quality.difference == pytest.approx(own.value - 100)
    same = [mine == theirs for mine, theirs in zip(texts["method"], texts["baseline"], strict=True)]
    assert result.agreement_with_target == sum(same) / 4


def test_a_second_metric_and_what_changed_are_beside_it(texts: dict, measured: tuple) -> None:
    result, examples, _ = measured
    same = [mine == theirs for mine, theirs in zip(texts["method"], texts["baseline"], strict=True)]
    further = result.further_qualities["exact_match"]
    assert (further.metric, further.value, further.baseline) == ("exact match", 100 * sum(same) / 4, 100)
    assert [one.scores for one in examples] == [{"exact_match": 100.0 * equal} for equal in same]
    assert result.change.changed == 1 - sum(same) / 4 > 0
    assert 0 <= result.change.first_difference < NEW


def test_the_target_finds_its_own_greedy_texts_likelier_than_a_drafters(measured: tuple) -> None:
    result, examples, _ = measured
    own, base = (
        sum(getattr(one, name) for one in examples) for name in ("log_probability", "baseline_log_probability")
    )
    assert result.change.log_probability == pytest.approx(own / sum(len(one.token_ids) for one in examples))
    tokens = sum(len(one.baseline_token_ids) for one in examples)
    assert result.change.log_probability_baseline == pytest.approx(base / tokens)
    assert result.change.log_probability_difference < 0


def test_the_speedup_is_the_baselines_time_over_the_methods(measured: tuple) -> None:
    result, examples, _ = measured
    own = sum(sum(one.latency_s) / 2 for one in examples)  # the median of two repeats
    base = sum(sum(one.baseline_latency_s) / 2 for one in examples)
    assert (result.latency_s.total, result.baseline_latency_s.total) == pytest.approx((own, base), rel=1e-3)
    assert result.speedup.value == pytest.approx(base / own, rel=1e-3)
    assert result.counts.draft_calls > 0  # of the method's rounds
    assert result.tokens == sum(len(one.token_ids) for one in examples)


def test_methods_are_warmed_up_and_timed_as_the_configuration_says(point: Point, measured: tuple) -> None:
    result, _, passed = measured
    methods, requests, *numbers = passed["warm up"]
    assert (list(methods), len(requests)) == (["method", "baseline"], 4)
    assert numbers == [1, 3, 1]  # one example, seed 3, one text at a time
    methods, requests, *numbers = passed["time"]
    assert [methods[name] for name in ("method", "baseline")] == [
        point.decoders[name].method for name in ("method", "baseline")
    ]
    assert numbers[:2] == [2, 3]  # repeats, seed
    assert (passed["summary"][2], passed["change"][2:]) == (3, (True, 3))  # resamples have the same seed
    assert (numbers[2], numbers[4]()) == (point.decoders["method"].synchronize, 0)  # shapes compiled
    method, traced, *numbers = passed["trace"]
    assert (method, len(traced), numbers[0]) == (point.decoders["method"].method, 1, 3)
    assert [one.limits.max_new_tokens for one in requests] == [NEW] * 4
    assert result.seconds["total"] == pytest.approx(sum(result.seconds.values()) - result.seconds["total"])
    assert result.seconds["setup"] == 1000.0


def test_a_result_tells_the_point_and_what_else_the_machine_did(point: Point, measured: tuple) -> None:
    result, _, _ = measured
    assert (result.composition, result.facts) == (point.composition, point.facts)
    assert (result.name, result.knobs) == (point.name, point.knobs)
    assert (result.engine, result.same_as_baseline) == (point.decoders["method"].method.engine, False)
    assert result.composition and result.facts["acceptance"] == "Rollback"
    assert result.environment.get("busy_elsewhere_percent") == 18.2
    assert result.environment.get("host") == platform.node()
    assert result.environment.get("shared_device") is True and result.environment.get("parts") is None
    assert "parts" not in result.environment
    assert result.peak_memory_mb > 10


def test_theory_predicts_from_the_traced_examples(point: Point, measured: tuple) -> None:
    result, _, passed = measured
    given, found = passed["predict"]
    assert (len(given["method"]), len(given["baseline"]), given["stages_s"]) == (1, 1, result.stages_s)
    assert given["end_tokens"] == point.decoders["method"].target.checkpoint.end_tokens
    assert result.prediction == found and result.work is not None and result.cost is not None
    timed, *given = passed["pipeline"]
    assert (list(timed), given) == (["method", "baseline"], [result.stages_s, 1])


def test_every_part_of_a_measurement_is_named_when_it_begins(measured: tuple) -> None:
    result, _, passed = measured
    assert passed["stages"] == list(PARTS.values())
    assert list(result.seconds) == ["setup", *PARTS, "total"]


def test_only_the_traced_examples_have_a_timeline(measured: tuple) -> None:
    result, examples, _ = measured
    assert [bool(one.spans) for one in examples] == [True, False, False, False]
    assert examples[0].prompt and set(result.stages_s) == {"prefill", "draft", "verify", "host"}


def test_a_point_in_batches_has_the_texts_of_batch_1_and_certificates(
    words: list[str], measured: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, examples, _ = measured
    point = prepare(compose_config([*words, "runtime.batch=2", "measure.certify=true", "measure.repeats=1"]))
    roomy: list[tuple] = []
    monkeypatch.setattr(runner, "require_room", lambda models, *rest: roomy.append((set(map(id, models)), *rest)))
    given: dict[str, tuple] = {}
    for name, call in (("warm", warm_up), ("time", time_methods)):
        monkeypatch.setattr(
            runner, call.__name__, lambda *rest, name=name, call=call: given.update({name: rest}) or call(*rest)
        )
    advanced: list[int] = []
    result = run_point(point, Sweep(tmp_path), advance=lambda: advanced.append(1))
    assert given["warm"][3:] == (3, 2) and given["time"][2:4] == (1, 3)  # seed, texts at once; repeats, seed
    assert given["time"][-1] == 2
    assert len(advanced) == 4 and result.work is None
    found = read_examples(result.folder)
    ((models, requests, batch),) = roomy
    assert models == {id(one) for each in point.decoders.values() for one in each.models} and len(models) > 1
    assert (len(requests), batch, result.seconds["setup"]) == (4, 2, 0.0)
    assert (result.setting.batch, alone.setting.batch) == (2, 1) and point.id != alone.point
    assert [one.token_ids for one in found] == [one.token_ids for one in examples]
    assert [one.rounds for one in found] == [one.rounds for one in examples]
    assert result.quality == alone.quality and result.counts == alone.counts
    assert result.certificate.equal + result.certificate.ties + result.certificate.defects == 4
    assert sum(one.certificate["verdict"] == "equal" for one in found) == result.certificate.equal
    assert result.stages_s is result.cost is None  # what texts share is nobody's
    assert result.latency_s.total > sum(one.latency_s[0] for one in found)  # texts wait for one another


def test_one_example_is_measured_without_anything_that_was_not_asked_for_and_stored_by_the_first_process(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, closed, compared = [], [], []

    class Use:
        def __init__(self, device: torch.device) -> None:
            used.append(device)

        def shared(self) -> bool:
            return False

        def close(self) -> None:
            closed.append(True)

    class Second(Ranks):
        def require_equal(self, what: str, value: object) -> None:
            compared.append((what, value))

    asked = ["resume=false", "dataset.limit=1", "measure.warmup=0", "measure.traced_examples=0"]
    point = prepare(compose_config([*words, *asked, "measure.target_log_probability=false"]))
    monkeypatch.setattr(runner, "DeviceUse", Use)
    monkeypatch.setattr(runner, "OtherLoad", lambda ranks, external: SimpleNamespace(percent=lambda: 0.0))
    monkeypatch.setattr(runner, "require_room", None)  # one text has room
    monkeypatch.setattr(HuggingFaceModel, "parts", {"cuda:0": 2})
    monkeypatch.setattr(Decoder, "text", lambda self, token_ids: "  return 1\n ")
    sweep = Sweep(tmp_path)
    results = [run_point(point, sweep) for _ in range(2)]
    assert used == [torch.device("cpu")] * 2 and len(closed) == 2
    assert results[0].folder != results[1].folder  # resume=false keeps both
    (example,) = read_examples(results[0].folder)
    assert example.prediction == example.baseline_prediction == "  return 1"
    assert (results[0].environment["parts"], results[0].environment["busy_elsewhere_percent"]) == ({"cuda:0": 2}, 0.0)
    assert results[0].stages_s is results[0].certificate is results[0].change.log_probability is None
    monkeypatch.setattr(HuggingFaceModel, "ranks", Second(rank=1))
    traced = replace(point, measure=replace(point.measure, traced_examples=1))
    result = run_point(traced, sweep)
    assert result.folder is None and len(sweep.all_results()) == 2 and result.stages_s is not None
    assert len(used) == len(closed) == 2  # the first one watches the CPU
    assert compared == [("tokens", {"method": [example.token_ids], "baseline": [example.baseline_token_ids]})]


def test_each_text_is_certified_with_its_own_seed_or_beside_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("certify", "certify_sampled", "seeded"):
        monkeypatch.setattr(runner, name, lambda *given: given)
    decoder, sampling = SimpleNamespace(target="target", method="method"), SimpleNamespace(greedy=True)
    point = SimpleNamespace(decoders={"method": decoder}, sampling=sampling, seed=3)
    timed = {
        "method": [SimpleNamespace(token_ids=[1]), SimpleNamespace(token_ids=[2])],
        "baseline": [SimpleNamespace(token_ids=[3]), SimpleNamespace(token_ids=[4])],
    }
    assert runner.certify_all(point, ["a", "b"], timed) == [
        ("target", "a", [1], [3], "method"),
        ("target", "b", [2], [4], "method"),
    ]
    sampling.greedy = False
    assert runner.certify_all(point, ["a", "b"], timed) == [
        ("method", "target", ("a", 3, 0), [1]),
        ("method", "target", ("b", 3, 1), [2]),
    ]


def test_a_request_has_all_that_the_configuration_says() -> None:
    decoder = SimpleNamespace(request=lambda *given: given)
    decoding = SimpleNamespace(max_new_tokens=8)
    point = SimpleNamespace(
        decoders={"method": decoder}, decoding=decoding, sampling="drawn", seed=3, max_source_tokens=9
    )
    assert runner._request(point, SimpleNamespace(prompt="ein")) == ("ein", 8, "drawn", 3, 9)


def test_a_clock_tells_each_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, named = iter([10.0, 11.0, 11.5, 15.5]), []
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(moments))
    clock = Clock(named.append)
    clock.begin("load")
    clock.begin("decode")
    clock.end()
    clock.end()  # of nothing
    assert clock.laps == {"load": 1.0, "decode": 4.0}
    assert named == ["loading models", "decoding"]


@pytest.mark.slow
def test_programs_are_run_for_the_policy_and_the_baseline_and_their_verdicts_are_stored(
    checkpoints: Path, texts: dict[str, list[str]], tmp_path: Path
) -> None:
    """The test of each program is that it holds what the target says."""
    file = tmp_path / "test.jsonl"
    rows = zip(PROMPTS, texts["baseline"], strict=True)
    file.write_text("".join(json.dumps({"de": prompt, "test": repr(text)}) + "\n" for prompt, text in rows))
    words = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}", "dataset=local"]
    words += [f"dataset.path={file}", "dataset.source_column=de", f"decoding.max_new_tokens={NEW}"]
    words += ["+dataset.reference_template='assert \"{answer}\".strip() == {test}'", "dataset.metric=pass_at_1"]
    words += ["policy=bild", "policy.fallback=0.1", "policy.rollback=inf", "measure.repeats=1", "measure.run_code=true"]
    points.cached_examples.cache_clear()
    result = run_point(prepare(compose_config(words)), Sweep(tmp_path / "sweep"))
    same = [mine == theirs for mine, theirs in zip(texts["method"], texts["baseline"], strict=True)]
    assert (result.quality.metric, result.quality.value, result.quality.baseline) == ("pass@1", 25 * sum(same), 100)
    assert [one.scores["pass_at_1"] for one in read_examples(result.folder)] == [100.0 * equal for equal in same]
