"""Windows that adapt to the acceptance rate, as Theorem 3.8 asks."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.acceptance import ExactMatch, SpeculativeSampling
from bild_lab.engine.drafters import AdaptiveWindow, ModelDrafter
from bild_lab.engine.drafters.model import PRIOR_TOKENS, PROBE_ROUNDS
from bild_lab.engine.request import Source
from bild_lab.engine.speculative_theory import optimal_window
from tests.engine.test_decode import FAMILIES, NEVER, autoregressive, decode, finished, random_pair, uncached
from tests.stubs import NextLogits, StubModel


def saying(*tokens_from: tuple[int, int]) -> NextLogits:
    """After each length of text from `tokens_from[i][0]` on, always says `tokens_from[i][1]`."""

    def next_logits(tokens: list[int]) -> torch.Tensor:
        said = [token for start, token in tokens_from if len(tokens) >= start][-1]
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(said), 4).double()

    return next_logits


def drafted(draft: NextLogits, target: NextLogits, window: AdaptiveWindow, length: int) -> list[int]:
    """How many tokens each round drafted."""
    drafter = ModelDrafter(StubModel(draft), window)
    _, trace = decode(StubModel(target), drafter, SpeculativeSampling(), Source((0,)), length)
    return [len(each.drafted) for each in trace.rounds]


def test_the_window_is_the_one_that_pays_most_at_the_rate_seen_of_late() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, largest=12, prior=0.7, memory=0.8)
    accepted, judged = 0.7 * PRIOR_TOKENS, PRIOR_TOKENS
    sizes = []
    for drafts, stood in [(5, 5), (7, 7), (9, 9), (9, 2), (6, 0), (3, 0), (2, 1), (2, 2), (3, 3)]:
        assert window.acceptance_rate == pytest.approx(accepted / judged)
        assert window.size() == optimal_window(accepted / judged, 0.1, 12)
        sizes.append(window.size())
        window.observe(drafts, stood)
        accepted = 0.8 * accepted + stood
        judged = 0.8 * judged + stood + (stood < drafts)
    assert len(set(sizes)) > 5, sizes


def test_the_window_grows_to_its_limit_while_everything_stands() -> None:
    window = AdaptiveWindow(cost_ratio=0.1, largest=6, prior=0.4, memory=0.5)
    agreeing = saying((0, 1))
    assert drafted(agreeing, agreeing, window, 40) == [2, 4, 6, 6, 6, 6, 4]  # the last, as much as there is room


def test_where_nothing_stands_one_token_is_drafted_in_every_eighth_round() -> None:
    window = AdaptiveWindow(cost_ratio=0.3, largest=6, prior=0.7, memory=0.5)
    rounds = drafted(saying((0, 1)), saying((0, 2)), window, 2 + 2 * PROBE_ROUNDS)
    assert PROBE_ROUNDS == 8
    assert rounds == [2, 1, *[0] * 7, 1, *[0] * 7, 1]


def test_a_text_where_drafting_never_pays_is_probed_in_its_eighth_round() -> None:
    window, sizes = AdaptiveWindow(cost_ratio=0.9, largest=6, prior=0.1, memory=0.5), []
    for _ in range(PROBE_ROUNDS):
        sizes.append(window.size())
        window.observe(sizes[-1], 0)
    assert sizes == [0] * 7 + [1]


def test_drafting_resumes_after_a_probe_that_stood() -> None:
    window = AdaptiveWindow(cost_ratio=0.3, largest=6, prior=0.7, memory=0.5)
    rounds = drafted(saying((0, 1)), saying((0, 2), (9, 1)), window, 30)
    assert rounds[:11] == [2, 1, *[0] * 7, 1, 1]
    assert max(rounds[11:]) == 6


def test_a_round_without_a_draft_costs_no_forward_of_the_drafter() -> None:
    draft = StubModel(saying((0, 1)))
    drafter = ModelDrafter(draft, AdaptiveWindow(cost_ratio=0.3, largest=6, prior=0.7, memory=0.5))
    _, trace = decode(StubModel(saying((0, 2))), drafter, ExactMatch(), Source((0,)), 9)
    assert trace.draft_calls == trace.drafted == 3
    assert trace.target_calls == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adaptive_window_is_lossless(family: str) -> None:
    sizes: set[int] = set()
    for seed in range(4):
        target, draft, source = random_pair(family, seed, noise=0.03)
        expected = autoregressive(uncached(target.module, source), source.prompt, finished(source, 21, NEVER))
        drafter = ModelDrafter(draft, AdaptiveWindow(cost_ratio=0.1, largest=8, prior=0.7, memory=0.7))
        actual, trace = decode(target, drafter, SpeculativeSampling(), source, 21)
        assert actual == expected
        sizes.update(len(each.drafted) for each in trace.rounds)
    assert len(sizes) > 3
