"""Weights of 8 and 4 bits on PyTorch: its kernels compute as with the rounded numbers, and lossless
stays so.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.cpu.panels import quantized
from bild_lab.engine.models.native.quantized_matrix import QuantizedMatrix
from bild_lab.engine.models.native.stack import Layer, Stack, Weight, numbers_of
from tests.engine.models.test_quantized import BITS, CASES
from tests.tiny import save

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@BITS
def test_pytorchs_kernels_multiply_by_the_rounded_numbers(bits: int, device: str) -> None:
    torch.manual_seed(0)
    matrix, x = (torch.randn(*shape).to(device, torch.bfloat16) for shape in ((64, 256), (5, 256)))
    scale, whole = quantized(matrix.view(64, -1, 256 if bits == 8 else 32), bits)
    expected = (scale.bfloat16().float() * whole).view(64, 256)
    rounded = QuantizedMatrix(matrix, bits)
    torch.testing.assert_close(rounded.numbers(torch.float32), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(
        rounded.product(x).float(), x.float() @ expected.T, atol=0.2, rtol=2e-2
    )


@BITS
@pytest.mark.parametrize("family", CASES)
def test_a_rounded_model_scores_as_with_its_rounded_numbers(
    family: str, bits: int, tmp_path: Path
) -> None:
    target = save(CASES[family][0](), tmp_path / "target")
    options = {
        "policy": "calm",
        "threshold": 0.5,
        "engine": "native",
        "device": "auto" if bits == 8 else "cpu",
    }
    decoders = [bild_lab.load(target, weights=each, **options) for each in (bits, None)]
    rounded, plain = (each.target for each in decoders)
    source = rounded.source("w5 w9 w12")
    before = plain.text_logits(source)
    for ours, theirs in zip(stacks(plain), stacks(rounded), strict=True):
        assert all(
            isinstance(each.matrix, tuple)
            for layer in theirs.layers
            for each in weights_of(layer).values()
        )
        head = numbers_of(theirs.head, torch.float32)
        ours.layers, ours.read_head = (
            [unpacked(layer) for layer in theirs.layers],
            lambda head=head: head,
        )
    torch.testing.assert_close(
        rounded.text_logits(source), plain.text_logits(source), atol=1e-3, rtol=1e-3
    )
    assert not torch.allclose(before, plain.text_logits(source), atol=1e-3)
    # which fills skipped layers
    ours, theirs = (each.generate("w5 w9 w12", max_new_tokens=16) for each in decoders)
    assert ours.token_ids == theirs.token_ids


@pytest.mark.fast("llama-speculative", "t5-early_exit_speculative")
@pytest.mark.parametrize("policy", ["speculative", "calm", "early_exit_speculative"])
@pytest.mark.parametrize("family", CASES)
def test_policies_decode_over_rounded_weights(family: str, policy: str, tmp_path: Path) -> None:
    target = save(CASES[family][0](), tmp_path / "target")
    never = {"threshold": 1.0, "measure": "softmax"}
    knobs = {"calm": never, "early_exit_speculative": {"exit_layer": 1}}.get(policy, {})
    draft = "target" if policy == "speculative" else None
    # on a GPU 4 bits need bfloat16, which flips near-ties
    bits = 8 if torch.cuda.is_available() else 4
    options = {"engine": "native", "weights": 8, "draft_weights": bits if draft else None}
    drafted = bild_lab.load(target, draft, policy=policy, **options, **knobs)
    alone = bild_lab.load(target, policy="vanilla", engine="native", weights=8)
    for prompt in ("w5 w9 w12", "w30 w31"):
        assert (
            drafted.generate(prompt, max_new_tokens=16).token_ids
            == alone.generate(prompt, 16).token_ids
        )


def stacks(model: NativeModel) -> list[Stack]:
    return [model.decoder, *([model.decoder.encoder] if model.checkpoint.encoder_decoder else [])]


def weights_of(layer: Layer) -> dict[str, Weight]:
    values = {one.name: getattr(layer, one.name) for one in fields(layer)}
    return {name: value for name, value in values.items() if isinstance(value, Weight)}


def unpacked(layer: Layer) -> Layer:
    """The layer with the numbers of its rounded matrices."""
    found = weights_of(layer).items()
    return replace(
        layer,
        **{name: replace(one, matrix=numbers_of(one.matrix, torch.float32)) for name, one in found},
    )
