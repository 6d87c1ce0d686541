"""The scores of finished texts: those they were decoded with, without NaN, and their log-probability."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bild_lab.errors import UserError
from bild_lab.lab.decoding.load import load
from bild_lab.lab.measure import summary
from bild_lab.lab.measure.summary import log_probabilities, log_probability, require_no_nan, text_logits
from tests.tiny import END


def broken(checkpoint: Path, copy: Path, row: int) -> Path:
    """The checkpoint with NaN for one token's embedding."""
    shutil.copytree(checkpoint, copy)
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in ("model.embed_tokens.weight", "shared.weight") if name in tensors)
    tensors[name][row] = torch.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_the_scores_of_a_text_are_those_it_was_decoded_with(family: str, engine: str, checkpoints: Path) -> None:
    decoder = load(str(checkpoints / family), policy="vanilla", engine=engine)
    generated = decoder.generate("w5 w9 w12", max_new_tokens=10)
    request = decoder.request("w5 w9 w12", 10)
    logits = text_logits(decoder.target, request, generated.token_ids)
    assert logits.argmax(1).tolist() == generated.token_ids


@pytest.mark.parametrize("policy", ["vanilla", "hf_generate"])
def test_a_token_that_breaks_a_model_is_found_in_the_text_that_has_it(
    policy: str, checkpoints: Path, tmp_path: Path
) -> None:
    path = broken(checkpoints / "llama", tmp_path / "llama", row=7)
    decoder = load(str(path), policy=policy)
    request = decoder.request("w5 w9", 10)
    require_no_nan(decoder.running, request, [5, 6, END])
    with pytest.raises(UserError, match="/llama .*NaN in float32"):
        require_no_nan(decoder.running, request, [5, 7, END])


def test_a_drafter_that_is_broken_is_the_one_named(checkpoints: Path, tmp_path: Path) -> None:
    path = broken(checkpoints / "t5-draft", tmp_path / "small", row=9)
    decoder = load(str(checkpoints / "t5"), str(path), policy="bild")
    with pytest.raises(UserError, match="/small .*NaN"):
        require_no_nan(decoder.running, decoder.request("w9 w5", 10))


def test_the_first_models_scores_are_given_back(checkpoints: Path) -> None:
    decoder = load(str(checkpoints / "llama"), str(checkpoints / "llama-draft"), policy="speculative")
    request = decoder.request("w5 w9", 10)
    assert len(decoder.running) == 2
    scores = require_no_nan(decoder.running, request, [5, 6, END])
    assert torch.equal(scores, text_logits(decoder.running[0], request, [5, 6, END]))


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_it_is_the_sum_over_the_tokens_of_the_text(
    family: str, engine: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(str(checkpoints / family), policy="vanilla", engine=engine)
    request = decoder.request("w5 w9 w12", 10)
    emitted = [7, 11, 8, 30]
    module = decoder.target.transformers.module
    expected = 0.0
    for place, token in enumerate(emitted):
        ids = torch.tensor([[*request.source.prompt, *emitted[:place]]])
        given = {"input_ids": ids} if family == "llama" else {"decoder_input_ids": ids}
        if family == "t5":
            given["input_ids"] = request.source.encoder_ids
        with torch.no_grad():
            expected += float(module(**given).logits[0, -1].log_softmax(-1)[token])
    monkeypatch.setattr(summary, "ROWS", 3)  # also across parts
    assert log_probability(text_logits(decoder.target, request, emitted), emitted) == pytest.approx(expected, abs=1e-3)
    assert log_probability(text_logits(decoder.target, request, []), []) == 0.0


def test_a_text_whose_value_is_known_is_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[list[int]] = []
    monkeypatch.setattr(summary, "text_logits", lambda target, request, text: scored.append(text))
    monkeypatch.setattr(summary, "log_probability", lambda logits, text: -len(text))
    found = log_probabilities(None, [0, 1], [[1, 2], [4, 4, 4]], [[1, 2], [3]], [-0.5, -0.25])
    assert found == [-0.5, -3] and scored == [[4, 4, 4]]
