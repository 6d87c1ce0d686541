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
from bild_lab.engine.models.native.cpu.library import library
from bild_lab.engine.models.native.cpu.panels import PANEL, packed_matrix
from bild_lab.engine.models.native.stack import Weight
from bild_lab.engine.sampling import precise

if TYPE_CHECKING:
    from bild_lab.engine.draft_vocabulary import DraftVocabulary
    from bild_lab.engine.methods.candidate_trees import Layout
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
        """The biases of the tokens 1 to `count` places after the first beyond each context, by the
        text's own.
        """
        places = contexts[..., None] + torch.arange(count, device=contexts.device)
        return self(
            input_ids.gather(1, places.clamp(max=input_ids.shape[1] - 1).flatten(1)).view(
                places.shape
            )
        )

    def draft(
        self, scores: Float[Tensor, "depth vocab"], last: int, layout: Layout
    ) -> Int[Tensor, " n"]:
        """The tree's tokens: below each the most likely by its depth's scores and its own bias.
        last: committed.
        """
        tokens = layout.picks.new_full((len(layout.above) + 1,), last)  # of every row
        for own, (parents, picks, rows, widest) in zip(scores, layout.levels, strict=False):
            # [parents, vocab]
            biased = precise(own) + precise(self(tokens.index_select(0, parents)))
            tokens[rows] = biased.topk(widest).indices.flatten().index_select(0, picks)
        return tokens[1:]


class PackedMarkov:
    """A Markov head by the kernels: a tree is one call."""

    def __init__(self, markov: MarkovHead) -> None:
        (vocabulary, rank), self._library = markov.after.shape, library()
        before, after = (
            pad(each, (0, -rank % PANEL))
            for each in (markov.before.float() * markov.scale, markov.after)
        )
        matrix, *held = packed_matrix(Weight(after))
        self.before, self._held, half = (
            before[:, :rank],
            (before, matrix, held),
            markov.after.dtype == torch.bfloat16,
        )
        places = {"before": before.data_ptr(), "after": addressof(matrix)}
        self._markov = c.Markov(
            vocab=vocabulary, half=half, stride=before.shape[1], known=len(before), **places
        )

    def draft(
        self, scores: Float[Tensor, "depth vocab"], last: int, layout: Layout
    ) -> Int[Tensor, " n"]:
        """As `MarkovHead.draft`."""
        tokens, given = (
            torch.empty(len(layout.above), dtype=torch.long),
            scores.float().contiguous(),
        )
        sizes, nodes = (
            (len(tokens), last, torch.get_num_threads(), tokens.data_ptr()),
            layout.numbers,
        )
        if self._library.draft_by_parents(
            byref(self._markov), given.data_ptr(), nodes.data_ptr(), *sizes
        ):
            raise IndexError(
                f"token {last} is none of the {len(self.before)} that a Markov head knows"
            )
        return tokens


class NarrowMarkov:
    """A Markov head over a part of the vocabulary: a small one, whose last row is that of the token
    committed last.
    """

    def __init__(
        self, target: LoadedModel, markov: MarkovHead, vocabulary: DraftVocabulary
    ) -> None:
        self._whole, self._tokens, small = (
            markov,
            vocabulary.tokens,
            MarkovHead(0, 0, scale=markov.scale),
        )
        small.before = nn.Parameter(
            pad(markov.before[self._tokens], (0, 0, 0, 1)), requires_grad=False
        )
        small.after = nn.Parameter(markov.after[self._tokens], requires_grad=False)
        self._small = markov_for_engine(target, small)
        # the kernels' rows have it
        self._factor = 1.0 if isinstance(self._small, MarkovHead) else markov.scale

    def draft(
        self, scores: Float[Tensor, "depth part"], last: int, layout: Layout
    ) -> Int[Tensor, " n"]:
        """As `MarkovHead.draft`, of the part's scores."""
        self._small.before[-1] = self._whole.before[last] * self._factor
        return self._tokens[self._small.draft(scores, len(self._tokens), layout)]


AnyMarkov = MarkovHead | PackedMarkov | NarrowMarkov


def markov_for_engine(
    target: LoadedModel, markov: MarkovHead | None, vocabulary: DraftVocabulary | None = None
) -> AnyMarkov | None:
    """What drafts with it on the target's engine. vocabulary: the only tokens that it drafts; None:
    all.
    """
    if markov is not None and vocabulary is not None:
        return NarrowMarkov(target, markov, vocabulary)
    return PackedMarkov(markov) if markov is not None and target.engine == "kernels" else markov
