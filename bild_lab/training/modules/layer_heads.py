"""Heads of inner layers, trained beside a frozen model to predict its next token early (PPD §3,
Table 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.methods.early_exit.layer_heads import LayerHeads, LayerHeadsConfig
from bild_lab.engine.models.checkpoint.checkpoint import decoder_depth
from bild_lab.engine.models.native import why_not_native
from bild_lab.engine.models.native.llama import norm_factor
from bild_lab.engine.models.native.t5 import head_scale
from bild_lab.errors import UserError, require_choice
from bild_lab.training.batches import IGNORED
from bild_lab.training.modules.predictors import (
    MATCH_RATE,
    OwnLoss,
    Predictors,
    first_choices,
)
from bild_lab.training.modules.states import (
    ModuleSpec,
    SmallModule,
    decoder_states,
    own_matrices,
)

DATA, SELF = "data", "self"
ROWS = 2048  # rows of logits at a time: 0.25 GB in float32 for 32,000 tokens


@dataclass(frozen=True, kw_only=True)
class LayerHeadsSpec(ModuleSpec):
    """Heads to train: `layers` and the fields of `heads` in `conf/train_lm_heads.yaml`.

    layers: after how many layers there is a head. rank: None for whole matrices, or the rank of the
    change to the model's own head. labels: "data", the dataset's references as in the paper, or
    "self", the tokens that the model's last layer chooses, with which match rates compare.
    """

    layers: list[int]
    rank: int | None
    labels: str

    group: ClassVar[str] = "heads"
    noun: ClassVar[str] = "set of per-layer heads"

    def __post_init__(self) -> None:
        known = LayerHeadsConfig(self.layers, 1, 1, 0.0, self.rank)  # checks layers and rank
        object.__setattr__(self, "layers", known.layers)
        require_choice("heads.labels", self.labels, (DATA, SELF))

    @property
    def predictors(self) -> Predictors:
        """Every head predicts the next token.

        As heads share nothing, each learns as it would alone.
        """
        count = len(self.layers)
        names = tuple(f"layer_{layer}" for layer in self.layers)
        return Predictors(names, (0,) * count, (1.0,) * count, metric=MATCH_RATE)

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for a model that `policy=ppd` cannot run, or layers that are not before
        its last.
        """
        reason = why_not_native(config, torch.float32)
        if reason is not None:
            raise UserError(
                "per-layer heads need a T5, mT5, Llama, Mistral, Qwen2, Qwen3 or Gemma 3 text"
                f" model that we can run, but {reason}"
            )
        depth = decoder_depth(config)
        if self.layers[-1] >= depth:
            raise UserError(
                f"layers must lie before the last of the model's {depth}, which has the model's own"
                f" head, got {list(self.layers)}"
            )

    def build(
        self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int
    ) -> LayerHeadsModule:
        """Heads start as the model's own head."""
        return LayerHeadsModule(
            base, LayerHeads.fresh(own_head(base), origin, self.layers, self.rank, seed)
        )

    def words(self, folder: Path) -> list[str]:
        return ["policy=ppd", f"policy.exit_layer={self.layers[-1]}", f"policy.heads={folder}"]


@dataclass(frozen=True)
class OwnHead:
    """The weights that heads start from, under the names of a native decoder, which would copy all
    weights.

    final_scale: the factor on the head's input, which T5 v1.0 has.
    """

    head: Float[Tensor, "vocab dim"]
    final_norm: Float[Tensor, " dim"]
    epsilon: float
    final_scale: float = 1.0


def own_head(base: PreTrainedModel) -> OwnHead:
    """The head and norm of a T5, an mT5, or a decoder shaped like Llama's."""
    config, decoder = base.config, base.get_decoder()
    _, head = own_matrices(base)
    if not config.is_encoder_decoder:
        return OwnHead(head, norm_factor(config, decoder.norm.weight), config.rms_norm_eps)
    return OwnHead(
        head, decoder.final_layer_norm.weight, config.layer_norm_epsilon, head_scale(config)
    )


class LayerHeadsModule(SmallModule):
    """Runs all heads on their layers' states at each context's last token, in one forward of the
    frozen model.

    With labels it computes the loss itself, so many rows at a time, and again in the backward pass
    (Chen et al., 2016, Training Deep Nets with Sublinear Memory Cost): all rows' logits at once
    would be several times the model.
    """

    reads_labels = True

    def forward(
        self,
        input_ids: Int[Tensor, "batch n"],
        contexts: Int[Tensor, "batch contexts"],
        target_tokens: Int[Tensor, "batch contexts layers"] | None = None,
    ) -> Float[Tensor, "batch contexts layers vocab"] | OwnLoss:
        with torch.no_grad():
            run = decoder_states(self.base, input_ids, contexts, self.weights.config.layers)
        batch_rows = torch.arange(contexts.shape[0], device=contexts.device)[:, None]
        heads = self.weights
        states = {layer: run.hidden[layer][batch_rows, run.places] for layer in heads.config.layers}
        if target_tokens is None:
            return torch.stack(
                [
                    heads.logits(layer, hidden.to(heads.norms.dtype))
                    for layer, hidden in states.items()
                ],
                2,
            )
        real = target_tokens[..., 0] != IGNORED  # [batch contexts]; every head has the same labels
        parts = [
            self._part(layer, states[layer][real], target_tokens[..., 0][real])
            for layer in heads.config.layers
        ]
        losses = target_tokens.new_zeros(target_tokens.shape, dtype=torch.float32)
        losses[real] = torch.stack([head_losses for head_losses, _ in parts], -1)
        if torch.is_grad_enabled():  # a training step, of which nobody reads the choices
            return OwnLoss(None, losses)
        first_choices = torch.stack(
            [head_choices for _, head_choices in parts], -2
        )  # [n layers top]
        choices = first_choices.new_zeros((*target_tokens.shape, first_choices.shape[-1]))
        choices[real] = first_choices
        return OwnLoss(None, losses, choices)

    def _part(
        self, layer: int, hidden: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"]]:
        """The losses and first choices of one layer's head."""
        rows = zip(hidden.split(ROWS), labels.split(ROWS), strict=True)
        parts = [checkpoint(self._rows, layer, *chunk, use_reentrant=False) for chunk in rows]
        losses, choices = zip(*parts, strict=True)
        return torch.cat(losses), torch.cat(choices)

    def _rows(
        self, layer: int, hidden: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"]]:
        logits = self.weights.logits(layer, hidden.to(self.weights.norms.dtype))
        return cross_entropy(logits.float(), labels, reduction="none"), first_choices(logits)
