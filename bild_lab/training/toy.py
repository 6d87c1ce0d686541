"""The toy pair: a large and a small T5 trained on the toy corpus at first use, then cached.

`conf/model/toy_large.yaml`, `conf/model/toy_small.yaml` and `conf/train/toy.yaml` say how, and
`python scripts/finetune.py name=NAME model=toy_large dataset=toy` makes the same weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.cli import console
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.data.tasks import DatasetSpec, load_examples
from bild_lab.training.folder import TrainingFolder
from bild_lab.training.job import Recipe, TrainingJob

MEMBERS = {"toy:large": "toy_large", "toy:small": "toy_small"}  # and their files in conf/model
_LIBRARIES = ("torch", "transformers", "tokenizers")  # other versions, other weights


def toy_checkpoint(name: str) -> Path:
    """The folder of `toy:large` or `toy:small`, in Hugging Face layout; trained at first use.

    It lies in the cache, in a directory named by a hash of corpus, recipe, configuration and library versions, and
    appears there by one rename. An interrupted training goes on at the next call; of several processes one trains
    and the others wait for it. Raises UserError for another name, and where the cache cannot be used.
    """
    if name not in MEMBERS:
        raise UserError(f"the toy pair has the members {' and '.join(MEMBERS)}, got {name!r}")
    job = toy_job(name)
    checkpoint = TrainingFolder(job.folder).checkpoint
    if not checkpoint.exists():
        _train(name, job)
    return checkpoint


def cache_folder() -> Path:
    """`$BILD_LAB_CACHE`, or `~/.cache/bild_lab` where it is unset or empty."""
    return Path(os.environ.get("BILD_LAB_CACHE") or "~/.cache/bild_lab").expanduser()


def toy_job(name: str) -> TrainingJob:
    """The training of a member as scripts/finetune.py has it, but not evaluated: a first use should not wait for it."""
    recipe = typed(Recipe, OmegaConf.load(config_dir() / "train" / "toy.yaml"), "train")
    dataset = typed(DatasetSpec, OmegaConf.load(config_dir() / "dataset" / "toy.yaml"), "dataset")
    dataset = replace(dataset, split="train")
    model = OmegaConf.to_container(OmegaConf.load(config_dir() / "model" / f"{MEMBERS[name]}.yaml"))
    del model["defaults"]  # Hydra's own: which recipe comes with the model
    examples = load_examples(dataset)
    decisive = {
        "model": model,
        "recipe": asdict(recipe),
        "dataset": asdict(dataset),
        "versions": {library: version(library) for library in _LIBRARIES},
        "examples": [(example.prompt, example.references) for example in examples],
    }
    return TrainingJob(
        train=examples,
        validation=(),
        metric=dataset.metric,
        recipe=recipe,
        folder=cache_folder() / f"{name.replace(':', '-')}-{_fingerprint(decisive)}",
        model=model,
        max_source_tokens=dataset.max_source_tokens,
        data=f"{dataset.name}, split {dataset.split}: {len(examples):,} examples",
        title=f"training {name}",
        provenance={"dataset": asdict(dataset)},
    )


def _fingerprint(decisive: dict[str, Any]) -> str:
    """16 hexadecimal digits naming what decides the weights."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _train(name: str, job: TrainingJob) -> None:
    """Train, or wait for the process that does. Raises UserError in one of several processes of a launcher."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:  # each would wait for the others inside the training, and they for its lock
        raise UserError(
            f"{name} is not trained yet, which one process does, and this is one of {processes}; "
            "train it first: python run.py pair=toy dataset.limit=1"
        )
    from bild_lab.training.stalls import YieldToOthers
    from bild_lab.training.trainer import train  # seconds

    with _locked(name, job.folder):
        try:
            train(replace(job, callbacks=(YieldToOthers(),)))  # returns at once where another process has done it
        except UserError as error:
            raise UserError(
                f"{name} could not be trained into the cache {cache_folder()}, which BILD_LAB_CACHE=DIR moves: {error}"
            ) from error


@contextmanager
def _locked(name: str, folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; a process that ends, however it does, gives it back."""
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
