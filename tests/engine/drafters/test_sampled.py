"""Drafters that decide when to stop, or draft speculatively, leave sampled text distributed exactly as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import SpeculativeSampling
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.drafters import AdaptiveWindow, LowConfidence, ModelDrafter, SpeculativeDrafter
from bild_lab.engine.protocols import Drafter
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.engine.drafters.chances import distribution
from tests.stubs import NextLogits, StubModel
from tests.thinned import thinned

# one row for each kind of context; of every token, TARGET / MIDDLE and MIDDLE / SMALL are 1/2 or at least 1
TARGET = ([1 / 8, 7 / 8], [7 / 8, 1 / 8], [1 / 4, 3 / 4])
MIDDLE = ([1 / 4, 3 / 4], [3 / 4, 1 / 4], [1 / 2, 1 / 2])
SMALL = ([1 / 2, 1 / 2], [1 / 2, 1 / 2], [1, 0])
NEW_TOKENS = 3


def by_context(rows: tuple[list[float], ...]) -> NextLogits:
    """Every token of the text so far matters, so that a stale cache would too."""
    table = torch.tensor(rows, dtype=torch.float64).log()

    def next_logits(tokens: list[int]) -> Tensor:
        return table[kind(tokens)]

    return next_logits


def kind(tokens: list[int]) -> int:
    return sum((index + 1) * (token + 1) for index, token in enumerate(tokens)) % len(TARGET)


DRAFTERS: dict[str, Callable[[StubModel, StubModel], Drafter]] = {
    "fixed": lambda middle, small: ModelDrafter(middle, 2),
    "adaptive": lambda middle, small: ModelDrafter(middle, AdaptiveWindow(0.05, 3, prior=0.6, memory=0.5)),
    "confidence": lambda middle, small: ModelDrafter(middle, 3, LowConfidence(0.6)),
    "hierarchy": lambda middle, small: SpeculativeDrafter(middle, ModelDrafter(small, 1), 2),
}


@pytest.mark.parametrize("drafter", thinned(DRAFTERS, 2))
def test_sampled_text_is_exactly_distributed_as_the_targets(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = DraftThenVerify(
        StubModel(by_context(TARGET)),
        DRAFTERS[drafter](StubModel(by_context(MIDDLE)), StubModel(by_context(SMALL))),
        SpeculativeSampling(),
    )
    request = Request(Source((0,)), Limits(1, NEW_TOKENS), Sampling(temperature=1.0))
    lengths = set()

    def run() -> tuple[int, ...]:
        trace = Trace()
        text = tuple(method.decode(request, trace))
        lengths.update(len(each.drafted) for each in trace.rounds)
        return text

    found = distribution(run, monkeypatch)
    assert set(found) == {(0, *rest) for rest in itertools.product((0, 1), repeat=NEW_TOKENS)}
    for text, probability in found.items():
        expected = 1.0
        for end in range(1, len(text)):
            expected *= TARGET[kind(list(text[:end]))][text[end]]
        assert probability == pytest.approx(expected, abs=1e-12)
    assert len(lengths) > 1, lengths  # drafts of several lengths were met
