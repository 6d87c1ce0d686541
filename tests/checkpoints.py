"""Tiny checkpoints and data on disk, shared by the tests that go through files."""

from __future__ import annotations

import atexit
import json
import random
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

import bild_lab
from tests.tiny import TINY, WORDS, relative_of, save, tiny_llama

SHARED = Path(__file__).resolve().parents[2] / "shared"

POINT_FILES = ["config.yaml", "examples.jsonl", "result.json", "speculation_profile.json"]

needs_shared = pytest.mark.skipif(
    not (SHARED / "models").is_dir(),
    reason="no trained checkpoints beside the project (../shared/models)",
)


def folder_of_this_process() -> Path:
    """A folder that is removed when the tests end.

    A forked process drops what is registered here, from Python 3.13 on, and a TemporaryDirectory
    that is dropped removes its folder.
    """
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@lru_cache
def vanilla(family: str = "llama") -> bild_lab.Decoder:
    """The tiny target of this family, which decodes alone."""
    return bild_lab.load(str(tiny_checkpoints() / family), policy="vanilla")


@lru_cache
def tiny_checkpoints() -> Path:
    """t5, t5-draft, the same of llama, qwen3 and gemma3, and llama-words, whose vocabulary is
    another.

    Written once, to a folder that is removed when the tests end.
    """
    folder = folder_of_this_process()
    for name, make in TINY.items():
        target = make(1)
        save(relative_of(target, 2, noise=0.2), folder / f"{name}-draft")
        save(target, folder / name)
    save(
        tiny_llama(3),
        folder / "llama-words",
        words=[f"other{index}" for index in range(len(WORDS))],
    )
    return folder


def write_data(folder: Path, rows: int = 6) -> Path:
    """A test split of random words, as source and reference."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    with (folder / "test.jsonl").open("w") as stream:
        for _ in range(rows):
            words = chance.choices(WORDS, k=chance.randint(3, 8))
            stream.write(
                json.dumps({"de": " ".join(words), "en": " ".join(reversed(words))}) + "\n"
            )
    return folder
