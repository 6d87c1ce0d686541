"""Rejection sampling of drafts: as lossless as speculative sampling, and less of use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.request import Request
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    chain_of,
    continued,
    drafts,
    emitted,
    sampled,
    targets,
)


def test_chains_are_emitted_with_exactly_the_targets_probabilities() -> None:
    output = emitted(RejectionSampling(), chain_of(DRAFTER, 2), TARGET, sampled())
    torch.testing.assert_close(continued(output, TARGET, 3), targets(TARGET, 3), atol=1e-6, rtol=0)


def test_one_token_in_m_is_accepted() -> None:
    """A.2: M = max p / q; speculative sampling accepts Σ min(p, q) of them."""
    p, q = TARGET[0].tolist(), DRAFTER[0].tolist()
    accepted = {}
    for rule in (RejectionSampling(), SpeculativeSampling()):
        output = emitted(rule, chain_of(DRAFTER, 1), TARGET, sampled())
        accepted[type(rule)] = sum(chance for text, chance in output.items() if len(text) == 2)
    assert accepted[RejectionSampling] == pytest.approx(
        1 / max(a / b for a, b in zip(p, q, strict=True)), abs=1e-6
    )
    assert accepted[SpeculativeSampling] == pytest.approx(sum(map(min, p, q)), abs=1e-6)
    assert accepted[RejectionSampling] < accepted[SpeculativeSampling] - 0.1


def test_a_drafter_that_rules_tokens_out_is_never_accepted() -> None:
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(3, 3)
    output = emitted(
        RejectionSampling(), drafts([-1], lambda last, _: q[last], 3, chain=True), TARGET, sampled()
    )
    assert {len(text) for text in output} == {1}
    torch.testing.assert_close(continued(output, TARGET, 1), targets(TARGET, 1), atol=1e-6, rtol=0)


def test_a_drafter_that_is_certain_of_the_only_possible_token_is_accepted() -> None:
    logits = torch.tensor([[0.0, -1e9, -1e9], [0.0, -1e9, -1e9]], dtype=torch.float64)
    assert RejectionSampling()(Draft(torch.tensor([0])), logits, sampled()) == Verdict((0,), 0)


def test_greedy_rejection_sampling_is_exact_match() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 0, 1]), 3).double()
    for tokens in ([1, 2, 0], [1, 2, 1], [1, 0, 0], [0, 2, 0]):
        draft = Draft(torch.tensor(tokens))
        assert RejectionSampling()(draft, logits, GREEDY) == ExactMatch()(draft, logits, GREEDY)


def test_a_request_with_a_generator_draws_from_it_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draft = Draft(torch.tensor([3, 4, 5, 6]))

    def verdicts(request: Request) -> list[Verdict]:
        return [RejectionSampling()(draft, logits, request) for _ in range(8)]

    before = torch.get_rng_state()
    first, second = verdicts(sampled()), verdicts(sampled())  # each with a generator of this seed
    assert first == second and len(set(map(repr, first))) > 1
    verdicts(GREEDY)  # its draws are certain
    assert torch.equal(torch.get_rng_state(), before)
    verdicts(replace(sampled(), generator=None))
    assert not torch.equal(torch.get_rng_state(), before)
