"""Relaxed acceptance: which tokens are near enough, the distribution of what is emitted, and where a span is."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import RelaxedAcceptance
from bild_lab.engine.acceptance.relaxed import Span, marked_span
from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.session import Scores
from bild_lab.errors import UserError
from tests.engine.acceptance.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    Dice,
    chain_of,
    continued,
    drafts,
    emitted,
    rows,
    sampled,
)
from tests.policies import in_memory
from tests.tiny import TINY

ROW = [0.4, 0.3, 0.2, 0.1]


def near(probs: list[float], token: int, top_k: int, ratio: float) -> bool:
    """The rule's words, token by token."""
    return sum(p >= probs[token] for p in probs) <= top_k and probs[token] >= ratio * max(probs)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.2, 0.6, 0.76])
def test_a_token_is_accepted_if_it_is_among_the_most_likely_and_near_the_best(top_k: int, ratio: float) -> None:
    logits = rows(ROW, [0.0, 0.0, 0.0, 1.0])
    for token in range(4):
        verdict = RelaxedAcceptance(top_k, ratio)(Draft(torch.tensor([token])), logits, GREEDY)
        kept = near(ROW, token, top_k, ratio)
        assert (verdict.path, verdict.next_token) == (((0,), 3) if kept else ((), 0)), token
        assert verdict.stats["forgiven"] == (int(kept and token != 0),)


def test_a_token_at_the_ratio_is_accepted() -> None:
    logits = rows([0.5, 0.25, 0.25], [0.0, 1.0, 0.0])
    assert RelaxedAcceptance(3, 0.5)(Draft(torch.tensor([1])), logits, GREEDY).path == (0,)
    assert RelaxedAcceptance(3, math.nextafter(0.5, 1))(Draft(torch.tensor([1])), logits, GREEDY).path == ()


def test_of_equal_tokens_none_is_the_most_likely_but_the_targets_own_is_accepted() -> None:
    logits = rows([0.5, 0.5], [1.0, 0.0])
    assert RelaxedAcceptance(1, 1.0)(Draft(torch.tensor([1])), logits, GREEDY).path == ()
    assert RelaxedAcceptance(1, 1.0)(Draft(torch.tensor([0])), logits, GREEDY).path == (0,)


@pytest.mark.parametrize(("top_k", "ratio"), [(1, 1.0), (2, 0.3), (3, 0.05)])
def test_the_emitted_token_has_exactly_the_distribution_of_the_rule(top_k: int, ratio: float) -> None:
    """Near tokens are accepted if drafted, the others with min(1, p / q); then comes what p has more of."""
    p, q = TARGET[0].tolist(), DRAFTER[0].tolist()
    kept = [b if near(p, v, top_k, ratio) else min(a, b) for v, (a, b) in enumerate(zip(p, q, strict=True))]
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    expected = [stays + (1 - sum(kept)) * more / sum(rest) for stays, more in zip(kept, rest, strict=True)]
    output = continued(emitted(RelaxedAcceptance(top_k, ratio), chain_of(DRAFTER, 1), TARGET, sampled()), TARGET, 1)
    assert output.tolist() == pytest.approx(expected, abs=1e-6)
    assert sum(expected) == pytest.approx(1)


def test_in_a_tree_a_token_that_lossless_decoding_keeps_comes_before_one_that_is_forgiven() -> None:
    """Two siblings drawn without replacement, for every pattern of coins: the second is tried against the residual."""
    p, q, rule = DRAFTER[0], TARGET[0], RelaxedAcceptance(1, 1.0)  # p has more of one token alone
    best = int(p.argmax())

    def without(_: int, siblings: tuple[int, ...]) -> Tensor:
        left = q.clone()
        left[list(siblings)] = 0
        return left / left.sum()

    rest = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    emitted_tokens = set()
    for draft, _ in drafts([ROOT, ROOT], without, 3, chain=False):
        first, other = draft.token_list
        chances = [min(1.0, float(p[first] / q[first])), min(1.0, float(rest[other] / draft.probs[1][other]))]
        for keeps in product((True, False), repeat=2):
            if any(
                chance in (0.0, 1.0) and kept == (chance == 0.0) for chance, kept in zip(chances, keeps, strict=True)
            ):
                continue  # never happens
            dice = Dice(torch.tensor([0.0 if kept else 1 - 1e-12 for kept in keeps], dtype=torch.float64))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "rand", dice.rand)
                patch.setattr(torch, "multinomial", dice.multinomial)
                verdict = rule(draft, torch.stack([p, *DRAFTER[[first, other]]]).log(), sampled())
            node = (
                0 if keeps[0] else 1 if keeps[1] else draft.token_list.index(best) if best in (first, other) else None
            )
            assert verdict.path == (() if node is None else (node,))
            emitted_tokens.add(node)
            if node is None:
                left = (rest - draft.probs[1]).clamp(min=0)
                torch.testing.assert_close(dice.drawn_from[0], left / left.sum() if left.sum() > 0 else rest)
    assert emitted_tokens == {0, 1, None}


def test_greedily_a_tree_keeps_the_targets_choice_else_the_most_likely_near_it() -> None:
    parents = torch.tensor([ROOT, ROOT, 0, 1])
    logits = rows(ROW, [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7], ROW, ROW)
    both = Draft(torch.tensor([2, 1, 2, 3]), parents)
    verdict = RelaxedAcceptance(3, 0.5)(both, logits, GREEDY)
    assert (verdict.path, verdict.next_token, verdict.stats["forgiven"]) == ((1, 3), 0, (0, 1, 0, 0))
    own = Draft(torch.tensor([1, 0, 2, 3]), parents)
    assert RelaxedAcceptance(3, 0.5)(own, logits, GREEDY).path == (1, 3)


SPAN = Span(start=7, end=8)


@pytest.mark.parametrize(
    ("tokens", "inside"),
    [([], False), ([1, 2], False), ([7], True), ([7, 1], True), ([7, 1, 8], False), ([8, 7], True), ([7, 8, 7], True)],
)
def test_a_span_reaches_from_its_start_to_its_end(tokens: list[int], inside: bool) -> None:
    assert SPAN.inside(tokens) == inside


def test_every_branch_has_a_span_of_its_own() -> None:
    #   root -> 0: start, 1: plain; 0 -> 2: plain, 3: end; 3 -> 4: plain
    draft = Draft(torch.tensor([7, 1, 2, 8, 3]), torch.tensor([ROOT, ROOT, 0, 0, 3]))
    assert SPAN.rows([1], draft) == [False, True, False, True, False, False]
    assert SPAN.rows([7, 1], draft) == [True, True, True, True, False, False]


def test_tokens_are_relaxed_inside_the_span_alone() -> None:
    rule = RelaxedAcceptance(3, 0.3, SPAN)
    logits = torch.full((4, 9), -9.0, dtype=torch.float64)
    logits[:, 1], logits[:, 2], logits[2, 8], logits[2, 7] = 1.0, 0.5, 1.2, 1.3
    draft = Draft(torch.tensor([2, 2, 8]))  # near, near, near and the end of the span

    def verdict(tokens: list[int]) -> Verdict:
        return rule.in_round(tokens, Scores(logits))(draft, logits, GREEDY)

    assert verdict([5]).path == () and verdict([7, 8]).path == ()
    assert verdict([7]).path == (0, 1, 2)  # the token that ends the span still belongs to it
    closing = Draft(torch.tensor([2, 8, 2]))
    logits[1, 8] = 0.9
    assert rule.in_round([7], Scores(logits))(closing, logits, GREEDY).path == (0, 1)


def test_markers_are_pieces_of_the_vocabulary() -> None:
    model = in_memory(TINY["llama"](0, layers=1))
    pieces = model.checkpoint.tokenizer.convert_ids_to_tokens([5, 9])
    assert marked_span(model, *pieces) == Span(5, 9)
    assert marked_span(model, None, None) is None
    for start, end in ((pieces[0], None), (None, pieces[1]), ("no such piece", pieces[1]), (5, 9)):
        with pytest.raises(UserError, match=r"policy.span_(start|end)"):
            marked_span(model, start, end)
