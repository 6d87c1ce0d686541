"""The folder of a training: its settings, checkpoints and result, and how files are written
there.
"""

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

from bild_lab.errors import UserError, first_line
from bild_lab.files import write_json
from bild_lab.lab.schema.columns import to_json
from bild_lab.lab.store.inputs import require_same_settings
from bild_lab.ranks import launched

METRICS = "metrics.json"
_PREFIX = "checkpoint-"  # and the step, as the Trainer names them
_SETTINGS, _MACHINE = "job.json", "machine.json"
# this file marks a checkpoint as written to its end; it holds the sizes of the other files
_COMPLETE = "complete"


@dataclass(frozen=True)
class TrainingFolder:
    """A running training keeps everything in `training/`; its result appears as `checkpoint/` in
    one rename.

    result_name: another name for the result, if it is not a checkpoint.
    """

    root: Path
    result_name: str = "checkpoint"

    @property
    def work(self) -> Path:
        return self.root / "training"

    @property
    def result(self) -> Path:
        return self.root / self.result_name

    @property
    def lock(self) -> Path:
        """Held while a process trains, so that the lab book can tell a running training from an
        interrupted one.
        """
        return self.work / ".running.lock"

    @property
    def tokenizer(self) -> Path:
        """Where a tokenizer made by this training is kept until the training ends."""
        return self.work / "tokenizer"

    @property
    def soft_targets(self) -> Path:
        """Where what a teacher says is kept, for a training that resumes from a checkpoint."""
        return self.work / "soft_targets.safetensors"

    def finished(self) -> dict[str, Any] | None:
        """The metrics of the training that finished here; None if there is none."""
        file = self.result / METRICS
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def require_free(self) -> None:
        """Raise UserError if something that is not a training's result has the result's name."""
        if self.finished() is None and self.result.exists():
            raise UserError(
                f"{self.result} is in the way: it is not the result of a training; choose name=NAME"
            )

    def require_same(self, identity: Mapping[str, Any]) -> None:
        """Raise UserError if this folder holds weights of a training with another identity."""
        self.require_free()
        finished = self.finished()
        if finished is not None:
            stored = finished["identity"]
        elif self.last_checkpoint() is not None:
            stored = json.loads((self.work / _SETTINGS).read_text(encoding="utf-8"))
        else:
            return
        require_same_settings(self.root, "a training", stored, identity)

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Write down what is trained, and remove checkpoints that are not complete."""
        if self.last_checkpoint() is None:  # nothing to resume
            shutil.rmtree(self.work, ignore_errors=True)
            with writing(self.work, "the training"):
                write_json(self.work / _SETTINGS, identity)
                write_json(self.work / _MACHINE, {"threads": torch.get_num_threads()})
        for folder in self.work.glob(f"{_PREFIX}*"):
            if not _complete(folder):
                shutil.rmtree(folder)

    def threads(self, requested: int | None) -> int | None:
        """CPU threads to train with: as many as wanted, or as an interrupted training had.

        Another number would sum in another order, and the losses would differ by rounding.
        """
        file = self.work / _MACHINE
        if requested is not None or not file.is_file():
            return requested
        return json.loads(file.read_text(encoding="utf-8"))["threads"]

    def abandon(self) -> None:
        """Remove a training that has no weights yet, and its folder if that holds nothing else."""
        if self.last_checkpoint() is None:
            shutil.rmtree(self.work, ignore_errors=True)
            with suppress(OSError):  # the folder is not empty
                self.root.rmdir()

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, from which the training resumes."""
        complete = [folder for folder in self.work.glob(f"{_PREFIX}*") if _complete(folder)]
        return max(
            complete, key=lambda folder: int(folder.name.removeprefix(_PREFIX)), default=None
        )

    def checkpoint_of(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.work / f"{_PREFIX}{step}"

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wraps the writing of a step's checkpoint by all processes, and marks it as complete.

        A failure removes only this checkpoint and raises UserError.
        """
        place = self.checkpoint_of(step)
        with writing(place, "the checkpoint", self._remedy(), half_written=place):
            yield
            launched().wait()  # each process writes the state of its generators
            if launched().is_main:
                sizes = {
                    file.name: file.stat().st_size
                    for file in sorted(place.iterdir())
                    if file.is_file()
                }
                write_json(place / _COMPLETE, sizes)

    def publish(self, write: Callable[[Path], Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Let `write` fill the result's folder, which appears whole, with its metrics; then remove
        the checkpoints.

        The first process writes, the others wait for it. Returns the metrics as they were written.
        """
        if launched().is_main:
            with self.published(self.result, "the trained model") as draft:
                write(draft)
                write_json(draft / METRICS, to_json(metrics))
            shutil.rmtree(self.work, ignore_errors=True)
        launched().wait()
        return self.finished()

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write `metrics.json` beside the result. Raises UserError if it cannot be written."""
        with writing(
            self.root / METRICS, "the metrics", "make room, then run the same command again"
        ):
            write_json(self.root / METRICS, to_json(metrics))

    @contextmanager
    def published(self, place: Path, what: str) -> Iterator[Path]:
        """An empty folder to fill in the block; afterwards it is renamed to `place`."""
        draft = place.with_name(f".{place.name}")
        shutil.rmtree(draft, ignore_errors=True)  # a killed process may have left one
        with writing(place, what, self._remedy(), half_written=draft):
            draft.mkdir(parents=True)
            yield draft
            draft.rename(place)

    def _remedy(self) -> str:
        checkpoint = self.last_checkpoint()
        then = (
            "it starts again"
            if checkpoint is None
            else f"it resumes from {checkpoint}, which is intact"
        )
        return f"make room, then run the same command again: {then}"


def _complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end and every file still has its size."""
    mark = checkpoint / _COMPLETE
    if not mark.is_file():
        return False
    sizes = json.loads(mark.read_text(encoding="utf-8") or "{}")
    return all(
        (checkpoint / name).is_file() and (checkpoint / name).stat().st_size == sizes[name]
        for name in sizes
    )


@contextmanager
def writing(
    place: Path,
    what: str,
    remedy: str = "make room, or choose name=NAME elsewhere",
    half_written: Path | None = None,
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
        raise UserError(
            f"cannot write {what} to {place}: {first_line(error)} ({free_mb} MB are free); {remedy}"
        ) from error
