"""Count n-grams for policy=ngram: python scripts/build_ngrams.py name=ngrams [KEY=VALUE …]"""

import shlex

import hydra
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.cli import escape, output, refusing, run_application, stages
from bild_lab.lab.config import PairSpec, config_dir, typed


def build_table(cfg: DictConfig) -> None:
    """Count the references of a dataset in the target's tokens. Raises UserError for bad input."""
    from bild_lab.engine.drafters.ngram_table import require_order
    from bild_lab.lab.data.examples import DatasetSpec, load_examples  # late: torch takes seconds to load
    from bild_lab.lab.point import sweep_folder
    from bild_lab.lab.results.records import require_writable
    from bild_lab.lab.toy_pair import named_checkpoint
    from bild_lab.training.dataset_words import dataset_words
    from bild_lab.training.ngrams import estimate, reference_tokens

    pair = typed(PairSpec, cfg.pair, "pair")
    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    require_order(cfg.ngram.order)
    if dataset.reference_column is None:
        raise UserError(f"dataset {dataset.name} has no references to count; set dataset.reference_column")
    folder = sweep_folder(cfg)
    require_writable(folder)
    examples = load_examples(dataset)
    checkpoint = named_checkpoint(pair.target, pair.target_revision)
    checkpoint.check()
    texts = sum(len(example.references) for example in examples)
    stages.enter("counting")
    corpus = f"{dataset.name} {dataset.split}, {texts:,} texts"
    table = estimate(reference_tokens(checkpoint, examples), cfg.ngram.order, checkpoint.vocabulary, corpus)
    path = folder / "table.safetensors"
    table.save(path)
    pairs = f", {len(table.followers.tokens):,} different bigrams" if table.order == 2 else ""
    seen = f"{table.token_count:,} tokens, {len(table.unigrams.tokens):,} of {table.width:,} pieces seen{pairs}"
    output.print(escape(f"{path}: {corpus}, {seen}"))
    order = [] if table.order == 2 else ["policy.order=1"]
    target = [f"pair.target={pair.target}", "pair.draft=null"]
    words = shlex.join(["policy=ngram", *order, f"policy.table={path}", *target, *dataset_words(dataset)])
    output.print(escape(f"decode with it: python run.py {words}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="ngrams")
def main(cfg: DictConfig) -> None:
    """One table."""
    with refusing():
        build_table(cfg)


if __name__ == "__main__":
    run_application(main, "ngrams")
