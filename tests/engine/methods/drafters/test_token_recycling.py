"""Token Recycling against its algorithm written naively, and the static tree against trying every
tree.
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.lookup.token_recycling import TokenRecycling, chance_of, static_tree
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import Scores
from tests.stubs import SESSION, StubModel

VOCABULARY, END = 8, 7
TARGET = StubModel(lambda _: torch.zeros(VOCABULARY))


def request_of(prompt: int, room: int = 20, ends: frozenset[int] = frozenset()) -> Request:
    return Request(Source((prompt,)), Limits(1, room, ends))


def recycling(nodes: int = 6, top_k: int = 2, keep: bool = False) -> TokenRecycling:
    drafter = TokenRecycling(TARGET, nodes, top_k, keep)
    drafter = drafter.start(request_of(0), SESSION)
    return drafter


def seen(drafter: TokenRecycling, text: list[int], rows: list[list[int]]) -> None:
    """Let the target read the last token of a text, and the draft behind it. rows: of each, the
    most likely tokens.
    """
    draft = drafter.propose(text)
    assert len(rows) == len(draft) + 1
    logits = torch.zeros(len(rows), VOCABULARY)
    for row, tokens in enumerate(rows):
        for place, token in enumerate(tokens):
            logits[row, token] = 9.0 - place
    drafter.observe(draft, Scores(logits), Verdict((), rows[0][0]))


def branches(draft: Draft) -> set[tuple[int, ...]]:
    """Every node as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_list, draft.parent_list, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return set(found)


def test_nothing_is_drafted_after_a_token_that_was_not_read() -> None:
    assert len(recycling().propose([3])) == 0


def test_candidates_are_followed_from_token_to_token() -> None:
    drafter = recycling(nodes=6)
    seen(drafter, [3], [[4, 5]])
    assert branches(drafter.propose([1, 3])) == {(4,), (5,)}
    seen(drafter, [4], [[3, 6]])
    drafted = branches(drafter.propose([3]))
    assert drafted == {(4,), (4, 3), (5,), (4, 3, 4), (4, 6)}
    draft = drafter.propose([3])
    assert draft.known_parents == draft.parents.tolist()


def test_rejected_tokens_are_recycled_and_the_newest_row_counts() -> None:
    drafter = recycling(nodes=3)
    seen(drafter, [3], [[4, 5]])
    seen(drafter, [3], [[6, 1], [2, 1], [1, 2]])  # rows of 3, of 4 and of 5
    for token, candidates in ((3, {6, 1}), (4, {2, 1}), (5, {1, 2})):
        assert {branch for branch in branches(drafter.propose([token])) if len(branch) == 1} == {
            (each,) for each in candidates
        }


def test_of_several_rows_of_one_token_an_accepted_one_counts() -> None:
    drafter = recycling(nodes=4)
    seen(drafter, [3], [[3, 5]])
    draft = drafter.propose([3])
    assert (draft.token_list, draft.parent_list) == ([3, 3, 5, 3], [ROOT, 0, ROOT, 1])
    logits = torch.zeros(5, VOCABULARY)
    logits[:, [4, 6]] = torch.tensor([2.0, 1.0])
    logits[1] = 0.0
    logits[1, [5, 6]] = torch.tensor([2.0, 1.0])  # of the drafted and accepted one
    drafter.observe(draft, Scores(logits), Verdict((0,), 5))
    assert {branch for branch in branches(drafter.propose([3])) if len(branch) == 1} == {(5,), (6,)}


def test_end_tokens_have_no_children_and_the_length_limit_cuts_branches() -> None:
    drafter = TokenRecycling(TARGET, 6, 1)
    drafter = drafter.start(request_of(0, room=3, ends=frozenset([END])), SESSION)
    seen(drafter, [3], [[3]])
    assert drafter.propose([0, 3]).depth == 2
    seen(drafter, [3], [[END], *[[END]] * len(drafter.propose([3]))])
    seen(drafter, [END], [[3]])
    assert branches(drafter.propose([3])) == {(END,)}


def test_a_new_text_forgets_the_one_before_unless_it_is_to_be_kept() -> None:
    for keep in (False, True):
        drafter = recycling(keep=keep)
        seen(drafter, [3], [[4, 5]])
        drafter = drafter.start(request_of(1), SESSION)
        assert (len(drafter.propose([3])) > 0) == keep
        seen(drafter, [5], [[6, 1]])
        # a prompt that comes again finds what it found the first time
        drafter = drafter.start(request_of(0), SESSION)
        assert len(drafter.propose([3])) == len(drafter.propose([5])) == 0


def test_the_beginning_of_a_text_is_replaced_when_that_goes_on() -> None:
    first = recycling(keep=True)
    seen(first, [3], [[4, 5]])
    second = first.start(request_of(1), SESSION)
    seen(second, [2], [[6, 1]])
    again = first.start(request_of(0), SESSION)  # as after a warm-up
    seen(again, [3], [[4, 5]])
    assert len(first.start(request_of(1), SESSION).propose([0, 4])) == 0
    seen(again, [3, 4], [[5, 6]])
    begun = first.start(request_of(1), SESSION)
    assert len(begun.propose([4])) > 0
    assert len(begun.propose([2])) == 0  # its own text


def test_the_static_tree_is_the_best_of_all_trees_of_its_size() -> None:
    ranks, depths = 3, 5
    paths = [
        path for length in range(1, depths + 1) for path in product(range(ranks), repeat=length)
    ]

    def worth(path: tuple[int, ...]) -> float:
        return prod(chance_of(rank) for rank in path)

    for nodes in (1, 2, 5, 9):
        made: list[tuple[int, ...]] = []
        for node in static_tree(nodes, ranks):
            made.append((*(() if node.parent == ROOT else made[node.parent]), node.rank))
            assert node.depth == len(made[-1]) - 1
        assert len(set(made)) == nodes
        # chances fall along a branch and over ranks, so that the most likely paths together are a
        # tree
        best = sorted((worth(path) for path in paths), reverse=True)[:nodes]
        assert sorted(map(worth, made), reverse=True) == pytest.approx(best)
