"""Measure how often early layers know the next token: python scripts/match_rates.py name=match model.path=DIR

PPD's tables: python scripts/match_rates.py match=paper dataset=wmt15_en_fr. Small ones: match=small
"""

from __future__ import annotations

from omegaconf import DictConfig

from bild_lab.lab.config.compose import hydra_main
from bild_lab.lab.config.entrypoint import refusing, run_application

WANTED = (
    "a model or one of the tables is needed; python scripts/match_rates.py name=match"
    " model.path=DIR dataset=local dataset.path=FILE, or match=small for the toy model"
)


@hydra_main("match_rates")
def main(cfg: DictConfig) -> None:
    """One table."""
    # torch loads only if there is something to do
    from bild_lab.papers.match_rates import match_rates

    with refusing():
        match_rates(cfg)


if __name__ == "__main__":
    run_application(main, "match_rates", WANTED)
