"""What the kernels of a CPU and those of a GPU have in common: a pass's rows, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.session import NOTHING, Drafted, DraftSpec, Skipped


class SequenceSlice(NamedTuple):
    """A pass's rows of one text: `count` rows at the cache's slots from `start` on.

    scored: for how many of the last rows there are logits.
    memory: cross-attention keys and values, each [layers heads s dim].
    parents: of a tree, whose last rows these are, as in `Tree`; None: a chain.
    reserved: slots of a prefix.
    """

    count: int
    start: int
    cache: KeyValueCache
    memory: tuple[Tensor, Tensor] | None = None
    scored: int = 0
    parents: Int[Tensor, " tree"] | None = None
    reserved: int = 0


@dataclass(frozen=True)
class PackedScores:
    """What a pass gives, in float32.

    logits, head_input: of the scored rows of every text, in order.
    hidden: of every layer that ran, if requested.
    layers_run: how many, with an exit threshold.
    """

    logits: Float[Tensor, "scored vocab"] | None
    head_input: Float[Tensor, "scored dim"] | None
    hidden: Float[Tensor, "layers m dim"] | None
    layers_run: int | None = None


class KernelDecoder(Protocol):
    """Runs a stack of layers by kernels of its own: C++ on a CPU, Triton on a GPU.

    A row's results are the same to the last bit whatever rows run beside it, of its own text or of
    others: each sum has one order. So the texts of a batch are those of batch 1 in every precision.

    runs_prompts: long prompts too; else PyTorch runs them.
    least_positions: that the rotations have.
    captures: how many graphs were made so far, each of which takes time.
    """

    runs_prompts: bool
    least_positions: int
    captures: int

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""

    def buffer_bytes(self, slots: int) -> int:
        """How many bytes its buffers may take beside those that it holds from the beginning, for
        texts of at most so many slots.
        """

    def rotate_by(
        self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]
    ) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""

    def run(
        self,
        tokens: Int[Tensor, " m"],
        texts: Sequence[SequenceSlice],
        *,
        states: Float[Tensor, "m dim"] | None = None,
        masks: Float[Tensor, "masks dim"] | None = None,
        reads: bool = False,
        layers: Sequence[int] | None = None,
        hidden: bool = False,
        fill: bool = False,
        skipped: Skipped = NOTHING,
        exit_threshold: float | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> PackedScores:
        """Run the rows of several texts, one text after the other.

        states: what the first layer reads; None: the tokens' embeddings.
        masks: embeddings of the token ids beyond the vocabulary, in the precision of the weights.
            Their rows alone see a prefix.
        reads: give the head's input too.
        layers: indices; None: all.
        fill: only the keys and values of these layers, each from the same states.
        skipped: blocks that are left out.
        exit_threshold: one row leaves after the first layer but the last whose output's cosine with
            its input is larger; the other layers compute only its keys and values, from that
            output.
        vocabulary: the tokens that the head scores, all others get −inf; None: all.
        """

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        specs: Sequence[DraftSpec],
    ) -> Sequence[Drafted | None]:
        """Run the rows of each text and a chain or a tree after them, in one call, side by side; None
        for a text that has no program, whoever stands beside it.

        All are chains of the same layers, or all trees, and of one vocabulary.
        """
