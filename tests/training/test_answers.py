"""Greedy answers in batches equal those of our own loop, one by one; several folders are read as
one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bild_lab.engine import batch_decoding as batched
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.models.checkpoint.chat import lacks_special_tokens
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.point.load import load
from bild_lab.lab.point.read_model import load_model
from bild_lab.training import answers
from bild_lab.training.answers import (
    END,
    SCHEMA,
    Calibration,
    TargetAnswer,
    contents_hash,
    greedy_answers,
    joined,
    read_calibration,
)
from tests.tiny import save, tiny_t5

LIMIT = 9  # tokens; long enough for some answers to end, short enough to cut others


def one_by_one(path: Path, prompts: list[str], longest: int | None = None) -> list[list[int]]:
    """The tokens that `vanilla` of our own engine emits, at batch size 1."""
    decoder = load(str(path), policy="vanilla")
    requests = [decoder.request(prompt, LIMIT, max_source_tokens=longest) for prompt in prompts]
    return [
        decoder.method.decode(request, Trace())[request.limits.prompt_length :]
        for request in requests
    ]


# sources of 1 to 9 words
PROMPTS = [
    " ".join(f"w{3 + (7 * row + 5 * place) % 37}" for place in range(1 + row % 9))
    for row in range(24)
]


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("longest", [None, 4])
def test_answers_in_batches_are_those_of_one_by_one(
    targets: Path, family: str, longest: int | None
) -> None:
    path = targets / family
    model = load_model(str(path), None, "cpu", torch.float32, "auto")
    sources = [model.checkpoint.source(prompt, longest) for prompt in PROMPTS]
    expected = one_by_one(path, PROMPTS, longest)
    assert greedy_answers(model, sources, LIMIT, batch_size=7) == expected
    lengths = {len(answer) for answer in expected}
    assert min(lengths) < LIMIT == max(lengths)  # some ended with an end token, some did not


def test_fewer_answers_at_once_where_their_caches_would_not_fit(
    targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(targets / "llama"), None, "cpu", torch.float32, "auto")
    sources, sizes = [model.checkpoint.source(prompt) for prompt in PROMPTS[:6]], []
    monkeypatch.setattr(batched, "max_batch_size", lambda models, requests: 2)
    monkeypatch.setattr(answers, "Batch", lambda size: sizes.append(size) or Batch(size))
    assert greedy_answers(model, sources, LIMIT, batch_size=4) == one_by_one(
        targets / "llama", PROMPTS[:6]
    )
    assert sizes == [2]


def test_a_decoder_deeper_than_its_encoder_answers_in_batches_too(tmp_path: Path) -> None:
    path = save(tiny_t5(5, layers=1, decoder_layers=3), tmp_path / "deep")
    model = load_model(str(path), None, "cpu", torch.float32, "auto")
    sources = [model.checkpoint.source(prompt) for prompt in PROMPTS[:6]]
    assert greedy_answers(model, sources, LIMIT, batch_size=4) == one_by_one(path, PROMPTS[:6])


def written(folder: Path, *words: str, model: str = "one", **dataset: Any) -> Path:
    """A finished folder with an answer of each word."""
    folder.mkdir()
    answers = [TargetAnswer(word, f"say {word}", word, [5, 1], END) for word in words]
    pq.write_table(
        pa.Table.from_pylist([asdict(one) for one in answers], SCHEMA), folder / "part.parquet"
    )
    spec = {
        "name": folder.name,
        "split": "train",
        "source_column": "de",
        "metric": "agreement",
        "path": "x",
        **dataset,
    }
    manifest = {
        "model": {"path": "m", "revision": None, "fingerprint": model},
        "dataset": asdict(DatasetSpec(**spec)),
        "parts": ["part.parquet"],
        "count": len(answers),
        "hash": contents_hash(answers),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def read_together(*folders: Path) -> Calibration:
    return joined([read_calibration(folder) for folder in folders])


def test_several_folders_are_one_with_all_their_answers_in_turn(tmp_path: Path) -> None:
    lima, cip = written(tmp_path / "lima", "a", "b"), written(tmp_path / "cip", "c")
    both = read_together(lima, cip)
    assert [one.id for one in both.answers] == ["1:a", "1:b", "2:c"]  # ids may be the same
    assert (both.manifest["count"], both.dataset.name, both.dataset.split) == (
        3,
        "lima + cip",
        "train",
    )
    assert both.manifest["model"]["fingerprint"] == "one"
    assert str(lima) in str(both.folder) and str(cip) in str(both.folder)
    hashes = {
        read_together(*given).manifest["hash"]
        for given in ([lima, cip], [cip, lima], [lima], [cip])
    }
    assert len(hashes) == 4
    assert read_together(lima) == read_calibration(lima)


def test_prompts_in_the_models_own_template_are_complete_when_they_are_read_again(
    tmp_path: Path,
) -> None:
    plain = written(tmp_path / "plain", "a")
    own = written(tmp_path / "own", "b", chat_template=["checkpoint", "<s>{question}"])
    both = read_together(plain, own)
    assert [lacks_special_tokens(answer.prompt) for answer in both.answers] == [True, False]
    assert read_calibration(own).dataset.templates[0].first_turn == "<s>{question}"


def test_answers_of_two_models_or_to_prompts_cut_differently_are_not_mixed(tmp_path: Path) -> None:
    first = written(tmp_path / "first", "a")
    other, longer = (
        written(tmp_path / "other", "b", model="two"),
        written(tmp_path / "longer", "c", max_source_tokens=9),
    )
    with pytest.raises(UserError, match="answers of one model, got .*first and .*other"):
        read_together(first, other)
    with pytest.raises(
        UserError, match=r"one dataset.max_source_tokens, got None in .*first and 9 in .*longer"
    ):
        read_together(first, longer)
