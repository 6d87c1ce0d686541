"""A draft whose end only the device knows is judged as the shorter draft that it stands for."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine import sampling as sampling_module
from bild_lab.engine.acceptance import (
    ExactMatch,
    RejectionSampling,
    Rollback,
    SpeculativeCascade,
    SpeculativeSampling,
    TypicalAcceptance,
    rejection_sampling,
    speculative_sampling,
    typical,
)
from bild_lab.engine.acceptance.cascades import Opt, TokenV3
from bild_lab.engine.draft import Draft, Ending
from bild_lab.engine.models.native.compiled import before_the_end
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Chain

WINDOW, VOCABULARY, THRESHOLD, END = 5, 7, 0.4, 6
RULES = [
    ExactMatch(),
    SpeculativeSampling(),
    SpeculativeSampling(0.5),
    RejectionSampling(),
    Rollback(1.5),
    TypicalAcceptance(0.3, 0.6),
    SpeculativeCascade(Opt(0.1)),
    SpeculativeCascade(TokenV3(0.3)),
]


@pytest.fixture
def same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both drafts get the same random number for each token, and a row's draw depends on the row alone."""
    numbers = torch.tensor([0.31, 0.62, 0.05, 0.47, 0.88, 0.2])
    monkeypatch.setattr(torch, "rand", lambda count, **options: numbers[:count].to(options["dtype"]))

    def draw(probs: torch.Tensor, generator: object) -> torch.Tensor:
        return (probs.cumsum(-1) > 0.6).long().argmax(-1)

    for module in (sampling_module, speculative_sampling, rejection_sampling, typical):
        monkeypatch.setattr(module, "draw", draw)


def models(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's logits, the drafter's distributions and its tokens; the two often agree."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(WINDOW + 1, VOCABULARY, generator=generator, dtype=torch.float64)
    probs = (logits[:-1] + 0.7 * torch.randn(WINDOW, VOCABULARY, generator=generator)).softmax(-1)
    return logits, probs, probs.argmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("length", range(WINDOW + 1))
def test_every_rule_judges_what_is_before_the_end(
    same_numbers: None, rule: Acceptance, temperature: float, length: int
) -> None:
    request = Request(Source((0,)), Limits(1, 9), Sampling(temperature))
    accepted = set()
    for seed in range(12):
        logits, probs, tokens = models(seed)
        sampled = probs if temperature else None
        whole = Draft(
            tokens,
            probs=sampled,
            own_probs=probs,
            ending=Ending(torch.arange(WINDOW) < length, torch.ones(WINDOW), THRESHOLD, frozenset()),
        )
        cut = Draft(tokens[:length], probs=None if sampled is None else sampled[:length], own_probs=probs[:length])
        verdict, expected = rule(whole, logits, request), rule(cut, logits[: length + 1], request)
        assert (verdict.path, verdict.next_token) == (expected.path, expected.next_token)
        assert verdict.stats == pytest.approx(expected.stats)
        assert whole.token_list == cut.token_list and whole.parent_list == cut.parent_list
        accepted.add(len(verdict.path))
    assert accepted - {0} or length == 0


def chain_of(confidences: list[float], tokens: list[int]) -> Draft:
    sure, drafted = torch.tensor(confidences), torch.tensor(tokens)
    ends = frozenset([END])
    before = before_the_end(drafted, sure, Chain(len(tokens), ends, THRESHOLD))
    return Draft(drafted, calls=len(tokens), ending=Ending(before, sure, THRESHOLD, ends))


@pytest.mark.parametrize(
    ("confidences", "tokens", "kept", "calls", "fallback"),
    [
        ([0.9, 0.8, 0.7], [1, 2, 3], [1, 2, 3], 3, False),
        ([0.9, 0.3, 0.7], [1, 2, 3], [1], 2, True),
        ([0.1, 0.9, 0.7], [1, 2, 3], [], 1, True),
        ([0.9, 0.5, 0.5], [1, END, 3], [1, END], 2, False),
        ([0.9, 0.5, 0.1], [1, END, 3], [1, END], 2, False),  # which would have fallen back behind the end token
        ([0.9, 0.4, 0.3], [END, END, END], [END], 1, False),
        ([0.3, 0.9, 0.9], [END, 2, 3], [], 1, True),
    ],
)
def test_the_end_and_the_counts_are_those_of_drafting_step_by_step(
    confidences: list[float], tokens: list[int], kept: list[int], calls: int, fallback: bool
) -> None:
    draft = chain_of(confidences, tokens)
    assert draft.token_list == kept
    assert (draft.calls, draft.stats["fallback"]) == (calls, fallback)
    assert draft.stats["confidence"] == pytest.approx(confidences[:calls])


def test_a_draft_is_cut_where_positions_end() -> None:
    draft = chain_of([0.9, 0.8, 0.7, 0.1], [1, 2, 3, 4])
    assert draft.within(2).token_list == [1, 2]
    assert draft.within(3).token_list == [1, 2, 3]
    assert draft.within(4) is draft


def test_a_rule_that_knows_no_endings_gets_the_draft_that_was_read() -> None:
    draft = chain_of([0.9, 0.8, 0.3], [1, 2, 3]).settled()
    assert draft.ending is None and draft.tokens.tolist() == draft.token_list == [1, 2] and len(draft) == 2
    assert (draft.calls, draft.stats["fallback"]) == (3, True)


def test_every_rule_of_the_package_says_whether_it_knows_endings() -> None:
    assert all(rule.knows_endings for rule in RULES)
