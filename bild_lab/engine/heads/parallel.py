"""A drafter that fills a block of masks in one pass beside an encoder–decoder, and the layers that it does so with.

The shape is that of DFlash and DSpark, the task that of SpecDec (Xia et al., 2022): layers like the target's own attend
to the source, to the target's states of the text, and to the masks before their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.heads.folder import Kind, SavedModule
from bild_lab.engine.heads.markov import MarkovHead
from bild_lab.engine.models.checkpoint import decoder_depth
from bild_lab.engine.models.native.stack import Layer, Stack, Weight
from bild_lab.engine.models.native.t5 import ACTIVATIONS, BIAS, T5Decoder, head_scale, relative_bias, t5_layer, why_not
from bild_lab.engine.models.weights import module_weights
from bild_lab.errors import UserError, require_whole
from bild_lab.files import FilePath

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

TRAIN = "python scripts/train_module.py module=parallel name=parallel model.path=DIR dataset=NAME dataset.path=DIR"
KIND = Kind(
    weights="heads.safetensors",
    config="parallel_config.json",
    noun="folder of a parallel drafter",
    remedy=f"make one with: {TRAIN} and give policy.heads=outputs/parallel/heads",
)
SPREAD = 0.02  # of what does not start as the target's own
EPSILON = 1e-6  # of the norm of the states


@dataclass(frozen=True)
class ParallelConfig:
    """The shapes of the drafter, and the model it was trained for.

    layers: how many. block: how many tokens one pass drafts. rank: of the Markov head, 0 for none. inner: width of the
    feed-forward's outer matrix, which is half of what it reads if it is gated. farthest: the last distance with a bias
    of its own. base: the target's path and the fingerprint of its weights.
    """

    layers: int
    block: int
    rank: int
    hidden_size: int
    vocabulary: int
    heads: int
    head_dim: int
    inner: int
    gated: bool
    farthest: int
    base: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("module.layers", self.layers, 1)
        require_whole("module.block", self.block, 1)
        require_whole("module.rank", self.rank, 0, None, "0 leaves the Markov head out")

    @classmethod
    def beside(
        cls, config: PreTrainedConfig, layers: int, block: int, rank: int, base: Mapping[str, Any]
    ) -> ParallelConfig:
        """Of a drafter for a T5 like this."""
        depth = decoder_depth(config)
        require_whole("module.layers", layers, 1, depth, f"they start as the last of the target's {depth} layers")
        sizes = (config.d_model, config.vocab_size, config.num_heads, config.d_kv, config.d_ff, config.is_gated_act)
        return cls(layers, block, rank, *sizes, config.relative_attention_max_distance, dict(base))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each layer's weights, under the names of `Layer`."""
        dim, width = self.hidden_size, self.heads * self.head_dim
        norms = dict.fromkeys(("norm", "cross_norm", "feed_norm"), (dim,))
        own = {"qkv": (3 * width, dim), "out": (dim, width), "cross_query": (width, dim), "cross_out": (dim, width)}
        return {**norms, **own, "inner": ((1 + self.gated) * self.inner, dim), "outer": (dim, self.inner)}


class ParallelHeads(SavedModule):
    """Row i of the text reads the target's state at position i and the token after it, and predicts the token behind.

    Masks after the last row predict the tokens behind that one. Every row sees the text and the masks up to itself, and
    the source by the keys and values of the target's last layers. The scores are by the target's own matrix, and
    the Markov head's bias is added to them. fuse [dim, dim], masks [block - 1, dim], distances [heads, farthest + 1];
    the layers' weights, under the names of `Layer`, are stacked.
    """

    kind, config_class = KIND, ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        dim = config.hidden_size
        self.layers = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(config.layers, *shape)) for name, shape in config.shapes().items()}
        )
        self.fuse = nn.Parameter(torch.zeros(dim, dim))
        self.masks = nn.Parameter(torch.zeros(config.block - 1, dim))
        self.final_norm = nn.Parameter(torch.ones(dim))
        self.markov = MarkovHead(config.vocabulary, config.rank, scale=config.rank**-0.5) if config.rank else None
        self.register_buffer("distances", torch.zeros(config.heads, config.farthest + 1))

    @classmethod
    @torch.no_grad()
    def fresh(
        cls, base: PreTrainedModel, origin: Mapping[str, Any], layers: int, block: int, rank: int, seed: int
    ) -> ParallelHeads:
        """An untrained drafter: its layers, norm and distances are those of the target's last layers."""
        config, depth = base.config, decoder_depth(base.config)
        made = cls(ParallelConfig.beside(config, layers, block, rank, origin))
        weights = module_weights(base, torch.float32, made.masks.device)
        for index in range(layers):
            layer = t5_layer(weights, f"decoder.block.{depth - layers + index}.", config.is_gated_act)
            for name, stacked in made.layers.items():
                weight = getattr(layer, name)
                stacked[index].copy_(weight.matrix if isinstance(weight, Weight) else weight)
        back = -torch.arange(made.config.farthest + 1)
        made.distances.copy_(relative_bias(base.get_decoder(), weights[f"decoder.{BIAS}"], back))
        made.final_norm.copy_(weights["decoder.final_layer_norm.weight"] * head_scale(config))
        generator = torch.Generator().manual_seed(seed)
        for weight in (made.fuse, made.masks):
            weight.copy_(SPREAD * torch.randn(weight.shape, generator=generator))
        return made

    def rows(
        self, states: Float[Tensor, "*rows dim"], embedded: Float[Tensor, "*rows dim"]
    ) -> Float[Tensor, "*rows dim"]:
        """What the first layer reads of the text. states: the head's input at each position. embedded: the next."""
        return embedded + linear(rms_norm(states, states.shape[-1:], eps=EPSILON), self.fuse)

    def biased(
        self, scores: Float[Tensor, "*rows vocab"], tokens: Int[Tensor, "*rows"]
    ) -> Float[Tensor, "*rows vocab"]:
        """The scores after these tokens, with the Markov head's bias."""
        return scores if self.markov is None else scores + self.markov(tokens)


class ParallelDecoder(T5Decoder):
    """The drafter's layers as a decoder of the target's vocabulary. It embeds nothing: rows come as states."""

    def __init__(
        self,
        heads: ParallelHeads,
        config: PreTrainedConfig,
        embedding: Float[Tensor, "vocab dim"],
        head: Float[Tensor, "vocab dim"],
    ) -> None:
        """config, embedding, head: the target's."""
        own, self.config = heads.config, copy(config)
        self.config.num_decoder_layers = own.layers
        self._farthest = own.farthest
        weights = {name: weight.unbind() for name, weight in heads.layers.items()}

        def layer(index: int) -> Layer:
            parts = {name: each[index] for name, each in weights.items()}
            matrices = {name: Weight(part, gated=name == "inner" and own.gated) for name, part in parts.items()}
            return Layer(**{name: part if part.ndim == 1 else matrices[name] for name, part in parts.items()})

        Stack.__init__(
            self,
            layers=[layer(index) for index in range(own.layers)],
            embedding=embedding,
            read_head=lambda: head,
            final_norm=heads.final_norm,
            heads=own.heads,
            kv_heads=own.heads,
            head_dim=own.head_dim,
            hidden=own.inner,
            activation=ACTIVATIONS[config.dense_act_fn],
            epsilon=config.layer_norm_epsilon,
            distance_bias=heads.distances,
        )
        self._backward = self.distance_bias[:, :0]


def require_t5(config: PreTrainedConfig) -> None:
    """Raise UserError unless the drafter's layers are like the model's."""
    if (reason := why_not(config)) is not None:
        raise UserError(f"a parallel drafter needs a T5 or mT5 that we can run, but {reason}; use policy=eagle3")


def load_parallel(
    target: LoadedModel, path: FilePath | None, vocabulary: DraftVocabulary | None = None
) -> ParallelHeads:
    """The drafter in this folder, in the target's precision. Raises UserError as `SavedModule.load_for` does."""
    config = target.checkpoint.config
    require_t5(config)
    return ParallelHeads.load_for(target, path, vocabulary, hidden_size=config.d_model, vocabulary=config.vocab_size)
