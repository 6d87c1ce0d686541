"""Heads of inner layers: training and decoding read the same states, trainings resume, and heads
match more often.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import FalconConfig, LlamaConfig, LlamaForCausalLM

from bild_lab.engine.methods.early_exit.layer_heads import LayerHeads
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Limits, Request
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.prompts import Example
from bild_lab.papers.match_rates import greedy_states
from bild_lab.training.batches import IGNORED
from bild_lab.training.modules import layer_heads
from bild_lab.training.modules.layer_heads import (
    LayerHeadsModule,
    LayerHeadsSpec,
)
from bild_lab.training.modules.predictors import (
    AnsweredPrompt,
    PredictionLoss,
    choose_contexts,
    collate,
)
from bild_lab.training.modules.references import reference_answers
from bild_lab.training.modules.states import OneRowCheckpoint, decoder_states
from scripts import match_rates, train_lm_heads
from tests.checkpoints import write_data
from tests.policies import FAMILIES, WINDOWED
from tests.tiny import END, PAD, START, TINY, VOCABULARY, save, tiny_t5
from tests.training.targets import ending

Command = Callable[..., tuple[int, str]]
PROMPTS = ("w5 w9 w12", "w7", "w8 w8 w3 w3 w20 w11")


def spec(**changes: Any) -> LayerHeadsSpec:
    return LayerHeadsSpec(**{"layers": [1, 3], "rank": None, "labels": "self", **changes})


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers of each family."""
    folder = tmp_path_factory.mktemp("deep")
    save(ending(tiny_t5(6, 4), 0), folder / "t5")
    for seed, family in ((3, "llama"), *((4, family) for family in WINDOWED)):
        save(TINY[family](seed, 4), folder / family)
    return folder


def noisy(model: LayerHeadsModule) -> LayerHeads:
    """Its heads with noise, so that each predicts something else."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return model.weights.requires_grad_(False)


@pytest.mark.fast("3-llama", "3-gemma3")
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@pytest.mark.parametrize("rank", [None, 3])
def test_heads_predict_in_training_what_they_predict_in_decoding(
    family: str, rank: int | None, deep: Path
) -> None:
    """Rows of a padded batch, prompts and sources of several lengths, against texts decoded one
    token at a time.
    """
    checkpoint = OneRowCheckpoint(str(deep / family))
    rows = spec(rank=rank).build(checkpoint.weights(torch.float32).eval(), {}, seed=0)
    heads, target = (
        noisy(rows),
        NativeModel(
            HuggingFaceModel(Checkpoint(str(deep / family)), torch.device("cpu"), torch.float32)
        ),
    )
    samples, decoded = [], []
    for length, prompt in enumerate(PROMPTS, start=4):
        source = target.source(prompt)
        _, text, states = greedy_states(target, Request(source, Limits(len(source.prompt), length)))
        assert len(set(text)) > 1, "else rows of one text cannot be told apart"
        row = checkpoint.source(prompt).prompt
        samples.append(AnsweredPrompt(torch.tensor([*row, *text]).numpy(), len(row)))
        decoded.append(
            (text, torch.stack([heads.logits(layer, states[layer - 1]) for layer in (1, 3)], 1))
        )
    batch = collate([choose_contexts(sample, spec().predictors) for sample in samples])
    trained = rows(batch["input_ids"], batch["contexts"])
    assert trained.shape == (3, 6, 2, VOCABULARY)
    for index, (text, expected) in enumerate(decoded):
        assert batch["labels"][index, : len(text), 0].tolist() == text
        torch.testing.assert_close(trained[index, : len(text)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.fast("None-t5", "3-llama", "3-gemma3")
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
@pytest.mark.parametrize("rank", [None, 3])
def test_heads_begin_as_those_of_the_decoder_that_runs_them(
    family: str, rank: int | None, deep: Path
) -> None:
    base = Checkpoint(str(deep / family)).weights(torch.float32)
    decoder = (T5Decoder if family == "t5" else LlamaDecoder)(base)
    ours, theirs = (
        spec(rank=rank).build(base, {}, seed=5).weights,
        LayerHeads.fresh(decoder, {}, (1, 3), rank, 5),
    )
    assert ours.config == theirs.config
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def peak_bytes(
    learner: LayerHeadsModule, batch: dict[str, torch.Tensor], own: bool
) -> tuple[int, float]:
    """Most bytes alive at once in a forward and a backward pass, and the loss. own: as the module
    computes it.
    """
    learner.zero_grad()
    labels, given = (
        batch["labels"],
        batch if own else {key: batch[key] for key in ("input_ids", "contexts")},
    )
    tracker = MemTracker()
    tracker.track_external(learner)
    with tracker:
        predicted = learner(**{key: value for key, value in given.items() if key != "labels"})
        loss = PredictionLoss((1.0,) * labels.shape[-1])(predicted, labels)
        loss.backward()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_the_memory_of_a_training_step_does_not_grow_with_the_logits_of_its_rows(
    rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: twice the rows, and neither twice the memory nor another loss or gradient than with
    all logits.
    """
    monkeypatch.setattr(layer_heads, "ROWS", 64)
    torch.manual_seed(0)
    shape = {"vocab_size": 4000, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    base = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=True)
    ).requires_grad_(False)
    learner = spec(layers=[1, 2], rank=rank).build(base, {}, seed=0).train()
    peaks = []
    for count in (512, 1024):
        rows = [AnsweredPrompt(np.arange(length) % 4000, 5) for length in (count // 2, count)]
        batch = collate(
            [choose_contexts(row, spec(layers=[1, 2]).predictors) for row in rows],
            reads_labels=True,
        )
        states = decoder_states(base, batch["input_ids"], batch["contexts"], (1, 2))
        monkeypatch.setattr(layer_heads, "decoder_states", lambda *_, held=states: held)
        (bounded, ours), (stacked, theirs) = (
            peak_bytes(learner, batch, own) for own in (True, False)
        )
        assert ours == pytest.approx(theirs, rel=1e-5)
        peaks.append((bounded, stacked))
    (bounded, stacked), (twice, twice_stacked) = peaks
    # bytes of what the second batch has more of, two heads, padding included
    logits = 4 * 4000 * 2 * 1024
    assert twice_stacked - stacked > 2 * logits  # else this measures nothing
    assert twice - bounded < 0.1 * logits
    gradients = []
    for own in (True, False):
        peak_bytes(learner, batch, own)
        gradients.append(
            [weight.grad.clone() for weight in learner.parameters() if weight.grad is not None]
        )
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_choices_of_an_evaluation_are_those_of_all_logits(deep: Path) -> None:
    learner = (
        spec()
        .build(OneRowCheckpoint(str(deep / "llama")).weights(torch.float32).eval(), {}, seed=0)
        .eval()
    )
    noisy(learner)
    rows = [AnsweredPrompt(np.array([START, 5, 6, 7, END][:length]), 2) for length in (4, 5)]
    batch = collate([choose_contexts(row, spec().predictors) for row in rows], reads_labels=True)
    found = learner(batch["input_ids"], batch["contexts"], batch["target_tokens"])
    logits, real = learner(batch["input_ids"], batch["contexts"]), batch["labels"] != IGNORED
    assert found.choices[real].tolist() == logits.topk(5).indices[real].tolist()
    assert found.losses[~real].tolist() == [0, 0]


def test_a_prompt_is_one_row_of_source_and_start(deep: Path) -> None:
    assert OneRowCheckpoint(str(deep / "t5")).source("w5 w9").prompt == (5, 9, END, PAD)
    assert OneRowCheckpoint(str(deep / "t5")).source("w5 w9", max_tokens=2).prompt == (5, END, PAD)
    assert OneRowCheckpoint(str(deep / "llama")).source("w5 w9").prompt == (START, 5, 9)


def test_references_are_learned_to_their_end_token_unless_they_are_cut(deep: Path) -> None:
    spec = DatasetSpec(name="words", source_column="de", metric="agreement", path="words.jsonl")
    examples = [
        Example("one", "w5", "w5 w6", ("w7 w8 w9", "w10")),
        Example("two", "w6", "w6", ("w11",)),
    ]
    for family in FAMILIES:
        base = Checkpoint(str(deep / family))
        found = reference_answers(base, spec, examples, max_target_tokens=3)
        assert [answer.answer_token_ids for answer in found.answers] == [[7, 8, 9], [11, END]]
        assert [answer.finish_reason for answer in found.answers] == ["length", "end"]
        assert found.answers[0].prompt == "w5 w6" and found.folder == Path("words.jsonl")
        assert found.manifest["model"]["fingerprint"] == base.fingerprint and found.dataset == spec
    other = reference_answers(base, spec, examples[:1], max_target_tokens=3)
    assert other.manifest["hash"] != found.manifest["hash"]
    with pytest.raises(UserError, match="example three has no reference to learn from"):
        reference_answers(base, spec, [Example("three", "w5", "w5")], 3)


def test_the_match_rate_is_the_mean_over_layers() -> None:
    hits = torch.tensor([[True, False], [True, True], [False, False]])
    assert spec().predictors.score(hits).tolist() == [0.5, 1.0, 0.0]
    assert spec(layers=[4, 2]).predictors.names == ("layer_2", "layer_4")


REFUSED = {
    "none": ({"layers": None}, "layers must list at least one layer, such as [4,6,8], got None"),
    "the last": (
        {"layers": [3, 4]},
        "layers must lie before the last of the model's 4, which has the model's own",
    ),
    "nought": ({"layers": [0]}, "each of layers must be a whole number >= 1, got 0"),
    "no rank": ({"rank": 0}, "rank must be a whole number >= 1, got 0"),
    "labels": ({"labels": "teacher"}, "heads.labels must be one of data, self, got 'teacher'"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_cannot_be_are_refused(case: str, family: str, deep: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        spec(**changes).check(Checkpoint(str(deep / family)).config)
    assert message in str(caught.value)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(
        UserError, match="per-layer heads need a T5, mT5, .* but its architecture is falcon"
    ):
        spec().check(FalconConfig())


def test_steps_and_warm_up_follow_from_the_data_unless_they_are_given() -> None:
    def recipe(*overrides: str) -> tuple[int, int]:
        found = train_lm_heads.recipe_for(
            compose_config([*overrides, "held_out=200"], "train_lm_heads"), 1200
        )
        return found.max_steps, found.warmup_steps

    assert recipe() == (21, 1)
    assert recipe("passes=30") == (210, 9)
    assert recipe("train.max_steps=100") == (100, 4)
    assert recipe("train.max_steps=100", "train.warmup_steps=7") == (100, 7)
    # at least one batch a pass
    assert recipe("passes=0.5", "train.batch_size=2000", "train.accumulate=1") == (1, 1)
    for key, value in (("passes", "0"), ("passes", "three"), ("warmup_ratio", "1.5")):
        with pytest.raises(UserError, match=f"{key} must lie in"):
            recipe(f"{key}={value}")


QUICK = [
    "train.batch_size=4",
    "train.accumulate=1",
    "train.evaluate_every=20",
    "train.log_every=10",
    "held_out=2",
]
QUICK += [
    "train.device=cpu",
    "train.precision=float32",
    "answers.max_new_tokens=12",
    "dataset.split=test",
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_heads_match_more_often_than_the_shared_one(
    family: str, command: Command, targets: Path
) -> None:
    """From the model's own greedy answers, by the two scripts."""
    data = write_data(Path("rows").absolute(), 24)
    given = [f"model.path={targets / family}", "dataset=multi30k", f"dataset.path={data}"]
    line = ["name=heads", *given, *QUICK, "layers=[1]", "heads.labels=self", "train.max_steps=40"]
    line += ["train.learning_rate=0.02", "train.evaluate_every=null"]
    code, printed = command(train_lm_heads, *line)
    assert code == 0, printed
    assert (
        "outputs/heads/heads: 40 steps, loss" in printed
        and "policy.heads=outputs/heads/heads" in printed
    )
    assert (
        f"model.path={targets / family} 'layers=[1]' 'heads=[shared,outputs/heads/heads]'"
        in printed
    )
    assert sorted(path.name for path in Path("outputs/heads").iterdir()) == [
        "calibration",
        "heads",
        "metrics.json",
    ]
    metrics = json.loads(Path("outputs/heads/metrics.json").read_text())
    assert (
        metrics["data"].startswith("greedy answers of") and metrics["recipe"]["warmup_steps"] == 2
    )
    heads = [
        "layers=[1]",
        "top_k=[1,3]",
        "heads=[shared,outputs/heads/heads]",
        "decoding.max_new_tokens=12",
    ]
    code, printed = command(match_rates, "name=match", *given, *heads)
    assert code == 0, printed
    with Path("outputs/match/match_rates.csv").open() as stream:
        rates = {
            (row["heads"], row["top_k"]): float(row["rate"])
            for row in csv.DictReader(stream)
            if row["position"] == "all"
        }
    for k in ("1", "3"):
        assert rates["outputs/heads/heads", k] > rates["shared", k] + 0.1


def test_references_need_no_answers_and_are_not_confused_with_them(
    command: Command, checkpoints: Path, data: Path
) -> None:
    line = [
        "name=heads",
        f"model.path={checkpoints / 't5'}",
        "dataset=multi30k",
        f"dataset.path={data}",
        *QUICK,
    ]
    line += ["layers=[1]", "heads.rank=2", "train.max_steps=2"]
    code, printed = command(train_lm_heads, *line, "calibration=outputs/calib")
    assert (
        code == 2
        and "holds a model's own answers, which heads.labels=data does not learn" in printed
    )
    code, printed = command(train_lm_heads, *line, "model.path=null")
    assert code == 2 and "model.path must be a folder or a hub id, got null" in printed
    assert not Path("outputs").exists()
    code, printed = command(train_lm_heads, *line)
    assert code == 0, printed
    metrics = json.loads(Path("outputs/heads/metrics.json").read_text())
    assert metrics["data"] == "references of multi30k (test)"
    assert (
        metrics["best"]["match_rate"] == metrics["best"]["top_1_layer_1"]
        and "match_rate 0." in printed
    )
    assert LayerHeads.load("outputs/heads/heads").config.rank == 2
    assert command(train_lm_heads, *line)[0] == 0  # nothing is trained again
