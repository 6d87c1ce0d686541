"""The training loss: cross-entropy after the last layer, or after several layers with one head
(BiLD §7.2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from bild_lab.engine.models.hf.own_scores import scores_of_states
from bild_lab.engine.models.native.t5 import head_scale
from bild_lab.errors import UserError
from bild_lab.training.batches import IGNORED

Head = Callable[[Float[Tensor, "batch n dim"]], Float[Tensor, "batch n vocab"]]


def layer_weights(loss: str, depth: int) -> dict[int, float]:
    """The weight of each decoder layer's loss; layers count from 1, those of weight 0 are left out.

    last: the last layer alone. early_exit: half the first and half the last (BiLD §7.2.1).
    calm: layer i weighs i / Σj (CALM, as restated in BiLD §7.2.1).
    Raises UserError for a loss over several layers of a model that has only one.
    """
    if loss == "last":
        return {depth: 1.0}
    if depth < 2:
        raise UserError(
            f"train.loss={loss} averages over layers, but the model has one; use train.loss=last"
        )
    if loss == "early_exit":
        return {1: 0.5, depth: 0.5}
    return {layer: layer / (depth * (depth + 1) / 2) for layer in range(1, depth + 1)}


class LayerLoss:
    """The weighted sum of the cross-entropies after some layers, in nats a token.

    Called with a model's output, as the Trainer calls its `compute_loss_func`. With soft targets a
    teacher's distribution takes the label's place (Hinton et al., 2015, §2, at temperature 1; at
    each token as in Kim and Rush, 2016, §3.1). The last layer's final norm and head read the inner
    layers too. bfloat16: whether they do so under autocast, as the model runs. Raises UserError for
    inner layers of an unknown architecture.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Mapping[int, float],
        label_smoothing: float,
        bfloat16: bool,
    ) -> None:
        self._weights, self._smoothing, self._bfloat16 = dict(weights), label_smoothing, bfloat16
        self._encoder_decoder = bool(model.config.is_encoder_decoder)
        self._last = max(weights)
        self._head = shared_head(model) if self.inner else None

    @property
    def inner(self) -> bool:
        """Whether the hidden states of inner layers are needed."""
        return len(self._weights) > 1

    def __call__(
        self,
        outputs: Any,
        labels: Int[Tensor, "batch n"],
        num_items_in_batch: Tensor | int | None = None,
        soft_ids: Int[Tensor, "batch n k"] | None = None,
        soft_probs: Float[Tensor, "batch n k"] | None = None,
    ) -> Float[Tensor, ""]:
        sums = self.sums(outputs, labels, self._smoothing, soft_ids, soft_probs)
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return sum(self._weights[layer] * total for layer, total in sums.items()) / count

    def sums(
        self,
        outputs: Any,
        labels: Int[Tensor, "batch n"],
        label_smoothing: float = 0.0,
        soft_ids: Int[Tensor, "batch n k"] | None = None,
        soft_probs: Float[Tensor, "batch n k"] | None = None,
    ) -> dict[int, Float[Tensor, ""]]:
        """Each layer's cross-entropy, in nats, summed over the labels, or over a teacher's
        distributions there.
        """
        first_row = 0 if self._encoder_decoder else 1  # a decoder's row predicts the next token
        labels, losses = labels[:, first_row:], {}
        for layer in self._weights:
            logits = self._logits(outputs, layer)[:, : labels.shape[1]]
            if soft_ids is None:
                options = {
                    "ignore_index": IGNORED,
                    "label_smoothing": label_smoothing,
                    "reduction": "sum",
                }
                losses[layer] = cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), **options
                )
            else:
                learned = labels != IGNORED
                ids, probs = (soft[:, first_row:][learned] for soft in (soft_ids, soft_probs))
                losses[layer] = -(
                    probs * logits[learned].float().log_softmax(-1).gather(-1, ids)
                ).sum()
        return losses

    def _logits(self, outputs: Any, layer: int) -> Float[Tensor, "batch n vocab"]:
        if layer == self._last:
            return outputs.logits
        states = outputs.decoder_hidden_states if self._encoder_decoder else outputs.hidden_states
        hidden = states[layer]  # number 0 is the embedding
        with (
            torch.autocast(hidden.device.type, torch.bfloat16) if self._bfloat16 else nullcontext()
        ):
            return self._head(hidden)


def shared_head(model: PreTrainedModel) -> Head:
    """The final norm and the head, for hidden states of any decoder layer, and what is behind the
    head.

    Raises UserError for an architecture whose norm and head are not known.
    """
    if model.config.model_type in ("t5", "mt5"):
        decoder, scale = model.decoder, head_scale(model.config)
        return lambda hidden: model.lm_head(
            decoder.dropout(decoder.final_layer_norm(hidden)) * scale
        )
    norm = getattr(model.base_model, "norm", None)
    if model.config.is_encoder_decoder or norm is None or not hasattr(model, "lm_head"):
        raise UserError(
            "a loss over several layers works for T5, mT5 and decoders shaped like Llama's, got "
            f"{model.config.model_type}; use train.loss=last"
        )
    return lambda hidden: scores_of_states(model, norm(hidden))
