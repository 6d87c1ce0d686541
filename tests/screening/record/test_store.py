"""The record of a model on disk: saved, read again, cut short and damaged."""

from __future__ import annotations

import logging
import resource
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from bild_lab.screening import record_store
from bild_lab.screening.record_store import BLOCKS, RecordedRow, RecordStore

KEY = {"weights": "a", "precision": "float32"}


def entries(first: int, count: int = 3) -> list[RecordedRow]:
    """A chain of tokens behind the prompt, each with a row of its own."""
    return [
        RecordedRow(at, first + at, "logits", torch.full((1, 4), float(first + at)))
        for at in range(count)
    ]


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    """With three texts."""
    made = RecordStore(tmp_path / "record", KEY)
    for text, first in (("one", 10), ("two", 20), ("three", 30)):
        made.append(text, entries(first), {"whole": 2})
    return made


def block_of(store: RecordStore, text: str, place: int = 0) -> Path:
    """The file of a block of a text."""
    (file,) = store.folder.glob(f"{text}.{place:06}{BLOCKS[1:]}")
    return file


def read(folder: Path, text: str) -> list[float]:
    return [
        float(row.values[0, 0]) for block in RecordStore(folder, KEY).read(text) for row in block
    ]


def test_what_was_saved_is_read_again(store: RecordStore) -> None:
    assert read(store.folder, "two") == [20.0, 21.0, 22.0]
    assert RecordStore(store.folder, KEY).forwards(["one", "three", "four"]) == {"whole": 4}


def test_a_store_is_full_when_its_rows_reach_the_limit(tmp_path: Path) -> None:
    limited = RecordStore(tmp_path / "record", KEY, limit_bytes=40)
    assert not limited.full
    limited.append("one", entries(10), {})  # 3 rows of 16 bytes
    assert limited.full and limited.block_count("one") and not limited.block_count("two")


def test_rows_keep_their_precision_and_their_kinds(tmp_path: Path) -> None:
    rows = [torch.randn(1, 4).bfloat16(), torch.randn(1, 2, dtype=torch.float64)]
    RecordStore(tmp_path / "r", KEY).append(
        "text", [RecordedRow(0, 5, "logits", rows[0]), RecordedRow(0, 5, "head_input", rows[1])], {}
    )
    ((one, other),) = RecordStore(tmp_path / "r", KEY).read("text")
    assert torch.equal(one.values, rows[0]) and torch.equal(other.values, rows[1])
    assert (one.kind, other.kind) == ("logits", "head_input")


def test_a_block_is_written_in_a_stream(tmp_path: Path) -> None:
    """Fault: two copies of it as bytes, beside rows that take a fifth of the free memory."""
    rows = [RecordedRow(at, at, "logits", torch.zeros(1, 100_000)) for at in range(10)]
    tracemalloc.start()
    try:
        RecordStore(tmp_path / "record", KEY).append("one", rows, {})
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < rows[0].values.nbytes


def test_a_full_disk_leaves_what_was_there(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: dict, file: Path, words: dict) -> None:
        file.write_bytes(b"half a block")
        raise SafetensorError("No space left on device")

    before = set(store.folder.iterdir())
    with monkeypatch.context() as patched, pytest.raises(SafetensorError, match="No space left"):
        patched.setattr(record_store, "save_file", full)
        store.append("one", entries(40), {})
    assert set(store.folder.iterdir()) == before
    store.append("one", entries(40), {})
    assert read(store.folder, "one") == [10.0, 11.0, 12.0, 40.0, 41.0, 42.0]


def test_a_block_that_was_removed_is_recorded_anew(store: RecordStore) -> None:
    """Fault: it was looked for once more, to remove it."""
    store.append("two", entries(40), {})
    block_of(store, "two").unlink()
    assert store.read("two") == [] and not list(store.folder.glob("two.*"))


def test_more_blocks_are_read_than_a_shell_allows_open_files(store: RecordStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        again = RecordStore(store.folder, KEY)
        held = [again.read("two") for _ in range(300)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(held) == 300


@pytest.mark.parametrize("left", [0, 5, -5], ids=["nothing", "its beginning", "all but its end"])
def test_a_text_that_was_cut_short_is_recorded_anew_and_the_others_are_kept(
    store: RecordStore, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = block_of(store, "three")
    file.write_bytes(file.read_bytes()[:left])
    again = RecordStore(store.folder, KEY)
    with caplog.at_level(logging.WARNING):
        assert again.read("three") == []
    assert "damaged" in caplog.text and len(caplog.records) == 1
    again.append("three", entries(40), {})
    assert [read(store.folder, text)[0] for text in ("one", "two", "three")] == [10.0, 20.0, 40.0]


def test_rows_after_a_damaged_block_are_recorded_anew_too(store: RecordStore) -> None:
    store.append("two", entries(40), {})
    block_of(store, "two").write_bytes(b"")
    assert store.read("two") == [] and store.block_count("two") == 0
    assert read(store.folder, "two") == [] and read(store.folder, "one") == [10.0, 11.0, 12.0]
