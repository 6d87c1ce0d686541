"""The output distribution that a rule declares is that of what it does, read off it over every
draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.cascades import (
    DEFERRALS,
    SpeculativeCascade,
    StaticEnsemble,
)
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.typical_acceptance import (
    MarginAcceptance,
    TruncationSampling,
    TypicalAcceptance,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    TARGET,
    Proposals,
    chain_of,
    drafts,
    outcomes,
    rows_after,
    sampled,
)
from tests.engine.methods.speculative.test_block_verification import block_outcomes

TREE = [-1, -1, 0, 0]
LENIENCE = 0.6
RULES_OF_CHAINS: dict[str, Acceptance] = {
    "speculative sampling": SpeculativeSampling(),
    "lenience": SpeculativeSampling(LENIENCE),
    "rejection sampling": RejectionSampling(),
    "typical acceptance": TypicalAcceptance(0.4, 0.6),
    "rollback": Rollback(1.2),
    "block verification": BlockVerification(),
    "static ensemble": StaticEnsemble(0.7),
    "truncation": TruncationSampling(ratio=0.5),
    **{name: SpeculativeCascade(name, 0.2) for name in DEFERRALS},
}
RULES_OF_ALL_KINDS = {**RULES_OF_CHAINS, "exact match": ExactMatch()}


def with_own(proposals: Proposals) -> Proposals:
    """The drafts with the drafter's own probabilities, as cascades need them."""
    for draft, chance in proposals:
        object.__setattr__(draft, "unscaled_probs", draft.probs)
        yield draft, chance


def measured(
    rule: Acceptance, proposals: list[tuple[Draft, float]], request: Request, first: int | None
) -> Tensor:
    """The distribution of the token after the root, or after this first token where it was drafted
    and accepted.
    """
    output: dict[int, float] = defaultdict(float)
    read = block_outcomes if isinstance(rule, BlockVerification) else outcomes
    for draft, chance in proposals:
        for text, probability in read(rule, draft, rows_after(draft, TARGET), request).items():
            if first is None:
                output[text[0]] += chance * probability
            elif len(text) > 1 and draft.token_list[0] == text[0] == first:
                output[text[1]] += chance * probability
    found = torch.tensor([output[token] for token in range(3)], dtype=torch.float64)
    return found / found.sum()


@pytest.mark.fast(
    "speculative sampling",
    "lenience",
    "rejection sampling",
    "typical acceptance",
    "rollback",
    "block verification",
    "chow",
)
@pytest.mark.parametrize("name", [*list(RULES_OF_CHAINS)[: -len(DEFERRALS)], *DEFERRALS])
def test_the_distribution_of_a_chain_is_what_the_rule_does(name: str) -> None:
    rule, request = RULES_OF_CHAINS[name], sampled()
    proposals = list(with_own(chain_of(DRAFTER, 2)))
    whole = measured(rule, proposals, request, None)
    for draft, _ in (proposals[0], proposals[-1]):
        output = declared(rule, draft, rows_after(draft, TARGET))
        torch.testing.assert_close(output[0], whole, atol=1e-6, rtol=0)
        assert name == "truncation" or torch.allclose(output[2], TARGET[draft.token_list[1]])
        if not bool(
            (after := measured(rule, proposals, request, draft.token_list[0])).isnan().any()
        ):
            torch.testing.assert_close(output[1], after, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", RULES_OF_ALL_KINDS)
def test_chance_comes_from_the_request_alone(name: str) -> None:
    """Whatever else draws in between, the same seed gives the same verdicts."""
    rule, found = RULES_OF_ALL_KINDS[name], []
    proposals = list(with_own(chain_of(DRAFTER, 2)))
    for seed in (1, 2):
        torch.manual_seed(seed)
        request = replace(sampled(), generator=torch.Generator().manual_seed(0))
        found.append([rule(draft, rows_after(draft, TARGET), request) for draft, _ in proposals])
    assert found[0] == found[1]


def declared(rule: Acceptance, draft: Draft, logits: Tensor, drawn: Tensor | None = None) -> Tensor:
    """What the rule says that it emits. drawn: what the tokens were really drawn from; None: what
    the draft says.
    """
    return rule.output_distribution(
        draft, logits, sampled(), draft.probs if drawn is None else drawn
    )


def siblings(last: int, before: tuple[int, ...]) -> Tensor:
    """q of a token without the siblings before it."""
    q = DRAFTER[last].clone()
    q[list(before)] = 0.0
    return q / q.sum()


@pytest.mark.fast("0.6-parents0")
@pytest.mark.parametrize(
    ("lenience", "parents"), [(LENIENCE, TREE[:2]), (LENIENCE, TREE), (1.0, TREE)]
)
def test_the_distribution_of_a_tree_is_what_the_rule_does_given_its_first_sibling(
    lenience: float, parents: list[int]
) -> None:
    """After the root: the distribution holds where the first sibling was rejected, so drafts count
    by that chance.
    """
    rule, request = SpeculativeSampling(lenience), sampled()
    proposals = list(drafts(parents, siblings, 3, chain=False))
    wanted, weights = torch.zeros(3, dtype=torch.float64), 0.0
    for draft, chance in proposals:
        output = declared(rule, draft, rows_after(draft, TARGET))
        first = draft.token_list[0]
        rejected = 1 - min(1.0, float(TARGET[0, first] / (lenience * draft.probs[0, first])))
        wanted, weights = wanted + chance * rejected * output[0], weights + chance * rejected
        torch.testing.assert_close(output[0].sum(), torch.tensor(1.0).double())
        if lenience == 1.0:
            torch.testing.assert_close(output, torch.cat([TARGET[:1], TARGET[draft.tokens]]))
    torch.testing.assert_close(
        wanted / weights, measured(rule, proposals, request, None), atol=1e-6, rtol=0
    )


def test_a_distribution_counts_what_was_really_drawn() -> None:
    """Tokens that are drawn uniformly and declared as drawn from q do not come out as the
    target's.
    """
    draft, _ = next(chain_of(DRAFTER, 1))
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    output = declared(SpeculativeSampling(), draft, rows_after(draft, TARGET), uniform)[0]
    accepted = torch.minimum(torch.ones(3).double(), TARGET[0] / DRAFTER[0]) / 3
    rest = (TARGET[0] - DRAFTER[0]).clamp(min=0)
    torch.testing.assert_close(output, accepted + (1 - accepted.sum()) * rest / rest.sum())
    assert float((output - TARGET[0]).abs().sum()) > 0.05


def test_so_does_the_distribution_of_rejection_sampling() -> None:
    draft, uniform = (
        Draft(torch.tensor([1, 0]), probs=DRAFTER[[0, 1]]),
        torch.full((2, 3), 1 / 3, dtype=torch.float64),
    )
    output = declared(RejectionSampling(), draft, rows_after(draft, TARGET), uniform)
    for row in (0, 1):
        ratios = TARGET[row] / DRAFTER[row]
        kept = ratios / ratios.max() / 3
        torch.testing.assert_close(output[row], kept + (1 - kept.sum()) * TARGET[row])


@pytest.mark.fast("tokens1")
@pytest.mark.parametrize("tokens", [[1, 0, 2], [1, 2, 0], [2, 1, 1]])
def test_so_does_the_distribution_of_block_verification(tokens: list[int]) -> None:
    """Every token after a prefix is enumerated as drawn uniformly, and what follows it from the
    drafter.
    """
    q, rule, request = DRAFTER[[0, *tokens[:-1]]], BlockVerification(), sampled()
    uniform = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    output = rule.output_distribution(
        Draft(torch.tensor(tokens), probs=q),
        rows_after(Draft(torch.tensor(tokens)), TARGET),
        request,
        uniform,
    )
    for place in range(2):
        seen = torch.zeros(3, dtype=torch.float64)
        for other in range(3):
            for last in range(3):
                drafted = [*tokens[:place], other, last]
                probs = DRAFTER[[0, *drafted[:-1]]]
                draft = Draft(torch.tensor(drafted), probs=probs)
                chance = 1 / 3 * float(probs[-1, last])
                for text, probability in block_outcomes(
                    rule, draft, rows_after(draft, TARGET), request
                ).items():
                    if list(text[:place]) == tokens[:place] and len(text) > place:
                        seen[text[place]] += chance * probability
        torch.testing.assert_close(output[place], seen / seen.sum(), atol=1e-6, rtol=0)


def test_block_verification_has_a_distribution_where_nothing_is_left_and_where_nothing_can_be_accepted() -> (
    None
):
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    rule, request = BlockVerification(), sampled()
    as_good = Draft(torch.tensor([0, 0]), probs=p[:2])
    torch.testing.assert_close(declared(rule, as_good, p.log()), p)
    wider = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    half_wrong = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)  # the last is never accepted
    output = declared(rule, Draft(torch.tensor([0]), probs=wider[:1]), wider.log(), half_wrong)
    assert output[0].tolist() == [0.75, 0.25, 0.0]
    sure = Draft(torch.tensor([0, 0]), probs=torch.tensor([[1.0, 0.0]] * 2, dtype=torch.float64))
    # which neither model says after the first
    other = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(declared(rule, sure, p.log(), other)[1:], p[1:])
    assert (
        rule.output_distribution(sure, p.log(), request, other * math.nan)[:2].isnan().all()
    )  # and is not taken for the target's


def test_where_the_drafter_rules_tokens_out_rejection_sampling_emits_the_targets() -> None:
    draft = Draft(torch.tensor([1]), probs=torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64))
    output = RejectionSampling().output_distribution(
        draft, rows_after(draft, TARGET), sampled(), torch.eye(3, dtype=torch.float64)[[1]]
    )
    torch.testing.assert_close(output, TARGET[[0, 1]])


def test_what_is_accepted_at_its_bar_is_accepted_in_the_distribution_too() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]], dtype=torch.float64)
    draft = Draft(torch.tensor([1]), probs=torch.tensor([[0.2, 0.4, 0.4]], dtype=torch.float64))
    at = -float(p.log().log_softmax(-1)[0, 1])
    token = torch.eye(3, dtype=torch.float64)[[1]]
    torch.testing.assert_close(
        declared(Rollback(at), draft, p.log(), token), torch.cat([token, p[1:]])
    )


def test_a_token_that_is_not_in_q_is_accepted_if_the_target_has_it() -> None:
    q = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    draft = Draft(torch.tensor([1]), probs=q)
    really = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    output = declared(SpeculativeSampling(), draft, rows_after(draft, TARGET), really)[0]
    torch.testing.assert_close(output, really[0])
    p = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]], dtype=torch.float64)  # and here it has not
    output = declared(SpeculativeSampling(), draft, p.log(), really)[0]
    torch.testing.assert_close(output, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))


def test_exact_match_emits_what_the_target_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, _ = next(chain_of(DRAFTER, 2))
    rule, request, logits = ExactMatch(), sampled(), rows_after(draft, TARGET)
    for token in range(3):
        drawn = torch.full((3, 1), token)
        monkeypatch.setattr(torch, "multinomial", lambda probs, *_, drawn=drawn, **__: drawn)
        verdict = rule(draft, logits, request)
        emitted = [*(draft.token_list[node] for node in verdict.path), verdict.next_token]
        assert emitted[0] == token
    torch.testing.assert_close(declared(rule, draft, logits, draft.probs), logits.exp())


def test_rules_whose_siblings_compete_have_no_distribution_in_a_tree() -> None:
    draft, _ = next(drafts(TREE, siblings, 3, chain=False))
    for rule in (TypicalAcceptance(0.4, 0.6), Rollback(1.2), MarginAcceptance(0.9)):
        assert declared(rule, draft, rows_after(draft, TARGET)) is None


def test_a_token_that_the_target_never_says_is_never_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch, "rand", lambda count, **options: torch.zeros(count, dtype=options.get("dtype"))
    )
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    for rule in (SpeculativeSampling(), RejectionSampling(), BlockVerification()):
        verdict = rule(Draft(torch.tensor([0]), probs=q), p.log(), sampled())
        assert (verdict.path, verdict.next_token) == ((), 1)
