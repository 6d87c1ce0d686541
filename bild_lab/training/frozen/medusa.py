"""Medusa-1: heads on a frozen model's last hidden state predict the tokens after the next (Cai et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.adapters import MedusaConfig, MedusaHeads
from bild_lab.engine.adapters.folder import base_of
from bild_lab.training.frozen.predictions import leading_hits

DECAY = 0.8  # λ: each head's weight relative to the head before it


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """Heads to train: the fields of `medusa` in `conf/train_medusa.yaml` (a `ModuleSpec`).

    layers: residual blocks of each head. shared: they end in the model's own matrix to the vocabulary.
    """

    heads: int
    layers: int
    shared: bool = False

    result_name: ClassVar[str] = "heads"
    noun: ClassVar[str] = "set of Medusa heads"
    metric: ClassVar[str] = "accepted"  # tokens of a chain of first choices
    skipped: ClassVar[int] = 0
    ahead: ClassVar[int] = 0
    contexts_per_answer: ClassVar[None] = None  # all of them: contexts cost no rows of the model

    def __post_init__(self) -> None:
        MedusaConfig(self.heads, self.layers, 1, 1, shared=self.shared)  # checks all three

    @property
    def predictors(self) -> tuple[str, ...]:
        return tuple(f"head_{number + 1}" for number in range(self.heads))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Head i (from 0) after n tokens predicts token n + i + 1, as the model's own head predicts token n."""
        return tuple(range(1, self.heads + 1))

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(DECAY**head for head in range(self.heads))

    @property
    def identity(self) -> dict[str, Any]:
        later = set() if self.shared else {"shared"}  # trainings from before it are the same
        return {f"medusa.{key}": value for key, value in asdict(self).items() if key not in later}

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for an encoder–decoder."""
        base_of(config, "Medusa")

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> MedusaModule:
        """Heads start as copies of the model's own head, so the seed is not used."""
        own = base.get_output_embeddings().weight
        heads = MedusaHeads.fresh(base.config, own, origin, self.heads, self.layers, self.shared)
        return MedusaModule(base, heads.to(base.device))

    def context_score(self, hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
        return leading_hits(hits)

    def words(self, folder: Path) -> list[str]:
        return ["policy=medusa", f"policy.heads={folder}"]


class MedusaModule(nn.Module):
    """Runs the heads on the hidden state that the frozen model's own head reads at each context's last token."""

    def __init__(self, base: PreTrainedModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads
        self._base = (base,)  # a module in a tuple is no submodule

    def forward(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> Float[Tensor, "batch contexts heads vocab"]:
        """Logits of every head after each context. contexts: how many tokens each one holds."""
        with torch.no_grad():  # padding is on the right, where no context sees it
            hidden = self._base[0].base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        every = torch.arange(contexts.shape[0], device=contexts.device)
        return self.heads(hidden[every[:, None], contexts - 1].to(self.heads.blocks.dtype)).movedim(0, 2)

    def save(self, folder: Path) -> None:
        """Write the heads' two files."""
        self.heads.save(folder)
