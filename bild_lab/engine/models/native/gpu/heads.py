"""The matrix to the vocabulary, or to a part of it, and where its scores go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.gpu.block_matrix import BlockMatrix, ProductWeights
from bild_lab.engine.models.native.gpu.inputs import MAX_ROWS
from bild_lab.engine.models.native.gpu.tilings import power_of_two
from bild_lab.engine.models.native.stack import Stack

MAX_COMPARED_TILES = 4096


@dataclass(frozen=True)
class Head:
    """A matrix to the vocabulary, or to a part of it. tokens: of its outputs, if it is a part."""

    matrix: Float[Tensor, "outputs dim"] | BlockMatrix
    bias: Float[Tensor, " outputs"] | None = None
    tokens: Tensor | None = None

    @property
    def vocab(self) -> int:
        return self.matrix.shape[0]

    @property
    def weights(self) -> ProductWeights:
        return ProductWeights.whole((self.matrix,))


class ScoreBuffers:
    """Where the scores of a forward go, and what each tile says of its own: logits [rows, vocab];
    tile_best, tile_tokens and tile_sums [rows · tiles].
    """

    def __init__(self, vocab: int, tiles: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.logits = zeros(MAX_ROWS, vocab)
        self.tile_best = zeros(MAX_ROWS * tiles)
        self.tile_tokens = zeros(MAX_ROWS * tiles, dtype=torch.int32)
        self.tile_sums = zeros(MAX_ROWS * tiles)
        self.tiles = tiles

    @property
    def compared_tiles(self) -> int:
        """How many tiles a kernel compares at once."""
        return min(MAX_COMPARED_TILES, max(16, power_of_two(self.tiles)))

    @property
    def warps(self) -> int:
        """How many warps a kernel that compares the tiles has."""
        return 16 if self.tiles > 1024 else 4


class Heads:
    """The whole head of a stack, and the heads of draft vocabularies."""

    def __init__(self, stack: Stack) -> None:
        embedding, matrix = stack.embedding, stack.head
        if isinstance(matrix, Tensor):
            matrix = matrix.to(embedding.dtype).contiguous()
        else:
            (matrix,) = matrix
        self._stack = stack
        self._matrix = matrix

    @property
    def vocab(self) -> int:
        return self._matrix.shape[0]

    def of(self, vocabulary: DraftVocabulary | None) -> Head:
        """The head of these tokens; None: the whole head."""
        if vocabulary is None:
            return Head(self._matrix, self._stack.head_bias)
        return vocabulary.cached_for(self, lambda: self._narrow(vocabulary))

    def _narrow(self, vocabulary: DraftVocabulary) -> Head:
        device = self._stack.embedding.device
        if vocabulary.covers_most_of(self.vocab):
            return Head(self._matrix, vocabulary.bias(self.vocab).to(device))
        tokens = vocabulary.tokens.to(device)
        return Head(self._matrix[tokens], tokens=tokens)

    def widened(
        self, values: Float[Tensor, "n outputs"], head: Head, default: float
    ) -> Float[Tensor, "n vocab"]:
        """A copy of numbers for each output, as wide as the whole vocabulary: `default` for all
        other tokens.
        """
        if head.tokens is None:
            return values.clone()
        wide = values.new_full((values.shape[0], self.vocab), default)
        return wide.index_copy_(1, head.tokens, values)
