"""The folder of a sweep: `points/HASH/{config.yaml,result.json,examples.jsonl}`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError


@dataclass(frozen=True)
class Sweep:
    """Everything that was measured under one name."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def finished(self, point: str) -> dict[str, Any] | None:
        """The point's result, if it has one."""
        file = self.folder / "points" / point / "result.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def write_point(
        self, point: str, config_yaml: str, result: dict[str, Any], examples: Iterable[dict[str, Any]]
    ) -> Path:
        """Store a finished point; it appears whole or not at all."""
        files = {
            "config.yaml": config_yaml,
            "examples.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in examples),
            "result.json": json.dumps(finite(result), indent=2, ensure_ascii=False) + "\n",
        }
        return self._publish(point, files)

    def write_failure(self, point: str, config_yaml: str, failure: dict[str, Any]) -> Path:
        """Store why a point failed; a result that is already there stays."""
        if self.finished(point) is not None:
            return self.folder / "points" / point
        files = {"config.yaml": config_yaml, "failed.json": json.dumps(finite(failure), indent=2) + "\n"}
        return self._publish(point, files)

    def forget_failure(self, point: str) -> None:
        """Remove what an earlier try of a point left, now that it has succeeded."""
        shutil.rmtree(self.folder / "points" / point, ignore_errors=True)

    def results(self) -> list[dict[str, Any]]:
        """Every finished point, oldest first; of points alike in policy and setting the newest."""
        found = [json.loads(file.read_text()) for file in self._files("result.json")]
        ordered = sorted(found, key=lambda result: (result["environment"]["started"], result["point"]))
        newest = {_identity(result): result for result in ordered}  # of one policy measured anew, say with new weights
        return list(newest.values())

    def failures(self) -> list[dict[str, Any]]:
        """Every point whose last try failed."""
        return [json.loads(file.read_text()) for file in self._files("failed.json")]

    def _files(self, name: str) -> list[Path]:
        """That file of every published point; a folder with a dot was never finished."""
        found = self.folder.glob(f"points/*/{name}")
        return sorted(file for file in found if not file.parent.name.startswith("."))

    def _publish(self, point: str, files: dict[str, str]) -> Path:
        final = self.folder / "points" / point
        draft = final.with_name(f".{point}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        draft.mkdir(parents=True)
        try:
            for name, content in files.items():
                with (draft / name).open("w", encoding="utf-8") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
            if final.exists():  # an earlier failure of this point
                shutil.rmtree(final)
            draft.rename(final)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return final


def _identity(result: dict[str, Any]) -> str:
    keys = ("policy", "knobs", "composition", "setting")
    return json.dumps(plain_numbers({key: result.get(key) for key in keys}), sort_keys=True)


def require_writable(folder: Path) -> None:
    """Raise UserError unless results can be written there; creates nothing that stays."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"results go to {folder}, but {existing} is not a folder that can be written; choose name=NAME")


def point_hash(inputs: dict[str, Any]) -> str:
    """Twelve hex digits that name what determines a point's result."""
    canonical = json.dumps(plain_numbers(inputs), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def plain_numbers(value: Any) -> Any:
    """2.0 as 2, so that a whole number is the same value however it was written."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: NaN becomes null, infinity its name."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
