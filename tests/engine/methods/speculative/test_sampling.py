"""Speculative sampling on chains and trees: the exact distribution of what it emits, and
lenience.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import (
    SpeculativeSampling,
    padded_like,
    verify_chain,
)
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    Proposals,
    chain_of,
    continued,
    drafts,
    emitted,
    rows,
    sampled,
    table,
    targets,
)

TREE = [ROOT, ROOT, 0, 0]
P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.05, 0.25], dtype=torch.float64)


def without_replacement(q: Tensor, last: int, siblings: tuple[int, ...]) -> Tensor:
    """q of the next sibling where the ones before it are not drawn again."""
    rest = q[last].clone()
    rest[list(siblings)] = 0.0
    return rest / rest.sum()


def tree_of(q: Tensor) -> Proposals:
    return drafts(
        TREE, lambda last, siblings: without_replacement(q, last, siblings), 3, chain=False
    )


def test_chains_are_emitted_with_exactly_the_targets_probabilities() -> None:
    p, q = TARGET, DRAFTER
    output = emitted(SpeculativeSampling(), chain_of(q, 2), p, sampled())
    torch.testing.assert_close(continued(output, p, 3), targets(p, 3), atol=1e-6, rtol=0)


def test_trees_are_emitted_with_exactly_the_targets_probabilities() -> None:
    p, q = TARGET, DRAFTER
    output = emitted(SpeculativeSampling(), tree_of(q), p, sampled())
    torch.testing.assert_close(continued(output, p, 3), targets(p, 3), atol=1e-6, rtol=0)
    assert any(len(text) == 3 for text in output)  # a whole branch can be accepted


@pytest.mark.slow
def test_independent_siblings_are_lossless_too() -> None:
    p, q = table(11, 4), table(10, 4)
    proposals = drafts([ROOT, ROOT, ROOT], lambda last, _: q[last], 4, chain=False)
    output = emitted(SpeculativeSampling(), proposals, p, sampled())
    torch.testing.assert_close(continued(output, p, 1), targets(p, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("parents", [[ROOT, 0], TREE, [ROOT, ROOT, ROOT, 1]])
def test_drafts_made_with_certainty_are_lossless(parents: list[int]) -> None:
    p = TARGET
    tokens = torch.tensor([2, 0, 1, 2][: len(parents)])
    draft = Draft(tokens, None if parents == [ROOT, 0] else torch.tensor(parents))
    output = emitted(SpeculativeSampling(), iter([(draft, 1.0)]), p, sampled())
    torch.testing.assert_close(continued(output, p, 3), targets(p, 3), atol=1e-6, rtol=0)


def test_the_temperature_standardizes_the_target() -> None:
    p, q = TARGET, DRAFTER
    cool = (p.log() / 0.5).softmax(-1)
    output = emitted(SpeculativeSampling(), chain_of(q, 1), p, sampled(0.5))
    torch.testing.assert_close(continued(output, cool, 2), targets(cool, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [lambda q: chain_of(q, 1), tree_of])
def test_a_wrong_residual_is_noticed(
    make: Callable[[Tensor], Proposals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bild_lab.engine.methods.speculative.sampling.residual", lambda p, q: p)
    p, q = TARGET, DRAFTER
    output = emitted(SpeculativeSampling(), make(q), p, sampled())
    assert (continued(output, p, 1) - targets(p, 1)).abs().max() > 0.02


def test_a_tree_with_one_branch_has_the_distribution_of_a_chain() -> None:
    p, q = TARGET, DRAFTER
    outputs = []
    for chain in (True, False):
        proposals = drafts([ROOT, 0], lambda last, _: q[last], 3, chain)
        outputs.append(emitted(SpeculativeSampling(0.6), proposals, p, sampled()))
    assert outputs[0] == pytest.approx(outputs[1], abs=1e-6)


def literal(p: Tensor, q: Tensor, tokens: list[int], seed: int) -> tuple[int, int]:
    """Algorithm 1 of speculative decoding, one draw after another: how many tokens are accepted,
    and the next one.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(tokens), generator=generator, dtype=p.dtype)
    kept = 0
    while kept < len(tokens) and uniform[kept] < p[kept, tokens[kept]] / q[kept, tokens[kept]]:
        kept += 1
    rest = p[kept] if kept == len(tokens) else (p[kept] - q[kept]).clamp(min=0)
    return kept, int(torch.multinomial(rest / rest.sum(), 1, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chain_is_judged_by_the_requests_own_draws(dtype: torch.dtype) -> None:
    """As many numbers as tokens, then one draw: a text can be repeated whatever else draws."""
    p, q, tokens = torch.stack([P, Q, P, P]).to(dtype), torch.stack([Q, P, Q]).to(dtype), [1, 2, 1]
    found = set()
    for seed in range(20):
        request = Request(
            Source((0,)), Limits(1, 10), Sampling(1.0), torch.Generator().manual_seed(seed)
        )
        verdict = SpeculativeSampling()(Draft(torch.tensor(tokens), probs=q), p.log(), request)
        assert (len(verdict.path), verdict.next_token) == literal(p, q, tokens, seed)
        found.add(len(verdict.path))
    assert found == {0, 1, 2, 3}


def test_a_tree_is_judged_by_the_requests_own_draws() -> None:
    draft = Draft(torch.tensor([1, 2, 0, 3]), torch.tensor(TREE), probs=Q.repeat(4, 1))
    found = set()
    for own in range(10):
        verdicts = []
        for other in range(5):
            torch.manual_seed(other)
            request = Request(
                Source((0,)), Limits(1, 10), Sampling(1.0), torch.Generator().manual_seed(own)
            )
            verdicts.append(SpeculativeSampling()(draft, P.repeat(5, 1).log(), request))
        assert verdicts == verdicts[:1] * 5
        found.add((verdicts[0].path, verdicts[0].next_token))
    assert len(found) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tree_with_one_branch_is_accepted_as_far_as_its_chain(dtype: torch.dtype) -> None:
    p, q, tokens = torch.stack([P, Q, P, P]).to(dtype), torch.stack([Q, P, Q]).to(dtype), [1, 2, 1]
    draft = Draft(torch.tensor(tokens), torch.tensor([ROOT, 0, 1]), probs=q)
    for seed in range(20):
        request = Request(
            Source((0,)), Limits(1, 10), Sampling(1.0), torch.Generator().manual_seed(seed)
        )
        assert (
            len(SpeculativeSampling()(draft, p.log(), request).path)
            == literal(p, q, tokens, seed)[0]
        )


def test_what_neither_model_says_is_never_accepted_in_a_tree() -> None:
    p, q = (torch.tensor([0.0, *rest], dtype=torch.float64) for rest in ((0.5, 0.5), (1.0, 0.0)))
    draft = Draft(torch.tensor([0, 0]), torch.tensor([ROOT, ROOT]), probs=q.repeat(2, 1))
    for _ in range(5):
        assert SpeculativeSampling()(draft, p.repeat(3, 1).log(), sampled()).path == ()


def test_statistics_of_the_drafted_tokens_are_kept_with_the_verdict() -> None:
    draft = Draft(torch.tensor([1, 0]), probs=Q.repeat(2, 1))
    verdict = verify_chain(P.repeat(3, 1), draft.probs, draft, None, gap=torch.tensor([0.25, 0.5]))
    assert verdict.stats == {"gap": (0.25, 0.5)}


def test_a_narrower_drafter_is_padded_and_takes_the_targets_precision() -> None:
    wide = padded_like(P[None], torch.tensor([[0.25, 0.75]]))
    assert wide.dtype == P.dtype and wide.tolist() == [[0.25, 0.75, 0.0, 0.0]]


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
def test_no_token_is_likelier_than_lenience_allows(lenience: float) -> None:
    """A.5: min(p / l, q) of a token is accepted, and the rest of it comes from norm(max(0, p − l
    q)).
    """
    p, q = P.expand(4, 4), Q.expand(4, 4)
    output = emitted(SpeculativeSampling(lenience), chain_of(q, 1, 4), p, sampled())
    actual = continued(output, p, 1)
    accepted = [min(pv / lenience, qv) for pv, qv in zip(P.tolist(), Q.tolist(), strict=True)]
    left = [max(0.0, pv - lenience * qv) for pv, qv in zip(P.tolist(), Q.tolist(), strict=True)]
    expected = [
        a + (1 - sum(accepted)) * rest / sum(left) for a, rest in zip(accepted, left, strict=True)
    ]
    assert actual.tolist() == pytest.approx(expected, abs=1e-6)
    assert (actual <= P / lenience + 1e-6).all()
    assert sum(chance for text, chance in output.items() if len(text) == 2) == pytest.approx(
        sum(accepted), abs=1e-6
    )


@pytest.mark.slow
def test_no_token_of_a_tree_is_likelier_than_lenience_allows() -> None:
    p, q = TARGET, DRAFTER
    output = emitted(SpeculativeSampling(0.3), tree_of(q), p, sampled())
    first = continued(output, p, 1)
    assert (first <= p[0] / 0.3 + 1e-6).all()
    assert (first - p[0]).abs().max() > 0.01  # no longer the target's


def test_greedy_lenience_keeps_tokens_near_the_targets_best() -> None:
    logits = rows([0.6, 0.31, 0.09], [0.6, 0.31, 0.09], [0.6, 0.29, 0.11], [0.1, 0.1, 0.8])
    logits += torch.tensor([[0.0], [3.0], [-2.0], [0.0]])  # probabilities do not change
    draft = Draft(torch.tensor([0, 1, 1]))
    assert SpeculativeSampling(0.5)(draft, logits, GREEDY) == Verdict((0, 1), 0)
    assert SpeculativeSampling(0.4)(draft, logits, GREEDY) == Verdict((0, 1, 2), 2)
    assert SpeculativeSampling(1.0)(draft, logits, GREEDY) == Verdict((0,), 0)
    # which without lenience is the first one's
    tie = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    assert SpeculativeSampling(1.0)(Draft(torch.tensor([1])), tie, GREEDY) == Verdict((), 0)


def test_greedy_lenience_is_accepted_at_its_bound() -> None:
    logits = torch.tensor([[math.log(2.0), 0.0], [0.0, 1.0]], dtype=torch.float64)
    draft = Draft(torch.tensor([1]))
    assert SpeculativeSampling(0.5)(draft, logits, GREEDY).path == (0,)
    assert SpeculativeSampling(0.5001)(draft, logits, GREEDY).path == ()


def test_greedy_lenience_looks_at_the_logits_before_top_k() -> None:
    request = Request(Source((0,)), Limits(1, 10), Sampling(top_k=1))
    logits = rows([0.5, 0.4, 0.1], [0.1, 0.1, 0.8])
    assert SpeculativeSampling(0.7)(Draft(torch.tensor([1])), logits, request) == Verdict((0,), 2)


def test_greedy_lenience_takes_the_most_likely_sibling() -> None:
    # root -> {2, 1, 0}; 1 -> {2, 0}
    draft = Draft(torch.tensor([2, 1, 0, 2, 0]), torch.tensor([ROOT, ROOT, ROOT, 1, 1]))
    near = rows([0.2, 0.45, 0.35], *[[0.3, 0.3, 0.4]] * 5)
    assert SpeculativeSampling(0.5)(draft, near, GREEDY) == Verdict((1, 3), 2)
    far = rows([0.05, 0.05, 0.9], *[[0.3, 0.3, 0.4]] * 5)
    assert SpeculativeSampling(0.5)(draft, far, GREEDY) == Verdict((0,), 2)


def test_greedy_trees_without_lenience_are_exact_match() -> None:
    draft = Draft(torch.tensor([1, 0, 2, 3]), torch.tensor([ROOT, ROOT, 1, 1]))
    logits = torch.nn.functional.one_hot(torch.tensor([0, 3, 3, 1, 2]), 4).double()
    assert (
        SpeculativeSampling()(draft, logits, GREEDY)
        == ExactMatch()(draft, logits, GREEDY)
        == Verdict((1, 3), 2)
    )
