"""Views of a target that draft for it: some of its layers, over its weights and its cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.models.native.model import Begun, NativeModel, NativeSession
from bild_lab.engine.request import Source
from bild_lab.engine.session import Scores, rows_of
from bild_lab.errors import UserError


class EarlyExit:
    """The first layers of the target, then its final norm and head (self-speculation by early exit).

    exit_layer: how many layers. What these layers cache is what the target's own pass caches there, so
    nothing is computed for the view but the tokens that it drafts, and the target's pass over them goes on
    behind these layers (BiLD §4.4).
    """

    engine = "native"

    def __init__(self, target: NativeModel, exit_layer: int) -> None:
        depth = depth_of(target)
        if isinstance(exit_layer, bool) or not isinstance(exit_layer, int) or not 1 <= exit_layer <= depth:
            raise UserError(
                f"exit_layer must be a whole number from 1 to the target's {depth} layers, got {exit_layer!r}"
            )
        self._target, self._layers = target, tuple(range(exit_layer))

    @property
    def device(self) -> torch.device:
        return self._target.device

    def start(self, source: Source, room: int) -> View:
        return View(session_of(self._target, source), self._layers)


class LayerSkip:
    """The target without some of its layers (self-speculation by skipping, Zhang et al., "Draft & Verify").

    skipped_layers: counted from 0. Behind the first of them the layers see inputs of their own, while
    their keys and values of committed tokens are the whole target's.
    """

    engine = "native"

    def __init__(self, target: NativeModel, skipped_layers: Sequence[int]) -> None:
        depth = depth_of(target)
        skipped = set(skipped_layers) if isinstance(skipped_layers, Sequence) else {None}
        if not skipped <= set(range(depth)) or not 0 < len(skipped) < depth:
            raise UserError(
                f"skipped_layers must name some, not all, of the layers 0 to {depth - 1}, got {skipped_layers!r}"
            )
        self._target = target
        self._layers = tuple(layer for layer in range(depth) if layer not in skipped)

    @property
    def device(self) -> torch.device:
        return self._target.device

    def start(self, source: Source, room: int) -> View:
        return View(session_of(self._target, source), self._layers)


class View:
    """A session of some layers, ahead of the target's own in the target's cache.

    Its rows never outlive a round: the target's pass over the same tokens goes on with them where these are
    the first layers, and overwrites them otherwise.
    """

    def __init__(self, session: NativeSession, layers: tuple[int, ...]) -> None:
        self._session, self._layers = session, layers
        self._first = layers == tuple(range(len(layers)))
        self._ahead = 0  # rows behind the target's

    @property
    def length(self) -> int:
        return self._session.length + self._ahead

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[int] | Int[Tensor, " m"],
        parents: Int[Tensor, " m"] | None = None,
        scored: int | None = None,
    ) -> Scores:
        session, decoder = self._session, self._session.decoder
        session.prefill()
        fed = rows_of(tokens, decoder.embedding.device)
        rows = session.place(self._ahead, fed.shape[0], parents)
        x = decoder.run(decoder.embed(fed), rows, session.cache, *session.memory, layers=self._layers)
        scored = scored or rows.count
        session.record(rows.count, rows.stop - rows.count, scored, layers=len(self._layers))
        if self._first and parents is None:
            session.begin(self._ahead, Begun(fed, x, len(self._layers)))
        self._ahead += rows.count
        return Scores(logits=decoder.logits(x[-scored:]))

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("a view drafts chains; the target's pass replaces its rows")

    def rollback(self, length: int) -> None:
        self._ahead = min(self._ahead, max(0, length - self._session.length))


def depth_of(target: NativeModel) -> int:
    """The target's decoder layers. Raises UserError where they cannot be run one by one."""
    if not isinstance(target, NativeModel):
        raise UserError(
            "running some of the target's layers needs the native engine, which knows T5, mT5, Llama, Mistral, Qwen2, "
            f"Qwen3 and text models of Gemma 3, got the {target.engine} engine; set runtime.engine=native or auto"
        )
    config = target.checkpoint.config
    return config.num_decoder_layers if config.is_encoder_decoder else config.num_hidden_layers


def session_of(target: NativeModel, source: Source) -> NativeSession:
    """The session that the target started for this source."""
    session = target.latest
    if session is None or session.origin is not source:
        raise RuntimeError("a view starts after the target, on the same source")
    return session
