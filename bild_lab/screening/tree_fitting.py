"""The tree of candidates with the most expected tokens per second on this machine (Sequoia, Chen et
al., 2024, §3).

A candidate's chance of being accepted depends on its depth and rank alone, given that its parent is
accepted. A tree's expected tokens are then the sum over its nodes of the chance that the accepted
path reaches them, which never grows along a path. So the n nodes with the largest chances are the
best tree of n nodes: what Sequoia's dynamic program finds. Of all sizes and depths the fastest
counts, by the measured seconds of a round.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT
from bild_lab.engine.methods.candidate_trees import (
    CandidateNode,
    ProbedTree,
    efficient_tree,
    trees_to_content,
)
from bild_lab.engine.methods.candidates import CandidateDrafter
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Round, Trace
from bild_lab.errors import UserError
from bild_lab.lab.point.decoder import Decoder
from bild_lab.lab.point.environment import no_garbage_collection
from bild_lab.lab.schema.formatting import percent

# rounds to learn acceptance from; candidates of each depth; the most rows of a forward
ROUNDS, WIDEST, MOST_ROWS = 1500, 10, 64
TIMED_TEXTS, TIMED_ROUNDS = 4, 16
# timed rows, up to MOST_ROWS: both sides of where a processor's tiles may make steps
SIZES = (2, 4, 8, 16, 17, 32, 33, 48, 49, 64)

Acceptance = Float[np.ndarray, "depth rank"]
# for each depth of a tree, 0 for the target alone: seconds of a round by its rows
Costs = Sequence[Mapping[int, float]]


def best_nodes(acceptance: Acceptance, max_nodes: int) -> Iterator[tuple[CandidateNode, float]]:
    """Nodes with their chances of being accepted: the first n are the best tree of n nodes, for
    every n up to `max_nodes`.

    acceptance: the chance of the candidate of each depth and rank, given that its parent is
    accepted.
    """
    first_chances = acceptance[0] if len(acceptance) else ()
    waiting = [(-chance, 0, rank, ROOT) for rank, chance in enumerate(first_chances)]
    heapq.heapify(waiting)
    for place in range(max_nodes):
        if not waiting:
            return
        negative, depth, rank, parent = heapq.heappop(waiting)
        yield CandidateNode(depth, rank, parent), float(-negative)
        chances_below = acceptance[depth + 1] if depth + 1 < len(acceptance) else ()
        for child_rank, chance in enumerate(chances_below):
            heapq.heappush(waiting, (negative * chance, depth + 1, child_rank, place))


def best_tree(acceptance: Acceptance, nodes: int, masks: int) -> ProbedTree:
    """The best tree of so many nodes, or of as many as there can be. masks: below the root and
    below each node.
    """
    chosen_nodes = tuple(node for node, _ in best_nodes(acceptance, nodes))
    return ProbedTree(chosen_nodes, (masks,) * (1 + len(chosen_nodes)))


@dataclass(frozen=True)
class Choice:
    """What is expected of the rounds of the best tree of this depth and size. masks: below every
    row.
    """

    depth: int
    nodes: int
    masks: int
    tokens: float
    seconds: float

    @property
    def rows(self) -> int:
        return (1 + self.nodes) * (1 + self.masks)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def choices(acceptance: Acceptance, costs: Costs, most_rows: int, masked: bool) -> list[Choice]:
    """The target alone, and the best tree of every depth and size of at most so many rows.

    costs: between measured numbers of rows they are a line. masked: candidates come from masks in
    the round before (BiTA): as many below every row as the tree is deep, so that the next round has
    as many candidates wherever the accepted path ends.
    """
    tree_choices = [Choice(0, 0, 0, 1.0, costs[0][1])]
    for depth in range(1, len(acceptance) + 1):
        masks, tokens = depth if masked else 0, 1.0
        measured = sorted(costs[depth].items())
        for nodes, (_, chance) in enumerate(
            best_nodes(acceptance[:depth], most_rows // (1 + masks) - 1), 1
        ):
            tokens += chance
            seconds = np.interp((1 + nodes) * (1 + masks), *zip(*measured, strict=True))
            tree_choices.append(Choice(depth, nodes, masks, tokens, float(seconds)))
    return tree_choices


@dataclass(frozen=True)
class DraftedText:
    """A text that a drafter of `collecting_drafter` drafted. start: tokens of the prompt."""

    tokens: Sequence[int]
    start: int
    rounds: Sequence[Round]


def fit_tree(
    decoder: Decoder, requests: Sequence[Request], facts: dict[str, Any]
) -> dict[str, Any]:
    """The content of a tree's file: the tree with the most tokens per second, and what is expected
    of it.

    facts: also for the file, such as the machine and the texts.
    """
    method, drafter = decoder.method, decoder.method.drafter
    widest, deepest = min(WIDEST, drafter.vocabulary_size), drafter.max_depth
    collector = replace(method, drafter=collecting_drafter(drafter, widest))
    texts: list[DraftedText] = []
    rounds = 0
    for request in requests:
        trace = Trace()
        tokens = collector.decode(request, trace)
        texts.append(DraftedText(tokens, request.limits.prompt_length, trace.rounds))
        rounds += len(trace.rounds)
        if rounds >= ROUNDS:
            break
    acceptance = acceptance_of(texts, deepest, widest, drafter.markov is not None)
    timed = requests[: min(len(texts), TIMED_TEXTS)]
    costs = measured_costs(method, timed, acceptance, decoder.synchronize)
    best = max(
        choices(acceptance, costs, MOST_ROWS, bool(drafter.max_probes)),
        key=lambda choice: choice.tokens_per_s,
    )
    expected = {
        "rows": best.rows,
        "tokens": best.tokens,
        "ms": 1000 * best.seconds,
        "alone_ms": 1000 * costs[0][1],
    }
    trees = [
        best_tree(acceptance[:depth], best.nodes, best.masks) for depth in range(best.depth + 1)
    ]
    return {
        "trees": trees_to_content(trees),
        "acceptance": np.round(acceptance, 5).tolist(),
        "chosen": expected,
        **facts,
        "texts": {**facts.get("texts", {}), "examples": len(texts), "rounds": rounds},
    }


def describe_tree(content: Mapping[str, Any]) -> str:
    """What was chosen, in one line; and if that is to draft nothing, why."""
    rows, tokens, ms, alone_ms = (
        content["chosen"][key] for key in ("rows", "tokens", "ms", "alone_ms")
    )
    fast = f"{1000 * tokens / ms:.0f} tokens/s, {tokens * alone_ms / ms:.2f} times the target alone"
    words = f"{tokens:.2f} tokens in a round of {rows} rows and {ms:.2f} ms: {fast}"
    if rows > 1:
        return words
    first_choice = percent(content["acceptance"][0][0])
    return (
        f"{words}. No draft pays, so with this tree nothing is drafted: a first token is right in"
        f" {first_choice} of the rounds. If you expect more, do dataset and template ask the target"
        " as it was trained?"
    )


def collecting_drafter(drafter: CandidateDrafter, widest: int) -> CandidateDrafter:
    """The drafter with trees that show all its candidates: those of each depth below the most
    likely one above.
    """
    max_depth, trees = drafter.max_depth, []
    for depth in range(max_depth + 1):
        nodes = tuple(efficient_tree([widest] * depth))
        # the others' children are not drafted
        masks = [drafter.max_probes if node.rank == 0 else 0 for node in nodes]
        trees.append(ProbedTree(nodes, (drafter.max_probes, *masks)))
    return drafter.drafting(trees, widest)


def acceptance_of(
    texts: Sequence[DraftedText], depth: int, widest: int, by_parent: bool = False
) -> Acceptance:
    """The share of rounds in which the text's token has each rank, of those in which all tokens
    before it had one.

    After an end token every candidate is a miss; behind the length limit nothing is drafted. A
    depth that was never reached counts as never accepted. by_parent: candidates depend on their
    parent, and only those below the most likely one were drafted.
    """
    hits, seen = np.zeros((depth, widest)), np.zeros(depth)
    for text in texts:
        length = text.start
        for decoding_round in text.rounds:
            for level in range(len(decoding_round.drafted) // widest):
                next_tokens = text.tokens[length + level :]
                candidates = decoding_round.drafted[level * widest : (level + 1) * widest]
                seen[level] += 1
                if not next_tokens or next_tokens[0] not in candidates:
                    break
                hits[level, candidates.index(next_tokens[0])] += 1
                if by_parent and next_tokens[0] != candidates[0]:
                    break
            length += decoding_round.accepted + 1  # the target's own; an ended text has no further
    return hits / np.maximum(seen, 1)[:, None]


def measured_costs(
    method: DraftThenVerify,
    requests: Sequence[Request],
    acceptance: Acceptance,
    synchronize: Callable[[], None],
) -> Costs:
    """Time the first rounds of the best trees of each depth and of several sizes, in turn, text by
    text.

    A round's first token may wait for the prompt, so a text's first round does not count. Of the
    others the lower quartile does: other work on the machine only makes a round longer. Raises
    UserError for texts that are too short.
    """
    trees = []
    for depth in range(len(acceptance) + 1):
        masks = min(method.drafter.max_probes, depth)
        sizes = {0}
        if depth:
            sizes = {max(1, rows // (1 + masks) - 1) for rows in SIZES}
        trees += [(depth, best_tree(acceptance[:depth], nodes, masks)) for nodes in sorted(sizes)]
    times: dict[tuple[int, ProbedTree], list[float]] = {key: [] for key in trees}
    for request in requests:
        for depth, tree in trees:
            times[depth, tree] += round_times(method, request, depth, tree, synchronize)
    if not all(times.values()):
        raise UserError(
            "rounds are timed within texts, and none of these has enough; raise"
            " decoding.max_new_tokens"
        )
    costs: list[dict[int, float]] = [{} for _ in range(len(acceptance) + 1)]
    for (depth, tree), seconds in times.items():
        costs[depth][tree.rows] = float(np.quantile(seconds, 0.25))
    return costs


def round_times(
    method: DraftThenVerify,
    request: Request,
    depth: int,
    tree: ProbedTree,
    synchronize: Callable[[], None],
) -> list[float]:
    """Seconds of the first rounds of a text, without the first and those that drafted less than the
    tree.
    """
    # where a round has fewer candidates, as in a text's first round, it drafts nothing
    shallow_trees = [ProbedTree((), tree.probes[:1])] * depth
    timed_method = replace(method, drafter=method.drafter.drafting([*shallow_trees, tree]))
    trace, stamps = Trace(), []
    with no_garbage_collection():
        for _ in islice(timed_method.stream(request, trace), 1 + TIMED_ROUNDS):
            synchronize()
            stamps.append(time.perf_counter())
    timed_rounds = zip(np.diff(stamps), trace.rounds[1:], strict=True)
    return [
        float(seconds)
        for seconds, decoding_round in timed_rounds
        if len(decoding_round.drafted) == len(tree.nodes)
    ]
