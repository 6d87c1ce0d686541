"""The fields of a released drafter's config.json that must have a known form, and the target that it
must fit, so that none runs otherwise than it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bild_lab.engine.methods.module_folder import FolderKind, require_made_for
from bild_lab.errors import UserError

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

StateDrafter = TypeVar("StateDrafter", bound=nn.Module)

LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
DERIVED_SIZES = ("num_key_value_heads", "head_dim")  # from the others, if they are missing


def require_known(
    wrong: Mapping[str, bool], values: Mapping[str, Any], path: Path, kind: FolderKind
) -> None:
    """Raise UserError for the first field that is wrong, with what the file says of it. values: of
    the file, or of a part of it.
    """
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"{kind.noun} with {key}={values.get(key)} is not known: {path}; {kind.remedy}"
            )


def layer_config(
    layer: Mapping[str, Any], layers: int, path: Path, kind: FolderKind
) -> LlamaConfig:
    """The shapes of so many decoder layers. Raises UserError, with the field, for sizes that are
    missing or none, for an activation other than silu, and for unknown positions.
    """
    wrong = {name: not is_count(layer.get(name)) for name in SIZES}
    wrong |= {
        name: layer.get(name) is not None and not is_count(layer[name]) for name in DERIVED_SIZES
    }
    wrong["hidden_act"] = layer.get("hidden_act", "silu") != "silu"
    wrong["partial_rotary_factor"] = (layer.get("partial_rotary_factor") or 1.0) != 1.0
    require_known(wrong, layer, path, kind)
    known = {key: layer[key] for key in LAYER_KEYS if key in layer}
    config = LlamaConfig(**known, num_hidden_layers=layers)
    rotary = config.rope_parameters or {}
    require_known(
        {
            "rope_type": rotary.get("rope_type", "default")
            not in ("default", *ROPE_INIT_FUNCTIONS),
            "partial_rotary_factor": (rotary.get("partial_rotary_factor") or 1.0) != 1.0,
        },
        rotary,
        path,
        kind,
    )
    return config


def is_count(value: Any, least: int = 1) -> bool:
    """Whether this is a whole number from `least` on."""
    return type(value) is int and value >= least


def is_switch(value: Any) -> bool:
    """Whether this is true or false, or missing."""
    return value is None or type(value) is bool


def are_layers(value: Any) -> bool:
    """Whether this lists layers, 0 for the embeddings."""
    return isinstance(value, list) and bool(value) and all(is_count(layer, 0) for layer in value)


def require_tokens_of(
    vocabulary: int, d2t: Tensor, t2d: Tensor | None, path: Path, kind: FolderKind
) -> None:
    """Raise UserError unless each token of a drafter's own vocabulary is another one of the target's.

    d2t: the target's id minus the own one. t2d: which of the target's tokens it has, as the file
    says; None, or nowhere true: the file says nothing.
    """
    tokens = d2t + torch.arange(len(d2t))
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise UserError(
            f"{kind.noun} whose d2t gives tokens from {int(tokens.min())} to {int(tokens.max())} is"
            f" not known, as its vocab_size is {vocabulary}: {path}; {kind.remedy}"
        )
    if len(tokens.unique()) < len(tokens):
        raise UserError(
            f"{kind.noun} whose d2t gives a token twice is not known: {path}; {kind.remedy}"
        )
    if t2d is None or not t2d.any() or len(tokens) == vocabulary:
        return
    if not torch.equal(tokens.sort().values, t2d.nonzero().flatten()):
        raise UserError(
            f"{kind.noun} whose d2t and t2d name different tokens is not known: {path}; {kind.remedy}"
        )


def fitted(drafter: StateDrafter, target: LoadedModel, noun: str) -> StateDrafter:
    """A drafter that reads the target's states, in its precision and on its device.

    Raises UserError for another target than it was trained for, and for a drafter that reads states
    after the target's last layer, or beyond it: Transformers gives those of the last one normed.
    """
    checkpoint, layers = target.checkpoint, drafter.config.target_layers
    text = checkpoint.config.get_text_config(decoder=True)
    sizes = {"target_size": text.hidden_size, "vocabulary": text.vocab_size}
    require_made_for(checkpoint, drafter.config, sizes, noun)
    if layers and max(layers) >= checkpoint.depth:
        raise UserError(
            f"{noun} reads states after the layers {list(layers)} of its target, but these must lie"
            f" before the last of {checkpoint.depth}; choose the model that it was trained for"
        )
    return drafter.to(target.device, target.dtype).eval().requires_grad_(False)
