"""Speculative cascades: each deferral rule against its formula, and the exact distribution of what
is emitted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft, Verdict
from bild_lab.engine.methods.speculative.cascades import DEFERRALS, SpeculativeCascade, cascaded
from bild_lab.engine.request import Request
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    continued,
    drafts,
    emitted,
    sampled,
)

RULES = tuple(DEFERRALS)
Formula = Callable[[np.ndarray, np.ndarray, int, float], bool]
FORMULAS: dict[str, Formula] = {
    "chow": lambda p, q, v, a: max(q) < 1 - a,
    "diff": lambda p, q, v, a: max(q) < max(p) - a,
    "opt": lambda p, q, v, a: (
        max(q) < max(p) - a * sum(max(0.0, p[u] - q[u]) for u in range(len(p)))
    ),
    "token_v1": lambda p, q, v, a: q[v] < max(p) - a,
    "token_v2": lambda p, q, v, a: p[v] < max(p) - a,
    "token_v3": lambda p, q, v, a: p[v] < (1 - a) * max(p),
}


def mixture(formula: Formula, p: np.ndarray, q: np.ndarray, alpha: float) -> list[float]:
    """π, token by token."""
    deferred = [formula(p, q, v, alpha) for v in range(len(p))]
    lost = sum(q[u] for u in range(len(q)) if deferred[u])
    return [q[v] * (1 - deferred[v]) + p[v] * lost for v in range(len(p))]


def random_probs(seed: int, rows: int = 40, vocabulary: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(rows, vocabulary, generator=generator).double()).softmax(-1)


@pytest.mark.parametrize("rule", RULES)
def test_rules_and_their_mixture_follow_the_formulas(rule: str) -> None:
    p, q = random_probs(0), random_probs(1)
    outcomes = set()
    for alpha in (0.0, 0.1, 0.3, 0.6):
        deferred = DEFERRALS[rule](p, q, alpha)
        actual = cascaded(p, q, deferred)
        expected = [
            mixture(FORMULAS[rule], p[i].numpy(), q[i].numpy(), alpha) for i in range(len(p))
        ]
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(actual.sum(-1), torch.ones(len(p), dtype=torch.float64))
        outcomes |= set(deferred.flatten().tolist())
    assert outcomes == {True, False}


# where both sides are equal, in numbers that floats hold exactly: p, q, α
EVEN, LESS = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
EQUAL = {
    "chow": (EVEN, EVEN, 0.5),
    "diff": (EVEN, LESS, 0.0),
    "opt": (EVEN, LESS, 0.0),
    "token_v1": (EVEN, EVEN, 0.0),
    "token_v2": (EVEN, EVEN, 0.0),
    "token_v3": (EVEN, EVEN, 0.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_token_at_the_bound_is_not_deferred(rule: str) -> None:
    p, q, alpha = EQUAL[rule]
    assert not DEFERRALS[rule](torch.tensor([p]), torch.tensor([q]), alpha)[0, 0]


def cascade_output(rule: str, alpha: float, request: Request, q: Tensor = DRAFTER) -> Tensor:
    """The distribution of the first token of one drafted from q, whose own probabilities q are
    too.
    """
    temperature = request.sampling.temperature
    standardized = (q.log() / temperature).softmax(-1)
    proposals = [
        (Draft(draft.tokens, probs=draft.probs, unscaled_probs=q[:1]), chance)
        for draft, chance in drafts([ROOT], lambda last, _: standardized[last], 3, chain=True)
    ]
    output = emitted(SpeculativeCascade(rule, alpha), iter(proposals), TARGET, request)
    return continued(output, TARGET, 1)


@pytest.mark.parametrize("alpha", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_token_has_exactly_the_distribution_of_the_mixture(
    rule: str, alpha: float
) -> None:
    expected = mixture(FORMULAS[rule], TARGET[0].numpy(), DRAFTER[0].numpy(), alpha)
    assert cascade_output(rule, alpha, sampled()).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_rule_looks_at_the_models_own_distributions_at_any_temperature() -> None:
    """At temperature 0.5 both models' best tokens are more confident than at 1, and the rule would
    decide otherwise.
    """
    p, q = TARGET[0], DRAFTER[0]
    cool_p, cool_q = (p.log() / 0.5).softmax(-1), (q.log() / 0.5).softmax(-1)
    alpha = 1 - float(q.max() + cool_q.max()) / 2  # between the two
    chow = DEFERRALS["chow"]
    assert not bool(chow(cool_p[None], cool_q[None], alpha)) and bool(chow(p[None], q[None], alpha))
    torch.testing.assert_close(
        cascade_output("chow", alpha, sampled(0.5)), cool_p, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("rule", "kept", "deferred"),  # the alphas at which the drafter's token is kept, and deferred
    [
        ("chow", 0.5, 0.4),  # 0.55 is sure enough
        ("diff", 0.2, 0.1),  # the target is ahead by 0.15
        ("opt", 0.4, 0.2),  # the total variation is 0.5
        ("token_v1", 0.2, 0.1),
        ("token_v2", 0.6, 0.4),  # the target gives the drafter's token 0.2
        ("token_v3", 0.8, 0.6),
    ],
)
def test_greedily_the_drafters_best_token_is_accepted_unless_it_is_deferred(
    rule: str, kept: float, deferred: float
) -> None:
    logits = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    draft = Draft(
        torch.tensor([0]), unscaled_probs=torch.tensor([[0.55, 0.2, 0.25]], dtype=torch.float64)
    )
    assert SpeculativeCascade(rule, kept)(draft, logits, GREEDY) == Verdict((0,), 2)
    assert SpeculativeCascade(rule, deferred)(draft, logits, GREEDY) == Verdict((), 1)


def test_a_drafter_with_a_smaller_vocabulary_gives_the_rest_no_probability() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    draft = Draft(torch.tensor([0]), unscaled_probs=torch.tensor([[0.6, 0.4]], dtype=torch.float64))
    assert SpeculativeCascade("opt", 0.1)(draft, logits, GREEDY) == Verdict((), 2)
