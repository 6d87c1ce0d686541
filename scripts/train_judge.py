"""Train a judge for a pair: python scripts/train_judge.py name=judge pair.target=DIR pair.draft=DIR [KEY=VALUE …]

Every mismatch of the drafter in the target's answers is labelled by whether the text's score falls if the drafter's
token stands; a linear classifier on the target's last hidden state learns it.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from bild_lab.lab.cli import escape, output, progress, refusing, run_application, stages
from bild_lab.lab.config import config_dir, typed


def train(cfg: DictConfig) -> None:
    """Search, fit and print. Raises UserError for bad input."""
    from bild_lab.lab.config import DecodingSpec, PairSpec, RuntimeSpec, compose_policy
    from bild_lab.lab.data.examples import DatasetSpec, load_examples
    from bild_lab.lab.point import decoder_of, sweep_folder  # late: torch takes seconds to load
    from bild_lab.lab.results.records import require_writable
    from bild_lab.training.judge.job import JudgeJob, JudgeSpec, train_judge

    pair, runtime = typed(PairSpec, cfg.pair, "pair"), typed(RuntimeSpec, cfg.runtime, "runtime")
    spec, dataset = typed(JudgeSpec, cfg.judge, "judge"), typed(DatasetSpec, cfg.dataset, "dataset")
    decoding, folder = typed(DecodingSpec, cfg.decoding, "decoding"), sweep_folder(cfg)
    require_writable(folder)
    examples = load_examples(dataset)
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
    said = (
        f"{metrics['mismatches']:,} mismatches in {metrics['examples']:,} answers, {metrics['important']:,} of them "
        f"matter; held out, the area under the ROC curve is {metrics['best']['roc_auc']:.2f}, and the threshold "
        f"{metrics['threshold']:.2f} keeps {metrics['kept_share']:.0%} of those that do not matter and rejects "
        f"{metrics['recall']:.0%} of those that do"
    )
    output.print(escape(f"{place}: {said}"))
    output.print(escape(f"decode with it: {job.command(place)}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train_judge")
def main(cfg: DictConfig) -> None:
    """One judge."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_judge")
