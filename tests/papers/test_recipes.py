"""The trainings that BiLD's early exits read are chosen as its paper chooses them."""

from __future__ import annotations

import shlex

from hydra import compose, initialize_config_dir

from bild_lab.lab.config.compose import HYDRA_VERSION, config_dir
from bild_lab.papers.runs.recipes import recipes_of


def test_early_exits_and_calm_are_chosen_on_all_of_validation() -> None:
    """Of 200 sentences BLEU is known to ±2.5, which is more than the learning rates differ by."""
    with initialize_config_dir(str(config_dir()), **HYDRA_VERSION):
        exits, calm = recipes_of(compose("config", ["experiment=bild/fig6_7"]))
        for recipe in (exits, calm):
            words = shlex.split(recipe.command)[2:]
            cfg = compose("finetune", words)
            assert (cfg.validation.split, cfg.validation.limit) == ("validation", None)
            assert list(cfg.train.learning_rate) == [5e-5, 1e-4, 2e-4, 5e-4]
    assert calm.overrides[-1] == "train.stop_at_score=outputs/iwslt2017_early_exit"
