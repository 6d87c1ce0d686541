"""Content with the same hash is the same content."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

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
