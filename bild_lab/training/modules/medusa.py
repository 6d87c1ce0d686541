"""Heads that predict the tokens after the next beside a frozen model: Medusa's (Cai et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.methods.medusa import MedusaConfig, MedusaHeads
from bild_lab.engine.methods.module_folder import base_sizes
from bild_lab.engine.models.hf.own_scores import scores_of_products
from bild_lab.errors import require_whole
from bild_lab.training.modules.predictors import Predictors
from bild_lab.training.modules.states import ModuleSpec, SmallModule, decoder_states, own_matrices

DECAY = 0.8  # λ: each head's weight relative to the head before it


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(ModuleSpec):
    """Medusa heads to train: the fields of `conf/module/medusa.yaml`.

    layers: residual blocks of each head. shared: they end in the model's own matrix to the
    vocabulary. markov_rank: of a `MarkovHead` beside them; 0: none. contexts: of an answer in each
    epoch, at random; None: all.
    """

    heads: int
    layers: int
    shared: bool = False
    markov_rank: int = 0
    contexts: int | None = None

    noun: ClassVar[str] = "set of Medusa heads"

    def __post_init__(self) -> None:
        # checks these
        MedusaConfig(
            self.heads, self.layers, 1, 1, shared=self.shared, markov_rank=self.markov_rank
        )
        if self.contexts is not None:
            require_whole("module.contexts", self.contexts, 1, None, "null takes all")

    @property
    def predictors(self) -> Predictors:
        """Head i (from 0) after n tokens predicts token n + i + 1, as the model's own head predicts
        token n.
        """
        ahead = self.heads if self.markov_rank else 0
        weights = [DECAY**head for head in range(self.heads)]
        return Predictors.in_turn("head", 1, weights, per_answer=self.contexts, ahead=ahead)

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for an encoder–decoder."""
        base_sizes(config, "Medusa")

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> MedusaModule:
        """Heads start as copies of the model's own head, so the seed is for a Markov head alone."""
        _, head = own_matrices(base)
        sizes = (self.heads, self.layers, self.shared, self.markov_rank)
        heads = MedusaHeads.fresh(base.config, head, origin, *sizes, seed)
        if self.shared:
            heads.attach(head[None], scores_of_products=partial(scores_of_products, base))
        return MedusaModule(base, heads)

    def words(self, folder: Path) -> list[str]:
        return ["policy=medusa", f"policy.heads={folder}"]


class MedusaModule(SmallModule):
    """Runs the heads on the hidden state that the frozen model's own head reads at each context's
    last token.
    """

    def forward(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> Float[Tensor, "batch contexts heads vocab"]:
        with torch.no_grad():
            run = decoder_states(self.base, input_ids, contexts, ())
        batch_rows = torch.arange(contexts.shape[0], device=contexts.device)[:, None]
        heads = self.weights
        logits = heads(run.final[batch_rows, run.places].to(heads.blocks.dtype)).movedim(0, 2)
        return (
            logits
            if heads.markov is None
            else logits + heads.markov.along(input_ids, contexts, logits.shape[2])
        )
