"""A checkpoint run by our own decoders, behind the same session protocol as the Hugging Face engine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from bild_lab.engine.draft import Tree, as_tree
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import families, llama, t5
from bild_lab.engine.models.native.attention import Rows, place_rows
from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.compiled import Workspace, roomy
from bild_lab.engine.request import Source
from bild_lab.engine.session import Prefix, Scores, rows_of
from bild_lab.engine.trace import Forward, forward_log

SPARE_ROWS = 64  # for the branches of a tree and drafts behind the length limit


@dataclass
class NativeModel(HuggingFaceModel):
    """Native weights load at the first use of `decoder`; `module` is there for the Hugging Face peers.

    compiled: run steps of fixed shape through torch.compile, and on a GPU as CUDA graphs. Each shape
    is compiled when it first comes up.
    """

    compiled: bool = False
    engine: ClassVar[str] = "native"

    def __post_init__(self) -> None:
        self.compiled_steps = 0  # so far; a timing during which it grew measured the compiler
        self._free: list[Workspace] = []
        self._latest: weakref.ref[NativeSession] | None = None

    @cached_property
    def decoder(self) -> llama.LlamaDecoder | t5.T5Decoder:
        family = t5.T5Decoder if self.encoder_decoder else llama.LlamaDecoder
        return family(self.checkpoint.weights(self.dtype).to(self.device).eval())

    def load(self) -> None:
        _ = self.decoder

    def as_compiled(self) -> NativeModel:
        """The same weights, run through compiled steps."""
        model = NativeModel(self.checkpoint, self.device, self.dtype, compiled=True)
        model.decoder = self.decoder
        return model

    @torch.inference_mode()
    def start(self, source: Source, room: int, prefix: Prefix | None = None) -> NativeSession:
        if self.compiled and prefix is None:
            workspace = self._workspace(len(source.prompt) + room + SPARE_ROWS, source)
            session = NativeSession(self.decoder, source, room, workspace=workspace)
            weakref.finalize(session, self._free.append, workspace)
        else:
            session = NativeSession(self.decoder, source, room, prefix)
        self._latest = weakref.ref(session)
        return session

    @torch.inference_mode()
    def prompt_cache(self, embeddings: Float[Tensor, "p dim"]) -> Prefix:
        """Keys and values of a shallow prompt: its rows see those before them, and none has a rotation."""
        decoder, (layers, heads, dim) = self.decoder, self.decoder.cache_shape
        count = embeddings.shape[0]
        cache = KeyValueCache((layers, heads, count, dim), embeddings.dtype, embeddings.device)
        nowhere = torch.zeros(count, dtype=torch.long, device=embeddings.device)
        among = torch.ones(count, count, dtype=torch.bool, device=embeddings.device).tril()
        rows = Rows(slice(0, count), count, nowhere, among, key_positions=nowhere)
        decoder.run(embeddings, rows, cache, layers=range(layers))
        return Prefix(cache.keys, cache.values)

    @property
    def latest(self) -> NativeSession | None:
        """The session that was started last, while somebody holds it."""
        return None if self._latest is None else self._latest()

    def _workspace(self, capacity: int, source: Source) -> Workspace:
        """One that no session uses; of a fitting one from before the compiled steps serve again."""
        length = 0 if source.encoder_ids is None else source.encoder_ids.shape[1]
        for workspace in self._free:
            if workspace.fits(capacity, length):
                self._free.remove(workspace)
                return workspace
        self._free.clear()  # all too small
        return Workspace(self.decoder, roomy(capacity), roomy(length) if length else 0, self._count_step)

    def _count_step(self) -> None:
        self.compiled_steps += 1


@dataclass(frozen=True)
class Begun:
    """Rows behind the cached ones that went through the first layers only, as an early exit drafts.

    Their keys and values of these layers stand in the cache. tokens: what they are rows of. states: what the
    last of these layers gave. layers: how many there are.
    """

    tokens: Int[Tensor, " n"]
    states: Float[Tensor, "n dim"]
    layers: int

    def shared(self, fed: Int[Tensor, " m"]) -> int:
        """How many of the fed rows are these, from the first on. This waits for an accelerator."""
        both = min(self.tokens.shape[0], fed.shape[0])
        return int((self.tokens[:both] == fed[:both]).long().cumprod(0).sum())


class NativeSession:
    """One sequence in one native decoder.

    A decoder-only prompt goes in with the first rows. The cache is allocated once, for the prompt and
    `room` rows behind it; rows beyond that make it grow. In a workspace every step but the first is of
    fixed shape; its logits stand until the next one.
    """

    def __init__(
        self,
        decoder: llama.LlamaDecoder | t5.T5Decoder,
        source: Source,
        room: int,
        prefix: Prefix | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.decoder = decoder
        self.origin = source
        self._prefix = prefix
        self._reserved = 0 if prefix is None else prefix.length
        self._pending = list(source.prompt[:-1])  # prompt tokens not fed yet
        self._base = 0  # first slot of the last extend's rows
        self._begun: Begun | None = None
        self._workspace = workspace
        if workspace is None:
            layers, heads, dim = decoder.cache_shape
            capacity = self._reserved + len(source.prompt) + room + SPARE_ROWS
            weight = decoder.embedding
            self.cache = KeyValueCache((layers, heads, capacity, dim), weight.dtype, weight.device)
        else:
            self.cache = workspace.cache
            self.cache.length = 0
        if prefix is not None:
            self.cache.keys[:, :, : self._reserved] = prefix.keys
            self.cache.values[:, :, : self._reserved] = prefix.values
            self.cache.length = self._reserved
        self.log = forward_log()
        self.source = 0
        self.memory: tuple[t5.Memory, ...] = ()
        if source.encoder_ids is not None:
            self.source = source.encoder_ids.shape[1]
            self.memory = (decoder.encode(source.encoder_ids[0]),)
            if workspace is not None:
                workspace.remember(self.memory)
            if self.log is not None:
                self.log.append(Forward(decoder.config, self.source, source=self.source, encoder=True))

    @property
    def length(self) -> int:
        return self.cache.length - self._reserved + len(self._pending)

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[int] | Int[Tensor, " m"],
        parents: Tree | Int[Tensor, " m"] | None = None,
        scored: int | None = None,
        probe: Bool[Tensor, " m"] | None = None,
        hidden: bool = False,
    ) -> Scores:
        """As the protocol says. probe: rows that also see the prefix; None: those of its masks. hidden: return
        every layer's output.

        Rows of a chain that went through the first layers before (`begin`) go on behind these.
        """
        decoder, cache = self.decoder, self.cache
        device = decoder.embedding.device
        fed = rows_of(tokens, device)
        count, waiting = fed.shape[0], len(self._pending)
        if waiting:
            fed = torch.cat([rows_of(self._pending, device), fed])
            if parents is not None:  # a root (-1) follows the last pending row
                parents = torch.cat([torch.arange(-1, waiting - 1, device=device), as_tree(parents).parents + waiting])
            if probe is not None:
                probe = torch.cat([probe.new_zeros(waiting), probe])
            self._pending = []
        start, scored = cache.length, scored or count
        self._base = start + waiting
        begun, self._begun = self._begun, None
        if begun is not None and parents is None and probe is None and not hidden and (same := begun.shared(fed)):
            return self._go_on(fed, begun.states[:same], begun.layers, scored)
        self.record(fed.shape[0], start, scored)
        if self._workspace is not None and not waiting and not hidden and self._workspace.takes(count):
            logits, final = self._workspace.step(fed, parents)
            cache.length = start + count
            return Scores(logits=logits[-scored:], final=final[-scored:])
        self.reserve(fed.shape[0])
        cache = self.cache
        if self._prefix is not None and probe is None:
            probe = self._prefix.probe(fed, decoder.embedding.shape[0])
        rows = place_rows(start, fed.shape[0], device, parents, self._reserved, probe)
        outputs: list[Tensor] | None = [] if hidden else None
        layers = range(len(decoder.layers))
        x = decoder.run(self._embed(fed), rows, cache, *self.memory, layers=layers, hidden=outputs)
        cache.length = rows.stop
        kept = None if outputs is None else torch.stack(outputs)[:, -count:]
        final = decoder.final(x[-scored:])
        return Scores(logits=linear(final, decoder.head), final=final, hidden=kept)

    def _go_on(self, fed: Int[Tensor, " m"], states: Float[Tensor, "n dim"], begun: int, scored: int) -> Scores:
        """Of these rows the first n stand behind layer `begun`: the others catch up, then all go on together."""
        decoder, (done, count) = self.decoder, (states.shape[0], fed.shape[0])
        start, depth = self.cache.length, len(decoder.layers)
        rows = self.place(0, count)
        if done < count:
            late = self.place(done, count - done)
            x = decoder.run(self._embed(fed[done:]), late, self.cache, *self.memory, layers=range(begun))
            states = torch.cat([states, x])
            self.record(count - done, start + done, layers=begun)
        x = decoder.run(states, rows, self.cache, *self.memory, layers=range(begun, depth))
        self.record(count, start, scored, layers=depth - begun, first_layer=begun)
        self.cache.length = rows.stop
        final = decoder.final(x[-scored:])
        return Scores(logits=linear(final, decoder.head), final=final)

    def begin(self, ahead: int, begun: Begun) -> None:
        """Remember rows that went through the first layers, `ahead` rows behind the cached ones, for `extend`."""
        before = self._begun
        if ahead == 0:
            self._begun = begun
        elif before is None or before.layers != begun.layers or before.tokens.shape[0] < ahead:
            self._begun = None  # nobody knows the states of the rows between
        else:
            tokens = torch.cat([before.tokens[:ahead], begun.tokens])
            self._begun = Begun(tokens, torch.cat([before.states[:ahead], begun.states]), begun.layers)

    def place(self, ahead: int, count: int, parents: Tree | Int[Tensor, " m"] | None = None) -> Rows:
        """Where so many rows stand, `ahead` rows behind the cached ones; there is room for them."""
        start = self.reserve(ahead + count) + ahead
        return place_rows(start, count, self.decoder.embedding.device, parents, self._reserved)

    def record(self, rows: int, cached: int, scored: int = 0, **layers: int) -> None:
        """Note a forward of some layers, where somebody listens."""
        if self.log is not None:
            self.log.append(Forward(self.decoder.config, rows, cached, scored, self.source, **layers))

    def _embed(self, tokens: Int[Tensor, " m"]) -> Float[Tensor, "m dim"]:
        if self._prefix is None:
            return self.decoder.embed(tokens)
        return self._prefix.embed(tokens, self.decoder.embedding.shape[0], self.decoder.embed)

    def reserve(self, rows: int) -> int:
        """Have room for so many rows behind the cached ones; returns the first one's slot."""
        start = self.cache.length
        if start + rows > self.cache.capacity:
            self.cache = self.cache.grown(2 * (start + rows))
            self._workspace = None  # whose steps know their own cache only
        return start

    @torch.inference_mode()
    def prefill(self) -> None:
        """Run the prompt, which otherwise goes in with the first rows."""
        if self._pending:
            last = self._pending.pop()  # the others are pending before it
            self.extend([last], scored=1)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        self.cache.keep(self._base, path)

    def rollback(self, length: int) -> None:
        self._begun = None
        self.cache.length = min(self.cache.length, self._reserved + length)


def why_not_native(config: PreTrainedConfig, dtype: torch.dtype) -> str | None:
    """Why a configuration cannot run natively in this precision, or None if it can."""
    if config.is_encoder_decoder and dtype == torch.float16:
        return "T5 overflows in float16 without the clamping that Transformers does"
    return (t5 if config.is_encoder_decoder else families).why_not(config)
