"""Truncation: the distribution over the tokens that stay, and the rules that it is the control
of.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import ROOT, Draft
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import (
    TruncationSampling,
    TypicalAcceptance,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.sampling import Sampling
from bild_lab.lab.config.compose import compose_policy, resolved_policy
from bild_lab.lab.point.build import build
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    chain_of,
    continued,
    drafts,
    emitted,
    outcomes,
    sampled,
)

HOT = Sampling(temperature=1.0)
NOTHING = Draft(torch.empty(0, dtype=torch.long))


def random_rows(count: int = 30, vocabulary: int = 6) -> Tensor:
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(4)).double()
    return (1.5 * logits).softmax(-1)


def stays(p: list[float], token: int, bars: dict[str, float]) -> bool:
    """The conditions, term by term."""
    entropy = -sum(each * math.log(each) for each in p)
    conditions = {
        "epsilon": lambda: p[token] > min(bars["epsilon"], bars["delta"] * math.exp(-entropy)),
        "ratio": lambda: p[token] >= bars["ratio"] * max(p),
        "top_k": lambda: sum(each >= p[token] for each in p) <= bars["top_k"],
        "rollback": lambda: -math.log(p[token]) <= bars["rollback"],
    }
    return p[token] == max(p) or all(meets() for name, meets in conditions.items() if name in bars)


@pytest.mark.parametrize(
    "bars",
    [
        {"epsilon": 0.2, "delta": 0.8},
        {"ratio": 0.3},
        {"top_k": 2},
        {"rollback": 1.7},
        {"rollback": 0.1},
        {"ratio": 0.2, "top_k": 4, "rollback": 2.0},
        {"epsilon": 0.2, "delta": 0.8, "ratio": 0.05, "top_k": 6},
    ],
)
def test_tokens_that_meet_every_bar_share_the_probability(bars: dict[str, float]) -> None:
    rule, outcomes_ = TruncationSampling(**bars), set()
    for p in random_rows():
        row = p.tolist()
        kept = [stays(row, token, bars) for token in range(len(row))]
        total = sum(share for share, stays in zip(row, kept, strict=True) if stays)
        expected = [share / total * stays for share, stays in zip(row, kept, strict=True)]
        assert rule.probs(p[None].log(), HOT)[0].tolist() == pytest.approx(expected, abs=1e-12)
        outcomes_ |= {*kept}
    assert outcomes_ == {True, False}


RULES: dict[str, tuple[Acceptance, dict[str, float]]] = {
    "typical": (TypicalAcceptance(0.15, 0.6), {"epsilon": 0.15, "delta": 0.6}),
    "lenience": (SpeculativeSampling(0.25), {"ratio": 0.25}),
    "bild": (Rollback(1.7), {"rollback": 1.7}),
}


@pytest.mark.parametrize("name", RULES)
def test_the_tokens_that_stay_are_those_that_the_rule_accepts(name: str) -> None:
    """Drafted greedily, so that the rules decide by the target's distribution alone."""
    rule, bars = RULES[name]
    control = TruncationSampling(**bars)
    for p in random_rows():
        logits = torch.stack([p, p]).log()
        for token in range(len(p)):
            accepted = rule(Draft(torch.tensor([token])), logits, GREEDY).path == (0,)
            assert accepted == bool(control.probs(logits, HOT)[0, token] > 0), (name, p, token)


@pytest.mark.parametrize("bars", [*(bars for _, bars in RULES.values()), {"top_k": 2}])
def test_a_bar_of_the_policy_is_the_only_one(bars: dict[str, float]) -> None:
    """Fault: with the bar of another rule the policy kept that of typical acceptance too, so that
    the control of BiLD at 5 nats left out tokens that BiLD accepts.
    """
    acceptance = resolved_policy(compose_policy("truncation", bars))["decoder"]["acceptance"]
    assert vars(build(acceptance, {})) == vars(TruncationSampling(**bars))


@pytest.mark.parametrize("bars", [{"ratio": 0.5}, {"top_k": 2}])
def test_a_drafter_changes_no_distribution(bars: dict[str, float]) -> None:
    rule = TruncationSampling(**bars)
    alone = outcomes(rule, NOTHING, TARGET[:1].log(), sampled())
    expected = rule.probs(TARGET.log(), HOT)
    assert [alone[(token,)] for token in range(3)] == pytest.approx(expected[0].tolist())
    assert not torch.allclose(expected[0], TARGET[0], atol=0.01)
    chain = emitted(rule, chain_of(DRAFTER, 2), TARGET, sampled())
    tree = emitted(
        rule, drafts([ROOT, 0], lambda last, _: DRAFTER[last], 3, chain=False), TARGET, sampled()
    )
    for output in (chain, tree):
        torch.testing.assert_close(
            continued(output, expected, 2), expected[0][:, None] * expected, atol=1e-6, rtol=0
        )


def test_a_token_at_its_bar_stays_but_for_typical_acceptances() -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    logits = p.log()
    found = [float(each) for each in logits.softmax(-1)[0]]

    def kept(**bars: float) -> list[bool]:
        return (TruncationSampling(**bars).probs(logits, HOT)[0] > 0).tolist()

    assert kept(ratio=found[1] / found[0]) == [True, True, False, False]
    assert kept(rollback=-float(logits.log_softmax(-1)[0, 1])) == [True, True, False, False]
    assert kept(epsilon=found[1], delta=1.0) == [True, False, False, False]


def test_bilds_distance_is_taken_at_temperature_1_and_the_others_where_tokens_are_drawn() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    hot = Sampling(temperature=3.0)
    assert (TruncationSampling(rollback=1.5).probs(p.log(), hot)[0] > 0).tolist() == [
        True,
        True,
        False,
    ]
    assert (TruncationSampling(ratio=0.4).probs(p.log(), hot)[0] > 0).tolist() == [True, True, True]
    assert (TruncationSampling(ratio=0.4).probs(p.log(), HOT)[0] > 0).tolist() == [
        True,
        True,
        False,
    ]


def test_greedily_the_text_is_the_targets_own() -> None:
    rule, logits = (
        TruncationSampling(ratio=0.1),
        torch.tensor([[0.5, 0.4, 0.1], [0.2, 0.7, 0.1]]).double().log(),
    )
    assert rule.lossless(Sampling()) and not rule.lossless(HOT)
    assert rule(Draft(torch.tensor([1])), logits, GREEDY).path == ()
    verdict = rule(Draft(torch.tensor([0])), logits, GREEDY)
    assert (verdict.path, verdict.next_token) == ((0,), 1)
