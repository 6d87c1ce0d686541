"""Train what a policy needs beside a frozen model: python scripts/train_module.py module=medusa model.path=DIR

    module=medusa, eagle, eagle3   heads or a layer that draft; model.path is the frozen model
    module=ngram   a table of n-grams of the dataset's references, in the tokens of pair.target

Several devices train all but n-grams together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_module.py module=eagle3 model.path=DIR [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import PairSpec, typed

if TYPE_CHECKING:
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.training.modules.ngrams import NgramSpec


def train(cfg: DictConfig) -> None:
    """Train the module that the configuration names. Raises UserError for bad input."""
    from bild_lab.lab.config.policies import find_part
    from bild_lab.training.modules.frozen import frozen_job, train_and_report
    from bild_lab.training.modules.ngrams import NgramSpec

    values = OmegaConf.to_container(cfg.module, resolve=True)
    del values["name"]
    module_spec = find_part(values.pop("_target_"))
    spec = typed(module_spec, values, "module")
    if not isinstance(spec, NgramSpec):
        train_and_report(frozen_job(cfg, spec))
        return
    if cfg.model.path is not None:
        raise UserError(
            f"tables of n-grams take pair.target in place of model.path; it is {cfg.model.path}"
        )
    if cfg.calibration is not None:
        raise UserError(
            "tables of n-grams count the references of the dataset, and take no"
            f" calibration={cfg.calibration}; to count these answers set dataset=local"
            " dataset.path=DIR dataset.source_column=prompt dataset.reference_column=answer"
            " dataset.metric=chrf in its place"
        )
    count_ngrams(cfg, spec)


def count_ngrams(cfg: DictConfig, spec: NgramSpec) -> None:
    """Count the references of a dataset in the target's tokens."""
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.training.modules.ngrams import estimate, reference_tokens
    from bild_lab.training.reports import dataset_words, print_decoding
    from bild_lab.training.start import require_no_languages

    pair, folder, dataset = checked(cfg)
    if dataset.reference_column is None:
        raise UserError(
            f"dataset {dataset.name} has no references to count; set dataset.reference_column"
        )
    examples = load_examples(dataset)
    # of which no weights are read
    checkpoint = Checkpoint(pair.target, pair.target_revision, allow_pickles=True)
    checkpoint.check()
    require_no_languages(checkpoint)
    texts = sum(len(example.references) for example in examples)
    status_line.enter("counting")
    corpus = f"{dataset.name} {dataset.split}, {texts:,} texts"
    table = estimate(
        reference_tokens(checkpoint, examples), spec.order, checkpoint.vocabulary, corpus
    )
    path = folder / "table.safetensors"
    table.save(path)
    pairs = f", {len(table.followers.tokens):,} different bigrams" if table.order == 2 else ""
    seen = (
        f"{table.token_count:,} tokens, {len(table.unigrams.tokens):,} of {table.width:,} pieces"
        f" seen{pairs}"
    )
    output.print(escape(f"{path}: {corpus}, {seen}"))
    order = [] if table.order == 2 else ["policy.order=1"]
    target = [f"pair.target={pair.target}", "pair.draft=null"]
    data = dataset_words(dataset)
    words = shlex.join(["policy=ngram", *order, f"policy.table={path}", *target, *data])
    print_decoding(f"python run.py {words}", data, dataset)


def checked(cfg: DictConfig) -> tuple[PairSpec, Path, DatasetSpec]:
    """The pair, the folder of the result and the dataset."""
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.store.records import require_writable

    pair = typed(PairSpec, cfg.pair, "pair")
    dataset = for_model(
        typed(DatasetSpec, cfg.dataset, "dataset"), Checkpoint(pair.target, pair.target_revision)
    )
    folder = sweep_folder(cfg)
    require_writable(folder)
    return pair, folder, dataset


@hydra_main("train_module")
def main(cfg: DictConfig) -> None:
    """One module."""
    with refusing("train_module"):
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_module")
