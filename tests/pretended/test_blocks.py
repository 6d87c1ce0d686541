"""Weights in blocks on the pretended GPU: a file is loaded to it, and scores as by the interpreter
alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.lab.point.load import load_model
from tests.engine.models.test_gguf_blocks import as_q4_k_m
from tests.engine.models.test_gguf_file import PROMPT, tiny, write
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


def test_blocks_on_a_gpu_want_the_kernels(tmp_path: Path) -> None:
    path = str(write(tiny("llama"), tmp_path / "model.gguf", as_q4_k_m))
    with pretended_gpu(triton=True), pytest.raises(UserError, match=r"set runtime\.engine=kernels"):
        load_model(path, None, "cuda", DTYPE, "auto", bits="gguf")
    load_model.cache_clear()
