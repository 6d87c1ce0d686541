"""Steps of fixed shape: the same tokens as eager ones, compiled once a shape, in memory that stays
where it is.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import bild_lab
from bild_lab.engine.models.native import NativeModel, compiled
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.lab.point.read_model import load_model
from tests.policies import FAMILIES, WINDOWED
from tests.sessions import native_session
from tests.tiny import PAD, tiny_t5

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced and then run as they are, which takes no compiler."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    load_model.cache_clear()  # whose models have compiled before


def decoders(
    checkpoints: Path, family: str, device: str = "cpu", **options: object
) -> list[bild_lab.Decoder]:
    paths = {"target": str(checkpoints / family), "draft": str(checkpoints / f"{family}-draft")}
    return [
        bild_lab.load(
            **paths, dtype="float64", device=device, engine="native", compile=each, **options
        )
        for each in (False, True)
    ]


@pytest.mark.slow
def test_the_compiler_itself_scores_several_rows_as_eager_code_does() -> None:
    # several: one row alone hides a wrong mask
    decoder = T5Decoder(tiny_t5(0, layers=1, decoder_layers=1))
    source = Source((PAD,), torch.tensor([[5, 9, 12, 30, 1]]))
    eager = native_session(decoder, source, 40)
    fixed = native_session(decoder, source, 40, workspace=compiled.Workspace(decoder, 128, 16))
    for fed in ([PAD, 6, 7], [8, 9, 10], [11, 12, 13, 14]):  # one shape
        torch.testing.assert_close(
            fixed.extend(fed).logits, eager.extend(fed).logits, atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_the_compiler_itself_changes_no_token_of_drafts_and_trees(
    checkpoints: Path, family: str
) -> None:
    eager, fixed = decoders(checkpoints, family, policy="bild")
    assert (
        fixed.generate("ein Hund läuft", 24).token_ids
        == eager.generate("ein Hund läuft", 24).token_ids
    )


@pytest.mark.slow
def test_a_shape_is_compiled_once_and_serves_the_next_text(checkpoints: Path, traced: None) -> None:
    _, fixed = decoders(checkpoints, "t5", policy="speculative")
    fixed.generate("ein Hund läuft", 24)
    model = fixed.target
    assert isinstance(model, NativeModel)
    before, workspaces = model.compiled_steps, [id(each) for each in model._free]
    assert before > 0
    assert len(workspaces) == 1
    fixed.generate("ein Kind", 24)
    assert model.compiled_steps == before
    assert [id(each) for each in model._free] == workspaces


def test_the_workspace_that_was_used_last_serves_the_next_text(
    checkpoints: Path, traced: None
) -> None:
    """Of several, as its steps are those that such texts have compiled."""
    model = decoders(checkpoints, "llama", policy="vanilla")[1].target
    assert isinstance(model, NativeModel)
    source = model.source("ein Hund")
    first, second = (model.start(source, 8) for _ in range(2))
    used_last = first.layers._workspace
    del second, first
    assert len(model._free) == 2
    assert model.start(source, 8).layers._workspace is used_last


@pytest.mark.slow
def test_a_text_longer_than_every_workspace_gets_a_larger_one(
    checkpoints: Path, traced: None
) -> None:
    _, fixed = decoders(checkpoints, "t5", policy="vanilla")
    model = fixed.target
    assert isinstance(model, NativeModel)
    fixed.generate("ein Hund läuft", 8)
    small = model._free[0].cache.capacity
    fixed.generate("ein Hund läuft", 2 * small)
    gc.collect()
    assert [each.cache.capacity > small for each in model._free] == [True]


def test_more_rows_than_any_shape_run_uncompiled() -> None:
    assert [compiled.padded(count) for count in (1, 3, 8, 9, 64, 65)] == [1, 4, 8, 16, 64, 65]


@needs_cuda
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_cuda_graphs_decode_the_same_text(checkpoints: Path, family: str) -> None:
    for policy in ("vanilla", "speculative"):
        eager, fixed = decoders(checkpoints, family, "cuda", policy=policy)
        assert (
            fixed.generate("ein Hund läuft", 24).token_ids
            == eager.generate("ein Hund läuft", 24).token_ids
        )
