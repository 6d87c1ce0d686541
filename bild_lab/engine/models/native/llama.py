"""The Llama family as one readable decoder: Llama, Mistral, Qwen2; grouped-query attention, any rotary scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.native.attention import PlacedRows, attend, normalize
from bild_lab.engine.models.native.cache import KeyValueCache

MODEL_TYPES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights; query, key and value are one matrix, so are gate and up."""

    attention_norm: Float[Tensor, " dim"]
    qkv: Float[Tensor, "features dim"]
    qkv_bias: Float[Tensor, " features"] | None
    out: Float[Tensor, "dim features"]
    out_bias: Float[Tensor, " dim"] | None
    feed_forward_norm: Float[Tensor, " dim"]
    gate_up: Float[Tensor, "twice_hidden dim"]
    gate_up_bias: Float[Tensor, " twice_hidden"] | None
    down: Float[Tensor, "dim hidden"]
    down_bias: Float[Tensor, " dim"] | None


class LlamaDecoder:
    """Rows through any range of layers. There is no batch axis: one sequence, [m, dim]."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.config = config = module.config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon = config.rms_norm_eps
        self.window = sliding_window(config)
        weights = module.state_dict()
        self.embedding = weights["model.embed_tokens.weight"]
        self.final_norm = weights["model.norm.weight"]
        self.head = weights["lm_head.weight"]
        self.layers = [llama_layer(weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self._rotary = module.model.rotary_emb  # knows every kind of scaling
        self._cos = self._sin = self.embedding.new_empty(0, self.head_dim)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, heads and width of the cache."""
        return len(self.layers), self.kv_heads, self.head_dim

    def embed(self, tokens: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        return self.embedding[tokens]

    def run(
        self,
        x: Float[Tensor, "m dim"],
        rows: PlacedRows,
        cache: KeyValueCache,
        layers: Sequence[int],
        hidden: list[Tensor] | None = None,
    ) -> Float[Tensor, "m dim"]:
        """Rows through these layers, their keys and values into the cache; `hidden` collects each layer's output."""
        cos, sin = self._rotation(rows)
        mask = self._mask(rows)
        for index in layers:
            layer = self.layers[index]
            normed = normalize(x, layer.attention_norm, self.epsilon)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(rows.count, -1, self.head_dim)
            turned = rotate(qkv[:, : self.heads + self.kv_heads], cos, sin)  # [m, heads + kv_heads, head_dim]
            cache.write(index, rows.slots, turned[:, self.heads :], qkv[:, self.heads + self.kv_heads :])
            mixed = attend(
                turned[:, : self.heads],
                cache.keys[index, :, : rows.stop],
                cache.values[index, :, : rows.stop],
                mask,
                self.head_dim**-0.5,
            )
            x = x + linear(mixed, layer.out, layer.out_bias)
            normed = normalize(x, layer.feed_forward_norm, self.epsilon)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down, layer.down_bias)
            if hidden is not None:
                hidden.append(x)
        return x

    def fill(self, x: Float[Tensor, "m dim"], rows: PlacedRows, cache: KeyValueCache, layers: Sequence[int]) -> None:
        """Only the keys and values of these layers, from a state of the rows that stands for the input of each."""
        cos, sin = self._rotation(rows)
        width = self.heads * self.head_dim
        for index in layers:
            layer = self.layers[index]
            bias = None if layer.qkv_bias is None else layer.qkv_bias[width:]
            both = linear(normalize(x, layer.attention_norm, self.epsilon), layer.qkv[width:], bias)
            keys, values = both.view(rows.count, 2, self.kv_heads, self.head_dim).unbind(1)
            cache.write(index, rows.slots, rotate(keys, cos, sin), values)

    def final(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m dim"]:
        """What the head reads: the last layer's output after the final norm."""
        return normalize(x, self.final_norm, self.epsilon)

    def logits(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "m vocab"]:
        return linear(self.final(x), self.head)

    def reach(self, positions: int) -> None:
        """Have the rotation of at least so many positions at hand."""
        if positions > self._cos.shape[0]:
            every = torch.arange(max(256, 2 * positions), device=self.embedding.device)
            cos, sin = self._rotary(self.embedding[:1], every[None])  # [1, n, head_dim]
            half = self.head_dim // 2
            self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    def _rotation(self, rows: PlacedRows) -> tuple[Float[Tensor, "m 1 dim"], Float[Tensor, "m 1 dim"]]:
        """cos and sin at the rows' positions, sin signed so that a roll rotates."""
        self.reach(rows.stop)
        if rows.visible is None:
            place = rows.stop - 1
            return self._cos[place : place + 1, None], self._sin[place : place + 1, None]
        return self._cos[rows.positions, None], self._sin[rows.positions, None]

    def _mask(self, rows: PlacedRows) -> Tensor | None:
        if self.window is None or rows.stop <= self.window:
            return rows.visible
        keys = rows.key_positions
        if keys is None:
            keys = torch.arange(rows.stop, device=rows.positions.device)
        near = (rows.positions[:, None] - keys < self.window) | (keys < 0)  # a prefix has no position
        return near if rows.visible is None else near & rows.visible


def rotate(
    x: Float[Tensor, "m heads dim"], cos: Float[Tensor, "m 1 dim"], sin: Float[Tensor, "m 1 dim"]
) -> Float[Tensor, "m heads dim"]:
    """Rotary position embedding; a roll by half swaps the halves, and sin carries the sign."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def llama_layer(weights: dict[str, Tensor], prefix: str) -> LlamaLayer:
    def joined(*names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}"] for name in names])

    def bias(*names: str) -> Tensor | None:
        return joined(*names) if f"{prefix}{names[0]}" in weights else None

    queries_keys_values = [f"self_attn.{name}_proj" for name in "qkv"]
    return LlamaLayer(
        attention_norm=weights[f"{prefix}input_layernorm.weight"],
        qkv=joined(*(f"{name}.weight" for name in queries_keys_values)),
        qkv_bias=bias(*(f"{name}.bias" for name in queries_keys_values)),
        out=weights[f"{prefix}self_attn.o_proj.weight"],
        out_bias=bias("self_attn.o_proj.bias"),
        feed_forward_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate_up=joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        gate_up_bias=bias("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        down=weights[f"{prefix}mlp.down_proj.weight"],
        down_bias=bias("mlp.down_proj.bias"),
    )


def sliding_window(config: PreTrainedConfig) -> int | None:
    """How many positions back a row sees, itself included; None for all."""
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds == {"full_attention"}:
        return None
    return getattr(config, "sliding_window", None)


def why_not(config: PreTrainedConfig) -> str | None:
    """Why this configuration cannot run here, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if len(set(getattr(config, "layer_types", None) or [])) > 1:
        return "its layers see different windows"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        return f"its rotary scaling is {rope}, which changes with the length"
    return None
