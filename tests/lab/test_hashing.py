"""Content with the same hash is the same content."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from bild_lab import files
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.lab.data.examples import Continuation, Example
from bild_lab.lab.hashing import content_hash, data_hash, file_hash


def test_a_hash_depends_on_values_and_not_on_order() -> None:
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash({"a": 1, "b": 2}) != content_hash({"a": 1, "b": 3})


def test_a_whole_number_hashes_the_same_however_it_was_written() -> None:
    assert content_hash({"a": [2, {"b": 1}]}) == content_hash({"a": [2.0, {"b": 1.0}]})
    assert content_hash({"a": 2}) != content_hash({"a": 2.5})


def test_data_is_known_by_prompts_references_and_what_later_turns_follow() -> None:
    one = Example("a", "source", "prompt", ("reference",))
    changes = [{"prompt": "other"}, {"references": ("other",)}, {"id": "b"}, {"continues": Continuation("a", " ")}]
    hashes = [data_hash([one]), data_hash([one, one]), *(data_hash([replace(one, **change)]) for change in changes)]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0] == content_hash({"examples": [("a", "prompt", ("reference",))]})  # or all points are new


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "adapter" / "deep").mkdir(parents=True)
    (tmp_path / "adapter" / "deep" / "weights").write_text("1")
    before = file_hash(str(tmp_path / "adapter"))
    assert before == file_hash(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "deep" / "weights").write_text("2")
    assert before != file_hash(str(tmp_path / "adapter"))
    assert file_hash(str(tmp_path / "adapter" / "deep" / "weights")) == sha256(b"2").hexdigest()
    assert file_hash(str(tmp_path / "missing")) is None


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the large files that were read to be hashed. Files are large from four bytes on."""
    read: list[str] = []
    own = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda stream, kind: read.append(Path(stream.name).name) or own(stream, kind)
    )
    monkeypatch.setattr(files, "LARGE", 4)
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "cache"))
    return read


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path: Path, hashed: list[str]) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    first = Checkpoint(str(weights.parent)).fingerprint
    own = sha256(b"model.safetensors" + sha256(b"weights").digest()).hexdigest()[:16]  # or all points are new
    assert first == Checkpoint(str(weights.parent)).fingerprint == own and hashed == ["model.safetensors"]
    dated = weights.stat()
    while weights.stat().st_ctime_ns == dated.st_ctime_ns:
        weights.write_bytes(b"Weights")
        os.utime(weights, ns=(dated.st_atime_ns, dated.st_mtime_ns))  # the same size and date
    assert Checkpoint(str(weights.parent)).fingerprint != first and len(hashed) == 2
    assert file_hash(str(weights)) == sha256(b"Weights").hexdigest() and len(hashed) == 2


@pytest.mark.parametrize("content", ["", "[1, 2", "[]", "null", "half"])
def test_a_damaged_memory_of_hashes_is_made_anew(content: str, tmp_path: Path, hashed: list[str]) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    own = files.file_digest(weights)
    (memory,) = (tmp_path / "cache" / "hashes").iterdir()
    memory.write_text(memory.read_text().replace(own[32:], "") if content == "half" else content)
    assert files.file_digest(weights) == own == files.file_digest(weights) == sha256(b"weights").hexdigest()
    assert len(hashed) == 2
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")  # nothing can be remembered
    assert files.file_digest(weights) == own == files.file_digest(weights) and len(hashed) == 4
