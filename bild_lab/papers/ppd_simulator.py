"""Simulates predictive pipelined decoding in layer-time units (Yang et al., 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bild_lab.engine.ppd.theory import require_exit
from bild_lab.errors import require_whole

MAIN = 0  # the process that finishes every token; the candidates' are 1 to k


class Busy(NamedTuple):
    """A process runs layers for a token: from `start` to `end` on the clock, one layer per unit.

    token: its index in the text, from 0; for a candidate, the index of the token that it would follow.
    """

    process: int
    token: int
    start: int
    end: int


@dataclass(frozen=True)
class Simulated:
    """One text: when which process was busy."""

    busy: tuple[Busy, ...]

    @property
    def latency(self) -> int:
        """Units until the last token is finished."""
        return max(each.end for each in self.busy if each.process == MAIN)

    @property
    def compute(self) -> int:
        """Units of all processes together."""
        return sum(each.end - each.start for each in self.busy)


def simulate(matches: Sequence[bool], layers: int, exit_layer: int, top_k: int) -> Simulated:
    """Simulate a text with one token more than `matches` has values.

    matches: for each token but the last, whether one of the candidates predicted from it was its
    successor; drawn (`draw_matches`) or from data. Raises UserError for values out of range.
    """
    require_exit(layers, exit_layer)
    require_whole("top_k", top_k, 1)
    ahead = layers - exit_layer  # layers that a candidate runs while the current token finishes
    clock, done = 0, 0  # done: layers of the current token that its candidate process has run
    busy: list[Busy] = []
    for token, matched in enumerate([*matches, False]):
        exit_time = clock + exit_layer - done
        end = exit_time + ahead
        busy.append(Busy(MAIN, token, clock, end))
        busy += [Busy(process, token, exit_time, end) for process in range(1, top_k + 1)]
        clock, done = end, ahead if matched else 0
    return Simulated(tuple(busy))


def draw_matches(tokens: int, match_rate: float, generator: np.random.Generator) -> list[bool]:
    """Draw independent matches for a text of `tokens` tokens, as the theorem assumes."""
    return (generator.random(tokens - 1) < match_rate).tolist()
