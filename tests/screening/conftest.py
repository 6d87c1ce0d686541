"""A screening of tiny checkpoints on three sentences."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.screening.candidates import as_overrides
from scripts import screen as script
from tests.checkpoints import write_data
from tests.loopback_hub import REPOSITORY

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def words(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a screening of tiny checkpoints on three sentences."""
    data = write_data(tmp_path_factory.mktemp("splits"), rows=6)
    rows = (data / "test.jsonl").read_text().splitlines(keepends=True)
    (data / "validation.jsonl").write_text("".join(rows[:3]))
    (data / "test.jsonl").write_text("".join(rows[3:]))
    models = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    prompt = "dataset.prompt_template='{source}'"
    dataset = [
        "dataset=multi30k",
        f"dataset.path={data}",
        prompt,
        "decoding.max_new_tokens=8",
        "name=grid",
    ]
    clock = [
        "measure.repeats=1",
        "measure.warmup=0",
        "measure.traced_examples=0",
        "runtime.threads=1",
    ]
    return [*models, *dataset, *clock, "screen.timed_s=0.2"]


@pytest.fixture
def screen(command: Command, words: list[str]) -> Command:
    """Runs scripts/screen.py on tiny checkpoints in an empty folder; returns its exit code and what
    it printed.
    """
    return lambda *others: command(
        script, *as_overrides([*words, *others], "screen.space"), config="screen"
    )


@pytest.fixture
def killed_screen(words: list[str]) -> Callable[..., None]:
    """Runs scripts/screen.py in a process that kills itself. fault: a program that arranges it."""

    def run(fault: str, *others: str) -> None:
        program = (
            f"{fault}\nimport runpy\nrunpy.run_path({script.__file__!r}, run_name='__main__')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *words, *others],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    return run
