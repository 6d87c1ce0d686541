"""Writing into an output folder: whole files, clear errors, and no mixing of two results under one name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.decoding.build import flatten
from bild_lab.lab.schema.json_values import to_json


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Readable, whole or not at all; NaN as null."""
    write_atomically(path, json.dumps(to_json(content), indent=2, ensure_ascii=False).encode() + b"\n")


@contextmanager
def writing(
    place: Path, what: str, remedy: str = "make room, or choose name=NAME elsewhere", half_written: Path | None = None
) -> Iterator[None]:
    """Turn a failure to write `what` into a UserError, and remove the folder `half_written`."""
    try:
        yield
    # a full disk is an OSError, a SafetensorError or, from torch.save, a RuntimeError
    except (OSError, SafetensorError, RuntimeError) as error:
        if half_written is not None:
            shutil.rmtree(half_written, ignore_errors=True)
        existing = next(parent for parent in [place, *place.absolute().parents] if parent.exists())
        free_mb = shutil.disk_usage(existing).free // 2**20
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"cannot write {what} to {place}: {reason} ({free_mb} MB are free); {remedy}") from error


def require_same_settings(
    folder: Path, what: str, held: Mapping[str, Any], wanted: Mapping[str, Any], ignored: frozenset[str] = frozenset()
) -> None:
    """Raise UserError, which names the first difference, unless `what` a folder holds was made with these settings.

    held: the settings read back from the folder's JSON. Keys of nested settings are dotted. ignored: keys that decide
    nothing, such as the path of data that has a hash.
    """
    before, now = flatten(dict(held)), flatten(json.loads(json.dumps(wanted)))  # lists for tuples, as JSON has them
    for key in sorted({*before, *now} - ignored):
        if before.get(key) != now.get(key):
            raise UserError(
                f"{folder} holds {what} with {key}={before.get(key)}, but this command has {key}={now.get(key)}; "
                "choose another name=NAME, or remove the folder"
            )
