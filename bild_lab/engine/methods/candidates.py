"""Drafters that know candidates for several positions ahead, and draft a tree of them:

Medusa's heads, BiTA's masks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Self

from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.bita import BitaAdapter
from bild_lab.engine.methods.candidate_trees import (
    GROWTHS,
    Layout,
    ProbedTree,
    TokenTrees,
    TreeFile,
    candidate_widths,
    efficient_tree,
    read_trees,
    trees_by_depth,
)
from bild_lab.engine.methods.markov import markov_for_engine
from bild_lab.engine.methods.medusa import MedusaHeads
from bild_lab.engine.models.head_bias import head_bias
from bild_lab.engine.models.native.cpu import PackedHeads
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.sampling import precise
from bild_lab.engine.session import LoadedModel, OutputSpec, Scores, Session
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, require_whole

STRAIGHTFORWARD = "straightforward"


class CandidateDrafter(Drafter):
    """Drafts a tree of candidates, which do not depend on the path that leads to them, or with a
    Markov head on the token before them alone.

    candidates: [depth, widest], the most likely tokens of the positions after the text so far; with
    a Markov head their logits without its bias, [depth, vocab], of a draft vocabulary's tokens
    where there is one; None: not known yet.
    max_depth: for how many positions there can be candidates. max_probes: how many probes can
    follow a row, 0 for drafters without probes. choices: how many tokens can be candidates.
    """

    drafts_trees = True

    def __init__(
        self,
        target: LoadedModel,
        heads: MedusaHeads | BitaAdapter,
        tree: TreeFile,
        top_k: int | Sequence[int],
        max_depth: int,
        max_probes: int = 0,
    ) -> None:
        self.max_depth, self.max_probes, self._draft_vocabulary = (
            max_depth,
            max_probes,
            heads.draft_vocabulary,
        )
        self.candidates: Tensor | None = None
        self.markov = markov_for_engine(target, heads.markov, heads.draft_vocabulary)
        self._vocabulary, self._device = target.checkpoint.config.vocab_size, target.device
        self.choices = (
            self._vocabulary if heads.draft_vocabulary is None else len(heads.draft_vocabulary)
        )
        trees = named_trees(tree, top_k, max_depth, max_probes, self.choices)
        self._trees = TokenTrees(trees, self._vocabulary, self._device)

    def drafting(self, trees: Sequence[ProbedTree], widest: int | None = None) -> Self:
        """The same drafter with other trees. widest: how many candidates to find at each depth."""
        drafter = copy.copy(self)
        drafter._trees = TokenTrees(trees, self._vocabulary, self._device, widest)
        return drafter

    def begin(self, request: Request, target: Session) -> None:
        self._limits = request.limits
        self.candidates = None

    def propose(self, tokens: list[int]) -> Draft:
        room, reach = self._limits.room(tokens), self._limits.reach(tokens)
        depth = 0 if self.candidates is None else min(self.candidates.shape[0], room, reach)
        # a next draft cannot be deeper than the room after the next token, and probes follow the
        # deepest node
        self._layout: Layout = self._trees.layout(
            depth, min(self.max_probes, room - 1, reach - depth)
        )
        return self._trees.draft(self.candidates, self._layout, self.markov, tokens[-1])

    def _named(self, places: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The tokens that have these places in the draft vocabulary."""
        return places if self._draft_vocabulary is None else self._draft_vocabulary.tokens[places]


def named_trees(
    tree: str, top_k: int | Sequence[int], max_depth: int, max_probes: int, vocabulary: int
) -> tuple[ProbedTree, ...]:
    """The trees of a kind's name or of a file. Raises UserError for anything else."""
    if tree == STRAIGHTFORWARD and max_probes:
        return trees_by_depth(efficient_tree, [1] * max_depth, max_depth, everywhere=False)
    if not isinstance(tree, str) or not (tree in GROWTHS or Path(tree).expanduser().is_file()):
        kinds = [*GROWTHS, *([STRAIGHTFORWARD] if max_probes else [])]
        raise UserError(
            f"tree must be one of {', '.join(kinds)} or the file of a fitted tree, got {tree!r}"
        )
    if tree in GROWTHS:
        widths = candidate_widths(top_k, max_depth, vocabulary)
        return trees_by_depth(GROWTHS[tree], widths, min(max_probes, len(widths)))
    return read_trees(tree, max_depth, max_probes, vocabulary)


class MedusaDrafter(CandidateDrafter):
    """A tree of the most likely tokens of each head.

    The heads read the hidden state of the last accepted token, from which the target's own head
    chose the next token. Head i (from 0) predicts the token i + 1 positions after that one. The
    first round drafts nothing.

    Each head's product with its vocabulary matrix is recorded as a forward without layers, that of
    heads with a shared matrix as one; residual blocks and a Markov head are not. Heads beyond the
    tree's depth do not run.

    tree: full_tree (the paper's Cartesian product), efficient_tree or narrowing_tree (BiTA's), or a
    file of `scripts/fit_tree.py`. top_k: candidates of each head, one number or one for each of the
    first heads; not for a file.
    """

    required_outputs = OutputSpec(head_input=True)

    def __init__(
        self, target: LoadedModel, heads: MedusaHeads, tree: TreeFile, top_k: int | Sequence[int]
    ) -> None:
        super().__init__(target, heads, tree, top_k, heads.config.heads)
        self._shared, self._config = heads.config.shared, target.checkpoint.config
        # one for all copies of this drafter
        self._heads = lru_cache(maxsize=1)(partial(candidate_finder, target, heads))
        if not self._shared:  # a shared matrix needs the target's weights
            self._heads()

    def begin(self, request: Request, target: Session) -> None:
        super().begin(request, target)
        self._forwards = target.forwards

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Run the heads on the last accepted token for the next draft's candidates."""
        if not self._trees.widest:
            return
        row = verdict.path[-1] + 1 if verdict.path else 0
        depth, heads, state = self._trees.depth, self._heads(), scores.head_input[row]
        if self.markov is None:
            self.candidates = self._named(heads.most_likely(state, depth, self._trees.widest))
        else:
            self.candidates = heads.scores(state, depth)
        heads_per_forward, size = (
            depth if self._shared else 1,
            None if self._draft_vocabulary is None else self.choices,
        )
        forward = Forward(self._config, rows=0, scored=heads_per_forward, layers=0, vocabulary=size)
        self._forwards += [forward] * (depth // heads_per_forward)


def candidate_finder(target: LoadedModel, heads: MedusaHeads) -> MedusaHeads | PackedHeads:
    """What finds the candidates on the target's engine, of a draft vocabulary by their places in
    it.
    """
    shared, packed = heads.config.shared, target.engine == "kernels"
    if packed and shared and heads.draft_vocabulary is None:
        return PackedHeads(heads.blocks, heads.biases, target.packed)
    outputs = target.vocabulary_weights()[1][None] if shared else heads.outputs
    bias = head_bias(target.checkpoint, heads.blocks.dtype, target.device)
    if heads.draft_vocabulary is not None:
        outputs, bias = outputs[:, heads.draft_vocabulary.tokens], None
    if packed:
        return PackedHeads(heads.blocks, heads.biases, outputs, bias)
    attached = copy.copy(heads).attach(outputs)
    attached.bias = bias
    return attached


class MaskTokenDrafter(CandidateDrafter):
    """Streamlined generation and verification (BiTA §3.2, Appendix B, Algorithm 1), for a
    `BitaTarget`.

    Every forward runs the last committed token, the draft, and groups of masks. Take the group
    after the last accepted token. Its mask j (from 0) predicts the token j + 2 positions ahead; the
    target's own next token is 1 ahead. The most likely tokens of each mask are the candidates of
    the next draft. The first forward has no draft, and one group after the prompt.

    tree: efficient_tree (Figure 5) extends only each depth's most likely candidate; narrowing_tree
    is the same with one candidate fewer at each depth; full_tree extends every candidate. All have
    a group of masks after every token. straightforward (Figure 4) drafts a chain of each mask's
    most likely token, with a single group after the last committed token. A file of
    `scripts/fit_tree.py` has a tree for each number of candidates, and says after which tokens
    masks run, and how many.
    top_k: candidates of each mask, one number or one for each mask; straightforward always uses 1.
    adapter: of its weights the target runs all but those of a Markov head.
    mask_tokens: use only this many of the adapter's masks, from the first; None: all, or as many as
    there are widths.
    """

    hybrid_places = ()

    def __init__(
        self,
        target: LoadedModel,
        adapter: BitaAdapter,
        tree: TreeFile,
        top_k: int | Sequence[int],
        mask_tokens: int | None = None,
    ) -> None:
        trained_masks = adapter.config.mask_tokens
        masks = trained_masks if mask_tokens is None else mask_tokens
        require_whole(
            "mask_tokens", masks, 1, trained_masks, f"null uses all {trained_masks} of the adapter"
        )
        self._straight = tree == STRAIGHTFORWARD
        super().__init__(target, adapter, tree, top_k, masks, masks)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Take the next draft's candidates from the masks after the last accepted token."""
        accepted = len(verdict.path)
        row = 0 if self._straight or not accepted else verdict.path[-1] + 1
        first_probe, count = self._layout.groups[row]
        logits = scores.logits[
            first_probe + (accepted if self._straight else 0) : first_probe + count
        ]
        logits = (
            logits if self._draft_vocabulary is None else logits[:, self._draft_vocabulary.tokens]
        )
        if self._trees.widest and self.markov is None:
            logits = self._named(precise(logits).topk(self._trees.widest).indices)
        self.candidates = logits if self._trees.widest else None
