"""The checks of whole texts pass in Triton's interpreter, and find a planted fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmark.test_kernel_check import CPU, TINY, small  # noqa: F401
from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
)

pytestmark = [needs_triton, pytest.mark.slow, pytest.mark.usefixtures("interpreter", "small")]


@pytest.fixture
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The checks of a tiny pair, with few short texts."""
    from bild_lab.benchmark import decoding_check, kernel_check, kernel_times

    monkeypatch.setattr(decoding_check, "TEXTS", 2)
    monkeypatch.setattr(decoding_check, "NEW_TOKENS", 6)
    monkeypatch.setattr(decoding_check, "REPEATS", 1)
    monkeypatch.setattr(decoding_check, "SHARED_PROMPT", 4)
    monkeypatch.setattr(decoding_check, "MAX_WINDOW", 3)
    monkeypatch.setattr(kernel_times, "REPLAYS", 1)
    monkeypatch.setattr(kernel_times, "median_s", lambda work, *_: work() or 0.001)
    dtype = torch.float32 if request.param == "t5" else torch.float16
    target, draft = (kernel_check.KernelCheck(TINY[request.param], CPU, dtype) for _ in range(2))
    return decoding_check.DecodingCheck(target, draft)


@pytest.mark.parametrize("check", TINY, indirect=True)
def test_texts_are_the_targets_and_every_figure_is_there(check: Any) -> None:
    own, itself, host, speculation = check.findings()
    assert own.right and "speculative decoding" in own.text
    assert "vanilla against itself" in itself.text and itself.right is not None
    assert "ms a token of vanilla" in host.text and host.right is None
    assert "by Theorem 3.8 with c 1.000" in speculation.text


@pytest.mark.parametrize("check", ["llama"], indirect=True)
def test_a_draft_that_is_accepted_unseen_is_found(check: Any) -> None:
    rule = check.speculative(2).acceptance
    accepting = SimpleNamespace(
        **{name: getattr(rule, name) for name in ("accepts_trees", "needs", "required_outputs")},
        start=lambda request: accepting,
        in_round=lambda tokens, scores: (
            lambda draft, logits, request: rule(
                draft, torch.nn.functional.one_hot(draft.tokens, logits.shape[1])[[0, 0]], request
            )
        ),
    )
    speculative = check.speculative
    check.speculative = lambda window: type(speculative(1))(
        check.target, speculative(1).drafter, accepting
    )
    assert check.texts_are_the_targets().right is False


@pytest.mark.parametrize("check", ["llama"], indirect=True)
def test_a_slower_second_arm_is_found(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = check.timed({"vanilla": check.vanilla, "again": check.vanilla})
    for text in timed["again"]:
        text.latency_s[:] = [1.03]
    for text in timed["vanilla"]:
        text.latency_s[:] = [1.0]
    monkeypatch.setattr(check, "timed", lambda methods: timed)
    assert check.vanilla_is_itself().right is False
    for text in timed["again"]:
        text.latency_s[:] = [1.01]
    assert check.vanilla_is_itself().right is True
