"""The Llama family as one readable decoder: Llama, Mistral, Qwen2, Qwen3 and the text models of Gemma 3.

All have grouped-query attention, rotary positions with any scaling that does not depend on the length, and a gated
feed-forward block. Other features are read from the weights (biases, norms of queries and keys, norms after
attention and feed-forward), from the configuration (which layers have a sliding window), or from `Family`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bild_lab.engine.models.native.attention import KeyValueCache, PlacedRows, normalize
from bild_lab.engine.models.native.cpu.weights import DecoderOutline, LayerOutline, Weight
from bild_lab.engine.models.native.families import ACTIVATIONS, FAMILIES, FULL, layer_kinds, norm_factor, sliding_window
from bild_lab.engine.session import NOTHING, Skipped

KERNEL_NAMES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # of activations


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights; query, key and value are one matrix, so are gate and up.

    kind: FULL or SLIDING. head_norm: norm of each query and key head. attention_out_norm and feed_forward_out_norm:
    norms of these blocks' outputs, before the residual sum.
    """

    kind: str
    attention_norm: Float[Tensor, " dim"]
    qkv: Float[Tensor, "features dim"]
    qkv_bias: Float[Tensor, " features"] | None
    head_norm: Float[Tensor, "1 heads_and_kv_heads head_dim"] | None
    out: Float[Tensor, "dim features"]
    out_bias: Float[Tensor, " dim"] | None
    attention_out_norm: Float[Tensor, " dim"] | None
    feed_forward_norm: Float[Tensor, " dim"]
    gate_up: Float[Tensor, "twice_hidden dim"]
    gate_up_bias: Float[Tensor, " twice_hidden"] | None
    down: Float[Tensor, "dim hidden"]
    down_bias: Float[Tensor, " dim"] | None
    feed_forward_out_norm: Float[Tensor, " dim"] | None


class LlamaDecoder:
    """Runs rows through any range of layers. There is no batch axis: one sequence, [m, dim]."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.config = config = module.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon = config.rms_norm_eps
        self.window = sliding_window(config)
        family = FAMILIES[config.model_type]
        self._activation = getattr(config, family.activation)
        self.activation = ACTIVATIONS[self._activation]
        self.attention_scale = (self.head_dim if family.scalar is None else getattr(config, family.scalar)) ** -0.5
        weights = module.state_dict()
        self.embedding = weights["model.embed_tokens.weight"]
        self.embedding_scale = None
        if family.scaled_embedding:  # rounded to the precision of the weights, as Transformers does
            self.embedding_scale = torch.tensor(config.hidden_size**0.5).to(self.embedding.dtype).item()
        self.head = weights["lm_head.weight"]
        weights = {name: norm_factor(config, each) if "norm" in name else each for name, each in weights.items()}
        self.final_norm = weights["model.norm.weight"]
        self.layers = [
            llama_layer(weights, f"model.layers.{i}.", kind, (self.heads, self.kv_heads))
            for i, kind in enumerate(layer_kinds(config))
        ]
        self._rotary = module.model.rotary_emb  # knows every kind of scaling
        self._rotary_by_kind = family.rotary_by_kind
        nothing = self.embedding.new_empty(0, self.head_dim)
        self._rotations = {layer.kind: (nothing, nothing) for layer in self.layers}  # cos and sin of every position
        self._reached = 0

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and width of the cache."""
        return len(self.layers), self.kv_heads, self.head_dim

    def embed(self, tokens: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        x = self.embedding[tokens]
        return x if self.embedding_scale is None else x * self.embedding_scale

    def run(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        layers: Sequence[int],
        hidden: list[Tensor] | None = None,
        skipped: Skipped = NOTHING,
    ) -> Float[Tensor, "m dim"]:
        """Run rows through these layers, storing their keys and values. `hidden` collects each layer's output."""
        views = self._views(rows, layers)
        for index in layers:
            layer = self.layers[index]
            if index not in skipped.attention:
                x = self._attention(x, rows, cache, index, views[layer.kind])
            if index not in skipped.feed_forward:
                normed = normalize(x, layer.feed_forward_norm, self.epsilon)
                gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
                fed = linear(self.activation(gate) * up, layer.down, layer.down_bias)
                x = self._add(x, fed, layer.feed_forward_out_norm)
            if hidden is not None:
                hidden.append(x)
        return x

    def _attention(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        index: int,
        view: tuple[Tensor, Tensor, Tensor | None],
    ) -> Float[Tensor, "m dim"]:
        """The residual stream behind a layer's attention. view: cosines and sines of the rows, and their mask."""
        layer, (cos, sin, mask) = self.layers[index], view
        normed = normalize(x, layer.attention_norm, self.epsilon)
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(rows.count, -1, self.head_dim)
        both = qkv[:, : self.heads + self.kv_heads]
        if layer.head_norm is not None:
            both = normalize(both, layer.head_norm, self.epsilon)
        turned = rotate(both, cos, sin)  # [m, heads + kv_heads, head_dim]
        cache.write(index, rows, turned[:, self.heads :], qkv[:, self.heads + self.kv_heads :])
        mixed = cache.attend(index, rows, turned[:, : self.heads], mask, self.attention_scale)
        return self._add(x, linear(mixed, layer.out, layer.out_bias), layer.attention_out_norm)

    def fill(self, x: Float[Tensor, "m dim"], rows: PlacedRows, cache: KeyValueCache, layers: Sequence[int]) -> None:
        """Store only the keys and values of these layers, with x, [m, dim], as the input of each layer."""
        views = self._views(rows, layers)
        width = self.heads * self.head_dim
        for index in layers:
            layer = self.layers[index]
            cos, sin, _ = views[layer.kind]
            bias = None if layer.qkv_bias is None else layer.qkv_bias[width:]
            both = linear(normalize(x, layer.attention_norm, self.epsilon), layer.qkv[width:], bias)
            keys, values = both.view(rows.count, 2, self.kv_heads, self.head_dim).unbind(1)
            if layer.head_norm is not None:
                keys = normalize(keys, layer.head_norm[:, self.heads :], self.epsilon)
            cache.write(index, rows, rotate(keys, cos, sin), values)

    def final(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m dim"]:
        """The head's input: the last layer's output after the final norm."""
        return normalize(x, self.final_norm, self.epsilon)

    def logits(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m vocab"]:
        return linear(self.final(x), self.head)

    def outline(self) -> DecoderOutline:
        """This decoder as the CPU kernels know it."""
        kinds = list(self._rotations)
        layers = [
            LayerOutline(
                norm=layer.attention_norm,
                qkv=Weight(layer.qkv, layer.qkv_bias),
                head_norm=None if layer.head_norm is None else layer.head_norm[0],
                out=Weight(layer.out, layer.out_bias),
                out_norm=layer.attention_out_norm,
                feed_norm=layer.feed_forward_norm,
                inner=Weight(layer.gate_up, layer.gate_up_bias, gated=True),
                outer=Weight(layer.down, layer.down_bias),
                feed_out_norm=layer.feed_forward_out_norm,
                window=0 if layer.kind == FULL or self.window is None else self.window,
                kind=kinds.index(layer.kind),
            )
            for layer in self.layers
        ]
        return DecoderOutline(
            layers=layers,
            embedding=self.embedding,
            head=self.head,
            final_norm=self.final_norm,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.config.intermediate_size,
            activation=KERNEL_NAMES[self._activation],
            epsilon=self.epsilon,
            scale=self.attention_scale,
            embedding_scale=1.0 if self.embedding_scale is None else self.embedding_scale,
        )

    def rotations(self, positions: int) -> tuple[Float[Tensor, "kinds n head_dim"], Float[Tensor, "kinds n head_dim"]]:
        """Cosines and signed sines of at least so many positions, for each kind of layer."""
        self.reach(positions)
        cos, sin = zip(*self._rotations.values(), strict=True)
        return torch.stack(cos), torch.stack(sin)

    @property
    def tables(self) -> list[Tensor]:
        """What compiled steps read and `reach` replaces."""
        return [table for pair in self._rotations.values() for table in pair]

    def reach(self, positions: int) -> None:
        """Compute the rotary tables for at least this many positions, unless they exist."""
        if positions <= self._reached:
            return
        self._reached = max(256, 2 * positions)
        every = torch.arange(self._reached, device=self.embedding.device)
        half = self.head_dim // 2
        for kind in self._rotations:
            cos, sin = self._rotary(self.embedding[:1], every[None], *([kind] if self._rotary_by_kind else []))
            sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)  # signed so that a roll rotates
            self._rotations[kind] = cos[0], sin  # [n, head_dim]

    def _views(self, rows: PlacedRows, layers: Sequence[int]) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """For each kind among these layers: cos and sin at the rows' positions, and the attention mask."""
        self.reach(rows.stop)
        kinds = {self.layers[index].kind for index in layers}
        return {kind: (*self._rotation(rows, kind), self._mask(rows, kind)) for kind in kinds}

    def _rotation(self, rows: PlacedRows, kind: str) -> tuple[Float[Tensor, "m 1 dim"], Float[Tensor, "m 1 dim"]]:
        cos, sin = self._rotations[kind]
        if rows.visible is None:
            place = rows.stop - 1
            return cos[place : place + 1, None], sin[place : place + 1, None]
        return cos[rows.each_position, None], sin[rows.each_position, None]

    def _mask(self, rows: PlacedRows, kind: str) -> Tensor | None:
        if kind == FULL or self.window is None or rows.stop <= self.window:
            return rows.visible
        keys = rows.key_positions
        if keys is None:
            keys = torch.arange(rows.stop, device=rows.positions.device)
        keys = keys[..., None, :]
        near = (rows.positions[..., None] - keys < self.window) | (keys < 0)  # a prefix has no position
        return near if rows.visible is None else near & rows.visible

    def _add(
        self, x: Float[Tensor, "m dim"], block: Float[Tensor, "m dim"], norm: Float[Tensor, " dim"] | None
    ) -> Float[Tensor, "m dim"]:
        """The residual sum."""
        return x + (block if norm is None else normalize(block, norm, self.epsilon))


def rotate(
    x: Float[Tensor, "m heads dim"], cos: Float[Tensor, "m 1 dim"], sin: Float[Tensor, "m 1 dim"]
) -> Float[Tensor, "m heads dim"]:
    """Rotary position embedding. Rolling by half the width swaps the halves; sin includes the sign."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def llama_layer(weights: dict[str, Tensor], prefix: str, kind: str, heads: tuple[int, int]) -> LlamaLayer:
    """The weights under this prefix. heads: the numbers of query heads and key heads."""

    def joined(*names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}"] for name in names])

    def bias(*names: str) -> Tensor | None:
        return joined(*names) if f"{prefix}{names[0]}" in weights else None

    queries_keys_values = [f"self_attn.{name}_proj" for name in "qkv"]
    head_norm = None
    if f"{prefix}self_attn.q_norm.weight" in weights:
        queries, keys = (weights[f"{prefix}self_attn.{name}_norm.weight"] for name in "qk")
        head_norm = torch.cat([queries.expand(heads[0], -1), keys.expand(heads[1], -1)])[None]
    # the norm named post_attention comes before the feed-forward block, unless that has its own norm
    sandwiched = f"{prefix}pre_feedforward_layernorm.weight" in weights
    after_attention = weights[f"{prefix}post_attention_layernorm.weight"]
    return LlamaLayer(
        kind=kind,
        attention_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=joined(*(f"{name}.weight" for name in queries_keys_values)),
        qkv_bias=bias(*(f"{name}.bias" for name in queries_keys_values)),
        head_norm=head_norm,
        out=weights[f"{prefix}self_attn.o_proj.weight"],
        out_bias=bias("self_attn.o_proj.bias"),
        attention_out_norm=after_attention if sandwiched else None,
        feed_forward_norm=weights[f"{prefix}pre_feedforward_layernorm.weight"] if sandwiched else after_attention,
        gate_up=joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        gate_up_bias=bias("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        down=weights[f"{prefix}mlp.down_proj.weight"],
        down_bias=bias("mlp.down_proj.bias"),
        feed_forward_out_norm=weights[f"{prefix}post_feedforward_layernorm.weight"] if sandwiched else None,
    )
