"""Trains a model of the toy pair: python -m bild_lab.training.toy toy:large

`bild_lab.lab.toy_pair` runs this when the pair is first used. `python scripts/finetune.py name=NAME model=toy_large
dataset=toy` makes the same weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from transformers import TrainerCallback

from bild_lab.errors import UserError
from bild_lab.files import cache_folder
from bild_lab.lab.cli import BAD_INPUT, INTERRUPTED, console
from bild_lab.lab.config import typed
from bild_lab.lab.toy_pair import MEMBERS, toy_config, toy_examples, toy_folder
from bild_lab.training.finetune import FinetuningJob, finetune
from bild_lab.training.recipe import Recipe


def train_member(name: str) -> Path:
    """Train `toy:large` or `toy:small` into its cache folder; returns the checkpoint's folder.

    An interrupted training resumes at the next call. If several processes call this, one trains and the others wait.
    Raises UserError for another name, and if the cache cannot be used.
    """
    job = toy_job(name)
    with locked(name, job.folder):
        finetune(job)  # returns at once if another process has finished it
    return job.folder / "checkpoint"


def toy_job(name: str) -> FinetuningJob:
    """The training as scripts/finetune.py has it, but without the evaluations, which would delay the first use."""
    folder, (dataset, examples) = toy_folder(name), toy_examples()
    return FinetuningJob(
        train=examples,
        validation=(),
        metric=dataset.metric,
        recipe=typed(Recipe, OmegaConf.create(toy_config("train/toy")), "train"),
        folder=folder,
        model=toy_config(f"model/{MEMBERS[name]}"),
        max_source_tokens=dataset.max_source_tokens,
        data=f"{dataset.name}, split {dataset.split}: {len(examples):,} examples",
        title=f"training {name}",
        provenance={"dataset": asdict(dataset)},
        callbacks=(OneThreadAfterStalls(), StopWithParent()),
    )


@contextmanager
def locked(name: str, folder: Path) -> Iterator[None]:
    """Let one process at a time train into the folder. The lock of a process that ends is released."""
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        console.print(f"another process is training {name}; waiting for it")
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"{name} is kept in the cache {cache_folder()}, which cannot be used: {error}; "
            "set BILD_LAB_CACHE to a folder on a local disk that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()


class OneThreadAfterStalls(TrainerCallback):
    """Trains with one thread once several steps have stalled; for models whose steps take far less than a second.

    OpenMP threads wait for each other by spinning: on a machine whose cores are busy, two threads need up to a
    hundred times as long as usual, one thread does not.
    """

    stall_s = 1.0  # an ordinary step of the toy pair takes a tenth of it
    patience = 3

    def __init__(self) -> None:
        self.started_s, self.stalls = 0.0, 0

    def on_step_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.started_s = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Count a stall, and go down to one thread at the last one allowed."""
        self.stalls += time.perf_counter() - self.started_s > self.stall_s
        if self.stalls == self.patience:
            torch.set_num_threads(1)


class StopWithParent(TrainerCallback):
    """Ends the training when the process that waits for it has ended, for example killed."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def on_step_end(self, args, state, control, **kwargs):
        """Raise KeyboardInterrupt if this process has another parent by now."""
        if os.getppid() != self._parent:
            raise KeyboardInterrupt


def main(name: str) -> int:
    """Train a model for a process that waits; returns the exit code. Errors in the input go to stdout."""
    try:
        train_member(name)
    except UserError as error:
        print(error)  # noqa: T201 (the waiting process reads it)
        return BAD_INPUT
    except KeyboardInterrupt:  # the waiting process says so
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
