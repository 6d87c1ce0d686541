"""What the commands of small modules share: `scripts/train_{bita,medusa,eagle,lm_heads}.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.device import resolve_dtype
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.ranks import launched, process_group
from bild_lab.errors import require_model_path
from bild_lab.lab.cli import escape, output, stages
from bild_lab.lab.config import typed
from bild_lab.lab.data.examples import DatasetSpec, load_examples
from bild_lab.lab.point import sweep_folder
from bild_lab.lab.results.records import require_writable
from bild_lab.lab.toy_pair import named_checkpoint, stand_in, untrained
from bild_lab.training.calibration.data import Calibration, read_calibration, read_calibrations
from bild_lab.training.calibration.generate import CalibrationJob, generate_calibration
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.frozen.job import FrozenJob, ModuleSpec
from bild_lab.training.frozen.train import train_module
from bild_lab.training.global_state import isolated
from bild_lab.training.recipe import LONGEST_WAIT, Recipe
from bild_lab.training.terminal import answers_bar
from bild_lab.training.wandb_log import print_closing, training_logger

RecipeAndAnswers = Callable[[DictConfig, Checkpoint, Path], tuple[Recipe, Calibration]]  # the path: the job's folder


@dataclass(frozen=True, kw_only=True)
class AnswerSpec:
    """How the model answers if no `calibration` is given; `CalibrationJob` checks the values."""

    max_new_tokens: int
    batch_size: int
    part_size: int
    dtype: str


def train_and_report(job: FrozenJob) -> None:
    """Train, write metrics.json, and print where the module is and how good it is."""
    metrics, place = train_module(job), job.folder / job.spec.result_name
    if launched().first:
        TrainingFolder(job.folder).write_metrics(metrics)
    course = f"{metrics['steps']:,} steps, loss {metrics['loss']:.3f}{_scores(metrics)}"
    output.print(escape(f"{place}: {course}"))
    output.print(escape(f"decode with it: {job.command(place)}"))
    print_closing(job.logger)


def _scores(metrics: dict[str, Any]) -> str:
    """The scores of the best weights, for the last line."""
    best, name = metrics["best"], metrics["metric"]
    if best is None:
        return ""
    shares = ", ".join(f"{best[f'top_1_{predictor}']:.1%}" for predictor in metrics["columns"])
    return (
        f"; {name} {best[name]:.2f} on {metrics['held_out_examples']:,} held-out answers, first choices right {shares}"
    )


def frozen_job(
    cfg: DictConfig,
    spec: ModuleSpec,
    kind: type[Checkpoint] = Checkpoint,
    recipe_and_answers: RecipeAndAnswers | None = None,
) -> FrozenJob:
    """The configuration as a job; missing answers are generated.

    kind: how the frozen model is read. recipe_and_answers: chooses how to train and what to learn; None takes
    `recipe_and_own_answers`.
    """
    folder = sweep_folder(cfg)
    require_writable(folder)
    TrainingFolder(folder, spec.result_name).require_free()
    logger = training_logger(cfg.logger)
    base = _frozen_base(cfg, spec, kind)
    recipe, calibration = (recipe_and_answers or recipe_and_own_answers)(cfg, base, folder)
    return FrozenJob(
        base=base,
        spec=spec,
        calibration=calibration,
        held_out=cfg.held_out,
        recipe=recipe,
        folder=folder,
        logger=logger,
    )


def _frozen_base(cfg: DictConfig, spec: ModuleSpec, kind: type[Checkpoint]) -> Checkpoint:
    """The frozen model. Raises UserError if it cannot be read, or the module cannot be trained for it."""
    require_model_path("model.path", cfg.model.path)
    if untrained(cfg.model.path):
        spec.check(stand_in(cfg.model.path)[0].config)  # before minutes of training
    base = named_checkpoint(cfg.model.path, cfg.model.revision, kind=kind)
    base.check()
    spec.check(base.config)
    return base


def recipe_and_own_answers(cfg: DictConfig, base: Checkpoint, folder: Path) -> tuple[Recipe, Calibration]:
    """The configuration's recipe, and the model's own answers: those of `calibration`, or generated into the folder."""
    recipe = typed(Recipe, cfg.train, "train")
    if not cfg.calibration:
        return recipe, own_answers(cfg, base, recipe, folder / "calibration")
    folders = [cfg.calibration] if isinstance(cfg.calibration, str) else cfg.calibration
    return recipe, read_calibrations([Path(folder) for folder in folders])


def own_prompts(cfg: DictConfig, base: Checkpoint, folder: Path) -> tuple[Recipe, Calibration]:
    """The same for a base that trains on rows of source and answer, but answers the prompts of its own tokenizer."""
    return recipe_and_own_answers(cfg, named_checkpoint(base.path, base.revision), folder)


def own_answers(cfg: DictConfig, base: Checkpoint, recipe: Recipe, folder: Path) -> Calibration:
    """The model's greedy answers to the dataset; those missing in the folder are generated."""
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    settings = typed(AnswerSpec, cfg.answers, "answers")
    examples = load_examples(dataset)
    stages.enter("loading the model")
    with isolated(recipe.seed, recipe.threads):
        target = HuggingFaceModel(
            base, process_group(recipe.on_cpu, LONGEST_WAIT).device, resolve_dtype(settings.dtype)
        )
        sizes = (settings.max_new_tokens, settings.batch_size, settings.part_size)
        job = CalibrationJob(target, dataset, examples, *sizes, folder)
        with answers_bar() as report:
            generate_calibration(job, report)
    return read_calibration(folder)
