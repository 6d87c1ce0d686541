"""Tests of the traced pass."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.acceptance import ExactMatch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import ModelDrafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.lab.measure.timing import trace_stages
from tests.stubs import StubModel


def next_number() -> StubModel:
    """Always says the number after the last one."""
    return StubModel(lambda tokens: torch.nn.functional.one_hot(torch.tensor(tokens[-1] + 1), 10).double())


def test_the_spans_of_an_example_are_its_rounds_in_turn_and_add_up_to_the_stages() -> None:
    method = DraftThenVerify(next_number(), ModelDrafter(next_number(), 3), ExactMatch())
    lengths = (8, 4)
    requests = [Request(Source((0,)), Limits(1, length)) for length in lengths]
    stages = trace_stages(method, requests, 0, lambda: None)
    # a round emits four tokens: three that were drafted and the target's own
    assert [[stage for stage, _, _ in spans] for spans in stages.spans] == [
        ["prefill", *["draft", "verify"] * (length // 4)] for length in lengths
    ]
    for spans in stages.spans:
        moments = [moment for _, start, end in spans for moment in (start, end)]
        assert 0 < moments[0] and moments == sorted(moments)
    for stage in ("prefill", "draft", "verify"):
        parts = [end - start for spans in stages.spans for name, start, end in spans if name == stage]
        assert stages.seconds[stage] == pytest.approx(sum(parts))
    assert stages.seconds["host"] > 0
