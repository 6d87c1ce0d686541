"""A Markov head: a bias on the next token's logits by the token before it, of low rank (DSpark,
2607.05147).

Heads and masks predict tokens further ahead without seeing those between; this tells each candidate
its parent.
"""

from __future__ import annotations

from ctypes import addressof, byref
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from bild_lab.engine.models.native.cpu import structures as c
from bild_lab.engine.models.native.cpu.library import library, runs_by_cpu_kernels
from bild_lab.engine.models.native.cpu.panels import PANEL, packed_matrix
from bild_lab.engine.models.native.stack import Weight
from bild_lab.engine.sampling import precise

if TYPE_CHECKING:
    from bild_lab.engine.draft_vocabulary import DraftVocabulary
    from bild_lab.engine.methods.candidate_trees import TreeLayout
    from bild_lab.engine.session import LoadedModel


class MarkovHead(nn.Module):
    """The bias scale · before[token] · after^T. after starts at zero: an untrained head changes
    nothing.

    scale: smaller where the learning rate is larger, as Adam's steps do not depend on the
    gradient's size.
    """

    def __init__(self, vocabulary: int, rank: int, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        generator = torch.Generator().manual_seed(seed)
        self.before = nn.Parameter(torch.randn(vocabulary, rank, generator=generator))
        self.after = nn.Parameter(torch.zeros(vocabulary, rank))

    def forward(self, tokens: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows vocab"]:
        return self.before[tokens] @ self.after.mT * self.scale

    def along(
        self, input_ids: Int[Tensor, "batch n"], contexts: Int[Tensor, "batch contexts"], count: int
    ) -> Float[Tensor, "batch contexts count vocab"]:
        """The biases of the tokens 1 to `count` positions after the first beyond each context, by
        the text's own tokens.
        """
        positions = contexts[..., None] + torch.arange(count, device=contexts.device)
        last_position = input_ids.shape[1] - 1
        tokens = input_ids.gather(1, positions.clamp(max=last_position).flatten(1))
        return self(tokens.view(positions.shape))

    def draft(
        self, scores: Float[Tensor, "depth vocab"], last_token: int, layout: TreeLayout
    ) -> Int[Tensor, " n"]:
        """The tree's tokens: below each token the most likely ones by the depth's scores and the
        token's bias. last_token: the last committed token.
        """
        row_count = 1 + len(layout.nodes)
        tokens = layout.picks.new_full((row_count,), last_token)
        for level_scores, level in zip(scores, layout.levels, strict=False):
            biases = self(tokens.index_select(0, level.parent_rows))  # [parents, vocab]
            biased = precise(level_scores) + precise(biases)
            candidates = biased.topk(level.width).indices
            tokens[level.rows] = candidates.flatten().index_select(0, level.picks)
        return tokens[1:]


class PackedMarkov:
    """A Markov head by the kernels: a tree is one call."""

    def __init__(self, markov: MarkovHead) -> None:
        vocabulary_size, rank = markov.after.shape
        padding = (0, -rank % PANEL)
        before = pad(markov.before.float() * markov.scale, padding)
        after, *after_buffers = packed_matrix(Weight(pad(markov.after, padding)))
        self.before = before[:, :rank]
        self._library = library()
        self._buffers = (before, after, after_buffers)  # the structure below points into them
        self._markov = c.Markov(
            vocab=vocabulary_size,
            half=markov.after.dtype == torch.bfloat16,
            stride=before.shape[1],
            known=len(before),
            before=before.data_ptr(),
            after=addressof(after),
        )

    def draft(
        self, scores: Float[Tensor, "depth vocab"], last_token: int, layout: TreeLayout
    ) -> Int[Tensor, " n"]:
        """As `MarkovHead.draft`. Raises IndexError for a token that the head does not know."""
        scores = scores.float().contiguous()
        tokens = torch.empty(len(layout.nodes), dtype=torch.long)
        failed = self._library.draft_by_parents(
            byref(self._markov),
            scores.data_ptr(),
            layout.kernel_nodes.data_ptr(),
            len(tokens),
            last_token,
            torch.get_num_threads(),
            tokens.data_ptr(),
        )
        if failed:
            raise IndexError(
                f"token {last_token} is none of the {len(self.before)} that a Markov head knows"
            )
        return tokens


class NarrowMarkov:
    """A Markov head over a draft vocabulary: a small one, whose last row is that of the token
    committed last.
    """

    def __init__(
        self, target: LoadedModel, markov: MarkovHead, vocabulary: DraftVocabulary
    ) -> None:
        self._full = markov
        self._tokens = vocabulary.tokens
        small = MarkovHead(0, 0, scale=markov.scale)
        before = pad(markov.before[self._tokens], (0, 0, 0, 1))
        small.before = nn.Parameter(before, requires_grad=False)
        small.after = nn.Parameter(markov.after[self._tokens], requires_grad=False)
        self._small = markov_for_engine(target, small)
        # the rows of `PackedMarkov` are scaled already
        self._row_scale = 1.0 if isinstance(self._small, MarkovHead) else markov.scale

    def draft(
        self, scores: Float[Tensor, "depth tokens"], last_token: int, layout: TreeLayout
    ) -> Int[Tensor, " n"]:
        """As `MarkovHead.draft`, by the scores of the draft vocabulary."""
        self._small.before[-1] = self._full.before[last_token] * self._row_scale
        last_row = len(self._tokens)
        return self._tokens[self._small.draft(scores, last_row, layout)]


AnyMarkov = MarkovHead | PackedMarkov | NarrowMarkov


def markov_for_engine(
    target: LoadedModel, markov: MarkovHead | None, vocabulary: DraftVocabulary | None = None
) -> AnyMarkov | None:
    """The head as it drafts on the target's engine. vocabulary: the only tokens that it drafts;
    None: all.
    """
    if markov is None:
        return None
    if vocabulary is not None:
        return NarrowMarkov(target, markov, vocabulary)
    if runs_by_cpu_kernels(target, markov.after.dtype):
        return PackedMarkov(markov)
    return markov
