"""Decoders and heads by the kernels: their weights are packed once, and each call runs all their
layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.cpu import structures as c
from bild_lab.engine.models.native.cpu.library import library
from bild_lab.engine.models.native.cpu.panels import in_panel_order, packed_matrix
from bild_lab.engine.models.native.stack import ACTIVATIONS, Layer, Stack, Weight
from bild_lab.engine.session import NOTHING, ChainResult, ChainSpec, GrownTree, Skipped, TreeSpec

NUMBERS = (
    "heads kv_heads head_dim hidden bidirectional epsilon scale final_scale embedding_scale".split()
)


class SequenceSlice(NamedTuple):
    """A pass's rows of one text: `count` rows at the cache's slots from `start` on.

    scored: for how many of the last rows there are logits. memory: cross-attention keys and values,
    each [layers heads s dim]. parents: of a tree, whose last rows these are, as in `Tree`; None: a
    chain. reserved: slots of a prefix.
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
    """What a pass gives, in float32. logits, head_input: of the scored rows of every text, in
    order.

    hidden: of every layer that ran, if wanted. ran: how many layers, with a bar.
    """

    logits: Float[Tensor, "scored vocab"] | None
    head_input: Float[Tensor, "scored dim"] | None
    hidden: Float[Tensor, "layers m dim"] | None
    ran: int | None = None


class PackedDecoder:
    """Runs a stack of layers by the kernels. known: how many tokens have embeddings. bits: of its
    matrices, 8 or 4.

    A row's results are the same to the last bit whatever rows run beside it, of its own text or of
    others: each sum has one order. So the texts of a batch are those of batch 1 in every precision.
    """

    def __init__(self, stack: Stack, bits: int | None = None) -> None:
        self._bits = bits
        self._held: list[object] = []  # what the kernels point to
        self._matrices: list[Tensor] = []
        self._stack = stack  # whose head a draft vocabulary reads
        self._library, trim = (
            library(),
            getattr(ctypes.CDLL(None), "malloc_trim", lambda spare: None),
        )
        layers = (c.Layer * len(stack.layers))()
        for index, layer in enumerate(stack.layers):  # each may be read from its file
            layers[index], gated = self._layer(layer), layer.inner.gated
            trim(0)  # glibc keeps what lies between tensors that stay, half of the weights' size
        self._held.append(layers)
        bias = stack.distance_bias
        self.known, self.dim = stack.embedding.shape
        head = self._matrix(Weight(stack.head, stack.head_bias))
        self.vocab, self.depth = head.outputs, len(layers)
        self._model = c.Model(
            **{name: getattr(stack, name) for name in NUMBERS},
            dim=self.dim,
            vocab=self.vocab,
            known=self.known,
            half=stack.embedding.dtype == torch.bfloat16,
            activation=list(ACTIVATIONS).index(stack.activation),
            gated=gated,
            rotary=bias is None,
            farthest=(
                0 if bias is None else (bias.shape[1] - 1) // (2 if stack.bidirectional else 1)
            ),
            layer=addressof(layers),
            final_norm=self._vector(stack.final_norm),
            head=head,
            embedding=self._table(stack, head),
            distance_bias=self._vector(bias),
        )
        self._every_layer = torch.arange(self.depth, dtype=torch.int32)
        nothing = torch.empty(1, 0, stack.head_dim)
        self._rotations = (nothing, nothing)
        self._rotary = bias is None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return torch.bfloat16 if self._model.half else torch.float32

    @property
    def head(self) -> c.Matrix:
        """The matrix to the vocabulary. It points into this decoder."""
        return self._model.head

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self._rotations[0].shape[1] if self._rotary else float("inf")

    def rotate_by(
        self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]
    ) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""
        self._rotations = cos.float().contiguous(), sin.float().contiguous()

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
        bar: float | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> PackedScores:
        """The rows of several texts, one text after the other.

        states: what the first layer reads; None: the tokens' embeddings. masks: embeddings of the
        token ids beyond the vocabulary, in the precision of the weights. Their rows alone see a
        prefix. reads: give the head's input too.
        layers: indices; None: all. fill: only the keys and values of these layers, each from the
        same states.
        skipped: blocks that are left out. bar: one row leaves after the first layer but the last
        whose output's cosine with its input is larger; the other layers compute only its keys and
        values, from that output. vocabulary: the tokens that the head scores, all others get −inf;
        None: all.
        """
        model = self._model_for(vocabulary)
        tokens, m, scored = tokens.contiguous(), tokens.shape[0], sum(text.scored for text in texts)
        outputs = (
            torch.empty(self.depth if layers is None else len(layers), m, self.dim)
            if hidden
            else None
        )
        logits = torch.empty(scored, model.vocab) if scored else None
        head_input = torch.empty(scored, self.dim) if scored and reads else None
        read = None if states is None else states.float().contiguous()
        work, held = self._pass(texts, layers, skipped)
        work.fill, work.first_mask, work.tokens = fill, self.known, tokens.data_ptr()
        work.mask_count = 0 if masks is None else masks.shape[0]
        work.states, work.masks, work.hidden = pointer(read), pointer(masks), pointer(outputs)
        work.head_input, work.logits = pointer(head_input), pointer(logits)
        if bar is not None:
            before, ran = torch.empty(self.dim), c_int32(self.depth)
            work.bar, work.before, work.ran = bar, before.data_ptr(), addressof(ran)
        self._require_read(self._library.run(byref(model), byref(work)), work, tokens.tolist)
        del held
        logits = self._widened(logits, vocabulary, float("-inf"))
        return PackedScores(logits, head_input, outputs, None if bar is None else ran.value)

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        chains: Sequence[ChainSpec],
    ) -> list[ChainResult]:
        """The rows of each text and a chain after them, in one call. The texts' chains run side by
        side.

        All chains are of the same layers and of one vocabulary.
        """
        asks, outputs, vocabulary = (c.Chain * len(texts))(), [], chains[0].vocabulary
        width = self._model_for(vocabulary).vocab
        for ask, chain, fed in zip(asks, chains, tokens, strict=True):
            steps = chain.steps
            ends, drafted, confidences = end_tokens(chain), (c_int64 * steps)(), (c_float * steps)()
            probs = torch.empty(steps, width) if chain.temperature > 0 else None
            own_probs = torch.empty(steps, width) if chain.keeps_probs else None
            states = None if chain.layers is None else torch.empty(len(fed) + steps - 1, self.dim)
            outputs.append((ends, drafted, confidences, probs, own_probs, states))
            ask.steps, ask.stops, ask.threshold = (
                steps,
                chain.threshold is not None,
                chain.threshold or 0.0,
            )
            ask.temperature, ask.end_count, ask.ends = chain.temperature, len(ends), addressof(ends)
            ask.tokens, ask.confidences = addressof(drafted), addressof(confidences)
            ask.uniforms = pointer(chain.uniforms)
            ask.probs, ask.own_probs, ask.states = (
                pointer(probs),
                pointer(own_probs),
                pointer(states),
            )
        parts = vocabulary, chains[0].layers, chains[0].skipped
        self._run_program(self._library.draft_chains, tokens, texts, asks, [1] * len(texts), *parts)
        return [
            ChainResult(
                tokens=drafted[: ask.drafted],
                forwards=ask.forwards,
                fallback=bool(ask.fallback),
                confidences=confidences[: ask.forwards] if ask.stops else [],
                probs=self._widened(None if probs is None else probs[: ask.drafted], vocabulary),
                own_probs=self._widened(
                    None if own_probs is None else own_probs[: ask.drafted], vocabulary
                ),
                states=None if states is None else states[: ask.rows],
            )
            for ask, (_, drafted, confidences, probs, own_probs, states) in zip(
                asks, outputs, strict=True
            )
        ]

    def grow(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        growths: Sequence[TreeSpec],
    ) -> list[GrownTree]:
        """The rows of each text and a tree after them, of one vocabulary, in one call: the trees
        grow side by side.
        """
        asks, outputs = (c.Growth * len(texts))(), []
        for ask, tree_spec in zip(asks, growths, strict=True):
            ends = end_tokens(tree_spec)
            grown, parents, rows = (
                (kind * tree_spec.nodes)() for kind in (c_int64, c_int32, c_int32)
            )
            counts = (c_int32 * tree_spec.depth)()
            outputs.append((ends, grown, parents, rows, counts))
            ask.nodes, ask.depth, ask.width, ask.children = (
                tree_spec.nodes,
                tree_spec.depth,
                tree_spec.width,
                tree_spec.children,
            )
            ask.prunes, ask.prune_confidence = (
                tree_spec.prune_confidence is not None,
                tree_spec.prune_confidence or 0.0,
            )
            ask.min_prob, ask.temperature = tree_spec.min_prob, tree_spec.temperature
            ask.end_count, ask.ends = len(ends), addressof(ends)
            ask.tokens, ask.parents = addressof(grown), addressof(parents)
            ask.rows, ask.counts = addressof(rows), addressof(counts)
        later, vocabulary = [tree_spec.width for tree_spec in growths], growths[0].vocabulary
        self._run_program(self._library.grow_trees, tokens, texts, asks, later, vocabulary)
        return [
            GrownTree(
                tokens=grown[: ask.grown],
                parents=parents[: ask.grown],
                rows=[None if row < 0 else row for row in rows[: ask.grown]],
                forwards=counts[: ask.forwards],
            )
            for ask, (_, grown, parents, rows, counts) in zip(asks, outputs, strict=True)
        ]

    def _run_program(
        self,
        program: Callable[..., None],
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        asks: ctypes.Array,
        later: Sequence[int],
        vocabulary: DraftVocabulary | None,
        layers: Sequence[int] | None = None,
        skipped: Skipped = NOTHING,
    ) -> None:
        """later: how many rows of each text a later forward may run."""
        model, (work, held) = self._model_for(vocabulary), self._pass(texts, layers, skipped)
        fed = [token for each in tokens for token in each]
        ids, logits = (c_int64 * len(fed))(*fed), torch.empty(sum(later), model.vocab)
        work.tokens, work.logits = addressof(ids), logits.data_ptr()
        self._require_read(program(byref(model), byref(work), asks), work, lambda: fed)
        del held

    def _require_read(self, refused: int, work: c.Pass, tokens: Callable[[], list[int]]) -> None:
        """Raise IndexError if the kernels refused a pass. refused: as `readable` of
        `cpu/kernels.cpp` says.
        """
        if refused > 0:
            token = tokens()[refused - 1]
            raise IndexError(
                f"token {token} has no embedding: the model has {self.known}, and {work.mask_count}"
                " masks"
            )
        if refused < 0:
            raise IndexError(
                f"text {-refused} of a pass needs a slot behind its cache, a position behind"
                f" {work.table} rotations, or an embedding for tokens that the head may draft"
            )

    def _pass(
        self, texts: Sequence[SequenceSlice], layers: Sequence[int] | None, skipped: Skipped
    ) -> tuple[c.Pass, list[object]]:
        """A pass of the rows of these texts through these layers, and what it points to."""
        cos, sin = self._rotations  # held here, as another thread may replace them
        made = (c.Text * len(texts))()
        held: list[object] = [made, cos, sin]
        for text, into in zip(texts, made, strict=True):
            into.count, into.start, into.reserved, into.scored = (
                text.count,
                text.start,
                text.reserved,
                text.scored,
            )
            into.capacity = text.cache.capacity
            into.keys, into.values = text.cache.keys.data_ptr(), text.cache.values.data_ptr()
            if text.memory is not None:
                into.source = text.memory[0].shape[2]
                into.memory_keys, into.memory_values = (each.data_ptr() for each in text.memory)
            if text.parents is not None:
                parents = text.parents.long().contiguous()
                into.tree, into.parents = parents.shape[0], parents.data_ptr()
                held.append(parents)
        work = c.Pass(texts=len(texts), threads=torch.get_num_threads(), text=addressof(made))
        work.cos, work.sin, work.table = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        chosen = (
            self._every_layer if layers is None else torch.tensor(list(layers), dtype=torch.int32)
        )
        held.append(chosen)
        work.layers, work.layer = len(chosen), chosen.data_ptr()
        if skipped:
            marks = [
                (at in skipped.attention) + 2 * (at in skipped.feed_forward)
                for at in chosen.tolist()
            ]
            left_out = torch.tensor(marks, dtype=torch.int32)
            held.append(left_out)
            work.skipped = left_out.data_ptr()
        return work, held

    def _model_for(self, vocabulary: DraftVocabulary | None) -> c.Model:
        """The model with a head of these tokens, which is packed at its first use; None: with the
        whole head.
        """
        if vocabulary is None:
            return self._model

        def make() -> tuple[c.Model, list[object]]:
            whole, model = self._stack.head, c.Model.from_buffer_copy(self._model)
            if int(vocabulary.tokens[-1]) >= min(self.vocab, self.known):
                raise IndexError(
                    f"a draft vocabulary names token {int(vocabulary.tokens[-1])} of {self.known}"
                )
            if vocabulary.covers_most_of(self.vocab):  # the whole head, without the others' scores
                bias = vocabulary.widened(
                    torch.zeros(1, len(vocabulary)), self.vocab, float("-inf")
                )
                panels = in_panel_order(bias[0])
                model.head.bias = panels.data_ptr()
                return model, [panels]
            if isinstance(whole, tuple):  # in blocks of a GGUF file, of which no row can be taken
                model.head, *held = packed_matrix(Weight(whole[0][vocabulary.tokens]), 8)
            else:
                model.head, *held = packed_matrix(Weight(whole[vocabulary.tokens]), self._bits)
            model.vocab, model.tokens = len(vocabulary), vocabulary.tokens.data_ptr()
            return model, held

        return vocabulary.cached_for(self, make)[0]

    def _widened(
        self,
        rows: Float[Tensor, "n part"] | None,
        vocabulary: DraftVocabulary | None,
        others: float = 0.0,
    ) -> Float[Tensor, "n vocab"] | None:
        """Rows of a part of the vocabulary as rows of all of it."""
        return (
            rows
            if rows is None or vocabulary is None
            else vocabulary.widened(rows, self.vocab, others)
        )

    def read_weights(self) -> None:
        """Read every weight that a token needs, once, and do nothing else."""
        for tensor in self._matrices:
            self._library.read_all(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())

    def _layer(self, layer: Layer) -> c.Layer:
        packed = c.Layer(window=layer.window, kind=layer.kind)
        for name, kind in c.Layer._fields_:
            if kind is c.Matrix and (weight := getattr(layer, name)) is not None:
                setattr(packed, name, self._matrix(weight))
            elif kind is c_void_p:
                setattr(packed, name, self._vector(getattr(layer, name)))
        return packed

    def _matrix(self, weight: Weight) -> c.Matrix:
        made, packed, held = packed_matrix(weight, self._bits)
        self._matrices += packed
        self._held += [packed, held]
        return made

    def _table(self, stack: Stack, head: c.Matrix) -> c.Matrix:
        """The embeddings."""
        table = stack.embedding
        if isinstance(table, Tensor):
            return c.Matrix(packed=self._hold(table))
        if isinstance(stack.head, tuple) and stack.head[0].start == table.start:  # tied
            return head
        made, *held = packed_matrix(Weight((table,)))
        self._held += held
        return made

    def _vector(self, values: Tensor | None) -> int | None:
        return None if values is None else self._hold(values.detach().float().contiguous())

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()


class PackedHeads:
    """Medusa's heads by the kernels.

    blocks: [heads, layers, dim, dim]. biases: [heads, layers, dim]. outputs: of each head, or one
    that all heads share; or the target's decoder, whose matrix to the vocabulary all heads share.
    bias: of each output, of matrices.
    """

    def __init__(
        self,
        blocks: Float[Tensor, "heads layers dim dim"],
        biases: Float[Tensor, "heads layers dim"],
        outputs: Float[Tensor, "ends vocab dim"] | PackedDecoder,
        bias: Float[Tensor, " vocab"] | None = None,
    ) -> None:
        self._library = library()
        whole = isinstance(outputs, PackedDecoder)
        if whole and outputs.dtype != blocks.dtype:
            raise ValueError(f"heads in {blocks.dtype} cannot share a matrix in {outputs.dtype}")
        pairs = zip(blocks.flatten(0, 1), biases.flatten(0, 1), strict=True)
        matrices = [packed_matrix(Weight(matrix, bias)) for matrix, bias in pairs]
        ends = (
            [(outputs.head, outputs)]
            if whole
            else [packed_matrix(Weight(matrix, bias)) for matrix in outputs]
        )
        self._held = (
            (c.Matrix * len(matrices))(*(made for made, *_ in matrices)),
            (c.Matrix * len(ends))(*(made for made, *_ in ends)),
            [held for _, *held in [*matrices, *ends]],
        )
        self._heads = c.Heads(
            dim=blocks.shape[-1],
            vocab=self._held[1][0].outputs,
            half=blocks.dtype == torch.bfloat16,
            layers=blocks.shape[1],
            shared=len(ends) < len(blocks),
            blocks=addressof(self._held[0]),
            outputs=addressof(self._held[1]),
        )

    def most_likely(
        self, hidden: Float[Tensor, " dim"], depth: int, count: int
    ) -> Int[Tensor, "depth count"]:
        """The first heads' most likely tokens, as `MedusaHeads.most_likely` in one call."""
        return self._run(hidden, depth, torch.empty(depth, count, dtype=torch.long))

    def scores(self, hidden: Float[Tensor, " dim"], depth: int) -> Float[Tensor, "depth vocab"]:
        """The first heads' logits."""
        return self._run(hidden, depth, torch.empty(depth, self._heads.vocab))

    def _run(self, hidden: Float[Tensor, " dim"], depth: int, to: Tensor) -> Tensor:
        state, count, threads = hidden.float().contiguous(), to.shape[1], torch.get_num_threads()
        places = (None, to.data_ptr()) if to.is_floating_point() else (to.data_ptr(), None)
        self._library.most_likely_tokens(
            byref(self._heads), state.data_ptr(), depth, count, threads, *places
        )
        return to


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def end_tokens(draft: ChainSpec | TreeSpec) -> ctypes.Array[c_int64]:
    return (c_int64 * len(draft.end_tokens))(*draft.end_tokens)
