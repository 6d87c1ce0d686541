"""A decoder's weights, packed for the kernels in `forward.cpp`, which run all its layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.cpu.library import library
from bild_lab.engine.models.native.cpu.outline import ACTIVATIONS, DecoderOutline, LayerOutline, Weight
from bild_lab.engine.models.native.cpu.panels import Matrix, packed_matrix
from bild_lab.engine.session import NOTHING, Chain, DraftedChain, GrownTree, Growth, Skipped

NORMS = "norm head_norm out_norm cross_norm feed_norm feed_out_norm".split()
MATRICES = "qkv out cross_query cross_out inner outer".split()


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in NORMS),
        *((name, Matrix) for name in MATRICES),
        ("window", c_int32),
        ("kind", c_int32),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in "dim heads kv_heads head_dim hidden vocab half activation".split()),
        *((name, c_int32) for name in ("gated", "rotary", "farthest", "bidirectional")),
        *((name, c_float) for name in ("epsilon", "scale", "final_scale", "embedding_scale")),
        ("layer", c_void_p),
        ("final_norm", c_void_p),
        ("head", Matrix),
        ("embedding", c_void_p),
        ("distance_bias", c_void_p),
    )


class _Text(Structure):
    _fields_ = (
        *((name, c_int32) for name in "count start reserved source scored tree".split()),
        ("capacity", c_int64),
        *((name, c_void_p) for name in "parents keys values memory_keys memory_values".split()),
        *((name, c_void_p) for name in "visible positions key_positions".split()),  # these and `first`: the kernels'
        ("first", c_int32),
    )


class _Pass(Structure):
    _fields_ = (
        *((name, c_int32) for name in "texts layers threads fill".split()),
        *((name, c_void_p) for name in "text tokens states masks".split()),
        ("first_mask", c_int64),
        *((name, c_void_p) for name in "layer skipped cos sin".split()),
        ("table", c_int64),
        *((name, c_void_p) for name in ("hidden", "head_input", "logits", "before", "ran")),
        ("bar", c_double),
        *((name, c_int32) for name in ("count", "scored")),  # these and below: the kernels'
        *((name, c_void_p) for name in ("text_of", "scored_row")),
    )


class _Chain(Structure):
    _fields_ = (
        *((name, c_int32) for name in "steps stops end_count forwards drafted fallback rows".split()),
        ("threshold", c_double),
        ("temperature", c_float),
        *((name, c_void_p) for name in "ends uniforms tokens confidences probs own_probs states".split()),
    )


class _Growth(Structure):
    _fields_ = (
        *((name, c_int32) for name in "nodes depth width children end_count has_sure grown forwards".split()),
        *((name, c_double) for name in ("sure", "least")),
        ("temperature", c_float),
        *((name, c_void_p) for name in "ends tokens parents rows counts".split()),
    )


class Behind(NamedTuple):
    """Where a pass's rows of one text stand: `count` rows at the cache's slots from `start` on.

    scored: for how many of the last rows there are logits. memory: cross-attention keys and values, each
    [layers heads s dim]. parents: of a tree, whose last rows these are, as in `Tree`; None: a chain. reserved: slots of
    a prefix.
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
    """What a pass gives, in float32. logits, head_input: of the scored rows of every text, in order.

    hidden: of every layer that ran, if wanted. ran: how many layers, with a bar.
    """

    logits: Float[Tensor, "scored vocab"] | None
    head_input: Float[Tensor, "scored dim"] | None
    hidden: Float[Tensor, "layers m dim"] | None
    ran: int | None = None


class PackedDecoder:
    """Runs a decoder's layers by the kernels. known: how many tokens have embeddings.

    A row's results are the same to the last bit whatever rows run beside it, of its own text or of others: each sum has
    one order. So the texts of a batch are those of batch 1 in every precision.
    """

    def __init__(self, outline: DecoderOutline) -> None:
        self._held: list[object] = []  # what the kernels point to
        self._matrices: list[Tensor] = []
        self._library = library()
        layers = (_Layer * len(outline.layers))(*map(self._layer, outline.layers))
        self._held.append(layers)
        bias = outline.distance_bias
        self.known, self.dim = outline.embedding.shape
        self.vocab, self.depth = outline.head.shape[0], len(layers)
        self._model = _Model(
            dim=self.dim,
            heads=outline.heads,
            kv_heads=outline.kv_heads,
            head_dim=outline.head_dim,
            hidden=outline.hidden,
            vocab=self.vocab,
            half=outline.embedding.dtype == torch.bfloat16,
            activation=ACTIVATIONS.index(outline.activation),
            gated=outline.layers[0].inner.gated,
            rotary=bias is None,
            farthest=0 if bias is None else (bias.shape[1] - 1) // (2 if outline.bidirectional else 1),
            bidirectional=outline.bidirectional,
            epsilon=outline.epsilon,
            scale=outline.scale,
            final_scale=outline.final_scale,
            embedding_scale=outline.embedding_scale,
            layer=ctypes.addressof(layers),
            final_norm=self._vector(outline.final_norm),
            head=self._matrix(Weight(outline.head)),
            embedding=self._hold(outline.embedding),
            distance_bias=self._vector(bias),
        )
        self._every_layer = torch.arange(self.depth, dtype=torch.int32)
        nothing = torch.empty(1, 0, outline.head_dim)
        self._rotations = (nothing, nothing)
        self._rotary = bias is None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return torch.bfloat16 if self._model.half else torch.float32

    @property
    def head(self) -> Matrix:
        """The matrix to the vocabulary. It points into this decoder."""
        return self._model.head

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self._rotations[0].shape[1] if self._rotary else float("inf")

    def rotate_by(self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""
        self._rotations = cos.float().contiguous(), sin.float().contiguous()

    def run(
        self,
        tokens: Int[Tensor, " m"],
        texts: Sequence[Behind],
        *,
        states: Float[Tensor, "m dim"] | None = None,
        masks: Float[Tensor, "masks dim"] | None = None,
        reads: bool = False,
        layers: Sequence[int] | None = None,
        hidden: bool = False,
        fill: bool = False,
        skipped: Skipped = NOTHING,
        bar: float | None = None,
    ) -> PackedScores:
        """The rows of several texts, one text after the other.

        states: what the first layer reads; None: the tokens' embeddings. masks: embeddings of the token ids beyond the
        vocabulary, in the precision of the weights. Their rows alone see a prefix. reads: give the head's input too.
        layers: indices; None: all. fill: only the keys and values of these layers, each from the same states.
        skipped: blocks that are left out. bar: one row leaves behind the first layer but the last whose output's cosine
        with its input is larger; the other layers compute only its keys and values, from that output.
        """
        tokens, m, scored = tokens.contiguous(), tokens.shape[0], sum(text.scored for text in texts)
        outputs = torch.empty(self.depth if layers is None else len(layers), m, self.dim) if hidden else None
        logits = torch.empty(scored, self.vocab) if scored else None
        head_input = torch.empty(scored, self.dim) if scored and reads else None
        read = None if states is None else states.float().contiguous()
        work, held = self._pass(texts, layers, skipped)
        work.fill, work.tokens = fill, tokens.data_ptr()
        if read is not None:
            work.states = read.data_ptr()
        if masks is not None:
            work.masks, work.first_mask = masks.data_ptr(), self.known
        if scored:
            work.logits = logits.data_ptr()
        if head_input is not None:
            work.head_input = head_input.data_ptr()
        if hidden:
            work.hidden = outputs.data_ptr()
        if bar is not None:
            before, ran = torch.empty(self.dim), c_int32(self.depth)
            work.bar, work.before, work.ran = bar, before.data_ptr(), ctypes.addressof(ran)
        self._library.run(ctypes.byref(self._model), ctypes.byref(work))
        del held
        return PackedScores(logits, head_input, outputs, None if bar is None else ran.value)

    def draft(
        self, tokens: Sequence[Sequence[int]], texts: Sequence[Behind], chains: Sequence[Chain]
    ) -> list[DraftedChain]:
        """The rows of each text and a chain behind them, in one call. The texts' chains run side by side.

        All chains are of the same layers.
        """
        asks, kept, part = (_Chain * len(texts))(), [], (chains[0].layers, chains[0].skipped)
        for ask, chain, fed in zip(asks, chains, tokens, strict=True):
            sampled = chain.temperature > 0
            ends, drafted = (c_int64 * len(chain.end_tokens))(*chain.end_tokens), (c_int64 * chain.steps)()
            confidences = (c_float * chain.steps)()
            probs = torch.empty(chain.steps, self.vocab) if sampled else None
            own_probs = torch.empty(chain.steps, self.vocab) if chain.keeps_probs else None
            states = None if chain.layers is None else torch.empty(len(fed) + chain.steps - 1, self.dim)
            kept.append((ends, drafted, confidences, probs, own_probs, states))
            ask.steps, ask.stops, ask.threshold = chain.steps, chain.threshold is not None, chain.threshold or 0.0
            ask.temperature, ask.end_count, ask.ends = chain.temperature, len(ends), ctypes.addressof(ends)
            ask.tokens, ask.confidences = ctypes.addressof(drafted), ctypes.addressof(confidences)
            if sampled:
                ask.uniforms, ask.probs = chain.uniforms.data_ptr(), probs.data_ptr()
            if chain.keeps_probs:
                ask.own_probs = own_probs.data_ptr()
            if states is not None:
                ask.states = states.data_ptr()
        self._run_program(self._library.draft_chains, tokens, texts, asks, [1] * len(texts), *part)
        return [
            DraftedChain(
                tokens=drafted[: ask.drafted],
                forwards=ask.forwards,
                fallback=bool(ask.fallback),
                confidences=confidences[: ask.forwards] if chain.threshold is not None else [],
                probs=None if probs is None else probs[: ask.drafted],
                own_probs=None if own_probs is None else own_probs[: ask.drafted],
                states=None if states is None else states[: ask.rows],
            )
            for ask, chain, (_, drafted, confidences, probs, own_probs, states) in zip(asks, chains, kept, strict=True)
        ]

    def grow(
        self, tokens: Sequence[Sequence[int]], texts: Sequence[Behind], growths: Sequence[Growth]
    ) -> list[GrownTree]:
        """The rows of each text and a tree behind them, in one call. The texts' trees grow side by side."""
        asks, kept = (_Growth * len(texts))(), []
        for ask, growth in zip(asks, growths, strict=True):
            ends = (c_int64 * len(growth.end_tokens))(*growth.end_tokens)
            grown, parents, rows = ((kind * growth.nodes)() for kind in (c_int64, c_int32, c_int32))
            counts = (c_int32 * growth.depth)()
            kept.append((ends, grown, parents, rows, counts))
            ask.nodes, ask.depth, ask.width, ask.children = growth.nodes, growth.depth, growth.width, growth.children
            ask.has_sure, ask.sure, ask.least = growth.sure is not None, growth.sure or 0.0, growth.least
            ask.temperature, ask.end_count, ask.ends = growth.temperature, len(ends), ctypes.addressof(ends)
            ask.tokens, ask.parents = ctypes.addressof(grown), ctypes.addressof(parents)
            ask.rows, ask.counts = ctypes.addressof(rows), ctypes.addressof(counts)
        self._run_program(self._library.grow_trees, tokens, texts, asks, [growth.width for growth in growths])
        return [
            GrownTree(
                tokens=grown[: ask.grown],
                parents=parents[: ask.grown],
                rows=[None if row < 0 else row for row in rows[: ask.grown]],
                forwards=counts[: ask.forwards],
            )
            for ask, (_, grown, parents, rows, counts) in zip(asks, kept, strict=True)
        ]

    def _run_program(
        self,
        program: Callable[..., None],
        tokens: Sequence[Sequence[int]],
        texts: Sequence[Behind],
        asks: ctypes.Array,
        later: Sequence[int],
        layers: Sequence[int] | None = None,
        skipped: Skipped = NOTHING,
    ) -> None:
        """later: how many rows of each text a later forward may run."""
        work, held = self._pass(texts, layers, skipped)
        fed = [token for each in tokens for token in each]
        ids, logits = (c_int64 * len(fed))(*fed), torch.empty(sum(later), self.vocab)
        work.tokens, work.logits = ctypes.addressof(ids), logits.data_ptr()
        program(ctypes.byref(self._model), ctypes.byref(work), asks)
        del held

    def _pass(
        self, texts: Sequence[Behind], layers: Sequence[int] | None, skipped: Skipped
    ) -> tuple[_Pass, list[object]]:
        """A pass of the rows of these texts through these layers, and what it points to."""
        cos, sin = self._rotations  # held here, as another thread may replace them
        made = (_Text * len(texts))()
        held: list[object] = [made, cos, sin]
        for text, into in zip(texts, made, strict=True):
            into.count, into.start, into.reserved, into.scored = text.count, text.start, text.reserved, text.scored
            into.capacity = text.cache.capacity
            into.keys, into.values = text.cache.keys.data_ptr(), text.cache.values.data_ptr()
            if text.memory is not None:
                into.source = text.memory[0].shape[2]
                into.memory_keys, into.memory_values = (each.data_ptr() for each in text.memory)
            if text.parents is not None:
                parents = text.parents.long().contiguous()
                into.tree, into.parents = parents.shape[0], parents.data_ptr()
                held.append(parents)
        work = _Pass(texts=len(texts), threads=torch.get_num_threads(), text=ctypes.addressof(made))
        work.cos, work.sin, work.table = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        chosen = self._every_layer if layers is None else torch.tensor(list(layers), dtype=torch.int32)
        held.append(chosen)
        work.layers, work.layer = len(chosen), chosen.data_ptr()
        if skipped:
            marks = [(at in skipped.attention) + 2 * (at in skipped.feed_forward) for at in chosen.tolist()]
            left_out = torch.tensor(marks, dtype=torch.int32)
            held.append(left_out)
            work.skipped = left_out.data_ptr()
        return work, held

    def read_weights(self) -> None:
        """Read every weight that a token needs, once, and do nothing else."""
        for tensor in self._matrices:
            self._library.read_all(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())

    def _layer(self, layer: LayerOutline) -> _Layer:
        packed = _Layer(window=layer.window, kind=layer.kind)
        for name in NORMS:
            setattr(packed, name, self._vector(getattr(layer, name)))
        for name in MATRICES:
            if (weight := getattr(layer, name)) is not None:
                setattr(packed, name, self._matrix(weight))
        return packed

    def _matrix(self, weight: Weight) -> Matrix:
        made, packed, bias = packed_matrix(weight)
        self._matrices.append(packed)
        self._held += [packed, bias]
        return made

    def _vector(self, values: Tensor | None) -> int | None:
        return None if values is None else self._hold(values.detach().float().contiguous())

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()
