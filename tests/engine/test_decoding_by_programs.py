"""What a target decodes in programs of several tokens is what it decodes token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from bild_lab.engine import decode
from bild_lab.engine.batch_decoding import decode_batch
from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.vanilla import NoDraft, target_alone
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.layers import NativeLayers
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import StageTrace, Trace
from tests.policies import in_memory
from tests.sessions import forwards_of
from tests.tiny import PAD, START, tiny_llama, tiny_t5

NEW_TOKENS = 75  # more than two programs


def target_and_source(family: str) -> tuple[NativeModel, Source]:
    if family == "t5":
        words = torch.tensor([[5, 9, 12, 7]])
        return in_memory(tiny_t5(1), "kernels"), Source((PAD,), words)
    return in_memory(tiny_llama(1), "kernels"), Source((START, 5, 9, 12))


class OnAccelerator:
    """A model that says it is on an accelerator."""

    device = torch.device("cuda")

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def on_accelerator(target: NativeModel) -> DraftThenVerify:
    return DraftThenVerify(OnAccelerator(target), NoDraft(target), ExactMatch())


def token_by_token(method: DraftThenVerify, request: Request, trace: Trace) -> list[int]:
    tokens = list(request.source.prompt)
    for new_tokens in method.stream(request, trace):
        assert len(new_tokens) == 1
        tokens += new_tokens
    return tokens


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes how often the target's layers run a pass, and how often a program."""
    calls: list[str] = []
    run, draft = NativeLayers.run, NativeLayers.draft

    def noted_run(self: NativeLayers, *arguments: object) -> object:
        calls.append("pass")
        return run(self, *arguments)

    def noted_draft(self: NativeLayers, *arguments: object) -> object:
        calls.append("program")
        return draft(self, *arguments)

    monkeypatch.setattr(NativeLayers, "run", noted_run)
    monkeypatch.setattr(NativeLayers, "draft", noted_draft)
    return calls


@pytest.mark.parametrize("end", [None, 20, 33, 34])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_programs_decode_the_tokens_and_forwards_of_single_passes(
    family: str, end: int | None, passes: list[str]
) -> None:
    target, source = target_and_source(family)
    method, prompt = target_alone(target), len(source.prompt)
    request = Request(source, Limits(prompt, NEW_TOKENS))
    if end is not None:
        text = token_by_token(method, request, Trace())[prompt:]
        request = replace(
            request, limits=replace(request.limits, end_tokens=frozenset([text[end]]))
        )
    expected = token_by_token(method, request, expected_trace := Trace())
    passes.clear()
    trace = Trace()
    assert on_accelerator(target).decode(request, trace) == expected
    programs = -(-(len(expected) - prompt - 1) // decode.PROGRAM_TOKENS)
    assert passes == ["pass", *["program"] * programs]
    assert trace.rounds == expected_trace.rounds and len(trace.rounds) == len(expected) - prompt
    assert forwards_of(trace) == forwards_of(expected_trace)


@dataclass(frozen=True)
class LastToken:
    """A stop string that a token completes."""

    count: int

    def completed(self, tokens: Sequence[int]) -> bool:
        return len(tokens) == self.count


@pytest.mark.parametrize("count", [1, 2, 9, 12, 75])
def test_a_text_ends_with_a_stop_string_that_no_program_knows(
    count: int, passes: list[str]
) -> None:
    target, source = target_and_source("llama")
    limits = Limits(len(source.prompt), NEW_TOKENS, stop=LastToken(count))
    request = Request(source, limits)
    expected = token_by_token(target_alone(target), request, expected_trace := Trace())
    passes.clear()
    trace = Trace()
    assert on_accelerator(target).decode(request, trace) == expected
    assert len(expected) == len(source.prompt) + count and passes.count("pass") == 1
    assert trace.rounds == expected_trace.rounds
    lost = len(trace.forwards) - len(expected_trace.forwards)
    assert 0 <= lost < decode.PROGRAM_TOKENS_BEFORE_STOP


def test_who_reads_logits_or_samples_gets_each_token_by_itself(passes: list[str]) -> None:
    target, source = target_and_source("llama")
    limits = Limits(len(source.prompt), 5)
    trace = StageTrace(score=lambda logits, tokens: float(logits.shape[0]))
    on_accelerator(target).decode(Request(source, limits), trace)
    assert trace.scored == trace.log_probability == 5
    sampled = Request(source, limits, Sampling(1.0), torch.Generator().manual_seed(0))
    on_accelerator(target).decode(sampled, Trace())
    # nor does a CPU, which waits for nobody
    target_alone(target).decode(Request(source, limits), Trace())
    assert passes == ["pass"] * 15


def test_texts_of_a_batch_go_on_token_by_token(passes: list[str]) -> None:
    target, source = target_and_source("llama")
    requests = [Request(source, Limits(len(source.prompt), count)) for count in (3, 40)]
    alone = [target_alone(target).decode(request, Trace()) for request in requests]
    passes.clear()
    texts = decode_batch(on_accelerator(target), requests, Batch(2))
    assert [[*source.prompt, *text.token_ids] for text in texts] == alone
    assert set(passes) == {"pass"}


def test_a_session_without_programs_goes_on_token_by_token(passes: list[str]) -> None:
    target, source = target_and_source("t5")
    request = Request(source, Limits(1, 12))
    expected = target_alone(target).decode(request, Trace())
    passes.clear()
    trace = Trace()
    assert on_accelerator(target.without_fused_drafting()).decode(request, trace) == expected
    assert passes == ["pass", "program", *["pass"] * 11] and len(trace.rounds) == 12
