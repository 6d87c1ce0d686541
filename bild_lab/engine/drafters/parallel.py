"""Drafts a block of tokens in one pass of a few layers over masks: after DFlash and DSpark, for encoder–decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.drafters.model_tree import growth_of_round
from bild_lab.engine.drafters.state_trees import StateSession, StateTreeDrafter
from bild_lab.engine.drafters.trees import ProbedTree, TokenTrees
from bild_lab.engine.heads.markov import AnyMarkov, on_engine
from bild_lab.engine.heads.parallel import ParallelDecoder, ParallelHeads
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.head_bias import head_bias
from bild_lab.engine.models.native.cpu import PackedDecoder
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.models.native.t5 import Memory
from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import EVERYTHING, Rows, Scores, Session, Want, as_rows, on_device


class Made(NamedTuple):
    """What all texts share. packed: the layers for a target on the kernels. trees: a static tree, by depth."""

    decoder: ParallelDecoder
    packed: PackedDecoder | None
    markov: AnyMarkov | None
    trees: TokenTrees | None


class ParallelDrafter(StateTreeDrafter):
    """A tree whose levels are the places of a block: one pass scores all of them, the Markov bias each branch.

    Beside a target on the kernels these run the pass too. It is recorded as that of a T5 of so many layers; the bias is
    far smaller and not recorded. A window longer than the block is cut to it.
    """

    _heads: ParallelHeads

    @property
    def longest(self) -> int:
        return self._heads.config.block

    def reads(self) -> Want:
        return Want(head_input=True, prompt=True)

    @cached_property
    def _made(self) -> Made:
        decoder = ParallelDecoder(self._heads, self._target.checkpoint.config, *self._target.vocabulary_weights())
        decoder.head_bias = head_bias(self._target.checkpoint, self._target.dtype, self._target.device)
        packed, trees = PackedDecoder(decoder) if self._target.engine == "kernels" else None, None
        if self._static is not None:
            cuts = (tuple(self._static.cut(depth)) for depth in range(self._growth.depth + 1))
            probed = [ProbedTree(nodes, (0,) * (1 + len(nodes))) for nodes in cuts]
            trees = TokenTrees(probed, self._heads.config.vocabulary, self._target.device)
        return Made(decoder, packed, on_engine(self._target, self._heads.markov, self._heads.part), trees)

    def prepare(self, request: Request) -> None:
        """Make these here and not in the copy of a text."""
        _ = self._made

    def opened(self, request: Request, target: Session) -> ParallelSession:
        return ParallelSession(self._heads, self._made, target, request.limits.max_new_tokens)

    def states(self, scores: Scores) -> Float[Tensor, "m dim"]:
        return scores.head_input

    def propose(self, tokens: list[int]) -> Draft:
        markov, trees, session = self._made.markov, self._made.trees, self._session
        depth = growth_of_round(self._growth, self._request, tokens).depth
        session.depth = max(1, depth)
        if trees is None or depth < 1 or not session.ready:
            draft = super().propose(tokens)
            return replace(draft, calls=min(1, draft.calls))  # all levels are of one forward
        scores = session.score(tokens[session.length :])
        part = self._heads.part
        if markov is None:
            candidates = scores.topk(trees.widest).indices
        else:
            candidates = scores if part is None else scores[:, part.tokens]
        draft = trees.draft(candidates, trees.layout(depth), markov, tokens[-1])
        return Draft(draft.tokens, calls=1) if self._chain else replace(draft, calls=1)


class ParallelSession(StateSession):
    """One text in a parallel drafter: the scores of a block, and how deep the tree over it has grown.

    depth: how many tokens of a block are scored: no mask sees a later one.
    """

    def __init__(self, heads: ParallelHeads, made: Made, target: Session, room: int) -> None:
        self._heads, self._decoder, self._target, self._level = heads, made.decoder, target, 0
        self._layers = NativeLayers(made.decoder, Source((0,)), room + heads.config.block, packed=made.packed)
        self._session = CachedSession(self._layers, (0,), target.forwards)
        self._received, self.depth = [], heads.config.block

    @property
    def length(self) -> int:
        return self._session.length + 1

    def receive(self, states: Float[Tensor, "m dim"]) -> None:
        self._received.append(states.to(self._heads.fuse.dtype))

    @torch.inference_mode()
    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        rows = as_rows(rows)
        tokens = on_device(rows.tokens, self._layers.device)
        if rows.tree is None:
            return Scores(self._heads.biased(self.score(tokens)[:1], tokens[-1:]))
        self._level += 1
        return Scores(self._heads.biased(self._block[self._level].expand(tokens.shape[0], -1), tokens))

    @torch.inference_mode()
    def score(self, fed: Sequence[int] | Int[Tensor, " m"]) -> Float[Tensor, "depth vocab"]:
        """The scores of a block's first places after these tokens of the text, without the Markov head's bias."""
        tokens = on_device(fed, self._layers.device)
        heads, session = self._heads, self._session
        if not self._layers.source:
            memory = Memory(*self._target.memory(heads.config.layers))
            self._layers.memory, self._layers.source = (memory,), memory.keys.shape[2]
        kept, states = session.length + tokens.shape[0], torch.cat(self._received)
        inputs = torch.cat([heads.rows(states, self._decoder.embed(tokens)), heads.masks[: self.depth - 1]])
        want = Want(logits=self.depth, layers=range(heads.config.layers), vocabulary=heads.part)
        self._block = session.extend(Rows([0] * inputs.shape[0], states=inputs), want).logits
        session.rollback(kept)
        self._received, self._level = [], 0
        return self._block
