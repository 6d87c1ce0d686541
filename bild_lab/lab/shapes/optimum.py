"""The tree with the most expected tokens per second, from acceptance by depth and rank and the cost of a round by rows.

A candidate's chance of being the target's token depends on its depth and rank alone, given that those before it were
accepted (Sequoia, Chen et al., 2024, §3). A subtree's worth is then its root's chance of being reached times a number
that only depends on the depth, so a dynamic program over depths, ranks and rows finds the best tree exactly.

Where candidates come from probes (BiTA's masks), a round's tree also decides how many candidates the next round has:
those of the probes below the row where the accepted path ends. The number of candidates is the state of a Markov
decision process with rewards (tokens) and durations (seconds), which policy iteration solves exactly (Howard, 1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters.trees import Node, ProbedTree

MOST_ROUNDS = 50  # of policy iteration, which needs about five
TINY = 1e-10  # of a token: an improvement by less is rounding


@dataclass(frozen=True)
class Fit:
    """Trees, and what is expected of them in the long run.

    trees: by how many positions have candidates. tokens, rows, seconds: of the mean round.
    """

    trees: tuple[ProbedTree, ...]
    tokens: float
    rows: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def best_trees(
    acceptance: Float[np.ndarray, "depth rank"],
    seconds: Float[np.ndarray, " rows"],
    most_probes: int,
    start: float,
) -> Fit:
    """The trees with the most tokens per second.

    acceptance: the probability of each candidate, given that those before it on its path were accepted. seconds: of a
    round of 1, 2, … rows; inf for rows that are not allowed. most_probes: how many probes may follow a row, each a row
    itself, to give candidates for as many positions; 0: every round has candidates for all depths at no cost. start:
    the probability that a round is the first of a text, which has no candidates.
    """
    states = range(len(acceptance) + 1) if most_probes else [len(acceptance)]
    chosen = [ProbedTree((), (0,))] * (len(acceptance) + 1)
    for _ in range(MOST_ROUNDS):
        known = evaluate(chosen, acceptance, seconds, bool(most_probes), start)
        price = np.where(np.isfinite(seconds), known.rate * np.nan_to_num(seconds, posinf=0.0), np.inf)
        program = Program(acceptance, known.ahead * (1 - start), most_probes, len(seconds))
        improved = False
        for state in states:
            worth, tree = program.best(state, price)
            if worth > known.ahead[state] + TINY:  # of the tree chosen before
                chosen[state], improved = tree, True
        if not improved:
            break
    else:
        raise RuntimeError(f"the best tree was not found in {MOST_ROUNDS} rounds")
    if not most_probes:  # near the length limit fewer positions are of use
        chosen = [cut(chosen[-1], depth) for depth in range(len(acceptance) + 1)]
    return Fit(tuple(chosen), *known.means)


def best_by_rows(
    acceptance: Float[np.ndarray, "depth rank"], seconds: Float[np.ndarray, " rows"], most_probes: int, start: float
) -> list[Fit]:
    """For each number of rows the trees of at most so many with the most tokens; every round costs so many rows."""
    every = range(1, len(seconds) + 1)
    return [best_trees(acceptance, np.full(rows, seconds[rows - 1]), most_probes, start) for rows in every]


def cut(tree: ProbedTree, depth: int) -> ProbedTree:
    """The tree's nodes above this depth."""
    kept = [index for index, node in enumerate(tree.nodes) if node.depth < depth]
    place = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
    nodes = tuple(Node(one.depth, one.rank, place[one.parent]) for one in (tree.nodes[index] for index in kept))
    return ProbedTree(nodes, (tree.probes[0], *(tree.probes[index + 1] for index in kept)))


def reach(tree: ProbedTree, acceptance: Float[np.ndarray, "depth rank"]) -> Float[np.ndarray, " rows"]:
    """[n + 1], the probability that the accepted path comes to the last committed token (1) and to each node."""
    chances = [1.0]
    for node in tree.nodes:
        chances.append(chances[node.parent + 1] * acceptance[node.depth, node.rank])
    return np.array(chances)


@dataclass(frozen=True)
class Evaluation:
    """ahead: the worth of each state, in tokens beyond those of state 0. means: tokens, rows and seconds of a round."""

    ahead: Float[np.ndarray, " states"]
    means: tuple[float, float, float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.means[0] / self.means[2]


def evaluate(
    trees: Sequence[ProbedTree],
    acceptance: Float[np.ndarray, "depth rank"],
    seconds: Float[np.ndarray, " rows"],
    probed: bool,
    start: float,
) -> Evaluation:
    """What these trees give in the long run."""
    count = len(trees)
    moves, earned = np.zeros((count, count)), np.zeros((count, 3))
    for state, tree in enumerate(trees):
        chances = reach(tree, acceptance)
        ends = chances.copy()  # where the accepted path ends
        for node, chance in zip(tree.nodes, chances[1:], strict=True):
            ends[node.parent + 1] -= chance
        earned[state] = chances.sum(), tree.rows, seconds[tree.rows - 1]
        if probed:
            np.add.at(moves[state], list(tree.probes), (1 - start) * ends)
            moves[state, 0] += start
        else:
            moves[state, -1] = 1
    often = np.linalg.lstsq(np.vstack([moves.T - np.eye(count), np.ones(count)]), np.eye(count + 1)[-1])[0]
    tokens, rows, duration = often @ earned
    gain = earned[:, 0] - tokens / duration * earned[:, 2]
    if not probed:
        return Evaluation(np.zeros(count), (float(tokens), float(rows), float(duration)))
    ahead = np.linalg.lstsq(np.vstack([np.eye(count) - moves, np.eye(count)[0]]), np.append(gain, 0.0))[0]
    return Evaluation(ahead, (float(tokens), float(rows), float(duration)))


class Program:
    """The best trees of every exact number of rows, for given worths of the next round's candidates.

    With a deepest depth, `below[depth][probes]` is the most that the nodes below a row can add per probability of
    reaching that row, which has so many probes; index: rows of these nodes and their probes. A node adds its own token
    and the worth of its probes in place of its parent's.
    """

    def __init__(
        self,
        acceptance: Float[np.ndarray, "depth rank"],
        ahead: Float[np.ndarray, " states"],
        most_probes: int,
        most_rows: int,
    ) -> None:
        self._acceptance, self._ahead, self._rows = acceptance, ahead, most_rows
        self._probes = min(most_probes, most_rows - 1)
        self._solved: dict[int, tuple[list, list, list]] = {}

    def best(self, state: int, price: Float[np.ndarray, " rows"]) -> tuple[float, ProbedTree]:
        """The tree for candidates of `state` positions with the most tokens and worth, less the price of its rows."""
        below, _, _ = self._tables(state)
        options = []
        for probes in range(self._probes + 1):
            for rows in range(self._rows - probes):
                worth = 1 + self._ahead[probes] + below[0][probes][rows] - price[rows + probes]
                options.append((worth, -rows - probes, probes, rows))
        worth, _, probes, rows = max(options)
        nodes: list[Node] = []
        counts = [probes]
        self._collect(state, 0, probes, rows, ROOT, nodes, counts)
        return float(worth), ProbedTree(tuple(nodes), tuple(counts))

    def _tables(self, state: int) -> tuple[list, list, list]:
        """below: [depth + 1][probes, rows]; shares: of each rank's rows; own: the probes of a node of so many rows."""
        if state in self._solved:
            return self._solved[state]
        rows, probes = self._rows, self._probes
        nothing = np.full((probes + 1, rows + 1), -np.inf)
        nothing[:, 0] = 0
        below, shares, own = [nothing], [], []
        for depth in reversed(range(state)):
            single, choice = self._single(below[0])
            worth = single[None] - self._ahead[: probes + 1, None]  # [probes of the parent, rows]
            worth[:, 0] = 0
            best, taken = nothing, []
            for chance in self._acceptance[depth]:
                possible = np.isfinite(worth)
                best, share = joined(best, np.where(possible, chance * np.where(possible, worth, 0.0), -np.inf))
                taken.append(share)
            below, shares, own = [best, *below], [taken, *shares], [choice, *own]
        self._solved[state] = below, shares, own
        return self._solved[state]

    def _single(self, below: Float[np.ndarray, "probes rows"]) -> tuple[np.ndarray, np.ndarray]:
        """The most that a reached node gives with exactly so many rows below and including it, and its probes."""
        options = np.full((self._probes + 1, self._rows + 1), -np.inf)
        for probes in range(self._probes + 1):
            inner = below[probes, : self._rows - probes]
            options[probes, 1 + probes :] = 1 + self._ahead[probes] + inner
        return options.max(0), options.argmax(0)

    def _collect(
        self, state: int, depth: int, probes: int, rows: int, parent: int, nodes: list[Node], counts: list[int]
    ) -> None:
        """Add the nodes below a row, depth first."""
        if depth == state or not rows:
            return
        _, shares, own = self._tables(state)
        parts = []
        for rank in reversed(range(self._acceptance.shape[1])):
            part = int(shares[depth][rank][probes, rows])
            parts.append((rank, part))
            rows -= part
        for rank, part in reversed(parts):
            if part:
                nodes.append(Node(depth, rank, parent))
                counts.append(mine := int(own[depth][part]))
                self._collect(state, depth + 1, mine, part - 1 - mine, len(nodes) - 1, nodes, counts)


def joined(
    first: Float[np.ndarray, "probes rows"], second: Float[np.ndarray, "probes rows"]
) -> tuple[Float[np.ndarray, "probes rows"], Int[np.ndarray, "probes rows"]]:
    """The most of both together for each exact number of rows, and how many of them the second takes."""
    count = first.shape[1]
    rest = np.arange(count)[:, None] - np.arange(count)  # [rows, rows of the second]
    left = np.where(rest >= 0, first[:, rest.clip(0)], -np.inf)  # [probes, rows, rows of the second]
    both = left + second[:, None]
    return both.max(-1), both.argmax(-1)
