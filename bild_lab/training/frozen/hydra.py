"""Hydra: heads of which each also reads the tokens before its own, beside a frozen model (Ankner et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.adapters.hydra import HydraConfig, HydraHeads
from bild_lab.errors import UserError
from bild_lab.training.frozen.medusa import DECAY
from bild_lab.training.frozen.predictions import leading_hits
from bild_lab.training.frozen.states import decoder_states


@dataclass(frozen=True, kw_only=True)
class HydraSpec:
    """Heads to train: the fields of `medusa` in `conf/train_medusa.yaml`, with `variant=hydra` (a `ModuleSpec`).

    layers: residual blocks of each head, at least 1. shared: Medusa's alone.
    """

    heads: int
    layers: int
    shared: bool = False

    result_name: ClassVar[str] = "heads"
    noun: ClassVar[str] = "set of Hydra heads"
    metric: ClassVar[str] = "accepted"  # tokens of a chain of first choices
    contexts_per_answer: ClassVar[None] = None  # all of them: contexts cost no rows of the model
    skipped: ClassVar[int] = 1  # the first round of a text drafts nothing

    def __post_init__(self) -> None:
        HydraConfig(self.heads, self.layers, 1, 1)  # checks both
        if self.shared:
            raise UserError("medusa.shared=true is for variant=medusa; each Hydra head has its own matrix")

    @property
    def ahead(self) -> int:
        """Each head reads the label of the head before."""
        return self.heads - 1

    @property
    def predictors(self) -> tuple[str, ...]:
        return tuple(f"head_{number + 1}" for number in range(self.heads))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Head i (from 0) predicts the token i places behind a context, whose last token the target chose by itself."""
        return tuple(range(self.heads))

    @property
    def weights(self) -> tuple[float, ...]:
        """As Medusa's."""
        return tuple(DECAY**head for head in range(self.heads))

    @property
    def identity(self) -> dict[str, Any]:
        return {"variant": "hydra", "medusa.heads": self.heads, "medusa.layers": self.layers}

    def check(self, config: PreTrainedConfig) -> None:
        """Nothing to check: any decoder has states."""

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> HydraModule:
        """Heads start as copies of the model's own head, so the seed is not used."""
        own = base.get_output_embeddings().weight
        heads = HydraHeads.fresh(base.config, own, origin, self.heads, self.layers)
        return HydraModule(base, heads.to(base.device))

    def context_score(self, hits: Bool[Tensor, "n predictors"]) -> Float[Tensor, " n"]:
        return leading_hits(hits)

    def words(self, folder: Path) -> list[str]:
        return ["policy=hydra", f"policy.heads={folder}"]


class HydraModule(nn.Module):
    """Runs the heads on the state before each context's last token, and on the answer's own tokens."""

    def __init__(self, base: PreTrainedModel, heads: HydraHeads) -> None:
        super().__init__()
        self.heads = heads.attach(base.get_input_embeddings().weight)
        self._base = (base,)  # a module in a tuple is no submodule
        self._scale = base.config.d_model**-0.5 if getattr(base.config, "scale_decoder_outputs", False) else 1.0

    def forward(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]
    ) -> Float[Tensor, "batch contexts heads vocab"]:
        """Logits of every head behind each context. contexts: how many tokens each one holds."""
        with torch.no_grad():  # padding is on the right, where no context sees it
            found = decoder_states(self._base[0], input_ids, contexts, HydraSpec.skipped)
        every = torch.arange(contexts.shape[0], device=contexts.device)[:, None]
        states = (found.final * self._scale)[every, (found.places - 1).clamp(min=0)].to(self.heads.outputs.dtype)
        ahead = torch.arange(self.heads.config.heads, device=contexts.device)
        path = (found.places[..., None] + ahead).clamp(max=found.tokens.shape[1] - 1)  # [batch, contexts, heads]
        tokens = found.tokens[every[..., None], path]
        return torch.stack([self.heads(int(head), states, tokens[..., : head + 1]) for head in ahead], 2)

    def save(self, folder: Path) -> None:
        """Write the heads' two files."""
        self.heads.save(folder)
