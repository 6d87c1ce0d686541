"""Fit the tree of medusa or bita to this machine: python scripts/fit_tree.py name=fitted policy=medusa [KEY=VALUE …]

It decodes texts of the chosen split, measures how often candidates are accepted by depth and rank and what a round
costs by rows, and writes the tree with the most expected tokens per second to outputs/NAME/tree.json.
"""

from __future__ import annotations

import json
import shlex

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.table import Table

from bild_lab.errors import require_whole
from bild_lab.files import write_atomically
from bild_lab.lab.cli import escape, output, refusing, run_application, stages
from bild_lab.lab.config import config_dir

SHOWN_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 49, 56, 64)


def fit(cfg: DictConfig) -> None:
    """Raises UserError for bad input."""
    import torch  # late: it takes seconds to load

    from bild_lab.lab.decoding.decoder import METHOD
    from bild_lab.lab.point import prepare, sweep_folder
    from bild_lab.lab.tree_search import facts_of_fit, fit_tree, require_tree, summary

    for key, least in (("rounds", 1), ("widest", 1), ("rows", 2)):
        require_whole(f"fit.{key}", cfg.fit[key], least)
    point = prepare(cfg)
    decoder = point.decoders[METHOD]
    require_tree(decoder)
    torch.set_num_threads(point.setting["threads"])
    stages.enter("loading models")
    decoder.load_weights()
    stages.enter("decoding texts and timing rounds")
    requests, facts = point.requests(point.examples), facts_of_fit(point, point.setting["split"])
    found = fit_tree(decoder, requests, facts, cfg.fit.rounds, cfg.fit.widest, cfg.fit.rows)
    path = sweep_folder(cfg) / "tree.json"
    write_atomically(path, json.dumps(found).encode())
    table = Table("rows", "tokens per round", "ms per round", "tokens/s", "", title="Expected, by rows of a forward")
    speeds = [1000 * one["tokens"] / one["ms"] for one in found["budgets"]]
    for one, speed in zip(found["budgets"], speeds, strict=True):
        fastest = speed == max(speeds)
        if fastest or one["rows"] in SHOWN_ROWS or len(speeds) <= len(SHOWN_ROWS):
            cells = str(one["rows"]), f"{one['tokens']:.3f}", f"{one['ms']:.3f}", f"{speed:.1f}"
            table.add_row(*cells, "← fastest" if fastest else "", style="bold" if fastest else None)
    output.print(table)
    output.print(escape(f"chosen: {summary(found)}"))
    own = ("name=", "fit.", "dataset.split=", "dataset.limit=", "policy.tree=", "policy=", "hydra")
    given = [word for word in HydraConfig.get().overrides.task if not word.startswith(own)]
    words = shlex.join([f"policy={point.policy}", *given, f"policy.tree={path}"])
    output.print(escape(f"{path}: decode with it: python run.py {words}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="fit_tree")
def main(cfg: DictConfig) -> None:
    """One fit."""
    with refusing("fit_tree"):
        fit(cfg)


if __name__ == "__main__":
    run_application(main, "fit_tree")
