"""Train what a policy needs beside a frozen model: python scripts/train_module.py module=medusa model.path=DIR

    module=medusa, hydra, eagle, eagle3   heads or a layer that draft; model.path is the frozen model
    module=judge   a classifier of a drafter's mismatches, for pair.target and pair.draft. Each is labelled by whether
                   the text's score falls if the drafter's token is accepted
    module=ngram   a table of n-grams of the dataset's references, in the tokens of pair.target

Several devices train the first four together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_module.py module=eagle3 model.path=DIR [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, progress, refusing, run_application, stages
from bild_lab.lab.config import DecodingSpec, PairSpec, RuntimeSpec, compose_policy, hydra_main, typed

if TYPE_CHECKING:
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.training.modules.judge import JudgeSpec
    from bild_lab.training.ngrams import NgramSpec


def train(cfg: DictConfig) -> None:
    """Train the module that the configuration names. Raises UserError for bad input."""
    from bild_lab.lab.config import find_part  # late: torch takes seconds to load
    from bild_lab.training.modules.frozen import frozen_job, train_and_report
    from bild_lab.training.modules.judge import JudgeSpec
    from bild_lab.training.ngrams import NgramSpec

    values = OmegaConf.to_container(cfg.module, resolve=True)
    name, part = values.pop("name"), find_part(values.pop("_target_"))
    spec = typed(part, values, "module")
    if not isinstance(spec, JudgeSpec | NgramSpec):
        train_and_report(frozen_job(cfg, spec))
        return
    if cfg.model.path is not None:
        raise UserError(f"module={name} takes pair.target in place of model.path; it is {cfg.model.path}")
    if isinstance(spec, JudgeSpec):
        label_and_fit(cfg, spec)
    else:
        count_ngrams(cfg, spec)


def label_and_fit(cfg: DictConfig, spec: JudgeSpec) -> None:
    """Search labels, fit the classifier and print how good it is."""
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.lab.point import decoder_of
    from bild_lab.training.modules.judge import EXAMPLES, JudgeJob, train_judge

    pair, folder, dataset = checked(cfg)
    runtime, decoding = typed(RuntimeSpec, cfg.runtime, "runtime"), typed(DecodingSpec, cfg.decoding, "decoding")
    examples = load_examples(dataset if dataset.limit is not None else replace(dataset, limit=EXAMPLES))
    decoder = decoder_of(compose_policy("speculative"), pair, decoding, runtime)
    words = [f"pair.target={pair.target}", f"pair.draft={pair.draft}"]
    job = JudgeJob(decoder, words, spec, dataset, examples, decoding.max_new_tokens, folder)
    stages.enter("loading the models")
    decoder.load_weights()
    stages.leave()
    with progress() as bar:
        task = bar.add_task("searching", total=len(examples))
        metrics = train_judge(job, lambda: bar.advance(task))
    place = folder / "judge"
    found = (
        f"{metrics['mismatches']:,} mismatches in {metrics['examples']:,} answers, {metrics['important']:,} of them "
        f"matter; held out, the area under the ROC curve is {metrics['best']['roc_auc']:.2f}, and the threshold "
        f"{metrics['threshold']:.2f} keeps {metrics['kept_share']:.0%} of those that do not matter and rejects "
        f"{metrics['recall']:.0%} of those that do"
    )
    output.print(escape(f"{place}: {found}"))
    output.print(escape(f"decode with it: {job.command(place)}"))


def count_ngrams(cfg: DictConfig, spec: NgramSpec) -> None:
    """Count the references of a dataset in the target's tokens."""
    from bild_lab.engine.models.checkpoint import Checkpoint
    from bild_lab.lab.data.examples import load_examples
    from bild_lab.training.dataset_words import dataset_words
    from bild_lab.training.ngrams import estimate, reference_tokens

    pair, folder, dataset = checked(cfg)
    if dataset.reference_column is None:
        raise UserError(f"dataset {dataset.name} has no references to count; set dataset.reference_column")
    examples = load_examples(dataset)
    checkpoint = Checkpoint(pair.target, pair.target_revision)
    checkpoint.check()
    texts = sum(len(example.references) for example in examples)
    stages.enter("counting")
    corpus = f"{dataset.name} {dataset.split}, {texts:,} texts"
    table = estimate(reference_tokens(checkpoint, examples), spec.order, checkpoint.vocabulary, corpus)
    path = folder / "table.safetensors"
    table.save(path)
    pairs = f", {len(table.followers.tokens):,} different bigrams" if table.order == 2 else ""
    seen = f"{table.token_count:,} tokens, {len(table.unigrams.tokens):,} of {table.width:,} pieces seen{pairs}"
    output.print(escape(f"{path}: {corpus}, {seen}"))
    order = [] if table.order == 2 else ["policy.order=1"]
    target = [f"pair.target={pair.target}", "pair.draft=null"]
    words = shlex.join(["policy=ngram", *order, f"policy.table={path}", *target, *dataset_words(dataset)])
    output.print(escape(f"decode with it: python run.py {words}"))


def checked(cfg: DictConfig) -> tuple[PairSpec, Path, DatasetSpec]:
    """The pair, the folder of the result and the dataset."""
    from bild_lab.engine.models.checkpoint import Checkpoint
    from bild_lab.lab.data.dataset_spec import DatasetSpec, for_model
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.records import require_writable

    pair = typed(PairSpec, cfg.pair, "pair")
    dataset = for_model(typed(DatasetSpec, cfg.dataset, "dataset"), Checkpoint(pair.target, pair.target_revision))
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
