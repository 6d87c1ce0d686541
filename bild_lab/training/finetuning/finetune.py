"""Fine-tune a checkpoint, or train a fresh model: `scripts/finetune.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from bild_lab.engine.models.checkpoint import decoder_depth
from bild_lab.errors import UserError
from bild_lab.lab.cli import stages
from bild_lab.lab.data.examples import Example
from bild_lab.lab.results.records import require_writable
from bild_lab.training.batches import BatchOrder, Collator, TokenizedExample, TokenLimits, tokenize
from bild_lab.training.finetuning.evaluation import Evaluator, greedy_settings
from bild_lab.training.finetuning.job import FinetuningJob
from bild_lab.training.finetuning.losses import LayerLoss, layer_weights
from bild_lab.training.finetuning.residual_dropout import add_residual_dropout
from bild_lab.training.finetuning.soft_targets import taught
from bild_lab.training.finetuning.starting_points import (
    FreshModel,
    FromCheckpoint,
    FromScratch,
    SpecialTokens,
    StartingPoint,
)
from bild_lab.training.fit_checks import require_references, require_room
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.model_card import checkpoint_card
from bild_lab.training.recipe import Recipe
from bild_lab.training.training_run import Prepared, Training, run


def finetune(job: FinetuningJob) -> dict[str, Any]:
    """Train, and leave the best weights in `job.folder/checkpoint`; returns its metrics.json.

    Resumes an interrupted training, and returns a finished one (`run.run`). Raises UserError for a job that cannot be
    trained; what small files can show is checked before weights are read.
    """
    require_writable(job.folder)
    if not job.train:
        raise UserError("there are no examples to train on; check dataset.path, dataset.split and dataset.limit")
    require_references([*job.train, *job.validation])
    start = starting_point(job)
    layer_weights(job.recipe.loss, decoder_depth(start.config))
    folder = TrainingFolder(job.folder)
    training = Training(
        job=job,
        folder=folder,
        identity=job_identity(job, start),
        start=start.name,
        examples=len(job.train),
        evaluates=bool(job.validation),
        prepare=lambda arguments: _prepare(job, start, folder, arguments),
    )
    return run(training)


def starting_point(job: FinetuningJob) -> StartingPoint:
    """The job's checkpoint or fresh configuration, checked."""
    if job.model_path is not None:
        return FromCheckpoint(job.model_path, job.model_revision)
    try:
        fresh = FreshModel(**job.model)
    except TypeError as error:
        raise UserError(f"model: {error}; it has name, config, vocabulary and tokenizer") from error
    return FromScratch(fresh, job.recipe.max_target_tokens)


def job_identity(job: FinetuningJob, start: StartingPoint) -> dict[str, Any]:
    """What decides a training's result."""
    return {
        **job.recipe.identity,
        **start.identity,
        "dataset.max_source_tokens": job.max_source_tokens,
        "metric": job.metric,
        "training examples": _digest(job.train),
        "validation examples": _digest(job.validation),
        **({} if job.teacher is None else {"teacher": job.teacher.fingerprint}),
    }


@dataclass(frozen=True)
class AnswerTask:
    """Learning the answers to prompts (a `trainer.TrainingTask`)."""

    examples: Sequence[TokenizedExample]
    collate: Collator
    loss: LayerLoss
    evaluate: Evaluator | None

    @property
    def model_options(self) -> dict[str, Any]:
        """The hidden states of inner layers if the loss needs them, and no cache."""
        return {"output_hidden_states": self.loss.inner, "use_cache": False}

    def order(self, recipe: Recipe) -> BatchOrder:
        """Batches of similar lengths."""
        return BatchOrder([one.length for one in self.examples], recipe.batch_size, recipe.max_steps, recipe.seed)


def _prepare(
    job: FinetuningJob, start: StartingPoint, folder: TrainingFolder, arguments: TrainingArguments
) -> Prepared:
    recipe = job.recipe
    with arguments.main_process_first(local=False):
        tokenizer = _tokenizer(job, start, folder)
    limits = TokenLimits(job.max_source_tokens, recipe.max_target_tokens)
    encoder_decoder = bool(start.config.is_encoder_decoder)
    train, validation = (
        tokenize(examples, tokenizer, encoder_decoder, limits) for examples in (job.train, job.validation)
    )
    require_room([one.length for one in (*train, *validation)], start.config)
    model = start.model(tokenizer)
    add_residual_dropout(model, recipe.residual_dropout)
    if arguments.device.type == "cpu":
        model.set_attn_implementation("eager")  # the fused kernel's backward pass is slower for short sentences
    special = start.special_tokens(tokenizer)
    collate = Collator(special.pad, special.start)
    if job.teacher is not None:
        if job.progress:
            stages.enter("asking the target for soft targets")
        with arguments.main_process_first(local=False):
            train = taught(train, job.teacher, collate, recipe, folder.soft_targets, arguments.device)
    weights = layer_weights(recipe.loss, decoder_depth(start.config))
    loss = LayerLoss(model, weights, recipe.label_smoothing, recipe.in_bfloat16)
    evaluator = _evaluator(job, validation, tokenizer, collate, special) if validation else None
    use_cache = model.config.use_cache  # the Trainer turns it off

    def save(place: Path) -> None:
        model.config.use_cache = use_cache
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)

    return Prepared(
        model=model,
        task=AnswerTask(train, collate, loss, evaluator),
        facts=_facts(job, model),
        save=save,
        card=lambda metrics: checkpoint_card(metrics, job.folder),
    )


def _tokenizer(job: FinetuningJob, start: StartingPoint, folder: TrainingFolder) -> PreTrainedTokenizerBase:
    """The starting point's tokenizer; one that is trained is kept for other processes and for a resumed training."""
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


def _evaluator(
    job: FinetuningJob,
    examples: Sequence[TokenizedExample],
    tokenizer: PreTrainedTokenizerBase,
    collate: Collator,
    special: SpecialTokens,
) -> Evaluator:
    settings = greedy_settings(job.recipe.max_target_tokens, special.end, special.pad, special.start)
    references = [example.references for example in job.validation]
    return Evaluator(references, examples, job.metric, tokenizer, collate, job.recipe.evaluation_batch_size, settings)


def _facts(job: FinetuningJob, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "data": job.data,
        "train_examples": len(job.train),
        "validation_examples": len(job.validation),
    }


def _digest(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, example.prompt, example.references]).encode() + b"\n")
    return digest.hexdigest()[:16]
