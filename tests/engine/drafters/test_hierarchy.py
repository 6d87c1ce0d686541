"""A drafter that is itself accelerated by another drafter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from bild_lab.engine.acceptance import ExactMatch, SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.drafters import ModelDrafter, PromptLookup, SpeculativeDrafter, SyntheticDrafter
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import Scores
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from tests.engine.test_decode import (
    FAMILIES,
    NEVER,
    TreeDrafter,
    an_end_token,
    autoregressive,
    copying,
    decode,
    finished,
    longer_than,
    random_pair,
)
from tests.stubs import SESSION, ModuleModel, StubModel, uncached
from tests.thinned import thinned
from tests.tiny import relative_of

INNER: dict[str, Callable[[ModuleModel], Drafter]] = {
    "copied": lambda middle: PromptLookup(middle, window=3, longest_match=2),
    "modelled": lambda middle: ModelDrafter(ModuleModel(relative_of(middle.module, 7, 0.1)), 3),
}


@pytest.mark.parametrize(("family", "inner"), thinned(product(FAMILIES, INNER), 3))
def test_a_hierarchy_is_lossless(family: str, inner: str) -> None:
    accepted = 0
    for seed in range(3):
        target, middle, source = random_pair(family, seed, noise=0.03)
        large = uncached(target.module, source)
        free = autoregressive(large, source.prompt, finished(source, 21, NEVER))
        end = an_end_token(free, len(source.prompt), 9 * seed) if seed % 2 else NEVER
        expected = autoregressive(large, source.prompt, finished(source, 21, end))
        drafter = SpeculativeDrafter(middle, INNER[inner](middle), 3 + seed)
        actual, trace = decode(target, drafter, SpeculativeSampling(), source, 21, end)
        assert actual == expected
        accepted += trace.accepted
    assert accepted > 10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inner", INNER)
def test_it_drafts_what_the_model_in_the_middle_would_alone(family: str, inner: str) -> None:
    target, middle, source = random_pair(family, 2, noise=0.03)
    drafter = SpeculativeDrafter(middle, INNER[inner](middle), 5)
    _, trace = decode(target, drafter, ExactMatch(), source, 20)
    small = uncached(middle.module, source)
    y = list(source.prompt)
    for each in trace.rounds:
        room = len(source.prompt) + 20 - len(y)
        assert list(each.drafted) == autoregressive(small, tuple(y), longer_than(len(y) + min(5, room)))[len(y) :]
        y += [*each.drafted[: each.accepted], each.next_token]
    assert trace.rollbacks > 0 and trace.accepted > 0


def test_the_model_in_the_middle_runs_once_for_several_tokens_that_it_drafts() -> None:
    target, middle, small = (StubModel(copying(1)) for _ in range(3))
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 2), 6)
    _, trace = decode(target, drafter, SpeculativeSampling(), Source((0,)), 14)
    assert [each.accepted for each in trace.rounds] == [6, 6]
    # two inner rounds of two drafts and a token of the model's own: 2 forwards in the middle, 4 below
    assert [each.draft_calls for each in trace.rounds] == [6, 6]
    assert middle.fed == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]  # every committed token once


def test_each_token_comes_with_the_middle_models_distribution() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    middle, small = StubModel(lambda t: table[t[-1]]), StubModel(lambda t: 0.5 * table[t[-1]])
    sampling = Sampling(temperature=0.7, top_k=4)
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 3), 8)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20), sampling, torch.Generator().manual_seed(0)), SESSION)
    draft = drafter.propose([0])
    assert len(draft) == 8
    before = torch.tensor([0, *draft.token_list[:-1]])
    assert torch.equal(draft.probs, sampling.probs(table[before]))


def test_a_draft_ends_with_an_end_token() -> None:
    middle, small = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 2), 8)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20, frozenset([4]))), SESSION)
    assert drafter.propose([0]).token_list == [1, 2, 3, 4]


def test_an_inner_drafter_of_trees_is_refused() -> None:
    with pytest.raises(UserError, match="inner drafter must draft chains, but TreeDrafter drafts trees; use a chain"):
        SpeculativeDrafter(StubModel(copying(1)), TreeDrafter([]), 3)


def test_the_inner_drafter_is_told_what_the_middle_model_said_and_what_to_forget() -> None:
    told: list[object] = []

    class Noting(ModelDrafter):
        def observe(self, draft: Draft, scores: Scores, verdict: Verdict) -> None:
            told.append(scores.logits.argmax(-1).tolist())

        def rollback(self, length: int) -> None:
            told.append(length)

    middle, small = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, Noting(small, 2), 3)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20)), SESSION)
    drafter.propose([0])
    drafter.rollback(2)
    assert told == [[1, 2, 3], 2]


def test_inner_drafts_stay_within_the_positions_that_the_models_have() -> None:
    middle, small = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, ModelDrafter(small, 5), 3)
    drafter = drafter.start(Request(Source((0,)), Limits(1, 20, positions=3)), SESSION)
    assert drafter.propose([0]).token_list == [1, 2, 3]
    assert len(middle.fed) == 3


def test_an_inner_drafter_prepares_before_the_text() -> None:
    target, middle = StubModel(copying(1)), StubModel(copying(1))
    drafter = SpeculativeDrafter(middle, SyntheticDrafter(StubModel(copying(1)), 1.0, 2), 4)
    request = Request(Source((0,)), Limits(1, 9))
    tokens = DraftThenVerify(target, drafter, ExactMatch()).decode(request, Trace())
    assert tokens == list(range(10))
