"""The Llama family: Llama, Mistral, Qwen2, Qwen3 and the text models of Gemma 3.

All have grouped-query attention, rotary positions with any scaling that does not depend on the
length, and a gated feed-forward block. Other features are read from the weights (biases, norms of
queries and keys, norms after attention and feed-forward), or from the configuration (which layers
have a sliding window). Gemma 3 also scales attention by a number of its own and embeddings by the
root of their width, has a rotation for each kind of layer, and stores norm weights minus 1, which it
applies in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.models.checkpoint.weights import Weights, module_weights
from bild_lab.engine.models.hf.positions import CHANGING, rotations
from bild_lab.engine.models.native.stack import (
    GROWING,
    AttentionView,
    Layer,
    Stack,
    Weight,
    layers_of,
    reader,
    signed_sines,
)
from bild_lab.engine.models.placed_rows import PlacedRows

# a layer's kind, as named in the configurations
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as `stack.py` names them
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


GEMMA = "gemma3_text"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", GEMMA)
# whose configurations list the kind of each layer
KINDS_BY_LAYER = ("qwen2", "qwen3", GEMMA)


def layer_under(
    prefix: str, weights: Weights, config: PreTrainedConfig, kind: int, window: int
) -> Layer:
    """The weights under this prefix. kind, window: as in `Layer`."""

    def norm(name: str) -> Tensor:
        return norm_factor(config, weights[f"{prefix}{name}.weight"])

    def linear(*names: str, gated: bool = False) -> Weight:
        matrix = weights.matrix(*(f"{prefix}{name}.weight" for name in names))
        biases = [f"{prefix}{name}.bias" for name in names]
        bias = weights.joined(*biases) if biases[0] in weights else None
        return Weight(matrix, bias, gated)

    head_norm = None
    if f"{prefix}self_attn.q_norm.weight" in weights:
        query_norms = norm("self_attn.q_norm").expand(config.num_attention_heads, -1)
        key_norms = norm("self_attn.k_norm").expand(config.num_key_value_heads, -1)
        head_norm = torch.cat([query_norms, key_norms])
    # the norm named post_attention comes before the feed-forward block, unless that has its own
    # norm
    after_attention = norm("post_attention_layernorm")
    four_norms = f"{prefix}pre_feedforward_layernorm.weight" in weights
    return Layer(
        norm=norm("input_layernorm"),
        qkv=linear(*(f"self_attn.{name}_proj" for name in "qkv")),
        head_norm=head_norm,
        out=linear("self_attn.o_proj"),
        out_norm=after_attention if four_norms else None,
        feed_norm=norm("pre_feedforward_layernorm") if four_norms else after_attention,
        inner=linear("mlp.gate_proj", "mlp.up_proj", gated=True),
        outer=linear("mlp.down_proj"),
        feed_out_norm=norm("post_feedforward_layernorm") if four_norms else None,
        window=window,
        kind=kind,
    )


class LlamaDecoder(Stack):
    """A decoder of this family.

    A kind of layer has a window or none, and may have a rotation of its own.
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
        is_gemma, kinds = config.model_type == GEMMA, layer_kinds(config)
        head_dim = head_width(config)
        embedding = weights.table("model.embed_tokens.weight")
        embedding_scale = 1.0
        if is_gemma:  # rounded to the precision of the weights, as Transformers does
            embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.dtype).item()
        self._kinds = list(dict.fromkeys(kinds))
        self._kind_of = kind_of = [self._kinds.index(kind) for kind in kinds]
        window = sliding_window(config) or 0
        self._windows = windows = [0 if kind == FULL else window for kind in self._kinds]

        def layer(index: int) -> Layer:
            kind = kind_of[index]
            return layer_under(f"model.layers.{index}.", weights, config, kind, windows[kind])

        super().__init__(
            layers=layers_of(len(kinds), layer, preload),
            embedding=embedding,
            read_head=reader(lambda: weights.matrix("lm_head.weight"), preload),
            final_norm=norm_factor(config, weights["model.norm.weight"]),
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            hidden=config.intermediate_size,
            activation=ACTIVATIONS[activation_of(config)],
            epsilon=config.rms_norm_eps,
            scale=(config.query_pre_attn_scalar if is_gemma else head_dim) ** -0.5,
            embedding_scale=embedding_scale,
        )
        # knows every kind of scaling
        self._rotary = type(module.model.rotary_emb)(config).to(embedding.device)
        self._rotary_by_kind = is_gemma
        nothing = torch.empty(0, head_dim, dtype=embedding.dtype, device=embedding.device)
        self._rotations = [(nothing, nothing) for _ in self._kinds]  # cos and sin of every position
        self._reached = 0

    def rotations(
        self, positions: int
    ) -> tuple[Float[Tensor, "kinds n head_dim"], Float[Tensor, "kinds n head_dim"]]:
        """Cosines and signed sines of at least so many positions, for each kind of layer."""
        self.reach(positions)
        cos, sin = zip(*self._rotations, strict=True)
        return torch.stack(cos), torch.stack(sin)

    @property
    def tables(self) -> list[Tensor]:
        return [table for pair in self._rotations for table in pair]

    def reach(self, positions: int) -> None:
        """Compute the rotary tables for at least this many positions, unless they exist."""
        if positions <= self._reached:
            return
        with GROWING:
            if positions <= self._reached:  # another thread has computed them meanwhile
                return
            reached = max(256, 2 * positions)
            places = torch.arange(reached, device=self.embedding.device)
            tables = []
            for kind in self._kinds:
                cos, sin = self._rotary(
                    self.embedding[:1], places[None], *([kind] if self._rotary_by_kind else [])
                )
                tables.append((cos[0], signed_sines(sin[0])))  # [n, head_dim]
            self._rotations = tables
            self._reached = reached  # last: now other threads read them

    def views(
        self, rows: PlacedRows, layers: Sequence[int], masked: bool = True
    ) -> dict[int, AttentionView]:
        self.reach(rows.stop)
        views = {}
        for kind in {self._kind_of[index] for index in layers}:
            cos, sin = self._rotations[kind]
            at = slice(rows.stop - 1, rows.stop) if rows.visible is None else rows.row_positions
            views[kind] = AttentionView(
                cos[at, None],
                sin[at, None],
                self._mask(rows, self._windows[kind]) if masked else None,
            )
        return views

    def _mask(self, rows: PlacedRows, window: int) -> Tensor | None:
        if not window or rows.stop <= window:
            return rows.visible
        keys = rows.key_positions
        if keys is None:
            keys = torch.arange(rows.stop, device=rows.positions.device)
        keys = keys[..., None, :]
        near = (rows.positions[..., None] - keys < window) | (keys < 0)  # a prefix has no position
        return near if rows.visible is None else near & rows.visible


def norm_factor(config: PreTrainedConfig, weight: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
    """The factor of a norm with this weight; of Gemma's 1 + weight, in float32 or better."""
    if config.model_type != GEMMA:
        return weight
    return 1.0 + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def activation_of(config: PreTrainedConfig) -> str:
    """The activation of the feed-forward block, as the configuration names it."""
    return config.hidden_activation if config.model_type == GEMMA else config.hidden_act


def head_width(config: PreTrainedConfig) -> int:
    """How wide an attention head of a decoder-only model is, which not every configuration says."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kind of every layer of a known architecture: FULL or SLIDING attention."""
    if config.model_type in KINDS_BY_LAYER:
        return tuple(config.layer_types)
    windowed = config.model_type == "mistral" and config.sliding_window is not None
    return (SLIDING if windowed else FULL,) * config.num_hidden_layers


def sliding_window(config: PreTrainedConfig) -> int | None:
    """The size of the sliding window, including the row itself; None if no layer has one.

    Works for any architecture, also for those that do not run natively.
    """
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds == {FULL}:
        return None
    return getattr(config, "sliding_window", None)


def why_not(config: PreTrainedConfig) -> str | None:
    """Why this configuration cannot run here, or None if it can."""
    if config.model_type == "gemma3":
        return (
            "it is a gemma3, which reads images too; of Gemma 3 only the text models (gemma3_text)"
            " are known"
        )
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    if (activation := activation_of(config)) not in ACTIVATIONS:
        return f"its activation is {activation}"
    if unknown := sorted(set(layer_kinds(config)) - {FULL, SLIDING}):
        return f"it has layers of {unknown[0]}"
    if capped := [name for name in SOFT_CAPS if getattr(config, name, None) is not None]:
        return f"it caps logits softly ({capped[0]})"
    if getattr(config, "use_bidirectional_attention", False):
        return "its rows also see those behind them"
    for rotation in rotations(config):
        if rotation.get("rope_type") in CHANGING:
            return f"its rotary scaling is {rotation['rope_type']}, which changes with the length"
    return None
