"""Measure decoding policies: python run.py [-m] [overrides]. `python run.py --help` explains them."""

import hydra
from omegaconf import DictConfig

from bild_lab.lab.cli import run_application
from bild_lab.lab.config import config_dir
from bild_lab.lab.torchrun import only_first_prints


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
def main(cfg: DictConfig) -> float:
    """One point of a sweep."""
    from bild_lab.lab.sweep import measure_point  # torch loads only if there is something to measure

    return measure_point(cfg)


if __name__ == "__main__":
    with only_first_prints():
        run_application(main)
