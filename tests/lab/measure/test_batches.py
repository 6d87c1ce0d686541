"""Timing in batches: what is decoded together, in which order, and whose seconds are whose."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from bild_lab.engine.batch import Wanted, current_batch
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.batches import BLOCK, blocks, time_batches, warm_up_batches


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting all of a test process's garbage takes half a second."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@dataclass
class Noted:
    """A method that notes its name, the example and its seed."""

    name: str
    notes: list[tuple[str, int, int | None]]

    def decode(self, request: Request, trace: Trace) -> list[int]:
        seed = None if request.generator is None else request.generator.initial_seed()
        self.notes.append((self.name, request.source.prompt[0], seed))
        time.sleep(0.001)
        return [*request.source.prompt, request.source.prompt[0] + 1]


@dataclass
class Together(Noted):
    """One with batches of its own."""

    def decode_together(self, requests: Sequence[Request]) -> list[list[int]]:
        self.notes.append((self.name, len(requests), None))
        time.sleep(0.004)
        return [[*one.source.prompt, 7] for one in requests]


def requests(count: int, temperature: float = 0.0) -> list[Request]:
    return [Request(Source((at,)), Limits(1, 4), Sampling(temperature)) for at in range(count)]


def test_methods_take_turns_with_blocks_and_each_text_has_its_own_seed() -> None:
    notes: list = []
    methods = {"method": Noted("method", notes), "baseline": Noted("baseline", notes)}
    advanced: list[int] = []
    found = time_batches(methods, requests(BLOCK + 4, 1.0), 1, 2, 5, lambda: None, lambda: advanced.append(1))
    first, second = list(range(BLOCK)), list(range(BLOCK, BLOCK + 4))
    order = [("method", first), ("baseline", first), ("baseline", first), ("method", first)]
    order += [("baseline", second), ("method", second), ("method", second), ("baseline", second)]
    assert [(name, at) for name, at, _ in notes] == [(name, at) for name, some in order for at in some]
    assert all(seed == 5 * 1_000_003 + at for _, at, seed in notes)
    assert len(advanced) == BLOCK + 4
    assert [one.token_ids for one in found["method"]] == [[at + 1] for at in range(BLOCK + 4)]
    assert all(len(one.latency_s) == len(one.waited_s) == 2 for several in found.values() for one in several)


def test_more_than_two_methods_begin_in_turn() -> None:
    notes: list = []
    methods = {name: Noted(name, notes) for name in ("a", "b", "c")}
    time_batches(methods, requests(2 * BLOCK), 1, 2, 0, lambda: None)
    assert "".join(name for name, _, _ in notes[::BLOCK]) == "abc" + "cba" + "bca" + "acb"


def test_a_warm_up_draws_as_the_texts_that_are_timed() -> None:
    notes: list = []
    warm_up_batches({"method": Noted("method", notes)}, requests(3, 1.0), 2, 5)
    assert [(at, seed) for _, at, seed in notes] == [(0, 5 * 1_000_003), (1, 5 * 1_000_003 + 1)]


def test_the_shares_of_a_batch_add_up_to_its_seconds() -> None:
    started = time.perf_counter()
    found = time_batches({"method": Noted("method", [])}, requests(8), 4, 1, 0, lambda: None)
    seconds = time.perf_counter() - started
    assert 0.008 <= sum(one.latency_s[0] for one in found["method"]) <= seconds


def test_a_method_with_batches_of_its_own_gets_so_many_texts_at_a_time() -> None:
    notes: list = []
    found = time_batches({"method": Together("method", notes)}, requests(5), 2, 1, 0, lambda: None)["method"]
    assert [count for _, count, _ in notes] == [2, 2, 1]
    assert [one.token_ids for one in found] == [[7]] * 5
    first, last = found[0], found[-1]
    assert first.waited_s[0] == pytest.approx(2 * first.latency_s[0]) and last.waited_s == last.latency_s


def test_a_batch_is_prepared_and_waited_for_before_and_after_its_work() -> None:
    notes: list = []

    class Prepared(Noted):
        def prepare(self, request: Request) -> None:
            self.notes.append(("prepare", request.source.prompt[0]))

        def decode(self, request: Request, trace: Trace) -> list[int]:
            work = Wanted("step", 1, lambda several: self.notes.append(("run", len(several))) or several, None)
            current_batch().wait(work)
            trace.stats["text"] = request.source.prompt[0]
            return [*request.source.prompt, 1]

    found = time_batches({"method": Prepared("method", notes)}, requests(3), 2, 1, 0, lambda: notes.append("waited"))
    prepared = [("prepare", 0), ("prepare", 1), ("prepare", 2)]
    assert notes == [*prepared, "waited", ("run", 2), "waited", ("run", 1), "waited"]
    assert [one.trace.stats for one in found["method"]] == [{"text": at} for at in range(3)]


def test_a_short_rest_belongs_to_the_block_before_it() -> None:
    assert [list(block) for block in blocks(9, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert [len(block) for block in blocks(10, 4)] == [4, 4, 2]
    assert [len(block) for block in blocks(3, 8)] == [3]
    assert [len(block) for block in blocks(5, 4)] == [5]
    assert [len(block) for block in blocks(7, 5)] == [5, 2]
