"""Draft models of another vocabulary on the pretended GPU: the CPU's tokens, step by step and as
one CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bild_lab.engine.trace import Trace
from bild_lab.engine.vocabularies import TranslatedModel
from tests.engine.lossless.greedy import emitted
from tests.engine.lossless.random_models import random_target
from tests.engine.vocabularies.foreign import foreign
from tests.engine.vocabularies.test_lossless import WAYS, ForeignModels, cases
from tests.policies import in_memory
from tests.pretended import pretended_gpu
from tests.pretended.tensor import DEVICE
from tests.tiny import relative_of

FEW, WINDOW = 3, 4


def on_gpu(family: str, engine: str) -> ForeignModels:
    """As `models_of` in the tests of losslessness."""
    target = random_target(family, 0)
    kind = "hf" if engine == "hf" else "native"
    large = in_memory(target.to("cuda"), kind)
    small = [relative_of(target, 100, noise).to("cuda") for noise in (0.02, 0.4)]
    drafts = [foreign(module, kind, place, large) for place, module in enumerate(small)]
    if engine == "compiled":
        drafts = [
            TranslatedModel(each.model.with_backend(compiled=True), each.overlap) for each in drafts
        ]
    return ForeignModels(large, *drafts, None)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf", "compiled"])
@pytest.mark.parametrize(
    ("policy", "family"), [way for way in WAYS if not way[0].startswith("bild")]
)
def test_texts_are_those_of_the_cpus_target(policy: str, family: str, engine: str) -> None:
    expected = cases(family, 0, FEW)
    with pretended_gpu() as machine:
        method = on_gpu(family, engine).method(policy, WINDOW)
        for case in expected:
            request = replace(case.request, source=case.request.source.to(DEVICE))
            trace = Trace()
            launched = machine.launched
            assert emitted(method, request, trace) == case.expected
            assert machine.launched > launched
            assert trace.draft_calls or len(trace.rounds) == 1
