"""What a training is given: a model, examples, a recipe and a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.errors import UserError, require_flag, require_whole
from bild_lab.lab.data.examples import Example

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from bild_lab.training.tracking import WandbRun

OPTIMIZERS = ("adafactor", "adamw")
SCHEDULES = ("constant", "linear", "cosine")
LOSSES = ("last", "early_exit", "calm")
PRECISIONS = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train: the fields of `conf/train/*.yaml`. Raises UserError for values that cannot be used.

    The batch is that of one optimizer step over all processes, so a recipe means the same on one
    device and on eight. Evaluation, checkpoint and the choice of the best happen together, every
    `evaluate_every` steps and at the end; null trains without any of them.
    """

    name: str
    max_steps: int
    batch_size: int  # examples of one step, over all processes
    accumulate: int = 1  # forward and backward passes of one step
    optimizer: str = "adafactor"
    learning_rate: float
    scale_parameter: bool = False  # Adafactor: the rate is relative to each parameter's scale
    schedule: str = "constant"
    warmup_steps: int = 0
    clip_norm: float | None = None  # of the gradient; Adafactor clips its own updates
    label_smoothing: float = 0.0
    loss: str = "last"
    precision: str = "auto"  # bfloat16 autocast where the device is fast at it
    max_target_tokens: int = 128  # answers are cut to so many; also the limit of decoding in evaluations
    evaluate_every: int | None = 500  # steps
    log_every: int = 50  # steps
    device: str = "auto"
    threads: int | None = None  # CPU threads of PyTorch; null leaves its choice
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("max_steps", "batch_size", "accumulate", "max_target_tokens", "log_every"):
            require_whole(f"train.{key}", getattr(self, key), 1)
        for key in ("evaluate_every", "threads"):
            if getattr(self, key) is not None:
                require_whole(f"train.{key}", getattr(self, key), 1)
        for key in ("warmup_steps", "seed"):
            require_whole(f"train.{key}", getattr(self, key), 0)
        require_flag("train.scale_parameter", self.scale_parameter)
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "loss": LOSSES}
        for key, known in {**choices, "precision": PRECISIONS, "device": DEVICES}.items():
            if getattr(self, key) not in known:
                raise UserError(f"train.{key} must be one of {', '.join(known)}, got {getattr(self, key)!r}")
        _require_number("learning_rate", self.learning_rate, lambda value: value > 0, "> 0")
        _require_number("label_smoothing", self.label_smoothing, lambda value: 0 <= value < 1, "in [0, 1)")
        if self.clip_norm is not None:
            _require_number("clip_norm", self.clip_norm, lambda value: value > 0, "> 0, or null")
        if self.evaluate_every is not None and self.evaluate_every % self.log_every:
            raise UserError(
                f"train.evaluate_every must be a multiple of train.log_every={self.log_every}, got "
                f"{self.evaluate_every}: a resumed training logs the same losses only if no log spans a checkpoint"
            )
        if self.batch_size % self.accumulate:
            raise UserError(
                f"train.batch_size must be a multiple of train.accumulate={self.accumulate}, got {self.batch_size}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training from examples to `folder/checkpoint`.

    Exactly one of model_path (a folder, hub id or toy:small) and model (a fresh configuration, the
    fields of `conf/model/*.yaml`) is given. The answer to an example's prompt is its first reference;
    validation is scored against all of them. Without validation examples the last weights are kept.
    """

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    metric: str  # bleu, rouge or agreement
    recipe: Recipe
    folder: Path
    model_path: str | None = None
    model: Mapping[str, Any] | None = None
    model_revision: str | None = None
    max_source_tokens: int | None = None  # prompts are cut to so many
    data: str = "examples given by the caller"  # what they are, for the model card
    title: str = "training"  # what the progress bar shows
    progress: bool = True
    logger: WandbRun | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)  # added to metrics.json as it is

    def __post_init__(self) -> None:
        if (self.model_path is None) == (self.model is None):
            raise UserError(
                "a training wants either a checkpoint or a fresh configuration: "
                "set model.path=DIR_OR_HUB_ID, or choose one such as model=t5_tiny"
            )


def _require_number(key: str, value: Any, fits: Any, wanted: str) -> None:
    """Raise UserError unless the value is a finite number that fits."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and fits(value)
    if not good:
        raise UserError(f"train.{key} must be a number {wanted}, got {value!r}")
