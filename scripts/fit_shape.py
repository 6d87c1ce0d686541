"""Fit a tree or a window to this machine: python scripts/fit_shape.py name=fitted policy=medusa [KEY=VALUE …]

It decodes texts of the chosen split, measures how often candidates are accepted by depth and rank and what a round
costs by rows, and writes the tree or window with the most expected tokens per second to outputs/NAME/shape.json.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bild_lab.errors import UserError, require_whole
from bild_lab.lab.cli import escape, output, refusing, run_application, stages
from bild_lab.lab.config import config_dir


def fit(cfg: DictConfig) -> None:
    """Raises UserError for bad input."""
    import torch  # late: it takes seconds to load

    from bild_lab.engine.drafters.candidates import CandidateDrafter
    from bild_lab.lab.point import prepare, sweep_folder
    from bild_lab.lab.schema.timed import METHOD
    from bild_lab.lab.shapes.command import budget_table, requests_of, rounds_of_sweep, summary, told
    from bild_lab.lab.shapes.fit import Effort, fit_tree, fit_window, method_to_fit

    values = {key: cfg.fit[key] for key in ("positions", "widest", "rows", "window")}
    for key, least in (("positions", 1), ("widest", 1), ("rows", 2), ("window", 1)):
        require_whole(f"fit.{key}", values[key], least)
    if "window" in cfg.policy:
        cfg.policy.window = values["window"]
    point, effort = prepare(cfg), Effort(**values)
    decoder = point.decoders[METHOD]
    trees = isinstance(method_to_fit(decoder).drafter, CandidateDrafter)
    if trees and cfg.fit.sweep is not None:
        raise UserError("a sweep's examples hold no ranks of candidates, which trees need; set fit.sweep=null")
    rounds = rounds_of_sweep(Path(cfg.fit.sweep), point) if cfg.fit.sweep is not None else []
    torch.set_num_threads(point.setting["threads"])
    stages.enter("loading models")
    decoder.load_weights()
    stages.enter("decoding texts and timing rounds")
    requests, facts = requests_of(point, point.examples), told(point, point.setting["split"])
    if trees:
        found = fit_tree(decoder, requests, effort, facts)
    else:
        found = fit_window(decoder, requests, effort, facts, rounds)
    path = sweep_folder(cfg) / "shape.json"
    found.write(path)
    output.print(budget_table(found))
    output.print(escape(f"chosen: {summary(found)}"))
    knob = f"policy.tree={path}" if trees else f"policy.window={found.content['window']}"
    own = ("name=", "fit.", "dataset.split=", "dataset.limit=", "policy.tree=", "policy.window=", "hydra")
    given = [word for word in HydraConfig.get().overrides.task if not word.startswith((*own, "policy="))]
    words = shlex.join([f"policy={point.policy}", *given, knob])
    output.print(escape(f"{path}: decode with it: python run.py {words}"))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="fit_shape")
def main(cfg: DictConfig) -> None:
    """One fit."""
    with refusing("fit_shape"):
        fit(cfg)


if __name__ == "__main__":
    run_application(main, "fit_shape")
