"""What is no draft, no distribution and no verdict is refused in words."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.draft_checks import (
    require_distributions,
    require_draft,
    require_tree,
    require_verdict,
)
from bild_lab.errors import UserError
from tests.engine.example_tree import PARENTS, TOKENS, tree

ROWS = torch.full((2, 4), 0.25)  # of probabilities
PAIR = torch.tensor([2, 3])  # tokens of a chain


@pytest.mark.parametrize("where", ["parents", "known_parents"])
@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 1, 0], "node 1 has the parent 1"),
        ([-1, 2, 0], "node 1 has the parent 2"),
        ([0, 0, 0], "node 0 has the parent 0"),
        ([-1, 0, -2], "node 2 has the parent -2"),
        ([-1, 0], "3 tokens and 2 parents"),
    ],
)
def test_a_tree_whose_parents_do_not_come_first_is_refused(
    parents: list[int], message: str, where: str
) -> None:
    tokens = torch.tensor([5, 6, 7])
    draft = Draft(tokens, torch.tensor(parents))
    if where == "known_parents":
        draft = Draft(tokens, torch.tensor([-1, 0, 1]), known_parents=parents)
    with pytest.raises(UserError, match=f"Faulty has drafted .*{message}"):
        require_tree(draft, "Faulty")
    require_tree(tree(), "Faulty")
    require_tree(Draft(TOKENS), "Faulty")
    require_tree(Draft(TOKENS[:0], PARENTS[:0]), "Faulty")


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (None, "must draft a Draft, got NoneType"),
        ([2, 3], "must draft a Draft, got list"),
        ((Draft(PAIR) for _ in range(2)), "must draft a Draft, got generator"),
        (Draft([2, 3]), "vector of token ids, .* got list"),
        (Draft(PAIR.float()), r"got a tensor \[2\] of float32"),
        (Draft(PAIR.int()), r"got a tensor \[2\] of int32"),
        (Draft(PAIR[None]), r"got a tensor \[1, 2\] of int64"),
        (Draft(PAIR[0]), r"got a tensor \[\] of int64"),
        (Draft(PAIR, probs=ROWS[:1]), r"2 tokens, so probs must hold a row .* \[1, 4\]"),
        (Draft(PAIR, probs=ROWS[[0, 1, 1]]), r"2 tokens, so probs must hold a row .* \[3, 4\]"),
        (Draft(PAIR, probs=ROWS[:, 0]), r"probs must hold a row .* \[2\]"),
        (Draft(PAIR, unscaled_probs=ROWS[:1]), "unscaled_probs must hold a row"),
        (Draft(PAIR, uniforms=ROWS[:1, 0]), "uniforms must hold a number"),
        (Draft(PAIR, probs=ROWS.tolist()), "probs must hold a row .* got list"),
        (Draft(PAIR, uniforms=[0.5, 0.5]), "uniforms must hold a number .* got list"),
        (Draft(PAIR, [-1, -1]), r"must draft parents as a vector, .* got list"),
        (Draft(PAIR, torch.tensor([[-1], [-1]])), r"parents as a vector, .* \[2, 1\]"),
        (Draft(PAIR, torch.tensor([-1, -1])), "has drafted a tree, and says drafts_trees = False"),
    ],
)
def test_what_is_no_draft_is_refused_in_words(draft: object, message: str) -> None:
    with pytest.raises(UserError, match=f"Faulty .*{message}"):
        require_draft(draft, "Faulty", False)
    whole = Draft(PAIR, probs=ROWS, unscaled_probs=ROWS, uniforms=ROWS[:, 0])
    for right in (whole, Draft(PAIR[:0], probs=ROWS[:0])):
        require_draft(right, "Faulty", False)
    require_draft(tree(), "Faulty", True)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (ROWS * 2, "token 0 from probs that sum to 2"),
        (torch.cat([ROWS[:1], ROWS[1:] * 0.9]), "token 1 from probs that sum to 0.9"),
        (ROWS.log(), "sum to -5.5"),
        (ROWS * float("nan"), "sum to nan"),
        (
            torch.tensor([[0.25] * 4, [0.6, -0.1, 0.3, 0.2]]),
            "token 1 from probs that go down to -0.1",
        ),
        # a sum in bfloat16 would be 1
        (torch.tensor([[64.0] * 3 + [65.0]] * 2).bfloat16() / 256, "sum to 1.00391"),
    ],
)
def test_probs_that_are_no_distributions_are_refused(probs: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=f"Faulty has drafted .*{message}"):
        require_distributions(Draft(PAIR, probs=probs), "Faulty")
    for right in (ROWS, torch.eye(4)[:2]):
        require_distributions(Draft(PAIR, probs=right), "Faulty")
    require_distributions(Draft(PAIR[:0], probs=ROWS[:0]), "Faulty")
    require_distributions(Draft(PAIR), "Faulty")


@pytest.mark.parametrize(
    ("verdict", "draft", "message"),
    [
        (None, Draft(PAIR), "must return a Verdict, got NoneType"),
        (2, Draft(PAIR), "must return a Verdict, got int"),
        (Verdict((0, 1, 2), 0), Draft(PAIR), r"the nodes \[0, 1, 2\] of a draft of 2 tokens"),
        (Verdict((1,), 0), Draft(PAIR), r"the nodes \[1\]"),
        (Verdict((1, 0), 0), Draft(PAIR), r"the nodes \[1, 0\]"),
        (Verdict((0, 2, 3), 0), tree(), r"the nodes \[0, 2, 3\]"),  # 3 is a sibling of 2
        (Verdict((2, 4), 0), tree(), r"the nodes \[2, 4\]"),  # without its root
        (Verdict((-1,), 0), tree(), r"the nodes \[-1\]"),
        (Verdict((-1,), 0), Draft(PAIR, torch.tensor([-1, -1])), r"the nodes \[-1\]"),
        (Verdict((), 4), Draft(PAIR), "a token from 0 to 3, got 4"),
        (Verdict((), -1), Draft(PAIR), "a token from 0 to 3, got -1"),
    ],
)
def test_what_is_no_verdict_on_a_draft_is_refused_in_words(
    verdict: object, draft: Draft, message: str
) -> None:
    logits = torch.zeros(len(draft) + 1, 4)
    with pytest.raises(UserError, match=f"Faulty .*{message}"):
        require_verdict(verdict, draft, logits, "Faulty")
    require_verdict(Verdict((), 3), draft, logits, "Faulty")
    require_verdict(Verdict((0,), 3), draft, logits, "Faulty")
    require_verdict(Verdict((0, 2, 4), 3), tree(), logits, "Faulty")
