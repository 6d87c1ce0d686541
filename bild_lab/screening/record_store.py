"""The files of one model's record: rows as the model returned them, a file of safetensors for each
block of rows that was saved of a text.

A file appears whole, so a process that is killed loses only the text that it was decoding. Its
metadata say which row is which, how many forwards they took, and a checksum, which goes on from that
of the block before, as its rows do. `record.json` says whose rows they are.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bild_lab.errors import UserError
from bild_lab.files import replacing, write_json

log = logging.getLogger(__name__)
BLOCKS, KEY = "*.safetensors", "record.json"
DAMAGES = (SafetensorError, OSError, ValueError, KeyError, TypeError)  # what `read_block` raises

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


class RecordStore:
    """The record of one model in a folder, which is made at the first text that is saved.

    key: what the rows depend on: weights, precision, engine, code. The folder's name has its hash
    (`Records`), so no other key's rows are met there. limit_bytes: of all files, from which on no
    text should be begun.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], limit_bytes: float = math.inf) -> None:
        self.folder, self._key, self._limit_bytes = folder, dict(key), limit_bytes
        self._blocks: dict[str, list[Path]] = {}  # of each text, in their order
        self._sizes: dict[Path, int] = {}  # in bytes
        # of the blocks of each text that was read or is new, after a 0
        self._checksums: dict[str, list[int]] = {}
        for file in sorted(folder.glob(BLOCKS)):
            self._blocks.setdefault(file.name.partition(".")[0], []).append(file)
            self._sizes[file] = file.stat().st_size

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes.values())

    @property
    def full(self) -> bool:
        """Whether the files have reached the limit."""
        return self.bytes >= self._limit_bytes

    def block_count(self, text: str) -> int:
        """How many blocks of this text are saved."""
        return len(self._blocks.get(text, ()))

    def forwards(self, texts: Sequence[str]) -> dict[str, int]:
        """How many forwards the rows of these texts took, by kind."""
        counts: Counter[str] = Counter()
        for text in texts:
            for file in self._blocks.get(text, ()):
                with safe_open(file, "pt") as block:
                    counts.update(json.loads(block.metadata()["forwards"]))
        return counts

    def read(self, text: str) -> list[list[RecordedRow]]:
        """The saved rows of a text, block by block, up to one that is damaged, or does not go on from
        the one before it.

        They are read from the disk when they are used.
        """
        rows_of_blocks, checksums = [], [0]
        for file in self._blocks.get(text, ()):
            try:
                rows, summed = read_block(file, checksums[-1])
            except DAMAGES:
                log.warning("%s is damaged: the rows of one text are recorded anew", file)
                self._forget_from(text, len(rows_of_blocks))
                break
            rows_of_blocks.append(rows)
            checksums.append(summed)
        self._checksums[text] = checksums
        return rows_of_blocks

    def read_newest(self, text: str) -> list[RecordedRow]:
        """The rows of the last block of a text.

        They are read from the disk when they are used. Raises UserError where they are no longer
        those that were saved here.
        """
        previous_sum, saved_sum = self._checksums[text][-2:]
        try:
            rows, summed = read_block(self._blocks[text][-1], previous_sum)
        except DAMAGES:
            summed = None
        if summed != saved_sum:
            raise UserError(
                f"another command writes its rows into {self.folder} too; when it has ended, run"
                " this one again: it goes on"
            )
        return rows

    def append(self, text: str, rows: Sequence[RecordedRow], forwards: Mapping[str, int]) -> None:
        """Save new rows of a text that was read or is new, and have them survive a kill and a power
        cut.
        """
        values_of_kinds: dict[str, list[Tensor]] = defaultdict(list)
        for row in rows:
            values_of_kinds[row.kind].append(row.values)
        tensors = {kind: torch.cat(values) for kind, values in values_of_kinds.items()}
        order = [(row.parent, row.token, row.kind) for row in rows]
        checksums = self._checksums.setdefault(text, [0])
        summed = checksum(order, tensors, checksums[-1])
        metadata = {"order": order, "forwards": forwards, "checksum": summed}
        if not (self.folder / KEY).is_file():
            write_json(self.folder / KEY, self._key)
        file = self.folder / f"{text}.{self.block_count(text):06}.safetensors"
        with replacing(file) as temporary:  # in a stream: rows take a large part of the memory
            words = {name: json.dumps(value) for name, value in metadata.items()}
            save_file(tensors, temporary, words)
            self._sizes[file] = temporary.stat().st_size
        self._blocks.setdefault(text, []).append(file)
        checksums.append(summed)

    def _forget_from(self, text: str, place: int) -> None:
        """Remove this block of a text, and those after it, the last one first."""
        for file in reversed(self._blocks[text][place:]):
            file.unlink(missing_ok=True)  # another command may have removed it
            del self._sizes[file]
        del self._blocks[text][place:]


def read_block(file: Path, before: int) -> tuple[list[RecordedRow], int]:
    """The rows of a block, which share the file's memory, and their checksum.

    before: the checksum of the block before. Raises ValueError for other rows than were saved there,
    and the errors of `safetensors` for a file that is cut short.
    """
    with safe_open(file, "pt") as block:
        metadata = {name: json.loads(value) for name, value in block.metadata().items()}
        tensors = {kind: block.get_tensor(kind) for kind in block.keys()}  # noqa: SIM118
    summed = checksum(metadata["order"], tensors, before)
    if summed != metadata["checksum"]:
        raise ValueError(f"{file} does not hold the rows that were saved")
    values_of_kinds = {kind: iter(tensor.split(1)) for kind, tensor in tensors.items()}
    rows = [
        RecordedRow(parent, token, kind, next(values_of_kinds[kind]))
        for parent, token, kind in metadata["order"]
    ]
    return rows, summed


def checksum(order: Sequence[Sequence[Any]], tensors: Mapping[str, Tensor], before: int) -> int:
    """A checksum of a block's rows, and of what they are. before: that of the block before."""
    summed = zlib.crc32(json.dumps([list(row_key) for row_key in order]).encode(), before)
    for kind in sorted(tensors):
        summed = zlib.crc32(tensors[kind].view(torch.uint8).numpy(), summed)
    return summed
