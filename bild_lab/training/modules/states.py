"""A small module beside a frozen model, and the states of the model's decoder on rows of a prompt and an answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.request import Source


class SmallModule(nn.Module):
    """Weights of its own and the frozen model that it calls.

    The model is not its submodule, so the Trainer moves, trains and saves the small weights alone. `forward` takes
    input_ids [batch n] and contexts [batch contexts], how many tokens each context holds; padding is on the right,
    where no context sees it. It returns the logits of every predictor after each context, or an `OwnLoss`. A module
    that reads_labels gets the labels too, as `wanted` [batch contexts predictors].
    """

    reads_labels: ClassVar[bool] = False

    def __init__(self, base: PreTrainedModel, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self._base = (base,)  # a module in a tuple is no submodule

    @property
    def base(self) -> PreTrainedModel:
        return self._base[0]

    def save(self, folder: Path) -> None:
        """Write the weights as decoding reads them."""
        self.weights.save(folder)


@dataclass(frozen=True)
class OneRowCheckpoint(Checkpoint):
    """A checkpoint whose prompts are one row of tokens: an encoder–decoder's source, then the decoder's start token.

    This way encoder–decoders and decoders train on rows of the same form.
    """

    def source(self, prompt: str, max_tokens: int | None = None) -> Source:
        source = super().source(prompt, max_tokens)
        if source.encoder_ids is None:
            return source
        return Source((*source.encoder_ids[0].tolist(), *source.prompt))


@dataclass(frozen=True)
class DecoderStates:
    """What a decoder made of a batch of rows.

    tokens: the decoder's. hidden: every layer's output, number 0 is the embedding. final: the last layer's output after
    the final norm. places: where each context's last token is among the decoder's tokens.
    """

    tokens: Int[Tensor, "batch m"]
    hidden: tuple[Float[Tensor, "batch m dim"], ...]
    final: Float[Tensor, "batch m dim"]
    places: Int[Tensor, "batch contexts"]


def decoder_states(
    base: PreTrainedModel, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"], skipped: int = 0
) -> DecoderStates:
    """Run the model once. contexts: how many tokens each one holds; the first is the prompt and `skipped` tokens.

    An encoder–decoder's prompt is a row of `OneRowCheckpoint`.
    """
    options = {"use_cache": False, "output_hidden_states": True}
    if not base.config.is_encoder_decoder:
        ran = base.get_decoder()(input_ids=input_ids, **options)
        return DecoderStates(input_ids, ran.hidden_states, ran.last_hidden_state, contexts - 1)
    count, device = input_ids.shape[1], input_ids.device
    source = contexts[:, :1] - 1 - skipped  # [batch, 1]; the prompt's last token is the decoder's start
    mask = torch.arange(int(source.max()), device=device) < source
    memory = base.get_encoder()(input_ids=input_ids[:, : mask.shape[1]], attention_mask=mask.long())
    after = source + torch.arange(count - int(source.min()), device=device)  # [batch, m]
    rows = input_ids.gather(1, after.clamp(max=count - 1))
    encoded = {"encoder_hidden_states": memory.last_hidden_state, "encoder_attention_mask": mask.long()}
    ran = base.get_decoder()(input_ids=rows, **encoded, **options)
    places = (contexts - source - 1).clamp(min=0)  # contexts that fill up have one token
    return DecoderStates(rows, ran.hidden_states, ran.last_hidden_state, places)


def head_scale(config: PreTrainedConfig) -> float:
    """The factor on the head's input, which T5 v1.0 has."""
    return config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0
