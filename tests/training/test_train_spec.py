"""Recipes, jobs and arguments of the Trainer: which are refused, and what the others become."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import config_dir
from bild_lab.training import train_spec
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.train_spec import TrainSpec
from bild_lab.training.trainer import optimizer, training_arguments
from tests.training.jobs import MICRO

REFUSED = {
    "max_steps": (0, "train.max_steps must be a whole number >= 1, got 0"),
    "learning_rate": ("1e-3x", "train.learning_rate must lie in .*, got '1e-3x'"),
    "loss": ("first", "train.loss must be one of last, early_exit, calm, got 'first'"),
    "label_smoothing": (1.0, "train.label_smoothing must lie in .*, got 1.0"),
    "clip_norm": (0.0, r"train.clip_norm must lie in \(0, .*, got 0.0"),
    "log_every": (4, "train.evaluate_every must be a multiple of train.log_every=4, got 2"),
    "accumulate": (3, "train.batch_size must be a multiple of train.accumulate=3, got 4"),
    "scale_parameter": ("yes", "train.scale_parameter must be true or false, got 'yes'"),
    "seed": (-1, "train.seed must be a whole number >= 0, got -1"),
    "stop_at_score": (math.inf, "train.stop_at_score must be .*, got inf"),
}


# what the papers print of their trainings: BiLD §7.1.1, BiTA §4.1.2 and Appendix A, PPD Table 2
PAPERS = {
    "paper": {
        "optimizer": "adafactor",
        "learning_rate": 1e-4,
        "batch_size": 16,
        "max_steps": 500_000,
    },
    "bita": {
        "learning_rate": 0.03,
        "schedule": "cosine",
        "batch_size": 128,
        "max_steps": 4 * 300_000 // 128,
    },
    "lm_heads": {"optimizer": "adamw", "learning_rate": 2e-5, "batch_size": 128},
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_recipe_has_the_numbers_that_it_prints(name: str) -> None:
    recipe = OmegaConf.load(config_dir() / "train" / f"{name}.yaml")
    assert {key: recipe[key] for key in PAPERS[name]} == PAPERS[name]


BESIDE_FROZEN = ("bita", "eagle", "lm_heads", "medusa")  # whose loss is that of a module
OF_WHOLE_MODELS = {"scale_parameter", "label_smoothing", "soft_targets", "loss"}


@pytest.mark.parametrize("name", [*BESIDE_FROZEN, "lm1b", "paper", "small", "toy"])
def test_a_recipe_has_every_key_that_its_trainings_read(name: str) -> None:
    """Fault: the reference of keys names train.max_tokens, and train=medusa knew no such key."""
    recipe = OmegaConf.load(config_dir() / "train" / f"{name}.yaml")
    unread = OF_WHOLE_MODELS if name in BESIDE_FROZEN else {"max_tokens"}
    assert set(recipe) == set(TrainSpec.__dataclass_fields__) - unread


@pytest.mark.parametrize(
    ("facts", "quick"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),
        ("vendor_id : GenuineIntel\nflags : avx512f", False),
        ("", False),
    ],
)
def test_a_cpu_trains_in_bfloat16_where_that_is_faster(
    facts: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = facts.splitlines()
    asked = lambda *fields: "\n".join(line for line in lines if line.startswith(fields))  # noqa: E731
    monkeypatch.setattr(train_spec, "processor", asked)
    assert replace(MICRO, precision="auto", device="cpu").in_bfloat16 is quick


@pytest.mark.parametrize("key", REFUSED)
def test_a_recipe_that_cannot_be_used_is_refused(key: str) -> None:
    value, message = REFUSED[key]
    with pytest.raises(UserError, match=message):
        replace(MICRO, **{key: value})


def test_the_papers_adafactor_does_not_scale_its_rate_and_the_small_one_does() -> None:
    for scale in (False, True):
        kind, values = optimizer(replace(MICRO, scale_parameter=scale))
        made = kind([torch.nn.Parameter(torch.ones(2))], **values)
        assert made.param_groups[0]["scale_parameter"] is scale
        assert made.param_groups[0]["lr"] == 0.05 and made.param_groups[0]["relative_step"] is False


def test_processes_share_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        UserError,
        match=r"batch_size=4 cannot be divided among 3 processes .* choose a multiple of 3",
    ):
        training_arguments(MICRO, TrainingFolder(tmp_path), "bleu")


@pytest.mark.parametrize("told", ["bf16", "fp16", None])
def test_a_training_runs_in_the_recipes_precision_whatever_accelerate_was_told(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after `accelerate config` with bf16 a recipe of float32 was trained in bfloat16."""
    if told is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
    for precision, wanted in (("float32", "no"), ("bfloat16", "bf16")):
        recipe = replace(MICRO, precision=precision)
        arguments = training_arguments(recipe, TrainingFolder(tmp_path), "bleu")
        assert arguments.mixed_precision == wanted


def test_a_training_in_float32_is_refused_where_pytorch_has_fewer_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    training_arguments(replace(MICRO, precision="bfloat16"), TrainingFolder(tmp_path), "bleu")
    with pytest.raises(UserError, match="float32 with fewer digits"):
        training_arguments(MICRO, TrainingFolder(tmp_path), "bleu")


def test_several_gpus_need_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe = replace(MICRO, device="auto")
    with pytest.raises(
        UserError, match="2 GPUs are visible to one process; start one process for each"
    ):
        training_arguments(recipe, TrainingFolder(tmp_path), "bleu")
    assert training_arguments(MICRO, TrainingFolder(tmp_path), "bleu", spread=True).n_gpu == 1
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert recipe.on_cpu
