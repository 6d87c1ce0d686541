"""Where a chain ends: `ChainProgress` states the rule, and every way to draft follows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bild_lab.engine.methods.speculative.draft_model import draft_chain
from bild_lab.engine.models.native import why_no_kernels
from bild_lab.engine.models.native.compiled import WindowProgram
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ChainProgress, ChainResult, ChainSpec
from tests.policies import in_memory
from tests.stubs import StubModel
from tests.tiny import TINY

CPU = torch.device("cpu")
STEPS = 5
# the next token of 0 is 1, of 1 is 2, and so on; each forward has another confidence
TABLE = torch.tensor(
    [
        [0.1, 0.6, 0.1, 0.1, 0.1],
        [0.1, 0.1, 0.5, 0.2, 0.1],
        [0.2, 0.1, 0.1, 0.4, 0.2],
        [0.1, 0.0, 0.1, 0.1, 0.7],
        [0.9, 0.1, 0.0, 0.0, 0.0],
    ],
    dtype=torch.float64,
)
Drafting = Callable[[ChainSpec], ChainResult]


@pytest.mark.parametrize(
    ("threshold", "end_tokens", "drafted", "forwards", "fallback"),
    [
        (None, {}, 3, 3, False),  # all steps
        (None, {8}, 2, 2, False),  # an end token is drafted
        (0.5, {}, 3, 3, False),  # an equal confidence drafts
        (0.6, {}, 1, 2, True),  # a smaller one does not
        (0.6, {8}, 1, 2, True),  # nor an end token
        (0.6, {7}, 1, 1, False),  # nothing is looked at behind the end
        (0.9, {7}, 0, 1, True),
    ],
)
def test_a_chain_ends_at_low_confidence_an_end_token_or_its_last_step(
    threshold: float | None, end_tokens: set[int], drafted: int, forwards: int, fallback: bool
) -> None:
    chain = ChainSpec(3, frozenset(end_tokens), threshold)
    progress = ChainProgress.after(chain, [7, 8, 9], [0.8, 0.5, 0.7])
    assert (progress.drafted, progress.forwards) == (drafted, forwards)
    assert progress.fallback == fallback and progress.ended


def test_a_chain_of_no_steps_has_ended_and_a_token_that_is_not_read_ends_none() -> None:
    assert ChainProgress(ChainSpec(0, frozenset())).ended
    progress = ChainProgress(ChainSpec(2, frozenset([7])))
    assert progress.add(None, None) and not progress.ended
    assert progress.add(None, None) and progress.ended


def by_loop(chain: ChainSpec) -> ChainResult:
    session = StubModel(lambda tokens: TABLE[tokens[-1]].log()).start(Source((0,)), 9)
    result = draft_chain(session, [0], chain, Sampling())
    return replace(result, tokens=[int(token) for token in result.tokens])


def by_program_of_fixed_shape(chain: ChainSpec) -> ChainResult:
    def logits_of(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return TABLE[tokens].log()

    longest = ChainSpec(STEPS, frozenset())
    return WindowProgram(logits_of, 1, longest, CPU).draft(0, [0], chain)


def by_kernels(chain: ChainSpec) -> ChainResult:
    if (reason := why_no_kernels(CPU, torch.float32)) is not None:
        pytest.skip(reason)
    model = in_memory(TINY["llama"](1), "kernels")
    return model.start(Source((3, 4)), 9).draft([4], chain)


def require_rule(drafting: Drafting) -> None:
    """The chains of this way to draft end where `ChainProgress` says, by their own confidences."""
    longest = drafting(ChainSpec(STEPS, frozenset(), threshold=0.0))
    assert longest.forwards == len(longest.tokens) == STEPS
    thresholds: list[float | None] = [None]
    for confidence in longest.confidences:
        thresholds += [confidence, math.nextafter(confidence, 1.0)]
    for threshold in thresholds:
        for end_tokens in (frozenset(), frozenset(longest.tokens[2:3])):
            for steps in (STEPS, 2):
                chain = ChainSpec(steps, end_tokens, threshold)
                progress = ChainProgress.after(
                    chain, longest.tokens[:steps], longest.confidences[:steps]
                )
                result = drafting(chain)
                assert result.tokens == longest.tokens[: progress.drafted]
                assert (result.forwards, result.fallback) == (progress.forwards, progress.fallback)
                read = 0 if threshold is None else progress.forwards
                assert result.confidences == longest.confidences[:read]


@pytest.mark.parametrize("drafting", [by_loop, by_program_of_fixed_shape, by_kernels])
def test_every_way_to_draft_ends_a_chain_by_the_rule(drafting: Drafting) -> None:
    require_rule(drafting)


def falls_back_at_equality(progress: ChainProgress, token: int, confidence: float) -> bool:
    threshold = progress.chain.threshold
    if threshold is not None and confidence == threshold:
        progress.forwards, progress.fallback = progress.forwards + 1, True
        return False
    return ADD(progress, token, confidence)


def drafts_no_end_token(progress: ChainProgress, token: int, confidence: float) -> bool:
    drafted = ADD(progress, token, confidence)
    progress.drafted -= progress.drafted_end_token
    return drafted


ADD = ChainProgress.add


@pytest.mark.parametrize("other_rule", [falls_back_at_equality, drafts_no_end_token])
def test_a_program_with_another_rule_is_noticed(
    other_rule: Callable[[ChainProgress, int, float], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels keep their rule while the one that they are compared with changes."""
    monkeypatch.setattr(ChainProgress, "add", other_rule)
    with pytest.raises(AssertionError):
        require_rule(by_kernels)
