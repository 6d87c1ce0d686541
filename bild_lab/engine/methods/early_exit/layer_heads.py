"""Heads for chosen layers, to predict tokens before the last layer (PPD §3, the "trained" rows of
Table 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from bild_lab.engine.methods.module_folder import (
    FolderKind,
    SavedModule,
    read_config,
    require_made_for,
)
from bild_lab.errors import UserError, require_whole

if TYPE_CHECKING:
    from bild_lab.engine.models.native.llama import LlamaDecoder
    from bild_lab.engine.models.native.t5 import T5Decoder
    from bild_lab.engine.session import LoadedModel

TRAIN = (
    "python scripts/train_lm_heads.py name=heads model.path=DIR layers=[4,6,8] dataset=NAME"
    " dataset.path=DIR"
)
KIND = FolderKind(
    weights="heads.safetensors",
    config="heads_config.json",
    noun="folder of per-layer heads",
    remedy=f"make one with: {TRAIN} and give outputs/heads/heads",
)


@dataclass(frozen=True)
class LayerHeadsConfig:
    """The shapes of the heads, and the model they were trained for.

    layers: after which layers there is a head, counted from 1, ascending.
    hidden_size, vocabulary: the model's.
    epsilon: of the model's final norm.
    rank: of the low-rank change to the model's own head; None for full matrices.
    base: the model's path and the fingerprint of its weights.
    """

    layers: Sequence[int]
    hidden_size: int
    vocabulary: int
    epsilon: float
    rank: int | None = None
    base: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or isinstance(self.layers, str) or not self.layers:
            raise UserError(
                f"layers must list at least one layer, such as [4,6,8], got {self.layers!r}"
            )
        for layer in self.layers:
            require_whole("each of layers", layer, 1)
        object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))
        if self.rank is not None:
            require_whole("rank", self.rank, 1)

    @classmethod
    def read(cls, folder: Path | str) -> LayerHeadsConfig:
        """Read the configuration of saved heads. Raises UserError for any other folder."""
        return read_config(Path(folder).expanduser(), KIND, cls)


class LayerHeads(SavedModule):
    """Each head is a root-mean-square norm and a matrix to the vocabulary. Both start as the
    model's own.

    norms: [layers, dim]; T5's scale of the decoder output is folded into them. Full heads: matrices
    [layers, vocab, dim]. Low-rank heads: the model's own head, [vocab, dim], frozen, plus the
    product of ups [layers, vocab, rank] and downs [layers, rank, dim], which starts at zero.
    """

    kind, config_class = KIND, LayerHeadsConfig

    def __init__(self, config: LayerHeadsConfig) -> None:
        super().__init__(config)
        count, dim = len(config.layers), config.hidden_size
        vocabulary, rank = config.vocabulary, config.rank
        self.norms = nn.Parameter(torch.ones(count, dim))
        if rank is None:
            self.matrices = nn.Parameter(torch.zeros(count, vocabulary, dim))
        else:
            self.register_buffer("head", torch.zeros(vocabulary, dim))
            self.ups = nn.Parameter(torch.zeros(count, vocabulary, rank))
            self.downs = nn.Parameter(torch.zeros(count, rank, dim))

    @classmethod
    @torch.no_grad()
    def fresh(
        cls,
        decoder: LlamaDecoder | T5Decoder,
        base: Mapping[str, Any],
        layers: Sequence[int],
        rank: int | None = None,
        seed: int = 0,
    ) -> LayerHeads:
        """Untrained heads: each predicts what the decoder's own norm and head give after its layer.

        seed: for the low-rank factors.
        """
        vocabulary, dim = decoder.head.shape
        heads = cls(LayerHeadsConfig(layers, dim, vocabulary, decoder.epsilon, rank, dict(base)))
        # every layer starts with the same norm
        heads.norms.copy_(decoder.final_norm.float() * decoder.final_scale)
        if rank is None:
            heads.matrices.copy_(decoder.head)
        else:
            heads.head.copy_(decoder.head)
            drawn = torch.randn(heads.downs.shape, generator=torch.Generator().manual_seed(seed))
            heads.downs.copy_(drawn * dim**-0.5)
        return heads

    def logits(
        self, layer: int, hidden: Float[Tensor, "*rows dim"]
    ) -> Float[Tensor, "*rows vocab"]:
        """Logits of the next token for each row, from the output of this layer. layer: counted from
        1.
        """
        index = self.config.layers.index(layer)
        hidden = hidden.to(self.norms.dtype)  # the CPU kernels give float32
        normed = rms_norm(hidden, hidden.shape[-1:], self.norms[index], self.config.epsilon)
        if self.config.rank is None:
            return linear(normed, self.matrices[index])
        return linear(normed, self.head) + linear(
            linear(normed, self.downs[index]), self.ups[index]
        )


def require_heads_of(target: LoadedModel, config: LayerHeadsConfig, path: str, layer: int) -> None:
    """Raise UserError unless these heads were trained for the target and include one for this
    layer.
    """
    checkpoint = target.checkpoint
    sizes = {
        "hidden_size": checkpoint.config.hidden_size,
        "vocabulary": checkpoint.config.vocab_size,
    }
    require_made_for(checkpoint, config, sizes, f"the heads {path}")
    if layer not in config.layers:
        raise UserError(
            f"exit_layer must be one that {path} has a head for, {list(config.layers)}, got {layer}"
        )
