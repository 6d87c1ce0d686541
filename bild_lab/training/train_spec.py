"""How to train: the values of `conf/train`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from bild_lab.engine.models.device import processor
from bild_lab.errors import (
    UserError,
    require_choice,
    require_finite,
    require_flag,
    require_number,
    require_whole,
)

OPTIMIZERS = ("adafactor", "adamw")
# names in Transformers
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
LOSSES = ("last", "early_exit", "calm")
PRECISIONS = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu")
MOST_NUMBER, MOST_SHARE = 1e30, 0.99


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How to train: the fields of `conf/train/*.yaml`. Raises UserError for values that cannot be
    used.

    A batch is what one optimizer step takes over all processes, so a recipe means the same on one
    device and on eight. Every `evaluate_every` steps and at the end the model is evaluated, a
    checkpoint is written and the best one is chosen; None leaves all three out.
    """

    name: str  # of the recipe
    max_steps: int  # steps of the optimizer, at least 1
    batch_size: int  # examples of one step, over all processes
    # forward and backward passes of one step, at least: a GPU takes more where their rows do not fit
    accumulate: int = 1
    optimizer: str = "adafactor"  # or adamw
    learning_rate: float  # the highest of the schedule, above 0
    scale_parameter: bool = False  # Adafactor: the rate is relative to each parameter's scale
    schedule: str = "constant"  # or linear, cosine
    warmup_steps: int = 0  # steps in which the rate rises, at least 0
    # of the gradient, above 0; null: never; Adafactor clips its own updates
    clip_norm: float | None = None
    label_smoothing: float = 0.0  # at least 0, below 1
    # how many of the target's most likely tokens are learned at each place; 0: its answer alone
    soft_targets: int = 0
    # early_exit: mean of the first and last layer's; calm: layer i weighs i / Σj (BiLD §7.2.1)
    loss: str = "last"
    # float32 or bfloat16; auto: bfloat16 autocast if the device is fast at it
    precision: str = "auto"
    # longer answers are cut, and have no end token; evaluations decode no more than this
    max_target_tokens: int = 128
    # of prompt and answer, beside a frozen model; longer ones are cut; null: never
    max_tokens: int | None = None
    # steps to the next evaluation, checkpoint and choice of the best; null: none
    evaluate_every: int | None = 500
    stop_at_score: float | None = None  # end once an evaluation scores so much; null: never
    log_every: int = 50  # steps to the next line of the log, of which evaluate_every is a multiple
    device: str = "auto"  # or cpu
    threads: int | None = None  # CPU threads, at least 1; null: PyTorch chooses
    seed: int = 0  # of weights and of the order of examples, at least 0

    def __post_init__(self) -> None:
        for key in ("max_steps", "batch_size", "accumulate", "max_target_tokens", "log_every"):
            require_whole(f"train.{key}", getattr(self, key), 1)
        for key in ("evaluate_every", "threads", "max_tokens"):
            if getattr(self, key) is not None:
                require_whole(f"train.{key}", getattr(self, key), 1)
        for key in ("warmup_steps", "seed", "soft_targets"):
            require_whole(f"train.{key}", getattr(self, key), 0)
        require_flag("train.scale_parameter", self.scale_parameter)
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "loss": LOSSES}
        for key, known in {**choices, "precision": PRECISIONS, "device": DEVICES}.items():
            require_choice(f"train.{key}", getattr(self, key), known)
        require_number("train.learning_rate", self.learning_rate, 0, MOST_NUMBER, above=True)
        require_number("train.label_smoothing", self.label_smoothing, 0, MOST_SHARE)
        if self.soft_targets and self.label_smoothing:
            raise UserError(
                "train.soft_targets has the target's probabilities in place of smoothed labels; "
                "set train.label_smoothing=0"
            )
        if self.clip_norm is not None:
            require_number(
                "train.clip_norm",
                self.clip_norm,
                0,
                MOST_NUMBER,
                above=True,
                remedy="null never clips",
            )
        self._require_evaluations()
        if self.batch_size % self.accumulate:
            raise UserError(
                f"train.batch_size must be a multiple of train.accumulate={self.accumulate}, got"
                f" {self.batch_size}"
            )

    def _require_evaluations(self) -> None:
        """Raise UserError for a score without evaluations, and for evaluations between two logs."""
        if self.stop_at_score is not None:
            require_finite("train.stop_at_score", self.stop_at_score, remedy="null never stops")
            if self.evaluate_every is None:
                raise UserError(
                    "train.stop_at_score reads evaluations; set train.evaluate_every to a number of"
                    " steps"
                )
        if self.evaluate_every is not None and self.evaluate_every % self.log_every:
            raise UserError(
                f"train.evaluate_every must be a multiple of train.log_every={self.log_every}, got"
                f" {self.evaluate_every}: a resumed training logs the same losses only if no log"
                " spans a checkpoint"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """The values under the user's own keys, without the name, which decides nothing."""
        return {f"train.{key}": value for key, value in asdict(self).items() if key != "name"}

    @property
    def evaluation_batch_size(self) -> int:
        """Examples evaluated at once: as many as one forward pass of training has over all
        processes.
        """
        return self.batch_size // self.accumulate

    @property
    def on_cpu(self) -> bool:
        """Whether this machine trains on its CPU: the recipe or `accelerate launch` says so, or
        there is no GPU.
        """
        return (
            self.device == "cpu"
            or not torch.accelerator.is_available()
            or parse_flag_from_env("ACCELERATE_USE_CPU")
        )

    @property
    def in_bfloat16(self) -> bool:
        """Whether the forward pass runs under bfloat16 autocast; `auto` asks the hardware whether
        that is faster.

        A CPU's products are with matrix tiles, or of pairs that are not Intel's, which are half as
        fast as float32.
        """
        if self.precision != "auto":
            return self.precision == "bfloat16"
        if not self.on_cpu:
            return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        facts = processor("flags", "vendor_id")
        return "amx_bf16" in facts or ("avx512_bf16" in facts and "GenuineIntel" not in facts)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of models beside the trained one, such as a teacher."""
        return torch.bfloat16 if self.in_bfloat16 else torch.float32
