"""A native decoder's layers with the cache of one sequence; in a batch their rows meet those of
other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from bild_lab.engine.batch_scheduler import Batch, PendingOp
from bild_lab.engine.draft import Tree
from bild_lab.engine.models.cached_session import LONG_PROMPT, ForwardPass, Layers
from bild_lab.engine.models.native import llama, t5
from bild_lab.engine.models.native.attention import (
    KeyValueCache,
    PlacedRows,
    joined,
    place_rows,
)
from bild_lab.engine.models.native.compiled import Workspace
from bild_lab.engine.models.native.cpu import PackedDecoder, SequenceSlice
from bild_lab.engine.models.native.side_by_side import Pool, SourcesTogether, side_by_side
from bild_lab.engine.request import Source
from bild_lab.engine.session import ChainResult, ChainSpec, GrownTree, Prefix, Scores, TreeSpec

SPARE_ROWS = 64  # for the branches of a tree and drafts beyond the length limit
# in a batch, a longer prompt runs by itself: PyTorch's matrix products depend on their number of
# rows
ALONE_ROWS = 64

Decoder = llama.LlamaDecoder | t5.T5Decoder


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, source: int) -> int:
    """Of one text's cache, for so many tokens of prompt and answer, and of its source's keys and
    values.
    """
    if config.is_encoder_decoder:
        layers, width = config.num_decoder_layers, config.num_heads * config.d_kv
    else:
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        layers, width, source = config.num_hidden_layers, config.num_key_value_heads * head_dim, 0
    return 2 * layers * width * (tokens + SPARE_ROWS + source) * dtype.itemsize


class NativeLayers(Layers):
    """A native decoder's layers and the KV cache of one sequence.

    The cache is allocated once, for the prompt and `room` more rows; it grows if that is not
    enough. With a workspace, every whole pass except the prompt's has a fixed shape; its logits are
    valid until the next one. With a batch, rows run together with those of its other texts; a pool
    then holds the cache, unless the CPU kernels run them, which take any number of caches. masks:
    of the prefix, one table for all rows of a pass.
    fused_drafting: the CPU kernels may draft a chain or a tree as one program, a compiled GPU a
    chain.
    """

    fused_drafting = True

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        room: int,
        prefix: Prefix | None = None,
        workspace: Workspace | None = None,
        packed: PackedDecoder | None = None,
        packed_encoder: PackedDecoder | None = None,
        batch: Batch | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.device, self.depth = decoder.embedding.device, len(decoder.layers)
        self.reserved = 0 if prefix is None else prefix.length
        self.source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self._prefix, self._workspace, self.packed, self._batch = prefix, workspace, packed, batch
        self.supports_draft_vocab = workspace is None  # compiled steps have the whole head
        capacity = self.reserved + len(source.prompt) + room + SPARE_ROWS
        if workspace is not None:
            self.cache = workspace.cache
        else:
            layers, heads, dim = decoder.cache_shape
            if pool is None:
                self.cache = KeyValueCache(
                    (layers, heads, capacity, dim), decoder.embedding.dtype, self.device
                )
            else:
                self.cache = pool.take(capacity)
            decoder.reach(capacity)  # otherwise the tables could grow while two threads read them
        if prefix is not None:
            self.cache.keys[:, :, : self.reserved] = prefix.keys
            self.cache.values[:, :, : self.reserved] = prefix.values
        self.masks = None if prefix is None or prefix.masks is None else prefix.masks.contiguous()
        self.memory: tuple[t5.Memory, ...] = ()
        if source.encoder_ids is not None:
            memory = self._encoded(packed_encoder, source.encoder_ids[0])
            self.memory = (memory if pool is None else pool.remember(self.cache.place, memory),)
            if workspace is not None:
                workspace.remember(self.memory)

    def _encoded(self, encoder: PackedDecoder | None, tokens: Int[Tensor, " s"]) -> t5.Memory:
        if encoder is None:
            return self.decoder.encode(tokens)
        return self._together(
            "encode", partial(encoded, self.decoder, encoder), tokens, prefetchable=True
        )

    def _together(
        self,
        kind: Hashable,
        run: Callable[[list[Any]], Sequence[Any]],
        work: Any,
        prefetchable: bool = False,
    ) -> Any:
        """Run this work, in a batch together with what other texts want of the same kind."""
        if self._batch is None:
            return run([work])[0]
        size = self.depth * self.decoder.embedding.shape[1]
        return self._batch.wait(PendingOp((id(self.decoder), kind), size, run, work, prefetchable))

    def run(self, work: ForwardPass) -> Scores:
        if (
            work.whole
            and not work.prompt
            and self._workspace is not None
            and self._workspace.takes(work)
        ):
            logits, head_input = self._workspace.step(work)
            return Scores(logits[-work.logits :], head_input[-work.logits :])
        self._reserve(work.start + work.count)
        # in parts, which bounds the memory of their buffers
        if self.packed is not None and work.prompt > LONG_PROMPT:
            return one_after_another([self.run(part) for part in split(work, LONG_PROMPT)])
        if self.packed is None and self._batch is not None and work.prompt > ALONE_ROWS:
            return run_rows([(self, work)])[0]
        chosen = None if work.layers is None else tuple(work.layers)
        states = work.states is None, bool(work.hidden)
        kind = (chosen, work.skipped, work.fill, *states, id(self._prefix), work.vocabulary)
        return self._together(kind, run_rows if self.packed is None else run_packed, (self, work))

    @property
    def _whole(self) -> PackedDecoder | None:
        """What drafts a chain or a tree as one program, if anything does."""
        return self.packed if self.fused_drafting and self._prefix is None else None

    def draft(self, start: int, tokens: Sequence[int], chain: ChainSpec) -> ChainResult | None:
        if self._workspace is not None and self.fused_drafting:
            return (
                None
                if chain.layers or chain.vocabulary
                else self._workspace.draft(start, tokens, chain)
            )
        if (packed := self._whole) is None:
            return None
        self._reserve(start + len(tokens) + chain.steps)
        kind = ("draft", chain.layers, chain.skipped, chain.vocabulary)
        return self._together(
            kind, partial(run_program, packed.draft), (self, start, tokens, chain)
        )

    def forward_until_confident(
        self, start: int, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        if (packed := self._whole) is None:
            return None
        self._reserve(start + 1)
        found = packed.run(torch.tensor([token]), [self.text_rows(start, 1)], bar=threshold)
        return found.logits, found.ran

    def grow(self, start: int, tokens: Sequence[int], tree_spec: TreeSpec) -> GrownTree | None:
        if (packed := self._whole) is None:
            return None
        self._reserve(start + len(tokens) + (tree_spec.depth - 1) * tree_spec.width)
        kind = ("grow", tree_spec.vocabulary)
        return self._together(
            kind, partial(run_program, packed.grow), (self, start, tokens, tree_spec)
        )

    def text_rows(
        self, start: int, count: int, scored: int = 1, tree: Tree | None = None
    ) -> SequenceSlice:
        """Rows of this text from slot `start` on, for the kernels."""
        parents = None if tree is None else tree.parents
        memory = (self.memory[0].keys, self.memory[0].values) if self.memory else None
        return SequenceSlice(count, start, self.cache, memory, scored, parents, self.reserved)

    def placed(self, work: ForwardPass) -> PlacedRows:
        """The slots, positions and visible slots of a pass's rows."""
        probe = (
            None
            if self._prefix is None
            else self._prefix.probe(work.tokens, self.decoder.embedding.shape[0])
        )
        return place_rows(work.start, work.count, self.device, work.tree, self.reserved, probe)

    def scored(self, work: ForwardPass) -> int:
        """The kernels run the head wherever its input is asked for."""
        return work.logits if self.packed is None else work.read

    def last_memory(self, layers: int) -> tuple[Tensor, Tensor]:
        return self.memory[0].keys[-layers:], self.memory[0].values[-layers:]

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        self.cache.gather(
            start, rows, slice(None) if layers is None else slice(layers[0], layers[-1] + 1)
        )

    def embed(self, work: ForwardPass) -> Float[Tensor, "m dim"]:
        if self._prefix is None:
            return self.decoder.embed(work.tokens)
        return self._prefix.embed(work.tokens, self.decoder.embedding.shape[0], self.decoder.embed)

    def _reserve(self, slots: int) -> None:
        """Make sure that the cache has so many slots, and the kernels the rotations of as many
        positions.
        """
        if slots > self.cache.capacity:
            self.cache = self.cache.grown(2 * slots)
            self._workspace = None  # its compiled steps only use its own cache
        if self.packed is not None and slots > self.packed.positions:
            self.packed.rotate_by(*self.decoder.rotations(slots))


Work = tuple[NativeLayers, ForwardPass]


def run_rows(works: Sequence[Work]) -> list[Scores]:
    """Passes of one or several texts through the same layers, by PyTorch: matrix products over all
    rows at once.
    """
    (first, one), decoder = works[0], works[0][0].decoder
    memory: Sequence[Any]
    if len(works) == 1:
        rows, cache, memory = first.placed(one), first.cache, first.memory
    else:
        pool, places = first.cache.pool, [layers.cache.place for layers, _ in works]
        rows = side_by_side([layers.placed(work) for layers, work in works], places, first.device)
        cache, memory = pool, []
        if first.memory:
            memory = [SourcesTogether(pool, rows, [layers.source for layers, _ in works])]
    x = joined(
        [layers.embed(work) if work.states is None else work.states for layers, work in works]
    )
    chosen = range(first.depth) if one.layers is None else one.layers
    if one.fill:
        decoder.fill(x, rows, cache, chosen)
        return [Scores(None)] * len(works)
    states: list[Tensor] | None = [x] if one.hidden else None
    if len(chosen):
        x = decoder.run(x, rows, cache, *memory, layers=chosen, hidden=states, skipped=one.skipped)
    if not any(work.read for _, work in works):
        return _scores(works, None, None, states)
    reads = [
        last(part, work.read)
        for part, (_, work) in zip(of_each(x, works, "count"), works, strict=True)
    ]
    heads = of_each(decoder.final(joined(reads)), works, "read")
    scored = joined([last(head, work.logits) for head, (_, work) in zip(heads, works, strict=True)])
    logits = (
        of_each(decoder.scores(scored, one.vocabulary), works, "logits")
        if scored.shape[0]
        else None
    )
    return _scores(works, logits, heads, states)


def run_packed(works: Sequence[Work]) -> list[Scores]:
    """Passes of one or several texts through the same layers, by the CPU kernels.

    Logits and hidden states are float32 whatever the precision of the weights.
    """
    first, one = works[0]
    given = None if one.states is None else joined([work.states for _, work in works])
    found = first.packed.run(
        joined([work.tokens for _, work in works]),
        [layers.text_rows(work.start, work.count, work.read, work.tree) for layers, work in works],
        states=given,
        masks=first.masks,
        reads=any(work.head_input for _, work in works),
        layers=one.layers,
        hidden=bool(one.hidden),
        fill=one.fill,
        skipped=one.skipped,
        vocabulary=one.vocabulary,
    )
    states = None
    if one.hidden:
        before = joined([layers.embed(work) for layers, work in works]) if given is None else given
        states = [before.float(), *found.hidden]
    logits = None if found.logits is None else of_each(found.logits, works, "read")
    head_input = None if found.head_input is None else found.head_input.to(first.cache.keys.dtype)
    return _scores(
        works, logits, None if head_input is None else of_each(head_input, works, "read"), states
    )


def split(work: ForwardPass, rows: int) -> tuple[ForwardPass, ForwardPass]:
    """The first rows of a prompt, and the others."""
    before, others = (
        (None, None) if work.states is None else (work.states[:rows], work.states[rows:])
    )
    after = work.count - rows
    first = replace(
        work,
        tokens=work.tokens[:rows],
        tree=None,
        states=before,
        logits=max(0, work.logits - after),
        head_input=max(0, work.head_input - after),
        prompt=rows,
    )
    rest = {"logits": min(work.logits, after), "head_input": min(work.head_input, after)}
    start, tokens = work.start + rows, work.tokens[rows:]
    return first, replace(
        work, start=start, tokens=tokens, states=others, prompt=work.prompt - rows, **rest
    )


def one_after_another(parts: Sequence[Scores]) -> Scores:
    """The outputs of a pass from those of its parts."""

    def whole(name: str) -> Tensor | None:
        found = [value for part in parts if (value := getattr(part, name)) is not None]
        return joined(found) if found else None

    hidden = tuple(joined(states) for states in zip(*(part.hidden for part in parts), strict=True))
    return Scores(whole("logits"), whole("head_input"), hidden)


def _scores(
    works: Sequence[Work],
    logits: Sequence[Tensor] | None,
    heads: Sequence[Tensor] | None,
    states: Sequence[Tensor] | None,
) -> list[Scores]:
    """What each text gets of a pass.

    logits, heads: of each text. states: of all rows, what the first layer reads and then each
    layer's output.
    """
    first, one = works[0]
    hidden: Sequence[tuple[Tensor, ...]] = [()] * len(works)
    if states is not None:
        layers = range(first.depth) if one.layers is None else one.layers
        depths = (layers[0] if len(layers) else 0, *(layer + 1 for layer in layers))
        after = dict(zip(depths, (of_each(state, works, "count") for state in states), strict=True))
        hidden = [
            tuple(after[depth][text] for depth in work.hidden)
            for text, (_, work) in enumerate(works)
        ]
    return [
        Scores(
            last(logits[text], work.logits) if work.logits else None,
            heads[text] if heads is not None and work.read else None,
            hidden[text],
        )
        for text, (_, work) in enumerate(works)
    ]


def of_each(rows: Tensor, works: Sequence[Work], which: str) -> Sequence[Tensor]:
    """The rows of each text, of which a pass has as many as this attribute says."""
    return [rows] if len(works) == 1 else rows.split([getattr(work, which) for _, work in works])


def last(rows: Tensor, count: int) -> Tensor:
    """The last rows, which may be all."""
    return rows if rows.shape[0] == count else rows[rows.shape[0] - count :]


def run_program(
    program: Callable[..., list[Any]], works: Sequence[tuple[NativeLayers, int, Sequence[int], Any]]
) -> list[Any]:
    """Chains or trees of one or several texts, by a program of the CPU kernels."""
    texts = [layers.text_rows(start, len(tokens)) for layers, start, tokens, _ in works]
    return program([tokens for _, _, tokens, _ in works], texts, [ask for *_, ask in works])


def encoded(
    decoder: t5.T5Decoder, encoder: PackedDecoder, sources: Sequence[Int[Tensor, " s"]]
) -> list[t5.Memory]:
    """The cross-attention keys and values of one or several sources, by the CPU kernels."""
    _, heads, dim = decoder.cache_shape
    texts = []
    for tokens in sources:
        rows = KeyValueCache(
            (encoder.depth, heads, len(tokens), dim), decoder.embedding.dtype, tokens.device
        )
        texts.append(SequenceSlice(len(tokens), 0, rows, scored=len(tokens)))
    found = encoder.run(joined(sources), texts).logits
    return [decoder.memory(each) for each in found.split([len(tokens) for tokens in sources])]
