"""A judge's training from the command to decoding with it, and what is left after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bild_lab.engine.adapters import JudgeHead
from bild_lab.errors import UserError
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.decoding.load import load
from bild_lab.training.judge import job as jobs
from bild_lab.training.judge.job import JudgeJob, JudgeSpec, _joined, _labelled, train_judge
from scripts import train_judge as script

SPEC = JudgeSpec(tolerance=0.0, held_out=0.4, recall=0.8)


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up metric, by which some of the random models' swaps matter and others do not."""

    def made_up(
        metric: str, texts: Sequence[str], references: Sequence[Sequence[str]], run_code: bool
    ) -> SimpleNamespace:
        assert metric == "bleu" and references[0][0].startswith("w")
        return SimpleNamespace(value=sum(map(ord, texts[0])) % 3)

    monkeypatch.setattr(jobs, "score", made_up)


@pytest.fixture
def job(checkpoints: Path, data: Path, tmp_path: Path, score: None) -> JudgeJob:
    """A search of six sentences."""
    decoder = load(str(checkpoints / "llama"), str(checkpoints / "llama-draft"), "speculative")
    dataset = DatasetSpec(name="words", path=str(data), source_column="de", reference_column="en", metric="bleu")
    return JudgeJob(decoder, ["pair.target=T"], SPEC, dataset, load_examples(dataset), 8, tmp_path / "judge")


def interrupted(after: int) -> Callable[[], None]:
    left = [after]

    def advance() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    return advance


def same(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key not in ("search_s", "training_s", "environment")}


def test_an_interrupted_search_goes_on_and_ends_the_same(job: JudgeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = jobs._search
    monkeypatch.setattr(jobs, "_search", lambda own, example: searched.append(example.id) or search(own, example))
    with pytest.raises(KeyboardInterrupt):
        train_judge(job, interrupted(2))
    metrics = train_judge(job)
    assert sorted(searched) == sorted(example.id for example in job.examples)
    assert train_judge(job) == json.loads((job.folder / "judge" / "metrics.json").read_text())
    whole = train_judge(replace(job, folder=job.folder.with_name("whole")))
    assert same(whole) == same(metrics)
    heads = [JudgeHead.load(job.folder.with_name(name) / "judge") for name in ("judge", "whole")]
    assert heads[0].weight.tolist() == heads[1].weight.tolist() and heads[0].config == heads[1].config


def test_an_answer_without_a_mismatch_has_no_labels(job: JudgeJob) -> None:
    job.labels.mkdir(parents=True)
    (job.labels / "000000.json").write_text(json.dumps({"mismatches": [], "hidden": ""}))
    labels = _labelled(job, 0, lambda: None)
    assert len(labels) == len(_joined([labels, labels])) == 0


def test_other_settings_are_refused_in_the_same_folder(job: JudgeJob) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_judge(job, interrupted(1))
    with pytest.raises(UserError, match="holds labels with tolerance=0.0, but this command has tolerance=1.0"):
        train_judge(replace(job, spec=replace(SPEC, tolerance=1.0)))
    train_judge(replace(job, spec=replace(SPEC, recall=0.5)))  # the labels are the same
    with pytest.raises(UserError, match="holds a training with recall=0.5, but this command has recall=0.8"):
        train_judge(job)


def test_the_command_trains_a_judge_that_decodes(
    checkpoints: Path, data: Path, tmp_path: Path, score: None, command: Callable[..., tuple[int, str]]
) -> None:
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    words = ["dataset=multi30k", f"dataset.path={data}", "dataset.split=test", "decoding.max_new_tokens=8"]
    status, told = command(script, *pair, *words, "judge.held_out=0.4", "judge.recall=0.8", config="train_judge")
    assert status == 0, told
    assert "outputs/judge/judge: " in told and "policy=judge policy.adapter=outputs/judge/judge" in told
    metrics = json.loads((tmp_path / "outputs/judge/metrics.json").read_text())
    assert 0 < metrics["important"] < metrics["mismatches"] and metrics["examples"] == 6
    place = str(tmp_path / "outputs/judge/judge")
    target, draft = (word.partition("=")[2] for word in pair)
    traces = []
    for threshold in (0.0, 1.0):
        decoder = load(target, draft, "judge", adapter=place, threshold=threshold)
        traces.append(decoder.generate("w5 w9 w12", 20).trace)
    assert traces[1].rollbacks < traces[0].rollbacks
    with pytest.raises(UserError, match="whose weights are not those of"):
        load(draft, target, "judge", adapter=place)


def test_real_scores_that_never_change_teach_nothing(job: JudgeJob) -> None:
    """Random models translate nothing rightly, so no mismatch matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "score", REAL_SCORE)
        with pytest.raises(UserError, match="mismatches to learn from, 0 change the outcome, and a judge needs both"):
            train_judge(replace(job, dataset=replace(job.dataset, metric="exact_match")))
    assert len(list((job.folder / "labels").glob("0*.json"))) == 6


def test_with_agreement_as_the_metric_every_other_text_is_another_outcome(job: JudgeJob) -> None:
    dataset = replace(job.dataset, metric="agreement", reference_column=None)
    examples = tuple(replace(one, references=()) for one in job.examples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "score", REAL_SCORE)
        with pytest.raises(UserError, match=r"of the (\d+) mismatches to learn from, \1 change the outcome"):
            train_judge(replace(job, dataset=dataset, examples=examples))


REAL_SCORE = jobs.score


@pytest.mark.parametrize(("field", "value"), [("tolerance", -1), ("held_out", 0), ("held_out", 1), ("recall", 1.1)])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"judge.{field} must lie in"):
        replace(SPEC, **{field: value})
