"""The scheduler of a batch: who joins when, what runs together, and whose seconds they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import greenlet
import pytest

from bild_lab.engine.batch_scheduler import Batch, PendingOp, current_batch
from bild_lab.errors import UserError
from tests.noting_batch import NotingBatch

TARGET, DRAFTER, ENCODER = 10, 1, 5


def want(kind: object, work: object, size: int = TARGET, prefetchable: bool = False) -> object:
    """Waits for work that gives its own input back, beside how many ran with it."""
    return current_batch().wait(
        PendingOp(
            (size, kind),
            size,
            lambda works: [(each, len(works)) for each in works],
            work,
            prefetchable,
        )
    )


def steps(count: int) -> Callable[[int], list[tuple[int, int]]]:
    return lambda: [want("step", at) for at in range(count)]


def kinds(batch: NotingBatch) -> list[tuple[object, int]]:
    return [(kind, count) for (_, kind), count in batch.group_sizes]


def test_a_text_joins_as_soon_as_another_has_ended() -> None:
    batch = NotingBatch(2)
    texts = batch.run([steps(1), steps(4), steps(2), steps(1)])
    assert [len(one.result) for one in texts] == [1, 4, 2, 1]
    # eight steps, never fewer than two at once
    assert [count for _, count in batch.group_sizes] == [2, 2, 2, 2]


def test_the_target_waits_until_every_text_wants_it() -> None:
    def speculative(drafts: Sequence[int]) -> Callable[[], None]:
        def loop() -> None:
            for count in drafts:
                for at in range(count):
                    want("draft", at, DRAFTER)
                want("verify", 0)

        return loop

    batch = NotingBatch(3)
    batch.run([speculative([1, 3]), speculative([2, 2]), speculative([3, 1])])
    verified = [count for kind, count in kinds(batch) if kind == "verify"]
    assert verified == [3, 3]
    assert [count for kind, count in kinds(batch) if kind == "draft"] == [3, 2, 1, 3, 2, 1]


def test_of_one_model_the_largest_group_runs_first() -> None:
    def loop(kind: str) -> Callable[[], None]:
        return lambda: want(kind, 0)

    batch = NotingBatch(3)
    batch.run([loop("a"), loop("b"), loop("b")])
    assert kinds(batch) == [("b", 2), ("a", 1)]


def test_encoders_of_texts_to_come_run_with_those_of_texts_that_join() -> None:
    def loop() -> int:
        _, together = want("encode", 0, ENCODER, prefetchable=True)
        want("step", 0)
        return together

    batch = NotingBatch(3)
    texts = batch.run([loop] * 9)
    assert [one.result for one in texts] == [3] * 9  # of the second three, two had begun early
    assert max(count for kind, count in kinds(batch) if kind == "step") == 3


def test_a_text_that_wants_nothing_may_begin_early() -> None:
    """As over a record that holds all of its rows."""

    def loop(count: int) -> Callable[[], int]:
        def run() -> int:
            want("encode", 0, ENCODER, prefetchable=True)
            for at in range(count):
                want("step", at)
            return count

        return run

    def nothing() -> int:
        return 0

    batch = NotingBatch(3)
    texts = batch.run([loop(1), loop(3), loop(3), loop(2), nothing, nothing, loop(1)])
    assert [one.result for one in texts] == [1, 3, 3, 2, 0, 0, 1]
    assert [one.latency_s for one in texts[4:6]] == [0.0, 0.0]
    # the last began beside the fourth
    assert [count for kind, count in kinds(batch) if kind == "encode"] == [3, 2]


def test_a_text_that_joins_is_encoded_at_once_however_many_others_wait() -> None:
    def loop(count: int) -> Callable[[], None]:
        def run() -> None:
            want("encode", 0, prefetchable=True)
            for at in range(count):
                want("step", at)

        return run

    batch = NotingBatch(3)
    batch.run([loop(1), loop(6), loop(6), loop(5)])
    assert [count for kind, count in kinds(batch) if kind == "step"] == [3] * 6  # no place is idle


def test_no_more_than_a_batch_decode_at_once() -> None:
    running, most = 0, 0

    def loop() -> None:
        nonlocal running, most
        running += 1
        for at in range(3):
            want("step", at)
            most = max(most, running)
        running -= 1

    Batch(4).run([loop] * 11)
    assert most == 4


def test_results_come_in_the_order_of_the_texts_and_each_end_is_reported() -> None:
    ended: list[int] = []
    texts = Batch(2).run(
        [lambda count=count: len(steps(count)()) for count in (3, 1, 0, 2)], ended.append
    )
    assert [one.result for one in texts] == [3, 1, 0, 2]
    assert sorted(ended) == [0, 1, 2, 3] and ended[0] == 1


def test_a_fault_names_the_example_and_ends_the_others() -> None:
    closed, running = [], []

    def fails() -> None:
        want("step", 0)
        raise ValueError("no such token")

    def waits() -> None:
        running.append(greenlet.getcurrent())  # held, so that nothing but the batch ends it
        try:
            for at in range(9):
                want("step", at)
        finally:
            closed.append(True)

    batch = Batch(3)
    with pytest.raises(RuntimeError, match="example 1: no such token"):
        batch.run([waits, fails, waits])
    assert len(closed) == 2
    assert len(batch.run([steps(2)])[0].result) == 2  # and the batch can be used again


def test_what_a_user_can_mend_stays_as_it_is() -> None:
    def refuses() -> None:
        raise UserError("use another policy")

    with pytest.raises(UserError, match="use another policy"):
        Batch(2).run([refuses])


def test_seconds_are_shared_out() -> None:
    def slow(works: list[object]) -> list[object]:
        time.sleep(0.01)
        return works

    def loop(count: int) -> Callable[[], None]:
        return lambda: [current_batch().wait(PendingOp("slow", 1, slow, at)) for at in range(count)]

    started = time.perf_counter()
    texts = Batch(2).run([loop(2), loop(4), loop(2)])
    seconds = time.perf_counter() - started
    assert sum(one.share_s for one in texts) == pytest.approx(seconds, rel=0.05)
    # four steps, each shared with another text
    assert texts[1].share_s == pytest.approx(seconds / 2, rel=0.3)
    assert texts[1].latency_s == pytest.approx(seconds, rel=0.3)
    assert texts[2].latency_s == pytest.approx(seconds / 2, rel=0.5)  # without its wait for a place


def test_all_work_that_ran_before_a_text_got_its_place_counts_as_its_wait() -> None:
    def slow(works: list[object]) -> list[object]:
        time.sleep(0.01)
        return works

    def loop(count: int) -> Callable[[], None]:
        def run() -> None:
            for encoder in ("target's", "drafter's"):
                current_batch().wait(PendingOp(encoder, ENCODER, slow, 0, prefetchable=True))
            for at in range(count):
                want("step", at)

        return run

    batch = NotingBatch(2)
    texts = batch.run([loop(1), loop(9), loop(1), loop(1)])
    # the last text's ran early
    assert [count for kind, count in batch.group_sizes if kind == "drafter's"] == [2, 2]
    assert texts[3].latency_s >= 0.02


def test_outside_of_a_batch_nobody_waits() -> None:
    assert current_batch() is None
    with pytest.raises(UserError, match="^the batch size must be"):
        Batch(0)
