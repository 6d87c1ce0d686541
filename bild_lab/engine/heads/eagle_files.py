"""The files of an EAGLE: those of SafeAILab's EAGLE and of vLLM's speculators, which name the same weights differently.

Both have a config.json and weights in safetensors or, as most of SafeAILab's releases do, in pytorch_model.bin. Own
ones are written as SafeAILab's, with the model that they were trained for under `base`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import LlamaConfig

from bild_lab.engine.heads.eagle import EAGLE, EAGLE3, Eagle, EagleConfig, spread_layers
from bild_lab.engine.heads.folder import Kind, described, released_folder, require_made_for, shapes, tensors_of
from bild_lab.errors import UserError
from bild_lab.files import FilePath, write_atomically

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

TRAIN = "python scripts/train_module.py module=eagle name=eagle model.path=DIR dataset=NAME dataset.path=DIR"
KIND = Kind(
    weights="model.safetensors",
    config="config.json",
    noun="EAGLE",
    remedy=f"make one with: {TRAIN} and give outputs/eagle/heads, or give a released one",
)
WEIGHTS = (KIND.weights, "pytorch_model.bin")
LAYERS = {EAGLE: "layers.0.", EAGLE3: "midlayer."}  # how SafeAILab's releases name the layer
RENAMED = {"model.": "", "layers.0.": "", "midlayer.": "", "transformer.": "", "self_attn.": "", "mlp.": ""}
IGNORED = ("t2d", "rotary_emb.inv_freq")  # the first follows from d2t, the second from the configuration
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # vLLM's name for the target's layers
EXTRA_NORMS = ("embedding_layernorm", "embed_layernorm", "hidden_layernorm", "pre_lm_head_layernorm")


def load_eagle(target: LoadedModel, path: FilePath | None, variant: str) -> Eagle:
    """Load the EAGLE in this folder or of this hub id, in the target's precision and on its device.

    Raises UserError if there is none, if it is of another variant, or if it does not fit the target.
    """
    if path is None:
        raise UserError(f"policy {variant} needs a trained layer; {KIND.remedy}, as policy.heads=outputs/eagle/heads")
    checkpoint = target.checkpoint
    eagle = read_eagle(released_folder(path, KIND, WEIGHTS), checkpoint.depth)
    config, noun = eagle.config, f"the EAGLE {path}"
    if config.variant != variant:
        raise UserError(f"{noun} is of the variant {config.variant}, got policy={variant}; use policy={config.variant}")
    text = checkpoint.config.get_text_config(decoder=True)
    require_made_for(checkpoint, config, {"target_size": text.hidden_size, "vocabulary": text.vocab_size}, noun)
    if config.target_layers and max(config.target_layers) >= checkpoint.depth:
        raise UserError(
            f"{noun} reads states after the layers {list(config.target_layers)} of its target, but these must lie "
            f"before the last of {checkpoint.depth}; choose the model that it was trained for"
        )
    return eagle.to(target.device, target.dtype).eval().requires_grad_(False)


def read_eagle(folder: Path, depth: int) -> Eagle:
    """Read an EAGLE on the CPU. depth: how many layers the target has. Raises UserError for any other folder."""
    weights = _named(tensors_of(folder, KIND, WEIGHTS))
    config = _config(folder, weights, depth)
    eagle = Eagle(config)
    wanted, came = shapes(eagle.state_dict()), shapes(weights)
    if wanted != came:
        differing = {name for name in {*wanted, *came} if wanted.get(name) != came.get(name)}
        held = [described({name: one[name] for name in differing & set(one)}) for one in (wanted, came)]
        raise UserError(f"the EAGLE {folder} must hold {held[0]}, got {held[1]}; {KIND.remedy}")
    eagle.load_state_dict(weights)
    return eagle


def save_eagle(eagle: Eagle, folder: Path) -> None:
    """Write weights and configuration as SafeAILab's releases have them."""
    config = eagle.config
    prefix, tensors = LAYERS[config.variant], {}
    for name, value in eagle.state_dict().items():
        tensors[_released_name(name, prefix)] = value.detach().cpu().contiguous()
    written = {
        **config.layer.to_dict(),
        "architectures": ["LlamaForCausalLM" if config.variant == EAGLE else "LlamaForCausalLMEagle3"],
        "rope_theta": config.layer.rope_parameters["rope_theta"],
        "bias": config.bias[0],
        "target_hidden_size": config.target_size,
        "base": dict(config.base),
    }
    if config.variant == EAGLE3:
        written["draft_vocab_size"] = config.draft_vocabulary
        written["eagle_config"] = {"use_aux_hidden_state": True, AUX_LAYERS: list(config.target_layers)}
    write_atomically(folder / KIND.weights, to_bytes(tensors, metadata={"format": "pt"}))
    write_atomically(folder / KIND.config, (json.dumps(written, indent=2) + "\n").encode())


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names."""
    named = {}
    for name, value in tensors.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if any(part in name for part in IGNORED) or name.startswith("verifier_"):
            continue
        if name.startswith(EXTRA_NORMS):
            raise UserError(f"an EAGLE with a {name.partition('.')[0]} is not known; {KIND.remedy}")
        name = name.replace("fusion_fc.", "fc.")
        named[name.removesuffix(".weight") if "norm" in name or "embed" in name else name] = value
    return named


def _released_name(name: str, prefix: str) -> str:
    block = name.partition(".")[0]
    if block in ("q_proj", "k_proj", "v_proj", "o_proj"):
        return f"{prefix}self_attn.{name}"
    if block in ("gate_proj", "up_proj", "down_proj"):
        return f"{prefix}mlp.{name}"
    if block in ("post_attention_layernorm", "input_layernorm", "hidden_norm"):
        return f"{prefix}{name}.weight"
    return f"{name}.weight" if block in ("norm", "embed_tokens") else name


def _config(folder: Path, weights: Mapping[str, Tensor], depth: int) -> EagleConfig:
    """The configuration of either format; what the weights show is taken from them."""
    path = folder / KIND.config
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        layer = dict(values.get("transformer_layer_config", values))
        if (layers := layer.get("num_hidden_layers", 1)) != 1:
            raise UserError(f"an EAGLE has one layer, got {path} with {layers}; {KIND.remedy}")
        if layer.get("hidden_act", "silu") != "silu":
            raise UserError(f"an EAGLE has silu as its activation, got {layer['hidden_act']} in {path}; {KIND.remedy}")
        config = LlamaConfig(**{key: layer[key] for key in LAYER_KEYS if key in layer}, num_hidden_layers=1)
        fusion = weights["fc.weight"]
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no {KIND.noun}: it needs {KIND.config}; {KIND.remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not describe an {KIND.noun} ({error}); {KIND.remedy}") from error
    third = "hidden_norm" in weights
    named = values.get(AUX_LAYERS) or (values.get("eagle_config") or {}).get(AUX_LAYERS)
    target_layers = tuple(named or spread_layers(depth)) if third else ()
    return EagleConfig(
        variant=EAGLE3 if third else EAGLE,
        layer=config,
        target_size=fusion.shape[1] // len(target_layers) if third else fusion.shape[1] - config.hidden_size,
        target_layers=target_layers,
        draft_vocabulary=weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else None,
        bias=("fc.bias" in weights, "q_proj.bias" in weights),
        normed_residual=bool(values.get("norm_before_residual", False)),
        embeds="embed_tokens" in weights,
        base=values.get("base") or {},
    )


LAYER_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
)
