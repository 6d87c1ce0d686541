"""Train heads on a frozen model: python scripts/train_medusa.py name=medusa model.path=DIR variant=medusa [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_medusa.py name=medusa model.path=DIR [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from bild_lab.errors import UserError
from bild_lab.lab.cli import refusing, run_application
from bild_lab.lab.config import config_dir, typed


def train(cfg: DictConfig) -> None:
    """Raises UserError for bad input."""
    from bild_lab.training.frozen.command import frozen_job, own_prompts, train_and_report
    from bild_lab.training.frozen.hydra import HydraSpec
    from bild_lab.training.frozen.medusa import MedusaSpec  # late: torch takes seconds to load
    from bild_lab.training.frozen.states import OneRowCheckpoint

    if cfg.variant == "hydra":
        train_and_report(frozen_job(cfg, typed(HydraSpec, cfg.medusa, "medusa"), OneRowCheckpoint, own_prompts))
    elif cfg.variant == "medusa":
        train_and_report(frozen_job(cfg, typed(MedusaSpec, cfg.medusa, "medusa")))
    else:
        raise UserError(f"variant must be one of medusa, hydra, got {cfg.variant!r}")


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train_medusa")
def main(cfg: DictConfig) -> None:
    """One set of heads."""
    with refusing():
        train(cfg)


if __name__ == "__main__":
    run_application(main, "train_medusa")
