"""What a fine-tuning is given: a model, examples, a recipe and a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.data.examples import Example
from bild_lab.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from bild_lab.training.wandb_log import TrainingLogger


@dataclass(frozen=True, kw_only=True)
class FinetuningJob:
    """One training from examples to `folder/checkpoint` (a `run.Job`).

    Either model_path (a folder, a hub id, or toy:small) or model (a fresh configuration, the fields of
    `conf/model/*.yaml`) is given. The answer to learn is an example's first reference; validation scores against all
    references. Without validation examples the last weights are kept. Raises UserError for soft targets without a
    teacher, and for a teacher without them.
    """

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    metric: str  # bleu, rouge or agreement
    recipe: Recipe
    folder: Path
    model_path: str | None = None
    model: Mapping[str, Any] | None = None
    model_revision: str | None = None
    teacher: Checkpoint | None = None  # gives soft targets, as many as the recipe says
    max_source_tokens: int | None = None  # longer prompts are cut
    data: str = "examples given by the caller"  # what they are, for the model card
    title: str = "training"
    progress: bool = True
    logger: TrainingLogger | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.recipe.soft_targets) != (self.teacher is not None):
            raise UserError(
                "train.soft_targets are those of a target that answered: use scripts/align.py, or set "
                "train.soft_targets=0 and give no teacher"
            )
        if (self.model_path is None) == (self.model is None):
            raise UserError(
                "a training needs either a checkpoint or a fresh configuration: "
                "set model.path=DIR_OR_HUB_ID, or choose one such as model=t5_tiny"
            )
