"""Train a head for each layer: python scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8] [overrides]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import escape, output, refusing, run_application
from bild_lab.lab.config import config_dir, typed

if TYPE_CHECKING:
    from bild_lab.training.alignment.calibration import Calibration
    from bild_lab.training.frozen.job import FrozenJob
    from bild_lab.training.frozen.lm_heads import LayerHeadsTraining, RowCheckpoint
    from bild_lab.training.job import Recipe


def train(cfg: DictConfig) -> None:
    """Train, and say where the heads lie and how often they are right. Raises UserError for bad input."""
    from bild_lab.training.folder import TrainingFolder  # torch loads only when there is something to do
    from bild_lab.training.frozen.job import train_beside
    from bild_lab.training.frozen.launch import scored

    job = heads_job(cfg)
    metrics = train_beside(job)
    if not launched().first:
        return
    TrainingFolder(job.folder).write_metrics(metrics)
    place = job.folder / job.extension.leaves
    told = f"{metrics['steps']:,} steps, loss {metrics['loss']:.3f}{scored(metrics, metrics['best'])}"
    output.print(escape(f"{place}: {told}"))
    output.print(escape(f"decode with them: {job.extension.usage(job.base.path, place)}"))
    layers = ",".join(map(str, job.extension.layers))
    compared = f"model.path={job.base.path} layers=[{layers}] heads=[shared,{place}]"
    output.print(escape(f"compare with the shared head: python scripts/match_rates.py name=match {compared}"))


def heads_job(cfg: DictConfig) -> FrozenJob:
    """The configuration as a job; answers are generated where they are learned and not there yet."""
    from bild_lab.training.frozen.job import FrozenJob
    from bild_lab.training.frozen.launch import free_folder, frozen_base
    from bild_lab.training.frozen.lm_heads import LayerHeadsTraining, RowCheckpoint
    from bild_lab.training.tracking import run_logger

    extension = typed(LayerHeadsTraining, OmegaConf.create({"layers": cfg.layers, **cfg.heads}), "heads")
    folder = free_folder(cfg, extension)
    logger = run_logger(cfg.logger)
    base = frozen_base(cfg, extension, RowCheckpoint)
    recipe, calibration = lesson(cfg, base, extension, folder)
    dataset = calibration.dataset
    own = f"greedy answers of {base.path} to {dataset.name} ({dataset.split})"
    given = f"references of {dataset.name} ({dataset.split})"
    return FrozenJob(
        base=base,
        extension=extension,
        calibration=calibration,
        held_out=cfg.held_out,
        recipe=recipe,
        folder=folder,
        logger=logger,
        provenance={"data": own if extension.labels == "self" else given},
    )


def lesson(
    cfg: DictConfig, base: RowCheckpoint, extension: LayerHeadsTraining, folder: Path
) -> tuple[Recipe, Calibration]:
    """What is learned, and in how many steps."""
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.toy_pair import named_checkpoint
    from bild_lab.training.alignment.calibration import read_calibration
    from bild_lab.training.frozen.launch import own_answers
    from bild_lab.training.frozen.lm_heads import SELF, reference_answers

    if cfg.calibration is not None:
        if extension.labels != SELF:
            raise UserError(
                f"calibration={cfg.calibration} holds a model's own answers, which heads.labels={extension.labels} "
                f"does not learn; set heads.labels={SELF}, or calibration=null"
            )
        calibration = read_calibration(Path(cfg.calibration))
        return recipe_for(cfg, len(calibration.answers)), calibration
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    examples = load_examples(dataset)
    recipe = recipe_for(cfg, len(examples))
    if extension.labels == SELF:
        return recipe, own_answers(cfg, named_checkpoint(base.path, base.revision), recipe, folder / "calibration")
    return recipe, reference_answers(base, dataset, examples, recipe.max_target_tokens)


def recipe_for(cfg: DictConfig, answers: int) -> Recipe:
    """The recipe; where it leaves steps and warm-up open they follow from the number of answers."""
    from bild_lab.training.frozen.lm_heads import steps_of, warmup_of
    from bild_lab.training.job import Recipe

    require_whole("held_out", cfg.held_out, 1)
    left_open = [key for key in ("max_steps", "warmup_steps") if cfg.train[key] is None]
    recipe = typed(Recipe, OmegaConf.merge(cfg.train, dict.fromkeys(left_open, 1)), "train")
    if "max_steps" in left_open:
        recipe = replace(recipe, max_steps=steps_of(cfg.passes, answers - cfg.held_out, recipe.batch_size))
    if "warmup_steps" in left_open:
        recipe = replace(recipe, warmup_steps=warmup_of(cfg.warmup_ratio, recipe.max_steps))
    return recipe


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train_lm_heads")
def main(cfg: DictConfig) -> None:
    """One folder of heads."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_lm_heads")
