"""Block verification: the exact law of whole texts, how much it accepts, and the paper's example."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import BlockVerification, SpeculativeSampling
from bild_lab.engine.draft import Draft
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from tests.engine.acceptance.exact import (
    DRAFTER,
    HALVINGS,
    NEARLY_ONE,
    TARGET,
    Dice,
    Law,
    Proposals,
    chain_of,
    continued,
    emitted,
    rows_after,
    sampled,
    table,
    targets,
)
from tests.thinned import thinned

GREEDY = Request(Source((0,)), Limits(1, 10))


def block_law(rule: Acceptance, draft: Draft, logits: Tensor, request: Request) -> Law:
    """What the rule emits. The chance of each prefix is read off it, while the coins of longer ones fail."""
    law: Law = defaultdict(float)
    tokens = draft.token_list

    def verdict(uniform: list[float]) -> tuple[int, Tensor]:
        dice = Dice(torch.tensor(uniform, dtype=torch.float64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", dice.rand)
            patch.setattr(torch, "multinomial", dice.multinomial)
            return len(rule(draft, logits, request).path), dice.drawn_from

    reached, n = 1.0, len(tokens)
    for length in range(n, -1, -1):

        def stands(value: float, length: int = length) -> bool:
            uniform = [1.0] * n
            if length:
                uniform[length - 1] = value
            return verdict(uniform)[0] == length

        low, high = 0.0, 1.0
        if not length or stands(NEARLY_ONE):
            low = 1.0
        else:
            for _ in range(HALVINGS if stands(0.0) else 0):
                middle = (low + high) / 2
                low, high = (middle, high) if stands(middle) else (low, middle)
        if low > 0:
            uniform = [1.0] * n
            if length:
                uniform[length - 1] = 0.0
            for token, share in enumerate(verdict(uniform)[1][0].tolist()):
                law[(*tokens[:length], token)] += reached * low * share
        reached *= 1 - low
    return law


def over(proposals: Proposals, p: Tensor, law: Callable[[Draft, Tensor], Law]) -> Law:
    whole: Law = defaultdict(float)
    for draft, chance in proposals:
        for text, probability in law(draft, rows_after(draft, p)).items():
            whole[text] += chance * probability
    return whole


def expected_accepted(law: Law) -> float:
    return sum(chance * (len(text) - 1) for text, chance in law.items())


def block(draft: Draft, logits: Tensor) -> Law:
    return block_law(BlockVerification(), draft, logits, sampled())


PAIRS = [(TARGET, DRAFTER), (DRAFTER, TARGET), (table(5), table(6)), (TARGET, TARGET)]


@pytest.mark.parametrize(
    ("p", "q", "length"), thinned([(*pair, length) for length in (2, 3) for pair in PAIRS], 2, map(str, range(8)))
)
def test_whole_texts_have_exactly_the_targets_law(p: Tensor, q: Tensor, length: int) -> None:
    law = over(chain_of(q, length), p, block)
    torch.testing.assert_close(continued(law, p, length + 1), targets(p, length + 1), atol=1e-6, rtol=0)


def test_drafts_that_end_early_on_what_was_drafted_lose_nothing_either() -> None:
    """A drafter that stops behind token 1, as behind an end token or where it is unsure."""

    def stopping() -> Proposals:
        for first in range(3):
            rows = DRAFTER[[0]]
            if first == 1:
                yield Draft(torch.tensor([first]), probs=rows), float(DRAFTER[0, first])
                continue
            for second in range(3):
                chance = float(DRAFTER[0, first] * DRAFTER[first, second])
                yield Draft(torch.tensor([first, second]), probs=DRAFTER[[0, first]]), chance

    law = over(stopping(), TARGET, block)
    torch.testing.assert_close(continued(law, TARGET, 3), targets(TARGET, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("p", "q"), PAIRS[1:2])
def test_it_accepts_more_than_token_by_token(p: Tensor, q: Tensor) -> None:
    ours = [expected_accepted(over(chain_of(q, length), p, block)) for length in (1, 2)]
    theirs = [expected_accepted(emitted(SpeculativeSampling(), chain_of(q, n), p, sampled())) for n in (1, 2)]
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)  # one token is a block
    assert ours[1] > theirs[1] + 1e-3


def test_the_papers_example_accepts_11_ninths_of_a_token_instead_of_10() -> None:
    """Two tokens, drafted from (2/3, 1/3) for a target of (1/3, 2/3), both without memory (Sun et al., 2025, §1)."""
    p = torch.tensor([[1 / 3, 2 / 3]] * 2, dtype=torch.float64)
    q = torch.tensor([[2 / 3, 1 / 3]] * 2, dtype=torch.float64)
    assert expected_accepted(over(chain_of(q, 2, 2), p, block)) == pytest.approx(11 / 9, abs=1e-6)
    tokenwise = emitted(SpeculativeSampling(), chain_of(q, 2, 2), p, sampled())
    assert expected_accepted(tokenwise) == pytest.approx(10 / 9, abs=1e-6)


def test_a_prefix_or_more_is_accepted_with_its_weight() -> None:
    """P_i of the paper, over all that may be drafted behind the prefix."""
    reached: dict[int, float] = defaultdict(float)
    for draft, chance in chain_of(DRAFTER, 2):
        law, first = block(draft, rows_after(draft, TARGET)), draft.token_list[0]
        reached[first] += chance * sum(share for text, share in law.items() if len(text) > 1)
    for token in range(3):
        weight = min(1.0, float(TARGET[0, token] / DRAFTER[0, token]))
        assert reached[token] == pytest.approx(weight * float(DRAFTER[0, token]), abs=1e-6)


def test_greedily_it_is_exact_match() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.2, 0.2]], dtype=torch.float64).log()
    for tokens in itertools.product(range(3), repeat=2):
        kept = 0 if tokens[0] != 0 else 1 if tokens[1] != 2 else 2
        verdict = BlockVerification()(Draft(torch.tensor(tokens)), logits, GREEDY)
        assert (verdict.path, verdict.next_token) == (tuple(range(kept)), (0, 2, 0)[kept])


def test_greedy_drafts_are_judged_by_what_is_drawn_where_tokens_are_sampled() -> None:
    """A draft without probabilities is certain of its tokens: q is one-hot."""
    law = block_law(
        BlockVerification(), Draft(torch.tensor([1, 2])), rows_after(Draft(torch.tensor([1, 2])), TARGET), sampled()
    )
    joint = continued(law, TARGET, 3)
    torch.testing.assert_close(joint, targets(TARGET, 3), atol=1e-6, rtol=0)


def test_it_is_lossless_and_takes_chains() -> None:
    for sampling in (Sampling(), Sampling(temperature=0.7)):
        assert BlockVerification().lossless(sampling)
    assert not BlockVerification.accepts_trees
    logits = torch.tensor([[0.0, 99.0, 0.0]], dtype=torch.float64)
    verdict = BlockVerification()(Draft(torch.empty(0, dtype=torch.long)), logits, sampled())
    assert (verdict.path, verdict.next_token) == ((), 1)
