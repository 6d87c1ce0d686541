"""A fine-tuning from job to checkpoint: what it learns, keeps, resumes and refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerCallback

import bild_lab
from bild_lab.engine.models import device
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.data.prompts import Example
from bild_lab.training import finetune as finetuning
from bild_lab.training import run as runs
from bild_lab.training import trainer as training
from bild_lab.training.batches import AnsweredExample
from bild_lab.training.finetune import best_score, finetune, finetune_best, job_identity
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.start import FromCheckpoint
from bild_lab.training.trainer import training_arguments
from tests import tiny_architectures
from tests.training.jobs import LLAMA, MICRO, T5, Kill, job, losses, sentences


class Steps(TrainerCallback):
    """Records the steps that are done, and PyTorch's threads during them."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.threads: set[int] = set()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.done.append(state.global_step)
        self.threads.add(torch.get_num_threads())


def killed(folder: Path, step: int, **changes: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        finetune(job(folder, callbacks=(Kill(step),), **changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A training that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finetune(job(folder))


def test_a_training_leaves_a_checkpoint_that_a_sweep_takes(whole: tuple[Path, dict]) -> None:
    folder, metrics = whole
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint"]
    assert json.loads((folder / "checkpoint" / "metrics.json").read_text()) == metrics
    decoder = bild_lab.load(str(folder / "checkpoint"), policy="vanilla")
    assert (
        decoder.target.engine in ("kernels", "native")
        and decoder.target.checkpoint.config.use_cache
    )
    assert len(decoder.generate("Haus Hund", max_new_tokens=6).token_ids) <= 6


@pytest.mark.parametrize("name", ["gemma3", "t5gemma"])
def test_a_model_of_several_configurations_trains_and_decodes(name: str, tmp_path: Path) -> None:
    """Planted: the setting of its cache is in parts of its configuration alone."""
    base = tmp_path / "base"
    tiny_architectures.build(name).save_pretrained(base)
    tiny_architectures.word_tokenizer().save_pretrained(base)
    example = Example("1", "w5 w6", "w5 w6", ("w7 w8",))
    start, words = FromCheckpoint(Checkpoint(str(base))), {"train": (example,) * 4}
    finetune(job(tmp_path / "run", start=start, validation=(example,), max_steps=1, **words))
    config = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    part = config.get("text_config") or config["decoder"]
    assert "use_cache" not in config and part["use_cache"]
    decoder = bild_lab.load(str(tmp_path / "run" / "checkpoint"), policy="vanilla")
    assert decoder.generate("w5 w6", max_new_tokens=6).token_ids


def test_losses_scores_and_provenance_are_recorded(whole: tuple[Path, dict]) -> None:
    _, metrics = whole
    assert [step for step, _ in losses(metrics)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    rates = [entry["learning_rate"] for entry in metrics["history"] if "learning_rate" in entry]
    assert rates == [0.05] * 6
    assert metrics["evaluations"] == 3 and metrics["best"]["step"] in (2, 4, 6)
    assert metrics["passes"] == pytest.approx(24 / 22)
    assert metrics["environment"]["torch"] == version("torch")
    assert metrics["training_s"] > 0 and metrics["start"] == "random weights (micro t5)"


@pytest.mark.parametrize(("warmup", "told"), [(6, True), (5, False)])
def test_a_rate_that_is_never_reached_is_told(
    warmup: int, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: a recipe's warm-up in a short training, which learns at a part of the rate."""
    warn_once.cache_clear()
    metrics = finetune(job(tmp_path, warmup_steps=warmup, evaluate_every=None))
    rates = [entry["learning_rate"] for entry in metrics["history"] if "learning_rate" in entry]
    assert (max(rates) < MICRO.learning_rate) is told
    assert ("never reaches train.learning_rate=0.05" in caplog.text) is told


@pytest.mark.fast("3")
@pytest.mark.parametrize("step", [3, 1, 6])
def test_a_killed_training_resumes_as_if_it_had_not_been_killed(
    step: int, whole: tuple[Path, dict], tmp_path: Path
) -> None:
    killed(tmp_path, step)
    assert (tmp_path / "training" / "job.json").is_file() and not (tmp_path / "checkpoint").exists()
    again = finetune(job(tmp_path))
    assert losses(again) == losses(whole[1])
    ours, theirs = weights(tmp_path), weights(whole[0])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def unmarked(checkpoint: Path) -> None:
    (checkpoint / "complete").unlink()
    (checkpoint / "model.safetensors").write_bytes(b"half")


def cut_later(checkpoint: Path) -> None:
    state = checkpoint / "optimizer.pt"
    state.write_bytes(state.read_bytes()[:-1])


def without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


@pytest.mark.slow
def test_a_training_resumes_with_the_threads_it_began_with(tmp_path: Path) -> None:
    before, steps = torch.get_num_threads(), Steps()
    try:
        torch.set_num_threads(before + 1)
        killed(tmp_path, 3)
    finally:
        torch.set_num_threads(before)
    finetune(job(tmp_path, callbacks=(steps,)))
    assert steps.threads == {before + 1} and torch.get_num_threads() == before


@pytest.mark.fast("without_weights")
@pytest.mark.parametrize("damage", [without_weights, unmarked, cut_later])
def test_a_training_resumes_from_the_checkpoint_before_a_damaged_one(
    damage: Callable[[Path], None], whole: tuple[Path, dict], tmp_path: Path
) -> None:
    killed(tmp_path, 5)
    damage(tmp_path / "training" / "checkpoint-4")
    steps = Steps()
    assert losses(finetune(job(tmp_path, callbacks=(steps,)))) == losses(whole[1])
    assert steps.done == [3, 4, 5, 6]


def test_best_weights_that_are_gone_are_not_silently_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_by(monkeypatch, [3.0, 2.0, 1.0])
    killed(tmp_path, 5)
    shutil.rmtree(tmp_path / "training" / "checkpoint-2")
    with pytest.raises(
        UserError, match=r"checkpoint-2, which holds the best weights so far, is gone; remove"
    ):
        finetune(job(tmp_path))
    assert (tmp_path / "training" / "checkpoint-4" / "complete").is_file()


def test_a_moved_folder_is_resumed_and_its_best_weights_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scored_by(monkeypatch, [3.0, 2.0, 1.0])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingFolder, "publish", interrupted)  # when all steps are done
        finetune(job(tmp_path / "one"))
    (tmp_path / "one").rename(tmp_path / "two")
    metrics = finetune(job(tmp_path / "two"))
    assert metrics["best"]["step"] == 2
    assert torch.equal(weights(tmp_path / "two")["shared.weight"], seen[0])


def test_a_full_disk_is_reported_and_leaves_earlier_checkpoints_intact(
    whole: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(content: Any, path: str, **options: Any) -> None:
        if "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(
            UserError,
            match=r"(?s)No space left on device .*resumes from .*checkpoint-2, which is int",
        ):
            finetune(job(tmp_path))
    assert [path.name for path in (tmp_path / "training").glob("checkpoint-*")] == ["checkpoint-2"]
    assert losses(finetune(job(tmp_path))) == losses(whole[1])


@pytest.mark.slow
def test_a_model_that_cannot_be_written_can_be_written_later(
    whole: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PreTrainedModel.save_pretrained

    def full(self: Any, place: Any, **options: Any) -> None:
        if Path(place).name == ".checkpoint":
            (Path(place) / "model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, place, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(UserError, match="cannot write the trained model"):
            finetune(job(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training"]
    again = finetune(job(tmp_path))
    assert losses(again) == losses(whole[1])
    assert torch.equal(weights(tmp_path)["shared.weight"], weights(whole[0])["shared.weight"])


def test_a_finished_training_is_not_trained_again(
    whole: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, metrics = whole
    monkeypatch.setattr(runs, "ResumableTrainer", None)
    assert finetune(job(folder)) == metrics


def test_a_metric_that_compares_no_texts_is_refused_and_stop_strings_are_another_training(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        UserError, match=r"compares texts with references, which dataset\.metric=length does"
    ):
        job(tmp_path, metric="length")
    plain, cut = (job_identity(job(tmp_path, cut=strings)) for strings in ((), ("\n", "Q:")))
    assert cut == {**plain, "dataset.cut": ["\n", "Q:"]} and "dataset.cut" not in plain


REFUSED = {
    "another rate": (
        {"learning_rate": 0.1},
        "train.learning_rate=0.05, but this command has train.learning_rate=0.1;",
    ),
    "other data": ({"train": sentences(21)}, "a training with training examples="),
    "another architecture": ({"model": LLAMA}, "a training with model.config."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_of_another_training_is_refused(
    case: str, whole: tuple[Path, dict], tmp_path: Path
) -> None:
    changes, message = REFUSED[case]
    before = weights(whole[0])
    with pytest.raises(UserError, match=message):
        finetune(job(whole[0], **changes))
    assert torch.equal(before["shared.weight"], weights(whole[0])["shared.weight"])


def test_an_unfinished_training_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    killed(tmp_path, 3)
    with pytest.raises(
        UserError,
        match=r"train.seed=0, but this command has train.seed=1; choose another name=NAME",
    ):
        finetune(job(tmp_path, seed=1))
    assert (tmp_path / "training" / "checkpoint-2" / "complete").exists()


def test_the_best_checkpoint_is_kept_and_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scored_by(monkeypatch, [1.0, 3.0, 2.0])
    metrics = finetune(job(tmp_path))
    assert metrics["best"]["step"] == 4 and metrics["best"]["bleu"] == 3.0
    assert torch.equal(weights(tmp_path)["shared.weight"], seen[1])


def test_a_training_stops_at_the_score_that_was_asked_for_also_if_it_was_killed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scored_by(monkeypatch, [1.0, 3.0])  # a third evaluation would fail
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainingFolder, "publish", interrupted)
        finetune(job(tmp_path, stop_at_score=3.0))
    metrics = finetune(job(tmp_path, stop_at_score=3.0))
    assert (metrics["best"]["step"], metrics["evaluations"]) == (4, 2) and metrics["steps"] < 6
    assert torch.equal(weights(tmp_path)["shared.weight"], seen[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "kept"), [(3.5, 0), pytest.param(None, 1, marks=pytest.mark.slow)]
)
def test_of_several_learning_rates_the_best_by_validation_is_kept_or_the_nearest_to_a_score(
    stop: float | None,
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored_by(monkeypatch, [1, 3, 2, 1, 2, 5])
    rates, whole = [0.05, 0.02], job(tmp_path / "both", stop_at_score=stop)
    metrics = finetune_best(whole, rates)
    assert metrics["learning_rates"] == {"0.05": 3, "0.02": 5}
    assert (metrics["recipe"]["learning_rate"], metrics["best"]["bleu"]) == (
        rates[kept],
        (3, 5)[kept],
    )
    own = weights(tmp_path / f"both_rate_{rates[kept]}")
    assert all(
        torch.equal(own[name], weight) for name, weight in weights(tmp_path / "both").items()
    )
    assert finetune_best(whole, rates) == TrainingFolder(tmp_path / "both").finished() == metrics
    with pytest.raises(
        UserError,
        match=r"train.learning_rate=\[0.05, 0.02\], but this command has .*\[0.05, 0.01\]",
    ):
        finetune_best(whole, [0.05, 0.01])
    with pytest.raises(UserError, match="several learning rates are compared by evaluations"):
        finetune_best(job(tmp_path / "blind", evaluate_every=None), rates)


def test_a_score_to_stop_at_comes_from_a_training_on_the_same_examples(
    whole: tuple[Path, dict],
) -> None:
    folder, metrics = whole
    assert best_score(folder, "bleu", sentences(5, seed=1)) == metrics["best"]["bleu"]
    for metric, examples in (("rouge", sentences(5, seed=1)), ("bleu", sentences(5, seed=2))):
        with pytest.raises(UserError, match="was scored by bleu on other examples"):
            best_score(folder, metric, examples)


def interrupted(*values: Any) -> None:
    raise KeyboardInterrupt


def scored_by(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> list[torch.Tensor]:
    """Give these scores to the next evaluations; returns the list that receives the weights of
    each.
    """
    seen: list[torch.Tensor] = []

    def score(model: PreTrainedModel, loss: Any) -> dict[str, float]:
        value = scores[len(seen)]
        seen.append(model.shared.weight.detach().clone())
        return {"bleu": value, "bleu_low": value, "bleu_high": value, "loss": 1.0, "seconds": 0.0}

    monkeypatch.setattr(finetuning, "Evaluator", lambda **fields: score)
    return seen


@pytest.mark.fast("calm-llama")
@pytest.mark.parametrize("model", [T5, LLAMA], ids=["t5", "llama"])
@pytest.mark.parametrize("loss", ["calm", "last", "early_exit"])
def test_a_model_learns_by_every_loss(model: dict, loss: str, tmp_path: Path) -> None:
    rate = {
        "learning_rate": 0.02,
        "optimizer": "adamw",
        "schedule": "linear",
        "warmup_steps": 4,
        "clip_norm": 1.0,
    }
    steps = {"max_steps": 40, "evaluate_every": 40, "log_every": 10, "batch_size": 8}
    metrics = finetune(job(tmp_path, model=model, loss=loss, **rate, **steps))
    logged = [entry["loss"] for entry in metrics["history"] if "loss" in entry]
    assert logged[-1] < logged[0] - 0.7
    layers = sorted(key for key in metrics["best"] if key.startswith("loss_layer"))
    assert layers == ([] if loss == "last" else ["loss_layer_1", "loss_layer_2"])


@pytest.mark.slow
def test_a_step_in_two_parts_is_the_same_step(tmp_path: Path) -> None:
    plain = {**T5, "config": {**T5["config"], "dropout_rate": 0.0}}
    one = finetune(job(tmp_path / "one", model=plain))
    two = finetune(job(tmp_path / "two", model=plain, accumulate=2))
    assert [loss for _, loss in losses(one)] == pytest.approx(
        [loss for _, loss in losses(two)], abs=1e-4
    )


def test_answers_that_are_cut_are_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = finetune(job(tmp_path, max_steps=2, max_target_tokens=8))
    tokenizer = Checkpoint(str(tmp_path / "checkpoint")).tokenizer
    lengths = [len(tokenizer(example.references[0])["input_ids"]) for example in sentences(22)]
    cut = sum(length > 8 for length in lengths)
    assert 0 < metrics["cut_by_length"] == cut < 22
    (told,) = [line for line in caplog.messages if "train.max_target_tokens" in line]
    assert f"{cut} of 22 answers have more tokens than train.max_target_tokens=8" in told


def test_a_models_answers_end_as_it_ended_them_and_other_tokens_are_another_training(
    tmp_path: Path, whole: tuple[Path, dict]
) -> None:
    start = FromCheckpoint(Checkpoint(str(whole[0] / "checkpoint")))
    emitted = [(9, 8, 7), (9, 6, 7)]  # 7 is not the tokenizer's end token
    one, other = (
        job(
            tmp_path,
            start=start,
            train=(AnsweredExample("0", "a", "a", ("b",), answer_token_ids=tokens),),
        )
        for tokens in emitted
    )
    objective = finetuning._prepare(
        one, TrainingFolder(tmp_path), training_arguments(MICRO, TrainingFolder(tmp_path), "bleu")
    )
    assert objective.examples[0].answer.tolist() == [9, 8, 7]
    assert objective.evaluate.settings.eos_token_id == [1, 7]
    assert job_identity(one) != job_identity(other)
    assert "answer tokens" not in job_identity(job(tmp_path))


def test_gradients_are_clipped_only_where_that_was_asked_for(tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    norms = [
        training_arguments(recipe, folder, None).max_grad_norm
        for recipe in (MICRO, replace(MICRO, clip_norm=0.5))
    ]
    assert norms == [0.0, 0.5]  # the Trainer's own is 1


def test_the_throughput_in_a_log_is_that_since_the_log_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 14.0, 14.0, 15.0, 15.0])
    monkeypatch.setattr(training.Trainer, "log", lambda *_: None)
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    trainer = object.__new__(training.ResumableTrainer)
    trainer._recipe, trainer.state = MICRO, SimpleNamespace(global_step=2)
    trainer._restart_clock(0)
    trainer.log(first := {"loss": 1.0})
    trainer.state.global_step = 3
    trainer.log(second := {"loss": 1.0})
    assert (first["examples_per_s"], second["examples_per_s"]) == (2 * 4 / 4, 1 * 4 / 1)


def test_without_validation_the_last_weights_are_kept(tmp_path: Path) -> None:
    metrics = finetune(job(tmp_path, validation=(), evaluate_every=None, max_steps=3, log_every=50))
    assert metrics["best"] is None and metrics["evaluations"] == 0
    assert [step for step, _ in losses(metrics)] == [3]


def test_a_training_can_start_from_a_checkpoint_and_keeps_its_tokenizer(
    whole: tuple[Path, dict], tmp_path: Path
) -> None:
    start = Checkpoint(str(whole[0] / "checkpoint"))
    metrics = finetune(
        job(
            tmp_path,
            start=FromCheckpoint(start),
            max_steps=2,
            learning_rate=1e-9,
            scale_parameter=False,
        )
    )
    assert metrics["start"] == start.path
    ours, theirs = weights(tmp_path), weights(whole[0])
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == (
        whole[0] / "checkpoint" / "tokenizer.json"
    ).read_text()


@pytest.mark.slow
def test_a_drafter_can_share_the_targets_tokenizer(
    whole: tuple[Path, dict], tmp_path: Path
) -> None:
    target = whole[0] / "checkpoint"
    finetune(
        job(
            tmp_path,
            model={**T5, "tokenizer": str(target)},
            train=sentences(9, seed=5),
            max_steps=2,
        )
    )
    pair = bild_lab.load(str(target), str(tmp_path / "checkpoint"), policy="speculative")
    assert pair.generate("Haus Hund", max_new_tokens=4).token_ids


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"the loss is nan at step \d: the training has diverged; lower train.learn"
    ):
        finetune(job(tmp_path, learning_rate=1e30, scale_parameter=False))


def test_nothing_to_train_on_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no examples to train on"):
        finetune(job(tmp_path / "new", train=()))
    with pytest.raises(UserError, match="example train-0 has no reference to learn from"):
        finetune(
            job(
                tmp_path / "new", train=tuple(replace(each, references=()) for each in sentences(3))
            )
        )
    assert not (tmp_path / "new" / "checkpoint").exists()


def test_a_training_that_is_told_no_threads_takes_those_of_its_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: as many as PyTorch counts on the machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    before = torch.get_num_threads()
    try:
        for threads, taken in ((5, 2), (1, 1)):
            torch.set_num_threads(threads)
            with runs.isolated(0, None):
                assert torch.get_num_threads() == taken
            with runs.isolated(0, 3):
                assert torch.get_num_threads() == 3
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_training_leaves_global_state_alone(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    finetune(
        job(
            tmp_path,
            max_steps=1,
            evaluate_every=None,
            validation=(),
            threads=2,
            precision="bfloat16",
        )
    )
    # else every later user of Accelerate would get bfloat16
    assert AcceleratorState._shared_state == {}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


FULL = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory"),
]
FULL += [RuntimeError("example 3: CUDA out of memory")]  # as a text of a batch says it
FULL[2].__cause__ = FULL[0]


@pytest.mark.parametrize("error", FULL)
def test_memory_that_runs_out_is_one_message_with_the_keys_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(runs.ResumableTrainer, "train", full)
    with pytest.raises(
        UserError,
        match=r"train\.batch_size=4 .* set train\.accumulate=2, or lower train\.max_target_tok",
    ):
        finetune(job(tmp_path))
