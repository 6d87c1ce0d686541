"""Training a small module beside a frozen model, on that model's own greedy answers: BiTA's adapter, Medusa's heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from accelerate import PartialState
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback, TrainingArguments

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.lab.results.records import require_writable
from bild_lab.training.alignment.calibration import Calibration
from bild_lab.training.card import module_card
from bild_lab.training.engine import Engine, bfloat16, training_arguments
from bild_lab.training.folder import TrainingFolder, write_json
from bild_lab.training.frozen.columns import ColumnEvaluator, ColumnLog, ColumnLoss
from bild_lab.training.frozen.splits import Draws, PassOrder, Sample, Splitter, collate
from bild_lab.training.job import Recipe
from bild_lab.training.pairs import BatchOrder, require_room
from bild_lab.training.progress import terminal_log
from bild_lab.training.state import isolated
from bild_lab.training.tracking import WandbLog
from bild_lab.training.trainer import course

if TYPE_CHECKING:
    from bild_lab.training.tracking import WandbRun


class Beside(Protocol):
    """A module with weights of its own that runs a frozen model, which is none of its submodules.

    So the Trainer moves, optimizes and saves the small weights alone.
    """

    def __call__(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch groups"]
    ) -> Float[Tensor, "batch groups columns vocab"]:
        """What each column predicts behind each context, given by its number of tokens."""

    def save(self, folder: Path) -> None:
        """Write the weights as decoding reads them."""


class Extension(Protocol):
    """A small module to train: its settings, before any weights are read.

    leaves: the folder it leaves in outputs/NAME. noun: what to call it. columns: names of its predictions; column i
    predicts the token `offsets[i]` behind a context's next one, and weighs `weights[i]`. splits: contexts of a sample
    and pass, None for all. metric: what the mean of `per_context`, which decides on the best weights, is called.
    """

    leaves: str
    noun: str
    metric: str

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def weights(self) -> tuple[float, ...]: ...

    @property
    def splits(self) -> int | None: ...

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the module, dotted under the user's own keys."""

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for a model that it cannot stand beside."""

    def beside(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> nn.Module:
        """A fresh module (`Beside`) of this model. origin: its path and the fingerprint of its weights."""

    def per_context(self, hits: Bool[Tensor, "n columns"]) -> Float[Tensor, " n"]:
        """The metric of every context, given the columns whose first choice is right."""

    def usage(self, base: str, folder: Path) -> str:
        """A command that decodes with it."""


@dataclass(frozen=True, kw_only=True)
class FrozenJob:
    """One training of an extension of `base` on its own answers, to `folder/LEAVES`.

    held_out: answers that are not trained on but choose the best weights. Answers are cut to the recipe's
    `max_target_tokens`. Raises UserError for answers of another model, or too few long ones.
    """

    base: Checkpoint
    extension: Extension
    calibration: Calibration
    held_out: int
    recipe: Recipe
    folder: Path
    progress: bool = True
    logger: WandbRun | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)  # added to metrics.json as it is

    def __post_init__(self) -> None:
        require_whole("held_out", self.held_out, 1)
        self.extension.check(self.base.config)
        answered = self.calibration.manifest["model"]
        if answered["fingerprint"] != self.base.fingerprint:
            raise UserError(
                f"the answers in {self.calibration.folder} are those of {answered['path']} with other weights than "
                f"{self.base.path}, but a {self.extension.noun} learns its own model's answers; "
                "set calibration=null to generate them"
            )

    @property
    def metric(self) -> str:
        return self.extension.metric

    @property
    def title(self) -> str:
        """What the progress bar shows."""
        return f"{self.extension.noun} for {self.base.path}"

    @cached_property
    def splitter(self) -> Splitter:
        return Splitter(self.extension.offsets, self.extension.splits, self.recipe.seed)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Prompts with answers of enough tokens. Raises UserError where there are too few."""
        limit, longest = self.calibration.dataset.max_source_tokens, self.recipe.max_target_tokens
        every = []
        for answer in self.calibration.answers:
            prompt = self.base.source(answer.prompt, limit).prompt
            tokens = np.array([*prompt, *answer.answer_token_ids[:longest]], np.int32)
            every.append(Sample(tokens, len(prompt)))
        kept = tuple(sample for sample in every if sample.answer >= self.splitter.shortest)
        if len(kept) <= self.held_out:
            raise UserError(
                f"of the {len(every)} answers in {self.calibration.folder}, {len(every) - len(kept)} are dropped: they "
                f"have fewer than the {self.splitter.shortest} tokens that {len(self.extension.columns)} predictions "
                f"need; held_out={self.held_out} leaves none of the other {len(kept)} to train on: lower it, predict "
                "less far ahead, or make answers to more questions (dataset.limit)"
            )
        require_room(kept, self.base.config)
        return kept

    @cached_property
    def parts(self) -> tuple[list[Sample], list[Sample]]:
        """Samples to train on, and those held out, evenly spread over the data."""
        chosen = {index * len(self.samples) // self.held_out for index in range(self.held_out)}
        train = [sample for index, sample in enumerate(self.samples) if index not in chosen]
        return train, [self.samples[index] for index in sorted(chosen)]

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the training's result; a folder is gone on with only by the same."""
        recipe = {f"train.{key}": value for key, value in asdict(self.recipe).items() if key != "name"}
        answers = {"answers": self.calibration.manifest["hash"], "held_out": self.held_out}
        return {**recipe, "model.weights": self.base.fingerprint, **self.extension.identity, **answers}


@dataclass(frozen=True)
class _FrozenLesson:
    """Contexts of the answers, drawn anew in every pass (`engine.Material`)."""

    samples: Sequence[Sample]
    pairs: Draws
    loss: ColumnLoss
    evaluator: ColumnEvaluator

    batches = staticmethod(collate)

    @property
    def options(self) -> dict[str, Any]:
        """None."""
        return {}

    def order(self, recipe: Recipe) -> PassOrder:
        """Batches of like lengths, each example with the number of the pass."""
        lengths = [sample.length for sample in self.samples]
        return PassOrder(BatchOrder(lengths, recipe.batch_size, recipe.max_steps, recipe.seed))


def train_beside(job: FrozenJob) -> dict[str, Any]:
    """Train, evaluate on the way, and leave the best weights in `job.folder/LEAVES`; returns its metrics.json.

    A folder with an unfinished training of the same job goes on from its last checkpoint, with the same losses as
    without the interruption; a finished one is returned at once. Works in every process of `accelerate launch`.
    Raises UserError for what cannot be trained, before weights are read where that can be told.
    """
    folder = TrainingFolder(job.folder, job.extension.leaves)
    require_writable(job.folder)
    _ = job.parts
    identity = job.identity
    folder.require_same(identity)
    finished = folder.finished()
    if finished is not None:
        return finished
    with isolated(job.recipe.seed, folder.threads(job.recipe.threads)):
        return _train(job, folder, identity)


def _train(job: FrozenJob, folder: TrainingFolder, identity: dict[str, Any]) -> dict[str, Any]:
    arguments = training_arguments(job.recipe, folder, job.metric)
    with arguments.main_process_first(local=False):
        if PartialState().is_main_process:
            folder.begin(identity)
    try:
        model = _beside(job, arguments.device)
    except UserError:
        folder.abandon()
        raise
    last = folder.last()
    with ExitStack() as open_logs:
        callbacks = [*_logs(job, identity, arguments, open_logs), *job.callbacks]
        engine = Engine(model, job.recipe, _lesson(job), folder, arguments, callbacks)
        engine.train(resume_from_checkpoint=None if last is None else str(last))
    metrics = _metrics(job, model, arguments, engine.state, identity)

    def write(place: Path) -> None:
        model.save(place)
        (place / "README.md").write_text(module_card(metrics, job.extension.usage(job.base.path, folder.checkpoint)))
        write_json(place / "metrics.json", metrics)

    if engine.is_world_process_zero():
        folder.publish(write)
    PartialState().wait_for_everyone()
    return folder.finished()


def _beside(job: FrozenJob, device: torch.device) -> nn.Module:
    """The module beside its model, which is frozen and keeps its own precision where that is fast."""
    own, half = job.base.config.dtype, (torch.bfloat16, torch.float16)
    base = job.base.weights(torch.bfloat16 if own in half and bfloat16(job.recipe) else torch.float32)
    base.requires_grad_(False).eval().to(device)
    origin = {"path": job.base.path, "revision": job.base.revision, "fingerprint": job.base.fingerprint}
    return job.extension.beside(base, origin, job.recipe.seed)


def _lesson(job: FrozenJob) -> _FrozenLesson:
    extension, (train, held_out) = job.extension, job.parts
    size = max(1, job.recipe.batch_size // job.recipe.accumulate)
    names = (extension.columns, extension.metric, extension.per_context)
    evaluator = ColumnEvaluator(held_out, job.splitter, *names, size)
    return _FrozenLesson(train, Draws(train, job.splitter), ColumnLoss(extension.weights), evaluator)


def _logs(
    job: FrozenJob, identity: dict[str, Any], arguments: TrainingArguments, stack: ExitStack
) -> list[TrainerCallback]:
    """What shows a training, in its main process alone."""
    if not PartialState().is_main_process:
        return []
    logs: list[TrainerCallback] = [stack.enter_context(terminal_log(job, ColumnLog))]
    if job.logger is not None:
        surroundings = environment(arguments.device)
        run = job.logger.start(content_hash(identity), job.folder.name, job.base.path, identity, surroundings)
        logs.append(WandbLog(run))
    return logs


def _metrics(
    job: FrozenJob, model: nn.Module, arguments: TrainingArguments, state: Any, identity: dict[str, Any]
) -> dict[str, Any]:
    manifest, (train, held_out) = job.calibration.manifest, job.parts
    dataset = job.calibration.dataset
    return {
        "start": job.base.path,
        "noun": job.extension.noun,
        "architecture": job.base.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "data": f"{len(train):,} greedy answers of {job.base.path} to {dataset.name} ({dataset.split})",
        "answers": {"folder": str(job.calibration.folder), "hash": manifest["hash"]},
        "train_examples": len(train),
        "held_out_examples": len(held_out),
        "dropped_examples": len(job.calibration.answers) - len(job.samples),  # too short
        "columns": job.extension.columns,
        **course(job.recipe, job.metric, len(train), state),
        "precision": "bfloat16" if arguments.bf16 else "float32",
        "processes": arguments.world_size,
        "identity": identity,
        "environment": environment(arguments.device),
        **job.provenance,
    }
