"""A folder to sweep in, and processes to sweep with."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bild_lab.lab.store.records import Sweep
from tests.checkpoints import POINT_FILES
from tests.faults import child

PATIENCE_S = 300


@dataclass(frozen=True)
class Started:
    """A sweep in a process of its own."""

    process: Any
    log: Path

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def ended(self) -> int:
        """Wait for its exit status; negative is the signal that killed it."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, f"still running: {self.printed}"
        return self.process.exitcode


@dataclass(frozen=True)
class Ground:
    """An empty folder, and a sweep to run there."""

    folder: Path
    base: list[str]
    server: Any

    @property
    def sweep(self) -> Sweep:
        return Sweep(self.folder / "outputs" / "tested")

    def start(self, *words: str, fault: Callable[[], None] | None = None) -> Started:
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        process = self.server.Process(
            target=child.main, args=([*self.base, *words], self.folder, log, fault)
        )
        process.start()
        return Started(process, log)

    def finished(self) -> dict[str, bytes]:
        """Every published result, byte by byte."""
        files = self.sweep.points.glob("[!.]*/result.json")
        return {file.parent.name: file.read_bytes() for file in files}

    def require_whole(self, points: int, before: dict[str, bytes]) -> None:
        """So many points, once each, those from before untouched; a table and a report of all of
        them.
        """
        now = self.finished()
        assert {name: now.get(name) for name in before} == before
        assert len(now) == points and not [name for name in now if "." in name]
        for folder in (self.sweep.points / name for name in now):
            assert sorted(file.name for file in folder.iterdir()) == POINT_FILES
            assert [
                json.loads(line)["id"]
                for line in (folder / "examples.jsonl").read_text().splitlines()
            ]
        assert sorted(pd.read_csv(self.sweep.folder / "sweep.csv")["point"]) == sorted(now)
        assert (self.sweep.folder / "report.html").read_text().rstrip().endswith("</html>")


@pytest.fixture(scope="session")
def server() -> Any:
    """Forks processes that have everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.child"])
    return context


@pytest.fixture
def ground(tmp_path: Path, checkpoints: Path, data: Path, server: Any) -> Ground:
    words = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
    ]
    words += [
        f"dataset.path={data}",
        "decoding.max_new_tokens=8",
        "measure.repeats=1",
        "measure.warmup=1",
    ]
    return Ground(tmp_path, [*words, "runtime.threads=1", "name=tested"], server)
