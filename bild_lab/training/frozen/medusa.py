"""Medusa-1: heads that learn what follows the next token from a frozen model's last hidden state (Cai et al., 2023)."""

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
from bild_lab.training.frozen.columns import leading_run

DECAY = 0.8  # λ: how much less each further head weighs


@dataclass(frozen=True, kw_only=True)
class MedusaTraining:
    """Heads to train: the fields of `medusa` in `conf/train_medusa.yaml` (a `frozen.Extension`).

    layers: residual blocks of each head.
    """

    heads: int
    layers: int

    leaves: ClassVar[str] = "heads"
    noun: ClassVar[str] = "set of Medusa heads"
    metric: ClassVar[str] = "accepted"  # drafts of a forward, were they a chain of first choices
    splits: ClassVar[None] = None  # every context of an answer: they cost no rows of the model

    def __post_init__(self) -> None:
        MedusaConfig(self.heads, self.layers, 1, 1)  # which knows what heads there can be

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"head_{number + 1}" for number in range(self.heads))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Head i (from 0) behind n tokens predicts token n + i + 1, as the model's own head predicts token n."""
        return tuple(range(1, self.heads + 1))

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(DECAY**head for head in range(self.heads))

    @property
    def identity(self) -> dict[str, Any]:
        return {f"medusa.{key}": value for key, value in asdict(self).items()}

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for an encoder–decoder."""
        base_of(config, "Medusa")

    def beside(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> HeadRows:
        """Heads that begin as copies of the model's own, so nothing is drawn from the seed."""
        own = base.get_output_embeddings().weight
        heads = MedusaHeads.fresh(base.config, own, origin, self.heads, self.layers)
        return HeadRows(base, heads.to(base.device))

    def per_context(self, hits: Bool[Tensor, "n columns"]) -> Float[Tensor, " n"]:
        return leading_run(hits)

    def usage(self, base: str, folder: Path) -> str:
        return f"python run.py pair.target={base} policy=medusa policy.heads={folder}"


class HeadRows(nn.Module):
    """Runs the heads on what the frozen model's own head reads at the last token of each context."""

    def __init__(self, base: PreTrainedModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads
        self._base = (base,)  # a module in a tuple is no submodule

    def forward(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch groups"]
    ) -> Float[Tensor, "batch groups heads vocab"]:
        """Logits of every head. contexts: how many tokens each holds."""
        with torch.no_grad():  # what pads on the right is seen by no row that counts
            hidden = self._base[0].base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        every = torch.arange(contexts.shape[0], device=contexts.device)
        return self.heads(hidden[every[:, None], contexts - 1].to(self.heads.outputs.dtype)).movedim(0, 2)

    def save(self, folder: Path) -> None:
        """Write the heads' two files."""
        self.heads.save(folder)
