"""Train a small module beside a frozen model: on which answers, what is kept, and what the commands
print.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.markup import escape
from transformers import TrainingArguments

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.config.compose import override_words
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import cut_sources
from bild_lab.lab.point.identity import sweep_folder
from bild_lab.lab.point.read_model import configured_checkpoint, configured_model, load_model
from bild_lab.lab.schema.questions import questions_of
from bild_lab.lab.store.code import own_code_hash
from bild_lab.lab.store.records import require_writable
from bild_lab.ranks import launched, process_group
from bild_lab.training.answers import Calibration, joined, read_calibration
from bild_lab.training.batches import BatchOrder, spread_over_questions
from bild_lab.training.calibration import CalibrationJob, generate_calibration
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.modules.conversations import Conversation
from bild_lab.training.modules.predictors import (
    AnsweredPrompt,
    EpochOrder,
    PredictionEvaluator,
    PredictionLoss,
    RandomContexts,
    collate,
    longest_contexts,
)
from bild_lab.training.modules.references import RELEASED_SUFFIXES, released_answers
from bild_lab.training.modules.states import BasePlacement, ModuleSpec, OneRowCheckpoint
from bild_lab.training.reports import (
    answers_bar,
    dataset_words,
    own_configurations,
    print_closing,
    print_decoding,
    training_logger,
)
from bild_lab.training.run import TrainingJob, TrainingRun, isolated
from bild_lab.training.start import require_no_languages, require_room
from bild_lab.training.train_spec import TrainSpec
from bild_lab.training.trainer import Objective


@dataclass(frozen=True, kw_only=True)
class FrozenJob(TrainingJob):
    """One training of a small module for `base`, whose weights stay frozen.

    calibration: the answers to learn, cut to the recipe's `max_target_tokens`. held_out: answers
    that are not learned but choose the best weights. placed: where the base is. Raises UserError
    for the answers of another model.
    """

    base: Checkpoint
    spec: ModuleSpec
    calibration: Calibration
    held_out: int
    placed: BasePlacement = BasePlacement()

    def __post_init__(self) -> None:
        require_whole("held_out", self.held_out, 1)
        self.spec.check(self.base.config)
        answered = self.calibration.manifest["model"]
        if answered["fingerprint"] != self.base.fingerprint:
            raise UserError(
                f"the answers in {self.calibration.folder} are those of {answered['path']} with"
                f" other weights than {self.base.path}, but a {self.spec.noun} learns the answers"
                " of its own model; set calibration=null to generate them"
            )

    @cached_property
    def _cut_rows(self) -> list[AnsweredPrompt]:
        """The row of every answer."""
        limit, longest = self.calibration.dataset.max_source_tokens, self.recipe.max_target_tokens
        together = self.recipe.max_tokens
        cut_rows = []
        for answer in self.calibration.answers:
            if isinstance(answer, Conversation):
                row = answer.row(longest)
            else:
                prompt = self.base.source(answer.prompt, limit).prompt
                row = AnsweredPrompt(
                    np.array([*prompt, *answer.answer_token_ids[:longest]], np.int32), len(prompt)
                )
            cut_rows.append(row if together is None else row.cut(together))
        return cut_rows

    def _is_long_enough(self, row: AnsweredPrompt) -> bool:
        return row.answer_length >= self.spec.predictors.shortest_answer

    @cached_property
    def rows(self) -> tuple[AnsweredPrompt, ...]:
        """Prompts whose answers have enough tokens. Raises UserError if there are too few."""
        predictors = self.spec.predictors
        long_enough = tuple(filter(self._is_long_enough, self._cut_rows))
        if len(long_enough) <= self.held_out:
            raise UserError(
                f"of the {len(self._cut_rows)} answers in {self.calibration.folder},"
                f" {len(self._cut_rows) - len(long_enough)} are dropped: they have fewer than the"
                f" {predictors.shortest_answer} tokens that {len(predictors.names)} predictions"
                f" need; held_out={self.held_out} leaves none of the other {len(long_enough)} to train on:"
                " lower it, predict less far ahead, or make answers to more questions"
                " (dataset.limit)"
            )
        require_room([row.length for row in long_enough], self.base.weightless())
        return long_enough

    @cached_property
    def parts(self) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt]]:
        """Rows to train on, and held-out rows, which are spread evenly over the questions."""
        rows, questions = (
            self.rows,
            questions_of([answer.id for answer in self.calibration.answers]),
        )
        questions_of_rows = [
            question
            for question, row in zip(questions, self._cut_rows, strict=True)
            if self._is_long_enough(row)
        ]
        held_out_indices = spread_over_questions(self.held_out, questions_of_rows)
        held_out_places = set(held_out_indices)
        train = [row for index, row in enumerate(rows) if index not in held_out_places]
        return train, [rows[index] for index in held_out_indices]

    @property
    def spread(self) -> bool:
        return self.placed.device_map is not None

    @property
    def command(self) -> str:
        """A command that decodes with the module, on the dataset that it was trained on."""
        revision = (
            [] if self.base.revision is None else [f"pair.target_revision={self.base.revision}"]
        )
        words = self.spec.words(self.folder / self.spec.result_name)
        has_draft = any(word.startswith("pair.draft=") for word in words)
        no_draft = [] if has_draft else ["pair.draft=null"]
        pair = [f"pair.target={self.base.path}", *revision, *no_draft]
        command_words = [*words, *pair, *self.base.switches, *self.calibration.dataset_words]
        # behind those of the answers' command, as of two the last counts
        if not set(own_configurations()) <= set(command_words):
            command_words += own_configurations()
        return f"python run.py {shlex.join(command_words)}"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the training's result."""
        spec = {f"{self.spec.group}.{key}": value for key, value in asdict(self.spec).items()}
        answers = {"answers": self.calibration.manifest["hash"], "held_out": self.held_out}
        module = {"module": self.spec.noun, **spec}
        if (own_code := own_code_hash(type(self.spec).__module__)) is not None:
            module["module.code"] = own_code
        return {**self.recipe.identity, "model.weights": self.base.fingerprint, **module, **answers}


def train_beside_frozen(job: FrozenJob) -> dict[str, Any]:
    """Train, and leave the best weights in `job.folder`, under the module's result name; returns
    its metrics.json.

    Resumes an interrupted training, and returns a finished one (`TrainingRun`). Raises UserError
    for a job that cannot be trained; what small files can show is checked before weights are read.
    """
    require_writable(job.folder)
    run = TrainingRun(
        job=job,
        folder=TrainingFolder(job.folder, job.spec.result_name),
        title=f"{job.spec.noun} for {job.base.path}",
        start=job.base.path,
        identity=job.identity,
        metric=job.spec.predictors.metric,
        examples=len(job.parts[0]),
        prepare=lambda arguments: _prepare(job, arguments),
    )
    return run.train()


def _prepare(job: FrozenJob, arguments: TrainingArguments) -> Objective:
    recipe = job.recipe
    predictors = job.spec.predictors
    dataset = job.calibration.dataset
    train, held_out = job.parts
    half = job.base.config.dtype in (torch.bfloat16, torch.float16) and recipe.in_bfloat16
    dtype = torch.bfloat16 if half else torch.float32  # half precision if the device is fast at it
    base = job.placed.load(job.base, arguments.device, dtype)
    origin = {
        "path": job.base.path,
        "revision": job.base.revision,
        "fingerprint": job.base.fingerprint,
    }
    module = job.spec.build(base, origin, recipe.seed, **job.spec.from_answers(train))
    order = BatchOrder(
        [row.length for row in train], recipe.batch_size, recipe.max_steps, recipe.seed
    )
    return Objective(
        model=module,
        examples=RandomContexts(train, predictors, recipe.seed),
        longest=longest_contexts(train, predictors),
        order=EpochOrder(order),
        collate=partial(collate, reads_labels=module.reads_labels),
        loss=PredictionLoss(predictors.weights),
        evaluate=PredictionEvaluator(held_out, predictors, recipe.evaluation_batch_size),
        facts={
            "noun": job.spec.noun,
            "architecture": job.base.config.model_type,
            "parameters": sum(weight.numel() for weight in module.parameters()),
            "data": (
                f"{len(train):,} greedy answers of {job.base.path} to {dataset.name}"
                f" ({dataset.split})"
            ),
            "answers": {
                "folder": str(job.calibration.folder),
                "hash": job.calibration.manifest["hash"],
                "commits": job.calibration.manifest.get("commits", {}),
            },
            "train_examples": len(train),
            "held_out_examples": len(held_out),
            "dropped_examples": len(job.calibration.answers) - len(job.rows),  # too short
            "columns": predictors.names,
        },
        save=module.save,
    )


def frozen_model(cfg: DictConfig, spec: ModuleSpec) -> Checkpoint:
    """The model of a command.

    Raises UserError if it, or the result's folder, cannot be used for this module.
    """
    folder = sweep_folder(cfg)
    require_writable(folder)
    TrainingFolder(folder, spec.result_name).require_free()
    configured = configured_checkpoint(cfg)
    base = OneRowCheckpoint(
        configured.path, configured.revision, allow_pickles=configured.allow_pickles
    )
    base.check()
    require_no_languages(base)
    spec.check(base.config)
    return base


def frozen_job(cfg: DictConfig, spec: ModuleSpec) -> FrozenJob:
    """A command's configuration as a job on the model's own answers; missing ones are generated."""
    base = frozen_model(cfg, spec)
    recipe = frozen_recipe(cfg.train)
    placed = placement_of(cfg)
    settings = {"calibration": own_answers(cfg, recipe), "logger": training_logger(cfg.logger)}
    settings |= {"held_out": cfg.held_out, "folder": sweep_folder(cfg), "placed": placed}
    return FrozenJob(base=base, spec=spec, recipe=recipe, **settings)


def frozen_recipe(train: DictConfig) -> TrainSpec:
    """The recipe of a command. A smoothing of labels is left out where nobody wrote it: some groups
    of `train`, made for whole models, have it.
    """
    recipe = typed(TrainSpec, train, "train")
    words = override_words(HydraConfig.get()) if HydraConfig.initialized() else []
    if not any(word.lstrip("+").startswith("train.label_smoothing=") for word in words):
        recipe = replace(recipe, label_smoothing=0.0)
    _require_plain_loss(recipe)
    return recipe


def _require_plain_loss(recipe: TrainSpec) -> None:
    """Raise UserError for losses of whole models, which a module has a loss of its own for."""
    for key, plain in (("loss", "last"), ("label_smoothing", 0), ("soft_targets", 0)):
        if (value := getattr(recipe, key)) != plain:
            raise UserError(
                f"train.{key}={value} has no effect beside a frozen model, as a module has a loss of"
                f" its own; set train.{key}={plain}, or leave it out"
            )


def placement_of(cfg: DictConfig) -> BasePlacement:
    """Where a command's frozen model is."""
    return BasePlacement(cfg.runtime.device_map, cfg.model.sharded)


def own_answers(cfg: DictConfig, recipe: TrainSpec) -> Calibration:
    """The model's own greedy answers: those of `calibration`, or generated into the folder where
    they are missing.
    """
    if cfg.calibration:
        return configured_answers(cfg, recipe)
    placed = placement_of(cfg)
    if placed.sharded:
        raise UserError(
            "a model that is sharded can be trained beside, but does not answer here; make its"
            " answers first with scripts/generate_calibration.py runtime.device_map=auto, and give"
            " them as calibration=DIR"
        )
    dataset, settings = typed(DatasetSpec, cfg.dataset, "dataset"), cfg.answers
    folder = sweep_folder(cfg) / "calibration"
    status_line.enter("loading the model")
    with isolated(recipe.seed, recipe.threads):
        device = process_group(recipe.on_cpu).device
        target = configured_model(cfg, device, settings.dtype, placed.device_map)
        dataset = for_model(dataset, target.checkpoint)
        examples = cut_sources(
            load_examples(dataset), dataset.max_source_tokens, target.checkpoint.prompt_length
        )
        sizes = (settings.max_new_tokens, settings.batch_size, settings.part_size)
        job = CalibrationJob(
            target,
            dataset,
            examples,
            *sizes,
            folder,
            dataset_words(dataset),
            tuple(dataset.cut or ()),
        )
        with answers_bar() as report:
            generate_calibration(job, report)
    load_model.cache_clear()  # the training needs the memory
    return read_calibration(folder)


def configured_answers(cfg: DictConfig, recipe: TrainSpec) -> Calibration:
    """The answers in the folders and files of `calibration`, as those of one model."""
    base = configured_checkpoint(cfg)
    paths = [cfg.calibration] if isinstance(cfg.calibration, str) else cfg.calibration
    return joined(
        [
            released_answers(base, Path(path), recipe.max_target_tokens)
            if Path(path).suffix in RELEASED_SUFFIXES
            else read_calibration(Path(path))
            for path in paths
        ]
    )


def train_and_report(job: FrozenJob) -> None:
    """Train, write metrics.json, and print where the module is and how good it is."""
    metrics = train_beside_frozen(job)
    if launched().is_main:
        TrainingFolder(job.folder).write_metrics(metrics)
    best, scores = metrics["best"], ""
    if best is not None:
        shares = ", ".join(f"{best[f'top_1_{predictor}']:.1%}" for predictor in metrics["columns"])
        reached = f"{metrics['metric']} {best[metrics['metric']]:.2f}"
        scores = (
            f"; {reached} on {metrics['held_out_examples']:,} held-out answers, first choices right"
            f" {shares}"
        )
    place = job.folder / job.spec.result_name
    output.print(escape(f"{place}: {metrics['steps']:,} steps, loss {metrics['loss']:.3f}{scores}"))
    print_decoding(job.command, job.calibration.dataset_words, job.calibration.dataset)
    print_closing(job.logger)
