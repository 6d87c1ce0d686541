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
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.lab.data.prompts import Continuation, Example
from bild_lab.lab.store.hashing import (
    canonical_text,
    content_hash,
    content_of,
    data_hash,
    file_hash,
)


def test_a_hash_depends_on_values_and_not_on_order() -> None:
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    assert content_hash({"a": 1, "b": 2}) != content_hash({"a": 1, "b": 3})


def test_a_whole_number_hashes_the_same_however_it_was_written() -> None:
    assert content_hash({"a": [2, {"b": 1}]}) == content_hash({"a": [2.0, {"b": 1.0}]})
    assert content_hash({"a": 2}) != content_hash({"a": 2.5})


def test_equal_values_share_one_text_however_their_numbers_and_keys_were_written() -> None:
    assert canonical_text({"b": (2.0,), "a": 0}) == canonical_text({"a": 0.0, "b": [2]})
    assert canonical_text({"a": 2}) != canonical_text({"a": "2"})


def test_data_is_known_by_prompts_references_and_what_later_turns_follow() -> None:
    one = Example("a", "source", "prompt", ("reference",))
    changes = [
        {"prompt": "other"},
        {"references": ("other",)},
        {"id": "b"},
        {"continues": Continuation("a", " ")},
    ]
    hashes = [
        data_hash([one]),
        data_hash([one, one]),
        *(data_hash([replace(one, **change)]) for change in changes),
    ]
    assert len(set(hashes)) == len(hashes)
    # or all points are new
    assert hashes[0] == content_hash({"examples": [("a", "prompt", ("reference",))]})


def test_a_folder_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "adapter" / "deep").mkdir(parents=True)
    (tmp_path / "adapter" / "deep" / "weights").write_text("1")
    (tmp_path / "adapter" / "weights").write_text("1")  # of the same name
    before = file_hash(str(tmp_path / "adapter"))
    assert before == file_hash(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / "deep" / "weights").write_text("2")
    assert before != file_hash(str(tmp_path / "adapter"))
    assert file_hash(str(tmp_path / "adapter" / "deep" / "weights")) == sha256(b"2").hexdigest()
    assert file_hash(str(tmp_path / "missing")) is None


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the large files that were read to be hashed.

    Files are large from four bytes on.
    """
    read: list[str] = []
    own = hashlib.file_digest
    monkeypatch.setattr(
        hashlib,
        "file_digest",
        lambda stream, kind: read.append(Path(stream.name).name) or own(stream, kind),
    )
    monkeypatch.setattr(files, "LARGE_BYTES", 4)
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "cache"))
    return read


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path: Path, hashed: list[str]) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    first = Checkpoint(str(weights.parent)).fingerprint
    # or all points are new
    own = sha256(b"model.safetensors" + sha256(b"weights").digest()).hexdigest()[:16]
    assert first == Checkpoint(str(weights.parent)).fingerprint == own and hashed == [
        "model.safetensors"
    ]
    dated = weights.stat()
    while weights.stat().st_ctime_ns == dated.st_ctime_ns:
        weights.write_bytes(b"Weights")
        os.utime(weights, ns=(dated.st_atime_ns, dated.st_mtime_ns))  # the same size and date
    assert Checkpoint(str(weights.parent)).fingerprint != first and len(hashed) == 2
    assert file_hash(str(weights)) == sha256(b"Weights").hexdigest() and len(hashed) == 2


@pytest.mark.parametrize("content", ["", "[1, 2", "[]", "null", "half"])
def test_a_damaged_memory_of_hashes_is_made_anew(
    content: str, tmp_path: Path, hashed: list[str]
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    own = files.file_digest(weights)
    (memory,) = (tmp_path / "cache" / "hashes").iterdir()
    memory.write_text(memory.read_text().replace(own[32:], "") if content == "half" else content)
    assert (
        files.file_digest(weights)
        == own
        == files.file_digest(weights)
        == sha256(b"weights").hexdigest()
    )
    assert len(hashed) == 2
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")  # nothing can be remembered
    assert files.file_digest(weights) == own == files.file_digest(weights) and len(hashed) == 4


class Mine:
    """A part of a user's own, whose parameters say nothing of files."""

    def __init__(self, knob: object) -> None:
        self.knob = knob


MINE = f"{__name__}.Mine"


@pytest.mark.parametrize(
    "knob",
    ["table.json", "heads", ["a", {"b": "table.json"}], {"_target_": MINE, "knob": ["table.json"]}],
)
def test_a_file_that_a_users_part_gets_counts_with_its_content(
    knob: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = {"name": "mine", "decoder": {"_target_": MINE, "knob": knob}}
    assert content_of(policy) == policy, "these paths name nothing yet"
    (tmp_path / "heads").mkdir()
    contents = []
    for text in ("1", "2"):
        (tmp_path / "table.json").write_text(text)
        (tmp_path / "heads" / "weights").write_text(text)
        contents.append(content_of(policy))
    assert contents[0] != contents[1] and policy not in contents
    (tmp_path / "table.json").rename(tmp_path / "other.json")
    (tmp_path / "other.json").rename(tmp_path / "table.json")
    assert content_of(policy) == contents[1]


def test_words_that_happen_to_name_files_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two words of a knob, beside two files of these names with the same content, are two
    policies.
    """
    monkeypatch.chdir(tmp_path)
    for word in ("fast", "slow"):
        (tmp_path / word).write_text("")
    fast, slow = (content_of({"_target_": MINE, "knob": word}) for word in ("fast", "slow"))
    assert fast != slow


@pytest.mark.parametrize(
    "knob", ["", " ", ".", "..", "/", "~", "outputs", "\0", "/dev/null", "x" * 5000, None, 3]
)
def test_what_is_no_file_of_a_policy_is_left_alone(
    knob: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that hold the results would be new after each point."""
    (tmp_path / "outputs" / "name").mkdir(parents=True)
    (tmp_path / "outputs" / "name" / "sweep.csv").write_text("1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    node = {"_target_": MINE, "knob": knob}
    assert content_of(node) == node


def test_a_part_of_ours_says_which_of_its_values_are_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marks decide, so the place of a file does not count, and a word beside a file of its name
    is a word.
    """
    monkeypatch.chdir(tmp_path)
    node = {
        "_target_": "bild_lab.engine.methods.lookup.suffix.SuffixDrafter",
        "corpus": "corpus",
        "budget": "corpus_too",
    }
    (tmp_path / "corpus_too").write_text("1")
    assert content_of(node) == node
    (tmp_path / "corpus").write_text("1")
    assert content_of(node) == node | {"corpus": file_hash("corpus")}
