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

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.config.cli import escape, output, refusing, run_application, stages
from bild_lab.lab.config.groups import hydra_main


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
    examples = [example for example in point.examples if example.turn == 1]
    torch.set_num_threads(point.setting["threads"])
    decoder.load_weights(stages.enter)
    stages.enter(f"decoding {len(examples)} texts")
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
    stages.leave()
    file = sweep_folder(cfg) / "tree.json"
    write_atomically(file, json.dumps(tree).encode())
    output.print(escape(describe_tree(tree)))
    output.print(escape(f"decode with it: policy={point.policy} policy.tree={file}"))


@hydra_main("fit_tree")
def main(cfg: DictConfig) -> None:
    """One tree."""
    with refusing():
        fit(cfg)


if __name__ == "__main__":
    run_application(main, "fit_tree")
