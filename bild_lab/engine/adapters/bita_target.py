"""A target with a BiTA adapter, on either engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from bild_lab.engine.adapters.bita import BitaAdapter
from bild_lab.engine.request import Source
from bild_lab.engine.session import LoadedModel, Prefix, Session
from bild_lab.engine.trace import Forward
from bild_lab.errors import require_whole


class BitaTarget:
    """The target's own weights and, for probe rows only, an adapter's prompt and masks (BiTA §3.1).

    Text rows never attend to the prompt or to a mask, so their logits are the target's own. Token
    `vocab_size + j` is mask j. A shallow prompt runs through the layers once; its keys and values are
    then a prefix, like those of a deep prompt.

    prompt_tokens: use only this many of the adapter's prompt tokens, from the first; None: all.
    """

    def __init__(self, target: LoadedModel, adapter: BitaAdapter, prompt_tokens: int | None = None) -> None:
        most = adapter.config.prompt_tokens
        count = most if prompt_tokens is None else prompt_tokens
        require_whole("prompt_tokens", count, 0, most, f"null uses all {most} of the adapter")
        self._target, self._adapter, self._prompt_tokens = target, adapter, count

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
    ) -> Session:
        return self._target.start(source, room, forwards, target, self._prefix)

    @cached_property
    def _prefix(self) -> Prefix:
        adapter, count = self._adapter, self._prompt_tokens
        if adapter.config.prompt == "shallow" and count:
            return replace(self._target.prompt_cache(adapter.prompt_embeddings[:count]), masks=adapter.masks)
        if adapter.config.prompt == "deep":
            keys, values = adapter.prompt_keys[:, :, :count], adapter.prompt_values[:, :, :count]
            return Prefix(keys, values, adapter.masks)
        shape = (adapter.config.layers, adapter.config.kv_heads, 0, adapter.config.head_dim)
        nothing = adapter.masks.new_empty(shape)
        return Prefix(nothing, nothing, adapter.masks)
