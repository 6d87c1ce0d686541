"""Fit a tree of candidates to this machine: python scripts/fit_tree.py policy=medusa policy.heads=DIR [KEY=VALUE …]

    python scripts/fit_tree.py name=tree pair.target=DIR dataset=NAME dataset.path=DIR policy=bita policy.adapter=DIR
    python run.py pair.target=DIR dataset=NAME dataset.path=DIR policy=bita policy.adapter=DIR \\
      policy.tree=outputs/tree/tree.json

A short run finds how often candidates are accepted by depth and rank, and what a round costs by its rows. The tree has
the most expected tokens a second (Sequoia, Chen et al., 2024, §3). Give the keys that the measured run will have:
target, heads or adapter, precision and threads. Its texts are those of dataset.split, by default the validation split.
"""

from __future__ import annotations

import json

from omegaconf import DictConfig
from rich.markup import escape

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.console import output, status_line
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed


def fit(cfg: DictConfig) -> None:
    """Fit the tree, write its file and print what is expected of it.

    Raises UserError for bad input.
    """
    import torch  # late, as it takes seconds to load

    from bild_lab.engine.methods.candidates import CandidateDrafter
    from bild_lab.lab.point.decoder import METHOD
    from bild_lab.lab.point.history import requests_of
    from bild_lab.lab.point.identity import sweep_folder
    from bild_lab.lab.point.prepare import prepare
    from bild_lab.screening.tree_fitting import describe_tree, fit_tree

    point = prepare(cfg)
    decoder = point.decoders[METHOD]
    if not isinstance(getattr(decoder.method, "drafter", None), CandidateDrafter):
        raise UserError(
            f"a tree is fitted for policy=medusa or policy=bita, got policy={point.policy}"
        )
    if point.batch > 1:
        raise UserError(
            f"a tree is fitted to one text at a time, got runtime.batch={point.batch}; set"
            " runtime.batch=1"
        )
    examples = [example for example in point.examples if example.turn == 1]
    torch.set_num_threads(point.setting["threads"])
    decoder.load_weights(status_line.enter)
    status_line.enter(f"decoding {len(examples)} texts")
    facts = {
        "policy": point.policy,
        "target": point.setting["weights"],
        "machine": {
            key: point.setting[key]
            for key in ("hardware", "threads", "engine", "dtype", "device", "code")
        },
        "texts": {"dataset": point.setting["dataset"], "split": point.setting["split"]},
    }
    tree = fit_tree(decoder, requests_of(point, examples), facts)
    status_line.leave()
    file = sweep_folder(cfg) / "tree.json"
    write_atomically(file, json.dumps(tree).encode())
    output.print(escape(describe_tree(tree)))
    output.print(escape(f"decode with it: policy={point.policy} policy.tree={file}"))


def note_same_texts(cfg: DictConfig) -> None:
    """Say so where a run on these data decodes the texts that the tree was fitted to."""
    from bild_lab.lab.data.dataset_spec import DatasetSpec
    from bild_lab.training.reports import dataset_words, decodes_same_texts

    dataset = typed(DatasetSpec, cfg.dataset, "dataset")
    if decodes_same_texts(dataset_words(dataset), dataset):
        output.print(
            "a run on these data decodes the texts that the tree was fitted to; give dataset.path a"
            " folder with a file for each split"
        )


@hydra_main("fit_tree")
def main(cfg: DictConfig) -> None:
    """One tree."""
    with refusing():
        fit(cfg)
        note_same_texts(cfg)


if __name__ == "__main__":
    run_application(main, "fit_tree")
