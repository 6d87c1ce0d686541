"""Random adapters, heads and layers of EAGLE for tiny models, large enough to matter."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from bild_lab.engine.methods.bita import BitaAdapter
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
    with torch.no_grad():
        for parameter in made.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(
                (parameter.ndim == 1) + scale * torch.randn(parameter.shape, generator=generator)
            )
        if known is not None:
            made.d2t.copy_(torch.arange(known))
        if made.config.embeds:
            made.embed_tokens.copy_(torch.randn(made.embed_tokens.shape, generator=generator))
    return made


def files_of(policy: str, config: PreTrainedConfig, folder: Path) -> dict[str, str]:
    """The knob that names the folder a policy needs, and one made for a model like this; nothing
    for other policies.
    """
    knob = {"bita": "adapter", "medusa": "heads"}.get(policy)
    if policy in ("eagle", "eagle3"):
        knob = "heads"
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
