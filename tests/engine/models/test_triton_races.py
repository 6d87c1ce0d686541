"""What finds accesses to memory without an order: it finds each kind, and accuses nobody else.

All tests of the Triton kernels are watched by it (`tests/triton_interpreter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bild_lab.engine.session import ChainSpec
from tests.engine.models.test_triton import build
from tests.engine.models.test_triton_attention import set_chunk
from tests.triton_interpreter import (
    interpreted_kernels,
    needs_triton,
    tilings,
    triton_session,
)
from tests.triton_races import MemoryWatch, watch_memory

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

PROGRAMS = 3
EARLY, LATE = {"EARLY": True, "WAITS": True}, {"EARLY": False, "WAITS": True}
AT_ONCE = {"FIRST_WAITS": False, "SIGNALS": True}
AFTER_WAITING = {"FIRST_WAITS": True, "SIGNALS": True}
AT_ITS_END = {"FIRST_WAITS": False, "SIGNALS": False}


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted, and watched where a test says so."""
    with interpreted_kernels(monkeypatch):
        yield


@pytest.fixture
def kernels() -> ModuleType:
    from tests.engine.models import racing_kernels  # late: needs Triton

    return racing_kernels


def numbers(count: int = 16) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def found(watch: MemoryWatch) -> list[str]:
    return list(watch.conflicts)


def test_two_programs_that_write_one_place_are_found(kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.write_own[(PROGRAMS,)](numbers(), 4)
        kernels.write_first[(1,)](numbers())
    assert not watch.conflicts
    with watch_memory() as watch:
        kernels.write_first[(2,)](numbers())
    line = "racing_kernels.py:12"
    assert found(watch) == [f"write_first: programs, {line} and {line}"]


def test_a_store_of_two_numbers_in_one_place_is_found(kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.write_twice[(1,)](numbers(), 4)
    assert [conflict.split(" ", 1)[1] for conflict in found(watch)] == [
        "stores two values in one place"
    ]
    with watch_memory() as watch:
        kernels.write_same[(1,)](numbers(), 4)
    assert not watch.conflicts


@pytest.mark.parametrize(
    ("barrier", "semantics", "scope", "races"),
    [
        (True, "acq_rel", "gpu", 0),
        (False, "acq_rel", "gpu", 2),  # nor are its own number and what it reads of it
        (True, "relaxed", "gpu", 1),
        (True, "acq_rel", "cta", 2),  # the tickets themselves, too
    ],
)
def test_a_ticket_orders_what_precedes_it_and_a_barrier(
    barrier: bool, semantics: str, scope: str, races: int, kernels: ModuleType
) -> None:
    total = numbers(1)
    with watch_memory() as watch:
        kernels.sum_in_turn[(PROGRAMS,)](
            numbers(), numbers(1), total, PROGRAMS, barrier, semantics, scope
        )
    assert total.item() == 6  # as programs run one after another here
    assert len(watch.conflicts) == races


def test_a_ticket_does_not_order_what_came_before_it_in_both_programs(
    kernels: ModuleType,
) -> None:
    with watch_memory() as watch:
        kernels.write_before_turn[(PROGRAMS,)](numbers(), numbers(1))
    (conflict,) = found(watch)
    assert conflict.startswith("write_before_turn: programs, ")


@pytest.mark.parametrize(("asked", "races"), [(1, False), (2, True)])
def test_who_takes_a_ticket_knows_all_that_its_owner_knew(
    asked: int, races: bool, kernels: ModuleType
) -> None:
    with watch_memory() as watch:
        kernels.pass_on[(3,)](numbers(), numbers(1), numbers(3), asked)
    assert bool(watch.conflicts) == races


def test_an_earlier_ticket_takes_nothing_from_what_a_later_one_told(kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.ask_for_the_later_first[(2,)](numbers(), numbers(1), numbers(2))
    assert not watch.conflicts


def test_a_program_that_another_may_come_before_is_found(kernels: ModuleType) -> None:
    """In the order of their numbers the ticket would order them."""
    with watch_memory() as watch:
        for _ in range(8):
            kernels.read_unasked[(2,)](numbers(), numbers(1))
    (conflict,) = found(watch)
    assert conflict.startswith("read_unasked: programs, ")


@pytest.mark.parametrize("taken", [1, 4])
@pytest.mark.parametrize("barrier", [True, False])
def test_tickets_of_several_threads_order_what_follows_a_barrier(
    barrier: bool, taken: int, kernels: ModuleType
) -> None:
    with watch_memory() as watch:
        kernels.sum_by_several_tickets[(PROGRAMS,)](
            numbers(), numbers(4), numbers(4), PROGRAMS, taken, 4, barrier
        )
    assert bool(watch.conflicts) != barrier


@pytest.mark.parametrize("barrier", [True, False])
def test_a_number_that_one_thread_writes_and_others_still_read_is_found(
    barrier: bool, kernels: ModuleType
) -> None:
    with watch_memory() as watch:
        kernels.count_up[(1,)](numbers(), barrier)
        kernels.add_one[(1,)](numbers(128), 128)
    assert bool(watch.conflicts) != barrier


@pytest.mark.parametrize(("width", "warps", "races"), [(64, 2, False), (64, 4, True)])
def test_a_place_is_one_threads_where_there_are_as_many_as_threads(
    width: int, warps: int, races: bool, kernels: ModuleType
) -> None:
    with watch_memory() as watch:
        kernels.add_one[(1,)](numbers(width), width, num_warps=warps)
    assert bool(watch.conflicts) == races


def test_places_that_are_masked_may_be_anywhere(kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.add_one_below[(1,)](numbers(128), 100, 128)
    assert not watch.conflicts


def test_a_read_that_has_an_order_hides_no_later_one_without(kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.read_own_and_next[(1,)](numbers(128), numbers(128), 128)
    (conflict,) = found(watch)
    assert conflict.startswith("read_own_and_next: one program's threads, ")


def test_a_number_is_touched_wherever_a_part_of_it_is(kernels: ModuleType) -> None:
    whole = numbers(1)
    with watch_memory() as watch:
        kernels.count_up_by_half[(1,)](whole, whole.view(torch.int32))
    assert len(watch.conflicts) == 1


@pytest.mark.parametrize("barrier", [True, False])
def test_the_same_places_in_other_threads_are_found(barrier: bool, kernels: ModuleType) -> None:
    with watch_memory() as watch:
        kernels.double_other_half[(1,)](numbers(128), 256, barrier)
    assert bool(watch.conflicts) != barrier


@pytest.mark.parametrize(
    ("launches", "overlaps", "races"),
    [
        ([LATE | AT_ONCE], True, True),
        ([LATE | AT_ONCE], False, False),
        ([LATE | AFTER_WAITING], True, True),
        ([LATE | AT_ITS_END], True, True),
        ([LATE | AT_ONCE, LATE | AT_ONCE], True, True),
        ([LATE | AT_ONCE, LATE | AFTER_WAITING], True, False),
        ([LATE | AT_ONCE, LATE | AT_ITS_END], True, False),
    ],
)
def test_what_is_read_before_waiting_beside_what_still_runs_is_found(
    launches: list[dict[str, bool]], overlaps: bool, races: bool, kernels: ModuleType
) -> None:
    """The first of these kernels writes what one more after them reads early."""
    written = [numbers(1) for _ in launches]
    with watch_memory() as watch:
        for target, constants in zip(written, launches, strict=True):
            kernels.copy_next[(1,)](numbers(1), target, **constants, launch_pdl=True)
        assert not watch.conflicts
        reader = EARLY | AT_ITS_END | ({"launch_pdl": True} if overlaps else {})
        kernels.copy_next[(1,)](written[0], numbers(1), **reader)
    assert bool(watch.conflicts) == races


def test_a_kernel_that_does_not_wait_is_found(kernels: ModuleType) -> None:
    never = {"EARLY": False, "WAITS": False} | AT_ITS_END
    with watch_memory() as watch:
        kernels.copy_next[(1,)](numbers(1), numbers(1), **never)
    assert not watch.conflicts  # it begins in turn
    with watch_memory() as watch:
        kernels.copy_next[(1,)](numbers(1), numbers(1), **never, launch_pdl=True)
    assert found(watch) == ["copy_next: it may end before the kernel before it"]
    with watch_memory() as watch:
        kernels.wait_in_first[(PROGRAMS,)](numbers(), launch_pdl=True)
    assert not watch.conflicts  # it ends with its last program


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Drafts a chain by a program, of products in parts and attention in several chunks; then runs a
    row that may leave early.
    """
    set_chunk(monkeypatch, 4)
    _, decoder, source = build("llama", torch.float16)
    from bild_lab.engine.models.native.gpu.tilings import streaming  # late: needs Triton

    tiling = streaming(32, 32, 1, 2, 2, split=2)

    def run() -> None:
        with tilings(tiling):
            session = triton_session(decoder, source, 32)
            session.draft([5], ChainSpec(3, frozenset(), threshold=0.0))
            session.forward_until_confident(7, 0.0)

    return run


@torch.inference_mode()
def test_the_kernels_need_each_of_their_barriers(
    forwards: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch_memory() as watch:
        forwards()
    assert not watch.conflicts
    monkeypatch.setattr(MemoryWatch, "barrier", lambda self: None)
    with watch_memory() as watch:
        forwards()
    racing = {conflict.split(":", 1)[0] for conflict in watch.conflicts}
    assert racing == {
        "project",
        "residual",
        "feed_forward",
        "attend",
        "choose",
        "leave_if_confident",
    }


@torch.inference_mode()
def test_a_forward_begins_after_all_before_it(
    forwards: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first kernel lets the next begin only then, as those read the tables early."""
    from bild_lab.engine.models.native.gpu import rows

    wait, start = rows.wait_for_previous, rows.start_next

    def start_and_wait(overlap: bool) -> None:
        start(overlap)
        wait(overlap)

    monkeypatch.setattr(rows, "wait_for_previous", start_and_wait)
    with watch_memory() as watch:
        forwards()
    assert any("project before its wait and choose" in conflict for conflict in watch.conflicts)


@torch.inference_mode()
def test_a_kernel_after_a_measurement_begins_in_turn(
    forwards: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bild_lab.engine.models.native.gpu import plan

    monkeypatch.setattr(plan, "after_measurements", iter)
    with watch_memory() as watch:
        forwards()
    assert any("and leave_if_confident" in conflict for conflict in watch.conflicts)
