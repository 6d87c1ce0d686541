"""Content hashes: of a point's inputs, of a dataset's examples, of a file's bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bild_lab.lab.data.examples import Example


def content_hash(content: dict[str, Any]) -> str:
    """A hash of 12 hexadecimal digits. The order of the keys does not matter, and 2.0 counts as 2."""
    canonical = json.dumps(plain_numbers(content), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def plain_numbers(value: Any) -> Any:
    """The value with 2.0 as 2, so that whole numbers are equal however they were written."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def data_hash(examples: Iterable[Example]) -> str:
    """The hash of all prompts and references.

    The answers that later turns continue are not part of it: they come from the target.
    """
    rows = [(one.id, one.prompt, one.references) + ((one.continues,) if one.continues else ()) for one in examples]
    return content_hash({"examples": rows})


def file_hash(path: str) -> str | None:
    """The hash of a file, or of all files in a folder; None if the path does not exist."""
    named = Path(path).expanduser()
    if not named.is_dir():
        return hashlib.sha256(named.read_bytes()).hexdigest() if named.is_file() else None
    files = sorted(file for file in named.rglob("*") if file.is_file())
    return content_hash({str(file.relative_to(named)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
