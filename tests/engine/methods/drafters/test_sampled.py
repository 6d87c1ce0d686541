"""Drafters that decide when to stop, or draft speculatively, leave sampled text distributed exactly
as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.speculative.combined_drafters import HybridDrafter, SpeculativeDrafter
from bild_lab.engine.methods.speculative.draft_model import AdaptiveWindow, ModelDrafter
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.protocols import Drafter
from tests.engine.methods.drafters.chances import by_context, require_targets_distribution
from tests.stubs import StubModel

# one row for each kind of context; of every token, TARGET / MIDDLE and MIDDLE / SMALL are 1/2 or at
# least 1
TARGET = ([1 / 8, 7 / 8], [7 / 8, 1 / 8], [1 / 4, 3 / 4])
MIDDLE = ([1 / 4, 3 / 4], [3 / 4, 1 / 4], [1 / 2, 1 / 2])
SMALL = ([1 / 2, 1 / 2], [1 / 2, 1 / 2], [1, 0])
NEW_TOKENS = 3


DRAFTERS: dict[str, Callable[[StubModel, StubModel], Drafter]] = {
    "fixed": lambda middle, small: ModelDrafter(middle, 2),
    "adaptive": lambda middle, small: ModelDrafter(
        middle, AdaptiveWindow(0.05, 3, prior=0.6, memory=0.5)
    ),
    "confidence": lambda middle, small: ModelDrafter(middle, 3, 0.6),
    "hierarchy": lambda middle, small: SpeculativeDrafter(middle, ModelDrafter(small, 1), 2),
    "hybrid": lambda middle, small: HybridDrafter(ModelDrafter(middle, 3, 0.6), NoDraft(middle), 2),
    "hybrid of models": lambda middle, small: HybridDrafter(
        ModelDrafter(middle, 3, 0.6), ModelDrafter(middle, 1), 2
    ),
    "nested hybrid": lambda middle, small: HybridDrafter(
        HybridDrafter(ModelDrafter(middle, 3, 0.6), NoDraft(middle), 2), ModelDrafter(middle, 1), 3
    ),
    "hybrid of a hierarchy": lambda middle, small: HybridDrafter(
        SpeculativeDrafter(middle, ModelDrafter(small, 1), 2), ModelDrafter(middle, 1), 3
    ),
}


@pytest.mark.fast("fixed", "confidence", "hybrid", "nested hybrid")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_text_is_exactly_distributed_as_the_targets(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DraftThenVerify(
        StubModel(by_context(TARGET)),
        DRAFTERS[drafter](StubModel(by_context(MIDDLE)), StubModel(by_context(SMALL))),
        SpeculativeSampling(),
    )
    traces = require_targets_distribution(method, by_context(TARGET), (0,), NEW_TOKENS, monkeypatch)
    assert set(traces) == {(0, *rest) for rest in itertools.product((0, 1), repeat=NEW_TOKENS)}
    rounds = [each for several in traces.values() for trace in several for each in trace.rounds]
    assert len({len(each.drafted) for each in rounds}) > 1  # drafts of several lengths were met
