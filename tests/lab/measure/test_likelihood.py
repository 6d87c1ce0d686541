"""The log-probability of a text against a model of Transformers, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.lab.decoding.load import load
from bild_lab.lab.measure import likelihood
from bild_lab.lab.measure.likelihood import log_probabilities, log_probability
from bild_lab.lab.measure.nan_check import text_logits


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
    monkeypatch.setattr(likelihood, "ROWS", 3)  # also across parts
    assert log_probability(text_logits(decoder.target, request, emitted), emitted) == pytest.approx(expected, abs=1e-3)
    assert log_probability(text_logits(decoder.target, request, []), []) == 0.0


def test_a_text_whose_value_is_known_is_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[list[int]] = []
    monkeypatch.setattr(likelihood, "text_logits", lambda target, request, text: scored.append(text))
    monkeypatch.setattr(likelihood, "log_probability", lambda logits, text: -len(text))
    found = log_probabilities(None, [0, 1], [[1, 2], [4, 4, 4]], [[1, 2], [3]], [-0.5, -0.25])
    assert found == [-0.5, -3] and scored == [[4, 4, 4]]
