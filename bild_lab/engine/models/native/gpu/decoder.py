"""Decoders by the Triton kernels: a forward of up to 64 rows is one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.cached_session import concatenated
from bild_lab.engine.models.native.gpu.block_matrix import bytes_of
from bild_lab.engine.models.native.gpu.chains import ChainPrograms
from bild_lab.engine.models.native.gpu.graphs import GraphCache
from bild_lab.engine.models.native.gpu.inputs import MAX_ROWS, MAX_TREE
from bild_lab.engine.models.native.gpu.plan import ForwardPlan, PassShape
from bild_lab.engine.models.native.gpu.trees import TreePrograms
from bild_lab.engine.models.native.packed_pass import PackedScores, SequenceSlice
from bild_lab.engine.models.native.stack import Stack
from bild_lab.engine.session import NOTHING, Drafted, DraftSpec, Skipped, TreeSpec


class TritonDecoder:
    """Runs a stack of layers by the Triton kernels; as `KernelDecoder`.

    The weights stay as the stack holds them. Passes of more rows than a forward has run as several
    forwards, and a row has the same bits in either. Passes share buffers, so one runs at a time,
    whatever threads or streams they come from.
    """

    runs_prompts = False
    least_positions = 4096  # graphs read the rotations, so these rarely grow

    def __init__(self, stack: Stack) -> None:
        device = stack.embedding.device
        on_gpu = device.type == "cuda"
        self.stack = stack
        self.plan = ForwardPlan(
            stack, torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
        )
        self.graphs = GraphCache(stack.embedding.device)
        self._masks: Tensor | None = None
        self._lock = Lock()
        self._stream: torch.cuda.Stream | None = None  # of the last pass
        self._chains = ChainPrograms(self.plan, self.graphs)
        self._trees = TreePrograms(self.plan, self.graphs)

    @property
    def weight_bytes(self) -> int:
        """The size of all weights that a token's forward reads, without keys and values."""
        total = bytes_of(self.stack.head)
        for layer in self.stack.layers:
            total += sum(bytes_of(weight.matrix) for weight in layer.weights.values())
        return total

    @property
    def captures(self) -> int:
        """How many graphs were made so far."""
        return self.graphs.made

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self.plan.positions

    def buffer_bytes(self, slots: int) -> int:
        """As `KernelDecoder.buffer_bytes`."""
        return self.plan.buffer_bytes(slots)

    def rotate_by(
        self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]
    ) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""
        with self._alone():
            self.plan.cos, self.plan.sin = cos.float().contiguous(), sin.float().contiguous()
            self.graphs.clear()

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
        """As `KernelDecoder.run`. With an exit threshold the host waits for the layers' number."""
        scores_by_forward = []
        start = 0
        with self._alone():
            if exit_threshold is not None:
                self.plan.buffers.exit_threshold.fill_(exit_threshold)
            shape = PassShape.unsized(
                range(len(self.stack.layers)) if layers is None else layers,
                from_states=states is not None,
                has_prefix=any(text.reserved for text in texts),
                masks=self._remembered(masks),
                fill=fill,
                hidden=hidden,
                skipped=skipped,
                vocabulary=vocabulary,
                exits=exit_threshold is not None,
            )
            for slices in forwards_of(texts):
                rows = slice(start, start + sum(text.count for text in slices))
                row_states = None if states is None else states[rows]
                scores = self._forward(shape, tokens[rows], slices, row_states, reads)
                scores_by_forward.append(scores)
                start = rows.stop
        if len(scores_by_forward) == 1:
            return scores_by_forward[0]
        return PackedScores(
            logits=concatenated([scores.logits for scores in scores_by_forward]),
            head_input=concatenated([scores.head_input for scores in scores_by_forward]),
            hidden=concatenated([scores.hidden for scores in scores_by_forward], axis=1),
        )

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        specs: Sequence[DraftSpec],
    ) -> Sequence[Drafted | None]:
        """As `KernelDecoder.draft`."""
        programs = self._trees if isinstance(specs[0], TreeSpec) else self._chains
        with self._alone():
            return programs.draft(tokens, texts, specs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other pass runs meanwhile: a thread waits for the others, and a stream for the last
        one that ran a pass. The model's GPU is the current one, where kernels and graphs run.
        """
        with self._lock:
            if self.plan.device.type != "cuda":
                yield
                return
            with torch.cuda.device(self.plan.device):
                stream = torch.cuda.current_stream()
                if self._stream is not None and stream != self._stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
                yield

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
        shape = plan.sized(shape, texts, tiles)
        self.graphs.run(shape, lambda: plan.launches(shape, self._masks))
        logits = head_input = hidden = None
        if scored:
            head = plan.heads.of(shape.vocabulary)
            scores = plan.scores_of(head).logits[:scored]
            logits = plan.heads.widened(scores, head, float("-inf"))
            if reads:
                head_input = self._head_input(texts)
        if shape.hidden:
            hidden = plan.buffers.layer_outputs[: len(shape.layers), :rows].clone()
        layers_run = int(plan.buffers.layers_run) if shape.exits else None
        return PackedScores(logits, head_input, hidden, layers_run)

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
    slices: list[SequenceSlice] = []
    free = MAX_ROWS
    for text in texts:
        remaining = text
        while remaining.count:
            if not free:
                yield slices
                slices, free = [], MAX_ROWS
            fitting, remaining = cut_slice(remaining, min(remaining.count, free))
            slices.append(fitting)
            free -= fitting.count
    if slices:
        yield slices


def cut_slice(text: SequenceSlice, count: int) -> tuple[SequenceSlice, SequenceSlice]:
    """The first `count` rows of a text's, and those after them."""
    later_count = text.count - count
    parents = text.parents
    if parents is not None:
        if parents.shape[0] > MAX_TREE:
            raise ValueError(f"a tree has {parents.shape[0]} rows, and the kernels see {MAX_TREE}")
        parents = parents[: parents.shape[0] - later_count]
    first_rows = text._replace(
        count=count, scored=max(0, text.scored - later_count), parents=parents
    )
    later_rows = text._replace(
        count=later_count, start=text.start + count, scored=min(text.scored, later_count)
    )
    return first_rows, later_rows
