"""The cache of one sequence in a Transformers module: keys and values by slot, and states that
cannot be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    get_layer_types_and_kwargs,
)

from bild_lab.engine.models.hf.layer_control import KeysStored, current_plan
from bild_lab.engine.session import on_device

# windows are a matter of masks
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
BY_SLOT = (*ATTENTION, "dummy", "moe", "mlp")  # the last three keep nothing
CUT = (DynamicLayer, DynamicIndexedLayer, DummyLayer)  # a row of these can be dropped by itself
SNAPSHOTS = 16  # a longer way back runs the text again


class SlotCache(DynamicCache):
    """A cache that stores rows from the plan's slot `start` on, and drops all rows from there on
    first.

    Layers may hold different numbers of rows, as a plan may run only some layers. Keys outside a
    window are kept, because a rollback may bring them back into it. config: of the model, whose
    layers may keep other states than keys and values (recurrent and convolutional ones); None: all
    layers have keys and values.
    """

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        super().__init__()
        text = None if config is None else config.get_text_config(decoder=True)
        if set(getattr(text, "layer_types", None) or ()) - set(BY_SLOT):
            kinds, options = get_layer_types_and_kwargs(text)
            self.layers = [
                _empty_layer(kind, layer_options)
                for kind, layer_options in zip(kinds, options, strict=True)
            ]

    @property
    def cuts(self) -> bool:
        """Whether any row can be dropped by itself. A recurrent state holds all rows that ran."""
        return all(type(layer) in CUT for layer in self.layers)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        plan = current_plan()
        layer = self._layer(layer_idx)
        if layer is not None and _stores_all(layer) and layer.is_initialized:
            # a prefix was stored before the layers ran: move it to the device of its layer
            keys, values = layer.keys.to(key_states.device), layer.values.to(value_states.device)
            layer.keys, layer.values = keys[..., : plan.start, :], values[..., : plan.start, :]
        stored = super().update(key_states, value_states, layer_idx, *arguments, **options)
        if plan.fill:
            raise KeysStored
        return stored

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        layer = self.layers[layer_idx]
        if layer.is_indexer_initialized:
            layer.indexer_keys = layer.indexer_keys[:, : current_plan().start]
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return current_plan().start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys the rows attend to, and the position of the first."""
        layer = self._layer(layer_idx)
        if isinstance(layer, DynamicSlidingWindowLayer):
            return layer.get_mask_sizes(query_length)
        return current_plan().start + query_length, 0

    def _layer(self, index: int) -> Any:
        """The cache of a layer; None for one that has stored nothing yet."""
        return self.layers[index] if index < len(self.layers) else None

    def gather(self, start: int, rows: list[int], layers: list[int]) -> None:
        """Move these rows, counted from slot `start`, to slot `start` and the following slots, in
        these layers.
        """
        taken = [*range(start), *(start + row for row in rows)]
        for layer in (self.layers[index] for index in layers):
            if getattr(layer, "keys", None) is None:
                continue
            # a spread model has layers on several devices
            index = on_device(taken, layer.keys.device)
            layer.keys = layer.keys.index_select(-2, index)
            layer.values = layer.values.index_select(-2, index)
            if getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys.index_select(1, index)

    @property
    def lengths(self) -> set[int]:
        """How many rows the layers with keys and values hold."""
        keys_by_layer = [
            layer.keys
            for layer in self.layers
            if _stores_all(layer) and isinstance(layer.keys, Tensor)
        ]
        return {keys.shape[-2] for keys in keys_by_layer}


class Snapshots:
    """The states of a cache that cannot be cut, saved before every forward.

    To go back to a row, the newest state before it is restored, and the rows from there on run
    again, together with the next rows. The first state, of an empty cache, is always kept.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._layers = [layer for layer in cache.layers if type(layer) not in CUT]
        self._tokens: Int[Tensor, " n"] | None = None  # all rows that the state holds
        self._saved = [(0, self._state())]  # the number of rows, and the state after them

    def restart_slot(self, start: int) -> int:
        """How many rows the newest state holds from which slot `start` can be reached."""
        if start == self._length:
            return start
        return next(length for length, _ in reversed(self._saved) if length <= start)

    def go_back(self, start: int) -> Int[Tensor, " n"] | None:
        """Restore the newest state before slot `start`.

        Returns the rows that have to run again, up to that slot.
        """
        restart = self.restart_slot(start)
        if self._tokens is None:
            return None
        if restart != self._length:
            self._saved = [(length, state) for length, state in self._saved if length <= restart]
            for layer, state in zip(self._layers, self._saved[-1][1], strict=True):
                vars(layer).update(_copied(state))
        repeated_tokens, self._tokens = self._tokens[restart:start], self._tokens[:restart]
        return repeated_tokens

    def add(self, tokens: Int[Tensor, " m"]) -> None:
        """Save the state, before these rows run."""
        if self._saved[-1][0] < self._length:
            self._saved = [
                self._saved[0],
                *self._saved[1:][2 - SNAPSHOTS :],
                (self._length, self._state()),
            ]
        self._tokens = tokens if self._tokens is None else torch.cat([self._tokens, tokens])

    def _state(self) -> list[dict[str, Any]]:
        """What the layers hold, without keys and values that are stored by slot: these are cut."""
        states = []
        for layer in self._layers:
            state = dict(vars(layer))
            if _stores_all(layer):
                for name in ("keys", "values"):
                    state.pop(name, None)
            states.append(_copied(state))
        return states

    @property
    def _length(self) -> int:
        return 0 if self._tokens is None else len(self._tokens)


def _empty_layer(kind: str, options: dict[str, Any]) -> Any:
    """A layer's cache. One beside a recurrent state keeps all keys, whatever its window is."""
    if kind in ATTENTION:
        return DynamicLayer()
    if kind == "hybrid_sliding":
        return LinearAttentionAndFullAttentionLayer(options["number_of_states"])
    return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)


def _stores_all(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def _copied(value: Any) -> Any:
    """The value with copies of all tensors in it, as later forwards may write to them."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copied(element) for element in value]
    if isinstance(value, dict):
        return {key: _copied(element) for key, element in value.items()}
    return value
