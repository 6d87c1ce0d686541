"""A judge's labels, its classifier, and its command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bild_lab.engine.heads import JudgeHead
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.decoding.load import load
from bild_lab.training.modules import judge as jobs
from bild_lab.training.modules.judge import (
    JudgeJob,
    JudgeSpec,
    Labels,
    _joined,
    _labelled,
    fit,
    regression,
    roc_auc,
    threshold_at,
    train_judge,
)
from scripts import train_module as script

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


def test_an_answer_without_a_mismatch_has_no_labels(job: JudgeJob, checkpoints: Path) -> None:
    alike = load(str(checkpoints / "llama"), str(checkpoints / "llama"), "speculative")
    none = _labelled(replace(job, decoder=alike), 0, lambda: None)
    assert len(none) == len(_joined([none, none])) == 0
    some = labels(5, 0)
    assert torch.equal(_joined([none, some]).hidden, some.hidden)


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
    status, told = command(script, "module=judge", *pair, *words, "module.held_out=0.4", "module.recall=0.8")
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


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("exact_match", "mismatches to learn from, 0 change the outcome, and a judge needs both"),  # all are wrong
        ("agreement", r"of the (\d+) mismatches to learn from, \1 change the outcome"),
    ],
)
def test_real_scores_of_one_kind_teach_nothing(
    metric: str, message: str, job: JudgeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "score", REAL_SCORE)
    given = {"dataset": replace(job.dataset, metric=metric)}
    if metric == "agreement":  # which needs no references
        given["examples"] = tuple(replace(one, references=()) for one in job.examples)
    with pytest.raises(UserError, match=message):
        train_judge(replace(job, **given))
    assert len(list(job.labels.glob("0*.safetensors"))) == 6


REAL_SCORE = jobs.score


@pytest.mark.parametrize(("field", "value"), [("tolerance", -1), ("held_out", 0), ("recall", 1.1)])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"module.{field} must lie in"):
        replace(SPEC, **{field: value})


def labels(count: int, seed: int, dim: int = 4) -> Labels:
    """Which mismatch matters is said by the first coordinate, not always truly."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 + 2 * torch.randn(count, dim, generator=generator)
    return Labels(hidden, hidden[:, 0] + torch.randn(count, generator=generator) > 3)


def test_the_regression_is_at_the_minimum_of_its_loss() -> None:
    """The gradient of C Σ loss + |w|² / 2 is zero there, by hand."""
    part, strength = labels(60, 0), 0.3
    states = part.hidden.double() - 3
    weight, bias, steps = regression(states, part.important, strength)
    surplus = (states @ weight + bias).sigmoid() - part.important.double()
    assert (strength * (surplus[:, None] * states).sum(0) + weight).abs().max() < 1e-5
    assert abs(float(surplus.sum())) < 1e-5
    assert 1 < steps < 200
    assert weight[0] > 3 * weight[1:].abs().max()


def test_the_area_is_the_share_of_pairs_in_order_with_ties_as_halves() -> None:
    scores, important = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, True, False, True])
    pairs = [(0.4, 0.1), (0.4, 0.4), (0.9, 0.1), (0.9, 0.4)]
    assert roc_auc(scores, important) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / 4)


@pytest.mark.parametrize(("recall", "expected"), [(1.0, 0.2), (0.9, 0.2), (0.8, 0.3), (0.6, 0.5), (0.0, 1.0)])
def test_the_threshold_rejects_as_many_as_asked(recall: float, expected: float) -> None:
    chances = torch.tensor([0.9, 0.2, 0.5, 0.3, 0.7, 0.1], dtype=torch.float64)
    important = torch.tensor([True, True, True, True, True, False])
    found = threshold_at(chances, important, recall)
    assert found == expected
    assert float((chances[important] >= found).double().mean()) >= recall


def test_the_figures_are_those_of_the_head_that_is_stored() -> None:
    """Its weights hold the standardization: hidden states go in as they are."""
    train, held_out = labels(200, 1), labels(80, 2)
    head, figures = fit(train, held_out, 0.9, {"path": "t"}, {"path": "d"})
    chances = head(held_out.hidden)
    threshold, important = head.config.threshold, held_out.important
    assert figures["roc_auc"] == pytest.approx(roc_auc(chances.detach(), important), abs=1e-6)
    assert figures["roc_auc"] > 0.8
    assert figures["recall"] == pytest.approx(float((chances >= threshold - 1e-6)[important].double().mean()))
    assert figures["kept_share"] == pytest.approx(float((chances < threshold - 1e-6)[~important].double().mean()))
    assert figures["recall"] >= 0.9 > 1 - figures["kept_share"]
    assert (head.config.base, head.config.drafter) == ({"path": "t"}, {"path": "d"})


@pytest.mark.parametrize("value", [True, False])
def test_mismatches_of_one_kind_teach_nothing(value: bool) -> None:
    part = labels(20, 1)
    alike = Labels(part.hidden, torch.full_like(part.important, value))
    for parts, name in (((alike, part), "to learn from"), ((part, alike), "held out")):
        with pytest.raises(UserError, match=f"of the 20 mismatches {name}, {20 * value} change .* both kinds"):
            fit(*parts, 0.9, {}, {})
