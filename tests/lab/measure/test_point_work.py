"""What a point runs beside its timed texts, counted in sessions of each model and part of the
measurement.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.engine.models.native import NativeModel
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure import likelihood, runner, score
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.measure.timing import LOOP_SHARE_REPEATS, PHASES
from bild_lab.lab.point import prepare as points
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.schema.examples import MeasuredExample, read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep

TEXTS, REPEATS = 3, 2
PROMPTS = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20"]
Run = Callable[..., tuple[Result, list[MeasuredExample], Counter]]


@pytest.fixture
def run(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Measures a point.

    Returns its result, its texts, and how many sessions were opened, by part and model.
    """
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"de": prompt, "en": "w3"}) + "\n" for prompt in PROMPTS))
    words = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    words += [
        "dataset=multi30k",
        f"dataset.path={file}",
        "decoding.max_new_tokens=12",
        "runtime.threads=1",
    ]
    words += [
        f"measure.repeats={REPEATS}",
        "measure.warmup=1",
        "measure.traced_examples=2",
        "measure.certify=true",
    ]
    monkeypatch.setattr(likelihood, "_without_nan", set())
    points.cached_examples.cache_clear()
    part, opened, start = [""], Counter(), NativeModel.start

    def noted(model: NativeModel, *arguments: object) -> object:
        if part[0] != PHASES["wait"]:  # then the cost of rows is measured, once in a process
            opened[part[0], Path(model.checkpoint.path).name] += 1
        return start(model, *arguments)

    monkeypatch.setattr(NativeModel, "start", noted)

    def measured(
        *further: str, long_round_s: float
    ) -> tuple[Result, list[MeasuredExample], Counter]:
        for module in (runner, score):
            monkeypatch.setattr(module, "LONG_ROUND_S", long_round_s)
        opened.clear()
        point = prepare(compose_config([*words, *further, "resume=false"]))
        result = run_point(
            point, Sweep(tmp_path / "sweep"), stage=lambda name: part.__setitem__(0, name)
        )
        return result, read_examples(result.folder), Counter(opened)

    return measured


DECODED = {("warming up", "llama"): 2, ("decoding", "llama"): 2 * REPEATS * TEXTS}
DRAFTED = {("warming up", "llama-draft"): 1, ("decoding", "llama-draft"): REPEATS * TEXTS}


def test_a_slow_model_runs_for_the_timed_texts_alone(run: Run) -> None:
    result, examples, opened = run("policy=speculative", long_round_s=0.0)
    checked = {("checking", "llama"): 1, ("checking", "llama-draft"): 1}
    assert opened == {**DECODED, **DRAFTED, **checked}
    # sound by now
    assert run("policy=speculative", "policy.window=3", long_round_s=0.0)[2] == {
        **DECODED,
        **DRAFTED,
    }
    assert result.certificate.equal == TEXTS and [bool(one.spans) for one in examples] == [
        True,
        True,
        False,
    ]
    assert sum(result.stages_s.values()) == pytest.approx(
        sum(one.latency_s[0] for one in examples[:2])
    )
    fast, again, others = run("policy=speculative", long_round_s=float("inf"))
    texts = {
        ("tracing", "llama"): 2 + 2 * LOOP_SHARE_REPEATS,
        ("tracing", "llama-draft"): 2,
        ("scoring by the target", "llama"): TEXTS,
    }
    # a fast one once more with clocks, with and without a loop, and a forward for each text
    assert others == {**DECODED, **DRAFTED, **texts}
    assert fast.change.log_probability == pytest.approx(result.change.log_probability, rel=1e-5)
    assert [one.token_ids for one in again] == [one.token_ids for one in examples]


def test_only_texts_that_differ_from_the_targets_own_are_examined(run: Run) -> None:
    result, _, opened = run(
        "policy=bild", "policy.fallback=0.1", "policy.rollback=1.5", long_round_s=0.0
    )
    differing = TEXTS - result.certificate.equal
    assert 0 < differing < TEXTS
    # scored row by row, and decoded once more up to where they differ
    examined = {("certifying", "llama"): 2 * differing, ("certifying", "llama-draft"): differing}
    assert {key: count for key, count in opened.items() if key[0] == "certifying"} == examined
    assert not any(name == "scoring by the target" for name, _ in opened)


def test_rows_that_processors_changed_are_not_the_targets_own(run: Run) -> None:
    bans = (
        "decoding.processors=[{_target_: transformers.NoRepeatNGramLogitsProcessor, ngram_size: 1}]"
    )
    _, examples, opened = run("policy=speculative", bans, long_round_s=0.0)
    assert opened["scoring by the target", "llama"] == TEXTS
    assert len({one.log_probability for one in examples}) == TEXTS
