"""Fits a drafter's tree or window to this machine: decodes texts, times rounds, and takes what is best by both."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import ModelDrafter, NoDraft
from bild_lab.engine.drafters.candidates import CandidateDrafter
from bild_lab.engine.drafters.tree_file import to_content
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.decoding.decoder import Decoder
from bild_lab.lab.shapes.acceptance import acceptance_of, ranks_of, silent, watch
from bild_lab.lab.shapes.costs import Costs, TimedRound, forward_times, host_line, measured_rows, timed_rounds, typical
from bild_lab.lab.shapes.optimum import best_by_rows, best_trees
from bild_lab.lab.shapes.window import DraftedRound, by_position, by_window

TIMED_TEXTS = 12  # decoded for each time that is measured by whole rounds
TIMED_ROWS = (6, 16, 32, 64)  # of the trees whose rounds are timed
TYPICAL_WIDTH = 3  # candidates of each depth while the drafter is timed


@dataclass(frozen=True)
class Effort:
    """How much to measure and to try.

    positions: of texts. widest: candidates of each depth. rows: of a forward. window: of a draft model.
    """

    positions: int = 3000
    widest: int = 10
    rows: int = 64
    window: int = 16


@dataclass(frozen=True)
class Budget:
    """What is expected of a round: rows of the target's forward, tokens and milliseconds."""

    rows: float
    tokens: float
    ms: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.ms

    def to_content(self) -> dict[str, float]:
        return {"rows": round(self.rows, 3), "tokens": round(self.tokens, 5), "ms": round(self.ms, 5)}


@dataclass(frozen=True)
class Fitted:
    """A fitted tree or window: its file, what is expected of rounds of so many rows, and of what was chosen."""

    content: dict[str, Any]
    budgets: list[Budget]
    chosen: Budget

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.content).encode())


@dataclass(frozen=True)
class Seen:
    """What decoded texts tell. ranks: as `ranks_of` gives them. lengths: in new tokens. text: one of the texts."""

    ranks: Int[np.ndarray, "rounds depth"]
    lengths: list[int]
    text: list[int]


def method_to_fit(decoder: Decoder) -> DraftThenVerify:
    """The decoder's method. Raises UserError if its drafter has nothing to fit."""
    method = decoder.method
    if isinstance(method, DraftThenVerify) and isinstance(method.drafter, CandidateDrafter | ModelDrafter):
        return method
    raise UserError(
        "only trees of candidates (medusa, bita) and windows of draft models (speculative, bild) can be fitted, "
        f"got {type(getattr(method, 'drafter', method)).__name__}; choose one of these policies"
    )


def fit_tree(decoder: Decoder, requests: Sequence[Request], effort: Effort, facts: dict[str, Any]) -> Fitted:
    """The tree with the most tokens per second. facts: for its file, such as the machine and the texts."""
    method = method_to_fit(decoder)
    depths, probes = range(1, method.drafter.most_depth + 1), method.drafter.most_probes
    widest = min(effort.widest, decoder.target.checkpoint.config.vocab_size)
    seen = decoded(decoder, method, requests, effort.positions, widest)
    acceptance, start = acceptance_of(seen.ranks, widest), 1 / max(2.0, statistics.mean(seen.lengths))
    some = requests[: min(TIMED_TEXTS, len(seen.lengths))]
    drafters = {depth: method.drafter.drafting(silent(depth, probes), TYPICAL_WIDTH) for depth in depths}
    trees = [best_trees(acceptance, np.ones(min(rows, effort.rows)), probes, start).trees for rows in TIMED_ROWS]
    costs = measured_costs(
        decoder, method, some, seen.text, effort.rows, drafters, [method.drafter.drafting(one) for one in trees]
    )
    tables = [(acceptance[:depth], costs.round_s(effort.rows, depth), min(depth, probes)) for depth in depths]
    fit = max((best_trees(*table, start) for table in tables), key=lambda one: one.tokens_per_s)
    each = zip(*(best_by_rows(*table, start) for table in tables), strict=True)  # the depths of each number of rows
    best = [max(options, key=lambda one: one.tokens_per_s) for options in each]
    budgets = [Budget(rows, one.tokens, 1000 * one.seconds) for rows, one in enumerate(best, 1)]
    chosen = Budget(fit.rows, fit.tokens, 1000 * fit.seconds)
    tree = {"trees": to_content(fit.trees), "acceptance": np.round(acceptance, 5).tolist()}
    return fitted(tree, budgets, chosen, costs, facts, (len(seen.lengths), len(seen.ranks)))


def fit_window(
    decoder: Decoder,
    requests: Sequence[Request],
    effort: Effort,
    facts: dict[str, Any],
    rounds: Sequence[DraftedRound] = (),
) -> Fitted:
    """The window with the most tokens per second. The decoder's own must be the largest to be tried.

    rounds: of a finished sweep with a window as large; empty: of these requests.
    """
    method = method_to_fit(decoder)
    traced: list[DraftedRound] = []
    texts: list[list[int]] = []
    drafting_s = 0.0
    for request in requests:
        tokens, several, trace = watch(method, method.drafter, request, decoder.synchronize)
        texts.append(tokens)
        drafting_s += sum(one.drafter_s for one in several)
        traced += [DraftedRound(len(one.drafted), one.accepted, one.draft_calls) for one in trace.rounds]
        if len(traced) >= effort.positions or (rounds and len(texts) == TIMED_TEXTS):
            break
    some = requests[: min(TIMED_TEXTS, len(texts))]
    costs = measured_costs(decoder, method, some, max(texts, key=len), effort.window + 1, {}, [method.drafter])
    costs = replace(costs, drafter_s={1: drafting_s / max(1, sum(one.calls for one in traced))})
    windows = by_window(rounds or traced, effort.window, costs)
    best = max(windows, key=lambda one: one.tokens / one.seconds)
    budgets = [Budget(one.window + 1, one.tokens, 1000 * one.seconds) for one in windows]
    window = {"window": best.window, "acceptance": [[rate] for rate in by_position(rounds or traced, effort.window)]}
    return fitted(window, budgets, budgets[best.window], costs, facts, (len(texts), len(rounds or traced)))


def fitted(
    shape: dict[str, Any],
    budgets: list[Budget],
    chosen: Budget,
    costs: Costs,
    facts: dict[str, Any],
    counts: tuple[int, int],
) -> Fitted:
    """With the content of the file. counts: of texts, and of rounds in them."""
    content = {
        **shape,
        "chosen": chosen.to_content(),
        "budgets": [one.to_content() for one in budgets],
        "costs": costs.to_content(),
        **facts,
        "texts": {**facts.get("texts", {}), "examples": counts[0], "rounds": counts[1]},
    }
    return Fitted(content, budgets, chosen)


def decoded(
    decoder: Decoder, method: DraftThenVerify, requests: Sequence[Request], positions: int, widest: int
) -> Seen:
    """The target's own texts, with the rank of each token among the candidates that the drafter had for it."""
    drafter: CandidateDrafter = method.drafter
    collector = drafter.drafting(silent(drafter.most_depth, drafter.most_probes), widest)
    tables, lengths, longest = [], [], []
    for request in requests:
        tokens, rounds, _ = watch(method, collector, request, decoder.synchronize)
        tables.append(ranks_of(tokens, rounds, drafter.most_depth, tokens[-1] in request.limits.end_tokens))
        lengths.append(len(tokens) - request.limits.prompt_length)
        longest = max(longest, tokens, key=len)
        if sum(lengths) >= positions:
            break
    return Seen(np.concatenate(tables), lengths, longest)


def measured_costs(
    decoder: Decoder,
    method: DraftThenVerify,
    requests: Sequence[Request],
    text: Sequence[int],
    most_rows: int,
    by_depth: Mapping[int, Drafter],
    others: Sequence[Drafter],
) -> Costs:
    """The costs of rounds. Everything is timed in turn, text by text, so that a drift of the machine touches all alike.

    text: in whose middle forwards are timed. by_depth: drafters whose own time is wanted. others: more whose rounds
    tell what the host costs.
    """
    prompt = len(requests[0].source.prompt)
    middle = text[: prompt + max(1, (len(text) - prompt) // 2)]
    alone, nothing = replace(method, target=decoder.target), NoDraft(decoder.target)
    forwards: dict[int, list[float]] = defaultdict(list)
    plain: list[TimedRound] = []
    rounds: dict[int, list[TimedRound]] = defaultdict(list)
    drafters = {**by_depth, **{-1 - index: each for index, each in enumerate(others)}}
    for request in requests:
        counts = measured_rows(most_rows)
        for count, times in forward_times(method, requests[0], middle, counts, decoder.synchronize).items():
            forwards[count] += times
        plain += timed_rounds(watch(alone, nothing, request, decoder.synchronize)[1])
        for key, drafter in drafters.items():
            rounds[key] += timed_rounds(watch(method, drafter, request, decoder.synchronize)[1])
    if not plain or not all(rounds.values()):
        raise UserError("rounds are timed within texts, and none of these has three; raise decoding.max_new_tokens")
    forward_s = {count: typical(times) for count, times in forwards.items()}
    return Costs(
        forward_s=forward_s,
        drafter_s={depth: typical([one.drafter_s for one in rounds[depth]]) for depth in by_depth},
        host_s=host_line((one for several in rounds.values() for one in several), forward_s),
        plain_s=typical([one.whole_s for one in plain]),
    )
