"""Decoders and heads by the kernels: their weights are packed once, and each call runs all their
layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.native.cpu import structures as c
from bild_lab.engine.models.native.cpu.library import library
from bild_lab.engine.models.native.cpu.panels import bias_in_panel_order, packed_matrix
from bild_lab.engine.models.native.packed_pass import PackedScores, SequenceSlice
from bild_lab.engine.models.native.stack import ACTIVATIONS, Layer, Stack, Weight
from bild_lab.engine.session import (
    NOTHING,
    ChainResult,
    ChainSpec,
    Drafted,
    DraftSpec,
    GrownTree,
    Skipped,
    TreeSpec,
)

# fields of a stack that the structure has by the same name
NUMBERS = (
    "heads kv_heads head_dim hidden bidirectional epsilon scale final_scale embedding_scale".split()
)
# the same of a tree
TREE_NUMBERS = "nodes depth width children min_prob temperature".split()
SKIPS_ATTENTION, SKIPS_FEED_FORWARD = 1, 2  # as `ForwardPass.skipped` of `structures.h` has them


class PointedMemory:
    """The memory that structures of the kernels point to.

    A structure holds addresses alone, so this object must live as long as the structure does.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []

    def keep(self, memory: object) -> None:
        self._objects.append(memory)

    def address(self, memory: Tensor | ctypes.Array | ctypes.Structure | None) -> int | None:
        """Where this memory begins; it is kept from now on. None: a null pointer."""
        if memory is None:
            return None
        self.keep(memory)
        return memory.data_ptr() if isinstance(memory, Tensor) else addressof(memory)

    def set_fields(self, structure: ctypes.Structure, **values: Any) -> None:
        """Set these fields of a structure: to numbers, or to addresses of memory or of nothing."""
        for name, value in values.items():
            is_number = isinstance(value, int | float)
            setattr(structure, name, value if is_number else self.address(value))


class ChainBuffers(NamedTuple):
    """Where the kernels write what they draft of one chain. Fields: as in `ChainDraft` of
    `structures.h`.
    """

    tokens: ctypes.Array[c_int64]
    confidences: ctypes.Array[c_float]
    probs: Float[Tensor, "steps vocab"] | None
    unscaled_probs: Float[Tensor, "steps vocab"] | None
    states: Float[Tensor, "rows dim"] | None


class TreeBuffers(NamedTuple):
    """Where the kernels write what they grow of one tree. Fields: as in `TreeDraft` of
    `structures.h`.
    """

    tokens: ctypes.Array[c_int64]
    parents: ctypes.Array[c_int32]
    rows: ctypes.Array[c_int32]
    row_counts: ctypes.Array[c_int32]


class PackedDecoder:
    """Runs a stack of layers by the C++ kernels; as `KernelDecoder`.

    known: how many tokens have embeddings. bits: of its matrices, 8 or 4.
    """

    runs_prompts = True
    least_positions = captures = 0

    def __init__(self, stack: Stack, bits: int | None) -> None:
        self._bits = bits
        self._stack = stack  # a draft vocabulary reads its head
        self._library = library()
        self._memory = PointedMemory()
        self.panels: list[Tensor] = []  # the packed weights of every matrix
        # 1. the layers, each of which may be read from its file
        trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda spare: None)
        layers = (c.Layer * len(stack.layers))()
        for index, layer in enumerate(stack.layers):
            layers[index] = self._layer(layer)
            gated = layer.inner.gated
            trim(0)  # glibc keeps what lies between tensors that stay, half of the weights' size
        # 2. the head and the embeddings
        self.known, self.dim = stack.embedding.shape
        head = self._matrix(Weight(stack.head, stack.head_bias))
        self.vocab = head.outputs
        self.depth = len(layers)
        # 3. the model
        bias = stack.distance_bias
        farthest = 0
        if bias is not None:
            farthest = (bias.shape[1] - 1) // (2 if stack.bidirectional else 1)
        self._model = c.Model(
            **{name: getattr(stack, name) for name in NUMBERS},
            dim=self.dim,
            vocab=self.vocab,
            known=self.known,
            half=stack.embedding.dtype == torch.bfloat16,
            activation=list(ACTIVATIONS).index(stack.activation),
            gated=gated,
            rotary=bias is None,
            farthest=farthest,
            layer=self._memory.address(layers),
            final_norm=self._vector(stack.final_norm),
            head=head,
            embedding=self._embedding_table(stack, head),
            distance_bias=self._vector(bias),
        )
        self._all_layers = torch.arange(self.depth, dtype=torch.int32)
        nothing = float_buffer(1, 0, stack.head_dim)
        self._rotations = (nothing, nothing)
        self._rotary = bias is None

    @property
    def head(self) -> c.Matrix:
        """The matrix to the vocabulary. It points into this decoder."""
        return self._model.head

    @property
    def positions(self) -> float:
        """How many positions the kernels can place."""
        return self._rotations[0].shape[1] if self._rotary else float("inf")

    def buffer_bytes(self, slots: int) -> int:
        """None: those of a pass are small, and gone after it."""
        return 0

    def rotate_by(
        self, cos: Float[Tensor, "kinds n head_dim"], sin: Float[Tensor, "kinds n head_dim"]
    ) -> None:
        """The rotations of every position. sin: signed, so that a roll by half rotates."""
        self._rotations = cos.float().contiguous(), sin.float().contiguous()

    def read_weights(self) -> None:
        """Read every weight that a token needs, once, and do nothing else."""
        for panels in self.panels:
            self._library.read_all(panels.data_ptr(), panels.nbytes, torch.get_num_threads())

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
        """As `KernelDecoder.run`."""
        # 1. room for what the kernels give
        model = self._model_for(vocabulary)
        row_count = tokens.shape[0]
        scored_count = sum(text.scored for text in texts)
        layer_count = self.depth if layers is None else len(layers)
        logits = float_buffer(scored_count, model.vocab) if scored_count else None
        head_input = float_buffer(scored_count, self.dim) if scored_count and reads else None
        layer_outputs = float_buffer(layer_count, row_count, self.dim) if hidden else None
        # 2. what they read, and where they write
        forward_pass = self._forward_pass(texts, layers, skipped)
        memory = forward_pass.memory
        memory.set_fields(
            forward_pass,
            tokens=tokens.contiguous(),
            states=None if states is None else states.float().contiguous(),
            masks=masks,
            mask_count=0 if masks is None else masks.shape[0],
            first_mask=self.known,
            fill=fill,
            hidden=layer_outputs,
            head_input=head_input,
            logits=logits,
        )
        layers_run = (c_int32 * 1)(self.depth)
        if exit_threshold is not None:
            memory.set_fields(
                forward_pass,
                exit_threshold=exit_threshold,
                layer_input=float_buffer(self.dim),
                layers_run=layers_run,
            )
        # 3. the pass
        refused = self._library.run(byref(model), byref(forward_pass))
        self._require_read(refused, forward_pass, tokens.tolist)
        return PackedScores(
            logits=self._widened(logits, vocabulary, float("-inf")),
            head_input=head_input,
            hidden=layer_outputs,
            layers_run=None if exit_threshold is None else layers_run[0],
        )

    def draft(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        specs: Sequence[DraftSpec],
    ) -> Sequence[Drafted]:
        """As `KernelDecoder.draft`: every chain and every tree has a program."""
        is_tree = isinstance(specs[0], TreeSpec)
        return (self._grow if is_tree else self._draft_chains)(tokens, texts, specs)

    def _draft_chains(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        chains: Sequence[ChainSpec],
    ) -> list[ChainResult]:
        vocabulary = chains[0].vocabulary
        width = self._model_for(vocabulary).vocab
        memory = PointedMemory()
        drafts = (c.ChainDraft * len(texts))()
        buffers = []
        for draft, chain, fed_tokens in zip(drafts, chains, tokens, strict=True):
            chain_buffers = self._chain_buffers(chain, len(fed_tokens), width)
            set_chain(draft, chain, chain_buffers, memory)
            buffers.append(chain_buffers)
        self._run_program(
            self._library.draft_chains,
            tokens,
            texts,
            drafts,
            later_rows=[1] * len(texts),
            vocabulary=vocabulary,
            layers=chains[0].layers,
            skipped=chains[0].skipped,
        )
        return [
            self._chain_result(draft, chain_buffers, vocabulary)
            for draft, chain_buffers in zip(drafts, buffers, strict=True)
        ]

    def _chain_buffers(self, chain: ChainSpec, fed_count: int, width: int) -> ChainBuffers:
        """Room for a chain after so many rows, by a head of this width."""
        steps = chain.steps
        return ChainBuffers(
            tokens=(c_int64 * steps)(),
            confidences=(c_float * steps)(),
            probs=float_buffer(steps, width) if chain.temperature > 0 else None,
            unscaled_probs=float_buffer(steps, width) if chain.keeps_probs else None,
            states=None if chain.layers is None else float_buffer(fed_count + steps - 1, self.dim),
        )

    def _chain_result(
        self, draft: c.ChainDraft, buffers: ChainBuffers, vocabulary: DraftVocabulary | None
    ) -> ChainResult:
        """What was drafted, copied from the buffers up to the chain's end."""
        count = draft.drafted
        probs, unscaled_probs = (
            None if rows is None else self._widened(rows[:count], vocabulary)
            for rows in (buffers.probs, buffers.unscaled_probs)
        )
        return ChainResult(
            tokens=buffers.tokens[:count],
            forwards=draft.forwards,
            fallback=bool(draft.fallback),
            confidences=buffers.confidences[: draft.forwards] if draft.has_threshold else [],
            probs=probs,
            unscaled_probs=unscaled_probs,
            states=None if buffers.states is None else buffers.states[: draft.rows],
        )

    def _grow(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        tree_specs: Sequence[TreeSpec],
    ) -> list[GrownTree]:
        memory = PointedMemory()
        drafts = (c.TreeDraft * len(texts))()
        buffers = []
        for draft, tree_spec in zip(drafts, tree_specs, strict=True):
            tree_buffers = TreeBuffers(
                tokens=(c_int64 * tree_spec.nodes)(),
                parents=(c_int32 * tree_spec.nodes)(),
                rows=(c_int32 * tree_spec.nodes)(),
                row_counts=(c_int32 * tree_spec.depth)(),
            )
            set_tree(draft, tree_spec, tree_buffers, memory)
            buffers.append(tree_buffers)
        self._run_program(
            self._library.grow_trees,
            tokens,
            texts,
            drafts,
            later_rows=[tree_spec.width for tree_spec in tree_specs],
            vocabulary=tree_specs[0].vocabulary,
        )
        return [
            GrownTree(
                tokens=tree.tokens[: draft.grown],
                parents=tree.parents[: draft.grown],
                rows=[None if row < 0 else row for row in tree.rows[: draft.grown]],
                forwards=tree.row_counts[: draft.forwards],
            )
            for draft, tree in zip(drafts, buffers, strict=True)
        ]

    def _run_program(
        self,
        program: Callable[..., int],
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        drafts: ctypes.Array,
        later_rows: Sequence[int],
        vocabulary: DraftVocabulary | None,
        layers: Sequence[int] | None = None,
        skipped: Skipped = NOTHING,
    ) -> None:
        """Run a program that fills these drafts, one for each text. later_rows: how many rows of
        each text a later forward may run.
        """
        model = self._model_for(vocabulary)
        forward_pass = self._forward_pass(texts, layers, skipped)
        memory = forward_pass.memory
        fed_tokens = [token for text_tokens in tokens for token in text_tokens]
        memory.set_fields(
            forward_pass,
            tokens=token_array(fed_tokens),
            logits=float_buffer(sum(later_rows), model.vocab),
        )
        refused = program(byref(model), byref(forward_pass), drafts)
        self._require_read(refused, forward_pass, lambda: fed_tokens)

    def _require_read(
        self, refused: int, forward_pass: c.ForwardPass, tokens: Callable[[], list[int]]
    ) -> None:
        """Raise IndexError if the kernels refused a pass. refused: as `readable` of
        `kernels.cpp` says.
        """
        if refused > 0:
            token = tokens()[refused - 1]
            raise IndexError(
                f"token {token} has no embedding: the model has {self.known}, and"
                f" {forward_pass.mask_count} masks"
            )
        if refused < 0:
            raise IndexError(
                f"text {-refused} of a pass needs a slot behind its cache, a position behind"
                f" {forward_pass.table} rotations, or an embedding for tokens that the head may"
                " draft"
            )

    def _forward_pass(
        self, texts: Sequence[SequenceSlice], layers: Sequence[int] | None, skipped: Skipped
    ) -> c.ForwardPass:
        """A pass of the rows of these texts through these layers. Its attribute `memory` is what it
        points to.
        """
        memory = PointedMemory()
        slices = (c.SequenceSlice * len(texts))()
        for text, structure in zip(texts, slices, strict=True):
            set_slice(structure, text, memory)
        cos, sin = self._rotations  # read once, as another thread may replace them
        layer_indices = self._all_layers
        if layers is not None:
            layer_indices = torch.tensor(list(layers), dtype=torch.int32)
        skip_marks = None
        if skipped:
            marks = [
                SKIPS_ATTENTION * (index in skipped.attention)
                + SKIPS_FEED_FORWARD * (index in skipped.feed_forward)
                for index in layer_indices.tolist()
            ]
            skip_marks = torch.tensor(marks, dtype=torch.int32)
        forward_pass = c.ForwardPass()
        memory.set_fields(
            forward_pass,
            texts=len(texts),
            text=slices,
            threads=torch.get_num_threads(),
            cos=cos,
            sin=sin,
            table=cos.shape[1],
            layers=len(layer_indices),
            layer=layer_indices,
            skipped=skip_marks,
        )
        forward_pass.memory = memory
        return forward_pass

    def _model_for(self, vocabulary: DraftVocabulary | None) -> c.Model:
        """The model with a head of these tokens, which is packed at its first use; None: with the
        whole head.
        """
        if vocabulary is None:
            return self._model
        return vocabulary.cached_for(self, lambda: self._narrow_model(vocabulary))

    def _narrow_model(self, vocabulary: DraftVocabulary) -> c.Model:
        """The model with a head of these tokens. Its attribute `memory` is what the head points
        to.
        """
        model = c.Model.from_buffer_copy(self._model)
        model.memory = PointedMemory()
        if vocabulary.covers_most_of(self.vocab):
            bias = bias_in_panel_order(vocabulary.bias(self.vocab))
            model.head.bias = model.memory.address(bias)
            return model
        head = self._stack.head
        if isinstance(head, tuple):  # in blocks of a GGUF file, of which no row can be taken
            packed = packed_matrix(Weight(head[0][vocabulary.tokens]), 8)
        else:
            packed = packed_matrix(Weight(head[vocabulary.tokens]), self._bits)
        model.memory.keep(packed)
        model.head = packed.matrix
        model.vocab = len(vocabulary)
        model.tokens = model.memory.address(vocabulary.tokens)
        return model

    def _widened(
        self,
        rows: Float[Tensor, "n part"] | None,
        vocabulary: DraftVocabulary | None,
        fill_value: float = 0.0,
    ) -> Float[Tensor, "n vocab"] | None:
        """Rows of a part of the vocabulary as rows of all of it, with `fill_value` for all
        other tokens.
        """
        if rows is None or vocabulary is None:
            return rows
        return vocabulary.widened(rows, self.vocab, fill_value)

    def _layer(self, layer: Layer) -> c.Layer:
        structure = c.Layer(window=layer.window, kind=layer.kind)
        for name, field_type in c.Layer._fields_:
            if field_type is c.Matrix and (weight := getattr(layer, name)) is not None:
                setattr(structure, name, self._matrix(weight))
            elif field_type is c_void_p:
                setattr(structure, name, self._vector(getattr(layer, name)))
        return structure

    def _matrix(self, weight: Weight) -> c.Matrix:
        packed = packed_matrix(weight, self._bits)
        self.panels += packed.panels
        self._memory.keep(packed)
        return packed.matrix

    def _embedding_table(self, stack: Stack, head: c.Matrix) -> c.Matrix:
        table = stack.embedding
        if isinstance(table, Tensor):
            return c.Matrix(packed=self._memory.address(table))
        if isinstance(stack.head, tuple) and stack.head[0].start == table.start:  # tied
            return head
        packed = packed_matrix(Weight((table,)))
        self._memory.keep(packed)
        return packed.matrix

    def _vector(self, values: Tensor | None) -> int | None:
        """The address of these numbers in float32."""
        if values is None:
            return None
        return self._memory.address(values.detach().float().contiguous())


class PackedHeads:
    """Medusa's heads by the kernels.

    blocks: [heads, layers, dim, dim].
    biases: [heads, layers, dim].
    outputs: of each head, or one that all heads share; or the target's decoder, whose matrix to the
        vocabulary all heads share.
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
        self._memory = PointedMemory()
        # 1. the blocks
        block_matrices = [
            self._matrix(Weight(matrix, block_bias))
            for matrix, block_bias in zip(blocks.flatten(0, 1), biases.flatten(0, 1), strict=True)
        ]
        # 2. the matrices to the vocabulary
        if isinstance(outputs, PackedDecoder):
            self._memory.keep(outputs)
            output_matrices = [outputs.head]
        else:
            output_matrices = [self._matrix(Weight(matrix, bias)) for matrix in outputs]
        # 3. the heads
        self._heads = c.Heads(
            dim=blocks.shape[-1],
            vocab=output_matrices[0].outputs,
            half=blocks.dtype == torch.bfloat16,
            layers=blocks.shape[1],
            shared=len(output_matrices) < len(blocks),
            blocks=self._memory.address((c.Matrix * len(block_matrices))(*block_matrices)),
            outputs=self._memory.address((c.Matrix * len(output_matrices))(*output_matrices)),
        )

    def most_likely(
        self, hidden: Float[Tensor, " dim"], depth: int, count: int
    ) -> Int[Tensor, "depth count"]:
        """The first heads' most likely tokens, as `MedusaHeads.most_likely` in one call."""
        tokens = torch.empty(depth, count, dtype=torch.long)
        self._run(hidden, depth, count, tokens, None)
        return tokens

    def scores(self, hidden: Float[Tensor, " dim"], depth: int) -> Float[Tensor, "depth vocab"]:
        """The first heads' logits."""
        logits = float_buffer(depth, self._heads.vocab)
        self._run(hidden, depth, self._heads.vocab, None, logits)
        return logits

    def _run(
        self,
        hidden: Float[Tensor, " dim"],
        depth: int,
        count: int,
        tokens: Int[Tensor, "depth count"] | None,
        logits: Float[Tensor, "depth vocab"] | None,
    ) -> None:
        """Run the first heads, and write their most likely tokens or their logits."""
        memory = PointedMemory()
        self._library.most_likely_tokens(
            byref(self._heads),
            memory.address(hidden.float().contiguous()),
            depth,
            count,
            torch.get_num_threads(),
            memory.address(tokens),
            memory.address(logits),
        )

    def _matrix(self, weight: Weight) -> c.Matrix:
        packed = packed_matrix(weight)
        self._memory.keep(packed)
        return packed.matrix


def set_slice(structure: c.SequenceSlice, text: SequenceSlice, memory: PointedMemory) -> None:
    """Set the structure of a text's rows."""
    memory.set_fields(
        structure,
        count=text.count,
        start=text.start,
        reserved=text.reserved,
        scored=text.scored,
        capacity=text.cache.capacity,
        keys=text.cache.keys,
        values=text.cache.values,
    )
    if text.memory is not None:
        keys, values = text.memory
        source = keys.shape[2]
        memory.set_fields(structure, source=source, memory_keys=keys, memory_values=values)
    if text.parents is not None:
        parents = text.parents.long().contiguous()
        memory.set_fields(structure, tree=parents.shape[0], parents=parents)


def set_chain(
    draft: c.ChainDraft, chain: ChainSpec, buffers: ChainBuffers, memory: PointedMemory
) -> None:
    """Set the structure of a chain to draft."""
    memory.set_fields(
        draft,
        steps=chain.steps,
        has_threshold=chain.threshold is not None,
        threshold=chain.threshold or 0.0,
        temperature=chain.temperature,
        end_count=len(chain.end_tokens),
        end_tokens=token_array(chain.end_tokens),
        uniforms=chain.uniforms,
        **buffers._asdict(),
    )


def set_tree(
    draft: c.TreeDraft, tree_spec: TreeSpec, buffers: TreeBuffers, memory: PointedMemory
) -> None:
    """Set the structure of a tree to grow."""
    memory.set_fields(
        draft,
        **{name: getattr(tree_spec, name) for name in TREE_NUMBERS},
        prunes=tree_spec.prune_confidence is not None,
        prune_confidence=tree_spec.prune_confidence or 0.0,
        end_count=len(tree_spec.end_tokens),
        end_tokens=token_array(tree_spec.end_tokens),
        **buffers._asdict(),
    )


def token_array(tokens: Collection[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(tokens))(*tokens)


def float_buffer(*shape: int) -> Tensor:
    """Memory where the kernels write numbers: float32 on the CPU, whatever PyTorch's default type and
    device are.
    """
    return torch.empty(shape, dtype=torch.float32, device="cpu")
