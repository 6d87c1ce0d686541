"""Train a small module beside a frozen model: `scripts/train_bita.py`, `train_medusa.py`, `train_lm_heads.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from bild_lab.lab.results.records import require_writable
from bild_lab.training.batches import BatchOrder
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.frozen.contexts import AnsweredPrompt, EpochOrder, RandomContexts, collate
from bild_lab.training.frozen.job import FrozenJob
from bild_lab.training.frozen.predictions import PredictionEvaluator, PredictionLog, PredictionLoss
from bild_lab.training.model_card import module_card
from bild_lab.training.recipe import Recipe
from bild_lab.training.training_run import Prepared, Training, run


def train_module(job: FrozenJob) -> dict[str, Any]:
    """Train, and leave the best weights in `job.folder`, under the module's result name; returns its metrics.json.

    Resumes an interrupted training, and returns a finished one (`run.run`). Raises UserError for a job that cannot be
    trained; what small files can show is checked before weights are read.
    """
    folder = TrainingFolder(job.folder, job.spec.result_name)
    require_writable(job.folder)
    train, _ = job.parts
    training = Training(
        job=job,
        folder=folder,
        identity=job.identity,
        start=job.base.path,
        examples=len(train),
        evaluates=True,
        prepare=lambda arguments: _prepare(job, folder, arguments),
        terminal_log=PredictionLog,
    )
    return run(training)


@dataclass(frozen=True)
class ContextTask:
    """Learning what follows contexts of the answers, which are chosen again in every epoch (a `TrainingTask`)."""

    rows: Sequence[AnsweredPrompt]
    examples: RandomContexts
    loss: PredictionLoss
    evaluate: PredictionEvaluator

    collate = staticmethod(collate)

    @property
    def model_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def order(self, recipe: Recipe) -> EpochOrder:
        """Batches of similar lengths."""
        lengths = [row.length for row in self.rows]
        return EpochOrder(BatchOrder(lengths, recipe.batch_size, recipe.max_steps, recipe.seed))


def _prepare(job: FrozenJob, folder: TrainingFolder, arguments: TrainingArguments) -> Prepared:
    spec, (train, held_out) = job.spec, job.parts
    module = _module(job, arguments.device)
    names = (spec.predictors, spec.metric, spec.context_score)
    evaluator = PredictionEvaluator(held_out, job.chooser, *names, job.recipe.evaluation_batch_size)
    return Prepared(
        model=module,
        task=ContextTask(train, RandomContexts(train, job.chooser), PredictionLoss(spec.weights), evaluator),
        facts=_facts(job, module),
        save=module.save,
        card=lambda metrics: module_card(metrics, job.command(folder.result)),
    )


def _module(job: FrozenJob, device: torch.device) -> nn.Module:
    """The small module with its model, which is frozen; a half-precision model stays so if the device is fast at it."""
    own, half = job.base.config.dtype, (torch.bfloat16, torch.float16)
    base = job.base.weights(torch.bfloat16 if own in half and job.recipe.in_bfloat16 else torch.float32)
    base.requires_grad_(False).eval().to(device)
    origin = {"path": job.base.path, "revision": job.base.revision, "fingerprint": job.base.fingerprint}
    return job.spec.build(base, origin, job.recipe.seed)


def _facts(job: FrozenJob, module: nn.Module) -> dict[str, Any]:
    manifest, dataset, (train, held_out) = job.calibration.manifest, job.calibration.dataset, job.parts
    return {
        "noun": job.spec.noun,
        "architecture": job.base.config.model_type,
        "parameters": sum(weight.numel() for weight in module.parameters()),
        "data": f"{len(train):,} greedy answers of {job.base.path} to {dataset.name} ({dataset.split})",
        "answers": {"folder": str(job.calibration.folder), "hash": manifest["hash"]},
        "train_examples": len(train),
        "held_out_examples": len(held_out),
        "dropped_examples": len(job.calibration.answers) - len(job.rows),  # too short
        "columns": job.spec.predictors,
    }
