"""Nothing is met for the first time while the clock runs: libraries look for kernels, and load them,
at each new shape of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.timing import TimingOptions, time_methods
from tests.policies import in_memory
from tests.pretended import pretended_gpu, tensor
from tests.pretended.tensor import DEVICE
from tests.tiny import START, tiny_llama

PROMPTS = (3, 5, 9, 12)  # tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU takes its place")


@dataclass
class Shapes:
    """The matrix products that the device has met, by their operation and shapes."""

    met: set[tuple[Any, ...]] = field(default_factory=set)

    def note(self, function: Any, arguments: Any) -> None:
        name = function.overloadpacket.__name__
        if name in tensor.PRODUCTS:
            shapes = [tuple(one.shape) for one in arguments if isinstance(one, torch.Tensor)]
            self.met.add((name, *shapes))


@dataclass
class Noting:
    """Notes how many shapes each decoding of a text met for the first time."""

    method: DraftThenVerify
    shapes: Shapes
    new_shapes: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def decode(self, request: Request, trace: Trace) -> list[int]:
        before = len(self.shapes.met)
        tokens = self.method.decode(request, trace)
        counts = self.new_shapes.setdefault(request.source.prompt, [])
        counts.append(len(self.shapes.met) - before)
        return tokens

    def stream(self, request: Request, trace: Trace) -> Iterator[list[int]]:
        return self.method.stream(request, trace)


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_rehearsal_leaves_no_shape_for_the_timed_part(
    rehearses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it every prompt of another length is met while the clock runs."""
    shapes, dispatch = Shapes(), tensor.dispatch

    def noted(machine: Any, function: Any, arguments: Any, keywords: Any) -> Any:
        shapes.note(function, arguments)
        return dispatch(machine, function, arguments, keywords)

    with pretended_gpu():
        monkeypatch.setattr(tensor, "dispatch", noted)

        def model(seed: int) -> NativeModel:
            return in_memory(tiny_llama(seed).to("cuda"), "native").with_backend(graphs=True)

        target, draft = model(0), model(1)
        methods = {
            "vanilla": Noting(target_alone(target), shapes),
            "speculative": Noting(
                DraftThenVerify(target, ModelDrafter(draft, 3), ExactMatch()), shapes
            ),
        }
        requests = [
            Request(Source((START, *range(4, 3 + length)), device=DEVICE), Limits(length, 8))
            for length in PROMPTS
        ]
        options = TimingOptions(
            rehearses=rehearses,
            compiled_steps=lambda: target.compiled_steps + draft.compiled_steps,
        )
        time_methods(methods, requests, 1, options)
    # a decoding in which a graph was captured is repeated, and only the last counts
    timed = [counts[-1] for method in methods.values() for counts in method.new_shapes.values()]
    assert len(timed) == 2 * len(PROMPTS)
    assert (sum(timed) == 0) == rehearses
