"""Train a head for each layer: python scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8] [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from bild_lab.errors import UserError, require_number, require_whole
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.training.calibration import Calibration
    from bild_lab.training.modules.frozen import FrozenJob
    from bild_lab.training.train_spec import TrainSpec


def train(cfg: DictConfig) -> None:
    """Train, and print how to decode with the heads and compare them.

    Raises UserError for bad input.
    """
    # late: torch takes seconds to load
    from bild_lab.training.modules.frozen import train_and_report

    job = heads_job(cfg)
    train_and_report(job)
    layers, place = ",".join(map(str, job.spec.layers)), job.folder / job.spec.result_name
    words = [
        "name=match",
        f"model.path={job.base.path}",
        f"layers=[{layers}]",
        f"heads=[shared,{place}]",
    ]
    compared = shlex.join([*words, *job.base.switches, *job.calibration.dataset_words])
    output.print(escape(f"compare with the shared head: python scripts/match_rates.py {compared}"))


def heads_job(cfg: DictConfig) -> FrozenJob:
    """The configuration as a job on the dataset's references, or on the model's own answers."""
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.training.modules.frozen import FrozenJob, frozen_model, own_answers, placement_of
    from bild_lab.training.modules.layer_heads import SELF, LayerHeadsSpec
    from bild_lab.training.reports import training_logger

    if cfg.layers is None:
        raise UserError(
            "layers must list after which layers there is a head, got null; such as layers=[4,6,8]"
        )
    spec = typed(LayerHeadsSpec, OmegaConf.create({"layers": cfg.layers, **cfg.heads}), "heads")
    base, placed = frozen_model(cfg, spec), placement_of(cfg)
    if cfg.calibration is not None and spec.labels != SELF:
        raise UserError(
            f"calibration={cfg.calibration} holds a model's own answers, which"
            f" heads.labels={spec.labels} does not learn; set heads.labels={SELF}, or"
            " calibration=null"
        )
    # checked before the number of answers is known
    first_recipe = recipe_for(cfg, cfg.held_out + 1)
    if spec.labels == SELF:
        answers, learned = own_answers(cfg, first_recipe), f"greedy answers of {base.path} to"
    else:
        answers = answers_of_dataset(cfg, base, first_recipe.max_target_tokens)
        learned = "references of"
    dataset = answers.dataset
    return FrozenJob(
        base=base,
        spec=spec,
        calibration=answers,
        held_out=cfg.held_out,
        recipe=recipe_for(cfg, len(answers.answers)),
        folder=sweep_folder(cfg),
        placed=placed,
        logger=training_logger(cfg.logger),
        provenance={"data": f"{learned} {dataset.name} ({dataset.split})"},
    )


def answers_of_dataset(cfg: DictConfig, base: Checkpoint, max_tokens: int) -> Calibration:
    """The references of the dataset as answers of at most so many tokens."""
    from bild_lab.lab.data.dataset_spec import REFERENCES, DatasetSpec, for_model
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.training.modules.references import reference_answers
    from bild_lab.training.reports import dataset_words

    dataset = for_model(typed(DatasetSpec, cfg.dataset, "dataset"), base)
    # a conversation is one row, of which all answers are learned
    if dataset.history == REFERENCES:
        examples = load_examples(replace(dataset, history=None), unanswered=True)
    else:
        examples = load_examples(dataset)
    answers = reference_answers(base, dataset, examples, max_tokens)
    return replace(answers, manifest={**answers.manifest, "dataset_words": dataset_words(dataset)})


def recipe_for(cfg: DictConfig, answers: int) -> TrainSpec:
    """The recipe; steps and warm-up that it leaves open follow from the number of answers."""
    from bild_lab.training.modules.frozen import frozen_recipe
    from bild_lab.training.train_spec import MOST_NUMBER

    require_whole("held_out", cfg.held_out, 1)
    require_number(
        "passes", cfg.passes, 0, MOST_NUMBER, above=True, remedy="or set train.max_steps"
    )
    require_number("warmup_ratio", cfg.warmup_ratio, 0, 1, remedy="or set train.warmup_steps")
    left_open = [key for key in ("max_steps", "warmup_steps") if cfg.train[key] is None]
    recipe = frozen_recipe(OmegaConf.merge(cfg.train, dict.fromkeys(left_open, 1)))
    if "max_steps" in left_open:
        batches = max(1, (answers - cfg.held_out) // recipe.batch_size)  # whole ones of a pass
        recipe = replace(recipe, max_steps=ceil(cfg.passes * batches))
    if "warmup_steps" in left_open:
        recipe = replace(recipe, warmup_steps=ceil(cfg.warmup_ratio * recipe.max_steps))
    return recipe


@hydra_main("train_lm_heads")
def main(cfg: DictConfig) -> None:
    """One folder of heads."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_lm_heads")
