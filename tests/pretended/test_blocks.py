"""Weights in blocks on the pretended GPU: a file is loaded to it, and scores as by the interpreter
alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.lab.point.read_model import load_model
from tests.engine.models.gguf_files import PROMPT, tiny, write
from tests.engine.models.test_gguf_blocks import as_q4_k_m
from tests.engine.models.test_triton_blocks import TOKENS, by_triton
from tests.pretended import pretended_gpu
from tests.triton_interpreter import interpreter, needs_triton  # noqa: F401

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]
DTYPE = torch.float16


def scores(model: NativeModel) -> Tensor:
    return model.start(Source(tuple(PROMPT)), 64).extend(TOKENS[:4]).logits.cpu()


@pytest.mark.fast("gguf")
@pytest.mark.parametrize("weights", ["gguf", 8, 4])
def test_a_file_scores_on_a_gpu_as_by_the_interpreter(weights: str | int, tmp_path: Path) -> None:
    path = write(tiny("qwen2"), tmp_path / "model.gguf", as_q4_k_m)
    expected = scores(by_triton(path, DTYPE, weights))
    with pretended_gpu(triton=True):
        model = load_model(str(path), None, "cuda", DTYPE, "kernels", bits=weights)
        found = scores(model)
        assert model.engine == "kernels"
        assert isinstance(model.decoder.layers[0].outer.matrix, tuple)
    load_model.cache_clear()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("engine", "dtype", "remedy"),
    [
        ("auto", DTYPE, "set runtime.engine=kernels"),
        ("native", torch.float32, "set runtime.engine=kernels runtime.dtype=bfloat16"),
        ("kernels", torch.float32, "set runtime.dtype=bfloat16"),
    ],
)
def test_blocks_on_a_gpu_want_the_kernels_in_16_bits(
    engine: str, dtype: torch.dtype, remedy: str, tmp_path: Path
) -> None:
    path = str(write(tiny("llama"), tmp_path / "model.gguf", as_q4_k_m))
    with pretended_gpu(triton=True), pytest.raises(UserError, match=re.escape(remedy) + "$"):
        load_model(path, None, "cuda", dtype, engine, bits="gguf")
    load_model.cache_clear()


@pytest.mark.parametrize("bits", [(8, 4), (8, None), (4, 8), ("gguf", None), (None, 8)])
def test_another_backend_has_the_weights_that_a_load_gives(
    bits: tuple[int | str | None, int | None], tmp_path: Path
) -> None:
    path = str(write(tiny("llama"), tmp_path / "model.gguf", Type.Q8_0))
    before, after = bits
    with pretended_gpu(triton=True):
        first = load_model(path, None, "cuda", DTYPE, "kernels", bits=before)
        first.load()
        found = scores(first.with_backend(kernels=True, bits=after))
        load_model.cache_clear()
        expected = scores(load_model(path, None, "cuda", DTYPE, "kernels", bits=after))
    load_model.cache_clear()
    assert torch.equal(found, expected)


def test_matrices_that_share_a_tile_are_refused_before_a_forward(tmp_path: Path) -> None:
    def kind(name: str) -> Type:
        return Type.Q6_K if "v_proj" in name else Type.Q8_0

    path = write(tiny("qwen2"), tmp_path / "model.gguf", kind)
    with pretended_gpu(triton=True):
        model = load_model(str(path), None, "cuda", DTYPE, "kernels", bits="gguf")
        plan = model.packed.plan
        layer = model.decoder.layers[0]
        queries, values = layer.qkv.matrix
        at_once = (queries[: queries.shape[0] - 8], values)
        with pytest.raises(UserError, match="share a tile are stored as Q8_0 and Q6_K; set"):
            plan.parts_of(replace(layer.qkv, matrix=at_once), plan.projected, normed_heads=False)
    load_model.cache_clear()
