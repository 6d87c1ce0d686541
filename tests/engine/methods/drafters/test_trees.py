"""Trees of candidates: their shapes, their layout, and the file of a fitted tree."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.bita import BitaTarget, MaskTokenDrafter
from bild_lab.engine.methods.candidate_trees import (
    MEDUSA_TREE,
    CandidateNode,
    ProbedTree,
    TreeBuilder,
    candidate_widths,
    efficient_tree,
    full_tree,
    medusa_trees,
    narrowing_tree,
    read_trees,
    trees_by_depth,
    trees_to_content,
)
from bild_lab.engine.methods.candidates import TokenTrees, named_trees
from bild_lab.engine.methods.medusa import MedusaDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.loops import NEVER, autoregressive, finished
from tests.engine.methods.modules.tiny import random_adapter, random_heads
from tests.policies import in_memory
from tests.stubs import uncached
from tests.tiny import START, tiny_llama

CPU = torch.device("cpu")
CANDIDATES = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])


def draft(
    grow: TreeBuilder,
    widths: tuple[int, ...],
    depth: int,
    candidates: torch.Tensor | None,
    *probes: int,
    **more: bool,
) -> Draft:
    trees = TokenTrees(trees_by_depth(grow(widths), *probes, **more), 40, CPU)
    return trees.draft(candidates, trees.layout(depth, 9))


def test_in_an_efficient_tree_only_the_most_likely_of_each_depth_has_children() -> None:
    """Figure 5 with 3 candidates at each of 2 depths."""
    assert efficient_tree([3, 2]) == [
        CandidateNode(0, 0, ROOT),
        CandidateNode(0, 1, ROOT),
        CandidateNode(0, 2, ROOT),
        CandidateNode(1, 0, 0),
        CandidateNode(1, 1, 0),
    ]
    drafted = draft(efficient_tree, (3, 2, 1), 3, CANDIDATES)
    assert drafted.token_list == [10, 11, 12, 20, 21, 30]
    assert drafted.parent_list == [ROOT, ROOT, ROOT, 0, 0, 3]
    assert drafted.depth == 3


def test_a_narrowing_tree_is_that_of_bitas_released_evaluation() -> None:
    """Its attention mask: row m·k… of each depth sees the first candidate of every depth above, and
    itself.
    """
    assert [trees_by_depth(narrowing_tree([5] * masks), masks)[-1].rows for masks in (3, 4)] == [
        52,
        75,
    ]
    nodes = narrowing_tree([5, 5, 5])
    assert [[node.depth for node in nodes].count(depth) for depth in range(3)] == [5, 4, 3]
    assert [node.parent for node in nodes] == [ROOT] * 5 + [0] * 4 + [5] * 3
    with pytest.raises(
        UserError,
        match="one candidate fewer at each of its 3 depths, got top_k 2; give at least 3, or",
    ):
        narrowing_tree([2, 2, 2])


def test_in_a_full_tree_every_node_has_children() -> None:
    drafted = draft(full_tree, (2, 1, 2), 3, CANDIDATES[:, :2])
    assert drafted.token_list == [10, 11, 20, 20, 30, 31, 30, 31]
    assert drafted.parent_list == [ROOT, ROOT, 0, 1, 2, 2, 3, 3]


def test_a_tree_is_cut_where_fewer_tokens_may_come() -> None:
    assert draft(full_tree, (2, 2, 2), 1, CANDIDATES[:, :2]).token_list == [10, 11]
    assert len(draft(full_tree, (2, 2, 2), 2, CANDIDATES[:, :2])) == 6
    assert len(draft(full_tree, (2, 2, 2), 0, None)) == 0


def test_without_candidates_the_last_token_still_has_its_probes() -> None:
    drafted = draft(efficient_tree, (2, 1), 0, None, 2)
    assert len(drafted) == 0 and drafted.probes.tolist() == [40, 41]
    assert drafted.row_tokens(7).tolist() == [7, 40, 41]
    assert drafted.tree.parents.tolist() == [ROOT, 0, 1]


def test_every_row_has_a_chain_of_probes_below_it() -> None:
    drafted = draft(efficient_tree, (2, 1), 2, CANDIDATES[:, :2], 2)
    rows, tree = drafted.row_tokens(7), drafted.tree
    assert rows.tolist() == [7, 10, 11, 20, *[40, 41] * 4]
    assert tree.parents.tolist() == [ROOT, 0, 0, 1, 0, 4, 1, 6, 2, 8, 3, 10]
    assert tree.depths.tolist() == [0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3, 4]


def test_a_straightforward_chain_has_probes_below_its_root_alone() -> None:
    drafted = draft(efficient_tree, (1, 1), 2, CANDIDATES[:, :1], 2, probe_nodes=False)
    rows, tree = drafted.row_tokens(7), drafted.tree
    assert rows.tolist() == [7, 10, 20, 40, 41]
    assert tree.parents.tolist() == [ROOT, 0, 1, 0, 3]


def test_a_layout_tells_where_the_probes_of_each_row_are_and_how_many() -> None:
    trees = TokenTrees(trees_by_depth(efficient_tree((2, 1)), 3), 40, CPU)
    assert trees.depth == 2 and trees.layout(2, 2).probe_groups == ((4, 2), (6, 2), (8, 2), (10, 2))
    assert trees.draft(CANDIDATES[:2, :2], trees.layout(2)).known_parents == (ROOT, ROOT, 0)


def test_there_may_be_more_candidates_than_a_tree_uses() -> None:
    trees = TokenTrees(trees_by_depth(efficient_tree((2, 1))), 40, CPU, width=3)
    assert trees.draft(CANDIDATES, trees.layout(2)).token_list == [10, 11, 20]


def test_the_target_runs_a_row_for_the_last_token_every_node_and_every_probe() -> None:
    assert [tree.rows for tree in trees_by_depth(efficient_tree((2, 1)), 2)] == [
        1 + 2,
        1 + 2 + 3 * 2,
        1 + 3 + 4 * 2,
    ]
    assert [tree.rows for tree in trees_by_depth(efficient_tree((2, 1)))] == [1, 3, 4]


def test_trees_without_nodes_use_no_candidates_and_have_probes_only_if_asked_for() -> None:
    assert TokenTrees(trees_by_depth(full_tree(())), 40, CPU).width == 0
    trees = TokenTrees(trees_by_depth(efficient_tree((1,)), 2), 40, CPU)
    assert (trees.layout(1).probes, trees.layout(1, 1).probes.tolist()) == (None, [40, 40])


FIRST = ProbedTree((), (3,))
SECOND = ProbedTree((CandidateNode(0, 0, ROOT), CandidateNode(0, 5, ROOT)), (2, 3, 0))
THIRD = ProbedTree(
    (
        CandidateNode(0, 1, ROOT),
        CandidateNode(1, 0, 0),
        CandidateNode(1, 7, 0),
        CandidateNode(0, 0, ROOT),
    ),
    (0, 3, 1, 0, 2),
)
FOURTH = ProbedTree(
    (*THIRD.nodes, CandidateNode(2, 3, 1), CandidateNode(1, 2, 3)), (1, 3, 2, 0, 2, 1, 0)
)


def written(path: Path, *trees: ProbedTree) -> str:
    path.write_text(json.dumps({"trees": trees_to_content(trees)}))
    return str(path)


def test_trees_are_read_as_they_were_written(tmp_path: Path) -> None:
    trees = (FIRST, SECOND, THIRD, FOURTH)
    assert read_trees(written(tmp_path / "tree.json", *trees), 3, 3, 40) == trees
    # where a rank comes twice at a depth, below two nodes
    trees = trees_by_depth(full_tree((2, 2)))
    assert read_trees(written(tmp_path / "full.json", *trees), 3, 3, 40) == trees


def test_a_file_has_at_most_as_many_nodes_as_a_full_tree(tmp_path: Path) -> None:
    for ranks, refused in ((1024, False), (1025, True)):
        nodes = tuple(CandidateNode(0, rank, ROOT) for rank in range(ranks))
        trees = (ProbedTree((), (0,)), ProbedTree(nodes, (0,) * (1 + ranks)))
        path = written(tmp_path / f"{ranks}.json", *trees)
        if refused:
            with pytest.raises(UserError, match="lengths that do not fit"):
                read_trees(path, 1, 0, 2000)
        else:
            assert read_trees(path, 1, 0, 2000) == trees


def test_a_number_of_candidates_for_each_depth_is_for_no_more_depths_than_there_are() -> None:
    assert candidate_widths([3, 2], 2, 40) == (3, 2)
    assert candidate_widths([3], 2, 40) == (3,)
    for top_k in ([3, 2, 1], []):
        with pytest.raises(UserError, match="top_k must give a width for 1 to 2 depths, got"):
            candidate_widths(top_k, 2, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "must hold trees, got a file without"),
        ("[1]", "must hold trees, got a file without"),
        (
            '{"trees": [{"parents": [0], "ranks": [0], "probes": [0, 0]}]}',
            "must hold trees, got a file without",
        ),
        ('{"trees": [{"parents": [-1], "ranks": [0], "probes": [0]}]}', "lengths that do not fit"),
        (
            '{"trees": [{"parents": [-1], "ranks": [0], "probes": [0, 0]}]}',
            "must have nodes of depths below 0",
        ),
        (
            '{"trees": [{"parents": [], "ranks": [], "probes": [1]}]}',
            "must have 0 to 0 probes below a row, got 1",
        ),
        ('{"trees": []}', "must hold a tree for 0 to 3 depths, got 0 trees"),
    ],
)
def test_a_file_that_is_no_tree_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(UserError, match=message) as refused:
        read_trees(str(tmp_path / "tree.json"), 3, 3, 40)
    assert "scripts/fit_tree.py" in str(refused.value)


def test_a_tree_that_the_adapter_cannot_draft_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tree.json", FIRST, SECOND, THIRD)
    with pytest.raises(UserError, match="must hold a tree for 0 to 1 depths, got 3 trees"):
        read_trees(path, 1, 1, 40)
    with pytest.raises(UserError, match="ranks below 5"):
        read_trees(written(tmp_path / "other.json", ProbedTree((), (0,)), SECOND), 3, 3, 5)


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("policy", ["medusa", "bita"])
def test_texts_with_a_fitted_tree_are_the_targets(policy: str, engine: str, tmp_path: Path) -> None:
    """With masks below some rows only, and where the length limit leaves less room than the tree is
    deep.
    """
    module = tiny_llama(4).double()
    target = in_memory(module, engine)
    trees = (FIRST, SECOND, THIRD, FOURTH)
    if policy == "medusa":
        path = written(
            tmp_path / "tree.json",
            *(ProbedTree(one.nodes, (0,) * len(one.probes)) for one in trees),
        )
        heads = random_heads(module.config, module.lm_head.weight).double().requires_grad_(False)
        model, drafter = target, MedusaDrafter(target, heads, path, 1)
    else:
        adapter = random_adapter(module.config).double().requires_grad_(False)
        drafter = MaskTokenDrafter(target, adapter, written(tmp_path / "tree.json", *trees), 1)
        model = BitaTarget(target, adapter)
    accepted, shapes = 0, set()
    for words, length in (((5, 9, 12), 30), ((30, 12), 3), ((8,), 12)):
        source, trace = Source((START, *words)), Trace()
        request = Request(source, Limits(len(source.prompt), length, NEVER))
        expected = autoregressive(
            uncached(module, source), source.prompt, finished(source, length, NEVER)
        )
        assert DraftThenVerify(model, drafter, ExactMatch()).decode(request, trace) == expected
        accepted += trace.accepted
        shapes |= {len(each.drafted) for each in trace.rounds}
    assert accepted
    assert shapes >= ({0, 2, 6} if policy == "medusa" else {0, 2, 4})


@torch.inference_mode()
def test_a_tree_without_nodes_runs_no_head() -> None:
    module = tiny_llama(4)
    heads = random_heads(module.config, module.lm_head.weight).requires_grad_(False)
    target, trace = in_memory(module, "native"), Trace()
    drafter = MedusaDrafter(target, heads, "full_tree", 3).drafting([ProbedTree((), (0,))] * 4)
    DraftThenVerify(target, drafter, ExactMatch()).decode(
        Request(Source((START, 5)), Limits(2, 6, NEVER)), trace
    )
    assert [each.layers for each in trace.forwards] == [None] * 6


def branch(nodes: tuple[CandidateNode, ...], index: int) -> list[int]:
    """The ranks from the root to a node, as Medusa's code lists its choices."""
    node = nodes[index]
    before = [] if node.parent == ROOT else branch(nodes, node.parent)
    return [*before, node.rank]


def test_medusas_tree_is_the_list_of_its_authors() -> None:
    """The hash is of the sorted list of medusa/model/medusa_choices.py of FasterDecoding/Medusa at
    commit 11af0aa.
    """
    trees = named_trees(MEDUSA_TREE, 3, max_depth=5, max_probes=0, vocabulary_size=32000)
    nodes = trees[-1].nodes
    choices = sorted((branch(nodes, index) for index in range(len(nodes))), key=sorted_as_theirs)
    digits = " ".join("".join(map(str, choice)) for choice in choices)
    assert sha256(digits.encode()).hexdigest()[:16] == "41346531655af4c2"
    assert [len(tree.nodes) for tree in trees] == [0, 10, 38, 61, 63]
    assert trees[-1].rows == 64 and not any(trees[-1].probes)
    assert medusa_trees(4, 3, 32000)[-1].rows == 64 * 4  # a row's masks follow it, as in BiTA
    assert medusa_trees(6, 6, 32000)[-1].rows == 64 * 5  # no more of them than it is deep


def sorted_as_theirs(choice: list[int]) -> tuple[int, list[int]]:
    return len(choice), choice


def test_medusas_tree_is_refused_for_fewer_heads_or_tokens_than_it_has() -> None:
    for depth, tokens in ((3, 32000), (5, 9)):
        with pytest.raises(UserError, match=f"mc_sim_7b_63 takes the 10 .* got {tokens} tokens"):
            named_trees(MEDUSA_TREE, 3, depth, 0, tokens)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_medusas_tree_drafts_what_the_heads_find_likely_and_keeps_the_targets_text(
    engine: str,
) -> None:
    module = tiny_llama(4).double()
    heads = random_heads(module.config, module.lm_head.weight, heads=5).double()
    source, target, trace = Source((START, 5, 9)), in_memory(module, engine), Trace()
    drafter = MedusaDrafter(target, heads.requires_grad_(False), MEDUSA_TREE, 3)
    limits = Limits(len(source.prompt), 16, NEVER)
    text = DraftThenVerify(target, drafter, ExactMatch()).decode(Request(source, limits), trace)
    assert text == autoregressive(
        uncached(module, source), source.prompt, finished(source, 16, NEVER)
    )
    assert [len(each.drafted) for each in trace.rounds[:2]] == [0, 63]


def test_a_full_tree_has_at_most_so_many_nodes() -> None:
    assert len(full_tree([1024])) == len(full_tree([2, 511])) == 1024
    for widths in ([1025], [1, 1024], [32, 32]):
        with pytest.raises(UserError, match=r"more than 1024; lower top_k, or draft less far"):
            full_tree(widths)
