"""How often each candidate is the target's token, by depth and rank, from decoded texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters.trees import ProbedTree
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.engine.session import Scores, Session
from bild_lab.engine.trace import Trace

MISSED, UNKNOWN = -1, -2  # instead of a rank: no candidate was right; the length limit cut the text before


@dataclass
class WatchedRound:
    """A round that a `WatchedDrafter` saw. length: tokens before it. candidates: [depth, widest] at its start."""

    length: int
    candidates: list[list[int]]
    started: float
    drafter_s: float = 0.0
    rows: int = 0


@dataclass
class WatchedDrafter(Drafter):
    """A drafter, and when each of its rounds began, what it knew, and how long it took.

    synchronize: waits for the device.
    """

    inner: Drafter
    synchronize: Callable[[], None]
    rounds: list[WatchedRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafts_trees, self.wants, self.gives = self.inner.drafts_trees, self.inner.wants, self.inner.gives

    def start(self, request: Request, target: Session) -> None:
        self.rounds = []
        self.inner.start(request, target)

    def propose(self, tokens: list[int]) -> Draft:
        known = getattr(self.inner, "candidates", None)
        candidates = [] if known is None else known.tolist()
        self.synchronize()
        self.rounds.append(WatchedRound(len(tokens), candidates, time.perf_counter()))
        draft = self.inner.propose(tokens)
        self._count(self.rounds[-1].started)
        self.rounds[-1].rows = 1 + len(draft) + (0 if draft.probes is None else len(draft.probes))
        return draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self.synchronize()
        started = time.perf_counter()
        self.inner.observe(draft, scores, verdict)
        self._count(started)

    def _count(self, started: float) -> None:
        self.synchronize()
        self.rounds[-1].drafter_s += time.perf_counter() - started


def silent(depth: int, probes: int) -> list[ProbedTree]:
    """Trees that draft nothing, so that a drafter tells its candidates behind every token of a text."""
    return [ProbedTree((), (min(depth, probes),))] * (depth + 1)


def watch(
    method: DraftThenVerify, drafter: Drafter, request: Request, synchronize: Callable[[], None]
) -> tuple[list[int], list[WatchedRound], Trace]:
    """Decode with this drafter in the method; returns all tokens, the rounds as watched, and the trace."""
    watched, trace = WatchedDrafter(drafter, synchronize), Trace()
    tokens = replace(method, drafter=watched).decode(request, trace)
    return tokens, watched.rounds, trace


def ranks_of(
    tokens: Sequence[int], rounds: Sequence[WatchedRound], depth: int, ended: bool
) -> Int[np.ndarray, "rounds depth"]:
    """For each round that had candidates the rank of the target's token among those of each depth.

    tokens: of the whole text. ended: it has its end token, behind which every candidate is a miss; else it was cut.
    """
    table = []
    for one in rounds:
        if not one.candidates:
            continue
        row = [MISSED if ended else UNKNOWN] * depth
        for level, candidates in enumerate(one.candidates[:depth]):
            if (at := one.length + level) < len(tokens):
                row[level] = candidates.index(tokens[at]) if tokens[at] in candidates else MISSED
        row[len(one.candidates) :] = [UNKNOWN] * (depth - len(one.candidates))
        table.append(row)
    return np.array(table, dtype=np.int64).reshape(-1, depth)


def acceptance_of(ranks: Int[np.ndarray, "rounds depth"], widest: int) -> Float[np.ndarray, "depth widest"]:
    """The share of rounds in which the target's token has each rank, among those whose earlier ones all had a rank.

    A depth that was never reached counts as never accepted.
    """
    shares = np.zeros((ranks.shape[1], widest))
    for depth in range(ranks.shape[1]):
        known = (ranks[:, :depth] >= 0).all(-1) & (ranks[:, depth] != UNKNOWN)
        if known.any():
            here = ranks[known, depth]
            shares[depth] = np.bincount(here[here >= 0], minlength=widest) / len(here)
    return shares
