"""A parallel drafter: a few layers learn to fill a block of masks beside a frozen encoder–decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from bild_lab.engine.heads.parallel import ParallelConfig, ParallelDecoder, ParallelHeads, require_t5
from bild_lab.engine.models.native.t5 import head_scale
from bild_lab.errors import require_number, require_whole
from bild_lab.training.modules.predictors import OwnLoss, Predictors
from bild_lab.training.modules.states import (
    ModuleSpec,
    SmallModule,
    decoder_states,
    own_logits,
    own_matrices,
    soft_loss,
)


@dataclass(frozen=True, kw_only=True)
class ParallelSpec(ModuleSpec):
    """A parallel drafter to train: the fields of `conf/module/parallel.yaml`.

    layers: of the drafter. block: tokens of a draft. rank: of the Markov bias, 0 for none. contexts: how many places of
    an answer a step learns, each with a block of its own. decay: each token's weight relative to the one before it.
    """

    layers: int
    block: int
    rank: int
    contexts: int
    decay: float

    noun: ClassVar[str] = "parallel drafter"
    skipped: ClassVar[int] = 1  # the first round of a text drafts nothing

    def __post_init__(self) -> None:
        ParallelConfig(self.layers, self.block, self.rank, 1, 1, 1, 1, 1, True, 1)  # checks the first three
        require_whole("module.contexts", self.contexts, 1)
        require_number("module.decay", self.decay, 0, 1, above=True, remedy="1 weighs all tokens alike")

    @property
    def predictors(self) -> Predictors:
        """Token i (from 0) of a block is the one i places after the context. The bias reads the label before it."""
        weights = [self.decay**token for token in range(self.block)]
        shared = {"per_answer": self.contexts, "keeps_first": True, "ahead": self.block - 1}
        return Predictors.in_turn("token", 0, weights, skipped=self.skipped, **shared)

    def check(self, config: PreTrainedConfig) -> None:
        """Raise UserError for a model that is no T5."""
        require_t5(config)

    def build(self, base: PreTrainedModel, origin: Mapping[str, Any], seed: int) -> ParallelModule:
        """The layers start as the target's last ones."""
        heads = ParallelHeads.fresh(base, origin, self.layers, self.block, self.rank, seed)
        return ParallelModule(base, heads)

    def words(self, folder: Path) -> list[str]:
        return ["policy=parallel", f"policy.heads={folder}"]


class ParallelModule(SmallModule):
    """Runs the text and the blocks after all contexts in one pass, each block unseen by all others."""

    def forward(self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"]) -> OwnLoss:
        heads, base, dtype = self.weights, self.base, self.weights.fuse.dtype
        block, layers = heads.config.block, heads.config.layers
        with torch.no_grad():
            found = decoder_states(base, input_ids, contexts, skipped=ParallelSpec.skipped)
            cross = [one.layer[1].EncDecAttention for one in base.get_decoder().block[-layers:]]
            memory = [[project(found.source) for project in (one.k, one.v)] for one in cross]
            final = found.final * head_scale(base.config)
            states = final[:, :-1].to(dtype)
            embedding, head = (matrix[: heads.config.vocabulary].to(dtype) for matrix in own_matrices(base))
        pairs, (batch, count) = (found.places - 1).clamp(min=0), states.shape[:2]
        masks = heads.masks.expand(batch, pairs.shape[1], -1, -1).flatten(1, 2)
        x = torch.cat([heads.rows(states, embedding[found.tokens[:, 1:]]), masks], 1)  # [batch, rows, dim]
        every = torch.arange(batch, device=pairs.device)[:, None, None]
        after = pairs[..., None] + torch.arange(block, device=pairs.device)  # [batch, contexts, block]
        places = torch.arange(count, device=pairs.device).expand(batch, -1)
        texts = Texts(torch.cat([places, after[..., 1:].flatten(1)], 1), blocks(pairs, count, block))
        source = Sources(texts, memory, found.seen)
        decoder = ParallelDecoder(heads, base.config, embedding, head)
        x = decoder.run(x.flatten(0, 1), texts, texts, source, layers=range(layers)).view(x.shape)
        masked = x[:, count:].unflatten(1, (-1, block - 1))
        rows = torch.cat([x[every, pairs[..., None]], masked], 2)  # [batch, contexts, block, dim]
        follows = (after + 1).clamp(max=count)  # the token that a row is after
        logits = heads.biased(decoder.scores(decoder.final(rows)), found.tokens[every, follows])
        own = own_logits(base, final, heads.config.vocabulary)[every, follows]
        return OwnLoss(logits, soft_loss(logits, own))


def blocks(pairs: Int[Tensor, "batch contexts"], count: int, block: int) -> Bool[Tensor, "batch rows rows"]:
    """What each row sees: of the text the rows up to its own, of the masks those of its own block up to itself."""
    batch, contexts = pairs.shape
    text = torch.arange(count, device=pairs.device)
    last = torch.cat([text.expand(batch, -1), pairs.repeat_interleave(block - 1, 1)], 1)
    among = torch.ones(block - 1, block - 1, dtype=torch.bool, device=pairs.device).tril()
    own = torch.block_diag(torch.zeros(count, 0, device=pairs.device), *[among] * contexts).bool()
    return torch.cat([text <= last[..., None], own.expand(batch, -1, -1)], -1)


class Texts:
    """The rows of several texts of one length: they are their own cache, as gradients need what it held before.

    positions: [batch, rows]. visible: [batch, rows, rows]. The layers pass rows one after the other, [batch * rows].
    """

    def __init__(self, positions: Int[Tensor, "batch rows"], visible: Bool[Tensor, "batch rows rows"]) -> None:
        self.positions = self.key_positions = positions
        self.visible, self.count = visible, positions.numel()

    def write(self, layer: int, rows: Texts, keys: Tensor, values: Tensor) -> None:
        """As `KeyValueCache.write`. Only the layer that runs is held."""
        self._written = self._together(keys), self._together(values)

    def attend(
        self, layer: int, rows: Texts, queries: Float[Tensor, "m heads dim"], mask: Tensor, scale: float
    ) -> Float[Tensor, "m features"]:
        """As `KeyValueCache.attend`. mask: [heads, batch, rows, rows]."""
        return self.mixed(queries, *self._written, mask.transpose(0, 1), scale)

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention of each text's rows over its own keys."""
        out = scaled_dot_product_attention(self._together(queries), keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _together(self, rows: Float[Tensor, "m heads dim"]) -> Float[Tensor, "batch heads rows dim"]:
        return rows.view(*self.positions.shape, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class Sources:
    """The sources of these texts. memory: each layer's keys and values, [batch, s, features]. seen: [batch, s]."""

    texts: Texts
    memory: list[list[Tensor]]
    seen: Bool[Tensor, "batch s"]

    def attend(self, layer: int, queries: Float[Tensor, "m heads dim"]) -> Float[Tensor, "m features"]:
        """Attention of decoder rows over their own text's source."""
        keys, values = (
            each.unflatten(2, queries.shape[1:]).transpose(1, 2).to(queries.dtype) for each in self.memory[layer]
        )
        return self.texts.mixed(queries, keys, values, self.seen[:, None, None], scale=1.0)
