"""The files of one model's record: rows as the model returned them, and an index with a line for
each block of rows that was saved of a text.

`rows.bin` holds tensors one after the other, in their own precision. A line of `index.jsonl` says
which rows of which text a stretch of it holds, with a checksum. Rows reach the disk before their
line does, so a process that is killed loses only the text that it was decoding. `record.json` says
whose rows they are.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from bild_lab.engine.models.device import dtype_name
from bild_lab.files import write_json

log = logging.getLogger(__name__)
ROWS, INDEX, KEY = "rows.bin", "index.jsonl", "record.json"
OPEN_FILES = 65_536  # a block of rows that is read holds its file open, and shells allow 1,024

RowValues = Shaped[Tensor, "1 width"]


@dataclass(frozen=True)
class RecordedRow:
    """A row of a text. parent: the number of the node before it, 0 for the prompt. kind: what the
    row is.
    """

    parent: int
    token: int
    kind: str
    values: RowValues


@dataclass(frozen=True)
class SavedRows:
    """The rows that were saved of a text at once. forwards: how many forwards of the model they
    took, by kind.

    kinds: each with dtype and width. order: parent, token and kind of each row.
    """

    start: int
    size: int
    kinds: list[tuple[str, str, int]]
    order: list[tuple[int, int, int]]
    forwards: dict[str, int]
    checksum: int

    def tensors(self, content: Shaped[Tensor, " bytes"]) -> list[RecordedRow]:
        """The rows, given the block's bytes. They share its memory."""
        rows, start = [], 0
        for parent, token, place in self.order:
            kind, dtype, width = self.kinds[place]
            end = start + width * (precision := getattr(torch, dtype)).itemsize
            rows.append(RecordedRow(parent, token, kind, content[start:end].view(precision)[None]))
            start = end
        return rows


class RecordStore:
    """The record of one model in a folder, which is made at the first text that is saved.

    key: what the rows depend on: weights, precision, engine, code. The folder's name has its hash
    (`Records`), so no other key's rows are met there. limit_bytes: of all rows, from which on no
    text should be begun.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], limit_bytes: float = math.inf) -> None:
        self.folder, self._key, self._limit_bytes = folder, dict(key), limit_bytes
        allow_open_files()
        self._blocks: dict[str, list[SavedRows]] = {}
        self._end = self._index_end = 0  # after the last whole block, and its line
        self._read_index()

    @property
    def bytes(self) -> int:
        """The size of all rows."""
        return self._end

    @property
    def full(self) -> bool:
        """Whether the rows have reached the limit."""
        return self._end >= self._limit_bytes

    def block_count(self, text: str) -> int:
        """How many blocks of this text are saved."""
        return len(self._blocks.get(text, ()))

    def forwards(self, texts: Sequence[str]) -> dict[str, int]:
        """How many forwards the rows of these texts took, by kind."""
        blocks = (block for text in texts for block in self._blocks.get(text, ()))
        return sum((Counter(block.forwards) for block in blocks), Counter())

    def read(self, text: str) -> list[list[RecordedRow]]:
        """The saved rows of a text, block by block.

        They are read from the disk when they are used.
        """
        blocks = self._blocks.get(text, [])
        rows_of_blocks = []
        for place, block in enumerate(blocks):
            content = self._content(block)
            if checksum(block.order, [content.numpy()]) != block.checksum:
                log.warning(
                    "%s is damaged: the rows of one text are recorded anew", self.folder / ROWS
                )
                self._forget_from(text, place)
                break
            rows_of_blocks.append(block.tensors(content))
        return rows_of_blocks

    def read_newest(self, text: str) -> list[RecordedRow]:
        """The rows of the last block of a text.

        They are read from the disk when they are used.
        """
        block = self._blocks[text][-1]
        return block.tensors(self._content(block))

    def append(self, text: str, rows: Sequence[RecordedRow], forwards: Mapping[str, int]) -> None:
        """Save new rows of a text, and have them survive a kill and a power cut."""
        kinds = {
            row.kind: (
                row.kind,
                dtype_name(row.values.dtype),
                row.values.shape[1],
            )
            for row in rows
        }
        names = list(kinds)
        order = [(row.parent, row.token, names.index(row.kind)) for row in rows]
        content = [row.values.contiguous().view(torch.uint8).numpy() for row in rows]
        block = SavedRows(
            self._end,
            sum(values.nbytes for values in content),
            list(kinds.values()),
            order,
            dict(forwards),
            checksum(order, content),
        )
        if not (self.folder / KEY).is_file():
            write_json(self.folder / KEY, self._key)
        self._end = write_at(self.folder / ROWS, self._end, content)
        self._write_line({"text": text, **vars(block)})
        self._blocks.setdefault(text, []).append(block)

    def _forget_from(self, text: str, place: int) -> None:
        """Leave out this block of a text, and those after it, now and in what reads the folder later."""
        self._write_line({"text": text, "kept": place})
        del self._blocks[text][place:]

    def _write_line(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, separators=(",", ":")) + "\n"
        self._index_end = write_at(self.folder / INDEX, self._index_end, [line.encode()])

    def _content(self, block: SavedRows) -> Shaped[Tensor, " bytes"]:
        """A block's bytes, mapped alone: the file may be larger than the memory."""
        return torch.from_numpy(
            np.memmap(
                self.folder / ROWS, np.uint8, mode="c", offset=block.start, shape=(block.size,)
            )
        )

    def _read_index(self) -> None:
        """Take every whole line whose rows are there.

        What a kill or a copy cut short is logged and recorded anew.
        """
        index, rows = self.folder / INDEX, self.folder / ROWS
        if not index.is_file():
            return
        lines = index.read_bytes().splitlines(keepends=True)
        size = rows.stat().st_size if rows.is_file() else 0
        lost = 0
        for place, line in enumerate(lines):
            text, block = parsed(line)
            if isinstance(block, int):
                del self._blocks.get(text, [])[block:]
                self._index_end += len(line)
                continue
            if block is None or block.start != self._end or block.start + block.size > size:
                lost = len(lines) - place
                break
            self._blocks.setdefault(text, []).append(block)
            self._end, self._index_end = block.start + block.size, self._index_end + len(line)
        if lost:
            saved_count = sum(map(len, self._blocks.values()))
            log.warning(
                "%s was cut short or damaged: %d blocks of rows are kept, %d recorded anew",
                self.folder,
                saved_count,
                lost,
            )


def allow_open_files() -> None:
    """Raise the process's limit of open files to `OPEN_FILES`, or as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def parsed(line: bytes) -> tuple[str, SavedRows | int | None]:
    """A line of the index: a text's next block, or how many of its blocks are kept, as the others
    were damaged; None for a line that is cut short or damaged.
    """
    try:
        values = json.loads(line) if line.endswith(b"\n") else {}
        text = values.pop("text")
        return text, int(values["kept"]) if "kept" in values else SavedRows(**values)
    except (ValueError, TypeError, KeyError):
        return "", None


def checksum(order: Sequence[Sequence[int]], content: Sequence[np.ndarray]) -> int:
    """A checksum of a block's rows, given as bytes in one part or several, and of what they are."""
    summed = zlib.crc32(json.dumps([list(row_key) for row_key in order]).encode())
    for part in content:
        summed = zlib.crc32(part, summed)
    return summed


def write_at(file: Path, start: int, content: Sequence[bytes | np.ndarray]) -> int:
    """Write from this position on, drop what else was there, and wait for the disk.

    Returns the new end.
    """
    with file.open("r+b" if file.is_file() else "wb") as stream:
        stream.seek(start)
        stream.truncate()
        for part in content:
            stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell()
