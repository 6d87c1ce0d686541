"""Fits a drafter's tree or window to this machine: decodes texts, times rounds, takes the best, and tells everything."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import ModelDrafter, NoDraft
from bild_lab.engine.drafters.candidates import CandidateDrafter
from bild_lab.engine.drafters.tree_file import to_content
from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.load import Decoder
from bild_lab.lab.shapes.acceptance import WatchedRound, acceptance_of, collecting, ranks_of, watch
from bild_lab.lab.shapes.costs import Costs, forward_costs, host_line, measured_rows, round_times
from bild_lab.lab.shapes.optimum import Fit, best_by_rows, best_trees
from bild_lab.lab.shapes.window import DraftedRound, Windowed, by_window

TIMED_TEXTS = 8  # decoded for each time that is measured by whole rounds
TIMED_BUDGETS = (6, 16, 32, 64)  # rows of the trees whose rounds are timed


@dataclass(frozen=True)
class Effort:
    """How much to measure. positions: of texts, at most. widest: candidates at each depth. rows: of a round, at most."""

    positions: int = 3000
    widest: int = 10
    rows: int = 64
    window: int = 16


@dataclass(frozen=True)
class Budget:
    """What is expected of rounds of so many rows."""

    rows: int
    tokens: float
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.ms


@dataclass(frozen=True)
class Fitted:
    """A fitted tree or window, and the figures that it was chosen by.

    content: of its file. budgets: by rows. chosen: of the mean round of what was fitted.
    """

    content: dict[str, Any]
    budgets: list[Budget]
    chosen: Budget

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.content, indent=1).encode())


def method_to_fit(decoder: Decoder) -> DraftThenVerify:
    """The decoder's method. Raises UserError if its drafter has no shape to fit."""
    method = decoder.method
    if isinstance(method, DraftThenVerify) and isinstance(method.drafter, CandidateDrafter | ModelDrafter):
        return method
    raise UserError(
        "only trees of candidates (medusa, bita) and windows of draft models (speculative, bild) can be fitted, "
        f"got {type(getattr(method, 'drafter', method)).__name__}; choose one of these policies"
    )


def fit_tree(decoder: Decoder, requests: Sequence[Request], effort: Effort, facts: dict[str, Any]) -> Fitted:
    """The tree with the most tokens per second. facts: for the file, such as the machine and the texts."""
    method, synchronize = method_to_fit(decoder), decoder.synchronize
    drafter: CandidateDrafter = method.drafter
    widest = min(effort.widest, decoder.target.checkpoint.vocabulary)
    collector = collecting(drafter, widest)
    tables, emitted, texts, watched = [], [], [], []
    for request in requests:
        tokens, rounds, _ = watch(method, collector, request, synchronize)
        ended = tokens[-1] in request.limits.end_tokens
        tables.append(ranks_of(tokens, rounds, drafter.most_depth, ended))
        emitted.append(len(tokens) - request.limits.prompt_length)
        texts.append(tokens)
        watched.append(rounds)
        if sum(emitted) >= effort.positions:
            break
    ranks = np.concatenate(tables)
    acceptance = acceptance_of(ranks, widest)
    start = 1 / max(2.0, statistics.mean(emitted))
    flat = np.ones(effort.rows)
    some = list(requests[: min(TIMED_TEXTS, len(texts))])
    timed = [watched[: len(some)]]
    for rows in (rows for rows in TIMED_BUDGETS if rows <= effort.rows):
        trees = best_trees(
            acceptance, np.where(np.arange(1, effort.rows + 1) <= rows, flat, np.inf), drafter.most_probes, start
        )
        tried = drafter.drafting(trees.trees)
        timed.append([watch(method, tried, request, synchronize)[1] for request in some])
    costs = measured_costs(decoder, method, some, texts[0], effort.rows, timed)
    seconds = costs.round_s(effort.rows)
    fit = best_trees(acceptance, seconds, drafter.most_probes, start)
    budgets = [
        _budget(one, rows) for rows, one in enumerate(best_by_rows(acceptance, seconds, drafter.most_probes, start), 1)
    ]
    chosen = _budget(fit, round(fit.rows))
    content = {
        "trees": to_content(fit.trees),
        "acceptance": np.round(acceptance, 5).tolist(),
        **_told(chosen, budgets, costs),
        **facts,
        "texts": {**facts["texts"], "examples": len(texts), "positions": len(ranks)},
    }
    return Fitted(content, budgets, chosen)


def fit_window(
    decoder: Decoder,
    requests: Sequence[Request],
    effort: Effort,
    facts: dict[str, Any],
    rounds: Sequence[DraftedRound] = (),
) -> Fitted:
    """The window with the most tokens per second. The decoder's own must be as large as any to be tried.

    rounds: of a finished sweep; empty: of these requests.
    """
    method, synchronize = method_to_fit(decoder), decoder.synchronize
    texts, watched, traced = [], [], []
    for request in requests:
        tokens, several, trace = watch(method, method.drafter, request, synchronize)
        texts.append(tokens)
        watched.append(several)
        traced += [DraftedRound(len(one.drafted), one.accepted, one.draft_calls) for one in trace.rounds]
        if len(traced) >= effort.positions or (rounds and len(texts) == TIMED_TEXTS):
            break
    rounds = rounds or traced
    some = list(requests[: min(TIMED_TEXTS, len(texts))])
    costs = measured_costs(decoder, method, some, texts[0], effort.window + 1, [watched])
    calls = sum(one.calls for one in traced)
    per_call_s = sum(one.drafter_s for several in watched for one in several) / max(1, calls)
    costs = replace(costs, drafter_s=0.0)
    windows = by_window(rounds, effort.window, per_call_s, costs)
    best = max(windows, key=lambda one: one.tokens / one.seconds)
    budgets = [_budget(one, one.window + 1) for one in windows]
    content = {
        "window": best.window,
        "acceptance": [[round(rate, 5)] for rate in acceptance_by_position(rounds, effort.window)],
        **_told(budgets[best.window], budgets, costs),
        "draft_ms_per_token": round(1000 * per_call_s, 5),
        **facts,
        "texts": {**facts["texts"], "examples": len(texts), "positions": len(rounds)},
    }
    return Fitted(content, budgets, budgets[best.window])


def acceptance_by_position(rounds: Iterable[DraftedRound], window: int) -> list[float]:
    """The share of drafts accepted at each position, among those that reached it."""
    rounds = list(rounds)
    shares = []
    for position in range(window):
        judged = [one.accepted > position for one in rounds if one.drafted > position and one.accepted >= position]
        shares.append(sum(judged) / len(judged) if judged else 0.0)
    return shares


def measured_costs(
    decoder: Decoder,
    method: DraftThenVerify,
    requests: Sequence[Request],
    text: Sequence[int],
    most_rows: int,
    timed: Iterable[Sequence[Sequence[WatchedRound]]],
) -> Costs:
    """The costs of rounds on this machine. text: in whose middle forwards are timed. timed: watched rounds of texts."""
    synchronize = decoder.synchronize
    prompt = requests[0].limits.prompt_length
    middle = text[: prompt + max(1, (len(text) - prompt) // 2)]
    forward_s = forward_costs(method, requests[0], middle, measured_rows(most_rows), synchronize)
    alone = replace(method, target=decoder.target)
    plain, _ = round_times(watch(alone, NoDraft(decoder.target), request, synchronize)[1] for request in requests)
    whole, drafter = round_times(rounds for several in timed for rounds in several)
    drafter_s = statistics.median(drafter or [0.0])
    if 1 not in plain or not whole:
        raise UserError("the texts are too short to time rounds: none has three; give longer ones")
    return Costs(forward_s, drafter_s, host_line(whole, forward_s, drafter_s), statistics.median(plain[1]))


def _budget(fit: Fit | Windowed, rows: int) -> Budget:
    return Budget(rows, fit.tokens, 1000 * fit.seconds)


def _told(chosen: Budget, budgets: Sequence[Budget], costs: Costs) -> dict[str, Any]:
    """The part of a file that trees and windows share."""

    def row(one: Budget) -> dict[str, float]:
        return {"rows": one.rows, "tokens": round(one.tokens, 5), "ms": round(one.ms, 5)}

    return {"chosen": row(chosen), "budgets": [row(one) for one in budgets], "costs": costs.to_content()}
