"""A measured point tells the method's numbers as the method's, and the baseline's as the
baseline's.
"""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest

import bild_lab
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure import runner, summary
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.measure.timing import MOST_DECODINGS, order
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.point import prepare as points
from bild_lab.lab.point.decoder import BASELINE, METHOD, Decoder
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.schema import statistics
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.store.table import to_frame
from bild_lab.lab.sweep import describe_timing_noise

NEW = 8
PROMPTS = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20", "w11 w4 w6"]


@pytest.fixture(scope="module")
def texts(checkpoints: Path) -> dict[str, list[str]]:
    """What BiLD without rollback and the target alone say to four prompts.

    The former's texts are not the target's.
    """
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
def words(
    checkpoints: Path, texts: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The same as a configuration. The references are the target's texts."""
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    rows = zip(PROMPTS, texts["baseline"], strict=True)
    file.write_text("".join(json.dumps({"de": prompt, "en": text}) + "\n" for prompt, text in rows))
    words = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    words += ["dataset=multi30k", f"dataset.path={file}", f"decoding.max_new_tokens={NEW}"]
    words += [
        "policy=bild",
        "policy.fallback=0.1",
        "policy.rollback=inf",
        "runtime.threads=1",
        "runtime.seed=3",
    ]
    words += ["measure.repeats=2", "measure.warmup=1", "measure.traced_examples=2"]
    return [*words, "dataset.metrics=[bleu,exact_match,log_probability,length]"]


@pytest.fixture(scope="module")
def point(words: list[str]) -> Point:
    points.cached_examples.cache_clear()
    return prepare(compose_config(words))


@pytest.fixture(scope="module")
def measured(
    point: Point, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, list[MeasuredExample], list[str]]:
    """The result, its examples, and the parts of the measurement as they began."""
    names = (METHOD, BASELINE)
    turns = [
        one
        for repeat in (0, 1)
        for text in range(len(PROMPTS))
        for one in order(names, text, repeat)
    ]
    # before, and for it
    joules = iter([used for one in turns for used in (1000.0, 3.0 if one == METHOD else 100.0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "OtherLoad", lambda external: SimpleNamespace(percent=lambda: 18.16))
        patch.setattr(
            runner,
            "DeviceUse",
            lambda device, device_map: SimpleNamespace(shared=lambda: True, close=lambda: None),
        )
        patch.setattr(
            runner, "Energy", lambda device, device_map: SimpleNamespace(since=joules.__next__)
        )
        folder, stages = tmp_path_factory.mktemp("sweep"), []
        result = run_point(point, Sweep(folder), setup_s=1000.0, stage=stages.append)
    return result, read_examples(result.folder), stages


def test_generate_loads_after_our_decoder_whose_weights_it_shares(
    words: list[str], checkpoints: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints / "llama", tmp_path / "own")  # no other test has loaded it
    kept = [word for word in words if not word.startswith("policy")]
    given = [
        f"pair.target={tmp_path / 'own'}",
        "policy=hf_generate",
        "runtime.engine=native",
        "runtime.dtype=bfloat16",
    ]
    generate = prepare(compose_config([*kept, *given]))
    runner._load_weights(generate)
    target = generate.decoders[METHOD].target
    query = target.transformers.module.model.layers[0].self_attn.q_proj.weight
    assert query.data_ptr() == target.decoder.layers[0].qkv.matrix.data_ptr()


def test_the_quality_is_the_methods_and_beside_it_is_the_baselines(
    texts: dict, measured: tuple
) -> None:
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


def test_the_target_finds_its_own_greedy_texts_likelier_than_a_drafters(measured: tuple) -> None:
    result, examples, _ = measured
    own, base = (
        sum(getattr(one, name) for one in examples)
        for name in ("log_probability", "baseline_log_probability")
    )
    assert result.change.log_probability == pytest.approx(
        own / sum(len(one.token_ids) for one in examples)
    )
    tokens = sum(len(one.baseline_token_ids) for one in examples)
    assert result.change.log_probability_baseline == pytest.approx(base / tokens)
    assert result.change.log_probability_difference < 0


def test_metrics_of_tokens_are_scored_like_any_and_a_column_comes_once(measured: tuple) -> None:
    result, examples, _ = measured
    likely, length, change = (
        *(result.further_qualities[name] for name in ("log_probability", "length")),
        result.change,
    )
    assert (likely.value, likely.low, likely.high) == (
        *(change.log_probability, change.log_probability_low, change.log_probability_high),
    )
    assert (likely.difference, likely.difference_low) == (
        *(change.log_probability_difference, change.log_probability_difference_low),
    )
    assert length.value == result.tokens / 4 and [one.scores["length"] for one in examples] == [
        len(one.token_ids) for one in examples
    ]
    base = [one.baseline_token_ids for one in examples]
    assert length.difference == length.value - sum(map(len, base)) / 4
    assert (result.baseline_empty, result.baseline_cut) == (
        0,
        sum(len(ids) == NEW for ids in base) / 4,
    )
    columns = to_frame([result]).columns
    assert columns.is_unique and {"length_difference", "log_probability_difference"} <= set(columns)


def test_a_result_tells_the_point_and_what_else_the_machine_did(
    point: Point, measured: tuple
) -> None:
    result, _, _ = measured
    facts = point.facts | {"parameters": {"target": 18080, "draft": 18080}}
    assert (result.composition, result.facts) == (point.composition, facts)
    assert (result.name, result.knobs) == (point.name, point.knobs)
    assert (result.engine, result.same_as_baseline) == (
        point.decoders["method"].method.engine,
        False,
    )
    assert result.draft_engine == point.decoders["method"].models[1].engine
    assert result.composition and result.facts["acceptance"] == "Rollback"
    assert result.environment.get("busy_elsewhere_percent") == 18.2
    assert result.environment.get("host") == platform.node()
    assert (
        result.environment.get("shared_device") is True and result.environment.get("parts") is None
    )
    assert "parts" not in result.environment
    assert result.environment.read_gb_per_s > 0.1 and result.environment.eight_rows_cost > 0.1
    row = to_frame([result]).iloc[0]
    assert row.read_gb_per_s == result.environment.read_gb_per_s
    assert row.eight_rows_cost == result.environment.eight_rows_cost
    assert result.peak_memory_mb > 10
    assert result.joules_per_token == pytest.approx(4 * 3.0 / result.tokens)


def test_only_the_traced_examples_have_a_timeline(measured: tuple) -> None:
    result, examples, _ = measured
    assert [bool(one.spans) for one in examples] == [True, True, False, False]
    assert examples[0].spans != examples[1].spans
    assert examples[0].prompt and set(result.stages_s) == {"prefill", "draft", "verify", "host"}


def test_a_point_in_batches_has_the_texts_of_batch_1_and_certificates(
    words: list[str], measured: tuple, tmp_path: Path
) -> None:
    alone, examples, _ = measured
    point = prepare(
        compose_config([*words, "runtime.batch=2", "measure.certify=true", "measure.repeats=1"])
    )
    advanced: list[float] = []
    result = run_point(point, Sweep(tmp_path), advance=advanced.append)
    found = read_examples(result.folder)
    assert sum(advanced) == pytest.approx(4) and result.cost is None
    assert (result.setting.batch, alone.setting.batch) == (2, 1) and point.id != alone.point
    assert [one.token_ids for one in found] == [one.token_ids for one in examples]
    assert [one.rounds for one in found] == [one.rounds for one in examples]
    assert result.quality == alone.quality and result.counts == alone.counts
    assert result.certificate.equal + result.certificate.ties + result.certificate.defects == 4
    assert sum(one.certificate["verdict"] == "equal" for one in found) == result.certificate.equal
    assert result.stages_s is result.cost is None  # what texts share is nobody's
    # texts wait for one another
    assert result.latency_s.total > sum(one.latency_s[0] for one in found)


def test_texts_whose_time_includes_compiling_are_counted(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in the first of two repeats, each time anew; they are counted before and after a decoding
    steps = chain(range(4 * 2 * MOST_DECODINGS), repeat(99))
    monkeypatch.setattr(runner, "compiled_steps", lambda decoders: next(steps))
    few = ["dataset.limit=2", "measure.repeats=2", "measure.traced_examples=0"]
    result = run_point(prepare(compose_config([*words, *few])), Sweep(tmp_path))
    assert result.environment.compiled_texts == 4  # two texts, by the policy and by the baseline


def test_what_was_not_asked_for_is_not_measured(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        "resume=false",
        "dataset.metrics=null",
        "dataset.limit=1",
        "measure.warmup=0",
        "measure.traced_examples=0",
    ]
    point = prepare(compose_config([*words, *asked, "measure.target_log_probability=false"]))
    monkeypatch.setattr(Decoder, "text", lambda self, token_ids: "  return 1\n ")
    results = [run_point(point, Sweep(tmp_path)) for _ in range(2)]
    assert results[0].folder != results[1].folder  # resume=false keeps both
    (example,) = read_examples(results[0].folder)
    assert example.prediction == example.baseline_prediction == "  return 1"
    assert (
        results[0].stages_s is results[0].certificate is results[0].change.log_probability is None
    )


def test_a_point_that_another_process_stored_meanwhile_has_the_numbers_of_that(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both took the same seconds."""
    few = [
        "dataset.metrics=null",
        "dataset.limit=1",
        "measure.warmup=0",
        "measure.traced_examples=0",
    ]
    point = prepare(compose_config([*words, *few, "measure.target_log_probability=false"]))
    measure = runner.result_of

    def in_the_same_seconds(*arguments: object) -> tuple[Result, list[MeasuredExample]]:
        result, rows = measure(*arguments)
        return replace(result, seconds={"setup": 0.0, "total": 1.0}), rows

    monkeypatch.setattr(runner, "result_of", in_the_same_seconds)
    first, dropped = (run_point(point, Sweep(tmp_path)) for _ in range(2))
    assert (dropped.folder, dropped.seconds) == (first.folder, first.seconds)
    assert dropped.speedup == first.speedup
    assert (first.stored_at is None, dropped.stored_at is None) == (True, False)


@pytest.mark.slow
def test_programs_are_run_for_the_policy_and_the_baseline_and_their_verdicts_are_stored(
    checkpoints: Path, texts: dict[str, list[str]], tmp_path: Path
) -> None:
    """The test of each program is that it holds what the target says."""
    file = tmp_path / "test.jsonl"
    rows = zip(PROMPTS, texts["baseline"], strict=True)
    file.write_text(
        "".join(json.dumps({"de": prompt, "test": repr(text)}) + "\n" for prompt, text in rows)
    )
    words = [
        f"pair.target={checkpoints / 'llama'}",
        f"pair.draft={checkpoints / 'llama-draft'}",
        "dataset=local",
    ]
    words += [f"dataset.path={file}", "dataset.source_column=de", f"decoding.max_new_tokens={NEW}"]
    words += [
        "dataset.reference_template='assert \"{answer}\".strip() == {test}'",
        "dataset.metric=pass_at_1",
    ]
    words += [
        "policy=bild",
        "policy.fallback=0.1",
        "policy.rollback=inf",
        "measure.repeats=1",
        "measure.run_code=true",
    ]
    points.cached_examples.cache_clear()
    result = run_point(prepare(compose_config(words)), Sweep(tmp_path / "sweep"))
    same = [mine == theirs for mine, theirs in zip(texts["method"], texts["baseline"], strict=True)]
    assert (result.quality.metric, result.quality.value, result.quality.baseline) == (
        "pass@1",
        25 * sum(same),
        100,
    )
    assert [one.scores["pass_at_1"] for one in read_examples(result.folder)] == [
        100.0 * equal for equal in same
    ]


@pytest.mark.parametrize(("most", "repeats", "said"), [(9, 4, "0.5 %"), (3, 3, "20.0 %")])
def test_repeats_until_the_speedup_is_known_and_waits_are_told(
    most: int,
    repeats: int,
    said: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [
        "measure.precision=0.05",
        f"measure.most_repeats={most}",
        "measure.quiet=60",
        "dataset.limit=2",
    ]
    point = prepare(compose_config([*words, *asked, "measure.traced_examples=0"]))
    known = lambda slow, fast, blocks: 0.005 if slow.shape[1] >= 4 else 0.2  # noqa: E731
    for user in (summary, statistics):
        monkeypatch.setattr(user, "clock_noise", known)
    monkeypatch.setattr(runner, "wait_for_quiet", lambda most_s, helpers_s: most_s - 2)
    stages: list[str] = []
    result = run_point(point, Sweep(tmp_path), stage=stages.append)
    assert stages[:3] == ["loading models", "loading llama", "loading llama-draft"]
    assert [name for name in stages if name.startswith("decoding")] == [
        "decoding", *(f"decoding, repeat {number}" for number in range(3, repeats + 1))
    ]  # fmt: skip
    assert {len(one.latency_s) for one in read_examples(result.folder)} == {repeats}
    assert (result.speedup.repeats, result.environment.waited_s) == (repeats, 58)
    told = describe_timing_noise(result, point.measure.precision)
    assert told.startswith(f" ± {said} by the clock, {repeats} repeats")
    assert told.endswith(", 58 s waited for other programs")
    assert ("not the precision that was asked for" in told) == (most == 3)
    assert (
        point.setting["precision"] == 0.05
        and "precision" not in prepare(compose_config(words)).setting
    )
