"""One training from its job to its result: what fine-tuning and modules beside a frozen model have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from huggingface_hub import ModelCard
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.files import holding
from bild_lab.lab.cli import stages
from bild_lab.lab.hashing import content_hash
from bild_lab.lab.measure.environment import environment
from bild_lab.training.folder import METRICS, TrainingFolder
from bild_lab.training.global_state import isolated
from bild_lab.training.output_files import write_json
from bild_lab.training.recipe import Recipe
from bild_lab.training.terminal import TerminalLog, progress_bar
from bild_lab.training.trainer import ResumableTrainer, TrainingTask, training_arguments
from bild_lab.training.wandb_log import LogToWandb

if TYPE_CHECKING:
    from bild_lab.training.wandb_log import TrainingLogger


class Job(Protocol):
    """What every training is given."""

    recipe: Recipe
    folder: Path
    progress: bool  # whether the terminal shows it
    logger: TrainingLogger | None
    callbacks: tuple[TrainerCallback, ...]
    provenance: Mapping[str, Any]  # added to metrics.json as it is

    @property
    def title(self) -> str:
        """The label of the progress bar."""

    @property
    def metric(self) -> str:
        """The score that chooses the best weights."""


@dataclass(frozen=True)
class Prepared:
    """A model in memory, with everything it is trained with.

    facts: the entries of metrics.json about model and data. save: writes the trained weights into a folder. card: makes
    the README.md of the result from its metrics.
    """

    model: nn.Module
    task: TrainingTask
    facts: Mapping[str, Any]
    save: Callable[[Path], None]
    card: Callable[[Mapping[str, Any]], ModelCard]


@dataclass(frozen=True)
class Training:
    """A checked job: what decides its result, and how its model is prepared.

    identity: settings and hashes; only the same identity resumes a folder or gets its finished result. start: the
    model it starts from, as the logs name it. evaluates: whether evaluations choose the best weights.
    """

    job: Job
    folder: TrainingFolder
    identity: Mapping[str, Any]
    start: str
    examples: int
    evaluates: bool
    prepare: Callable[[TrainingArguments], Prepared]
    terminal_log: type[TerminalLog] = TerminalLog


def run(training: Training) -> dict[str, Any]:
    """Train and leave the result in the job's folder; returns its metrics.json.

    An interrupted training of the same identity resumes from its last checkpoint, with the same losses as without the
    interruption; a finished one is returned at once. Works in every process of `accelerate launch`. Raises UserError
    if the folder holds another training, or the model cannot be trained.
    """
    folder, recipe = training.folder, training.job.recipe
    folder.require_same(training.identity)
    finished = folder.finished()
    if finished is not None:
        return finished
    with isolated(recipe.seed, folder.threads(recipe.threads)):
        return _train(training)


def _train(training: Training) -> dict[str, Any]:
    job, folder = training.job, training.folder
    if job.progress:
        stages.enter("preparing model and texts")
    arguments = training_arguments(job.recipe, folder, job.metric if training.evaluates else None)
    try:
        with arguments.main_process_first(local=False):
            if launched().first:
                folder.begin(training.identity)
        prepared = training.prepare(arguments)
    except UserError:
        folder.abandon()
        raise
    last = folder.last_checkpoint()
    with _logs(training, arguments) as logs:
        callbacks = [*logs, *job.callbacks]
        trainer = ResumableTrainer(prepared.model, job.recipe, prepared.task, folder, arguments, callbacks)
        with holding(folder.lock) if launched().first else nullcontext():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    metrics = {
        "start": training.start,
        **prepared.facts,
        **_course(job.recipe, job.metric, training.examples, trainer.state),
        "precision": "bfloat16" if arguments.bf16 else "float32",
        "processes": launched().count,
        "identity": training.identity,
        "environment": environment(arguments.device),
        **job.provenance,
    }

    def write(place: Path) -> None:
        prepared.save(place)
        prepared.card(metrics).save(place / "README.md")
        write_json(place / METRICS, metrics)

    if launched().first:
        folder.publish(write)
    launched().wait()
    return folder.finished()


@contextmanager
def _logs(training: Training, arguments: TrainingArguments) -> Iterator[list[TrainerCallback]]:
    """The logs of a training, terminal and Weights & Biases; only the first process has them."""
    job = training.job
    if not launched().first:
        yield []
        return
    with progress_bar(job.progress) as bar:
        logs: list[TrainerCallback] = [training.terminal_log(bar, job.title, job.recipe.max_steps, job.metric)]
        if job.logger is not None:
            name, device = content_hash(dict(training.identity)), environment(arguments.device)
            logs.append(LogToWandb(job.logger.start(name, job.folder.name, training.start, training.identity, device)))
        yield logs


def _course(recipe: Recipe, metric: str, examples: int, state: TrainerState) -> dict[str, Any]:
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
