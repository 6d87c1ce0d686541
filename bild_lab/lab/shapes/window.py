"""The draft window with the most expected tokens per second, from rounds that were drafted with a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bild_lab.lab.shapes.costs import Costs, interpolated


@dataclass(frozen=True)
class DraftedRound:
    """How many tokens a draft had, how many were accepted, and how many forwards the drafter ran."""

    drafted: int
    accepted: int
    calls: int


@dataclass(frozen=True)
class Windowed:
    """What is expected of a window: tokens and seconds of the mean round."""

    window: int
    tokens: float
    seconds: float


def by_window(rounds: Sequence[DraftedRound], largest: int, costs: Costs) -> list[Windowed]:
    """What these rounds would have given with each window from 0 (the target alone) to `largest`.

    A smaller window cuts a draft, and what was accepted of it, at its end; nothing else changes. This also holds for
    drafts that end early by low confidence. costs: `drafter_s` is that of a drafted token.
    """
    names = ("drafted", "accepted", "calls")
    drafted, accepted, calls = (np.array([getattr(one, name) for one in rounds]) for name in names)
    found = [Windowed(0, 1.0, costs.plain_s)]
    for window in range(1, largest + 1):
        rows = np.minimum(drafted, window) + 1
        host = costs.host_s[0] + costs.host_s[1] * rows
        seconds = np.minimum(calls, window) * costs.drafter_s[1] + interpolated(costs.forward_s, rows) + host
        found.append(Windowed(window, float(1 + np.minimum(accepted, window).mean()), float(seconds.mean())))
    return found


def by_position(rounds: Sequence[DraftedRound], window: int) -> list[float]:
    """The share of drafted tokens accepted at each position, among those whose draft was accepted so far."""
    shares = []
    for position in range(window):
        judged = [one.accepted > position for one in rounds if one.drafted > position and one.accepted >= position]
        shares.append(sum(judged) / len(judged) if judged else 0.0)
    return shares
