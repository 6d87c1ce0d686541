"""Train a BiTA adapter beside a frozen model: python scripts/train_bita.py name=bita model.path=DIR [KEY=VALUE …]

Several devices train together:

    accelerate launch --multi_gpu --num_processes 2 scripts/train_bita.py name=bita model.path=DIR [KEY=VALUE …]

(on CPUs too, with train.device=cpu; with --cpu instead of --multi_gpu Accelerate starts one process).
"""

from __future__ import annotations

from omegaconf import DictConfig

from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.entrypoint import refusing, run_application
from bild_lab.lab.config.schemas import typed


@hydra_main("train_bita")
def main(cfg: DictConfig) -> None:
    """One adapter."""
    with refusing():
        from bild_lab.training.modules.bita import BitaSpec  # late: torch takes seconds to load
        from bild_lab.training.modules.frozen import frozen_job, train_and_report

        train_and_report(frozen_job(cfg, typed(BitaSpec, cfg.bita, "bita")))


if __name__ == "__main__":
    run_application(main, "train_bita")
