"""Random adapters and heads for tiny models, large enough to matter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from bild_lab.engine.adapters import BitaAdapter, JudgeConfig, JudgeHead, MedusaHeads
from bild_lab.engine.adapters.judge import hidden_size_of

SCALE = 30  # of the usual initial values, so that a prompt that leaks into the text is noticed


def random_adapter(
    config: PreTrainedConfig, prompt: str = "deep", prompt_tokens: int = 4, mask_tokens: int = 3, seed: int = 0
) -> BitaAdapter:
    adapter = BitaAdapter.fresh(config, {"path": "a tiny model"}, prompt, prompt_tokens, mask_tokens, seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.mul_(SCALE)
    return adapter


def random_heads(config: PreTrainedConfig, lm_head: Tensor, heads: int = 3, seed: int = 0) -> MedusaHeads:
    """Each head differs from the model's own, and from the others."""
    made = MedusaHeads.fresh(config, lm_head, {"path": "a tiny model"}, heads)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def random_judge(config: PreTrainedConfig, seed: int = 0) -> JudgeHead:
    """It holds about half of all mismatches to matter."""
    made = JudgeHead(JudgeConfig(hidden_size_of(config), threshold=0.5))
    with torch.no_grad():
        made.weight.copy_(torch.randn(made.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def files_of(policy: str, config: PreTrainedConfig, folder: Path) -> dict[str, str]:
    """The knob that names the folder a policy needs, and one made for a model like this; nothing for other policies."""
    knob = {"bita": "adapter", "judge": "adapter", "medusa": "heads"}.get(policy)
    if knob is None:
        return {}
    path = folder / policy
    if not path.is_dir():
        nowhere = torch.zeros(config.vocab_size, config.hidden_size)
        makers = {"bita": random_adapter, "judge": random_judge, "medusa": lambda one: random_heads(one, nowhere)}
        makers[policy](config).save(path)
    return {knob: str(path)}
