"""Answers of several folders are read as one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.data.examples import DatasetSpec
from bild_lab.training.calibration.data import END, SCHEMA, Answer, contents_hash, read_calibration, read_calibrations


def written(folder: Path, *words: str, model: str = "one", **dataset: Any) -> Path:
    """A finished folder with an answer of each word."""
    folder.mkdir()
    answers = [Answer(word, f"say {word}", word, [5, 1], END) for word in words]
    pq.write_table(pa.Table.from_pylist([asdict(one) for one in answers], SCHEMA), folder / "part.parquet")
    spec = {"name": folder.name, "split": "train", "source_column": "de", "metric": "agreement", "path": "x", **dataset}
    manifest = {
        "model": {"path": "m", "revision": None, "fingerprint": model},
        "dataset": asdict(DatasetSpec(**spec)),
        "parts": ["part.parquet"],
        "count": len(answers),
        "hash": contents_hash(answers),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_several_folders_are_one_with_all_their_answers_in_turn(tmp_path: Path) -> None:
    lima, cip = written(tmp_path / "lima", "a", "b"), written(tmp_path / "cip", "c")
    both = read_calibrations([lima, cip])
    assert [one.id for one in both.answers] == ["a", "b", "c"]
    assert (both.manifest["count"], both.dataset.name, both.dataset.split) == (3, "lima + cip", "train")
    assert both.manifest["model"]["fingerprint"] == "one"
    assert str(lima) in str(both.folder) and str(cip) in str(both.folder)
    hashes = {read_calibrations(given).manifest["hash"] for given in ([lima, cip], [cip, lima], [lima], [cip])}
    assert len(hashes) == 4
    assert read_calibrations([lima]) == read_calibration(lima)


def test_answers_of_two_models_or_to_prompts_cut_differently_are_not_mixed(tmp_path: Path) -> None:
    first = written(tmp_path / "first", "a")
    other, longer = (
        written(tmp_path / "other", "b", model="two"),
        written(tmp_path / "longer", "c", max_source_tokens=9),
    )
    with pytest.raises(UserError, match="answers of one model, got .*first and .*other"):
        read_calibrations([first, other])
    with pytest.raises(UserError, match=r"one dataset.max_source_tokens, got None in .*first and 9 in .*longer"):
        read_calibrations([first, longer])
