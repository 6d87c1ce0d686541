"""A judge: a linear classifier on the target's last hidden state tells which mismatches matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bild_lab.engine.heads.folder import Kind, SavedModule
from bild_lab.engine.sampling import precise
from bild_lab.errors import require_number, require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

TRAIN = (
    "python scripts/train_module.py module=judge name=judge pair.target=DIR pair.draft=DIR "
    "dataset=NAME dataset.path=DIR"
)
KIND = Kind(
    weights="judge.safetensors",
    config="judge_config.json",
    noun="folder of a judge",
    remedy=f"make one with: {TRAIN} and give policy.adapter=outputs/judge/judge",
)


@dataclass(frozen=True)
class JudgeConfig:
    """The shape of the classifier, its threshold, and the models that it was trained for.

    hidden_size: of the target. threshold: a mismatch with a smaller chance of mattering is kept; in [0, 1]. base: the
    target's path and the fingerprint of its weights. drafter: the same of the model whose tokens were labelled.
    """

    hidden_size: int
    threshold: float
    base: Mapping[str, Any] = field(default_factory=dict)
    drafter: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("judge.hidden_size", self.hidden_size, 1)
        require_number("judge.threshold", self.threshold, 0, 1)


class JudgeHead(SavedModule):
    """The chance that a mismatch matters: σ(w · h + b), where h is what the target's head reads after the token.

    weight: [dim], with the standardization of the training folded in. bias: [1].
    """

    kind, config_class = KIND, JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
        """The chances, in float32 or better."""
        return (precise(hidden) @ self.weight.to(precise(hidden)) + self.bias.to(precise(hidden))).sigmoid()


def hidden_size_of(config: PreTrainedConfig) -> int:
    """The width of what the head reads."""
    return config.get_text_config(decoder=True).hidden_size


def load_judge(target: LoadedModel, path: FilePath | None) -> JudgeHead:
    """The judge in this folder. Raises UserError as `SavedModule.load_for` does."""
    return JudgeHead.load_for(target, path, hidden_size=hidden_size_of(target.checkpoint.config))
