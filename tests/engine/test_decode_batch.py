"""What a batch asks of a method, and what of it each text has for itself; the texts are those of
numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from bild_lab.engine.batch_decoding import decode_batch, shares_of
from bild_lab.engine.batch_scheduler import Batch, PendingOp
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import EngineReport, Trace
from bild_lab.errors import UserError
from bild_lab.lab.measure.timing import TimingOptions, warm_up
from tests.noting_batch import NotingBatch


def requests(*numbers: int) -> list[Request]:
    return [Request(Source((9, number)), Limits(2, 3)) for number in numbers]


class Counting:
    """Emits how many texts it has seen, after a wait that all texts share."""

    def __init__(self, batch: Batch | None) -> None:
        self.batch, self.texts = batch, []

    def lossless(self) -> bool: ...

    def decode(self, request: Request, trace: Trace) -> list[int]:
        self.texts.append(request.source.prompt[1])
        trace.stats["text"] = request.source.prompt[1]
        for _ in range(request.source.prompt[1]):
            self.batch.wait(PendingOp("step", 1, lambda several: [None] * len(several), None))
        return [*request.source.prompt, len(self.texts)]


def test_texts_of_a_batch_begin_as_others_end() -> None:
    method, ended = Counting(batch := NotingBatch(2)), []
    texts = decode_batch(method, requests(3, 1, 1, 1), batch, ended.append)
    assert ended == [1, 2, 0, 3]
    assert [one.trace.stats["text"] for one in texts] == method.texts == [3, 1, 1, 1]
    assert all(0 < one.share_s <= one.latency_s for one in texts)
    assert max(count for _, count in batch.group_sizes) == 2


class Together(Counting):
    def decode_batch(self, requests: Sequence[Request]) -> list[list[int]]:
        self.texts.append([one.source.prompt[1] for one in requests])
        time.sleep(0.002)
        return [[*one.source.prompt, 10 * one.source.prompt[1]] for one in requests]


def test_a_method_with_batches_of_its_own_gets_the_next_texts_when_all_have_ended() -> None:
    method, ended = Together(None), []
    started = time.perf_counter()
    texts = decode_batch(method, requests(1, 2, 3, 4, 5), Batch(2), ended.append)
    assert sum(one.share_s for one in texts) <= time.perf_counter() - started
    assert method.texts == [[1, 2], [3, 4], [5]] and ended == [0, 1, 2, 3, 4]
    assert [one.token_ids for one in texts] == [[10], [20], [30], [40], [50]]
    assert texts[0].latency_s == texts[1].latency_s == 2 * texts[0].share_s >= 0.002
    assert (
        texts[4].latency_s == texts[4].share_s != texts[0].latency_s and texts[0].trace == Trace()
    )


class Elsewhere(Counting):
    """Waits so many hundredths of a second for each answer; one of 9 never comes."""

    arrival_rate = None

    def ask(self, request: Request, trace: Trace) -> int | None:
        number = request.source.prompt[1]
        failed = number == 9
        trace.report = EngineReport(error="it has died" if failed else None)
        time.sleep(0.01 * number)
        return None if failed else number

    def read(self, request: Request, trace: Trace, answer: int | None) -> list[int]:
        return [*request.source.prompt, *([] if answer is None else [answer])]

    def about(self) -> dict[str, str]:
        return {}

    def log(self) -> None:
        return None


def test_texts_that_came_from_elsewhere_share_the_seconds_of_all_by_their_waits() -> None:
    """Equal shares leave an interval over texts without a width, and with a text that never came
    the others would look faster than they were.
    """
    started = time.perf_counter()
    texts = decode_batch(Elsewhere(None), requests(1, 3, 9, 2), Batch(4))
    seconds = time.perf_counter() - started
    shares = [text.share_s for text in texts]
    assert shares[2] == 0.0 and 0.09 <= sum(shares) <= seconds
    assert shares[1] > 1.2 * shares[3] > 1.2 * 1.2 * shares[0] > 0
    assert shares_of(6.0, [1.0, 0.0, 2.0]) == [2.0, 0.0, 4.0]
    assert shares_of(6.0, [0.0, 0.0]) == [3.0, 3.0] and shares_of(6.0, []) == []


def test_a_method_that_loses_a_text_is_an_error() -> None:
    method = Together(None)
    method.decode_batch = lambda several: [[9, 1, 5]]
    with pytest.raises(ValueError, match="shorter"):
        decode_batch(method, requests(1, 2), Batch(2))


class Headless(Counting):
    """Leaves the prompt out."""

    def decode(self, request: Request, trace: Trace) -> list[int]:
        return super().decode(request, trace)[2:]


class HeadlessTogether(Together):
    def decode_batch(self, requests: Sequence[Request]) -> list[list[int]]:
        return [tokens[2:] for tokens in super().decode_batch(requests)]


class HeadlessElsewhere(Elsewhere):
    def read(self, request: Request, trace: Trace, answer: int | None) -> list[int]:
        return super().read(request, trace, answer)[2:]


@pytest.mark.parametrize("kind", [Headless, HeadlessTogether, HeadlessElsewhere])
def test_a_text_without_its_prompt_is_refused_however_a_batch_is_decoded(kind: type) -> None:
    """Fault: it lost as many tokens as the prompt has, in batches of the method's own."""
    method = kind(batch := Batch(2))
    with pytest.raises(UserError, match=f"decode of {kind.__name__} must return the list of the"):
        decode_batch(method, requests(1, 2), batch)


def test_a_warm_up_is_one_batch_of_every_method() -> None:
    methods = {"method": Together(None), "baseline": Together(None)}
    warm_up(methods, requests(1, 2, 3, 4, 5), 1, TimingOptions(batch=3))
    assert [one.texts for one in methods.values()] == [[[1, 2, 3]]] * 2
