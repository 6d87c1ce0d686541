"""How near the Triton kernels are to the speed of this GPU's memory.

`scripts/check_gpu.py` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch

from bild_lab.benchmark.kernel_check import (
    CHAIN_STEPS,
    TREE,
    Finding,
    KernelCheck,
    attempted,
)
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.device import wait_for
from bild_lab.engine.session import ChainSpec
from bild_lab.lab.measure.machine import median_s

TIMED_ROWS = (1, 4, 8, 16, 64)
REPLAYS = 10  # of a graph in one timing, so that the host is not timed


class KernelTimes:
    """The times of one model after a long text.

    gb_per_s: at which the device reads its memory, in 10⁹ bytes a second.
    """

    def __init__(self, check: KernelCheck, gb_per_s: float) -> None:
        self._check, self._gb_per_s = check, gb_per_s

    def findings(self) -> Iterator[Finding]:
        """All times, one after the other."""
        for figure in (
            self.of_forwards,
            self.of_graphs,
            self.of_chains,
            self.of_trees,
            self.of_exits,
            self.of_pytorch,
        ):
            yield attempted(figure)

    @cached_property
    def _session(self) -> CachedSession:
        return self._check.long_session()

    @cached_property
    def _length(self) -> int:
        return self._session.length

    def of_forwards(self) -> Finding:
        """Forwards by their number of rows, with the host's part."""
        check, milliseconds = self._check, {}
        for rows in TIMED_ROWS:
            tokens = torch.tensor(check.tokens[:rows], device=check.device)
            text = self._session.layers.text_rows(self._first_slot, rows, rows)
            milliseconds[rows] = self.milliseconds(lambda: check.kernels.run(tokens, [text]))  # noqa: B023
        return Finding(f"ms a forward: {self._by_rows(milliseconds)}")

    def of_graphs(self) -> Finding:
        """Forwards by their number of rows, on the GPU alone."""
        milliseconds = {
            rows: replay_ms(self._check, self._session, self._length, rows) for rows in TIMED_ROWS
        }
        return Finding(f"of these on the GPU: {self._by_rows(milliseconds)}")

    def of_chains(self) -> Finding:
        """A chain in one program that runs all steps, and one that ends at once."""
        check, row = self._check, self._session.layers.text_rows(self._first_slot, 1, 1)

        def draft(threshold: float | None) -> None:
            chain = ChainSpec(CHAIN_STEPS, frozenset(), threshold)
            check.kernels.draft([check.tokens[:1]], [row], [chain])

        milliseconds = self.by_case(draft, {"all steps": None, "ended by the first": 2.0})
        between = milliseconds["all steps"] - milliseconds["ended by the first"]
        return Finding(
            f"ms a chain of {CHAIN_STEPS}: {listed_ms(milliseconds)};"
            f" {between / (CHAIN_STEPS - 1):.3f} more for each step"
        )

    def of_trees(self) -> Finding:
        """A tree in one program, and by the loop."""
        milliseconds = self.by_case(
            lambda grow: grow(self._session, self._check.tokens[:1], TREE),
            {
                "in one program": CachedSession.draft,
                "by one forward after another": self._check.grown_by_loop,
            },
        )
        return Finding(
            f"ms a tree of {TREE.depth} levels of {TREE.width}: {listed_ms(milliseconds)}"
        )

    def of_exits(self) -> Finding:
        """A row that leaves early in one program, and by the loop."""
        milliseconds = self.by_case(
            lambda in_one: self._check.leave(self._session, in_one),
            {"in one program": True, "layer by layer": False},
        )
        return Finding(f"ms a row that leaves early: {listed_ms(milliseconds)}")

    def of_pytorch(self) -> Finding:
        """A forward of one row by PyTorch."""
        check = self._check
        plain = check.session(kernels=False)
        plain.extend(check.tokens[: self._length])
        length = plain.length

        def forward() -> None:
            plain.rollback(length)
            plain.extend(check.tokens[:1])

        return Finding(
            f"ms a forward by PyTorch, kernel by kernel: {self.milliseconds(forward):.3f}"
        )

    @property
    def _first_slot(self) -> int:
        return self._session.layers.reserved + self._length

    def by_case(self, work: Callable[[Any], Any], cases: dict[str, Any]) -> dict[str, float]:
        """Milliseconds of some work after the text, by the names of what it is done with."""

        def after_text(case: Any) -> None:
            self._session.rollback(self._length)
            work(case)

        return {name: self.milliseconds(partial(after_text, case)) for name, case in cases.items()}

    def _by_rows(self, milliseconds: dict[int, float]) -> str:
        """Times by the number of rows, and how near one row is to reading all weights once."""
        listed = listed_ms({f"{rows} rows": ms for rows, ms in milliseconds.items()})
        floor_ms = self._check.kernels.weight_bytes / self._gb_per_s / 1e6
        share = 100 * floor_ms / milliseconds[1]
        return (
            f"{listed}; floor {floor_ms:.3f} at {self._gb_per_s:,.0f} GB/s, {share:.0f} % of it with"
            " one row"
        )

    def milliseconds(self, work: Callable[[], Any]) -> float:
        return median_ms(self._check, work)


def replay_ms(check: KernelCheck, session: CachedSession, length: int, rows: int = 1) -> float:
    """Milliseconds of one forward's graph after so many of a session's slots, without the host."""
    text = session.layers.text_rows(session.layers.reserved + length, rows, rows)
    check.kernels.run(torch.tensor(check.tokens[:rows], device=check.device), [text])

    def replay() -> None:
        for _ in range(REPLAYS):
            check.kernels.graphs.rerun_last()

    return median_ms(check, replay) / REPLAYS


def median_ms(check: KernelCheck, work: Callable[[], Any]) -> float:
    """The median of some runs, after as many that are not counted."""
    for _ in range(3):
        work()
    return 1000 * median_s(work, partial(wait_for, check.device), 21)


def listed_ms(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3f}" for name, ms in milliseconds.items())


def check_model(name: str, device: torch.device, gb_per_s: float) -> Iterator[Finding]:
    """All findings of one model in bfloat16."""
    check = KernelCheck.of(name, device)
    yield from check.findings()
    yield from KernelTimes(check, gb_per_s).findings()
