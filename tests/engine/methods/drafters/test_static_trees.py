"""Trees of a fixed or a growing shape leave sampled text distributed exactly as the target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.candidate_trees import (
    CandidateNode,
    ProbedTree,
    branch_nodes,
    trees_to_content,
)
from bild_lab.engine.methods.eagle.drafter import EagleDrafter
from bild_lab.engine.methods.eagle.module import EAGLE
from bild_lab.engine.methods.eagle.static_trees import StaticTree, named_nodes
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import TypicalAcceptance
from bild_lab.engine.methods.state_layers import states_of_text
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request, Source
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Rows, Scores, Session, as_rows
from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from tests.engine.lossless.toy import FIRST, TableModel, own_law, p_value, sampled_texts
from tests.stubs import StubModel

TARGET = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.25, 0.35, 0.4]], dtype=torch.float64)
# after each last token
DRAFT = torch.tensor([[0.5, 0.2, 0.3], [0.3, 0.6, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
EXACT = SpeculativeSampling()
FAIR = 1e-3  # the smallest p-value of a sound distribution; the seed is fixed


class TableStates:
    """Scores by the last token, behind a text of which every token is received once."""

    def __init__(self) -> None:
        self._text: list[int] = [FIRST]
        self._received = 0

    @property
    def ready(self) -> bool:
        return self._received > 0

    @property
    def length(self) -> int:
        return len(self._text)

    def receive(self, states: Tensor) -> None:
        self._received += len(states)

    def extend(self, rows: Rows | Sequence[int], output_spec: OutputSpec = ALL_LOGITS) -> Scores:
        rows = as_rows(rows)
        if rows.tree is None:
            self._text += rows.tokens
            assert len(self._text) == self._received + 1  # the last token has no state yet
            return Scores(DRAFT[self._text[-1:]].log())
        return Scores(DRAFT[torch.as_tensor(rows.tokens)].log())


class TableTree(EagleDrafter):
    """Trees by tables in place of a layer: the target's scores are its states."""

    def __init__(self, target: TableModel, tree: str) -> None:
        config = SimpleNamespace(vocabulary=3, variant=EAGLE, target_layers=())
        heads = SimpleNamespace(config=config)
        super().__init__(target, heads, tree, 2, [2, 1], nodes=3, width=1, children=2)
        self.required_outputs = ALL_LOGITS

    def begin(self, request: Request, target: Session) -> None:
        self._request, self._session = request, TableStates()

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        self._session.receive(states_of_text(scores.logits, draft, verdict))


def values(tree: str, count: int, rule: Acceptance = EXACT) -> float:
    made = TableTree(TableModel(TARGET), tree)
    texts = sampled_texts(TARGET, made, rule, 3, count, seed=count)
    return p_value(texts, own_law(TARGET, 3))


@pytest.mark.parametrize(
    ("tree", "count"),
    [
        ("dynamic", 400),
        *(
            pytest.param(tree, 6000, marks=pytest.mark.slow)
            for tree in ("full_tree", "dynamic", "chain")
        ),
    ],
)
def test_sampled_text_is_distributed_as_the_targets(tree: str, count: int) -> None:
    assert values(tree, count) > FAIR


@pytest.mark.slow
def test_a_rule_that_favours_what_is_drafted_is_noticed() -> None:
    assert values("chain", 6000, TypicalAcceptance(epsilon=0.1, delta=0.3)) < FAIR


def test_a_chain_can_be_verified_by_a_rule_that_takes_no_trees() -> None:
    target = TableModel(TARGET)
    DraftThenVerify(target, TableTree(target, "chain"), BlockVerification())
    with pytest.raises(UserError, match="accepts chains of tokens, but TableTree drafts trees"):
        DraftThenVerify(target, TableTree(target, "dynamic"), BlockVerification())


def test_the_published_tree_has_25_nodes_and_is_5_deep() -> None:
    nodes = named_nodes("eagle_tree", top_k=4, window=5, vocabulary=40)
    assert [sum(node.depth == depth for node in nodes) for depth in range(6)] == [4, 8, 8, 3, 2, 0]
    paths = {ROOT: ()}
    for at, node in enumerate(nodes):
        paths[at] = (*paths[node.parent], node.rank)
    assert {(0, 0, 0, 0, 1), (0, 2, 1), (1, 0, 0), (3, 0)} <= set(paths.values())
    assert len(set(paths.values())) == 26


def test_levels_run_only_nodes_with_children() -> None:
    # not sorted by depth
    nodes = [
        CandidateNode(0, 0, ROOT),
        CandidateNode(1, 1, 0),
        CandidateNode(0, 1, ROOT),
        CandidateNode(2, 0, 1),
    ]
    layout = StaticTree(nodes, torch.device("cpu"))._trees.layout(3)
    levels = layout.levels
    # of ranks 0 1 | 1 | 0
    assert layout.parent_list == (-1, -1, 0, 2)
    assert layout.parents.tolist() == [-1, -1, 0, 2]
    assert [level.picks.tolist() for level in levels] == [[0, 1], [1], [0]]
    assert [level.parent_rows.tolist() for level in levels] == [[0], [1], [3]]
    assert [tree.parents.tolist() for tree in layout.trees_of_parents] == [[-1], [-1, 0]]
    assert layout.rows.parents.tolist() == [-1, 0, 0, 1, 3]


def branches(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_node_is_the_candidate_of_its_rank_after_its_branch(depth: int) -> None:
    """Also where nodes are not sorted by depth, and ranks are larger below than above."""
    ranks = "1 13 132 14 0 02 025 04 041 2".split()
    table = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)).double()

    def next_logits(tokens: list[int]) -> Tensor:
        return table[sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % 50]

    expected = set()
    for branch in (branch for branch in ranks if len(branch) <= depth):
        text = [0, 1, 3]
        for rank in map(int, branch):
            text.append(int(next_logits(text).argsort(descending=True)[rank]))
        expected.add(tuple(text[3:]))
    tree = StaticTree(branch_nodes(ranks), torch.device("cpu"))
    model = StubModel(next_logits)
    draft = tree.draft(model.start(Source((0,)), 40), [0, 1, 3], depth, chain=False)
    assert set(branches(draft.token_list, draft.parent_list)) == expected
    assert draft.calls == depth
    assert len(model.fed) == 3 + [0, 2, 5][depth - 1]  # the nodes with children


def test_a_chain_is_the_most_likely_continuation_as_long_as_the_window() -> None:
    tree = StaticTree(named_nodes("chain", 3, 4, 40), torch.device("cpu"))
    model = StubModel(lambda tokens: torch.eye(40)[tokens[-1] + 1])
    draft = tree.draft(model.start(Source((0,)), 40), [0, 1], 4, chain=True)
    assert (draft.token_list, draft.calls, draft.parents) == ([2, 3, 4, 5], 4, None)


EMPTY = {"parents": [], "ranks": [], "probes": [0]}
PROBED = {"parents": [-1], "ranks": [0], "probes": [1, 0]}


def test_a_fitted_file_is_a_static_tree(tmp_path: Path) -> None:
    trees = [
        ProbedTree((), (0,)),
        ProbedTree((CandidateNode(0, 0, ROOT), CandidateNode(0, 2, ROOT)), (0, 0, 0)),
    ]
    file = tmp_path / "tree.json"
    write_atomically(file, json.dumps({"trees": trees_to_content(trees)}).encode())
    assert list(named_nodes(str(file), 3, 4, 40)) == list(trees[1].nodes)
    write_atomically(file, json.dumps({"trees": trees_to_content(trees[:1])}).encode())
    with pytest.raises(UserError, match="has no tree with nodes"):
        named_nodes(str(file), 3, 4, 40)
    write_atomically(file, json.dumps({"trees": [EMPTY, PROBED]}).encode())
    with pytest.raises(UserError, match="must have 0 to 0 probes below a row, got 1"):
        named_nodes(str(file), 3, 4, 40)


def test_a_full_tree_of_too_many_tokens_is_refused() -> None:
    """Fault: 19,530 tokens were drafted in each round."""
    with pytest.raises(UserError, match="has 19530 nodes, more than 1024; lower top_k"):
        named_nodes("full_tree", 5, 6, 40)
    assert len(named_nodes("full_tree", 3, 5, 40)) == 363
