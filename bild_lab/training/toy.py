"""Trains a member of the toy pair: python -m bild_lab.training.toy toy:large

`bild_lab.lab.toy_pair` runs this at the first use of the pair. `python scripts/finetune.py name=NAME model=toy_large
dataset=toy` makes the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.cli import INTERRUPTED, console, refuse
from bild_lab.lab.config import typed
from bild_lab.lab.toy_pair import MEMBERS, cache_folder, toy_config, toy_examples, toy_folder
from bild_lab.training.job import Recipe, TrainingJob
from bild_lab.training.stalls import YieldToOthers
from bild_lab.training.trainer import train


def train_member(name: str) -> Path:
    """Train `toy:large` or `toy:small` into its cache folder; returns the checkpoint's folder.

    An interrupted training continues at the next call. Of several processes one trains and the others wait for it.
    Raises UserError for another name, and if the cache cannot be used.
    """
    job = toy_job(name)
    with locked(name, job.folder):
        train(job)  # returns at once if another process has done it
    return job.folder / "checkpoint"


def toy_job(name: str) -> TrainingJob:
    """The training of a member as scripts/finetune.py has it, but without evaluation, which a first use skips."""
    dataset, examples = toy_examples()
    return TrainingJob(
        train=examples,
        validation=(),
        metric=dataset.metric,
        recipe=typed(Recipe, OmegaConf.create(toy_config("train/toy")), "train"),
        folder=toy_folder(name),
        model=toy_config(f"model/{MEMBERS[name]}"),
        max_source_tokens=dataset.max_source_tokens,
        data=f"{dataset.name}, split {dataset.split}: {len(examples):,} examples",
        title=f"training {name}",
        provenance={"dataset": asdict(dataset)},
        callbacks=(YieldToOthers(),),
    )


@contextmanager
def locked(name: str, folder: Path) -> Iterator[None]:
    """Hold a folder against other processes. A process that ends, in whatever way, releases it."""
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


if __name__ == "__main__":
    try:
        train_member(sys.argv[1])
    except UserError as error:
        refuse(error)
    except KeyboardInterrupt:  # the process that waits for this one says so
        sys.exit(INTERRUPTED)
