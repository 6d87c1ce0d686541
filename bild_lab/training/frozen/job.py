"""What the training of a small module is given: the frozen model, the module's settings, answers and a recipe."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.errors import UserError, require_whole
from bild_lab.training.batches import spread_evenly
from bild_lab.training.calibration.data import Calibration
from bild_lab.training.dataset_words import dataset_words
from bild_lab.training.fit_checks import require_room
from bild_lab.training.frozen.contexts import AnsweredPrompt, ContextChooser
from bild_lab.training.recipe import Recipe

if TYPE_CHECKING:
    from bild_lab.training.wandb_log import TrainingLogger


class SmallModule(Protocol):
    """A torch module with weights of its own, which calls a frozen model.

    The frozen model is not its submodule, so the Trainer moves, trains and saves the small weights alone. Its
    predictors (mask tokens or heads) each predict one token after every context.
    """

    def __call__(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> Float[Tensor, "batch contexts predictors vocab"]:
        """The logits of every predictor after each context. contexts: how many tokens each one holds."""

    def save(self, folder: Path) -> None:
        """Write the weights as decoding reads them."""


class ModuleSpec(Protocol):
    """The settings of a small module to train, before any weights are read.

    result_name: the folder that holds the result in outputs/NAME. noun: what the module is called. predictors: their
    names; predictor i predicts the token `offsets[i]` after the one that follows a context, and its loss has the
    weight `weights[i]`. contexts_per_answer: how many are learned from in each epoch; None takes all. skipped, ahead:
    as in `ContextChooser`. metric: the name of the mean of `context_score`, which chooses the best weights.
    """

    result_name: str
    noun: str
    metric: str
    skipped: int
    ahead: int

    @property
    def predictors(self) -> tuple[str, ...]: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def weights(self) -> tuple[float, ...]: ...

    @property
    def contexts_per_answer(self) -> int | None: ...

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the module, under the user's own dotted keys."""

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for a model that the module cannot be trained for."""

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> SmallModule:
        """A fresh module for this frozen model. origin: the path of its weights and their fingerprint."""

    def context_score(self, hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
        """The metric of every context. hits: which predictors' first choices are right."""

    def words(self, folder: Path) -> list[str]:
        """The words after `python run.py` that choose the policy with the module."""


@dataclass(frozen=True, kw_only=True)
class FrozenJob:
    """One training of a small module for `base`, whose weights stay frozen (a `run.Job`).

    calibration: the answers to learn, cut to the recipe's `max_target_tokens`. held_out: answers that are not learned
    but choose the best weights. Raises UserError for the answers of another model.
    """

    base: Checkpoint
    spec: ModuleSpec
    calibration: Calibration
    held_out: int
    recipe: Recipe
    folder: Path
    progress: bool = True
    logger: TrainingLogger | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("held_out", self.held_out, 1)
        if self.recipe.soft_targets:
            raise UserError(f"a {self.spec.noun} does not learn train.soft_targets; only scripts/align.py does")
        if self.recipe.residual_dropout:
            raise UserError(f"train.residual_dropout is for models that are trained; a {self.spec.noun}'s is frozen")
        self.spec.check(self.base.config)
        answered = self.calibration.manifest["model"]
        if answered["fingerprint"] != self.base.fingerprint:
            raise UserError(
                f"the answers in {self.calibration.folder} are those of {answered['path']} with other weights than "
                f"{self.base.path}, but a {self.spec.noun} learns the answers of its own model; "
                "set calibration=null to generate them"
            )

    @property
    def metric(self) -> str:
        return self.spec.metric

    @property
    def title(self) -> str:
        return f"{self.spec.noun} for {self.base.path}"

    @cached_property
    def chooser(self) -> ContextChooser:
        spec = self.spec
        contexts = (spec.contexts_per_answer, self.recipe.seed, spec.skipped, spec.ahead)
        return ContextChooser(spec.offsets, *contexts)

    @cached_property
    def rows(self) -> tuple[AnsweredPrompt, ...]:
        """Prompts whose answers have enough tokens. Raises UserError if there are too few."""
        limit, longest = self.calibration.dataset.max_source_tokens, self.recipe.max_target_tokens
        every = []
        for answer in self.calibration.answers:
            prompt = self.base.source(answer.prompt, limit).prompt
            tokens = np.array([*prompt, *answer.answer_token_ids[:longest]], np.int32)
            every.append(AnsweredPrompt(tokens, len(prompt)))
        shortest = self.chooser.shortest_answer
        kept = tuple(row for row in every if row.answer_length >= shortest)
        if len(kept) <= self.held_out:
            raise UserError(
                f"of the {len(every)} answers in {self.calibration.folder}, {len(every) - len(kept)} are dropped: they "
                f"have fewer than the {shortest} tokens that {len(self.spec.predictors)} predictions need; "
                f"held_out={self.held_out} leaves none of the other {len(kept)} to train on: lower it, predict "
                "less far ahead, or make answers to more questions (dataset.limit)"
            )
        require_room([row.length for row in kept], self.base.config)
        return kept

    @cached_property
    def parts(self) -> tuple[list[AnsweredPrompt], list[AnsweredPrompt]]:
        """Rows to train on, and held-out rows, which are spread evenly over the data."""
        chosen = spread_evenly(self.held_out, len(self.rows))
        train = [row for index, row in enumerate(self.rows) if index not in set(chosen)]
        return train, [self.rows[index] for index in chosen]

    def command(self, place: Path) -> str:
        """A command that decodes with the module at this place, on the dataset that it was trained on."""
        revision = [] if self.base.revision is None else [f"pair.target_revision={self.base.revision}"]
        pair = [f"pair.target={self.base.path}", *revision, "pair.draft=null"]
        words = [*self.spec.words(place), *pair, *dataset_words(self.calibration.dataset)]
        return f"python run.py {shlex.join(words)}"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the training's result."""
        answers = {"answers": self.calibration.manifest["hash"], "held_out": self.held_out}
        return {**self.recipe.identity, "model.weights": self.base.fingerprint, **self.spec.identity, **answers}
