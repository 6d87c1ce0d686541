"""The numbers that explain the spread between machines are measured, once in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bild_lab
from bild_lab.engine.request import Source
from bild_lab.lab.measure import machine
from bild_lab.lab.measure.machine import bandwidth_facts, row_cost_facts, rows_over_one


class SlowRows:
    """A model and its session whose forwards take a millisecond of its clock, and half of one for
    each further row.
    """

    def __init__(self) -> None:
        self.length = 0
        self.counts: list[int] = []
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def start(self, source: Source, room: int) -> SlowRows:
        assert room >= 9
        return self

    def extend(self, tokens: list[int]) -> None:
        self.counts.append(len(tokens))
        self.length += len(tokens)
        self.now_s += 0.001 + 0.0005 * (len(tokens) - 1)

    def rollback(self, length: int) -> None:
        self.length = length


@pytest.mark.parametrize(("device", "passes"), [("cpu", 1), ("cuda", 16)])
def test_the_bandwidth_is_that_of_all_passes_over_the_buffer(
    device: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU many are timed together, as the host's wait takes as long as one."""
    sums = []
    buffer = SimpleNamespace(sum=lambda: sums.append(0.0))
    bytes_read = []
    monkeypatch.setattr(
        torch,
        "ones",
        lambda size, dtype, device: bytes_read.append(size * dtype.itemsize) or buffer,
    )
    monkeypatch.setattr(machine, "median_s", lambda work, synchronize, runs: work() or 1.0)
    gb_per_s = machine.read_gb_per_s(torch.device(device), lambda: None)
    assert len(sums) == passes and bytes_read == [machine.BUFFER_BYTES]
    assert gb_per_s == pytest.approx(passes * machine.BUFFER_BYTES / 1e9)


def test_a_forward_of_eight_rows_is_timed_over_one_of_one_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = SlowRows()
    monkeypatch.setattr(machine, "time", model)
    assert rows_over_one(model, Source((3,)), 8, lambda: None) == pytest.approx(4.5)
    assert set(model.counts) == {1, 8} and model.length == 9


def test_models_of_ours_have_a_cost_and_it_is_measured_once(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_costs", {})
    decoders = [
        bild_lab.load(str(checkpoints / name), policy="vanilla") for name in ("llama", "t5")
    ]
    sources = [decoder.request("w5 w9", 4).source for decoder in decoders]
    costs = [
        row_cost_facts(decoder, source)["eight_rows_cost"]
        for decoder, source in zip(decoders, sources, strict=True)
    ]
    assert all(cost > 0.2 for cost in costs) and len(machine._costs) == 2
    monkeypatch.setattr(machine, "rows_over_one", lambda *_: 99.0)
    assert row_cost_facts(decoders[0], sources[0]) == {"eight_rows_cost": costs[0]}
    torch.set_num_threads(torch.get_num_threads() + 1)  # another setting
    try:
        assert row_cost_facts(decoders[0], sources[0]) == {"eight_rows_cost": 99.0}
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)


def test_nothing_is_timed_that_another_engine_runs_or_that_would_be_compiled() -> None:
    compiled = SimpleNamespace(method=None, running=(SimpleNamespace(compiled=True),))
    judged_alone = SimpleNamespace(method=None, running=())
    for decoder in (compiled, judged_alone):
        assert row_cost_facts(decoder, Source((3,))) == {}


def test_the_bandwidth_is_the_buffers_bytes_over_the_seconds_and_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine._bandwidth.cache_clear()
    monkeypatch.setattr(machine, "BUFFER_BYTES", 2**20)
    monkeypatch.setattr(machine, "median_s", lambda work, *_: 2**20 / 13.24e9 * bool(work()))
    decoder = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")))
    assert bandwidth_facts(decoder)["read_gb_per_s"] == pytest.approx(13.2, abs=0.051)
    monkeypatch.setattr(machine, "median_s", lambda *_: 1.0)
    assert bandwidth_facts(decoder)["read_gb_per_s"] == pytest.approx(13.2, abs=0.051)
    machine._bandwidth.cache_clear()  # what other tests measure


def test_a_median_leaves_out_the_first_two_runs_and_waits_for_the_device_around_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    work_s, waits_s = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]), iter([50.0, 0.5] * 7)

    def take(seconds: Iterator[float]) -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    # what was begun before does not count, what the work left to be done does
    found = machine.median_s(lambda: take(work_s), lambda: take(waits_s))
    assert found == pytest.approx(3.5)
