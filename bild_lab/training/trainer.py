"""One training, from a job to a checkpoint: everything is checked first, then trained, then written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.results.records import require_writable
from bild_lab.training.card import model_card
from bild_lab.training.engine import Engine, Lesson, bfloat16, training_arguments
from bild_lab.training.evaluation import Evaluator, greedy_settings
from bild_lab.training.folder import TrainingFolder, write_json
from bild_lab.training.job import Recipe, TrainingJob
from bild_lab.training.losses import LayerLoss, decoder_depth, layer_weights
from bild_lab.training.models import FreshModel, FromCheckpoint, FromScratch, SpecialTokens, Start
from bild_lab.training.pairs import Batches, Pair, TokenLimits, encode, require_references, require_room
from bild_lab.training.progress import terminal_log
from bild_lab.training.state import isolated
from bild_lab.training.tracking import WandbLog


def train(job: TrainingJob) -> dict[str, Any]:
    """Train, evaluate on the way, and leave the best weights in `job.folder/checkpoint`; returns its metrics.json.

    A folder with an unfinished training of the same job goes on from its last checkpoint, with the same losses as
    without the interruption; a finished one is returned at once. Works in every process of `accelerate launch`.
    Raises UserError for anything that cannot be trained, before weights are read where that can be told.
    """
    folder = TrainingFolder(job.folder)
    require_writable(job.folder)
    if not job.train:
        raise UserError("there are no examples to train on; check dataset.path, dataset.split and dataset.limit")
    require_references([*job.train, *job.validation])
    start = starting_point(job)
    layer_weights(job.recipe.loss, decoder_depth(start.config))
    identity = job_identity(job, start)
    folder.require_same(identity)
    finished = folder.finished()
    if finished is not None:
        return finished
    with isolated(job.recipe.seed, folder.threads(job.recipe.threads)):
        return _train(job, start, folder, identity)


def starting_point(job: TrainingJob) -> Start:
    """The checkpoint or fresh configuration of a job, checked."""
    if job.model_path is not None:
        return FromCheckpoint(job.model_path, job.model_revision)
    try:
        fresh = FreshModel(**job.model)
    except TypeError as error:
        raise UserError(f"model: {error}; it has name, config, vocabulary and tokenizer") from error
    return FromScratch(fresh, job.recipe.max_target_tokens)


def job_identity(job: TrainingJob, start: Start) -> dict[str, Any]:
    """What decides a training's result; a folder is gone on with only by the same."""
    recipe = {f"train.{key}": value for key, value in asdict(job.recipe).items() if key != "name"}
    return {
        **recipe,
        **start.identity,
        "dataset.max_source_tokens": job.max_source_tokens,
        "metric": job.metric,
        "training examples": _digest(job.train),
        "validation examples": _digest(job.validation),
    }


@dataclass(frozen=True)
class _Prepared:
    """A model and everything it is trained with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    lesson: Lesson
    arguments: TrainingArguments


def _train(job: TrainingJob, start: Start, folder: TrainingFolder, identity: dict[str, Any]) -> dict[str, Any]:
    try:
        prepared = _prepare(job, start, folder, identity)
    except UserError:
        folder.abandon()
        raise
    model = prepared.model
    use_cache = model.config.use_cache  # the Trainer turns it off
    last = folder.last()
    with ExitStack() as open_logs:
        callbacks = _logs(job, identity, start, prepared, open_logs)
        engine = Engine(model, job.recipe, prepared.lesson, folder, prepared.arguments, [*callbacks, *job.callbacks])
        engine.train(resume_from_checkpoint=None if last is None else str(last))
    model.config.use_cache = use_cache
    metrics = _metrics(job, start, prepared, engine.state, identity)

    def write(place: Path) -> None:
        model.save_pretrained(place)
        prepared.tokenizer.save_pretrained(place)
        (place / "README.md").write_text(model_card(metrics, job.folder))
        write_json(place / "metrics.json", metrics)

    if engine.is_world_process_zero():
        folder.publish(write)
    PartialState().wait_for_everyone()
    return folder.finished()


def _prepare(job: TrainingJob, start: Start, folder: TrainingFolder, identity: dict[str, Any]) -> _Prepared:
    recipe = job.recipe
    arguments = training_arguments(recipe, folder, job.metric if job.validation else None)
    with arguments.main_process_first(local=False):
        if PartialState().is_main_process:
            folder.begin(identity)
        tokenizer = _tokenizer(job, start, folder)
    limits = TokenLimits(job.max_source_tokens, recipe.max_target_tokens)
    encoder_decoder = bool(start.config.is_encoder_decoder)
    pairs, validation = (
        encode(examples, tokenizer, encoder_decoder, limits) for examples in (job.train, job.validation)
    )
    require_room([*pairs, *validation], start.config)
    model = start.model(tokenizer)
    if arguments.device.type == "cpu":
        model.set_attn_implementation("eager")  # the fused kernel's backward pass is slower for short sentences
    special = start.special_tokens(tokenizer)
    batches = Batches(special.pad, special.start)
    weights = layer_weights(recipe.loss, decoder_depth(start.config))
    loss = LayerLoss(model, weights, recipe.label_smoothing, bfloat16(recipe))
    evaluator = _evaluator(job, validation, tokenizer, batches, special) if validation else None
    return _Prepared(model, tokenizer, Lesson(pairs, batches, loss, evaluator), arguments)


def _evaluator(
    job: TrainingJob,
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches,
    special: SpecialTokens,
) -> Evaluator:
    settings = greedy_settings(job.recipe.max_target_tokens, special.end, special.pad, special.start)
    size = max(1, job.recipe.batch_size // job.recipe.accumulate)
    return Evaluator(job.validation, pairs, job.metric, tokenizer, batches, size, settings)


def _tokenizer(job: TrainingJob, start: Start, folder: TrainingFolder) -> PreTrainedTokenizerBase:
    """The start's tokenizer; one that is trained is kept, for other processes and for going on."""
    if folder.tokenizer.exists():
        return AutoTokenizer.from_pretrained(folder.tokenizer)
    tokenizer = start.tokenizer(lambda: _texts(job.train))
    if start.trains_tokenizer:
        folder.keep_tokenizer(tokenizer.save_pretrained)
    return tokenizer


def _texts(examples: Sequence[Example]) -> Iterator[str]:
    for example in examples:
        yield example.prompt
        yield from example.references[:1]


def _logs(
    job: TrainingJob, identity: dict[str, Any], start: Start, prepared: _Prepared, stack: ExitStack
) -> list[TrainerCallback]:
    """What shows a training, in its main process alone."""
    if not PartialState().is_main_process:
        return []
    logs: list[TrainerCallback] = [stack.enter_context(terminal_log(job))]
    if job.logger is not None:
        surroundings = environment(prepared.arguments.device)
        run = job.logger.start(content_hash(identity), job.folder.name, start.name, identity, surroundings)
        logs.append(WandbLog(run))
    return logs


def _metrics(
    job: TrainingJob, start: Start, prepared: _Prepared, state: Any, identity: dict[str, Any]
) -> dict[str, Any]:
    return {
        "start": start.name,
        "architecture": type(prepared.model).__name__,
        "parameters": prepared.model.num_parameters(),
        "data": job.data,
        "train_examples": len(job.train),
        "validation_examples": len(job.validation),
        **course(job.recipe, job.metric, len(job.train), state),
        "precision": "bfloat16" if prepared.arguments.bf16 else "float32",
        "processes": prepared.arguments.world_size,
        "identity": identity,
        "environment": environment(prepared.arguments.device),
        **job.provenance,
    }


def course(recipe: Recipe, metric: str, examples: int, state: TrainerState) -> dict[str, Any]:
    """How a training went: steps, time, losses and evaluations."""
    history = state.log_history
    losses = [entry for entry in history if "loss" in entry]
    evaluations = [entry for entry in history if f"eval_{metric}" in entry]
    best = next((entry for entry in evaluations if entry["step"] == state.best_global_step), None)
    steps = [0, *(entry["step"] for entry in losses)]
    return {
        "steps": state.global_step,
        "passes": state.global_step * recipe.batch_size / examples,
        "training_s": sum(
            (step - before) * recipe.batch_size / entry["examples_per_s"]
            for (before, step), entry in zip(pairwise(steps), losses, strict=True)
        ),
        "loss": losses[-1]["loss"],
        "metric": metric,
        "best": None if best is None else _evaluation(best),
        "evaluations": len(evaluations),
        "history": [{key: value for key, value in entry.items() if key != "epoch"} for entry in history],
        "recipe": asdict(recipe),
    }


def _evaluation(entry: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("eval_"): value for key, value in entry.items() if key != "epoch"}


def _digest(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, example.prompt, example.references]).encode() + b"\n")
    return digest.hexdigest()[:16]
