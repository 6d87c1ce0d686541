"""Views of a target that draft for it: some of its layers, with its weights and its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from bild_lab.engine.request import Source
from bild_lab.engine.session import EVERYTHING, Chain, Growth, LoadedModel, Prefix, Rows, Scores, Session, Want, as_rows
from bild_lab.engine.trace import Forward
from bild_lab.errors import UserError, require_whole


class TargetLayers:
    """Some layers of the target as a draft model, in the target's own KV cache."""

    def __init__(self, target: LoadedModel, layers: Sequence[int]) -> None:
        self._target, self.layers = target, tuple(layers)

    @property
    def device(self) -> torch.device:
        return self._target.device

    @property
    def engine(self) -> str:
        return self._target.engine

    def start(
        self,
        source: Source,
        room: int,
        forwards: list[Forward] | None = None,
        target: Session | None = None,
        prefix: Prefix | None = None,
    ) -> View:
        if target is None:
            raise ValueError("a view of the target starts beside the target's session, got none")
        return View(target, self.layers)


class EarlyExit(TargetLayers):
    """The first layers of the target, then its final norm and head (self-speculation by early exit).

    exit_layer: how many layers. These layers cache the same keys and values as in the target's own forward. So
    the view runs only the tokens that it drafts, and the target then runs only its other layers on them
    (BiLD §4.4).
    """

    def __init__(self, target: LoadedModel, exit_layer: int) -> None:
        target.require_layers("an early exit")
        depth = target.depth
        require_whole("exit_layer", exit_layer, 1, depth, f"the target has {depth} layers")
        super().__init__(target, range(exit_layer))


class LayerSkip(TargetLayers):
    """The target without some of its layers (self-speculation by skipping, Zhang et al., "Draft & Verify").

    skipped_layers: counted from 0. After the first skipped layer, drafted tokens have other hidden states than in
    the full target; the keys and values of committed tokens are the full target's.
    """

    def __init__(self, target: LoadedModel, skipped_layers: Sequence[int]) -> None:
        target.require_layers("skipping layers")
        depth = target.depth
        skipped = set(skipped_layers) if isinstance(skipped_layers, Sequence) else {None}
        if not skipped <= set(range(depth)) or not 0 < len(skipped) < depth:
            raise UserError(
                f"skipped_layers must name some, not all, of the layers 0 to {depth - 1}, got {skipped_layers!r}"
            )
        super().__init__(target, [layer for layer in range(depth) if layer not in skipped])


class View:
    """A session of some layers, which stores its rows after the target's own in the target's cache. Chains only.

    Its rows last for one round. If its layers are the target's first ones, the target's forward over the same
    tokens continues from them; otherwise it overwrites them.
    """

    def __init__(self, target: Session, layers: tuple[int, ...]) -> None:
        self._target, self._layers = target, layers
        self._ahead = 0  # the view's rows after the target's

    @property
    def forwards(self) -> list[Forward]:
        return self._target.forwards

    @property
    def length(self) -> int:
        return self._target.length + self._ahead

    def extend(self, rows: Rows | Sequence[int] | Int[Tensor, " m"], want: Want = EVERYTHING) -> Scores:
        rows = as_rows(rows)
        scores = self._target.extend(replace(rows, at=self.length), replace(want, layers=self._layers))
        self._ahead += len(rows.tokens)
        return scores

    def draft(self, rows: Sequence[int], chain: Chain) -> None:
        """The layers of a view run one forward at a time."""

    def grow(self, rows: Sequence[int], growth: Growth) -> None:
        """A view drafts chains."""

    def keep(self, path: Sequence[int]) -> None:
        raise NotImplementedError("a view drafts chains; the target's pass replaces its rows")

    def rollback(self, length: int) -> None:
        self._ahead = min(self._ahead, max(0, length - self._target.length))

    def prefill(self) -> None:
        self._target.prefill()

    def adopt(self, row: int, layers: Sequence[int]) -> None:
        raise NotImplementedError("a view's rows are never the text's")
