"""What the entrypoints of trainings beside a frozen model share: `scripts/train_{bita,medusa,lm_heads}.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from omegaconf import DictConfig
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bild_lab.engine.models.checkpoint import Checkpoint, resolve_dtype
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, output
from bild_lab.lab.config import typed
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.point import sweep_folder
from bild_lab.lab.results.records import require_writable
from bild_lab.lab.toy_pair import named_checkpoint
from bild_lab.training.alignment.calibration import Calibration, CalibrationJob, generate_calibration, read_calibration
from bild_lab.training.engine import on_cpu
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.frozen.job import Extension, FrozenJob, train_beside
from bild_lab.training.job import Recipe
from bild_lab.training.state import isolated
from bild_lab.training.tracking import run_logger

C = TypeVar("C", bound=Checkpoint)


@dataclass(frozen=True, kw_only=True)
class AnswerSpec:
    """How the model answers where no `calibration` is given (checked by `CalibrationJob`)."""

    max_new_tokens: int
    batch_size: int
    part_size: int
    dtype: str


def train_and_tell(cfg: DictConfig, extension: Extension) -> None:
    """Train what the configuration says, and say where it lies and how good it is. Raises UserError for bad input."""
    job = frozen_job(cfg, extension)
    metrics = train_beside(job)
    if not launched().first:
        return
    TrainingFolder(job.folder).write_metrics(metrics)
    place, best = job.folder / extension.leaves, metrics["best"]
    output.print(escape(f"{place}: {metrics['steps']:,} steps, loss {metrics['loss']:.3f}{scored(metrics, best)}"))
    output.print(escape(f"decode with it: {extension.usage(job.base.path, place)}"))


def scored(metrics: dict[str, Any], best: dict[str, Any] | None) -> str:
    """The best weights' scores, for the last line."""
    if best is None:
        return ""
    shares = ", ".join(f"{best[f'top_1_{column}']:.1%}" for column in metrics["columns"])
    name = metrics["metric"]
    return (
        f"; {name} {best[name]:.2f} on {metrics['held_out_examples']:,} answers held out, first choices right {shares}"
    )


def frozen_job(cfg: DictConfig, extension: Extension) -> FrozenJob:
    """The configuration as a job; answers are generated where they are not there yet."""
    folder = free_folder(cfg, extension)
    recipe = typed(Recipe, cfg.train, "train")
    logger = run_logger(cfg.logger)
    base = frozen_base(cfg, extension, Checkpoint)
    if cfg.calibration is None:
        calibration = own_answers(cfg, base, recipe, folder / "calibration")
    else:
        calibration = read_calibration(Path(cfg.calibration))
    return FrozenJob(
        base=base,
        extension=extension,
        calibration=calibration,
        held_out=cfg.held_out,
        recipe=recipe,
        folder=folder,
        logger=logger,
    )


def free_folder(cfg: DictConfig, extension: Extension) -> Path:
    """outputs/NAME. Raises UserError where nothing can be written, or something lies there that no training made."""
    folder = sweep_folder(cfg)
    require_writable(folder)
    TrainingFolder(folder, extension.leaves).require_free()
    return folder


def frozen_base(cfg: DictConfig, extension: Extension, kind: type[C]) -> C:
    """The model that stays as it is. Raises UserError for one that cannot be read or that the extension cannot join."""
    if not (isinstance(cfg.model.path, str) and cfg.model.path):
        raise UserError(f"model.path must be a folder or a hub id, got {cfg.model.path!r}")
    base = named_checkpoint(cfg.model.path, cfg.model.revision, kind=kind)
    base.check()
    extension.check(base.config)
    return base


def own_answers(cfg: DictConfig, base: Checkpoint, recipe: Recipe, folder: Path) -> Calibration:
    """The model's greedy answers to the dataset, generated into the folder where they are not there yet."""
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    settings = typed(AnswerSpec, cfg.answers, "answers")
    examples = load_examples(dataset)
    with isolated(recipe.seed, recipe.threads):
        processes = PartialState(cpu=on_cpu(recipe))
        target = HuggingFaceModel(base, processes.device, resolve_dtype(settings.dtype))
        sizes = (settings.max_new_tokens, settings.batch_size, settings.part_size)
        job = CalibrationJob(target, dataset, examples, *sizes, folder)
        with progress(processes) as report:
            generate_calibration(job, processes, report)
    return read_calibration(folder)


@contextmanager
def progress(processes: PartialState) -> Iterator[Any]:
    """A bar of answers while the block runs, as `generate_calibration` reports them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not processes.is_main_process) as bar:
        task = bar.add_task("answers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
