"""The folder of a training: what it was given, its checkpoints on the way, and what it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.results.json_values import to_json

_PREFIX = "checkpoint-"
_MACHINE = "machine.json"
_COMPLETE = "complete"  # in a checkpoint that was written to its end; holds the size of every other file there


@dataclass(frozen=True)
class TrainingFolder:
    """`checkpoint/` appears by one rename, when all is done; until then everything lies in `training/`.

    leaves: another name for what is left, where that is no checkpoint.
    """

    root: Path
    leaves: str = "checkpoint"

    @property
    def work(self) -> Path:
        return self.root / "training"

    @property
    def checkpoint(self) -> Path:
        return self.root / self.leaves

    @property
    def tokenizer(self) -> Path:
        """Where a tokenizer that was trained is kept for the training to go on with."""
        return self.work / "tokenizer"

    def finished(self) -> dict[str, Any] | None:
        """The metrics of the training that ended here; None where none did."""
        file = self.checkpoint / "metrics.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def require_free(self) -> None:
        """Raise UserError if something that no training has made lies where the result goes."""
        if self.finished() is None and self.checkpoint.exists():
            raise UserError(f"{self.checkpoint} is in the way: it is no training's result; choose name=NAME")

    def require_same(self, identity: Mapping[str, Any]) -> None:
        """Raise UserError if this folder holds weights that a training of another identity has made."""
        self.require_free()
        finished = self.finished()
        if finished is not None:
            held = finished["identity"]
        elif self.last() is not None:
            held = json.loads((self.work / "job.json").read_text())
        else:
            return
        wanted = json.loads(json.dumps(identity))
        for key in sorted({*held, *wanted}):
            if held.get(key) != wanted.get(key):
                raise UserError(
                    f"{self.root} holds a training with {key}={held.get(key)}, this one has {wanted.get(key)}; "
                    "choose another name=NAME, or remove the folder"
                )

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Note what is trained, and remove what a kill left half-written."""
        if self.last() is None:  # nothing to go on from
            shutil.rmtree(self.work, ignore_errors=True)
            with writing(self.work, "the training"):
                write_json(self.work / "job.json", identity)
                write_json(self.work / _MACHINE, {"threads": torch.get_num_threads()})
        for folder in self.work.glob(f"{_PREFIX}*"):
            if not _whole(folder):
                shutil.rmtree(folder)

    def threads(self, wanted: int | None) -> int | None:
        """CPU threads to train with: those wanted, or else those that the training to go on with began with.

        With another number sums are taken in other parts, and the losses differ by rounding.
        """
        file = self.work / _MACHINE
        if wanted is not None or not file.is_file():
            return wanted
        return json.loads(file.read_text())["threads"]

    def abandon(self) -> None:
        """Remove a training that has no weights yet, and its folder if nothing else is there."""
        if self.last() is None:
            shutil.rmtree(self.work, ignore_errors=True)
            with suppress(OSError):  # it holds something else
                self.root.rmdir()

    def keep_tokenizer(self, save: Callable[[Path], Any]) -> None:
        """Let `save` fill `tokenizer`, which appears whole."""
        draft = self.work / ".tokenizer"
        shutil.rmtree(draft, ignore_errors=True)  # of a kill
        with writing(self.tokenizer, "the tokenizer", half_written=draft):
            save(draft)
            draft.rename(self.tokenizer)

    def last(self) -> Path | None:
        """The newest complete checkpoint on the way, to go on from."""
        complete = [folder for folder in self.work.glob(f"{_PREFIX}*") if _whole(folder)]
        return max(complete, key=lambda folder: int(folder.name.removeprefix(_PREFIX)), default=None)

    def step(self, number: int) -> Path:
        """The checkpoint of a step, as the Trainer names it."""
        return self.work / f"{_PREFIX}{number}"

    @contextmanager
    def saving(self, number: int) -> Iterator[None]:
        """Around the writing of a step's checkpoint: a failure removes it, and no other, and raises UserError."""
        with writing(self.step(number), "the checkpoint", self._remedy(), half_written=self.step(number)):
            yield

    def complete(self, number: int) -> None:
        """Mark a step's checkpoint as written to its end."""
        sizes = {file.name: file.stat().st_size for file in sorted(self.step(number).iterdir()) if file.is_file()}
        write_json(self.step(number) / _COMPLETE, sizes)

    def publish(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill a folder that becomes `checkpoint/`, and drop what was needed on the way."""
        draft = self.root / f".{self.leaves}"
        shutil.rmtree(draft, ignore_errors=True)  # of a kill
        with writing(self.checkpoint, "the trained model", self._remedy(), half_written=draft):
            draft.mkdir(parents=True)
            write(draft)
            draft.rename(self.checkpoint)
        shutil.rmtree(self.work, ignore_errors=True)

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """`metrics.json`, beside the checkpoint. Raises UserError where it cannot be written."""
        with writing(self.root / "metrics.json", "the metrics", "make room, then run the same command again"):
            write_json(self.root / "metrics.json", metrics)

    def _remedy(self) -> str:
        last = self.last()
        then = "it starts anew" if last is None else f"it goes on from {last}, which is intact"
        return f"make room, then run the same command again: {then}"


def _whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end and no file of it was cut since."""
    mark = checkpoint / _COMPLETE
    if not mark.is_file():
        return False
    sizes = json.loads(mark.read_text() or "{}")
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == sizes[name] for name in sizes)


@contextmanager
def writing(
    place: Path, what: str, remedy: str = "make room, or choose name=NAME elsewhere", half_written: Path | None = None
) -> Iterator[None]:
    """Turn a failure to write `what` into a UserError, and remove what is half-written."""
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


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Readable, whole or not at all; NaN as null."""
    write_atomically(path, json.dumps(to_json(content), indent=2, ensure_ascii=False).encode() + b"\n")
