"""Layers of the target as draft models, in its own KV cache: early exits and skipped layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bild_lab.engine.models.processed_session import SessionOver
from bild_lab.engine.request import Source
from bild_lab.engine.session import (
    ALL_LOGITS,
    DEFAULT_OPTIONS,
    NOTHING,
    Drafted,
    DraftSpec,
    LoadedModel,
    OutputSpec,
    RowsOrTokens,
    Scores,
    Session,
    SessionOptions,
    Skipped,
    TreeSpec,
    as_rows,
)
from bild_lab.errors import UserError, require_whole


class TargetLayers:
    """Some layers of the target as a draft model, in the target's own KV cache.

    skipped: blocks that are left out of these layers. depth: how many layers the whole target has.
    """

    cuda_graph_safe = False  # see `load.resolve_compile`

    def __init__(
        self, target: LoadedModel, layers: Sequence[int], skipped: Skipped = NOTHING
    ) -> None:
        self.layers, self.skipped = tuple(layers), skipped
        self.depth, self.device, self.engine = target.depth, target.device, target.engine

    def start(
        self, source: Source, room: int, session_options: SessionOptions = DEFAULT_OPTIONS
    ) -> LayerView:
        return LayerView(session_options.target, self.layers, self.skipped)


class EarlyExit(TargetLayers):
    """The first layers of the target, then its final norm and head (self-speculation by early
    exit).

    exit_layer: how many layers. These layers cache the same keys and values as in the target's own
    forward. So the view runs only the tokens that it drafts, and the target then runs only its
    other layers on them (BiLD §4.4).
    """

    def __init__(self, target: LoadedModel, exit_layer: int) -> None:
        target.require_layers("an early exit")
        depth = target.depth
        require_whole("exit_layer", exit_layer, 1, depth, f"the target has {depth} layers")
        super().__init__(target, range(exit_layer))


class LayerSkip(TargetLayers):
    """The target without some of its layers or blocks (self-speculation by skipping, Zhang et al.,
    "Draft & Verify").

    skipped_layers: whole layers, counted from 0. skipped_attention, skipped_feed_forward: layers
    that run without this block; attention to the source of an encoder–decoder is left out with the
    other. After the first skipped block, drafted tokens have other hidden states than in the full
    target; the keys and values of committed tokens are the full target's.
    """

    def __init__(
        self,
        target: LoadedModel,
        skipped_layers: Sequence[int],
        skipped_attention: Sequence[int] = (),
        skipped_feed_forward: Sequence[int] = (),
    ) -> None:
        target.require_layers("skipping layers")
        depth = target.depth
        full_layers = named_layers("skipped_layers", skipped_layers, depth)
        attention = full_layers | named_layers("skipped_attention", skipped_attention, depth)
        feed_forward = full_layers | named_layers(
            "skipped_feed_forward", skipped_feed_forward, depth
        )
        if not 0 < len(attention) + len(feed_forward) < 2 * depth:
            raise UserError(
                f"skipped_layers must name some, not all, of the layers 0 to {depth - 1}, got"
                f" {skipped_layers!r}, with skipped_attention {skipped_attention!r} and"
                f" skipped_feed_forward {skipped_feed_forward!r}"
            )
        super().__init__(target, *skipping(depth, attention, feed_forward))
        if self.skipped:
            target.require_layers("skipping attention or feed-forward", by_block=True)


def named_layers(knob: str, layers: Sequence[int], depth: int) -> frozenset[int]:
    """The layers that a knob names. Raises UserError unless each is one of the target's."""
    named = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else [None]
    if any(
        isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < depth
        for layer in named
    ):
        raise UserError(
            f"{knob} must name some, not all, of the layers 0 to {depth - 1}, got {layers!r}"
        )
    return frozenset(named)


def skipping(
    depth: int, attention: frozenset[int], feed_forward: frozenset[int]
) -> tuple[list[int], Skipped]:
    """The layers that run, at least in part, without these blocks, and the blocks that they leave
    out.
    """
    whole_layers = attention & feed_forward
    layers = [layer for layer in range(depth) if layer not in whole_layers]
    return layers, Skipped(attention - whole_layers, feed_forward - whole_layers)


class LayerView(SessionOver):
    """Some layers of a session, which store their rows after the target's own in the target's
    cache. Chains only.

    Its rows last for one round. If its layers are the target's first ones, the target's forward
    over the same tokens continues from them; otherwise it overwrites them.
    """

    def __init__(self, target: Session, layers: tuple[int, ...], skipped: Skipped) -> None:
        super().__init__(target)
        self._layers, self._skipped = layers, skipped
        self._ahead = 0  # the view's rows after the target's

    @property
    def length(self) -> int:
        return self._session.length + self._ahead

    def extend(self, rows: RowsOrTokens, output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        layer_spec = replace(output_spec, layers=self._layers, skipped=self._skipped)
        scores = self._session.extend(replace(rows, position=self.length), layer_spec)
        self._ahead += len(rows.tokens)
        return scores

    def draft(self, rows: Sequence[int], spec: DraftSpec) -> Drafted | None:
        """Raises UserError for a tree: a view drafts chains."""
        if isinstance(spec, TreeSpec):
            raise UserError(
                "layers of the target draft chains alone; choose ModelDrafter for them, such as"
                " policy=layer_skip, or a draft model for trees"
            )
        spec = replace(spec, position=self.length, layers=self._layers, skipped=self._skipped)
        drafted = self._session.draft(rows, spec)
        if drafted is not None:
            self._ahead += len(rows) + drafted.forwards - 1
        return drafted

    def keep(self, path: Sequence[int]) -> None:
        """Nothing to keep: the target's pass replaces its rows."""

    def rollback(self, length: int) -> None:
        self._ahead = min(self._ahead, max(0, length - self._session.length))
