"""Train an EAGLE on a frozen model: python scripts/train_eagle.py name=eagle model.path=DIR variant=eagle [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_eagle.py name=eagle model.path=DIR [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf

from bild_lab.lab.cli import refusing, run_application
from bild_lab.lab.config import config_dir, typed


def train(cfg: DictConfig) -> None:
    """Raises UserError for bad input."""
    from bild_lab.training.frozen.command import frozen_job, own_prompts, train_and_report  # late: torch is slow
    from bild_lab.training.frozen.eagle import EagleSpec
    from bild_lab.training.frozen.states import OneRowCheckpoint

    spec = typed(EagleSpec, OmegaConf.create({"variant": cfg.variant, **cfg.eagle}), "eagle")
    train_and_report(frozen_job(cfg, spec, OneRowCheckpoint, own_prompts))


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train_eagle")
def main(cfg: DictConfig) -> None:
    """One EAGLE."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_eagle")
