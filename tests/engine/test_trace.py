"""What a trace records of each round, and the clock of the traced pass."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.trace import StageTrace, Trace
from bild_lab.errors import UserError


def test_every_span_keeps_its_start_and_end_since_decoding_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


END = frozenset({1})


def test_drafted_tokens_after_an_end_token_do_not_count() -> None:
    trace = Trace()
    draft = Draft(torch.tensor([4, 1, 6, 7]), calls=4)
    # 7 was rejected, behind the end
    trace.step(draft, Verdict((0, 1, 2), 9, {"distance": (0.1, 0.2, 0.3, 0.4)}), END)
    trace.step(draft, Verdict((0,), 9), END)
    trace.step(draft, None, END)
    assert [(each.drafted, each.accepted, each.next_token) for each in trace.rounds] == [
        ((4, 1), 2, 6),  # the target's own token behind the end token
        ((4, 1), 1, 9),
        ((4, 1), 2, None),
    ]
    assert trace.rounds[0].stats == {"distance": (0.1, 0.2)}
    assert [(each.depth, each.branch) for each in trace.rounds] == [(2, None)] * 3
    assert trace.rollbacks == 1
    assert trace.draft_calls == 12  # the forwards that ran


def test_a_branch_that_ends_the_text_is_accepted_as_a_whole() -> None:
    trace = Trace()
    draft = Draft(torch.tensor([4, 1, 6, 7]), parents=torch.tensor([-1, 0, 1, 2]))
    trace.step(draft, Verdict((0, 1, 2), 9), END)
    trace.step(draft, Verdict((0,), 9), END)
    assert [(each.accepted, each.depth, each.next_token) for each in trace.rounds] == [
        (2, 2, 6),
        (1, 4, 9),
    ]
    assert trace.rollbacks == 1


def test_a_tree_counts_every_node_and_may_go_on_after_an_end_token() -> None:
    trace = Trace()
    tree = Draft(
        torch.tensor([1, 5, 6]), parents=torch.tensor([-1, -1, 1]), calls=2, stats={"width": 2}
    )
    trace.step(tree, Verdict((1,), 9, {"distance": (0.1, 0.2, 0.3), "entropy": 0.5}), END)
    (one,) = trace.rounds
    assert (one.drafted, one.accepted, one.depth, one.next_token) == ((1, 5, 6), 1, 2, 9)
    assert one.stats == {"width": 2, "distance": (0.1, 0.2, 0.3), "entropy": 0.5}
    assert one.rollback


def test_a_trace_adds_its_rounds_up() -> None:
    trace = Trace()
    chain = Draft(torch.tensor([4, 5, 6]), calls=3, stats={"fallback": True})
    trace.step(chain, Verdict((0, 1), 9))  # the third token was replaced
    trace.step(chain, Verdict((0, 1, 2), 9))
    # the text ended unverified
    trace.step(Draft(torch.tensor([4]), calls=2, stats={"fallback": False}), None)
    assert (trace.target_calls, trace.draft_calls, trace.drafted, trace.accepted) == (2, 8, 7, 6)
    assert (trace.fallbacks, trace.rollbacks) == (2, 1)


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"accepted": (1, 0)}, "a round records 'accepted' itself"),
        ({"entropy": torch.ones(2)}, "the statistic 'entropy' .* got Tensor"),
        ({"entropy": (0.5, torch.ones(()))}, "the statistic 'entropy' .* got Tensor"),
        ({"entropy": np.float32(0.5)}, "the statistic 'entropy' .* got float32"),
    ],
)
def test_statistics_that_cannot_be_stored_are_refused_at_once(
    stats: dict[str, Any], message: str
) -> None:
    draft = Draft(torch.tensor([3, 4]))
    with pytest.raises(UserError, match=message):
        Trace().step(draft, Verdict((0,), 5, stats=stats))
    with pytest.raises(UserError, match=message):
        Trace().step(replace(draft, stats=stats), Verdict((0,), 5))
    kept = {"flag": True, "why": "a word", "nats": (0.5, 1), "none": None, "both": ((1, 2), {})}
    trace = Trace()
    trace.step(draft, Verdict((0,), 5, stats=kept))
    assert trace.rounds[0].stats == kept
