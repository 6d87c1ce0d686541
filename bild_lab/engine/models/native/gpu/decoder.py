"""Decoders by the Triton kernels: a forward of up to 64 rows is one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.gpu.chains import ChainPrograms
from bild_lab.engine.models.native.gpu.graphs import GraphCache
from bild_lab.engine.models.native.gpu.inputs import MAX_ROWS, MAX_TREE
from bild_lab.engine.models.native.gpu.plan import (
    CHUNK,
    ForwardPlan,
    Head,
    PassShape,
    ScoreBuffers,
)
from bild_lab.engine.models.native.gpu.tilings import power_of_two
from bild_lab.engine.models.native.packed_pass import PackedScores, SequenceSlice
from bild_lab.engine.models.native.stack import Stack, numbers_of
from bild_lab.engine.session import NOTHING, ChainResult, ChainSpec, GrownTree, Skipped, TreeSpec

# other numbers of rows are padded up to the next of these: few graphs serve all
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class TritonDecoder:
    """Runs a stack of layers by the Triton kernels; as `KernelDecoder`.

    The weights stay as the stack holds them. Passes of more rows than a forward has run as several
    forwards, and a row has the same bits in either.
    """

    runs_prompts = measures_exits = False

    def __init__(self, stack: Stack) -> None:
        device = stack.embedding.device
        on_gpu = device.type == "cuda"
        self.stack = stack
        self.plan = ForwardPlan(
            stack, torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        )
        self.graphs = GraphCache(stack.embedding.device)
        self._head = Head(numbers_of(stack.head, stack.embedding.dtype).contiguous())
        self._scores: dict[int, ScoreBuffers] = {}
        self._masks: Tensor | None = None
        self._chains = ChainPrograms(self)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.plan.dtype

    @property
    def vocab(self) -> int:
        return self._head.vocab

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self.plan.cos.shape[1] if self.plan.rotary else float("inf")

    def rotate_by(
        self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]
    ) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""
        self.plan.cos, self.plan.sin = cos.float().contiguous(), sin.float().contiguous()
        self.graphs.clear()

    def read_weights(self) -> None:
        """Read every weight that a token needs, once, and do nothing else."""
        for layer in self.stack.layers:
            for weight in (layer.qkv, layer.out, layer.inner, layer.outer):
                weight.matrix.view(torch.int16).sum()
        self._head.weights.view(torch.int16).sum()

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
        """As `KernelDecoder.run`, without an exit threshold."""
        if exit_threshold is not None:
            raise ValueError("the Triton kernels measure no exits")
        shape = PassShape(
            rows=0,
            scored=0,
            tiles=0,
            chunks=0,
            source_chunks=0,
            layers=tuple(range(len(self.stack.layers)) if layers is None else layers),
            from_states=states is not None,
            has_prefix=any(text.reserved for text in texts),
            masks=self._remembered(masks),
            fill=fill,
            hidden=hidden,
            skipped=skipped,
            vocabulary=vocabulary,
        )
        parts = []
        start = 0
        for part in forwards_of(texts):
            count = sum(text.count for text in part)
            part_states = None if states is None else states[start : start + count]
            parts.append(
                self._forward(shape, tokens[start : start + count], part, part_states, reads)
            )
            start += count
        if len(parts) == 1:
            return parts[0]
        return PackedScores(
            *(
                joined_tensors([getattr(part, name) for part in parts], axis)
                for name, axis in (("logits", 0), ("head_input", 0), ("hidden", 1))
            )
        )

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        chains: Sequence[ChainSpec],
    ) -> Sequence[ChainResult | None]:
        """As `KernelDecoder.draft`."""
        return self._chains.draft(tokens, texts, chains)

    def grow(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        tree_specs: Sequence[TreeSpec],
    ) -> Sequence[GrownTree | None]:
        """None: a tree grows by one forward after another."""
        return [None] * len(texts)

    def head_of(self, vocabulary: DraftVocabulary | None) -> Head:
        """The head of these tokens; None: the whole head."""
        bias = self.stack.head_bias
        if vocabulary is None:
            return Head(self._head.weights, bias)
        return vocabulary.cached_for(self, lambda: self._narrow_head(vocabulary))

    def _narrow_head(self, vocabulary: DraftVocabulary) -> Head:
        last_token = int(vocabulary.tokens[-1])
        if last_token >= min(self.vocab, self.plan.known):
            raise IndexError(f"a draft vocabulary names token {last_token} of {self.plan.known}")
        weights = self._head.weights
        tokens = vocabulary.tokens.to(weights.device)
        if vocabulary.covers_most_of(self.vocab):
            # the whole head, without the other tokens' scores
            zeros = torch.zeros(1, len(vocabulary))
            bias = vocabulary.widened(zeros, self.vocab, float("-inf"))[0]
            return Head(weights, bias.to(weights.device))
        return Head(weights[tokens].contiguous())

    def scores_of(self, head: Head) -> ScoreBuffers:
        """Where the scores of this head go."""
        if head.vocab not in self._scores:
            self._scores[head.vocab] = ScoreBuffers.for_head(head, self.plan)
        return self._scores[head.vocab]

    def sized(self, shape: PassShape, texts: Sequence[SequenceSlice], tiles: int) -> PassShape:
        """A shape with room for these texts' rows.

        Raises IndexError for a row that its cache, or the rotations, cannot hold.
        """
        rows = sum(text.count for text in texts)
        stop = max(text.start + text.count for text in texts)
        for text in texts:
            require_room(text, self.positions)
        sources = [text.memory[0].shape[2] for text in texts if text.memory is not None]
        return replace(
            shape,
            rows=padded(rows),
            scored=padded(sum(text.scored for text in texts)),
            tiles=power_of_two(tiles),
            chunks=power_of_two(-(-stop // CHUNK)),
            source_chunks=power_of_two(-(-max(sources, default=1) // CHUNK)),
        )

    def _forward(
        self,
        shape: PassShape,
        tokens: Int[Tensor, " m"],
        texts: Sequence[SequenceSlice],
        states: Float[Tensor, "m dim"] | None,
        reads: bool,
    ) -> PackedScores:
        """One forward of at most MAX_ROWS rows."""
        plan, inputs = self.plan, self.plan.inputs
        rows = sum(text.count for text in texts)
        scored = sum(text.scored for text in texts)
        tiles = inputs.fill(texts)
        inputs.tokens[:rows].copy_(tokens)
        if states is not None:
            plan.buffers.states[:rows].copy_(states)
        shape = self.sized(shape, texts, tiles)
        head = self.head_of(shape.vocabulary)
        scores = self.scores_of(head)
        self.graphs.run(shape, lambda: plan.launches(shape, head, scores, self._masks))
        logits = head_input = hidden = None
        if scored:
            logits = self.widened(scores.logits[:scored], shape.vocabulary)
            if reads:
                head_input = self._head_input(texts)
        if shape.hidden:
            hidden = plan.buffers.hidden[len(shape.layers)][:, :rows].clone()
        return PackedScores(logits, head_input, hidden)

    def widened(
        self,
        logits: Float[Tensor, "n part"],
        vocabulary: DraftVocabulary | None,
        default: float = float("-inf"),
    ) -> Float[Tensor, "n vocab"]:
        """A copy of these scores, as wide as the whole vocabulary."""
        if vocabulary is None or logits.shape[1] == self.vocab:
            return logits.clone()
        return vocabulary.widened(logits, self.vocab, default)

    def _head_input(self, texts: Sequence[SequenceSlice]) -> Float[Tensor, "scored dim"]:
        """The last rows of the stream after the final norm."""
        stack, ends, row = self.stack, [], 0
        for text in texts:
            row += text.count
            ends.append(self.plan.buffers.x[row - text.scored : row])
        stream = torch.cat(ends)
        normed = rms_norm(stream, stream.shape[1:], stack.final_norm.float(), stack.epsilon)
        return normed * stack.final_scale

    def _remembered(self, masks: Tensor | None) -> int | None:
        """The address of these masks, which a graph reads."""
        if masks is None:
            return None
        if self._masks is None or self._masks.data_ptr() != masks.data_ptr():
            self._masks = masks
            self.graphs.clear()
        return masks.data_ptr()


def forwards_of(texts: Sequence[SequenceSlice]) -> Iterator[list[SequenceSlice]]:
    """The texts' rows in order, in as few forwards as have room for them."""
    part: list[SequenceSlice] = []
    free = MAX_ROWS
    for text in texts:
        rest = text
        while rest.count:
            if not free:
                yield part
                part, free = [], MAX_ROWS
            first, rest = cut_slice(rest, min(rest.count, free))
            part.append(first)
            free -= first.count
    if part:
        yield part


def cut_slice(text: SequenceSlice, count: int) -> tuple[SequenceSlice, SequenceSlice]:
    """The first `count` rows of a text's, and those after them."""
    after = text.count - count
    parents = text.parents
    if parents is not None:
        if parents.shape[0] > MAX_TREE:
            raise ValueError(f"a tree has {parents.shape[0]} rows, and the kernels see {MAX_TREE}")
        parents = parents[: parents.shape[0] - after]
    first = text._replace(count=count, scored=max(0, text.scored - after), parents=parents)
    second = text._replace(count=after, start=text.start + count, scored=min(text.scored, after))
    return first, second


def require_room(text: SequenceSlice, positions: float) -> None:
    """Raise IndexError if a cache has no slot for these rows, or the rotations no position."""
    stop = text.start + text.count
    if stop > text.cache.capacity:
        raise IndexError(f"slot {stop - 1} lies behind a cache of {text.cache.capacity} slots")
    if stop - text.reserved > positions:
        raise IndexError(f"position {stop - text.reserved - 1} lies behind {positions} rotations")


def padded(count: int) -> int:
    """The padded number of rows of a forward."""
    return next((rows for rows in ROW_COUNTS if rows >= count), count) if count else 0


def joined_tensors(tensors: Sequence[Tensor | None], axis: int) -> Tensor | None:
    """These tensors as one, those that are missing left out; None without any."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, axis) if present else None
