"""Weights in blocks on the Triton kernels, by Triton's interpreter: they stand for the numbers that
the file or the rounding has, and rows meet them in whole numbers of 8 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import dequantize
from torch import Tensor

from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.cpu.panels import quantized
from bild_lab.engine.models.native.quantized_matrix import quantize_weights
from bild_lab.engine.models.native.stack import numbers_of
from bild_lab.engine.request import Source
from bild_lab.engine.session import ChainSpec
from bild_lab.lab.point.read_model import load_model
from tests.engine.models.gguf_files import MODELS, PROMPT, tiny, write
from tests.engine.models.test_gguf_blocks import KINDS, REAL, as_q4_k_m, opened
from tests.engine.models.test_triton import build, chains, close, tickets_left
from tests.sessions import native_session
from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
    triton_session,
)

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]
TOKENS = [PROMPT[-1], *(3 + 7 * index % 37 for index in range(10))]


def by_triton(
    path: Path, dtype: torch.dtype = torch.float32, weights: str | int = "gguf"
) -> NativeModel:
    """A GGUF file, which the Triton kernels run on this CPU. weights: as `runtime.weights`."""
    model = copy.copy(load_model(str(path), None, "cpu", dtype, "native"))
    model.kernels = model.triton = True
    model.bits = weights
    if not isinstance(model.decoder.embedding, Tensor):  # on a GPU it is one
        model.decoder.embedding = model.decoder.embedding.numbers(dtype)
    return model


def rounded_product(x: Tensor, matrix: Tensor | tuple[Any]) -> Tensor:
    """A matrix times states of 8 bits, in float64."""
    (blocks,) = matrix
    groups = x.double().unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    states = ((groups / step).round() * step).flatten(-2)
    return (states @ blocks.numbers(torch.float32).double().T).float()


def scores(model: NativeModel) -> Tensor:
    return model.start(Source(tuple(PROMPT)), 64).extend(TOKENS).logits


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_matrix_has_the_numbers_that_it_is_rounded_to(bits: int) -> None:
    from bild_lab.engine.models.native.gpu.block_matrix import BlockMatrix

    torch.manual_seed(0)
    matrix = torch.randn(24, 192)
    scales, whole = quantized(matrix.view(24, -1, 32), bits)
    found = BlockMatrix.rounded(matrix, bits)
    assert torch.equal(found.numbers(torch.float32), (scales.float() * whole).view(24, 192))
    some = torch.tensor([3, 20, 4])
    assert torch.equal(found[some].numbers(torch.float32), found.numbers(torch.float32)[some])
    assert found.packed.nbytes == 24 * 192 * bits // 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_files_matrix_has_the_numbers_that_the_file_stands_for(
    kind: Type, tmp_path: Path
) -> None:
    from bild_lab.engine.models.native.gpu.block_matrix import BlockMatrix

    model = opened(write(tiny("llama"), tmp_path / "model.gguf", kind), "gguf")
    for part in model.decoder.layers[1].qkv.matrix:
        found = BlockMatrix.stored(part, torch.device("cpu"))
        expected = torch.from_numpy(dequantize(part.blocks(), kind))
        assert torch.equal(found.numbers(torch.float32), expected)
        assert torch.equal(found[torch.tensor([9, 2])].numbers(torch.float32), expected[[9, 2]])


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_product_is_that_of_the_files_numbers_and_rounded_states(
    kind: Type, tmp_path: Path
) -> None:
    model = by_triton(write(tiny("llama"), tmp_path / "model.gguf", kind))
    session, decoder = model.start(Source(tuple(PROMPT)), 64), model.decoder
    session.extend(TOKENS[:1])
    states = torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    rows = session.layers.text_rows(session.length, 5, scored=5)
    found = model.packed.run(torch.zeros(5), [rows], states=states, layers=()).logits
    normed = decoder.final(states)
    expected = rounded_product(normed, decoder.head)
    assert close(found, expected, 1e-5)
    assert close(decoder.scores(normed), expected, 1e-5)
    assert not close(normed @ numbers_of(decoder.head, torch.float32).T, expected, 1e-3)


@pytest.mark.fast("2-llama", "12-qwen2", "as_q4_k_m-gemma3_text")
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("kind", [*KINDS, as_q4_k_m])
@torch.inference_mode()
def test_scores_are_those_of_the_files_numbers(
    kind: Type | Callable[[str], Type],
    model_type: str,
    tmp_path: Path,
) -> None:
    model = by_triton(write(tiny(model_type), tmp_path / "model.gguf", kind))
    expected = native_session(model.decoder, Source(tuple(PROMPT)), 64).extend(TOKENS).logits
    # a state half-way between two numbers is rounded up in one, and down in the other
    assert close(scores(model), expected, 0.06)


@pytest.mark.fast("t5 v1.0-4", "llama with biases-8")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["t5 v1.0", "mt5", "llama with biases", "qwen3 windows"])
@torch.inference_mode()
def test_rounded_weights_score_draft_and_are_exact(name: str, bits: int) -> None:
    from bild_lab.engine.models.native.gpu.block_matrix import in_blocks

    wide = {"hidden_size": 64, "d_model": 64, "intermediate_size": 192, "d_ff": 192, "d_kv": 64}
    _, decoder, source = build(name, sizes=wide)
    quantize_weights(decoder, lambda matrix: in_blocks(matrix, bits, matrix.device, matrix.dtype))
    assert isinstance(decoder.layers[0].outer.matrix, tuple)
    tokens = [source.prompt[-1], *torch.randint(3, 90, (8,)).tolist()]
    # 1. a row has the bits that it has alone, and no ticket is left
    session = triton_session(decoder, source, 64)
    alone = torch.cat([session.extend([token]).logits for token in tokens])
    together = triton_session(decoder, source, 64, like=session)
    found = torch.cat([together.extend(rows).logits for rows in (tokens[:2], tokens[2:])])
    assert torch.equal(found, alone)
    assert tickets_left(session) == 0
    # 2. they are those of the rounded numbers
    expected = native_session(decoder, source, 64).extend(tokens).logits
    assert close(alone, expected, 0.06)
    # 3. a program drafts what the loop does
    chain = ChainSpec(4, frozenset())
    loop = triton_session(decoder, source, 64, like=session)
    drafted, _ = chains(loop, tokens[:2], chain)
    result = triton_session(decoder, source, 64, like=session).draft(tokens[:2], chain)
    assert result.tokens == drafted


@torch.inference_mode()
def test_states_are_rounded_to_the_nearest_number_and_what_is_none_stays_none() -> None:
    from tests.rounded_states import store_rounded

    states = torch.randn(4, 32)
    states[1, 3], states[2, 5], states[3] = torch.nan, torch.inf, 0.0
    numbers, steps = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4)
    with np.errstate(invalid="ignore"):
        store_rounded[(1,)](states, numbers, steps, 4)
    step = states[0].abs().max() / 127
    assert torch.equal(numbers[0].float(), (states[0] / step).round())
    assert torch.isclose(steps[0], step)
    assert steps[1:3].isnan().all()
    assert steps[3] == 0


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="BILD_LAB_REAL_MODELS names no folder of models")
@pytest.mark.parametrize("name", ["gemma-270m", "qwen-0.5b", "qwen-1.5b"])
@torch.inference_mode()
def test_a_real_file_takes_its_own_size_and_has_the_tokens_of_a_cpu(name: str) -> None:
    """The prompt's path, by PyTorch; the interpreter takes minutes for a token."""
    path = Path(REAL) / f"{name}.gguf"
    model, on_cpu = by_triton(path, torch.bfloat16), opened(path, "gguf", torch.bfloat16)
    # five and six bits take eight
    assert model.packed.weight_bytes < 1.15 * path.stat().st_size
    source = Source(tuple(model.checkpoint.tokenizer("def fibonacci(n):\n    ").input_ids))
    ours, theirs = (
        session.extend(source.prompt[-1:]).logits[-1].float()
        for session in (native_session(model.decoder, source, 16), on_cpu.start(source, 16))
    )
    assert torch.equal(ours.topk(3).indices, theirs.topk(3).indices)
    load_model.cache_clear()  # which would hold gigabytes


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="BILD_LAB_REAL_MODELS names no folder of models")
@torch.inference_mode()
def test_a_real_file_scores_by_the_kernels_as_by_pytorch() -> None:
    model = by_triton(Path(REAL) / "qwen-0.5b.gguf", torch.float16)
    source = Source(tuple(model.checkpoint.tokenizer("def f").input_ids))
    found, expected = (
        session.extend(source.prompt[-1:]).logits[-1].float()
        for session in (model.start(source, 8), native_session(model.decoder, source, 8))
    )
    assert close(found, expected, 0.2)
    assert torch.equal(found.topk(3).indices, expected.topk(3).indices)
    load_model.cache_clear()
