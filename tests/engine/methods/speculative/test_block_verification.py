"""Block verification: the exact distribution of whole texts, how much it accepts, and the paper's
example.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from tests.engine.methods.speculative.exact import (
    DRAFTER,
    GREEDY,
    HALVINGS,
    NEARLY_ONE,
    TARGET,
    Dice,
    Distribution,
    Proposals,
    chain_of,
    continued,
    emitted,
    rows_after,
    sampled,
    table,
    targets,
)


def block_outcomes(
    rule: Acceptance, draft: Draft, logits: Tensor, request: Request
) -> Distribution:
    """What the rule emits.

    The chance of each prefix is read off it, while the coins of longer ones fail.
    """
    output: Distribution = defaultdict(float)
    tokens = draft.token_list

    def verdict(uniform: list[float]) -> tuple[int, Tensor]:
        dice = Dice(torch.tensor(uniform, dtype=torch.float64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", dice.rand)
            patch.setattr(torch, "multinomial", dice.multinomial)
            return len(rule(draft, logits, request).path), dice.drawn_from

    reached, n = 1.0, len(tokens)
    for length in range(n, -1, -1):

        def is_kept(value: float, length: int = length) -> bool:
            uniform = [1.0] * n
            if length:
                uniform[length - 1] = value
            return verdict(uniform)[0] == length

        low, high = 0.0, 1.0
        if not length or is_kept(NEARLY_ONE):
            low = 1.0
        else:
            for _ in range(HALVINGS if is_kept(0.0) else 0):
                middle = (low + high) / 2
                low, high = (middle, high) if is_kept(middle) else (low, middle)
        if low > 0:
            uniform = [1.0] * n
            if length:
                uniform[length - 1] = 0.0
            for token, share in enumerate(verdict(uniform)[1][0].tolist()):
                output[(*tokens[:length], token)] += reached * low * share
        reached *= 1 - low
    return output


def over(
    proposals: Proposals, p: Tensor, output: Callable[[Draft, Tensor], Distribution]
) -> Distribution:
    whole: Distribution = defaultdict(float)
    for draft, chance in proposals:
        for text, probability in output(draft, rows_after(draft, p)).items():
            whole[text] += chance * probability
    return whole


def expected_accepted(output: Distribution) -> float:
    return sum(chance * (len(text) - 1) for text, chance in output.items())


def block(draft: Draft, logits: Tensor) -> Distribution:
    return block_outcomes(BlockVerification(), draft, logits, sampled())


PAIRS = [(TARGET, DRAFTER), (DRAFTER, TARGET), (table(5), table(6)), (TARGET, TARGET)]


@pytest.mark.fast("0", "2", "4")
@pytest.mark.parametrize(
    ("p", "q", "length"),
    [(*pair, length) for length in (2, 3) for pair in PAIRS],
    ids=map(str, range(8)),
)
def test_whole_texts_have_exactly_the_targets_distribution(
    p: Tensor, q: Tensor, length: int
) -> None:
    output = over(chain_of(q, length), p, block)
    torch.testing.assert_close(
        continued(output, p, length + 1), targets(p, length + 1), atol=1e-6, rtol=0
    )


def test_drafts_that_end_early_on_what_was_drafted_lose_nothing_either() -> None:
    """A drafter that stops after token 1, as after an end token or where it is unsure."""

    def stopping() -> Proposals:
        for first in range(3):
            rows = DRAFTER[[0]]
            if first == 1:
                yield Draft(torch.tensor([first]), probs=rows), float(DRAFTER[0, first])
                continue
            for second in range(3):
                chance = float(DRAFTER[0, first] * DRAFTER[first, second])
                yield Draft(torch.tensor([first, second]), probs=DRAFTER[[0, first]]), chance

    output = over(stopping(), TARGET, block)
    torch.testing.assert_close(continued(output, TARGET, 3), targets(TARGET, 3), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("p", "q"), PAIRS[1:2])
def test_it_accepts_more_than_token_by_token(p: Tensor, q: Tensor) -> None:
    ours = [expected_accepted(over(chain_of(q, length), p, block)) for length in (1, 2)]
    theirs = [
        expected_accepted(emitted(SpeculativeSampling(), chain_of(q, n), p, sampled()))
        for n in (1, 2)
    ]
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)  # one token is a block
    assert ours[1] > theirs[1] + 1e-3


def test_the_papers_example_accepts_11_ninths_of_a_token_instead_of_10() -> None:
    """Two tokens, drafted from (2/3, 1/3) for a target of (1/3, 2/3), both without memory (Sun et
    al., 2025, §1).
    """
    p = torch.tensor([[1 / 3, 2 / 3]] * 2, dtype=torch.float64)
    q = torch.tensor([[2 / 3, 1 / 3]] * 2, dtype=torch.float64)
    assert expected_accepted(over(chain_of(q, 2, 2), p, block)) == pytest.approx(11 / 9, abs=1e-6)
    tokenwise = emitted(SpeculativeSampling(), chain_of(q, 2, 2), p, sampled())
    assert expected_accepted(tokenwise) == pytest.approx(10 / 9, abs=1e-6)


def test_a_prefix_or_more_is_accepted_with_its_weight() -> None:
    """P_i of the paper, over all that may be drafted after the prefix."""
    reached: dict[int, float] = defaultdict(float)
    for draft, chance in chain_of(DRAFTER, 2):
        output, first = block(draft, rows_after(draft, TARGET)), draft.token_list[0]
        reached[first] += chance * sum(share for text, share in output.items() if len(text) > 1)
    for token in range(3):
        weight = min(1.0, float(TARGET[0, token] / DRAFTER[0, token]))
        assert reached[token] == pytest.approx(weight * float(DRAFTER[0, token]), abs=1e-6)


def test_greedily_it_is_exact_match() -> None:
    logits = torch.tensor(
        [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.2, 0.2]], dtype=torch.float64
    ).log()
    for tokens in itertools.product(range(3), repeat=2):
        kept = 0 if tokens[0] != 0 else 1 if tokens[1] != 2 else 2
        verdict = BlockVerification()(Draft(torch.tensor(tokens)), logits, GREEDY)
        assert (verdict.path, verdict.next_token) == (tuple(range(kept)), (0, 2, 0)[kept])


def test_greedy_drafts_are_judged_by_what_is_drawn_where_tokens_are_sampled() -> None:
    """A draft without probabilities is certain of its tokens: q is one-hot."""
    draft = Draft(torch.tensor([1, 2]))
    output = block(draft, rows_after(draft, TARGET))
    joint = continued(output, TARGET, 3)
    torch.testing.assert_close(joint, targets(TARGET, 3), atol=1e-6, rtol=0)
