"""A checkpoint that runs on our own decoders."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from bild_lab.engine.models.cached_session import CachedSession, Pass
from bild_lab.engine.models.checkpoint import Checkpoint, Prompt, quantization
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import families, llama, t5
from bild_lab.engine.models.native.attention import PlacedRows, place_rows
from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.compiled import Workspace, roomy
from bild_lab.engine.models.native.cpu import PackedDecoder
from bild_lab.engine.models.processed_session import processed
from bild_lab.engine.request import Source
from bild_lab.engine.session import Chain, DraftedChain, Feed, GrownTree, Growth, Prefix, Scores, Session, Want
from bild_lab.engine.trace import Forward

SPARE_ROWS = 64  # for the branches of a tree and drafts beyond the length limit
KERNEL_ROWS = 64  # a longer prompt runs by itself, and by PyTorch, whose matrix products are faster there

Decoder = llama.LlamaDecoder | t5.T5Decoder


class NativeModel:
    """Our decoder for a checkpoint. The weights load at the first use of `decoder`.

    transformers: the same checkpoint as a module of Transformers, for methods that run that. compiled: run steps of
    fixed shape through torch.compile, and on a GPU as CUDA graphs. Each shape is compiled at its first use.
    kernels: run by our C++ on the CPU, which also drafts a chain or a tree as one program.
    """

    drafts_whole = True

    def __init__(self, transformers: HuggingFaceModel, compiled: bool = False, kernels: bool = False) -> None:
        self.transformers, self.compiled, self.kernels = transformers, compiled, kernels
        self.compiled_steps = 0  # so far; a timing during which it grew measured the compiler
        self._free: list[Workspace] = []

    @property
    def engine(self) -> str:
        return "kernels" if self.kernels else "native"

    @property
    def checkpoint(self) -> Checkpoint:
        return self.transformers.checkpoint

    @property
    def device(self) -> torch.device:
        return self.transformers.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformers.dtype

    @cached_property
    def decoder(self) -> Decoder:
        family = t5.T5Decoder if self.checkpoint.encoder_decoder else llama.LlamaDecoder
        return family(self.checkpoint.weights(self.dtype).to(self.device).eval())

    @cached_property
    def packed(self) -> PackedDecoder | None:
        """The decoder's weights packed for the CPU kernels; None where PyTorch runs it."""
        return PackedDecoder(self.decoder.outline()) if self.kernels else None

    @cached_property
    def packed_encoder(self) -> PackedDecoder | None:
        """The same for the encoder; None if there is none."""
        encodes = self.kernels and self.checkpoint.encoder_decoder
        return PackedDecoder(self.decoder.encoder_outline()) if encodes else None

    @property
    def depth(self) -> int:
        return self.checkpoint.depth

    def load(self) -> None:
        """Read the weights now rather than at the first decoding."""
        _ = self.decoder, self.packed, self.packed_encoder

    @property
    def positions(self) -> None:
        """Rotations and relative positions have no end. Those that change with the length do not run here."""
        return None

    session_positions = source_positions = positions

    def admit(self, feed: Feed) -> None:
        """Read the weights. The tests compare these decoders with Transformers, for every architecture they know."""
        self.load()

    def text_logits(self, text: Source) -> Float[Tensor, "n vocab"]:
        return self.start(text, 1).extend([text.prompt[-1]], Want(prompt=True)).logits

    def source(self, prompt: Prompt, max_tokens: int | None = None) -> Source:
        return self.transformers.source(prompt, max_tokens)

    def require_layers(self, what: str) -> None:
        """Nothing to check: every native decoder can run its layers one by one."""

    def as_compiled(self) -> NativeModel:
        """The same weights, run in compiled steps."""
        return self._again(compiled=True)

    def by_kernels(self) -> NativeModel:
        """The same weights, run by the CPU kernels."""
        return self._again(kernels=True)

    def step_by_step(self) -> NativeModel:
        """The same weights, which draft by one forward after another."""
        model = copy.copy(self)
        model.drafts_whole = False
        return model

    def _again(self, **options: bool) -> NativeModel:
        model = NativeModel(self.transformers, **options)
        model.decoder = self.decoder
        return model

    @torch.inference_mode()
    def start(
        self,
        source: Source,
        room: int,
        forwards: list[Forward] | None = None,
        target: Session | None = None,
        prefix: Prefix | None = None,
    ) -> Session:
        workspace = None
        if self.compiled and prefix is None:
            workspace = self._workspace(len(source.prompt) + room + SPARE_ROWS, source)
        layers = NativeLayers(self.decoder, source, room, prefix, workspace, self.packed, self.packed_encoder)
        layers.drafts_whole = self.drafts_whole
        session = CachedSession(layers, source.prompt, [] if forwards is None else forwards)
        if workspace is not None:
            weakref.finalize(session, self._free.append, workspace)
        return processed(session, source)

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt, [p, dim] embeddings: causal attention, no rotary positions."""
        decoder, (layers, heads, dim) = self.decoder, self.decoder.cache_shape
        count = embeddings.shape[0]
        cache = KeyValueCache((layers, heads, count, dim), embeddings.dtype, embeddings.device)
        nowhere = torch.zeros(count, dtype=torch.long, device=embeddings.device)
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        rows = PlacedRows(slice(0, count), count, nowhere, among, key_positions=nowhere)
        decoder.run(embeddings, rows, cache, layers=range(layers))
        return Prefix(cache.keys, cache.values)

    def _workspace(self, capacity: int, source: Source) -> Workspace:
        """A workspace that no session uses. One that fits is reused with its compiled steps."""
        length = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        for workspace in self._free:
            if workspace.fits(capacity, length):
                self._free.remove(workspace)
                return workspace
        self._free.clear()  # all too small
        return Workspace(self.decoder, roomy(capacity), roomy(length) if length else 0, self._count_step)

    def _count_step(self) -> None:
        self.compiled_steps += 1


class NativeLayers:
    """A native decoder's layers and the KV cache of one sequence.

    The cache is allocated once, for the prompt and `room` more rows; it grows if that is not enough. With a
    workspace, every whole pass except the prompt's has a fixed shape; its logits are valid until the next one.
    drafts_whole: the CPU kernels may draft a chain or a tree as one program, a compiled GPU a chain.
    """

    drafts_whole = True

    def __init__(
        self,
        decoder: Decoder,
        source: Source,
        room: int,
        prefix: Prefix | None = None,
        workspace: Workspace | None = None,
        packed: PackedDecoder | None = None,
        packed_encoder: PackedDecoder | None = None,
    ) -> None:
        self.decoder, self.config = decoder, decoder.config
        self.device, self.depth = decoder.embedding.device, len(decoder.layers)
        self.reserved = 0 if prefix is None else prefix.length
        self.source = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        self._prefix, self._workspace, self._packed = prefix, workspace, packed
        self.longest_joined = None if packed is None else KERNEL_ROWS
        if workspace is None:
            capacity = self.reserved + len(source.prompt) + room + SPARE_ROWS
            layers, heads, dim = decoder.cache_shape
            self.cache = KeyValueCache((layers, heads, capacity, dim), decoder.embedding.dtype, self.device)
            decoder.reach(capacity)  # otherwise the tables could grow while two threads read them
        else:
            self.cache = workspace.cache
        if prefix is not None:
            self.cache.keys[:, :, : self.reserved] = prefix.keys
            self.cache.values[:, :, : self.reserved] = prefix.values
        self.memory: tuple[t5.Memory, ...] = ()
        if source.encoder_ids is not None:
            by_kernels = packed_encoder is not None and self.source <= KERNEL_ROWS
            encode = partial(encoded, decoder, packed_encoder) if by_kernels else decoder.encode
            self.memory = (encode(source.encoder_ids[0]),)
            if workspace is not None:
                workspace.remember(self.memory)

    def run(self, work: Pass) -> Scores:
        if work.whole and not work.prompt and self._workspace is not None and self._workspace.takes(work):
            logits, head_input = self._workspace.step(work)
            return Scores(logits[-work.logits :], head_input[-work.logits :])
        self._reserve(work.start + work.count)
        if self._packed is not None and work.prompt <= KERNEL_ROWS:
            return self._run_packed(self._packed, work)
        decoder = self.decoder
        probe = None if self._prefix is None else self._prefix.probe(work.tokens, decoder.embedding.shape[0])
        rows = place_rows(work.start, work.count, self.device, work.tree, self.reserved, probe)
        x = self._embed(work) if work.states is None else work.states
        layers = range(self.depth) if work.layers is None else work.layers
        if work.fill:
            decoder.fill(x, rows, self.cache, layers)
            return Scores(None)
        states: list[Tensor] | None = [x] if work.hidden else None
        if len(layers):
            x = decoder.run(x, rows, self.cache, *self.memory, layers=layers, hidden=states)
        behind = self._behind(work)
        hidden = tuple(states[behind.index(depth)] for depth in work.hidden) if states else ()
        if not work.logits:
            return Scores(None, hidden=hidden)
        head_input = decoder.final(x[-work.logits :])
        return Scores(linear(head_input, decoder.head), head_input, hidden)

    def _run_packed(self, packed: PackedDecoder, work: Pass) -> Scores:
        """The same by the CPU kernels. Logits and hidden states are float32 whatever the precision of the weights."""
        placed = None
        if work.tree is not None or self.reserved:
            probe = None if self._prefix is None else self._prefix.probe(work.tokens, packed.vocab)
            placed = place_rows(work.start, work.count, self.device, work.tree, self.reserved, probe)
        rows = work.states
        if rows is None:
            rows = work.tokens if self._prefix is None else self._embed(work)
        self._place(packed, work.start + work.count)
        found = packed.run(
            rows,
            work.start,
            self.cache,
            self._cross(),
            scored=work.logits,
            layers=work.layers,
            placed=placed,
            reserved=self.reserved,
            hidden=bool(work.hidden),
            fill=work.fill,
        )
        hidden: tuple[Tensor, ...] = ()
        if work.hidden:
            before = work.states if work.states is not None else self._embed(work)
            states = [before.float(), *found.hidden]
            behind = self._behind(work)
            hidden = tuple(states[behind.index(depth)] for depth in work.hidden)
        head_input = None if found.head_input is None else found.head_input.to(self.cache.keys.dtype)
        return Scores(found.logits, head_input, hidden)

    def _behind(self, work: Pass) -> tuple[int, ...]:
        """After how many layers each state of a pass stands: what the first layer reads, then each layer's output."""
        layers = range(self.depth) if work.layers is None else work.layers
        return (layers[0] if len(layers) else 0, *(layer + 1 for layer in layers))

    @property
    def _whole(self) -> PackedDecoder | None:
        """What drafts a chain or a tree as one program, if anything does."""
        return self._packed if self.drafts_whole and self._prefix is None else None

    def draft(self, start: int, tokens: Sequence[int], chain: Chain) -> DraftedChain | None:
        if self._workspace is not None and self.drafts_whole:
            return self._workspace.draft(start, tokens, chain)
        if (packed := self._whole) is None:
            return None
        self._reserve(start + len(tokens) + chain.steps)
        self._place(packed, start + len(tokens) + chain.steps)
        return packed.draft(tokens, start, self.cache, self._cross(), chain)

    def grow(self, start: int, tokens: Sequence[int], growth: Growth) -> GrownTree | None:
        if (packed := self._whole) is None:
            return None
        slots = start + len(tokens) + (growth.depth - 1) * growth.width
        self._reserve(slots)
        self._place(packed, slots)
        return packed.grow(tokens, start, self.cache, self._cross(), growth)

    def _place(self, packed: PackedDecoder, positions: int) -> None:
        """Let the kernels have the rotations of so many positions."""
        if positions > packed.positions:
            packed.rotate_by(*self.decoder.rotations(positions))

    def _cross(self) -> tuple[Tensor, Tensor] | None:
        """Cross-attention keys and values."""
        return (self.memory[0].keys, self.memory[0].values) if self.memory else None

    def forwards(self, start: int, count: int) -> list[tuple[int, int]]:
        return [(start, count)]

    def scored(self, work: Pass) -> int:
        return work.logits

    def gather(self, start: int, rows: Sequence[int], layers: Sequence[int] | None = None) -> None:
        self.cache.gather(start, rows, slice(None) if layers is None else slice(layers[0], layers[-1] + 1))

    def _embed(self, work: Pass) -> Float[Tensor, "m dim"]:
        if self._prefix is None:
            return self.decoder.embed(work.tokens)
        return self._prefix.embed(work.tokens, self.decoder.embedding.shape[0], self.decoder.embed)

    def _reserve(self, slots: int) -> None:
        """Make sure that the cache has this many slots."""
        if slots > self.cache.capacity:
            self.cache = self.cache.grown(2 * slots)
            self._workspace = None  # its compiled steps only use its own cache


def encoded(decoder: t5.T5Decoder, encoder: PackedDecoder, tokens: Int[Tensor, " s"]) -> t5.Memory:
    """The cross-attention keys and values of a source, by the CPU kernels."""
    _, heads, dim = decoder.cache_shape
    rows = KeyValueCache((encoder.depth, heads, len(tokens), dim), decoder.embedding.dtype, tokens.device)
    return decoder.memory(encoder.run(tokens, 0, rows, scored=len(tokens)).logits)


def why_not_native(config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """Why a configuration cannot run natively in this precision, or None if it can."""
    if config.is_encoder_decoder and dtype == torch.float16:
        return "T5 overflows in float16 without the clamping that Transformers does"
    if (method := quantization(config)) is not None:
        return f"its weights are quantized ({method})"
    return (t5 if config.is_encoder_decoder else families).why_not(config)
