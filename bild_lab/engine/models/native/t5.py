"""T5 v1.0, v1.1 and mT5: an encoder that runs once, and a decoder with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.checkpoint.weights import Weights, module_weights
from bild_lab.engine.models.native.attention import attend, normalize
from bild_lab.engine.models.native.stack import (
    GROWING,
    AttentionView,
    Layer,
    Stack,
    Weight,
    layers_of,
    product,
    reader,
)
from bild_lab.engine.models.placed_rows import PlacedRows

MODEL_TYPES = ("t5", "mt5")
# the relative position bias, which all layers share
BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
# the configurations' activations as `stack.py` names them
ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


@dataclass(frozen=True)
class Memory:
    """Cross-attention keys and values of every layer, computed from the encoder's output.

    visible: which of the s positions are used; None for all.
    """

    keys: Float[Tensor, "layers heads s dim"]
    values: Float[Tensor, "layers heads s dim"]
    visible: Bool[Tensor, "1 1 s"] | None = None

    def attend(
        self, layer: int, queries: Float[Tensor, "m heads dim"]
    ) -> Float[Tensor, "m features"]:
        """Attention of decoder rows over the source."""
        return attend(queries, self.keys[layer], self.values[layer], self.visible, scale=1.0)


class T5Decoder(Stack):
    """The decoder, and the encoder, whose head gives the cross-attention keys and values of all
    layers.
    """

    def __init__(
        self, module: PreTrainedModel, weights: Weights | None = None, preload: bool = True
    ) -> None:
        """weights: of the module, which is then only asked for its configuration. preload: as in
        `layers_of`.
        """
        self.config = config = module.config
        weights = (
            module_weights(module, module.dtype, module.device) if weights is None else weights
        )
        embedding = weights["decoder.embed_tokens.weight"]
        # the bias is constant from there on
        self._farthest = config.relative_attention_max_distance
        back = -torch.arange(self._farthest + 1, device=embedding.device)
        gated = config.is_gated_act
        super().__init__(
            **shared_sizes(config),
            embedding=embedding,
            layers=layers_of(
                config.num_decoder_layers,
                lambda i: t5_layer(weights, f"decoder.block.{i}.", gated),
                preload,
            ),
            read_head=reader(lambda: weights["lm_head.weight"], preload),
            final_norm=weights["decoder.final_layer_norm.weight"],
            final_scale=head_scale(config),
            distance_bias=relative_bias(module.decoder, weights[f"decoder.{BIAS}"], back),
        )
        around = torch.arange(-self._farthest, self._farthest + 1, device=embedding.device)
        self._bias_around = relative_bias(module.encoder, weights[f"encoder.{BIAS}"], around)
        self.encoder = self._encoder(weights, preload)
        # bias of one row over all keys before it, for any position
        self._backward = self.distance_bias[:, :0]

    def _encoder(self, weights: Weights, preload: bool) -> Stack:
        """The encoder, whose head is the cross-attention's keys and values of all decoder layers."""
        config = self.config
        gated = config.is_gated_act
        # both embeddings are `shared` in most checkpoints; those that train them apart store each
        embedding = weights["encoder.embed_tokens.weight"]
        if torch.equal(self.embedding, embedding):  # stored twice
            embedding = self.embedding
        head_parts = []
        for i in range(config.num_decoder_layers):
            attention = f"decoder.block.{i}.layer.1.EncDecAttention"
            head_parts += [f"{attention}.k.weight", f"{attention}.v.weight"]
        return Stack(
            **shared_sizes(config),
            embedding=embedding,
            layers=layers_of(
                config.num_layers,
                lambda i: t5_layer(weights, f"encoder.block.{i}.", gated),
                preload,
            ),
            read_head=reader(lambda: weights.joined(*head_parts), preload),
            final_norm=weights["encoder.final_layer_norm.weight"],
            distance_bias=self._bias_around.flip(1),
            bidirectional=True,
        )

    def encode(self, tokens: Int[Tensor, " s"]) -> Memory:
        """Run the encoder, and compute every decoder layer's cross-attention keys and values from
        its output.
        """
        encoder, x = self.encoder, self.encoder.embed(tokens)
        place = torch.arange(x.shape[0], device=x.device)
        # key minus query
        relative = (place - place[:, None]).clamp(-self._farthest, self._farthest)
        bias = self._bias_around[:, relative + self._farthest]  # [heads, s, s]
        for layer in encoder.layers:
            queries, keys, values = encoder.project(x, layer, AttentionView())
            mixed = attend(queries, keys.transpose(0, 1), values.transpose(0, 1), bias, scale=1.0)
            x = encoder.feed_forward(x + layer.out(mixed), layer)
        return self.memory(product(normalize(x, encoder.final_norm, self.epsilon), encoder.head))

    def memory(self, keys_values: Float[Tensor, "s features"]) -> Memory:
        """The cross-attention keys and values of all layers, in order, as a memory."""
        by_row = keys_values.view(-1, len(self.layers), 2, self.heads, self.head_dim)
        by_kind = by_row.permute(2, 1, 3, 0, 4)  # [2, layers, heads, s, head_dim]
        keys, values = by_kind.to(self.embedding.dtype).contiguous()
        return Memory(keys, values)

    def empty_memory(self, source: int) -> Memory:
        """An unused memory for at most `source` encoder tokens."""
        layers, heads, dim = self.cache_shape
        keys = self.embedding.new_zeros(layers, heads, source, dim)
        visible = torch.zeros(1, 1, source, dtype=torch.bool, device=keys.device)
        return Memory(keys, keys.clone(), visible)

    def reach(self, positions: int) -> None:
        """Compute the bias of one row over at least this many keys, unless it exists.

        Compiled steps do not read it.
        """
        if positions <= self._backward.shape[1]:
            return
        with GROWING:
            if positions > self._backward.shape[1]:  # no other thread has computed it meanwhile
                places = torch.arange(max(256, 2 * positions), device=self.embedding.device)
                self._backward = self.distance_bias[:, places.flip(0).clamp(max=self._farthest)]

    def views(
        self, rows: PlacedRows, layers: Sequence[int], masked: bool = True
    ) -> dict[int, AttentionView]:
        return {0: AttentionView(mask=self._bias(rows) if masked else None)}

    def _bias(self, rows: PlacedRows) -> Float[Tensor, "heads m keys"]:
        """Relative position bias of the rows, −inf where a row must not attend."""
        if rows.visible is None:
            self.reach(rows.stop)
            bias = self._backward[:, None, -rows.stop :]
            # CUDA's attention kernels need the mask's first element aligned, and a slice's is not
            return bias.contiguous() if bias.is_cuda else bias
        keys = rows.key_positions
        if keys is None:
            keys = torch.arange(rows.stop, device=rows.positions.device)
        distance = (rows.positions[..., None] - keys[..., None, :]).clamp(0, self._farthest)
        return self.distance_bias[:, distance].masked_fill(~rows.visible, float("-inf"))


def shared_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """What encoder and decoder have in common, as `Stack` takes it."""
    return {
        "heads": config.num_heads,
        "kv_heads": config.num_heads,
        "head_dim": config.d_kv,
        "hidden": config.d_ff,
        "activation": ACTIVATIONS[config.dense_act_fn],
        "epsilon": config.layer_norm_epsilon,
    }


def relative_bias(
    stack: torch.nn.Module, weight: Float[Tensor, "buckets heads"], relative: Int[Tensor, " n"]
) -> Float[Tensor, "heads n"]:
    """The learned bias of an encoder or decoder stack. relative: [n], the key's position minus the
    query's.
    """
    attention = stack.block[0].layer[0].SelfAttention
    buckets = attention._relative_position_bucket(
        relative,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return weight[buckets].T.contiguous()


def t5_layer(weights: Weights, prefix: str, gated: bool) -> Layer:
    """The weights under this prefix: of a decoder's layer, or of an encoder's, which attends to no
    source.
    """

    def matrix(block: str, *names: str) -> Tensor:
        return weights.joined(*(f"{prefix}{block}.{name}.weight" for name in names))

    self_attention, cross_attention = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    crosses = f"{prefix}{cross_attention}.q.weight" in weights
    feed_forward = "layer.2" if crosses else "layer.1"
    inner = matrix(f"{feed_forward}.DenseReluDense", *(("wi_0", "wi_1") if gated else ("wi",)))
    return Layer(
        norm=weights[f"{prefix}layer.0.layer_norm.weight"],
        qkv=Weight(matrix(self_attention, "q", "k", "v")),
        out=Weight(matrix(self_attention, "o")),
        cross_norm=weights[f"{prefix}layer.1.layer_norm.weight"] if crosses else None,
        cross_query=Weight(matrix(cross_attention, "q")) if crosses else None,
        cross_out=Weight(matrix(cross_attention, "o")) if crosses else None,
        feed_norm=weights[f"{prefix}{feed_forward}.layer_norm.weight"],
        inner=Weight(inner, gated=gated),
        outer=Weight(matrix(f"{feed_forward}.DenseReluDense", "wo")),
    )


def head_scale(config: PreTrainedConfig) -> float:
    """The factor on the head's input, which T5 v1.0 has; v1.1 and mT5 have none."""
    return config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0


def why_not(config: PreTrainedConfig) -> str | None:
    """Why this configuration cannot run here, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    if config.dense_act_fn not in ACTIVATIONS:
        return f"its activation is {config.dense_act_fn}"
    return None
