"""The best tree, against every tree that there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters.trees import Node, ProbedTree
from bild_lab.lab.shapes.optimum import best_by_rows, best_trees, cut

SMOOTH = 1 + 0.2 * np.arange(8)
STEPPED = np.array([1.0, 1.0, 1.0, 1.7, 1.6, 1.7, 3.0, 3.1])  # not monotone


def subtrees(
    acceptance: np.ndarray, state: int, depth: int, parent: int, first: int, most: int
) -> Iterator[list[Node]]:
    """All sets of nodes below a row, the first of which gets the index `first`."""
    ranks = range(acceptance.shape[1]) if depth < state else ()

    def below(rank: int, index: int) -> Iterator[list[Node]]:
        if rank == len(ranks):
            yield []
            return
        yield from below(rank + 1, index)
        if index - first < most:
            for inner in subtrees(acceptance, state, depth + 1, index, index + 1, most - (index - first) - 1):
                for others in below(rank + 1, index + 1 + len(inner)):
                    yield [Node(depth, rank, parent), *inner, *others]

    yield from below(0, first)


def every_tree(acceptance: np.ndarray, state: int, most_probes: int, most_rows: int) -> list[ProbedTree]:
    found = []
    for nodes in subtrees(acceptance, state, 0, ROOT, 0, most_rows - 1):
        for probes in itertools.product(range(most_probes + 1), repeat=len(nodes) + 1):
            tree = ProbedTree(tuple(nodes), probes)
            if tree.rows <= most_rows:
                found.append(tree)
    return found


def table(seed: int, depth: int, ranks: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.dirichlet([2.0, *[0.8] * ranks], depth)[:, :ranks]


def outcome(tree: ProbedTree, acceptance: np.ndarray) -> tuple[float, np.ndarray]:
    """Expected tokens of a round, and the probability that it ends at each row."""
    reached = [1.0]
    for node in tree.nodes:
        reached.append(reached[node.parent + 1] * acceptance[node.depth, node.rank])
    ends = np.array(reached)
    for node, chance in zip(tree.nodes, reached[1:], strict=True):
        ends[node.parent + 1] -= chance
    return sum(reached), ends


@pytest.mark.parametrize("seconds", [SMOOTH[:6], STEPPED[:6]], ids=["smooth", "stepped"])
@pytest.mark.parametrize("seed", range(3))
def test_no_tree_without_probes_gives_more_tokens_per_second(seed: int, seconds: np.ndarray) -> None:
    acceptance = table(seed, 3, 3)
    fit = best_trees(acceptance, seconds, 0, 0.1)
    trees = every_tree(acceptance, 3, 0, len(seconds))
    assert len(trees) > 200
    assert fit.tokens_per_s == pytest.approx(max(outcome(one, acceptance)[0] / seconds[one.rows - 1] for one in trees))


@pytest.mark.parametrize("seconds", [SMOOTH[:5], np.array([1.0, 1.05, 1.3, 1.2, 1.6])], ids=["smooth", "stepped"])
@pytest.mark.parametrize("seed", range(2))
def test_no_trees_with_probes_give_more_tokens_per_second(seed: int, seconds: np.ndarray) -> None:
    """Every way to draft with candidates for 0, 1 and 2 positions, with every number of masks below every row."""
    acceptance = 0.3 + 0.65 * table(seed, 2, 2)
    acceptance /= np.maximum(1, acceptance.sum(-1, keepdims=True))
    fit = best_trees(acceptance, seconds, 2, 0.1)
    rounds, moves = [], []  # of every tree of every state
    for state in range(3):
        trees = every_tree(acceptance, state, 2, 5)
        told = [outcome(one, acceptance) for one in trees]
        rounds.append(np.array([[tokens, seconds[one.rows - 1]] for (tokens, _), one in zip(told, trees, strict=True)]))
        moves.append(
            np.array([0.9 * np.bincount(one.probes, ends, 3) for (_, ends), one in zip(told, trees, strict=True)])
        )
        moves[-1][:, 0] += 0.1
    ways = np.indices([len(each) for each in rounds]).reshape(3, -1)
    law = np.stack([moves[state][ways[state]] for state in range(3)], 1) - np.eye(3)  # [ways, from, to]
    law[:, :, 2] = 1  # the shares of the states sum to 1
    shares = np.linalg.solve(law.transpose(0, 2, 1), np.array([0.0, 0.0, 1.0])[:, None])[..., 0]
    tokens, duration = np.einsum("ws,wsk->kw", shares, np.stack([rounds[s][ways[s]] for s in range(3)], 1))
    assert ways.shape[1] > 5000
    assert fit.tokens_per_s == pytest.approx((tokens / duration).max())
    assert fit.tokens > 1


def test_a_step_in_the_cost_keeps_the_tree_below_it() -> None:
    acceptance = table(1, 3, 4)
    cheap = np.full(16, 1.0)
    assert best_trees(acceptance, cheap, 0, 0.1).trees[-1].rows == 16
    for step in (4, 7, 12):
        planted = np.where(np.arange(1, 17) <= step, 1.0, 9.0)
        assert best_trees(acceptance, planted, 0, 0.1).trees[-1].rows == step


def test_masks_that_cost_nothing_run_everywhere_and_dear_ones_where_texts_go_on() -> None:
    acceptance = np.array([[0.7, 0.05], [0.7, 0.05]])
    free = best_trees(acceptance, np.full(30, 1.0), 2, 0.01)
    assert set(free.trees[2].probes) == {2}
    dear = best_trees(acceptance, 1 + 0.08 * np.arange(30), 2, 0.01)
    tree = dear.trees[2]
    by_rank = {node.rank: count for node, count in zip(tree.nodes, tree.probes[1:], strict=True)}
    assert by_rank.get(1, 0) == 0 < by_rank[0]
    assert best_trees(acceptance, 1 + 2.0 * np.arange(30), 2, 0.01).trees[0] == ProbedTree((), (0,))


def test_more_rows_never_give_fewer_tokens() -> None:
    fits = best_by_rows(table(0, 2, 3), STEPPED, 2, 0.1)
    assert [fit.seconds for fit in fits] == pytest.approx(STEPPED.tolist())
    assert all(one.tokens <= other.tokens + 1e-9 for one, other in itertools.pairwise(fits))
    assert fits[0].tokens == 1.0


def test_a_tree_is_cut_above_a_depth_with_its_probes() -> None:
    nodes = (Node(0, 0, ROOT), Node(1, 0, 0), Node(0, 2, ROOT), Node(1, 1, 2))
    assert cut(ProbedTree(nodes, (5, 1, 2, 3, 4)), 1) == ProbedTree((nodes[0], Node(0, 2, ROOT)), (5, 1, 3))
