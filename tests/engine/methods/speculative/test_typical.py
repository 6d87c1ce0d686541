"""Typical acceptance: its bar against the formula, and the path it takes through a tree."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.speculative.typical_acceptance import TypicalAcceptance, longest_path
from bild_lab.engine.request import Request
from tests.engine.methods.speculative.exact import GREEDY, rows, sampled

HOT = sampled()


def bar(probs: list[float], epsilon: float, delta: float) -> float:
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    return min(epsilon, delta * math.exp(-entropy))


@pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("delta", [0.2, 0.6, 1.0])
@pytest.mark.parametrize(
    "probs", [[0.7, 0.2, 0.06, 0.04], [0.25, 0.35, 0.25, 0.15], [0.9, 0.1, 0.0, 0.0]]
)
@pytest.mark.parametrize("request_", [GREEDY, HOT])
def test_a_token_is_accepted_above_its_bar(
    probs: list[float], epsilon: float, delta: float, request_: Request
) -> None:
    logits = rows(probs, [0.0, 0.0, 0.0, 1.0])
    for token in range(4):
        verdict = TypicalAcceptance(epsilon, delta)(Draft(torch.tensor([token])), logits, request_)
        assert bool(verdict.path) == (probs[token] > bar(probs, epsilon, delta)), token
        if verdict.path:
            assert verdict.next_token == 3


def test_a_token_at_its_bar_is_rejected() -> None:
    logits = rows([0.75, 0.25], [0.5, 0.5])
    at = float(logits[0].softmax(-1)[1])
    assert TypicalAcceptance(at, 1.0)(Draft(torch.tensor([1])), logits, GREEDY).path == ()
    assert TypicalAcceptance(math.nextafter(at, 0), 1.0)(
        Draft(torch.tensor([1])), logits, GREEDY
    ).path == (0,)
    output = TypicalAcceptance(at, 1.0).output_distribution(
        Draft(torch.tensor([1])), logits, HOT, torch.eye(2, dtype=torch.float64)[[1]]
    )
    torch.testing.assert_close(output[0], logits[0].exp())


def test_the_temperature_standardizes_the_target() -> None:
    logits = rows([0.6, 0.3, 0.1], [0.0, 0.0, 1.0])
    draft = Draft(torch.tensor([2]))
    cold, hot = (
        [p ** (1 / t) / sum(r ** (1 / t) for r in (0.6, 0.3, 0.1)) for p in (0.6, 0.3, 0.1)]
        for t in (0.5, 3)
    )
    assert cold[2] < bar(cold, 0.2, 1.0) and hot[2] > bar(hot, 0.2, 1.0)
    assert TypicalAcceptance(0.2, 1.0)(draft, logits, sampled(0.5)).path == ()
    assert TypicalAcceptance(0.2, 1.0)(draft, logits, sampled(3.0)) == Verdict((0,), 2)


def test_every_token_has_the_bar_of_its_own_position() -> None:
    logits = rows(
        [0.9, 0.1, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    )
    assert bar([0.25] * 4, 0.5, 0.5) < 0.25 < bar([0.9, 0.1], 0.5, 0.5)
    assert TypicalAcceptance(0.5, 0.5)(Draft(torch.tensor([0, 2, 0])), logits, GREEDY) == Verdict(
        (0, 1, 2), 3
    )


def test_the_targets_own_token_is_drawn_where_tokens_are_sampled() -> None:
    logits, rule = rows([0.5, 0.5], [0.5, 0.5]), TypicalAcceptance(0.09, 0.3)
    drawn = {rule(Draft(torch.tensor([0])), logits, HOT).next_token for _ in range(30)}
    assert drawn == {0, 1}


#   root -> {0: a, 1: b}; a -> {2}; b -> {3, 4}; 4 -> {5}
TREE = torch.tensor([ROOT, ROOT, 0, 1, 1, 4])


def tree_logits(**after: list[float]) -> Tensor:
    """Rows that give every token 1/4, but for those named: root, or n and the node's number."""
    names = ["root", *(f"n{node}" for node in range(6))]
    return rows(*(after.get(name, [0.25] * 4) for name in names))


@pytest.mark.parametrize("request_", [GREEDY, HOT])
def test_the_longest_path_of_a_tree_is_accepted(request_: Request) -> None:
    draft = Draft(torch.tensor([0, 1, 2, 2, 3, 0]), TREE)
    logits = tree_logits(root=[0.8, 0.2, 0.0, 0.0], n5=[0.0, 0.0, 1.0, 0.0])
    assert TypicalAcceptance(0.1, 0.5)(draft, logits, request_) == Verdict((1, 4, 5), 2)


def test_of_equally_long_paths_the_most_likely_is_accepted() -> None:
    draft = Draft(torch.tensor([0, 1, 2, 2, 3, 0]), TREE)
    logits = tree_logits(
        root=[0.45, 0.55, 0.0, 0.0],
        n1=[0.0, 0.0, 0.5, 0.5],
        n4=[0.0, 0.1, 0.1, 0.8],
        n3=[0, 0, 1, 0],
    )
    # after b nodes 3 and 4 are as likely, and the first of them is accepted; node 5 is rejected
    assert TypicalAcceptance(0.1, 0.5)(draft, logits, GREEDY) == Verdict((1, 3), 2)
    surer = tree_logits(
        root=[0.45, 0.55, 0, 0], n0=[0, 0, 1, 0], n1=[0, 0, 0.5, 0.5], n4=[0, 0.1, 0.1, 0.8]
    )
    assert TypicalAcceptance(0.1, 0.5)(draft, surer, GREEDY).path == (0, 2)


def test_how_likely_a_path_is_depends_on_all_of_its_nodes() -> None:
    assert longest_path([ROOT, ROOT, 0, 1], [0.5, 0.9, 0.8, 0.6], [1, 1, 1, 1]) == (1, 3)


def test_a_node_below_a_rejected_one_is_not_accepted() -> None:
    draft = Draft(torch.tensor([0, 1, 2, 2, 3, 0]), TREE)
    logits = tree_logits(root=[1.0, 0.0, 0.0, 0.0], n0=[0.0, 0.0, 0.0, 1.0])
    assert TypicalAcceptance(0.1, 0.5)(draft, logits, GREEDY) == Verdict((0,), 3)
