"""One training from its settings to its result: what all of them have in common besides their
objective.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.state import AcceleratorState
from rich.progress import TextColumn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from bild_lab.engine.models.checkpoint.hub import commits_read, no_progress_bars
from bild_lab.engine.models.device import default_threads, within_memory
from bild_lab.errors import UserError, warn_once
from bild_lab.files import holding
from bild_lab.lab.config.console import progress_bar, status_line
from bild_lab.lab.point.environment import environment
from bild_lab.lab.store.hashing import content_hash
from bild_lab.ranks import launched
from bild_lab.report.trackers.wandb import TRAINING
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.memory import memory_facts, rows_at_once
from bild_lab.training.reports import LogToRun, TerminalLog
from bild_lab.training.train_spec import TrainSpec
from bild_lab.training.trainer import Objective, ResumableTrainer, training_arguments


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What every training is given. provenance: for metrics.json as it is."""

    recipe: TrainSpec
    folder: Path
    logger: Any = None  # of `conf/logger`; None: none
    callbacks: tuple[TrainerCallback, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spread(self) -> bool:
        """Whether one process uses several devices."""
        return False


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The shell around an objective: seed, resume, logs, checkpoints and metrics.

    start: the model that training starts from, as the logs name it. identity: settings and hashes
    that decide the result; only the same identity resumes a folder or gets its finished result.
    metric: the score that chooses the best weights; None keeps the last. examples: how many are
    trained on.
    """

    job: TrainingJob
    folder: TrainingFolder
    title: str
    start: str
    identity: Mapping[str, Any]
    metric: str | None
    examples: int
    prepare: Callable[[TrainingArguments], Objective]

    def train(self) -> dict[str, Any]:
        """Train and leave the result in the folder; returns its metrics.json.

        An interrupted training of the same identity resumes from its last checkpoint, with the same
        losses as without the interruption; a finished one is returned at once. Works in every
        process of `accelerate launch`. Raises UserError if the folder holds another training, or
        the model cannot be trained.
        """
        self.folder.require_same(self.identity)
        if (finished := self.folder.finished()) is not None:
            return finished
        recipe = self.job.recipe
        if recipe.warmup_steps >= recipe.max_steps and launched().is_main:
            warn_once(
                f"{self.title}: the rate rises for train.warmup_steps={recipe.warmup_steps}, and"
                f" train.max_steps={recipe.max_steps} end before, so that it never reaches"
                f" train.learning_rate={recipe.learning_rate:g}; lower train.warmup_steps"
            )
        with isolated(recipe.seed, self.folder.threads(recipe.threads)):
            return self._train()

    def _train(self) -> dict[str, Any]:
        folder, recipe = self.folder, self.job.recipe
        status_line.enter("preparing model and texts")
        arguments = training_arguments(recipe, folder, self.metric, self.job.spread)
        try:
            with arguments.main_process_first(local=False):
                if launched().is_main:
                    folder.begin(self.identity)
            with self._within_memory(arguments):
                objective = self.prepare(arguments)
                divided = rows_at_once(objective, recipe, arguments.device, self.job.spread)
        except UserError:
            folder.abandon()
            raise
        objective = objective.evaluated_by(divided.fits)
        arguments.per_device_train_batch_size = divided.rows
        arguments.gradient_accumulation_steps = divided.passes
        last_checkpoint = folder.last_checkpoint()
        with self._logs(arguments) as logs:
            callbacks = [*logs, *self.job.callbacks]
            trainer = ResumableTrainer(objective, recipe, folder, arguments, callbacks)
            folder_lock = holding(folder.lock) if launched().is_main else nullcontext()
            with self._within_memory(arguments), folder_lock:
                trainer.train(
                    resume_from_checkpoint=None if last_checkpoint is None else str(last_checkpoint)
                )
        metrics = {
            "start": self.start,
            **objective.facts,
            **self._progress(trainer.state),
            "precision": "bfloat16" if arguments.bf16 else "float32",
            "processes": launched().count,
            **memory_facts(divided, arguments.device),
            "identity": self.identity,
            "environment": environment(arguments.device),
            "commits": commits_read(),
            **self.job.provenance,
        }
        return folder.publish(objective.save, metrics)

    def _within_memory(self, arguments: TrainingArguments) -> AbstractContextManager[None]:
        """Names the keys that make a step smaller, where memory runs out."""
        recipe = self.job.recipe
        step_size = (
            f"{self.title}: train.batch_size={recipe.batch_size} in"
            f" train.accumulate={recipe.accumulate} passes"
        )
        shorter = (
            f"lower train.max_target_tokens={recipe.max_target_tokens} or dataset.max_source_tokens"
        )
        if recipe.accumulate < recipe.batch_size:
            shorter = (
                f"set train.accumulate={min(2 * recipe.accumulate, recipe.batch_size)}, or"
                f" {shorter}"
            )
        return within_memory(
            step_size, arguments.device, f"{shorter}, under another name=NAME if this one is taken"
        )

    @contextmanager
    def _logs(self, arguments: TrainingArguments) -> Iterator[list[TrainerCallback]]:
        """The logs on the terminal and to a tracker; only the first process has them."""
        if not launched().is_main:
            yield []
            return
        with progress_bar(TextColumn("{task.fields[loss]}")) as bar:
            logs: list[TrainerCallback] = [
                TerminalLog(bar, self.title, self.job.recipe.max_steps, self.metric)
            ]
            # a resumed training continues the run of the same identity
            if self.job.logger is not None:
                about = {
                    "composition": self.start,
                    "environment": dict(environment(arguments.device)),
                }
                about = {**self.identity, **about}
                name = content_hash(dict(self.identity))
                begun = self.job.logger.begin(name, self.folder.root.name, about, TRAINING)
                logs += [
                    LogToRun(run, self.metric)
                    for run in (begun if isinstance(begun, list) else [begun])
                ]
            yield logs

    def _progress(self, state: TrainerState) -> dict[str, Any]:
        """How the training went: steps, time, losses and evaluations."""
        batch, history = self.job.recipe.batch_size, state.log_history
        losses = [entry for entry in history if "loss" in entry]
        evaluations = [entry for entry in history if f"eval_{self.metric}" in entry]
        best = next(
            (entry for entry in evaluations if entry["step"] == state.best_global_step), None
        )
        steps = [0, *(entry["step"] for entry in losses)]
        return {
            "steps": state.global_step,
            "passes": state.global_step * batch / self.examples,
            "training_s": sum(
                (step - previous_step) * batch / entry["examples_per_s"]
                for (previous_step, step), entry in zip(pairwise(steps), losses, strict=True)
            ),
            "loss": losses[-1]["loss"],
            "metric": self.metric,
            "best": (
                best
                and {
                    key.removeprefix("eval_"): value
                    for key, value in best.items()
                    if key != "epoch"
                }
            ),
            "evaluations": len(evaluations),
            "history": [
                {key: value for key, value in entry.items() if key != "epoch"} for entry in history
            ],
            "recipe": asdict(self.job.recipe),
        }


@contextmanager
def isolated(seed: int, threads: int | None) -> Iterator[None]:
    """Seed the global generators and set PyTorch's threads (None: `default_threads`) inside the
    block; restore both after it.

    Transformers' messages and progress bars are off inside the block, because they would disturb
    ours.
    """
    threads_before, level = torch.get_num_threads(), logging.get_verbosity()
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    logging.set_verbosity_error()
    try:
        with no_progress_bars(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.set_num_threads(default_threads() if threads is None else threads)
            torch.manual_seed(seed)
            yield
    finally:
        # or every later user of Accelerate gets bfloat16
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.set_num_threads(threads_before)
        logging.set_verbosity(level)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
