"""Which batches are refused, and with what words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from bild_lab.engine import batch_decoding as batch_room
from bild_lab.engine.batch_decoding import (
    UNTIMED_BATCH,
    auto_batch_size,
    cache_bytes_per_text,
    require_batches,
    require_room,
)
from bild_lab.engine.models.native import side_by_side
from bild_lab.engine.models.native.layers import SPARE_ROWS
from bild_lab.engine.models.native.side_by_side import Pool
from bild_lab.engine.request import Request
from bild_lab.engine.session import LoadedModel
from bild_lab.errors import UserError
from bild_lab.lab.point.decoder import Decoder
from tests.checkpoints import tiny_checkpoints
from tests.policies import load

# keys and values of two models with 2 layers of 4 heads of width 8, for the longest prompt, answer
# and source of `REQUESTS`; and as much again for a text whose encoder ran ahead
SLOTS = 1 + 20 + SPARE_ROWS
TEXT_BYTES = 2 * 2 * (2 * 2 * 32 * (SLOTS + 5) * 4)
REQUESTS = (("w5 w6 w7 w8", 20), ("w5", 9))


def decoder_and_requests() -> tuple[Decoder, list[Request]]:
    decoder = load(tiny_checkpoints(), "t5", "speculative", engine="native")
    return decoder, [decoder.request(prompt, count) for prompt, count in REQUESTS]


def on_engine(models: Sequence[LoadedModel], engine: str, **fields: object) -> list:
    """Stand-ins for these models on another engine."""
    return [
        SimpleNamespace(
            engine=engine,
            checkpoint=model.checkpoint,
            dtype=model.dtype,
            device=model.device,
            **fields,
        )
        for model in models
    ]


def on_kernels(models: Sequence[LoadedModel]) -> list:
    """Kernels whose buffers take as much as one text, for texts of so many slots."""
    packed = SimpleNamespace(buffer_bytes=lambda slots: TEXT_BYTES if slots == SLOTS else None)
    return on_engine(models, "kernels", packed=packed)


def test_our_own_engines_keep_caches_for_a_text_and_others_none() -> None:
    decoder, requests = decoder_and_requests()
    assert cache_bytes_per_text(decoder.models, requests) == TEXT_BYTES
    assert cache_bytes_per_text(on_kernels(decoder.models), requests) == TEXT_BYTES
    assert cache_bytes_per_text(on_engine(decoder.models, "hf"), requests) == 0
    assert cache_bytes_per_text(decoder.models, []) == 0


def test_a_batch_that_does_not_fit_is_refused_with_the_number_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, requests = decoder_and_requests()
    monkeypatch.setattr(batch_room, "free_bytes", lambda device: 10 * TEXT_BYTES)
    require_room(decoder.models, requests, 9)
    with pytest.raises(UserError, match=re.escape("at most 9 fit: set runtime.batch=9")):
        require_room(decoder.models, requests, 10)
    monkeypatch.setattr(batch_room, "free_bytes", lambda device: TEXT_BYTES // 2)
    with pytest.raises(UserError, match="are free; not even one text fits, or"):
        require_room(decoder.models, requests, 2)


def test_the_buffers_of_kernels_take_room_from_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, requests = decoder_and_requests()
    kernels = on_kernels(decoder.models)  # two, whose buffers take as much as two texts
    monkeypatch.setattr(batch_room, "free_bytes", lambda device: 10 * TEXT_BYTES)
    require_room(kernels, requests, 7)
    with pytest.raises(UserError, match=re.escape("at most 7 fit: set runtime.batch=7")):
        require_room(kernels, requests, 8)


def test_where_no_clock_runs_a_batch_is_as_large_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, requests = decoder_and_requests()
    for free_bytes, size in ((10 * TEXT_BYTES, 9), (TEXT_BYTES // 2, 1)):
        monkeypatch.setattr(batch_room, "free_bytes", lambda device, free=free_bytes: free)
        assert auto_batch_size(decoder.method, decoder.models, requests) == size
    # our own engines keep no caches for a method with batches of its own
    with_batches = SimpleNamespace(decode_batch=list)
    others = on_engine(decoder.models, "hf")
    assert auto_batch_size(with_batches, others, requests) == UNTIMED_BATCH


def test_a_batch_that_does_not_fit_is_refused_in_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batch_room,
        "cache_bytes_per_text",
        lambda models, requests: 3 * len(requests) * batch_room.GIB,
    )
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (10 * batch_room.GIB, 80) if device is gpu else None,
    )
    gpu = SimpleNamespace(type="cuda")
    message = (
        "a batch of 4 texts needs 12.00 GiB for its caches, and 10.00 GiB are free; at most 3 fit"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        require_room([SimpleNamespace(device=gpu, engine="native", pooled_bytes=0)], [None], 4)


def test_the_caches_of_one_batch_are_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(tiny_checkpoints(), "llama", "vanilla", engine="native")
    prompts, target = ["w5 w6", "w7", "w8 w9"], decoder.target
    requests = [decoder.request(prompt, 20) for prompt in prompts]
    memory = 4 * cache_bytes_per_text(decoder.models, requests)
    monkeypatch.setattr(batch_room, "free_bytes", lambda device: memory - target.pooled_bytes)
    require_room(decoder.models, requests, 3)
    decoder.generate(prompts, max_new_tokens=20, batch=3)
    assert target.pooled_bytes > 0
    require_room(decoder.models, requests, 3)
    with pytest.raises(UserError, match="at most 3 fit"):
        require_room(decoder.models, requests, 4)


def test_the_bytes_of_a_text_are_those_of_a_decoder_only_cache() -> None:
    decoder = load(tiny_checkpoints(), "llama", "vanilla", engine="native")
    request = decoder.request("w5 w6", 20)
    layers = decoder.target.start(request.source, 20).layers
    own = layers.cache.keys.nbytes + layers.cache.values.nbytes
    assert cache_bytes_per_text(decoder.models, [request]) == 2 * own


def test_what_decodes_no_batches_is_refused_and_decodes_one_text_where_no_clock_runs() -> None:
    decoder = load(tiny_checkpoints(), "llama", "vanilla", engine="hf")
    with pytest.raises(UserError, match=r"policy vanilla decodes no batches: .*engine hf"):
        require_batches("vanilla", decoder.method, decoder.models)
    requests = [decoder.request("w5", 4)]
    assert auto_batch_size(decoder.method, decoder.models, requests) == 1
    native = load(tiny_checkpoints(), "llama", "vanilla", engine="native")
    assert auto_batch_size(native.method, native.models, requests) == UNTIMED_BATCH


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("suffix", {"keep": True}),
        ("token_recycling", {"keep": True}),
        ("hybrid", {"first_knobs": {"keep": True}}),
        ("hybrid", {"second_knobs": {"keep": True}}),
    ],
)
def test_what_learns_from_texts_decodes_them_one_after_another(policy: str, knobs: dict) -> None:
    decoder = load(tiny_checkpoints(), "llama", policy, engine="native", **knobs)
    alone = [each.token_ids for each in decoder.generate(["w5", "w6"], max_new_tokens=3)]
    with pytest.raises(UserError, match=f"policy {policy} decodes no batches: .* keep=false"):
        decoder.generate(["w5", "w6"], max_new_tokens=3, batch=2)
    together = decoder.generate(["w5", "w6"], max_new_tokens=3, batch=None)
    assert [each.token_ids for each in together] == alone
    plain = load(tiny_checkpoints(), "llama", policy, engine="native")
    require_batches(policy, plain.method, plain.models)


def test_a_pool_grows_by_need_and_keeps_what_is_in_it() -> None:
    pool = Pool((2, 3, 4), torch.float32, torch.device("cpu"))
    first = pool.take(5)
    first.keys[:] = 1.0
    second = pool.take(9)
    assert first.capacity == second.capacity == 9 and first.place != second.place
    assert torch.all(first.keys[:, :, :5] == 1) and torch.all(first.keys[:, :, 5:] == 0)
    assert torch.all(second.keys == 0)
    pool.give_back(first.place)
    assert pool.take(3).place == first.place
    assert pool.keys.shape == (2, 2, 3, 9, 4)


def test_an_empty_pool_that_is_too_short_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory counts as room for the next batch, which has no room for both."""
    pool = Pool((2, 3, 4), torch.float32, torch.device("cpu"))
    first, second = pool.take(5), pool.take(5)
    copied, plain = [], side_by_side.grown
    monkeypatch.setattr(
        side_by_side,
        "grown",
        lambda store, *sizes: copied.append(store.nbytes) or plain(store, *sizes),
    )
    for text in (first, second):
        pool.give_back(text.place)
    assert pool.take(9).capacity == 9 and not any(copied)
    pool.take(12)  # beside a text
    assert any(copied)
