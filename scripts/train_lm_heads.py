"""Train a head for each layer: python scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8] [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import escape, output, refusing, run_application
from bild_lab.lab.config import config_dir, typed

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint import Checkpoint
    from bild_lab.training.calibration.data import Calibration
    from bild_lab.training.frozen.job import FrozenJob
    from bild_lab.training.recipe import Recipe


def train(cfg: DictConfig) -> None:
    """Train, and print how to decode with the heads and compare them. Raises UserError for bad input."""
    from bild_lab.training.dataset_words import dataset_words  # late: torch takes seconds to load
    from bild_lab.training.frozen.command import train_and_report

    job = heads_job(cfg)
    train_and_report(job)
    layers, place = ",".join(map(str, job.spec.layers)), job.folder / job.spec.result_name
    words = ["name=match", f"model.path={job.base.path}", f"layers=[{layers}]", f"heads=[shared,{place}]"]
    compared = shlex.join([*words, *dataset_words(job.calibration.dataset)])
    output.print(escape(f"compare with the shared head: python scripts/match_rates.py {compared}"))


def heads_job(cfg: DictConfig) -> FrozenJob:
    """The configuration as a job; missing answers of the model are generated if they are learned."""
    from bild_lab.training.frozen.command import frozen_job
    from bild_lab.training.frozen.layer_heads import SELF, LayerHeadsSpec
    from bild_lab.training.frozen.states import OneRowCheckpoint

    spec = typed(LayerHeadsSpec, OmegaConf.create({"layers": cfg.layers, **cfg.heads}), "heads")
    job = frozen_job(cfg, spec, OneRowCheckpoint, partial(recipe_and_answers, spec.labels))
    dataset = job.calibration.dataset
    learned = f"greedy answers of {job.base.path} to" if spec.labels == SELF else "references of"
    return replace(job, provenance={"data": f"{learned} {dataset.name} ({dataset.split})"})


def recipe_and_answers(labels: str, cfg: DictConfig, base: Checkpoint, folder: Path) -> tuple[Recipe, Calibration]:
    """How to train, and the answers to learn: the dataset's references, or the model's own."""
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.toy_pair import named_checkpoint
    from bild_lab.training.calibration.data import read_calibration
    from bild_lab.training.frozen.command import own_answers
    from bild_lab.training.frozen.layer_heads import SELF, reference_answers

    if cfg.calibration is not None:
        if labels != SELF:
            raise UserError(
                f"calibration={cfg.calibration} holds a model's own answers, which heads.labels={labels} "
                f"does not learn; set heads.labels={SELF}, or calibration=null"
            )
        calibration = read_calibration(Path(cfg.calibration))
        return recipe_for(cfg, len(calibration.answers)), calibration
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    examples = load_examples(dataset)
    recipe = recipe_for(cfg, len(examples))
    if labels == SELF:
        return recipe, own_answers(cfg, named_checkpoint(base.path, base.revision), recipe, folder / "calibration")
    return recipe, reference_answers(base, dataset, examples, recipe.max_target_tokens)


def recipe_for(cfg: DictConfig, answers: int) -> Recipe:
    """The recipe; steps and warm-up that it leaves open follow from the number of answers."""
    from bild_lab.training.recipe import Recipe, steps_for_passes, warmup_steps_for_ratio

    require_whole("held_out", cfg.held_out, 1)
    left_open = [key for key in ("max_steps", "warmup_steps") if cfg.train[key] is None]
    recipe = typed(Recipe, OmegaConf.merge(cfg.train, dict.fromkeys(left_open, 1)), "train")
    if "max_steps" in left_open:
        recipe = replace(recipe, max_steps=steps_for_passes(cfg.passes, answers - cfg.held_out, recipe.batch_size))
    if "warmup_steps" in left_open:
        recipe = replace(recipe, warmup_steps=warmup_steps_for_ratio(cfg.warmup_ratio, recipe.max_steps))
    return recipe


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train_lm_heads")
def main(cfg: DictConfig) -> None:
    """One folder of heads."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_lm_heads")
