"""What a round costs on this machine, by the rows that the target runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Tree
from bild_lab.engine.request import Request
from bild_lab.engine.session import Rows
from bild_lab.lab.measure.timing import no_garbage_collection
from bild_lab.lab.shapes.acceptance import WatchedRound

TILE = 16  # rows that matrix units take at once: where a cost may step
TURNS = 2  # forwards of each number of rows, behind each text


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round.

    forward_s: of the target, by rows. drafter_s: of the drafter, by the depth of the tree. host_s: of everything else,
    such as the acceptance rule and the cache: of every round, and for each row. plain_s: of the target alone.
    """

    forward_s: Mapping[int, float]
    drafter_s: Mapping[int, float]
    host_s: tuple[float, float]
    plain_s: float

    def round_s(self, most_rows: int, depth: int) -> Float[np.ndarray, " rows"]:
        """Seconds of a round of 1, 2, … rows. One row is the target alone."""
        rows = np.arange(1, most_rows + 1)
        seconds = interpolated(self.forward_s, rows) + self.drafter_s[depth] + self.host_s[0] + self.host_s[1] * rows
        seconds[0] = self.plain_s
        return seconds

    def to_content(self) -> dict[str, Any]:
        """For a file, in milliseconds."""
        return {
            "forward_ms": {str(rows): _ms(seconds) for rows, seconds in self.forward_s.items()},
            "drafter_ms": {str(depth): _ms(seconds) for depth, seconds in self.drafter_s.items()},
            "host_ms": _ms(self.host_s[0]),
            "host_ms_per_row": _ms(self.host_s[1]),
            "plain_ms": _ms(self.plain_s),
        }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 5)


def typical(times: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only ever makes a time longer."""
    return float(np.quantile(times, 0.25))


def interpolated(measured: Mapping[int, float], rows: np.ndarray) -> Float[np.ndarray, " rows"]:
    """Between measured numbers of rows a line, beyond them the nearest one."""
    counts = sorted(measured)
    return np.interp(rows, counts, [measured[count] for count in counts])


def measured_rows(most: int) -> list[int]:
    """Powers of two, and both sides of every place where a processor's tiles may make the cost step."""
    powers = {2**power for power in range(most.bit_length())}
    steps = {edge + side for edge in range(TILE, most + 1, TILE) for side in (0, 1)}
    return sorted(rows for rows in powers | steps | {3, 6, 12, 24, most} if rows <= most)


@torch.inference_mode()
def forward_times(
    method: DraftThenVerify,
    request: Request,
    text: Sequence[int],
    counts: Iterable[int],
    synchronize: Callable[[], None],
) -> dict[int, list[float]]:
    """Seconds of the target's forwards of so many rows behind this text, by turns.

    All rows but the first are children of the first, which costs what any other tree of them costs.
    """
    session = method.target.start(request.source, len(text) + 64)
    session.extend(list(text[len(request.source.prompt) - 1 :]))
    base, want = session.length, method.drafter.wants
    trees = {count: Tree(torch.tensor([-1, *[0] * (count - 1)], device=method.target.device)) for count in counts}
    times: dict[int, list[float]] = defaultdict(list)
    token = torch.tensor([text[-1]], device=method.target.device)
    with no_garbage_collection():
        for turn in range(TURNS + 1):
            for count, tree in trees.items():
                rows = Rows(token.repeat(count), tree if count > 1 else None)
                synchronize()
                started = time.perf_counter()
                session.extend(rows, want)
                synchronize()
                if turn:  # the first warms up
                    times[count].append(time.perf_counter() - started)
                session.rollback(base)
    return times


@dataclass(frozen=True)
class TimedRound:
    """Seconds of a whole round and of its drafter, and how many rows the target ran."""

    rows: int
    whole_s: float
    drafter_s: float


def timed_rounds(rounds: Sequence[WatchedRound]) -> list[TimedRound]:
    """The rounds of a text. Each lasts until the next one begins.

    The first, with which the prompt may run, is left out, and so is the last.
    """
    pairs = pairwise(rounds[1:])
    return [TimedRound(one.rows, following.started - one.started, one.drafter_s) for one, following in pairs]


def host_line(rounds: Iterable[TimedRound], forward_s: Mapping[int, float]) -> tuple[float, float]:
    """What is left of rounds without forward and drafter, as a line over rows: of every round, and for each row."""
    rest: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        rest[one.rows].append(one.whole_s - one.drafter_s)
    rows = np.array(sorted(rest))
    times = np.array([typical(rest[count]) for count in rows]) - interpolated(forward_s, rows)
    weights = np.array([len(rest[count]) for count in rows], dtype=float)
    slope, base = np.polyfit(rows, times, 1, w=np.sqrt(weights)) if len(rows) > 1 else (0.0, times[0])
    return (float(base), float(slope)) if slope > 0 else (float(np.average(times, weights=weights)), 0.0)
