"""T5 v1.0, v1.1 and mT5: an encoder that runs once, and a decoder with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.native.attention import KeyValueCache, PlacedRows, attend, normalize
from bild_lab.engine.models.native.cpu.weights import DecoderOutline, LayerOutline, Weight
from bild_lab.engine.session import NOTHING, Skipped

MODEL_TYPES = ("t5", "mt5")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "silu": silu,
}

KERNEL_NAMES = {"relu": "relu", "gelu_new": "gelu_tanh", "gelu": "gelu", "silu": "silu"}  # of activations


@dataclass(frozen=True)
class SelfAttention:
    """Weights of attention within a sequence; query, key and value are one matrix."""

    norm: Float[Tensor, " dim"]
    qkv: Float[Tensor, "features dim"]
    out: Float[Tensor, "dim features"]


@dataclass(frozen=True)
class CrossAttention:
    """Weights of attention to the encoder's output."""

    norm: Float[Tensor, " dim"]
    query: Float[Tensor, "features dim"]
    key_value: Float[Tensor, "twice_features dim"]
    out: Float[Tensor, "dim features"]


@dataclass(frozen=True)
class FeedForward:
    """Weights of a feed-forward block; a gated one has gate and up in one matrix."""

    norm: Float[Tensor, " dim"]
    inner: Float[Tensor, "hidden dim"]
    outer: Float[Tensor, "dim hidden"]
    gated: bool


@dataclass(frozen=True)
class T5Layer:
    """One decoder layer, or, without `cross`, one encoder layer."""

    own: SelfAttention
    cross: CrossAttention | None
    feed_forward: FeedForward


@dataclass(frozen=True)
class Memory:
    """Cross-attention keys and values of every layer, computed from the encoder's output.

    visible: which of the s positions are used; None for all.
    """

    keys: Float[Tensor, "layers heads s dim"]
    values: Float[Tensor, "layers heads s dim"]
    visible: Bool[Tensor, "1 1 s"] | None = None

    def attend(self, layer: int, queries: Float[Tensor, "m heads dim"]) -> Float[Tensor, "m features"]:
        """Attention of decoder rows over the source."""
        return attend(queries, self.keys[layer], self.values[layer], self.visible, scale=1.0)


class T5Decoder:
    """Runs rows through any range of decoder layers. There is no batch axis: one sequence, [m, dim]."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.config = config = module.config
        self.heads, self.head_dim = config.num_heads, config.d_kv
        self.epsilon = config.layer_norm_epsilon
        self.activation = ACTIVATIONS[config.dense_act_fn]
        # T5 v1.0 scales the decoder's output before its head; v1.1 and mT5 do not
        self.scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else None
        weights = {name: weight.to(module.dtype) for name, weight in module.state_dict().items()}
        self.embedding = weights["shared.weight"]
        self.head = weights["lm_head.weight"]
        self.final_norm = weights["decoder.final_layer_norm.weight"]
        self.encoder_norm = weights["encoder.final_layer_norm.weight"]
        gated = config.is_gated_act
        self.layers = [t5_layer(weights, f"decoder.block.{i}.", gated) for i in range(config.num_decoder_layers)]
        self.encoder_layers = [t5_layer(weights, f"encoder.block.{i}.", gated) for i in range(config.num_layers)]
        self._farthest = config.relative_attention_max_distance  # the bias is constant from there on
        back = -torch.arange(self._farthest + 1, device=self.embedding.device)
        around = torch.arange(-self._farthest, self._farthest + 1, device=self.embedding.device)
        self._bias_by_distance = relative_bias(module.decoder, back, self.embedding.dtype)
        self._bias_around = relative_bias(module.encoder, around, self.embedding.dtype)
        self._backward = self._bias_by_distance[:, :0]  # bias of one row over all keys before it, for any position
        self._cross_key_value = torch.cat([layer.cross.key_value for layer in self.layers])

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and width of the cache."""
        return len(self.layers), self.heads, self.head_dim

    def encode(self, tokens: Int[Tensor, " s"]) -> Memory:
        """Run the encoder, and compute every decoder layer's cross-attention keys and values from its output."""
        x = self.embedding[tokens]
        count = x.shape[0]
        place = torch.arange(count, device=x.device)
        relative = (place - place[:, None]).clamp(-self._farthest, self._farthest)  # key minus query
        bias = self._bias_around[:, relative + self._farthest]  # [heads, s, s]
        for layer in self.encoder_layers:
            queries, keys, values = self._project(x, layer.own)
            mixed = attend(queries, keys.transpose(0, 1), values.transpose(0, 1), bias, scale=1.0)
            x = x + linear(mixed, layer.own.out)
            x = x + self._feed_forward(x, layer.feed_forward)
        out = normalize(x, self.encoder_norm, self.epsilon)
        return self.memory(linear(out, self._cross_key_value))

    def memory(self, keys_values: Float[Tensor, "s features"]) -> Memory:
        """The cross-attention keys and values of all layers, in order, as a memory."""
        both = keys_values.view(-1, len(self.layers), 2, self.heads, self.head_dim).permute(2, 1, 3, 0, 4)
        both = both.to(self.embedding.dtype).contiguous()  # [2, layers, heads, s, head_dim]
        return Memory(both[0], both[1])

    def empty_memory(self, source: int) -> Memory:
        """An unused memory for at most `source` encoder tokens."""
        layers, heads, dim = self.cache_shape
        keys = self.embedding.new_zeros(layers, heads, source, dim)
        return Memory(keys, keys.clone(), torch.zeros(1, 1, source, dtype=torch.bool, device=keys.device))

    def embed(self, tokens: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        return self.embedding[tokens]

    def run(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        memory: Memory,
        layers: Sequence[int],
        hidden: list[Tensor] | None = None,
        skipped: Skipped = NOTHING,
    ) -> Float[Tensor, "m dim"]:
        """Run rows through these layers, storing their keys and values. `hidden` collects each layer's output."""
        bias = self._bias(rows)
        for index in layers:
            layer = self.layers[index]
            if index not in skipped.attention:
                queries, keys, values = self._project(x, layer.own)
                cache.write(index, rows, keys, values)
                mixed = cache.attend(index, rows, queries, bias, scale=1.0)
                x = x + linear(mixed, layer.own.out)
                normed = normalize(x, layer.cross.norm, self.epsilon)
                queries = linear(normed, layer.cross.query).view(rows.count, self.heads, self.head_dim)
                mixed = memory.attend(index, queries)
                x = x + linear(mixed, layer.cross.out)
            if index not in skipped.feed_forward:
                x = x + self._feed_forward(x, layer.feed_forward)
            if hidden is not None:
                hidden.append(x)
        return x

    def fill(self, x: Float[Tensor, "m dim"], rows: PlacedRows, cache: KeyValueCache, layers: Sequence[int]) -> None:
        """Store only the keys and values of these layers, with x, [m, dim], as the input of each layer."""
        width = self.heads * self.head_dim
        for index in layers:
            own = self.layers[index].own
            both = linear(normalize(x, own.norm, self.epsilon), own.qkv[width:])
            keys, values = both.view(rows.count, 2, self.heads, self.head_dim).unbind(1)
            cache.write(index, rows, keys, values)

    def final(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m dim"]:
        """The head's input: the last layer's output after the final norm, scaled in T5 v1.0."""
        x = normalize(x, self.final_norm, self.epsilon)
        return x if self.scale is None else x * self.scale

    def logits(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m vocab"]:
        return linear(self.final(x), self.head)

    def outline(self) -> DecoderOutline:
        """This decoder as the CPU kernels know it."""
        return DecoderOutline(
            layers=list(map(_outline, self.layers)),
            head=self.head,
            final_norm=self.final_norm,
            final_scale=1.0 if self.scale is None else self.scale,
            distance_bias=self._bias_by_distance,
            **self._dimensions,
        )

    def encoder_outline(self) -> DecoderOutline:
        """The encoder as the CPU kernels know it. Its head gives the cross-attention keys and values of all layers."""
        return DecoderOutline(
            layers=list(map(_outline, self.encoder_layers)),
            head=self._cross_key_value,
            final_norm=self.encoder_norm,
            distance_bias=self._bias_around.flip(1),
            bidirectional=True,
            **self._dimensions,
        )

    @property
    def _dimensions(self) -> dict[str, Any]:
        return {
            "embedding": self.embedding,
            "heads": self.heads,
            "kv_heads": self.heads,
            "head_dim": self.head_dim,
            "hidden": self.config.d_ff,
            "activation": KERNEL_NAMES[self.config.dense_act_fn],
            "epsilon": self.epsilon,
        }

    @property
    def tables(self) -> list[Tensor]:
        """What compiled steps read and `reach` replaces: nothing, as they read biases by distance."""
        return []

    def reach(self, positions: int) -> None:
        """Compute the bias of one row over at least this many keys, unless it exists."""
        if positions > self._backward.shape[1]:
            places = torch.arange(max(256, 2 * positions), device=self.embedding.device).flip(0)
            self._backward = self._bias_by_distance[:, places.clamp(max=self._farthest)]

    def _project(self, x: Tensor, own: SelfAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [m, heads, head_dim] each."""
        qkv = linear(normalize(x, own.norm, self.epsilon), own.qkv).view(x.shape[0], 3, self.heads, self.head_dim)
        return qkv[:, 0], qkv[:, 1], qkv[:, 2]

    def _feed_forward(self, x: Float[Tensor, "m dim"], block: FeedForward) -> Float[Tensor, "m dim"]:
        inner = linear(normalize(x, block.norm, self.epsilon), block.inner)
        if not block.gated:
            return linear(self.activation(inner), block.outer)
        gate, up = inner.chunk(2, -1)
        return linear(self.activation(gate) * up, block.outer)

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
        return self._bias_by_distance[:, distance].masked_fill(~rows.visible, float("-inf"))


def _outline(layer: T5Layer) -> LayerOutline:
    own, cross, feed_forward = layer.own, layer.cross, layer.feed_forward
    return LayerOutline(
        norm=own.norm,
        qkv=Weight(own.qkv),
        out=Weight(own.out),
        feed_norm=feed_forward.norm,
        inner=Weight(feed_forward.inner, gated=feed_forward.gated),
        outer=Weight(feed_forward.outer),
        cross_norm=None if cross is None else cross.norm,
        cross_query=None if cross is None else Weight(cross.query),
        cross_out=None if cross is None else Weight(cross.out),
    )


def relative_bias(stack: torch.nn.Module, relative: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "heads n"]:
    """The learned bias of an encoder or decoder stack. relative: [n], the key's position minus the query's."""
    attention = stack.block[0].layer[0].SelfAttention
    buckets = attention._relative_position_bucket(
        relative,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias.weight[buckets].T.contiguous().to(dtype)


def t5_layer(weights: dict[str, Tensor], prefix: str, gated: bool) -> T5Layer:
    def attention(part: str, *names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{part}.{name}.weight"] for name in names])

    own, cross = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    crosses = f"{prefix}{cross}.q.weight" in weights
    last = f"{prefix}layer.{2 if crosses else 1}."
    inner = ("wi_0", "wi_1") if gated else ("wi",)
    return T5Layer(
        own=SelfAttention(
            norm=weights[f"{prefix}layer.0.layer_norm.weight"],
            qkv=attention(own, "q", "k", "v"),
            out=attention(own, "o"),
        ),
        cross=CrossAttention(
            norm=weights[f"{prefix}layer.1.layer_norm.weight"],
            query=attention(cross, "q"),
            key_value=attention(cross, "k", "v"),
            out=attention(cross, "o"),
        )
        if crosses
        else None,
        feed_forward=FeedForward(
            norm=weights[f"{last}layer_norm.weight"],
            inner=torch.cat([weights[f"{last}DenseReluDense.{name}.weight"] for name in inner]),
            outer=weights[f"{last}DenseReluDense.wo.weight"],
            gated=gated,
        ),
    )


def why_not(config: PreTrainedConfig) -> str | None:
    """Why this configuration cannot run here, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    if config.dense_act_fn not in ACTIVATIONS:
        return f"its activation is {config.dense_act_fn}"
    return None
