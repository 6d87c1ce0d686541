"""SWIFT's choice: the search finds the blocks that add nothing, at the cost it tells, and each text begins it anew."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from bild_lab.engine.acceptance import SpeculativeSampling
from bild_lab.engine.batch import Batch
from bild_lab.engine.batched import decode_batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import AdaptiveSkipDrafter
from bild_lab.engine.drafters.adaptive_skip import AdaptiveSkip, Block
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.engine.trace import Trace
from tests.engine.lossless.test_random_models import NEVER
from tests.engine.models.test_views import ZEROED
from tests.policies import in_memory
from tests.tiny import START, TINY

LAYERS = 6
SILENT = {(1, False), (1, True), (2, False), (3, True)}  # blocks that add nothing: a layer, and its feed-forward or not


def target() -> LoadedModel:
    module: PreTrainedModel = TINY["llama"](3, layers=LAYERS)
    for layer, fed in SILENT:
        for name, weight in module.named_parameters():
            if name.startswith(f"model.layers.{layer}."):
                weight.data *= not name.endswith(ZEROED["feed_forward" if fed else "attention"])
    return in_memory(module.double(), "native")


def request(length: int, first: int = 5, **sampling: float) -> Request:
    generator = torch.Generator().manual_seed(0) if sampling else None
    return Request(Source((START, first)), Limits(2, length, NEVER), Sampling(**sampling), generator)


def method(model: LoadedModel, candidates: int, keep: bool = False, context: int = 8) -> DraftThenVerify:
    drafter = AdaptiveSkipDrafter(AdaptiveSkip(model, 1 / 3), 4, context, candidates, keep=keep)
    return DraftThenVerify(model, drafter, SpeculativeSampling())


def used(made: DraftThenVerify) -> set[Block]:
    """The blocks that are left out after its last text, of a method that keeps them."""
    return set(made.drafter._latest[0].used)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
def test_the_search_ends_with_blocks_that_agree_more_often(sampling: dict[str, float]) -> None:
    model = target()
    shares = []
    for candidates in (0, 200):  # few comparisons of 8 rows do not tell three silent blocks from four
        made, trace = method(model, candidates, keep=True), Trace()
        made.decode(request(400, **sampling), trace)
        last = trace.rounds[len(trace.rounds) * 3 // 4 :]
        shares.append(sum(each.accepted for each in last) / sum(len(each.drafted) for each in last))
        assert len(used(made)) == 4
    assert shares[1] > shares[0] + 0.1
    assert sampling or (used(made) == SILENT and shares[1] == 1)


def test_a_candidate_is_chosen_if_more_of_its_tokens_are_the_targets() -> None:
    made = method(target(), 40, keep=True)
    made.decode(request(300), Trace())
    # what agrees with the target in every row is found, and the search ends there
    assert len(used(made) & SILENT) >= 3


def test_a_candidate_costs_a_forward_over_what_was_drafted_in_each_round_of_the_search() -> None:
    for candidates in (0, 1):
        trace = Trace()
        method(target(), candidates, context=10**6).decode(request(40), trace)  # the comparison never ends
        drafted = [len(each.drafted) for each in trace.rounds]
        extra = [each.draft_calls - own for each, own in zip(trace.rounds, drafted, strict=True)]
        assert extra == [candidates * (own > 0) for own in drafted]
        several = [each.rows for each in trace.forwards if each.layers is not None and each.scored > 1]
        assert several == [own for own in drafted if candidates and own > 1]


@pytest.mark.slow
def test_every_text_begins_anew_unless_the_search_is_to_go_on() -> None:
    model = target()
    counts = {}
    for keep in (False, True):
        made = method(model, 12, keep)
        counts[keep] = []
        for first in (5, 6, 5, 6):
            trace = Trace()
            made.decode(request(60, first), trace)
            counts[keep].append((trace.target_calls, trace.draft_calls))
        assert counts[keep][:2] == counts[keep][2:]  # a prompt that comes again does the same work
    assert counts[False][0] == counts[True][0]
    assert counts[False][1] != counts[True][1]


def test_texts_beside_each_other_each_go_on_with_a_search_of_their_own() -> None:
    """A text that begins must not take away the candidate that another one is comparing."""
    model = target()
    requests = [request(length, first) for first, length in ((5, 30), (6, 11), (7, 17), (8, 23), (9, 19), (10, 12))]
    alone = [method(model, 200, keep=True, context=2).decode(one, Trace())[2:] for one in requests]
    beside = decode_batch(method(model, 200, keep=True, context=2), requests, Batch(3))
    assert [text.token_ids for text in beside] == alone


def test_the_first_and_the_last_layer_run_whole() -> None:
    part = AdaptiveSkip(target(), 0.9)
    assert {layer for layer, _ in part.free} == set(range(1, LAYERS - 1))
    assert part.layers == (0, LAYERS - 1)
    chance = random.Random(0)
    for _ in range(5):
        want = part.without(frozenset(chance.sample(part.free, 3)))
        assert 2 * (LAYERS - len(want.layers)) + len(want.skipped.attention) + len(want.skipped.feed_forward) == 3
