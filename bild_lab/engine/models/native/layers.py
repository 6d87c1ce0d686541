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
from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.models.cached_session import (
    LONG_PROMPT,
    ForwardPass,
    Layers,
    concatenated_scores,
)
from bild_lab.engine.models.native import llama, t5
from bild_lab.engine.models.native.attention import KeyValueCache, joined
from bild_lab.engine.models.native.compiled import Workspace
from bild_lab.engine.models.native.cpu import PackedDecoder
from bild_lab.engine.models.native.packed_pass import KernelDecoder, SequenceSlice
from bild_lab.engine.models.native.side_by_side import (
    BatchedSources,
    Pool,
    SideBySide,
    side_by_side,
)
from bild_lab.engine.models.native.stack import GROWING
from bild_lab.engine.models.placed_rows import PlacedRows, place_rows
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    Drafted,
    DraftSpec,
    Prefix,
    Scores,
    TreeSpec,
    on_device,
)

SPARE_ROWS = 64  # room for the branches of a tree and drafts beyond the length limit
# in a batch, a longer prompt runs by itself: PyTorch's matrix products depend on their number of
# rows
ALONE_ROWS = 64

Decoder = llama.LlamaDecoder | t5.T5Decoder


def cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, source: int) -> int:
    """The size of one text's cache, for so many tokens of prompt and answer, and of its source's
    keys and values.
    """
    if config.is_encoder_decoder:
        layers, width = config.num_decoder_layers, config.num_heads * config.d_kv
    else:
        width = config.num_key_value_heads * llama.head_width(config)
        layers, source = config.num_hidden_layers, 0
    return 2 * layers * width * (tokens + SPARE_ROWS + source) * dtype.itemsize


class NativeLayers(Layers):
    """A native decoder's layers and the KV cache of one sequence.

    The cache is allocated once, for the prompt and `room` more rows; it grows if that is not
    enough. With a workspace, every plain pass except the prompt's has a fixed shape; its logits are
    valid until the next one. With a batch, rows run together with those of its other texts; a pool
    then holds the cache, unless kernels run them, which take any number of caches. masks: of the
    prefix, one table for all rows of a pass.
    fused_drafting: kernels may draft a chain or a tree as one program, a compiled GPU a chain.
    """

    fused_drafting = True

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        room: int,
        prefix: Prefix | None = None,
        workspace: Workspace | None = None,
        packed: KernelDecoder | None = None,
        packed_encoder: PackedDecoder | None = None,
        batch: Batch | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.device = decoder.embedding.device
        self.depth = len(decoder.layers)
        self.reserved = 0 if prefix is None else prefix.length
        self.source = source.encoder_length
        self.packed = packed
        self._prefix = prefix
        self._prompt_length = len(source.prompt)
        self._workspace = workspace
        self._batch = batch
        self.supports_draft_vocab = workspace is None  # compiled steps have the whole head
        # 1. the cache
        if workspace is not None:
            self.cache = workspace.cache
        else:
            capacity = self.reserved + len(source.prompt) + room + SPARE_ROWS
            self.cache = self._new_cache(capacity) if pool is None else pool.take(capacity)
            decoder.reach(capacity)  # otherwise the tables could grow while two threads read them
        # 2. the prefix
        if prefix is not None:
            self.cache.keys[:, :, : self.reserved] = prefix.keys
            self.cache.values[:, :, : self.reserved] = prefix.values
        self.masks = None if prefix is None or prefix.masks is None else prefix.masks.contiguous()
        # 3. the source
        self.memory: tuple[t5.Memory, ...] = ()
        if source.encoder_ids is not None:
            memory = self._encode_source(packed_encoder, source.encoder_ids[0])
            self.memory = (memory if pool is None else pool.remember(self.cache.place, memory),)
            if workspace is not None:
                workspace.remember(self.memory)

    def _new_cache(self, capacity: int) -> KeyValueCache:
        layers, heads, dim = self.decoder.cache_shape
        shape = (layers, heads, capacity, dim)
        return KeyValueCache(shape, self.decoder.embedding.dtype, self.device)

    def _encode_source(self, encoder: PackedDecoder | None, tokens: Int[Tensor, " s"]) -> t5.Memory:
        if encoder is None:
            return self.decoder.encode(tokens)
        run = partial(encode_by_kernels, self.decoder, encoder)
        return self._run_batched("encode", run, tokens, prefetchable=True)

    def _run_batched(
        self,
        kind: Hashable,
        run: Callable[[list[Any]], Sequence[Any]],
        operand: Any,
        prefetchable: bool = False,
    ) -> Any:
        """The result of `run` for this operand; in a batch it runs with the operands of other texts
        of the same kind. prefetchable: as in `PendingOp`.
        """
        if self._batch is None:
            return run([operand])[0]
        size = self.depth * self.decoder.embedding.shape[1]
        key = (id(self.decoder), kind)
        return self._batch.wait(PendingOp(key, size, run, operand, prefetchable))

    def run(self, forward_pass: ForwardPass) -> Scores:
        # 1. a compiled step, where there is one
        if self._runs_compiled(forward_pass):
            logits, head_input = self._workspace.step(forward_pass)
            count = forward_pass.logits
            return Scores(logits[-count:], head_input[-count:])
        self._reserve(forward_pass.start + forward_pass.count)
        # 2. a long prompt in parts, which bounds the memory of their buffers, or without the batch
        if self.packed is not None and (prompt_rows := self._rows_in_advance(forward_pass)):
            first_part, second_part = split_prompt(forward_pass, prompt_rows)
            run_prompt = self.run if self.packed.runs_prompts else self._run_by_pytorch
            return concatenated_scores([run_prompt(first_part), self.run(second_part)])
        if self.packed is None and self._batch is not None and forward_pass.prompt > ALONE_ROWS:
            return self._run_by_pytorch(forward_pass)
        # 3. all else, with passes of other texts that run the same
        kind = (
            None if forward_pass.layers is None else tuple(forward_pass.layers),
            forward_pass.skipped,
            forward_pass.fill,
            forward_pass.states is None,
            bool(forward_pass.hidden),
            id(self._prefix),
            forward_pass.vocabulary,
        )
        run = run_rows if self.packed is None else run_packed
        return self._run_batched(kind, run, (self, forward_pass))

    @property
    def program_rows(self) -> int:
        return LONG_PROMPT if self.packed is None or self.packed.runs_prompts else ALONE_ROWS

    def _rows_in_advance(self, forward_pass: ForwardPass) -> int:
        """How many of the prompt's rows run before the others, if it is long; 0 if not.

        Where PyTorch runs them it is always the same number, as its sums depend on the number of
        rows: all but the last two, which any first forward of the text has.
        """
        if self.packed.runs_prompts:
            return LONG_PROMPT if forward_pass.prompt > LONG_PROMPT else 0
        rows = self._prompt_length - 2
        return rows if forward_pass.prompt >= rows > ALONE_ROWS else 0

    def _run_by_pytorch(self, forward_pass: ForwardPass) -> Scores:
        """Run rows by PyTorch, and no other text's beside them."""
        return run_rows([(self, forward_pass)])[0]

    def _runs_compiled(self, forward_pass: ForwardPass) -> bool:
        return (
            forward_pass.is_plain
            and not forward_pass.prompt
            and self._workspace is not None
            and self._workspace.takes(forward_pass)
        )

    @property
    def _program_decoder(self) -> KernelDecoder | None:
        """What drafts a chain or a tree as one program, if anything does."""
        return self.packed if self.fused_drafting and self._prefix is None else None

    def draft(self, start: int, tokens: Sequence[int], spec: DraftSpec) -> Drafted | None:
        is_tree = isinstance(spec, TreeSpec)
        if self._workspace is not None and self.fused_drafting:
            if is_tree or spec.layers or spec.vocabulary:
                return None
            return self._workspace.draft(start, tokens, spec)
        if (packed := self._program_decoder) is None:
            return None
        later_rows = (spec.depth - 1) * spec.width if is_tree else spec.steps
        self._reserve(start + len(tokens) + later_rows)
        layers = () if is_tree else (spec.layers, spec.skipped)
        run = partial(run_program, packed.draft)
        return self._run_batched(
            (type(spec), spec.vocabulary, *layers), run, (self, start, tokens, spec)
        )

    def forward_until_confident(
        self, start: int, token: int, threshold: float
    ) -> tuple[Float[Tensor, "1 vocab"], int] | None:
        if (packed := self._program_decoder) is None:
            return None
        self._reserve(start + 1)
        row = self.text_rows(start, 1)
        scores = packed.run(on_device([token], self.device), [row], exit_threshold=threshold)
        return scores.logits, scores.layers_run

    def text_rows(
        self, start: int, count: int, scored: int = 1, tree: Tree | None = None
    ) -> SequenceSlice:
        """Rows of this text from slot `start` on, for the kernels."""
        parents = None if tree is None else tree.parents
        memory = (self.memory[0].keys, self.memory[0].values) if self.memory else None
        return SequenceSlice(count, start, self.cache, memory, scored, parents, self.reserved)

    def placed(self, forward_pass: ForwardPass) -> PlacedRows:
        """The slots, positions and visible slots of a pass's rows."""
        probe = None
        if self._prefix is not None:
            probe = self._prefix.probe(forward_pass.tokens, self.decoder.embedding.shape[0])
        return place_rows(
            forward_pass.start,
            forward_pass.count,
            self.device,
            forward_pass.tree,
            self.reserved,
            probe,
        )

    def scored(self, forward_pass: ForwardPass) -> int:
        """Kernels run the head wherever its input is asked for."""
        return forward_pass.logits if self.packed is None else forward_pass.read

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        self.cache.gather(
            start, rows, slice(None) if layers is None else slice(layers[0], layers[-1] + 1)
        )

    def embed(self, forward_pass: ForwardPass) -> Float[Tensor, "m dim"]:
        tokens = forward_pass.tokens
        if self._prefix is None:
            return self.decoder.embed(tokens)
        return self._prefix.embed(tokens, self.decoder.embedding.shape[0], self.decoder.embed)

    def _reserve(self, slots: int) -> None:
        """Make sure that the cache has so many slots, and the kernels the rotations of as many
        positions.
        """
        if slots > self.cache.capacity:
            self.cache = self.cache.grown(2 * slots)
            self._workspace = None  # its compiled steps only use its own cache
        if self.packed is not None and slots > self.packed.positions:
            with GROWING:
                if slots > self.packed.positions:  # another thread may have given them meanwhile
                    positions = max(slots, self.packed.least_positions)
                    self.packed.rotate_by(*self.decoder.rotations(positions))


TextPass = tuple[NativeLayers, ForwardPass]  # a pass, and the layers of its text


def run_rows(text_passes: Sequence[TextPass]) -> list[Scores]:
    """Passes of one or several texts through the same layers, by PyTorch: matrix products over all
    rows at once.
    """
    text_layers, forward_pass = text_passes[0]  # the others run the same layers
    decoder = text_layers.decoder
    # 1. where the rows stand, and what the first layer reads
    rows, cache, memory = placed_together(text_passes)
    x = joined(
        [
            layers.embed(text_pass) if text_pass.states is None else text_pass.states
            for layers, text_pass in text_passes
        ]
    )
    # 2. the layers
    layer_indices = forward_pass.layers
    if layer_indices is None:
        layer_indices = range(text_layers.depth)
    if forward_pass.fill:
        decoder.fill(x, rows, cache, layer_indices)
        return [Scores(None)] * len(text_passes)
    states: list[Tensor] | None = [x] if forward_pass.hidden else None
    if len(layer_indices):
        x = decoder.run(
            x,
            rows,
            cache,
            *memory,
            layers=layer_indices,
            hidden=states,
            skipped=forward_pass.skipped,
        )
    # 3. the head, of the rows that are read
    logits = head_inputs = None
    if any(text_pass.read for _, text_pass in text_passes):
        outputs_read = last_rows_by_text(x, text_passes, "count", "read")
        head_input = decoder.final(outputs_read)
        head_inputs = rows_by_text(head_input, text_passes, "read")
        scored_inputs = last_rows_by_text(head_input, text_passes, "read", "logits")
        if scored_inputs.shape[0]:
            scores = decoder.scores(scored_inputs, forward_pass.vocabulary)
            logits = rows_by_text(scores, text_passes, "logits")
    return _scores(text_passes, logits, head_inputs, states)


def placed_together(
    text_passes: Sequence[TextPass],
) -> tuple[PlacedRows | SideBySide, KeyValueCache | Pool, Sequence[Any]]:
    """The rows of all passes as one, the cache that they use, and their sources, if any."""
    text_layers, forward_pass = text_passes[0]
    if len(text_passes) == 1:
        return text_layers.placed(forward_pass), text_layers.cache, text_layers.memory
    pool = text_layers.cache.pool
    places = [layers.cache.place for layers, _ in text_passes]
    rows = side_by_side(
        [layers.placed(text_pass) for layers, text_pass in text_passes], places, text_layers.device
    )
    if not text_layers.memory:
        return rows, pool, []
    return rows, pool, [BatchedSources(pool, rows, [layers.source for layers, _ in text_passes])]


def run_packed(text_passes: Sequence[TextPass]) -> list[Scores]:
    """Passes of one or several texts through the same layers, by kernels.

    Logits and hidden states are float32 whatever the precision of the weights.
    """
    text_layers, forward_pass = text_passes[0]  # the others run the same layers
    states = None
    if forward_pass.states is not None:
        states = joined([text_pass.states for _, text_pass in text_passes])
    packed_scores = text_layers.packed.run(
        joined([text_pass.tokens for _, text_pass in text_passes]),
        [
            layers.text_rows(text_pass.start, text_pass.count, text_pass.read, text_pass.tree)
            for layers, text_pass in text_passes
        ],
        states=states,
        masks=text_layers.masks,
        reads=any(text_pass.head_input for _, text_pass in text_passes),
        layers=forward_pass.layers,
        hidden=bool(forward_pass.hidden),
        fill=forward_pass.fill,
        skipped=forward_pass.skipped,
        vocabulary=forward_pass.vocabulary,
    )
    hidden = None
    if forward_pass.hidden:
        if states is None:
            states = joined([layers.embed(text_pass) for layers, text_pass in text_passes])
        hidden = [states.float(), *packed_scores.hidden]
    logits = head_inputs = None
    if packed_scores.logits is not None:
        logits = rows_by_text(packed_scores.logits, text_passes, "read")
    if packed_scores.head_input is not None:
        head_input = packed_scores.head_input.to(text_layers.cache.keys.dtype)
        head_inputs = rows_by_text(head_input, text_passes, "read")
    return _scores(text_passes, logits, head_inputs, hidden)


def split_prompt(forward_pass: ForwardPass, rows: int) -> tuple[ForwardPass, ForwardPass]:
    """The first rows of a prompt, and those after them."""
    rows_after = forward_pass.count - rows
    states = states_after = None
    if forward_pass.states is not None:
        states, states_after = forward_pass.states[:rows], forward_pass.states[rows:]
    tree = forward_pass.tree
    if tree is not None and not forward_pass.earlier:
        # the prompt's first rows are a chain, which all others see like any rows before them
        tree = Tree((tree.parents[rows:] - rows).clamp(min=ROOT))
    first_part = replace(
        forward_pass,
        tokens=forward_pass.tokens[:rows],
        tree=None,
        states=states,
        logits=max(0, forward_pass.logits - rows_after),
        head_input=max(0, forward_pass.head_input - rows_after),
        prompt=rows,
    )
    second_part = replace(
        forward_pass,
        start=forward_pass.start + rows,
        tokens=forward_pass.tokens[rows:],
        tree=tree,
        states=states_after,
        logits=min(forward_pass.logits, rows_after),
        head_input=min(forward_pass.head_input, rows_after),
        prompt=forward_pass.prompt - rows,
    )
    return first_part, second_part


def _scores(
    text_passes: Sequence[TextPass],
    logits: Sequence[Tensor] | None,
    head_inputs: Sequence[Tensor] | None,
    states: Sequence[Tensor] | None,
) -> list[Scores]:
    """What each text gets of a pass.

    logits, head_inputs: of each text. states: of all rows, what the first layer reads and then each
    layer's output.
    """
    hidden: Sequence[tuple[Tensor, ...]] = [()] * len(text_passes)
    if states is not None:
        hidden = _hidden_by_text(text_passes, states)
    return [
        Scores(
            last_rows(logits[index], text_pass.logits) if text_pass.logits else None,
            head_inputs[index] if head_inputs is not None and text_pass.read else None,
            hidden[index],
        )
        for index, (_, text_pass) in enumerate(text_passes)
    ]


def _hidden_by_text(
    text_passes: Sequence[TextPass], states: Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """The hidden states that each text asked for. states: as in `_scores`."""
    text_layers, forward_pass = text_passes[0]
    layers = range(text_layers.depth) if forward_pass.layers is None else forward_pass.layers
    depths = (layers[0] if len(layers) else 0, *(layer + 1 for layer in layers))
    states_after = {
        depth: rows_by_text(state, text_passes, "count")
        for depth, state in zip(depths, states, strict=True)
    }
    return [
        tuple(states_after[depth][index] for depth in text_pass.hidden)
        for index, (_, text_pass) in enumerate(text_passes)
    ]


def rows_by_text(
    rows: Tensor, text_passes: Sequence[TextPass], count_name: str
) -> Sequence[Tensor]:
    """The rows of each text. count_name: the attribute of a pass that says how many it has."""
    if len(text_passes) == 1:
        return [rows]
    return rows.split([getattr(text_pass, count_name) for _, text_pass in text_passes])


def last_rows_by_text(
    rows: Tensor, text_passes: Sequence[TextPass], count_name: str, last_name: str
) -> Tensor:
    """The last rows of each text, one text after the other. count_name, last_name: the attributes of
    a pass that say how many rows it has, and how many of them these are.
    """
    return joined(
        [
            last_rows(text_rows, getattr(text_pass, last_name))
            for text_rows, (_, text_pass) in zip(
                rows_by_text(rows, text_passes, count_name), text_passes, strict=True
            )
        ]
    )


def last_rows(rows: Tensor, count: int) -> Tensor:
    """The last rows, which may be all."""
    return rows if rows.shape[0] == count else rows[rows.shape[0] - count :]


def run_program(
    program: Callable[..., list[Any]],
    drafts: Sequence[tuple[NativeLayers, int, Sequence[int], DraftSpec]],
) -> list[Any]:
    """Chains or trees of one or several texts, by a program of the kernels; None where there is
    none.

    drafts: of each text its layers, the first slot, the tokens before the draft, and what to draft.
    """
    texts = [layers.text_rows(start, len(tokens)) for layers, start, tokens, _ in drafts]
    return program(
        [tokens for _, _, tokens, _ in drafts], texts, [spec for _, _, _, spec in drafts]
    )


def encode_by_kernels(
    decoder: t5.T5Decoder, encoder: PackedDecoder, sources: Sequence[Int[Tensor, " s"]]
) -> list[t5.Memory]:
    """The cross-attention keys and values of one or several sources, by the CPU kernels."""
    _, heads, dim = decoder.cache_shape
    lengths = [len(tokens) for tokens in sources]
    texts = []
    for tokens, length in zip(sources, lengths, strict=True):
        shape = (encoder.depth, heads, length, dim)
        cache = KeyValueCache(shape, decoder.embedding.dtype, tokens.device)
        texts.append(SequenceSlice(length, 0, cache, scored=length))
    keys_values = encoder.run(joined(sources), texts).logits
    return [decoder.memory(rows) for rows in keys_values.split(lengths)]
