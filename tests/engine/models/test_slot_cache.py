"""Rows of a cache by slot, and states that are saved because no row can be dropped from them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from bild_lab.engine.models.hf.layer_control import KeysStored, Plan, following
from bild_lab.engine.models.hf.slot_cache import SNAPSHOTS, SlotCache, Snapshots


def config(*kinds: str) -> SimpleNamespace:
    """Of a model with layers of these kinds, its text part inside another configuration."""
    layers = [
        SimpleNamespace(sliding_window=3, attention_chunk_size=3, number_of_conv_states=2)
        for _ in kinds
    ]
    text = SimpleNamespace(layer_types=list(kinds), per_layer_config=layers)
    return SimpleNamespace(get_text_config=lambda decoder=False: text if decoder else None)


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).view(1, 1, -1, 1)


def held(cache: SlotCache, layer: int) -> tuple[list[float], list[float]]:
    return tuple(
        each.flatten().tolist() for each in (cache.layers[layer].keys, cache.layers[layer].values)
    )


def store(cache: SlotCache, start: int, layer: int, *numbers: float, **plan: object) -> None:
    with following(Plan(start, **plan)):
        cache.update(rows(*numbers), -rows(*numbers), layer)


def test_layers_are_made_beforehand_only_where_one_keeps_more_than_keys() -> None:
    for plain in (
        SlotCache(),
        SlotCache(config("full_attention", "sliding_attention", "chunked_attention", "moe")),
    ):
        assert plain.layers == [] and plain.cuts
    kinds = (
        "linear_attention",
        "sliding_attention",
        "chunked_attention",
        "hybrid",
        "hybrid_sliding",
        "mlp",
    )
    cache = SlotCache(config(*kinds))
    both = LinearAttentionAndFullAttentionLayer
    expected = [LinearAttentionLayer, DynamicLayer, DynamicLayer, both, both, DummyLayer]
    assert [type(layer) for layer in cache.layers] == expected and not cache.cuts
    assert [cache.layers[at].number_of_states for at in (0, 3, 4)] == [2, 2, 2]


def test_rows_are_stored_from_the_plans_slot_on_in_each_layer_by_itself() -> None:
    cache = SlotCache()
    store(cache, 0, 0, 1, 2, 3)
    store(cache, 0, 1, 4, 5, 6)
    store(cache, 1, 1, 7)
    assert held(cache, 0) == ([1, 2, 3], [-1, -2, -3]) and held(cache, 1) == ([4, 7], [-4, -7])
    assert cache.lengths == {2, 3}
    with pytest.raises(KeysStored):
        store(cache, 2, 0, 8, fill=True)
    assert held(cache, 0) == ([1, 2, 8], [-1, -2, -8])
    with following(Plan(2)):
        assert cache.get_seq_length() == 2 and cache.get_mask_sizes(3, 0) == cache.get_mask_sizes(
            3, 9
        ) == (5, 0)


def test_a_window_that_keeps_its_own_rows_says_how_many_it_has() -> None:
    cache = SlotCache()
    cache.layers = [DynamicSlidingWindowLayer(sliding_window=3)]
    store(cache, 0, 0, 1, 2, 3, 4)
    store(cache, 1, 0, 5)  # such a window cannot be cut
    assert held(cache, 0)[0] == [4, 5] and cache.lengths == set() and not cache.cuts
    with following(Plan(1)):
        assert cache.get_mask_sizes(1, 0) == cache.layers[0].get_mask_sizes(1) != (2, 0)


def test_gathered_rows_come_after_the_ones_before_in_some_layers() -> None:
    cache = SlotCache()
    cache.layers = [
        DynamicLayer(),
        DynamicIndexedLayer(),
        DummyLayer(),
        DynamicLayer(),
        DynamicLayer(),
    ]
    for layer in (0, 1, 3):
        store(cache, 0, layer, 1, 2, 3, 4)
    cache.layers[1].update_indexer(torch.tensor([[[5.0], [6.0], [7.0], [8.0]]]))
    cache.gather(1, [0, 2], [1, 2, 4, 3])
    assert held(cache, 0)[0] == [1, 2, 3, 4] and held(cache, 1) == held(cache, 3) == (
        [1, 2, 4],
        [-1, -2, -4],
    )
    assert cache.layers[1].indexer_keys.flatten().tolist() == [5, 6, 8]
    assert cache.cuts and cache.lengths == {3, 4}
    cache.layers.append(LinearAttentionLayer(2))  # without keys there is nothing to move
    cache.gather(1, [1], [3, 5])
    assert held(cache, 3) == ([1, 4], [-1, -4])


def test_an_indexers_keys_are_cut_at_the_plans_slot() -> None:
    cache = SlotCache()
    cache.layers = [DynamicIndexedLayer()]
    for start, numbers in ((0, [1.0, 2.0, 3.0]), (1, [4.0])):
        with following(Plan(start)):
            found = cache.update_indexer(torch.tensor(numbers)[None, :, None], 0)
    assert found.flatten().tolist() == [1, 4]


class Recurrent:
    """A state that no row can be dropped from: the text so far, written in place."""

    def __init__(self) -> None:
        self.states = [torch.zeros(()), {"last": torch.zeros(2)}]
        self.keys = torch.zeros(()) + 7  # of no slots, so it is a part of the state
        self.seen = False

    def run(self, tokens: torch.Tensor) -> None:
        for token in tokens:
            self.states[0].mul_(0.5).add_(token)
            self.states[1]["last"].copy_(torch.stack([self.states[1]["last"][1], token]))
            self.keys.add_(token)
            self.seen = True

    @property
    def numbers(self) -> list[float]:
        return [
            float(self.states[0]),
            *self.states[1]["last"].tolist(),
            float(self.keys),
            self.seen,
        ]


class Text:
    """A session of a recurrent layer, beside layers with keys by slot, which the snapshots leave
    alone.
    """

    def __init__(self) -> None:
        self.layer, self.beside, self.tokens = (
            Recurrent(),
            LinearAttentionAndFullAttentionLayer(),
            [],
        )
        self.cut = DynamicIndexedLayer()
        self.snapshots = Snapshots(SimpleNamespace(layers=[self.cut, self.layer, self.beside]))

    def feed(self, start: int, *tokens: int) -> int:
        """Go on from this slot. Returns how many rows ran."""
        first = self.snapshots.restart_slot(start)
        self.beside.keys = self.beside.values = self.cut.indexer_keys = torch.zeros(1) + len(
            self.tokens
        )
        again, new = self.snapshots.go_back(start), torch.tensor(tokens).float()
        for by_slot in (self.beside.keys, self.beside.values, self.cut.indexer_keys):
            assert float(by_slot) == len(self.tokens)  # cut by slot, whatever was saved
        ran = new if again is None else torch.cat([again, new])
        assert len(ran) == start - first + len(new)
        self.snapshots.add(ran)
        self.layer.run(ran)
        self.tokens = [*self.tokens[:start], *tokens]
        return len(ran)

    @property
    def expected(self) -> list[float]:
        alone = Recurrent()
        alone.run(torch.tensor(self.tokens).float())
        return alone.numbers


def test_a_state_is_that_of_the_text_however_often_it_goes_back() -> None:
    text, chance = Text(), random.Random(0)
    text.feed(0, 3, 4, 5)
    for _ in range(60):
        start = max(0, len(text.tokens) - chance.choice([0, 0, 0, 1, 2, 5, 30]))
        text.feed(start, *(chance.randrange(50) for _ in range(chance.randint(1, 4))))
        assert text.layer.numbers == text.expected


def test_only_rows_after_the_newest_state_run_again() -> None:
    text = Text()
    assert [text.feed(0, 3, 4, 5), text.feed(3, 6), text.feed(4, 7, 8)] == [3, 1, 2]
    assert [text.snapshots.restart_slot(start) for start in (6, 5, 4, 3, 2)] == [6, 4, 4, 3, 0]
    assert text.feed(5, 9) == 2  # 7 again
    assert text.feed(6, 9) == 1
    assert text.feed(2, 9) == 3
    assert text.layer.numbers == text.expected


def test_the_newest_states_and_the_first_are_kept() -> None:
    text = Text()
    for place in range(30):
        text.feed(place, place)
    known = sorted({text.snapshots.restart_slot(start) for start in range(30)})
    assert known == [0, *range(31 - SNAPSHOTS, 30)] and len(known) == SNAPSHOTS
    assert text.feed(3, 9) == 4 and text.layer.numbers == text.expected
