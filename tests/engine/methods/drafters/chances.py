"""Runs something random once for every way its chances can fall: exact distributions of what it
returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative import draft_model as model
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from tests.stubs import NextLogits

T = TypeVar("T", bound=Hashable)
# stand for all uniform numbers where every threshold is 1/2 or no threshold at all
HALVES = (0.25, 0.75)


class Chances:
    """Takes the place of torch's random numbers, and is told which way each falls."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self.weights: list[list[float]] = []

    def multinomial(
        self, probs: Tensor, count: int, generator: torch.Generator | None = None
    ) -> Tensor:
        assert count == 1
        return torch.tensor([[self._fall((row / row.sum()).tolist())] for row in probs])

    def pick(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        return self.multinomial(probs, 1)[:, 0]

    def rand(self, size: int, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.tensor([HALVES[self._fall([0.5, 0.5])] for _ in range(size)], dtype=dtype)

    def rewind(self) -> bool:
        """Choose the next way; False where all have been taken."""
        while self._script:
            taken, weights = self._script.pop(), self.weights.pop()
            for other in range(taken + 1, len(weights)):
                if weights[other] > 0:
                    self._script.append(other)
                    self.weights.clear()
                    return True
        return False

    @property
    def probability(self) -> float:
        """Of the way that was just taken."""
        product = 1.0
        for taken, weights in zip(self._script, self.weights, strict=True):
            product *= weights[taken]
        return product

    def _fall(self, weights: list[float]) -> int:
        if len(self.weights) == len(self._script):
            self._script.append(next(index for index, weight in enumerate(weights) if weight > 0))
        self.weights.append(weights)
        return self._script[len(self.weights) - 1]


def distribution(run: Callable[[], T], monkeypatch: pytest.MonkeyPatch) -> dict[T, float]:
    """The probability of everything that `run` can return."""
    found: dict[T, float] = defaultdict(float)
    chances = Chances()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", chances.multinomial)
        patched.setattr(torch, "rand", chances.rand)
        patched.setattr(
            model.ModelDrafter, "_uniforms", lambda drafter, window: torch.zeros(window)
        )
        patched.setattr(model, "pick", chances.pick)
        more = True
        while more:
            outcome = run()
            found[outcome] += chances.probability
            more = chances.rewind()
    return dict(found)


def by_context(rows: Sequence[Sequence[float]]) -> NextLogits:
    """One of these distributions after each text: every token of it matters, so that a stale cache
    would too.
    """
    table = torch.tensor(rows, dtype=torch.float64).log()
    return lambda tokens: table[
        sum((at + 1) * (token + 1) for at, token in enumerate(tokens)) % len(rows)
    ]


def require_targets_distribution(
    method: DraftThenVerify,
    target: NextLogits,
    prompt: tuple[int, ...],
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[tuple[int, ...], list[Trace]]:
    """Every text that the method samples has exactly the probability that the target gives it.

    Returns its traces.
    """
    request = Request(Source(prompt), Limits(len(prompt), length), Sampling(temperature=1.0))
    traces: dict[tuple[int, ...], list[Trace]] = defaultdict(list)

    def run() -> tuple[int, ...]:
        text = tuple(method.decode(request, trace := Trace()))
        traces[text].append(trace)
        return text

    found = distribution(run, monkeypatch)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    for text, probability in found.items():
        expected = 1.0
        for end in range(len(prompt), len(text)):
            expected *= float(target(list(text[:end]))[text[end]].exp())
        assert probability == pytest.approx(expected, abs=1e-12), text
    return traces
