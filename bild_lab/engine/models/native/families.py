"""Which decoder-only architectures run natively, and how each differs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import PreTrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"  # a layer's kind, as named in the configurations
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama, apart from what its weights show.

    activation: the configuration's field for the activation. scalar: its field for the number whose inverse square
    root scales attention; None: the head width. kinds_by_layer: the configuration lists the kind of each layer.
    zero_centred: norm weights are stored minus 1 and applied in float32. scaled_embedding: embeddings are multiplied
    by the square root of the hidden size. rotary_by_kind: each kind of layer has its own rotary embedding.
    """

    activation: str = "hidden_act"
    scalar: str | None = None
    kinds_by_layer: bool = False
    zero_centred: bool = False
    scaled_embedding: bool = False
    rotary_by_kind: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(kinds_by_layer=True),
    "qwen3": Family(kinds_by_layer=True),
    "gemma3_text": Family(
        activation="hidden_activation",
        scalar="query_pre_attn_scalar",
        kinds_by_layer=True,
        zero_centred=True,
        scaled_embedding=True,
        rotary_by_kind=True,
    ),
}
MODEL_TYPES = tuple(FAMILIES)


def norm_factor(config: PreTrainedConfig, weight: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
    """The factor of a norm with this weight; for zero-centred norms 1 + weight, in float32 or better."""
    if not FAMILIES[config.model_type].zero_centred:
        return weight
    return 1.0 + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kind of every layer of a known architecture: FULL or SLIDING attention."""
    if FAMILIES[config.model_type].kinds_by_layer:
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
        return "it is a gemma3, which reads images too; of Gemma 3 only the text models (gemma3_text) are known"
    if config.model_type not in MODEL_TYPES:
        return f"its architecture is {config.model_type}"
    activation = getattr(config, FAMILIES[config.model_type].activation)
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}"
    if other := sorted(set(layer_kinds(config)) - {FULL, SLIDING}):
        return f"it has layers of {other[0]}"
    if capped := [name for name in SOFT_CAPS if getattr(config, name, None) is not None]:
        return f"it caps logits softly ({capped[0]})"
    if getattr(config, "use_bidirectional_attention", False):
        return "its rows also see those behind them"
    changing = {"dynamic", "longrope"} & set(rotary_types(config))
    return f"its rotary scaling is {changing.pop()}, which changes with the length" if changing else None


def rotary_types(config: PreTrainedConfig) -> list[str]:
    """The types of rotary scaling: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in parameters.values() if isinstance(each, dict)]
    return [each.get("rope_type", "default") for each in by_kind or [parameters]]
