"""Trees of drafted tokens: their shape, their parts, and what of them comes to the host."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.draft import (
    Draft,
    Tree,
    Verdict,
    ancestors,
    ancestors_by_doubling,
    empty_draft,
)
from bild_lab.errors import UserError
from tests.engine.example_tree import PARENTS, TOKENS, tree

PROBS = torch.arange(5).double()[:, None].expand(5, 3)


def test_the_rows_of_a_round_are_the_last_token_the_draft_and_its_probes() -> None:
    chain = Draft(TOKENS)
    assert chain.row_tokens(9).tolist() == [9, 5, 6, 7, 8, 5] and chain.tree is None
    assert tree().row_tokens(9).tolist() == [9, 5, 6, 7, 8, 5]
    assert tree().tree.parents.tolist() == [-1, 0, 0, 1, 1, 3]
    shape = Tree(torch.tensor([-1, 0, 0, 1, 1, 3, 3]))
    probing = tree(probes=torch.tensor([99]), shape=shape)
    assert probing.row_tokens(9).tolist() == [9, 5, 6, 7, 8, 5, 99] and probing.tree is shape
    nothing = empty_draft(torch.device("cpu"))
    assert (len(nothing), nothing.row_tokens(9).tolist(), nothing.depth, nothing.token_list) == (
        0,
        [9],
        0,
        [],
    )
    assert nothing.tokens.dtype == torch.long


def test_depths_count_from_1_along_each_branch() -> None:
    assert (tree().depths, tree().depth) == ([1, 1, 2, 2, 3], 3)
    assert (Draft(TOKENS).depths, Draft(TOKENS).depth, Draft(TOKENS).parent_list) == (
        [1, 2, 3, 4, 5],
        5,
        [-1, 0, 1, 2, 3],
    )
    # not read from the device
    assert tree(known_parents=(-1, 0, 1, 2, 3)).parent_list == [-1, 0, 1, 2, 3]
    assert tree().parent_list == [-1, -1, 0, 0, 2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_is_cut_below_a_depth_with_all_that_belongs_to_its_nodes(depth: int) -> None:
    # node 1 comes behind a branch that is cut
    parents = torch.tensor([-1, 0, 1, -1, 3])
    given = {"probs": PROBS, "unscaled_probs": 2 * PROBS, "uniforms": PROBS[:, 0] / 10}
    draft = Draft(
        TOKENS,
        parents=parents,
        shape=Tree(parents),
        known_parents=parents.tolist(),
        calls=4,
        **given,
    )
    cut = draft.up_to_depth(depth)
    kept = [0, 3] if depth == 1 else [0, 1, 3, 4]
    assert cut.token_list == TOKENS[kept].tolist() and cut.calls == 4
    assert cut.parents.tolist() == cut.parent_list == ([-1, -1] if depth == 1 else [-1, 0, -1, 2])
    assert torch.equal(cut.probs, PROBS[kept]) and torch.equal(cut.unscaled_probs, 2 * PROBS[kept])
    assert torch.equal(cut.uniforms, PROBS[kept, 0] / 10)
    assert cut.shape is None and cut.known_parents is None
    assert cut.tree.parents.tolist() == [-1, *(parent + 1 for parent in cut.parent_list)]
    chain = Draft(TOKENS, probs=PROBS).up_to_depth(depth)
    assert (chain.token_list, chain.parents, len(chain.probs)) == (
        TOKENS[:depth].tolist(),
        None,
        depth,
    )
    assert chain.uniforms is None


def test_values_tokens_and_parents_come_to_the_host_together() -> None:
    draft = tree()
    assert draft.to_host(torch.tensor([0.5, 2.0]), torch.tensor([True, False, True])) == [
        [0.5, 2.0],
        [1.0, 0.0, 1.0],
    ]
    assert (draft.__dict__["token_list"], draft.__dict__["parent_list"]) == (
        [5, 6, 7, 8, 5],
        [-1, -1, 0, 0, 2],
    )
    assert all(type(token) is int for token in draft.token_list)
    assert draft.to_host(torch.tensor([2**53 - 1])) == [[2**53 - 1]]  # again, without the tokens
    known = tree(known_parents=[-1, -1, 0, 0, 2])
    assert known.to_host(torch.tensor([1.0])) == [[1.0]] and "parent_list" not in known.__dict__
    chain = Draft(TOKENS)
    assert (
        chain.to_host() == []
        and "parent_list" not in chain.__dict__
        and chain.token_list == TOKENS.tolist()
    )


def test_ancestors_are_the_same_by_both_ways() -> None:
    chains = [list(range(-1, rows - 1)) for rows in (0, 1, 2, 3, 4, 5, 16, 17)]
    for parents in (*chains, [-1, -1, -1], PARENTS.tolist(), [-1, 0, 1, 1, 3, 4, 2, -1, 7, 8, 9]):
        expected = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for row in range(len(parents)):
            above = row
            while above >= 0:
                expected[row, above] = True
                above = parents[above]
        held = torch.tensor(parents, dtype=torch.long)
        assert torch.equal(ancestors(held), expected) and torch.equal(
            ancestors_by_doubling(held), expected
        )
        assert Tree(held).depths.tolist() == (expected.sum(-1) - 1).tolist() and len(
            Tree(held)
        ) == len(parents)


def test_the_next_token_of_a_verdict_is_a_plain_number() -> None:
    """A tensor is equal to no end token of a set, and cannot be stored."""
    verdict = Verdict((), torch.tensor(5))
    assert type(verdict.next_token) is int and verdict.next_token in {5}


def test_the_path_of_a_verdict_is_a_tuple_of_plain_numbers() -> None:
    for path in ([0, 1], torch.arange(2), range(2)):
        verdict = Verdict(path, 5)
        assert verdict.path == (0, 1) and all(type(node) is int for node in verdict.path)
    for no_path in (2, "ab", torch.ones(2, 2), [float("nan")]):
        with pytest.raises(UserError, match="lists the accepted nodes, .* got "):
            Verdict(no_path, 5)
    for no_token in (None, float("inf"), torch.ones(2), torch.ones((), device="meta")):
        with pytest.raises(UserError, match="is one token id, got "):
            Verdict((), no_token)


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 5], [-2]])
def test_a_tree_of_rows_with_a_parent_that_is_no_row_before_is_refused(parents: list[int]) -> None:
    with pytest.raises(
        UserError, match=f"has the parent {parents[-1]}; a parent is an earlier row"
    ):
        Tree(torch.tensor(parents))
