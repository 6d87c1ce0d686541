"""The toy pair: a large and a small T5, trained on the toy corpus at first use and kept in a cache.

`conf/model/toy_large.yaml`, `conf/model/toy_small.yaml` and `conf/train/toy.yaml` say how they are trained. Training
runs in a separate process, `python -m bild_lab.training.toy`, so that the lab does not import training.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.files import cache_folder
from bild_lab.lab.cli import BAD_INPUT, INTERRUPTED, console, stages
from bild_lab.lab.config import config_dir, typed
from bild_lab.lab.data.examples import DatasetSpec, Example, load_examples

C = TypeVar("C", bound=Checkpoint)

MEMBERS = {"toy:large": "toy_large", "toy:small": "toy_small"}  # values: their files in conf/model
TRAIN = "bild_lab.training.toy"
PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("torch", "transformers", "tokenizers")  # other versions give other weights


def named_checkpoint(
    path: str, revision: str | None = None, trust_remote_code: bool = False, kind: type[C] = Checkpoint
) -> C:
    """The checkpoint of a folder, a hub id, toy:large or toy:small. The toy pair is trained at first use."""
    folder = toy_checkpoint(path) if isinstance(path, str) and path.startswith("toy:") else None
    return kind(path, revision, trust_remote_code, folder)


def toy_checkpoint(name: str) -> Path:
    """The folder of `toy:large` or `toy:small`, in Hugging Face layout; trained at first use.

    Raises UserError for another name, and if the training fails.
    """
    checkpoint = toy_folder(name) / "checkpoint"
    if not checkpoint.exists():
        _train(name)
    return checkpoint


def toy_folder(name: str) -> Path:
    """The cache folder of a member and its training, named by a hash of everything that determines the weights.

    These are the corpus, the recipe, the configuration and library versions. Raises UserError for another name.
    """
    if name not in MEMBERS:
        raise UserError(f"the toy pair has the members {' and '.join(MEMBERS)}, got {name!r}")
    spec, examples = toy_examples()
    decisive = {
        "model": toy_config(f"model/{MEMBERS[name]}"),
        "recipe": toy_config("train/toy"),
        "dataset": asdict(spec),
        "versions": {library: version(library) for library in _LIBRARIES},
        "examples": [(example.prompt, example.references) for example in examples],
    }
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=list).encode()).hexdigest()[:16]
    return cache_folder() / f"{name.replace(':', '-')}-{digest}"


def untrained(name: object) -> bool:
    """Whether this names a member of the toy pair that would be trained now. Raises UserError for another member."""
    return isinstance(name, str) and name.startswith("toy:") and not (toy_folder(name) / "checkpoint").exists()


@lru_cache
def stand_in(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A member's architecture without weights, and a tokenizer without words: enough to check what uses them."""
    values = toy_config(f"model/{MEMBERS.get(name, MEMBERS['toy:large'])}")
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(**values["config"], vocab_size=values["vocabulary"], **special)
    with torch.device("meta"):
        module = AutoModelForSeq2SeqLM.from_config(config)
    pieces = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    words = Tokenizer(WordLevel(pieces, unk_token="<unk>"))
    return module, PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def toy_examples() -> tuple[DatasetSpec, tuple[Example, ...]]:
    """The dataset that the pair is trained on, and its examples."""
    spec = typed(DatasetSpec, OmegaConf.create(toy_config("dataset/toy") | {"split": "train"}), "dataset")
    return spec, _examples(spec)


@lru_cache(maxsize=1)
def _examples(spec: DatasetSpec) -> tuple[Example, ...]:
    """Read once in a process: that takes a second, and each member's folder is named after them."""
    return load_examples(spec)


def toy_config(name: str) -> dict[str, Any]:
    """The values of `conf/NAME.yaml`."""
    values = OmegaConf.to_container(OmegaConf.load(config_dir() / f"{name}.yaml"))
    values.pop("defaults", None)  # for Hydra: which recipe belongs to a model
    return values


def _train(name: str) -> None:
    """Train a member in a separate process, which shows its progress on stderr.

    Raises UserError if the training fails, and KeyboardInterrupt if that process is interrupted.
    """
    if launched().count > 1:  # each process would train, and wait for the others inside the training
        raise UserError(
            f"{name} is not trained yet, and this is one of {launched().count} processes; "
            "train it first: python run.py pair=toy dataset.limit=1"
        )
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", TRAIN, name]  # -P: modules in the working folder must not shadow libraries
    stages.leave()
    console.print(f"training {name}, once; the cache {cache_folder()} keeps it. A few minutes: the time left follows")
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if ended.returncode < 0:
        raise UserError(
            f"the training of {name} was ended by {signal.Signals(-ended.returncode).name}, "
            "perhaps because memory ran out; the same command resumes it"
        )
    if ended.returncode == BAD_INPUT and ended.stdout:
        raise UserError(ended.stdout.strip())
    if ended.returncode:
        raise UserError(f"the training of {name} failed; the message above says why. The same command resumes it")
