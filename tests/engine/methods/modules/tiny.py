"""Random adapters, heads and layers of EAGLE for tiny models, large enough to matter."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from bild_lab.engine.methods.bita import BitaAdapter
from bild_lab.engine.methods.dflash import DFlash, DFlashConfig
from bild_lab.engine.methods.eagle.module import EAGLE3, Eagle, EagleConfig, spread_layers
from bild_lab.engine.methods.markov import MarkovHead
from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.engine.models.checkpoint.checkpoint import decoder_depth

SCALE = 30  # of the usual initial values, so that a prompt that leaks into the text is noticed


def random_adapter(
    config: PreTrainedConfig,
    prompt: str = "deep",
    prompt_tokens: int = 4,
    mask_tokens: int = 3,
    seed: int = 0,
    markov_rank: int = 0,
) -> BitaAdapter:
    sizes = (prompt_tokens, mask_tokens, seed)
    adapter = BitaAdapter.fresh(config, {"path": "a tiny model"}, prompt, *sizes, markov_rank)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if not name.startswith("markov"):
                parameter.mul_(SCALE)
        if adapter.markov is not None:
            adapter.markov.after.normal_(generator=torch.Generator().manual_seed(seed))
    return adapter


def random_heads(
    config: PreTrainedConfig,
    lm_head: Tensor,
    heads: int = 3,
    seed: int = 0,
    shared: bool = False,
    markov_rank: int = 0,
) -> MedusaHeads:
    """Each head differs from the model's own, and from the others."""
    made = MedusaHeads.fresh(
        config, lm_head, {"path": "a tiny model"}, heads, shared=shared, markov_rank=markov_rank
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def misled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: every Markov head takes the token after the one that it is told."""
    own = MarkovHead.forward
    monkeypatch.setattr(
        MarkovHead, "forward", lambda head, tokens: own(head, (tokens + 1) % len(head.before))
    )


def random_eagle(
    variant: str,
    config: PreTrainedConfig,
    known: int | None = None,
    seed: int = 0,
    **others: object,
) -> Eagle:
    """A layer for a model like this. known: how many tokens the head of EAGLE-3 knows, every second
    one; None: all.
    """
    vocabulary, third = config.vocab_size, variant == EAGLE3
    made = Eagle(
        EagleConfig(
            variant,
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=config.hidden_size,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=6,
            ),
            config.hidden_size,
            spread_layers(decoder_depth(config)) if third else (),
            (vocabulary if known is None else known) if third else None,
            **others,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    fill_randomly(made, known, generator)
    if made.config.embeds:
        with torch.no_grad():
            made.embed_tokens.copy_(torch.randn(made.embed_tokens.shape, generator=generator))
    return made


def random_dflash(config: PreTrainedConfig, known: int | None = 20, **others: object) -> DFlash:
    """A drafter of two layers for a model like this, whose last token is the mask. known: how many
    tokens its head knows, every second one; None: the target's head.
    """
    layers = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
    )
    shapes = {
        "target_layers": spread_layers(decoder_depth(config)),
        "block": 5,
        "mask_token": config.vocab_size - 1,
        "draft_vocabulary": known,
        "first_row": 1,
        "windows": (None, 3),
        "causal": True,
    }
    made = DFlash(DFlashConfig(layers, **{**shapes, **others}))
    fill_randomly(made, known, torch.Generator().manual_seed(0))
    return made


def fill_randomly(drafter: Eagle | DFlash, known: int | None, generator: torch.Generator) -> None:
    """Give a drafter random weights, norms around 1, and a head that knows so many tokens, every
    second one; None: it has no vocabulary of its own.
    """
    with torch.no_grad():
        for parameter in drafter.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(
                (parameter.ndim == 1) + scale * torch.randn(parameter.shape, generator=generator)
            )
        if known is not None:
            drafter.d2t.copy_(torch.arange(known))


def save_package_model(package: torch.nn.Module, folder: Path) -> None:
    """Write a model of the package `speculators` as it stores it."""
    folder.mkdir()
    tensors = {name: value.contiguous() for name, value in package.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = package.config.to_dict()
    config["transformer_layer_config"] = package.config.transformer_layer_config.to_dict()
    (folder / "config.json").write_text(json.dumps(config, default=str))


def write_dflash(
    dflash: DFlash, folder: Path, layer: Mapping[str, object] | None = None, **others: object
) -> Path:
    """In the layout of vLLM's speculators. layer, others: further keys of its layers'
    configuration, and of its own.
    """
    config, tensors = dflash.config, {}
    for name, value in dflash.state_dict().items():
        block = name.split(".")[-2 if name.endswith(("weight", "bias")) else -1]
        part = {"o": "self_attn.", "q": "self_attn.", "k": "self_attn.", "v": "self_attn."}
        prefix = part.get(block.removesuffix("_proj").removesuffix("_norm"), "")
        prefix = "mlp." if block in ("gate_proj", "up_proj", "down_proj") else prefix
        suffix = ".weight" if "norm" in block else ""
        tensors[name.replace(block, f"{prefix}{block}", 1) + suffix] = value.contiguous()
    sliding = [window is not None for window in config.windows]
    layers = {
        **config.layers.to_dict(),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "sliding_window": next(filter(None, config.windows), None),
        **(layer or {}),
    }
    values = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocabulary or config.vocabulary,
        "block_size": config.block,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": config.first_row == 0,
        **others,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_mtp(
    config: PreTrainedConfig, folder: Path, layers: int | None = None, seed: int = 0
) -> Path:
    """Random layers of multi-token prediction for a model like this, without the model.

    layers: how many, behind the model's last one, as DeepSeek's; None: one in the layout of
    Qwen3.5.
    """
    depth, dim, count = config.num_hidden_layers, config.hidden_size, layers or 1
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = depth + count
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None):
            more = "full_attention" if kinds == "layer_types" else "sparse"
            setattr(deeper, kinds, [*getattr(config, kinds), *[more] * count])
    generator = torch.Generator().manual_seed(seed)

    def random_weight(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return 1 + 0.3 * values if len(shape) == 1 else values * shape[-1] ** -0.5

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(deeper)
    tensors = {}
    for layer in range(count):
        behind = f"model.layers.{depth + layer}."
        prefix = behind if layers else "mtp.layers.0."
        tensors |= {
            name.replace(behind, prefix): random_weight(*value.shape)
            for name, value in module.state_dict().items()
            if name.startswith(behind)
        }
        names = (
            [f"{prefix}{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
            if layers
            else ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"]
        )
        for name, shape in zip(names, ((dim,), (dim,), (dim, 2 * dim), (dim,)), strict=True):
            tensors[f"{name}.weight"] = random_weight(*shape)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def files_of(policy: str, config: PreTrainedConfig, folder: Path) -> dict[str, str]:
    """The knob that names the folder a policy needs, and one made for a model like this; nothing
    for other policies.
    """
    knob = {"bita": "adapter", "medusa": "heads"}.get(policy)
    if policy in ("eagle", "eagle3"):
        knob = "heads"
    if policy in ("dflash", "mtp"):
        path = folder / f"{policy}-{config.model_type}-{decoder_depth(config)}"
        if not path.is_dir():
            if policy == "mtp":
                write_mtp(config, path)
            else:
                write_dflash(random_dflash(config, known=None), path)
        return {"heads": str(path)}
    if knob is None:
        return {}
    path = folder / policy
    if policy in ("eagle", "eagle3"):  # made for both families
        path = folder / f"{policy}-{config.model_type}-{decoder_depth(config)}"
        if not path.is_dir():
            random_eagle(policy, config).save(path)
        return {knob: str(path)}
    if not path.is_dir():
        nowhere = torch.zeros(config.vocab_size, config.hidden_size)
        makers = {
            "bita": partial(random_adapter, markov_rank=4),
            "medusa": partial(random_heads, lm_head=nowhere),
        }
        makers[policy](config).save(path)
    return {knob: str(path)}
