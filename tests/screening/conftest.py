"""A screening of tiny checkpoints on three sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.screening.candidates import as_overrides
from scripts import screen as script
from tests.checkpoints import write_data

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
