"""On a GPU no fused kernel of PyTorch takes a mask beside keys that heads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.native import NativeModel, attention
from bild_lab.engine.request import Limits, Request, Source
from tests.policies import in_memory
from tests.pretended import pretended_gpu
from tests.pretended.tensor import DEVICE
from tests.tiny import START, tiny_llama

PROMPT = (START, 5, 9, 7)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each attention whether it has a mask, and whether heads share keys."""
    noted, plain = [], attention.scaled_dot_product_attention

    def noting(*tensors: torch.Tensor, attn_mask: torch.Tensor | None, **options: object):
        queries, keys, _ = tensors
        shares = queries.shape[1] != keys.shape[1]
        assert options["enable_gqa"] == shares
        noted.append((attn_mask is not None, shares))
        return plain(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noting)
    return noted


@pytest.fixture
def model() -> Iterator[NativeModel]:
    with pretended_gpu(), torch.inference_mode():
        model = in_memory(tiny_llama(0).to("cuda"), "native")
        assert model.decoder.heads > model.decoder.kv_heads
        yield model


def scores(model: NativeModel, device: torch.device | str) -> list[torch.Tensor]:
    """Of several rows, and of one."""
    session = model.start(Source(PROMPT, device=device), 8)
    return [session.extend(rows).logits.cpu() for rows in ([8, 9], [4])]


def test_heads_share_keys_where_there_is_no_mask(
    calls: list[tuple[bool, bool]], model: NativeModel
) -> None:
    found = scores(model, DEVICE)
    assert set(calls) == {(True, False), (False, True)}
    calls.clear()
    expected = scores(in_memory(tiny_llama(0), "native"), "cpu")
    assert set(calls) == {(True, True), (False, True)}
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))


def test_no_head_of_a_batch_shares_keys(calls: list[tuple[bool, bool]], model: NativeModel) -> None:
    request = Request(Source(PROMPT, device=DEVICE), Limits(len(PROMPT), 3))
    vanilla = target_alone(model)
    decode_batch(vanilla, [request] * 2, Batch(2))
    assert set(calls) == {(True, False)}
