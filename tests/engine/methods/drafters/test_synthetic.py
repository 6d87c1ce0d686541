"""A drafter whose tokens stand with a chosen probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.synthetic import SyntheticDrafter
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import ALL_LOGITS, OutputSpec, Rows, Scores, as_rows
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.timing import TimingOptions, time_methods, traced_pass
from bild_lab.lab.schema.statistics import acceptance_by_position
from tests.engine.loops import FAMILIES, copying, decode, random_pair
from tests.stubs import StubModel, StubSession


def test_at_rate_one_every_draft_is_accepted_and_at_rate_zero_none() -> None:
    target = StubModel(copying(1))
    for rate, calls, stood in ((1.0, 3, [4, 4, 4]), (0.0, 15, [0] * 15)):
        tokens, trace = decode(
            target, SyntheticDrafter(target, rate, 4), ExactMatch(), Source((0,)), 15
        )
        assert tokens == [index % 10 for index in range(16)]
        assert trace.target_calls == calls
        assert [each.accepted for each in trace.rounds] == stood


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_drafted_tokens_are_accepted_with_the_chosen_probability_wherever_they_are_in_a_draft(
    rate: float,
) -> None:
    target = StubModel(copying(1))
    method = DraftThenVerify(target, SyntheticDrafter(target, rate, 5), ExactMatch())
    rounds: list[tuple[int, int]] = []
    for first in range(10):
        for second in range(4):
            trace = Trace()
            method.decode(Request(Source((second, first)), Limits(2, 60)), trace)
            rounds += [(len(each.drafted), each.accepted) for each in trace.rounds]
    for position, share in enumerate(acceptance_by_position(rounds)):
        judged = sum(drafted > position and accepted >= position for drafted, accepted in rounds)
        assert abs(share - rate) < 3.5 * math.sqrt(rate * (1 - rate) / judged), position
    assert position == 4


def test_the_same_prompt_has_the_same_rounds_and_another_prompt_others() -> None:
    target = StubModel(copying(1))
    rounds = []
    for prompt in ((3, 0), (3, 0), (4, 0)):  # the text behind them is the same
        _, trace = decode(
            target, SyntheticDrafter(target, 0.5, 4), ExactMatch(), Source(prompt), 40
        )
        rounds.append([(each.drafted, each.accepted) for each in trace.rounds])
    assert rounds[0] == rounds[1] != rounds[2]


def test_what_is_accepted_at_one_rate_is_accepted_at_every_higher_one() -> None:
    target = StubModel(copying(1))
    standing: set[int] = set()
    for rate in (0.2, 0.4, 0.6, 0.8):
        text, trace = decode(
            target, SyntheticDrafter(target, rate, 40), ExactMatch(), Source((0,)), 40
        )
        stood, position = set(), 1
        for each in trace.rounds:
            stood |= set(range(position, position + each.accepted))
            position += each.accepted + 1
        assert position >= len(text)
        assert standing <= stood
        standing = stood
    assert 20 < len(standing) < 40


def test_a_spoiled_token_ends_no_text() -> None:
    target = StubModel(copying(1))
    limits = Limits(1, 30, frozenset([0, 1, 2]))
    drafter = SyntheticDrafter(target, 0.0, 4)
    method = DraftThenVerify(target, drafter, ExactMatch(), verify_tail=False)
    trace = Trace()
    assert method.decode(Request(Source((3,)), limits), trace) == [3, 4, 5, 6, 7, 8, 9, 0]
    assert [each.drafted for each in trace.rounds[:2]] == [(3, 3, 3, 3), (3, 3, 3, 3)]
    assert trace.rounds[-1].drafted == (3,)  # nothing is drafted behind the end of the text


@pytest.mark.parametrize("family", FAMILIES)
def test_finding_the_text_is_no_part_of_decoding_it(family: str) -> None:
    target, _, source = random_pair(family, 1)
    method = DraftThenVerify(target, SyntheticDrafter(target, 0.6, 3), ExactMatch())
    request = Request(source, Limits(len(source.prompt), 15))
    fresh = Trace()
    method.decode(request, fresh)  # nobody prepared it
    encoder = family == "t5"
    assert len(fresh.forwards) == fresh.target_calls + encoder
    method.prepare(request)
    target.fed.clear()
    method.prepare(request)
    prepared = Trace()
    method.decode(request, prepared)
    assert prepared.rounds == fresh.rounds
    assert len(target.fed) == prepared.target_calls


@dataclass
class Prepared:
    """Notes what is done with it."""

    events: list[str]
    engine: str = "stub"

    def prepare(self, request: Request) -> None:
        self.events.append("prepare")

    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.events.append("decode")
        return [*request.source.prompt, 1]


def test_the_clock_starts_after_what_a_method_prepares() -> None:
    requests = [Request(Source((0,)), Limits(1, 1))] * 2
    events: list[str] = []
    options = TimingOptions(synchronize=lambda: events.append("wait"))
    time_methods({"method": Prepared(events)}, requests, 2, options)
    assert events == ["prepare", "wait", "decode", "wait"] * 4
    events.clear()
    list(traced_pass(Prepared(events), requests, options))
    assert events == ["prepare", "wait", "decode", "wait"] * 2


class NearTies(StubModel):
    """Chooses otherwise at some places where a forward has several rows, as half precision does."""

    def start(self, source: Source, room: int, *_: object) -> NearTiesSession:
        return NearTiesSession(self, list(source.prompt[:-1]))


class NearTiesSession(StubSession):
    def extend(
        self, rows: Rows | Sequence[int] | Tensor, output_spec: OutputSpec = ALL_LOGITS
    ) -> Scores:
        logits = super().extend(rows, output_spec).logits
        if len(as_rows(rows).tokens) == 1:
            return Scores(logits)
        places = range(self.length - len(logits), self.length)
        return Scores(
            torch.stack(
                [row.roll(int(at % 7 == 0)) for row, at in zip(logits, places, strict=True)]
            )
        )


def test_no_near_tie_rejects_a_draft_that_was_not_spoiled() -> None:
    stood = {}
    for target in (StubModel(copying(1)), NearTies(copying(1))):
        for rate in (1.0, 0.7):
            text, trace = decode(
                target, SyntheticDrafter(target, rate, 4), ExactMatch(), Source((0,)), 40
            )
            stood[type(target), rate] = [each.accepted for each in trace.rounds]
        flipped = text != decode(target, NoDraft(target), ExactMatch(), Source((0,)), 40)[0]
        assert flipped == isinstance(target, NearTies)
    assert stood[NearTies, 1.0] == stood[StubModel, 1.0] == [4] * 8
    assert stood[NearTies, 0.7] == stood[StubModel, 0.7]
