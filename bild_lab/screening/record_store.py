"""The files of one model's record: rows as the model returned them, a file of safetensors for each
block of rows that was saved of a text.

A file appears whole, so a process that is killed loses only the text that it was decoding. Its
metadata say which row is which, and how many forwards they took. `record.json` says whose rows they
are. One command at a time writes here (`Sweep.search_lock`).
"""

from __future__ import annotations

import json
import logging
import math
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

from bild_lab.files import replacing, write_json

log = logging.getLogger(__name__)
BLOCKS, KEY = "*.safetensors", "record.json"
DAMAGES = (SafetensorError, OSError)  # what `read_block` raises

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
        """The saved rows of a text, block by block, up to one that is damaged.

        They are read from the disk when they are used.
        """
        blocks = []
        for file in self._blocks.get(text, ()):
            try:
                blocks.append(read_block(file))
            except DAMAGES:
                log.warning("%s is damaged: the rows of one text are recorded anew", file)
                self._forget_from(text, len(blocks))
                break
        return blocks

    def read_newest(self, text: str) -> list[RecordedRow]:
        """The rows of the last block of a text. They are read from the disk when they are used."""
        return read_block(self._blocks[text][-1])

    def append(self, text: str, rows: Sequence[RecordedRow], forwards: Mapping[str, int]) -> None:
        """Save new rows of a text that was read or is new, and have them survive a kill and a power
        cut.
        """
        values_of_kinds: dict[str, list[Tensor]] = defaultdict(list)
        for row in rows:
            values_of_kinds[row.kind].append(row.values)
        tensors = {kind: torch.cat(values) for kind, values in values_of_kinds.items()}
        order = [(row.parent, row.token, row.kind) for row in rows]
        metadata = {"order": order, "forwards": forwards}
        if not (self.folder / KEY).is_file():
            write_json(self.folder / KEY, self._key)
        file = self.folder / f"{text}.{self.block_count(text):06}.safetensors"
        with replacing(file) as temporary:  # in a stream: rows take a large part of the memory
            words = {name: json.dumps(value) for name, value in metadata.items()}
            save_file(tensors, temporary, words)
            self._sizes[file] = temporary.stat().st_size
        self._blocks.setdefault(text, []).append(file)

    def _forget_from(self, text: str, place: int) -> None:
        """Remove this block of a text, and those after it, the last one first."""
        for file in reversed(self._blocks[text][place:]):
            file.unlink(missing_ok=True)
            del self._sizes[file]
        del self._blocks[text][place:]


def read_block(file: Path) -> list[RecordedRow]:
    """The rows of a block, which share the file's memory. Raises one of `DAMAGES` for a file that is
    cut short.
    """
    with safe_open(file, "pt") as block:
        order = json.loads(block.metadata()["order"])
        tensors = {kind: block.get_tensor(kind) for kind in block.keys()}  # noqa: SIM118
    values_of_kinds = {kind: iter(tensor.split(1)) for kind, tensor in tensors.items()}
    return [
        RecordedRow(parent, token, kind, next(values_of_kinds[kind]))
        for parent, token, kind in order
    ]
