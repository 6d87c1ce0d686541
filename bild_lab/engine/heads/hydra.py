"""Hydra's trained part: heads that also read the tokens drafted before theirs (Ankner et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig

from bild_lab.engine.heads.folder import Kind, SavedModule
from bild_lab.errors import require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

TRAIN = "python scripts/train_module.py module=hydra name=hydra model.path=DIR dataset=NAME dataset.path=DIR"
KIND = Kind(
    weights="heads.safetensors",
    config="hydra_config.json",
    noun="folder of Hydra heads",
    remedy=f"make one with: {TRAIN} and give policy.heads=outputs/hydra/heads",
)


@dataclass(frozen=True)
class HydraConfig:
    """The shapes of the heads, and the model they were trained for.

    heads: how many tokens are predicted beyond the target's own next token. layers: residual blocks in each head, at
    least 1, as the first one takes in the tokens. hidden_size, vocabulary: the base model's. base: its path and the
    fingerprint of its weights.
    """

    heads: int
    layers: int
    hidden_size: int
    vocabulary: int
    base: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("module.heads", self.heads, 1)
        require_whole("module.layers", self.layers, 1, None, "Hydra's first block takes in the tokens")


class HydraHeads(SavedModule):
    """Head i (from 0) reads a state h of the target and the i + 1 tokens after it, and predicts the token after these.

    The first block is h + silu(W [h; e_1; …; e_i+1] + b), with the target's embeddings e; further ones are x + silu(W x
    + b); then a matrix to the vocabulary. All W and b start at zero. `attach` gives the heads the target's embedding,
    which is neither trained nor saved. blocks [heads, layers - 1, dim, dim], biases [heads, layers, dim], outputs
    [heads, vocab, dim]; head i has its own first matrix, [dim, (i + 2) dim].
    """

    kind, config_class = KIND, HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        heads, dim = config.heads, config.hidden_size
        self.firsts = nn.ParameterList([nn.Parameter(torch.zeros(dim, (head + 2) * dim)) for head in range(heads)])
        self.blocks = nn.Parameter(torch.zeros(heads, config.layers - 1, dim, dim))
        self.biases = nn.Parameter(torch.zeros(heads, config.layers, dim))
        self.outputs = nn.Parameter(torch.zeros(heads, config.vocabulary, dim))
        self._embedding: tuple[Tensor, ...] = ()

    @classmethod
    def fresh(
        cls,
        model_config: PreTrainedConfig,
        lm_head: Float[Tensor, "vocab dim"],
        base: Mapping[str, Any],
        heads: int,
        layers: int = 1,
    ) -> HydraHeads:
        """Untrained heads, each a copy of the model's own head."""
        text = model_config.get_text_config(decoder=True)
        made = cls(HydraConfig(heads, layers, text.hidden_size, text.vocab_size, dict(base)))
        with torch.no_grad():
            made.outputs.copy_(lm_head.detach()[: text.vocab_size])  # the same for every head
        return made

    def attach(self, embedding: Float[Tensor, "vocab dim"]) -> HydraHeads:
        """Use the target's embedding."""
        self._embedding = (embedding,)
        return self

    def forward(
        self, head: int, states: Float[Tensor, "*rows dim"], tokens: Int[Tensor, "*rows path"]
    ) -> Float[Tensor, "*rows vocab"]:
        """Scores by this head. tokens: the head + 1 tokens after the state."""
        embedded = self._embedding[0][tokens].flatten(-2).to(states.dtype)
        bias = self.biases[head]
        x = states + silu(linear(torch.cat([states, embedded], -1), self.firsts[head], bias[0]))
        for layer in range(1, self.config.layers):
            x = x + silu(linear(x, self.blocks[head, layer - 1], bias[layer]))
        return linear(x, self.outputs[head])


def load_hydra(target: LoadedModel, path: FilePath | None) -> HydraHeads:
    """The heads in this folder, in the target's precision. Raises UserError as `SavedModule.load_for` does."""
    text = target.checkpoint.config.get_text_config(decoder=True)
    heads = HydraHeads.load_for(target, path, hidden_size=text.hidden_size, vocabulary=text.vocab_size)
    return heads.to(target.dtype)
