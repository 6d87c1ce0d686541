"""Cactus and MARS against their formulas, written naively."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.speculative.cascades import Cactus
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import MarginAcceptance
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    Dice,
    chain_of,
    drafts,
    emitted,
    outcomes,
    rows,
    rows_after,
    sampled,
)


def raised(p: list[float], token: int, delta: float) -> list[float]:
    """h of Theorem 2 and Corollary 5, one number at a time."""
    own = min(p[token] + math.sqrt(2 * delta * p[token] * (1 - p[token])), 1.0)
    return [
        own if other == token else p[other] * (1 - own) / (1 - p[token]) for other in range(len(p))
    ]


@pytest.mark.parametrize("delta", [0.0, 0.02, 0.3, 5.0])
def test_cactus_accepts_by_h_over_q_and_else_draws_from_what_h_has_more(delta: float) -> None:
    for token in range(3):
        draft = Draft(torch.tensor([token]), probs=DRAFTER[:1])
        h, q = raised(TARGET[0].tolist(), token, delta), DRAFTER[0].tolist()
        accepted = min(1.0, h[token] / q[token])
        rest = [max(0.0, mine - theirs) for mine, theirs in zip(h, q, strict=True)]
        found = outcomes(Cactus(delta), draft, rows_after(draft, TARGET), sampled())
        for other in range(3):
            share = rest[other] / sum(rest) if sum(rest) else 0.0
            seen = sum(chance for text, chance in found.items() if text == (other,))
            assert seen == pytest.approx((1 - accepted) * share, abs=1e-6)
        assert sum(chance for text, chance in found.items() if len(text) == 2) == pytest.approx(
            accepted, abs=1e-6
        )
        if 0 < h[token] <= 0.5:  # Corollary 6
            assert (
                sum(
                    mine * math.log(mine / p) for mine, p in zip(h, TARGET[0].tolist(), strict=True)
                )
                <= delta + 1e-9
            )


def test_cactus_without_divergence_is_speculative_sampling_and_with_it_accepts_more() -> None:
    request = sampled()
    plain, none, more = (
        emitted(rule, chain_of(DRAFTER, 2), TARGET, request)
        for rule in (SpeculativeSampling(), Cactus(0), Cactus(0.3))
    )
    assert none == pytest.approx(plain, abs=1e-6)
    whole = [sum(chance for text, chance in one.items() if len(text) == 3) for one in (plain, more)]
    assert whole[1] > whole[0] + 0.05


def test_greedily_cactus_accepts_what_is_most_likely_of_h() -> None:
    logits = rows([0.5, 0.4, 0.1], [0.9, 0.05, 0.05], [0.4, 0.3, 0.3])
    draft = Draft(torch.tensor([1, 2]))
    assert raised([0.5, 0.4, 0.1], 1, 0.01)[1] > raised([0.5, 0.4, 0.1], 1, 0.01)[0]
    assert (
        Cactus(0.01)(draft, logits, GREEDY).path,
        Cactus(0.001)(draft, logits, GREEDY).path,
    ) == ((0,), ())
    assert (
        Cactus(5)(draft, logits, GREEDY).path == (0, 1)
        and Cactus(0.01)(draft, logits, GREEDY).next_token == 0
    )
    assert Cactus(0)(draft, logits, GREEDY) == ExactMatch()(draft, logits, GREEDY)


def test_mars_accepts_the_second_token_where_the_logits_are_close() -> None:
    logits = torch.tensor([[10.0, 9.5, 9.4], [0.0, 2.0, 1.0]])
    paths = {
        (token, ratio): MarginAcceptance(ratio)(Draft(torch.tensor([token])), logits, GREEDY).path
        for token in range(3)
        for ratio in (0.9, 0.96)
    }
    # never the third
    assert {key for key, path in paths.items() if path} == {(0, 0.9), (0, 0.96), (1, 0.9)}
    # −10.5 / −10 says nothing
    below = MarginAcceptance(0.9)(Draft(torch.tensor([1])), logits - 20, GREEDY)
    assert (below.path, below.next_token) == ((), 0)


def test_sampled_mars_declares_what_it_does() -> None:
    rule, draft = MarginAcceptance(0.9), Draft(torch.tensor([1]), probs=DRAFTER[:1])
    logits = rows_after(draft, TARGET) + 9
    output = rule.output_distribution(draft, logits, sampled(), DRAFTER[:1])[0]
    found = torch.zeros(3, dtype=torch.float64)
    for one, chance in chain_of(DRAFTER, 1):
        for text, probability in outcomes(
            rule, one, rows_after(one, TARGET) + 9, sampled()
        ).items():
            found[text[0]] += chance * probability
    torch.testing.assert_close(output, found, atol=1e-6, rtol=0)
    assert not torch.allclose(output, TARGET[0], atol=1e-3)


def test_in_a_tree_a_token_that_lossless_decoding_keeps_comes_before_one_that_is_forgiven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two siblings drawn without replacement, for every pattern of coins: the second is tried
    against the residual.
    """
    p, q, rule = DRAFTER[0], TARGET[0], MarginAcceptance(0.1)  # p has more of one token alone
    near, rest = p.topk(2).indices.tolist(), (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()

    def without(_: int, siblings: tuple[int, ...]) -> Tensor:
        left = q.clone()
        left[list(siblings)] = 0
        return left / left.sum()

    seen = set()
    for draft, _ in drafts([ROOT, ROOT], without, 3, chain=False):
        first, other = draft.token_list
        chances = [
            min(1.0, float(p[first] / q[first])),
            min(1.0, float(rest[other] / draft.probs[1][other])),
        ]
        # that can fall so
        coins = [[kept for kept in (True, False) if chance != 1.0 - kept] for chance in chances]
        for keeps in product(*coins):
            dice = Dice(
                torch.tensor([0.0 if kept else 1 - 1e-12 for kept in keeps], dtype=torch.float64)
            )
            monkeypatch.setattr(torch, "rand", dice.rand)
            monkeypatch.setattr(torch, "multinomial", dice.multinomial)
            verdict = rule(draft, torch.stack([p, *DRAFTER[[first, other]]]).log() + 9, sampled())
            forgiven = max(
                (one for one in (first, other) if one in near),
                key=lambda one: float(p[one]),
                default=None,
            )
            node = 0 if keeps[0] else 1 if keeps[1] else draft.token_list.index(forgiven)
            assert verdict.path == (node,) and verdict.stats["forgiven"][node] == (not any(keeps))
            seen.add((node, any(keeps)))
    assert len(seen) == 4


def test_of_several_that_are_forgiven_the_most_likely_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.tensor([[0.55, 0.45, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    siblings = Draft(torch.tensor([1, 0]), torch.tensor([ROOT, ROOT]), probs=q)
    row = [0.5, 0.4, 0.1]
    dice = Dice(torch.tensor([1 - 1e-12, 1 - 1e-12], dtype=torch.float64))  # neither is kept
    monkeypatch.setattr(torch, "rand", dice.rand)
    verdict = MarginAcceptance(0.1)(siblings, rows(row, row, row).double() + 9, sampled())
    assert (verdict.path, verdict.stats["forgiven"]) == ((1,), (0, 1))


def test_greedily_a_tree_keeps_the_targets_choice_else_the_close_second() -> None:
    parents = torch.tensor([ROOT, ROOT, 0, 1])
    row, last = [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]
    logits = rows(row, [0.1, 0.1, 0.7, 0.1], last, row, row) + 9
    verdict = MarginAcceptance(0.9)(Draft(torch.tensor([2, 1, 2, 3]), parents), logits, GREEDY)
    assert (verdict.path, verdict.next_token, verdict.stats["forgiven"]) == (
        (1, 3),
        0,
        (0, 1, 0, 0),
    )
    assert MarginAcceptance(0.9)(
        Draft(torch.tensor([1, 0, 2, 3]), parents), logits, GREEDY
    ).path == (1, 3)
