"""One text whose next token is begun before the current one is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bild_lab.engine.draft import ROOT, Tree
from bild_lab.engine.models.native.attention import Rows, place_rows
from bild_lab.engine.models.native.cache import KeyValueCache
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.ppd.lanes import Together
from bild_lab.engine.ppd.log import PipelineLog
from bild_lab.engine.request import Source
from bild_lab.engine.session import rows_of
from bild_lab.engine.trace import Forward, forward_log

Head = Callable[[Float[Tensor, "m dim"]], Float[Tensor, "m vocab"]]


class PipelinedSession:
    """Runs the target's layers in two parts, the second one beside the first layers of the next token's candidates.

    A candidate stands in the cache behind the current token, sees that and what is before it, and no other
    candidate. Its first d − d̄ layers read and write other layers of the cache than the current token's last ones,
    so both may run at once. A decoder-only prompt goes in with the first token.
    """

    def __init__(self, decoder: LlamaDecoder | T5Decoder, source: Source, room: int, log: PipelineLog) -> None:
        self._decoder, self._log = decoder, log
        self._exit, self._depth = log.exit_layer, log.layers
        self._ahead = log.layers - log.exit_layer  # layers that candidates run
        self._device = decoder.embedding.device
        capacity = len(source.prompt) + room + log.top_k
        layers, heads, dim = decoder.cache_shape
        self._cache = KeyValueCache((layers, heads, capacity, dim), decoder.embedding.dtype, self._device)
        if isinstance(decoder, LlamaDecoder):
            decoder.reach(capacity)  # a table that would else grow while two threads read it
        self._siblings = Tree(torch.full((log.top_k,), ROOT, device=self._device))
        self._forwards = forward_log()
        self._source = 0
        self._memory: tuple = ()
        if source.encoder_ids is not None:
            self._source = source.encoder_ids.shape[1]
            self._memory = (decoder.encode(source.encoder_ids[0]),)
            if self._forwards is not None:
                self._forwards.append(Forward(decoder.config, self._source, source=self._source, encoder=True))
        self._rows: Rows | None = None  # those of the current token
        self._begun: Float[Tensor, "1 dim"] | None = None  # the current token's, where it was a candidate

    def to_exit(self, tokens: Sequence[int]) -> Float[Tensor, "m dim"]:
        """The last token's row, and those before it that have not been run, up to the exit layer."""
        start = self._cache.length
        if self._begun is None:
            fed = rows_of(tokens[start:], self._device)
            x, first = self._decoder.embed(fed), 0
        else:
            x, first = self._begun, self._ahead
        self._rows = place_rows(start, x.shape[0], self._device)
        self._cache.length = self._rows.stop
        self._log.alone(self._exit - first)
        self._record(self._rows, self._exit - first, scored=1)
        return self._run(x, self._rows, range(first, self._exit))

    def finish(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "1 vocab"]:
        """What follows the last token, by all layers; nobody is asked for candidates."""
        self._log.together(self._ahead, 0)
        return self._finish(x)

    def finish_beside(
        self, x: Float[Tensor, "m dim"], candidates: Int[Tensor, " k"], together: Together
    ) -> tuple[Float[Tensor, "1 vocab"], Float[Tensor, "k dim"]]:
        """The same, while these candidates go through their first layers: what follows, and their hidden states."""
        rows = place_rows(self._rows.stop, candidates.shape[0], self._device, self._siblings)
        self._log.together(self._ahead, candidates.shape[0])
        self._record(rows, self._ahead, scored=0)
        return together(
            lambda: self._finish(x), lambda: self._run(self._decoder.embed(candidates), rows, range(self._ahead))
        )

    def continue_with(self, begun: Float[Tensor, "k dim"], candidate: int | None) -> None:
        """Which candidate the next token is; None where it is another, or nobody was asked."""
        self._begun = None
        if candidate is None:
            return
        self._begun = begun[candidate : candidate + 1]
        if candidate:  # its keys and values belong right behind the current token's
            slot = self._cache.length
            for store in (self._cache.keys, self._cache.values):
                store[: self._ahead, :, slot] = store[: self._ahead, :, slot + candidate]

    def _finish(self, x: Float[Tensor, "m dim"]) -> Float[Tensor, "1 vocab"]:
        self._record(self._rows, self._ahead, scored=1)
        return self._decoder.logits(self._run(x, self._rows, range(self._exit, self._depth))[-1:])

    def _run(self, x: Float[Tensor, "m dim"], rows: Rows, layers: range) -> Float[Tensor, "m dim"]:
        return self._decoder.run(x, rows, self._cache, *self._memory, layers=layers)

    def _record(self, rows: Rows, layers: int, scored: int) -> None:
        if self._forwards is not None:
            cached = rows.stop - rows.count
            self._forwards.append(
                Forward(self._decoder.config, rows.count, cached, scored, self._source, layers=layers)
            )
