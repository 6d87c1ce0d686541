"""AutoJudge's search against the algorithm written down without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.training.modules.judge_search import Unchanged, search
from tests.engine.acceptance.test_judge import last_state
from tests.policies import in_memory
from tests.stubs import NextLogits, uncached
from tests.tiny import TINY, relative_of

LENGTH = 9


def parity(tokens: Sequence[int]) -> int:
    """Stands in for the outcome of a task."""
    return sum(tokens[-3:]) % 2


def same_parity(own: tuple[int, ...]) -> Unchanged:
    return lambda tokens: parity(tokens) == parity(own)


def greedy(logits: NextLogits, text: list[int], length: int, end: int) -> list[int]:
    text = list(text)
    while len(text) < length and text[-1] != end:
        text.append(int(logits(text).argmax()))
    return text


def algorithm(target: NextLogits, draft: NextLogits, prompt: list[int], end: int) -> tuple[list[int], list[tuple]]:
    """Algorithm 1 of the paper, with every forward anew."""
    length = len(prompt) + LENGTH
    own = response = greedy(target, prompt, length, end)
    border, found = len(prompt), []
    while True:
        choices = [int(draft(response[:at]).argmax()) for at in range(border, len(response))]
        mismatches = [at for at, token in enumerate(choices, border) if token != response[at]]
        if not mismatches:
            return response[len(prompt) :], found
        at = mismatches[0]
        swapped = [*response[:at], choices[at - border]]
        alternative = swapped if swapped[-1] == end else greedy(target, swapped, length, end)
        changes = parity(alternative[len(prompt) :]) != parity(own[len(prompt) :])
        found.append((at - len(prompt), response[at], swapped[-1], changes, swapped))
        response = response if changes else alternative
        border = at + 1


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_search_is_that_of_the_paper(family: str) -> None:
    kinds, ended = set(), False
    for seed in range(3):
        module = TINY[family](seed, layers=1).double()
        other = relative_of(module, 40 + seed, 0.5).double()
        source = Source((0,), torch.tensor([[7, 9, 1]])) if family == "t5" else Source((2, 7, 9))
        first = greedy(uncached(module, source), list(source.prompt), len(source.prompt) + LENGTH, -1)
        end = first[-2] if seed else -1  # a token at which some of the texts end
        limits = Limits(len(source.prompt), LENGTH, frozenset([end]))
        expected, steps = algorithm(uncached(module, source), uncached(other, source), list(source.prompt), end)
        found = search(in_memory(module, "native"), in_memory(other, "native"), Request(source, limits), same_parity)
        assert list(found.kept) == expected
        seen = [(one.place, one.target_token, one.draft_token, one.important) for one in found.mismatches]
        assert seen == [step[:4] for step in steps]
        for one, (*_, swapped) in zip(found.mismatches, steps, strict=True):
            tokens = torch.tensor([swapped])
            inputs = {"input_ids": tokens} if family == "llama" else {"decoder_input_ids": tokens}
            if family == "t5":
                inputs["input_ids"] = source.encoder_ids
            torch.testing.assert_close(one.hidden, last_state(module, inputs)[-1].float(), atol=1e-5, rtol=1e-5)
        kinds |= {one.important for one in found.mismatches}
        ended |= len(found.own) < LENGTH
    assert kinds == {True, False} and ended


def test_models_that_agree_have_no_mismatches() -> None:
    model = in_memory(TINY["llama"](1, layers=1), "native")
    found = search(model, model, Request(Source((2, 7)), Limits(2, 5)), same_parity)
    assert found.mismatches == () and found.kept == found.own and len(found.own) == 5
