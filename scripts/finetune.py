"""Fine-tune a checkpoint, or train a fresh one: python scripts/finetune.py name=NAME [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/finetune.py name=NAME [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from bild_lab.errors import UserError, require_whole
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed
from bild_lab.ranks import launched

if TYPE_CHECKING:
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.lab.data.prompts import Example
    from bild_lab.training.finetune import FinetuningJob
    from bild_lab.training.start import StartingPoint
    from bild_lab.training.train_spec import TrainSpec


@dataclass(frozen=True)
class ValidationSpec:
    """The examples that evaluations score. split: None holds out the last training examples."""

    split: str | None
    limit: int | None

    def __post_init__(self) -> None:
        if self.limit is not None:
            require_whole("validation.limit", self.limit, 1)
        elif self.split is None:
            raise UserError(
                "validation.split=null holds out validation.limit training examples; set it to a"
                " number"
            )


def run(cfg: DictConfig) -> None:
    """Train, and print where the checkpoint is. Raises UserError for bad input."""
    # late: torch takes seconds to load
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.training.finetune import finetune, finetune_best
    from bild_lab.training.folder import TrainingFolder
    from bild_lab.training.reports import dataset_words, print_closing, print_decoding

    status_line.enter("reading the data")
    job, rates = finetuning_job(cfg)
    metrics = finetune(job) if len(rates) == 1 else finetune_best(job, rates)
    if launched().is_main:
        TrainingFolder(job.folder).write_metrics(metrics)
    best = metrics["best"]
    scored = f", {metrics['metric']} {best[metrics['metric']]:.2f} on validation" if best else ""
    scored += (
        f", learning rate {metrics['recipe']['learning_rate']:g} of {len(rates)}"
        if len(rates) > 1
        else ""
    )
    output.print(
        escape(
            f"{job.folder}/checkpoint: {metrics['steps']:,} steps, loss"
            f" {metrics['loss']:.3f}{scored}"
        )
    )
    words = [f"pair.target={job.folder}/checkpoint", "pair.draft=null", "policy=vanilla"]
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    data = dataset_words(dataset)
    print_decoding(f"python run.py {shlex.join([*words, *data])}", data, dataset)
    print_closing(job.logger)


def finetuning_job(cfg: DictConfig) -> tuple[FinetuningJob, list[float]]:
    """The configuration as a job with the first of its learning rates, and all of these; the data
    is read.
    """
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.lab.metrics.text_metrics import LOG_PROBABILITY
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.records import require_writable
    from bild_lab.training.finetune import FinetuningJob, best_score
    from bild_lab.training.reports import training_logger

    folder = sweep_folder(cfg)
    require_writable(folder)
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    recipes = recipes_of(cfg)
    recipe, stop = recipes[0], cfg.train.get("stop_at_score")
    start = starting_point(cfg, recipe.max_target_tokens)
    require_answers(dataset)
    dataset = with_text_template(dataset, start)
    train, validation = examples(dataset, typed(ValidationSpec, cfg.validation, "validation"))
    job = FinetuningJob(
        start=start,
        train=train,
        validation=validation,
        metric=dataset.metric if dataset.prompt_template else LOG_PROBABILITY,
        recipe=recipe,
        folder=folder,
        max_source_tokens=dataset.max_source_tokens,
        title=folder.name,
        writing=dataset.writing(None),
        cut=dataset.cut or (),
        logger=training_logger(cfg.logger),
        provenance={"dataset": asdict(dataset)},
    )
    if isinstance(stop, str):
        recipe = replace(recipe, stop_at_score=best_score(Path(stop), job.metric, validation))
    return replace(job, recipe=recipe), [of_rate.learning_rate for of_rate in recipes]


def recipes_of(cfg: DictConfig) -> list[TrainSpec]:
    """The recipe with each of its learning rates. Where it stops at the score of another training,
    which is read when the data are known, it has no score yet.

    Raises UserError for learning rates that are the same, and for none.
    """
    from bild_lab.training.train_spec import TrainSpec

    values = OmegaConf.to_container(cfg.train, resolve=True)
    rates = values["learning_rate"]
    rates = rates if isinstance(rates, list) else [rates]
    if len(set(map(str, rates))) != len(rates) or not rates:
        raise UserError(
            f"train.learning_rate must be a number, or a list of different ones, got {rates}"
        )
    if isinstance(values.get("stop_at_score"), str):
        values["stop_at_score"] = None
    return [typed(TrainSpec, {**values, "learning_rate": rate}, "train") for rate in rates]


def require_answers(dataset: DatasetSpec) -> None:
    """Raise UserError for a dataset without texts to learn."""
    if dataset.reference_column is None:
        raise UserError(
            f"dataset {dataset.name} has no answers to learn from; set dataset.reference_column"
        )
    if dataset.reference_template is not None:
        raise UserError(
            "a training learns the texts of dataset.reference_column, not programs with tests; "
            "set dataset.reference_template=null and another metric than pass_at_1"
        )


def starting_point(cfg: DictConfig, max_target_tokens: int) -> StartingPoint:
    """`conf/model` as where the training starts, checked."""
    from bild_lab.lab.point.read_model import configured_checkpoint
    from bild_lab.training.start import FreshModel, FromCheckpoint, FromScratch

    if "path" not in cfg.model:
        return FromScratch(typed(FreshModel, cfg.model, "model"), max_target_tokens)
    if cfg.model.path is None:
        raise UserError(
            "set model.path=DIR_OR_HUB_ID to start from a checkpoint, or choose one such as"
            " model=t5_tiny"
        )
    return FromCheckpoint(configured_checkpoint(cfg))


def with_text_template(dataset: DatasetSpec, start: StartingPoint) -> DatasetSpec:
    """The dataset with the chat template of the starting point's tokenizer as text, where it asks
    for that. Raises UserError for a tokenizer that is yet to be trained.
    """
    from bild_lab.lab.data.dataset_spec import CHECKPOINT, for_model

    if start.checkpoint is not None:
        return for_model(dataset, start.checkpoint)
    if dataset.chat_template == (CHECKPOINT,):
        raise UserError(
            f"dataset.chat_template={CHECKPOINT}: a tokenizer that is trained anew has no chat"
            " template; set model.tokenizer=DIR, or give dataset.chat_template as text"
        )
    return dataset


def examples(
    dataset: DatasetSpec, validation: ValidationSpec
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Training and validation examples.

    Raises UserError if there are none of either, or if validation would have training examples.
    """
    from bild_lab.lab.data.examples import load_examples, same_rows
    from bild_lab.lab.schema.questions import questions_of, source_ids

    train = load_examples(dataset)
    if validation.split is None:
        questions = questions_of(source_ids(train))
        n_train = len(train) - validation.limit
        # nothing is on both sides: no passage, nor a question in another template or a later turn
        while n_train > 0 and questions[n_train - 1] == questions[n_train]:
            n_train -= 1
        if n_train <= 0:
            raise UserError(
                f"dataset {dataset.name} has {len(train)} examples, of which"
                f" validation.limit={validation.limit} leaves none to train on; lower it"
            )
        return train[:n_train], train[n_train:]
    try:
        changes = {"split": validation.split, "skip": 0, "limit": validation.limit}
        held_out = load_examples(replace(dataset, **changes))
    except UserError as error:
        raise UserError(
            f"validation.split: {error}; null holds out training examples instead"
        ) from error
    if same_rows(dataset, validation.split):
        raise UserError(
            f"validation.split={validation.split} has the rows of dataset.split={dataset.split}, so"
            " training examples would choose the best weights; set validation.split=null to hold"
            " out the last of them, or give dataset.path a folder with a file for each split"
        )
    return train, held_out


@hydra_main("finetune")
def main(cfg: DictConfig) -> None:
    """One checkpoint."""
    with refusing():
        run(cfg)


if __name__ == "__main__":
    run_application(main, "finetune")
