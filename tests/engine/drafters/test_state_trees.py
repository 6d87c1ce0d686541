"""Trees of a fixed or a growing shape leave sampled text distributed exactly as the target's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters.state_trees import StateTreeDrafter, StaticTree, TreeKnobs, named_nodes, published_tree
from bild_lab.engine.drafters.tree_file import to_content
from bild_lab.engine.drafters.trees import Node, ProbedTree
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import EVERYTHING, Rows, Scores, Session, Want, as_rows
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from tests.engine.drafters.chances import distribution
from tests.engine.drafters.test_sampled import MIDDLE, NEW_TOKENS, TARGET, by_context, kind
from tests.stubs import StubModel


class TextSession:
    """Scores by the whole text, of which every token was received once."""

    def __init__(self) -> None:
        self._text: list[int] = [0]
        self._received = 0
        self._rows: list[int] = []

    @property
    def ready(self) -> bool:
        return self._received > 0

    @property
    def length(self) -> int:
        return len(self._text)

    def receive(self, states: Tensor) -> None:
        self._received += len(states)

    def extend(self, rows: Rows | Sequence[int], want: Want = EVERYTHING) -> Scores:
        rows, score = as_rows(rows), by_context(MIDDLE)
        if rows.tree is None:
            self._text += rows.tokens
            self._rows = []
            assert len(self._text) == self._received + 1  # the last token has no state yet
            return Scores(score(self._text)[None])
        self._rows += [int(token) for token in rows.tokens]
        contexts: list[list[int]] = []
        for token, parent in zip(self._rows, rows.tree.parents.tolist(), strict=True):
            contexts.append([*(self._text if parent == ROOT else contexts[parent]), token])
        return Scores(torch.stack([score(one) for one in contexts[-len(rows.tokens) :]]))


class TextTree(StateTreeDrafter):
    def opened(self, request: Request, target: Session) -> TextSession:
        return TextSession()

    def states(self, scores: Scores) -> Tensor:
        return scores.logits


@pytest.mark.parametrize("tree", ["full_tree", "dynamic", "chain"])
def test_sampled_text_is_exactly_distributed_as_the_targets(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StubModel(by_context(TARGET))
    knobs = TreeKnobs(tree, 2, [2, 1], nodes=3, width=1, children=2)
    method = DraftThenVerify(model, TextTree(model, knobs, 2), SpeculativeSampling())
    request = Request(Source((0,)), Limits(1, NEW_TOKENS), Sampling(temperature=1.0))
    branched = set()

    def run() -> tuple[int, ...]:
        trace = Trace()
        text = tuple(method.decode(request, trace))
        branched.update((len(each.drafted), each.depth) for each in trace.rounds)
        return text

    found = distribution(run, monkeypatch)
    assert set(found) == {(0, *rest) for rest in itertools.product((0, 1), repeat=NEW_TOKENS)}
    for text, probability in found.items():
        expected = 1.0
        for end in range(1, len(text)):
            expected *= TARGET[kind(list(text[:end]))][text[end]]
        assert probability == pytest.approx(expected, abs=1e-12)
    assert max(branched) == {"full_tree": (4, 2), "dynamic": (3, 2), "chain": (2, 2)}[tree]


def test_the_published_tree_has_25_nodes_and_is_5_deep() -> None:
    nodes = published_tree()
    assert [sum(node.depth == depth for node in nodes) for depth in range(6)] == [4, 8, 8, 3, 2, 0]
    paths = {ROOT: ()}
    for at, node in enumerate(nodes):
        paths[at] = (*paths[node.parent], node.rank)
    assert {(0, 0, 0, 0, 1), (0, 2, 1), (1, 0, 0), (3, 0)} <= set(paths.values())
    assert len(set(paths.values())) == 26


def test_levels_run_only_nodes_with_children() -> None:
    nodes = [Node(0, 0, ROOT), Node(1, 1, 0), Node(0, 1, ROOT), Node(2, 0, 1)]  # not sorted by depth
    levels, parents, shape = StaticTree(nodes, torch.device("cpu"))._lay_out(3)
    assert parents.tolist() == [-1, -1, 0, 2]  # of ranks 0 1 | 1 | 0
    assert [level.ranks.tolist() for level in levels] == [[0, 1], [1], [0]]
    assert [level.runs.tolist() for level in levels] == [[0], [0], []]
    assert [None if level.rows is None else level.rows.parents.tolist() for level in levels] == [[-1], [-1, 0], None]
    assert shape.parents.tolist() == [-1, 0, 0, 1, 3]


def test_a_fitted_file_is_a_static_tree(tmp_path: Path) -> None:
    trees = [ProbedTree((), (0,)), ProbedTree((Node(0, 0, ROOT), Node(0, 2, ROOT)), (0, 0, 0))]
    file = tmp_path / "tree.json"
    write_atomically(file, json.dumps({"trees": to_content(trees)}).encode())
    assert list(named_nodes(str(file), 3, 4, 40)) == list(trees[1].nodes)
    write_atomically(file, json.dumps({"trees": to_content(trees[:1])}).encode())
    with pytest.raises(UserError, match="has no tree with nodes"):
        named_nodes(str(file), 3, 4, 40)


def test_unknown_trees_and_knobs_are_refused() -> None:
    with pytest.raises(UserError, match="tree must be one of dynamic, chain, eagle_tree, efficient_tree, full_tree or"):
        named_nodes("broad", 3, 4, 40)
    with pytest.raises(UserError, match="top_k must give a width for 1 to 2 depths"):
        named_nodes("full_tree", [1, 1, 1], 2, 40)
    with pytest.raises(UserError, match="window must be a whole number >= 1, got 0"):
        TreeKnobs("dynamic", 0)
    with pytest.raises(UserError, match=r"least is a probability and must lie in \[0, 1\], got 2"):
        TreeKnobs("dynamic", 4, least=2)
