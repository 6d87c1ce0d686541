"""Reads an offline Weights & Biases run back: LevelDB log framing around records of `wandb_internal_pb2`."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_HEADER, _BLOCK = 7, 2**15  # of the file: ":W&B", a magic number, a version; of the log: a block's bytes
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """What one file holds: who the run is, its configuration, all that was logged, and its summary."""

    id: str = ""
    group: str = ""
    name: str = ""
    job_type: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


def read_run(file: Path) -> OfflineRun:
    """Raises AssertionError where the framing or a checksum is wrong."""
    run = OfflineRun()
    for content in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("run"):
            run.id, run.group = record.run.run_id, record.run.run_group
            run.name, run.job_type = record.run.display_name, record.run.job_type
            _update(run.config, record.run.config.update)
        _update(run.config, record.config.update)
        _update(run.history, record.history.item)
        _update(run.summary, record.summary.update)
        run.ended |= record.HasField("exit")
    return run


def table(file: Path, run: OfflineRun, key: str) -> dict[str, Any]:
    """A logged table: its columns and its data."""
    return json.loads((file.parent / "files" / run.history[key]["path"]).read_text())


def _records(data: bytes) -> list[bytes]:
    assert data.startswith(b":W&B")
    position, found, parts = _HEADER, [], b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # too little for a fragment's header: zeros
            position += left
            continue
        if len(data) - position < _HEADER:  # is being written
            break
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + _HEADER : position + _HEADER + length]
        if len(part) < length:  # likewise
            break
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        position += _HEADER + length
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            found.append(parts)
    return found


def _update(known: dict[str, Any], items: Any) -> None:
    for item in items:
        *path, last = item.nested_key or [item.key]
        place = known
        for key in path:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
