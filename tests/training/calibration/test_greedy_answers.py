"""Greedy answers in batches equal those of our own loop, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.trace import Trace
from bild_lab.lab.decoding.load import load
from bild_lab.training.calibration.greedy_answers import greedy_answers
from tests.tiny import save, tiny_t5

LIMIT = 9  # tokens; long enough for some answers to end, short enough to cut others


def one_by_one(path: Path, prompts: list[str], longest: int | None = None) -> list[list[int]]:
    """The tokens that `vanilla` of our own engine emits, at batch size 1."""
    decoder = load(str(path), policy="vanilla")
    requests = [decoder.request(prompt, LIMIT, max_source_tokens=longest) for prompt in prompts]
    return [decoder.method.decode(request, Trace())[request.limits.prompt_length :] for request in requests]


# sources of 1 to 9 words
PROMPTS = [" ".join(f"w{3 + (7 * row + 5 * place) % 37}" for place in range(1 + row % 9)) for row in range(24)]


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("longest", [None, 4])
def test_answers_in_batches_are_those_of_one_by_one(targets: Path, family: str, longest: int | None) -> None:
    path = targets / family
    model = HuggingFaceModel(Checkpoint(str(path)), torch.device("cpu"), torch.float32)
    sources = [model.checkpoint.source(prompt, longest) for prompt in PROMPTS]
    expected = one_by_one(path, PROMPTS, longest)
    assert greedy_answers(model, sources, LIMIT, batch_size=7) == expected
    lengths = {len(answer) for answer in expected}
    assert min(lengths) < LIMIT == max(lengths)  # some ended with an end token, some did not


def test_a_decoder_deeper_than_its_encoder_answers_in_batches_too(tmp_path: Path) -> None:
    path = save(tiny_t5(5, layers=1, decoder_layers=3), tmp_path / "deep")
    model = HuggingFaceModel(Checkpoint(str(path)), torch.device("cpu"), torch.float32)
    sources = [model.checkpoint.source(prompt) for prompt in PROMPTS[:6]]
    assert greedy_answers(model, sources, LIMIT, batch_size=4) == one_by_one(path, PROMPTS[:6])
