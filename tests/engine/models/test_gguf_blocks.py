"""A GGUF file's own blocks in the kernels: the values that the file stands for, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.cpu import panels
from bild_lab.engine.request import Source
from bild_lab.errors import UserError
from bild_lab.lab.point.load import load
from bild_lab.lab.point.read_model import load_model
from tests.engine.models.gguf_files import MODELS, PROMPT, tiny, write
from tests.sessions import needs_kernels

pytestmark = needs_kernels
REAL = os.environ.get("BILD_LAB_REAL_MODELS", "")
# bits of a weight
KINDS = {Type.Q8_0: 8.5, Type.Q4_0: 4.5, Type.Q5_0: 5.5, Type.Q4_K: 4.625, Type.Q6_K: 6.5625}
TOKENS = [PROMPT[-1], *(3 + 7 * index % 37 for index in range(59))]


def as_q4_k_m(name: str) -> Type:
    """Some matrices have 6 bits; one of those that run as one with others has another type, and one
    has none.
    """
    if "v_proj" in name or "layers.1.mlp.down_proj" in name:
        return Type.Q6_K
    return (
        Type.F32
        if "layers.1.self_attn.q_proj" in name
        else Type.Q8_0
        if "lm_head" in name
        else Type.Q4_K
    )


def opened(path: Path, weights: str | None, dtype: torch.dtype = torch.float32) -> NativeModel:
    return load_model(str(path), None, "cpu", dtype, "kernels", bits=weights)


def scores(model: NativeModel, size: int = len(TOKENS)) -> torch.Tensor:
    session = model.start(Source(tuple(PROMPT)), len(TOKENS))
    parts = [TOKENS[start : start + size] for start in range(0, len(TOKENS), size)]
    return torch.cat([session.extend(part).logits for part in parts])


@pytest.mark.fast("8", "14")
@pytest.mark.parametrize("kind", [*KINDS, as_q4_k_m])
def test_scores_are_to_the_last_bit_those_of_the_weights_that_the_blocks_stand_for(
    kind: Type | Callable[[str], Type], tmp_path: Path
) -> None:
    for model_type in MODELS if kind in (Type.Q4_K, as_q4_k_m) else ["llama"]:
        path = write(tiny(model_type), tmp_path / f"{model_type}.gguf", kind)
        kept, whole = opened(path, "gguf"), opened(path, None)
        assert torch.equal(scores(kept), scores(whole))
        assert not torch.equal(scores(opened(path, 4)), scores(whole)) or kind == Type.Q4_0
        if kind in KINDS:  # panels are as full in float32; the embeddings are blocks too
            sizes = [
                sum(matrix.nbytes for matrix in model.packed.panels) for model in (kept, whole)
            ]
            assert sizes[0] / sizes[1] == KINDS[kind] / 32
            assert not isinstance(kept.decoder.embedding, torch.Tensor)
        for ours, theirs in zip(kept.vocabulary_weights(), whole.vocabulary_weights(), strict=True):
            assert torch.equal(ours, theirs)
        prompt = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
        assert torch.equal(kept.prompt_cache(prompt).keys, whole.prompt_cache(prompt).keys)


@pytest.mark.fast("8")
@pytest.mark.parametrize("kind", [*KINDS, as_q4_k_m])
def test_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(
    kind: Type | Callable[[str], Type], tmp_path: Path
) -> None:
    model = opened(write(tiny("qwen2"), tmp_path / "model.gguf", kind), "gguf", torch.bfloat16)
    alone = scores(model, 1)
    for size in (2, 5, 7, 13, 49, 60):
        assert torch.equal(scores(model, size), alone), size


def test_a_minimum_that_is_left_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tiny("llama"), tmp_path / "model.gguf", Type.Q4_K)
    expected, read = scores(opened(path, None)), panels.Q4_K.get_scale_min
    monkeypatch.setattr(
        panels.Q4_K, "get_scale_min", staticmethod(lambda each: (read(each)[0], 0 * read(each)[1]))
    )
    assert not torch.allclose(scores(opened(path, "gguf")), expected, atol=1e-3)


@pytest.mark.usefixtures("fake_engines")
def test_the_blocks_draft_for_the_file_and_run_beside_llama_cpp(tmp_path: Path) -> None:
    path = write(tiny("qwen3"), tmp_path / "model.gguf", as_q4_k_m)
    alone = load(path, policy="vanilla", weights="gguf")
    drafted = load(path, "target", "speculative", weights="gguf", draft_weights=4)
    assert [model.bits for model in drafted.models] == ["gguf", 4]
    assert drafted.generate(PROMPT, 24).token_ids == alone.generate(PROMPT, 24).token_ids
    assert load(path, policy="llama_cpp", weights="gguf").method.engine == "llama_cpp"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Type.Q5_1,
            (
                r"wants blocks of Q8_0, Q5_0, Q4_0, Q4_K, Q6_K, in a gate those of what it gates,"
                r" got Q5_1 for model"
            ),
        ),
        (
            lambda name: Type.Q8_0 if "gate" in name else Type.Q4_0,
            r"got Q8_0 beside Q4_0 for model.layers.0.mlp.gate_proj",
        ),
    ],
)
def test_blocks_that_the_kernels_lack_are_refused_before_weights_load(
    kind: Type | Callable[[str], Type], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        load(write(tiny("llama"), tmp_path / "model.gguf", kind), policy="vanilla", weights="gguf")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="BILD_LAB_REAL_MODELS names no folder of models")
@pytest.mark.parametrize("name", ["gemma-270m", "qwen-0.5b", "qwen-1.5b"])
def test_a_real_files_blocks_give_the_scores_of_what_they_stand_for(name: str) -> None:
    load_model.cache_clear()  # which would hold gigabytes
    path = Path(REAL) / f"{name}.gguf"
    kept = opened(path, "gguf")
    ours = scores(kept)
    size = sum(each.nbytes for each in kept.packed.panels)
    assert size < 1.05 * path.stat().st_size
    assert torch.equal(ours, scores(opened(path, None)))
