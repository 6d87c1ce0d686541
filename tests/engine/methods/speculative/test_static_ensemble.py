"""The static ensemble: the distribution of what it emits is the mixture's, and its acceptance 1 − w
TV(p, q).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.cascades import StaticEnsemble
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.engine.lossless.toy import TableModel
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    TARGET,
    chain_of,
    continued,
    emitted,
    sampled,
)

WEIGHTS = (0.0, 0.3, 0.8, 1.0)


def distance(p: Tensor, q: Tensor) -> float:
    """The total variation, over the tokens that p has more of."""
    return sum(max(0.0, float(a) - float(b)) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_emitted_token_has_exactly_the_distribution_of_the_mixture(weight: float) -> None:
    output = continued(
        emitted(StaticEnsemble(weight), chain_of(DRAFTER, 1), TARGET, sampled()), TARGET, 1
    )
    expected = [
        weight * float(p) + (1 - weight) * float(q)
        for p, q in zip(TARGET[0], DRAFTER[0], strict=True)
    ]
    assert output.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_longer_draft_has_the_distribution_of_the_mixture_too() -> None:
    """Both drafted tokens are the mixture's; the one after them is the target's."""
    output = continued(
        emitted(StaticEnsemble(0.4), chain_of(DRAFTER, 2), TARGET, sampled()), TARGET, 1
    )
    torch.testing.assert_close(output, 0.4 * TARGET[0] + 0.6 * DRAFTER[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_chance_that_a_token_is_accepted_is_one_minus_the_weighted_distance(
    weight: float,
) -> None:
    """Read off the rule: an accepted token is followed by the target's own, so two tokens are
    emitted.
    """
    output = emitted(StaticEnsemble(weight), chain_of(DRAFTER, 1), TARGET, sampled())
    accepted = sum(chance for text, chance in output.items() if len(text) == 2)
    assert accepted == pytest.approx(1 - weight * distance(TARGET[0], DRAFTER[0]), abs=1e-6)


def test_the_expected_acceptance_is_the_measured_one() -> None:
    drafter, rule = ModelDrafter(TableModel(DRAFTER), 3, keeps_probs=True), StaticEnsemble(0.7)
    request = Request(
        Source((0,)), Limits(1, 600), Sampling(temperature=1.0), torch.Generator().manual_seed(1)
    )
    trace = Trace()
    DraftThenVerify(TableModel(TARGET), drafter, rule).decode(request, trace)
    expected, accepted = 0.0, 0
    for one in trace.rounds:
        judged = min(one.accepted + 1, len(one.drafted))
        expected += sum(one.stats["expected_acceptance"][:judged])
        accepted += one.accepted
        for last, value in zip(one.drafted, one.stats["expected_acceptance"][1:], strict=False):
            assert value == pytest.approx(1 - 0.7 * distance(TARGET[last], DRAFTER[last]))
    # four deviations, and more
    assert accepted == pytest.approx(expected, abs=4 * math.sqrt(expected))
    assert (
        0.5 < accepted / sum(min(one.accepted + 1, len(one.drafted)) for one in trace.rounds) < 0.95
    )


def test_greedily_the_text_is_the_ensembles() -> None:
    """p says 1, q says 0: which is likelier in the mixture depends on the weight."""
    logits = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    draft = Draft(
        torch.tensor([0]), unscaled_probs=torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    )
    # 0.2 w + 0.6 (1 − w) is larger than 0.7 w + 0.3 (1 − w) for w < 0.375
    assert StaticEnsemble(0.37)(draft, logits, GREEDY) == Verdict((0,), 2)
    assert StaticEnsemble(0.38)(draft, logits, GREEDY) == Verdict((), 1)


def test_at_weight_1_even_a_tie_of_probabilities_is_decided_as_the_target_does() -> None:
    logits = torch.tensor([[0.0, 1e-20]] * 2, dtype=torch.float64)
    assert logits[0].softmax(-1).unique().shape == (1,)
    draft = Draft(torch.tensor([1]), unscaled_probs=torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    assert StaticEnsemble(1)(draft, logits, GREEDY) == Verdict((0,), 1)


def test_greedily_tokens_are_accepted_up_to_the_first_that_is_not_the_ensembles() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5]], dtype=torch.float64).log()
    own = torch.tensor([[0.8, 0.2], [0.55, 0.45]], dtype=torch.float64)
    assert StaticEnsemble(0.5)(
        Draft(torch.tensor([0, 0]), unscaled_probs=own), logits, GREEDY
    ) == Verdict((0,), 1)
    assert StaticEnsemble(0.05)(
        Draft(torch.tensor([0, 0]), unscaled_probs=own), logits, GREEDY
    ) == Verdict((0, 1), 0)
