"""Training a small module beside a frozen model: what it draws, keeps, resumes and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from bild_lab.engine.adapters import BitaAdapter
from bild_lab.errors import UserError
from bild_lab.training.frozen.columns import ColumnEvaluator, ColumnLoss, leading_run
from bild_lab.training.frozen.job import train_beside
from bild_lab.training.frozen.splits import Draws, PassOrder, Sample, Splitter, collate
from bild_lab.training.pairs import IGNORED, BatchOrder
from bild_lab.training.trainer import TrainingFolder
from scripts import train_bita, train_medusa
from tests.training.frozen.frozen_jobs import BITA, answers, calibration, frozen_job
from tests.training.jobs import losses

Command = Callable[..., tuple[int, str]]
SAMPLE = Sample(np.array([10, 11, 12, 20, 21, 22, 23, 24]), prompt=3)


def test_labels_are_the_tokens_behind_the_next_one() -> None:
    draw = Splitter((1, 2, 3), splits=None, seed=0).drawn(SAMPLE, 0, 0)
    assert draw.contexts.tolist() == [3, 4, 5, 6]  # the first is the prompt alone, the last has one label left
    assert draw.labels.tolist() == [[21, 22, 23], [22, 23, 24], [23, 24, IGNORED], [24, IGNORED, IGNORED]]


def test_columns_of_equal_offset_have_the_same_labels() -> None:
    draw = Splitter((0, 0), splits=None, seed=0).drawn(SAMPLE, 0, 0)
    assert draw.contexts.tolist() == [3, 4, 5, 6, 7] and draw.labels.tolist()[-1] == [24, 24]


def test_splits_are_drawn_anew_in_every_pass_and_for_every_example() -> None:
    splitter, sample = Splitter((1,), splits=3, seed=0), Sample(np.arange(60), prompt=2)

    def contexts(turn: int, index: int, splitter: Splitter = splitter) -> list[int]:
        return splitter.drawn(sample, turn, index).contexts.tolist()

    assert contexts(0, 0) == contexts(0, 0) == sorted(set(contexts(0, 0)))
    others = [contexts(1, 0), contexts(0, 1), contexts(0, 0, replace(splitter, seed=1))]
    assert len({tuple(each) for each in [contexts(0, 0), *others]}) == 4
    assert splitter.spread(sample).contexts.tolist() == [2, 21, 40]


def test_the_order_tells_the_pass_over_the_data() -> None:
    order = list(PassOrder(BatchOrder([5] * 5, batch_size=2, steps=5, seed=0)))
    assert [turn for turn, _ in order] == [0] * 4 + [1] * 4 + [2] * 2  # 4 of 5 fill batches
    assert len({index for turn, index in order if turn == 0}) == 4
    draws = Draws([SAMPLE] * 5, Splitter((1,), splits=2, seed=0))
    assert draws[order[4]].contexts.tolist() == Splitter((1,), 2, 0).drawn(SAMPLE, *order[4]).contexts.tolist()


def test_batches_end_with_the_longest_context_and_pad_groups() -> None:
    splitter = Splitter((1, 2), splits=None, seed=0)
    short = Sample(np.array([7, 8, 9]), prompt=1)
    batch = collate([splitter.drawn(sample, 0, 0) for sample in (SAMPLE, short)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 22], [7, 8, 9, 0, 0, 0]]
    assert batch["contexts"].tolist() == [[3, 4, 5, 6], [1, 1, 1, 1]]
    assert batch["labels"][1].tolist() == [[9, IGNORED]] + [[IGNORED, IGNORED]] * 3


class Parrot(nn.Module):
    """Gives these logits, whatever it reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        return self.logits[: contexts.shape[0]]


def test_an_evaluation_counts_by_column_and_leading_runs() -> None:
    chosen = torch.tensor([[[21, 22], [5, 23], [23, 0], [24, 0]]])  # of labels 21 22, 22 23, 23 24, 24 –
    logits = 10.0 * nn.functional.one_hot(chosen, 30).float()
    logits[0, 2, 1, 24] = 9.0  # the second choice
    splitter = Splitter((1, 2), splits=None, seed=0)
    evaluate = ColumnEvaluator([SAMPLE], splitter, ("a", "b"), "accepted", leading_run, batch_size=4)
    scores = evaluate(Parrot(logits), ColumnLoss((1.0, 0.5)))
    assert scores["top_1_a"] == pytest.approx(3 / 4) and scores["top_1_b"] == pytest.approx(2 / 3)
    assert scores["top_5_b"] == 1.0
    assert scores["accepted"] == (2 + 0 + 1 + 1) / 4
    right, rest = -np.log(np.e**10 / (np.e**10 + 29)), np.log(np.e**10 + 29)
    second = np.log(np.e**10 + np.e**9 + 28) - 9
    assert scores["loss"] == pytest.approx((3 * right + rest + 0.5 * (2 * right + second)) / 7, rel=1e-5)


class Kill(TrainerCallback):
    """Ends the process's work behind a step, as a kill would, before anything of it is written."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> tuple[Path, dict[str, Any]]:
    """A training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_beside(frozen_job(folder, checkpoints / "llama"))


def test_a_training_leaves_the_adapter_alone(whole: tuple[Path, dict[str, Any]], checkpoints: Path) -> None:
    folder, metrics = whole
    assert [path.name for path in folder.iterdir()] == ["adapter"]
    names = ["README.md", "adapter.safetensors", "adapter_config.json", "metrics.json"]
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == names
    adapter = BitaAdapter.load(folder / "adapter")
    assert adapter.config.base["path"] == str(checkpoints / "llama")
    assert metrics["parameters"] == adapter.config.parameters == 2 * 2 * 2 * 2 * 8 + 3 * 32
    assert (metrics["train_examples"], metrics["held_out_examples"], metrics["dropped_examples"]) == (14, 4, 0)
    assert metrics["evaluations"] == 3 and metrics["best"]["accepted"] >= 0
    card = (folder / "adapter" / "README.md").read_text()
    assert "| learning_rate | 0.03 |" in card and "| top_1_mask_3 |" in card


@pytest.mark.parametrize("step", [3, 6])
def test_a_training_goes_on_as_if_it_had_not_been_killed(
    step: int, whole: tuple[Path, dict[str, Any]], tmp_path: Path, checkpoints: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_beside(frozen_job(tmp_path, checkpoints / "llama", callbacks=(Kill(step),)))
    saved = load_file(TrainingFolder(tmp_path).last() / "model.safetensors")
    assert {name.split(".")[0] for name in saved} == {"adapter"}
    assert losses(train_beside(frozen_job(tmp_path, checkpoints / "llama"))) == losses(whole[1])
    ours, theirs = (load_file(folder / "adapter" / "adapter.safetensors") for folder in (tmp_path, whole[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_training_is_not_done_again(whole: tuple[Path, dict[str, Any]], checkpoints: Path) -> None:
    assert train_beside(frozen_job(whole[0], checkpoints / "llama", callbacks=(Kill(1),))) == whole[1]


def test_an_accumulated_batch_has_the_same_losses(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, checkpoints: Path
) -> None:
    parts = train_beside(frozen_job(tmp_path, checkpoints / "llama", accumulate=2))
    assert losses(parts) == [(step, pytest.approx(loss, rel=1e-3)) for step, loss in losses(whole[1])]


def test_the_best_weights_are_kept(tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, seen = iter([1.0, 3.0, 2.0]), []

    def scored(self: Any, model: Any, loss: Any) -> dict[str, float]:
        seen.append(model.adapter.masks.detach().clone())
        return {"accepted": next(scores), "loss": 1.0}

    monkeypatch.setattr(ColumnEvaluator, "__call__", scored)
    assert train_beside(frozen_job(tmp_path, checkpoints / "llama"))["best"]["step"] == 4
    assert torch.equal(BitaAdapter.load(tmp_path / "adapter").masks, seen[1])


def test_answers_too_short_for_the_masks_are_dropped_and_counted(tmp_path: Path, checkpoints: Path) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    rows = answers(18, shortest=2)
    short = sum(len(row.answer_token_ids) < 4 for row in rows)
    mixed = replace(job, calibration=calibration(job.base, rows))
    assert 0 < short and len(mixed.samples) == 18 - short
    many = replace(job, extension=replace(BITA, mask_tokens=12))
    message = r"of the 18 answers in words, 18 are dropped: they have fewer than the 13 tokens that 12 predictions need"
    with pytest.raises(UserError, match=message):
        train_beside(many)
    assert list(tmp_path.iterdir()) == []


def test_answers_of_another_model_are_refused(tmp_path: Path, checkpoints: Path) -> None:
    job = frozen_job(tmp_path, checkpoints / "llama")
    with pytest.raises(UserError, match="with other weights than .*llama-draft, but a BiTA adapter learns its own"):
        frozen_job(tmp_path, checkpoints / "llama-draft", calibration=job.calibration)


def test_a_folder_of_another_base_is_not_gone_on_with(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_beside(frozen_job(tmp_path, checkpoints / "llama", callbacks=(Kill(3),)))
    with pytest.raises(UserError, match=r"holds a training with model.weights=\w+, this one has \w+; choose another"):
        train_beside(frozen_job(tmp_path, checkpoints / "llama-draft"))
    with pytest.raises(UserError, match="holds a training with bita.splits=2, this one has 3"):
        train_beside(frozen_job(tmp_path, checkpoints / "llama", extension=replace(BITA, splits=3)))


def test_a_batch_that_cannot_be_divided_is_refused(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="train.batch_size=4 cannot be divided among 3 processes"):
        train_beside(frozen_job(tmp_path, checkpoints / "llama"))


QUICK = ["train.max_steps=2", "train.batch_size=4", "train.accumulate=1", "train.evaluate_every=2", "train.log_every=1"]
QUICK += ["train.device=cpu", "train.precision=float32", "held_out=2", "answers.max_new_tokens=8", "dataset.split=test"]


def words(data: Path) -> list[str]:
    return ["dataset=multi30k", f"dataset.path={data}", *QUICK]


def test_the_answers_are_generated_first_and_kept(command: Command, checkpoints: Path, data: Path) -> None:
    line = ["name=bita", f"model.path={checkpoints / 'llama'}", *words(data), "bita.mask_tokens=1"]
    line += ["dataset.prompt_template=German: {source} English:"]
    code, printed = command(train_bita, *line)
    assert code == 0, printed
    assert "outputs/bita/adapter: 2 steps, loss" in printed and "policy.adapter=outputs/bita/adapter" in printed
    assert "top-1 accuracy: mask_1 " in printed
    metrics = json.loads(Path("outputs/bita/metrics.json").read_text())
    assert metrics["answers"]["folder"] == "outputs/bita/calibration"
    code, printed = command(train_bita, *line)
    assert code == 0 and "step 1:" not in printed  # nothing is trained again
    heads = ["name=medusa", f"model.path={checkpoints / 'llama'}", *QUICK, "calibration=outputs/bita/calibration"]
    code, printed = command(train_medusa, *heads, "medusa.heads=1", "dataset.path=nowhere")
    assert code == 0, printed
    assert "policy=medusa policy.heads=outputs/medusa/heads" in printed
    assert sorted(path.name for path in Path("outputs/medusa").iterdir()) == ["heads", "metrics.json"]


BAD_INPUT = {
    "no model": ([], "model.path must be a folder or a hub id, got None"),
    "an encoder–decoder": (["model.path={t5}"], "a BiTA adapter needs a decoder-only model, got the encoder–decoder"),
    "no masks": (["model.path={llama}", "bita.mask_tokens=0"], "bita.mask_tokens must be a whole number >= 1"),
    "no calibration": (["model.path={llama}", "calibration=nowhere"], "no calibration data in nowhere"),
    "accumulation": (["model.path={llama}", "train.accumulate=3"], "must be a multiple of train.accumulate=3, got 4"),
    "in the way": (["model.path={llama}", "name=taken"], "outputs/taken/adapter is in the way: it is no training's"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_line_and_no_answers(case: str, command: Command, checkpoints: Path, data: Path) -> None:
    Path("outputs/taken/adapter").mkdir(parents=True)
    changed, message = BAD_INPUT[case]
    paths = {"{t5}": str(checkpoints / "t5"), "{llama}": str(checkpoints / "llama")}
    for mark, path in paths.items():
        changed = [word.replace(mark, path) for word in changed]
    code, printed = command(train_bita, *words(data), *changed)
    assert code == 2 and message in printed and len(printed.strip().splitlines()) == 1
    assert not list(Path("outputs").rglob("*.parquet"))
