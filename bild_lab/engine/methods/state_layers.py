"""What drafters over the target's states have in common: the rows of the text among those of a
forward, the parts of a Llama's layer, and the target's embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import LlamaConfig

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.models.checkpoint.vocabulary import head_bias
from bild_lab.engine.models.native.stack import signed_sines
from bild_lab.engine.session import LoadedModel, on_device


def states_of_text(
    states: Float[Tensor, "n states"], draft: Draft, verdict: Verdict
) -> Float[Tensor, "m states"]:
    """The states of the text among those of all rows of a target's forward: of the prompt, if it ran
    in this forward, of the last committed token and of the accepted ones.
    """
    # another drafter's probes come after its draft
    probe_count = 0 if draft.probes is None else len(draft.probes)
    prompt_rows = states.shape[0] - probe_count - len(draft) - 1
    rows = [*range(prompt_rows), *(prompt_rows + row for row in verdict.rows)]
    return states if len(rows) == states.shape[0] else states[on_device(rows, states.device)]


def as_they_are(products: Tensor) -> Tensor:
    """The scores of most models: their head's products."""
    return products


class StateLayer(nn.Module):
    """The parts of a Llama's layer for a module over the states of a target. sizes: of the layer."""

    def __init__(self, sizes: LlamaConfig) -> None:
        super().__init__()
        self._sizes = sizes

    def add_matrices(self, read: int, bias: bool, out_bias: bool) -> None:
        """Add the matrices of attention and feed-forward, and the norm between them.

        read: how wide what the attention reads is.
        bias: of queries, keys and values.
        out_bias: of the attention's output.
        """
        sizes = self._sizes
        dim, inner = sizes.hidden_size, sizes.intermediate_size
        width = sizes.num_attention_heads * sizes.head_dim
        kv_width = sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = nn.Linear(read, width, bias=bias)
        self.k_proj = nn.Linear(read, kv_width, bias=bias)
        self.v_proj = nn.Linear(read, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, dim, bias=out_bias)
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(dim))

    def feed_forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """The residual sum after the feed-forward."""
        normed = self.normed(x, self.post_attention_layernorm)
        return x + self.down_proj(silu(self.gate_proj(normed)) * self.up_proj(normed))

    def heads(self, x: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows heads dim"]:
        return x.unflatten(-1, (-1, self._sizes.head_dim))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self._sizes.rms_norm_eps)


class BesideTarget(StateLayer):
    """A module that drafts with the target's embedding and head. `attach` gives it both; they stay the
    target's, and are neither trained nor saved.
    """

    def __init__(self, sizes: LlamaConfig) -> None:
        super().__init__(sizes)
        self._target: tuple[Tensor, Tensor] | None = None
        self._bias: Tensor | None = None
        self._scores_of_products: Callable[[Tensor], Tensor] = as_they_are

    def attach(
        self,
        embedding: Float[Tensor, "vocab dim"],
        head: Float[Tensor, "vocab dim"],
        bias: Float[Tensor, " vocab"] | None = None,
        scores_of_products: Callable[[Tensor], Tensor] = as_they_are,
    ) -> Self:
        """Use the target's embedding and head. bias: −inf for ids without a token (`head_bias`).
        scores_of_products: what the target makes of its head's products.

        They may have rows for padding after the vocabulary.
        """
        self._target, self._bias = (embedding, head), bias
        self._scores_of_products = scores_of_products
        return self

    def attach_to(self, target: LoadedModel) -> Self:
        """Use those of this target, whose weights are loaded."""
        bias = head_bias(target.checkpoint, target.dtype, target.device)
        return self.attach(*target.vocabulary_weights(), bias, target.scores_of_products)

    def rotation(
        self, x: Float[Tensor, "batch m dim"], positions: Int[Tensor, "*batch m"]
    ) -> tuple[Float[Tensor, "#batch m 1 dim"], Float[Tensor, "#batch m 1 dim"]]:
        """Cosines and signed sines of these positions, in the precision of x."""
        cos, sin = self._rotary(x, positions.reshape(-1, positions.shape[-1]))
        return cos[:, :, None], signed_sines(sin)[:, :, None]

    @cached_property
    def _rotary(self) -> nn.Module:
        # late: takes a while to load
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding(self._sizes).to(next(self.parameters()).device)
