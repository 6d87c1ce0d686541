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


def by_window(rounds: Sequence[DraftedRound], largest: int, per_call_s: float, costs: Costs) -> list[Windowed]:
    """What these rounds would have given with each window from 0 (the target alone) to `largest`.

    A smaller window cuts a draft, and what was accepted of it, at its end; nothing else changes. This also holds for
    drafts that end early by low confidence.
    """
    drafted, accepted, calls = (
        np.array([getattr(one, name) for one in rounds]) for name in ("drafted", "accepted", "calls")
    )
    found = [Windowed(0, 1.0, costs.plain_s)]
    for window in range(1, largest + 1):
        rows = np.minimum(drafted, window) + 1
        host = costs.host_s[0] + costs.host_s[1] * rows
        seconds = np.minimum(calls, window) * per_call_s + interpolated(costs.forward_s, rows) + host
        found.append(Windowed(window, float(1 + np.minimum(accepted, window).mean()), float(seconds.mean())))
    return found
