"""Tests of the traced pass's clock."""

from __future__ import annotations

import time

import pytest

from bild_lab.engine.trace import StageTrace


def test_every_span_keeps_its_start_and_end_since_decoding_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.5, 102.0, 103.0, 107.0, 107.0, 107.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    trace = StageTrace(started=100.0)
    for stage in ("prefill", "draft", "prefill"):
        with trace.span(stage):
            pass
    assert trace.spans == [("prefill", 0.5, 2.0), ("draft", 3.0, 7.0), ("prefill", 7.0, 7.25)]
    assert trace.stages_s == {"prefill": 1.75, "draft": 4.0}


def test_a_span_waits_for_the_device_before_and_after_itself() -> None:
    events: list[str] = []
    with StageTrace(synchronize=lambda: events.append("wait")).span("draft"):
        events.append("work")
    assert events == ["wait", "work", "wait"]
