"""Policies whose draft model has another vocabulary give vanilla's tokens, on every family, engine
and precision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from bild_lab.engine.protocols import Method
from bild_lab.engine.trace import Trace
from bild_lab.engine.vocabularies import TranslatedModel
from bild_lab.lab.point.build import build_method
from bild_lab.screening.recorded_model import RecordedModel
from tests.engine.lossless.greedy import (
    LOSSLESS,
    WINDOW_KNOBS,
    Case,
    Models,
    Seen,
    compare,
    emitted,
)
from tests.engine.lossless.random_models import CASES, cases_of, random_target
from tests.engine.vocabularies.foreign import foreign
from tests.policies import FAMILIES, in_memory, is_peer, parts, shipped
from tests.sessions import needs_kernels
from tests.tiny import relative_of

FEW = 8
ROLLBACK = 0.69  # < ln 2
OWN_PARTS = ("ModelDrafter", "ModelTreeDrafter", "SpeculativeDrafter")
DRAFTING = [
    policy
    for policy in sorted({*LOSSLESS, "bild", "bild_tree"})
    if any(
        str(value).endswith(OWN_PARTS)
        for key, value in parts(policy).items()
        if key.endswith("_target_")
    )
    and "exit" not in policy
    and "skip" not in policy
    and policy != "alpha"  # which accepts nothing
]
# their texts do not pass through every case
TREES = {"speculative_hierarchy", "speculative_tree", "bild_tree"}
WAYS = [*product(DRAFTING, FAMILIES)]


@dataclass(frozen=True)
class ForeignModels(Models):
    """A target whose draft models have other vocabularies."""

    def method(self, policy: str, window: int) -> Method:
        node = copy.deepcopy(shipped(policy))
        for knob in {*WINDOW_KNOBS} & {*node}:
            node[knob] = window
        if "rollback" in node:
            node.rollback = ROLLBACK
        models = {"target": self.target, "draft": self.draft, "second_draft": self.second_draft}
        return build_method(
            node, {name: lambda model=model: model for name, model in models.items()}
        )


@cache
def models_of(
    family: str, engine: str, seed: int, dtype: torch.dtype = torch.float64
) -> ForeignModels:
    target = random_target(family, seed)
    large = in_memory(target.to(dtype), engine)
    small = [relative_of(target, 100 + seed, noise).to(dtype) for noise in (0.05, 0.4)]
    drafts = [foreign(module, engine, seed + place, large) for place, module in enumerate(small)]
    return ForeignModels(large, *drafts, None)


@cache
def cases(family: str, seed: int, count: int) -> list[Case]:
    return cases_of(family, seed, models_of(family, "native", seed), count)


def test_the_drafting_policies_are_known() -> None:
    models = {
        "bild",
        "bild_tree",
        "speculative",
        "speculative_tree",
        "speculative_adaptive",
        "speculative_hierarchy",
    }
    assert models <= set(DRAFTING)
    assert not any(is_peer(policy) for policy in DRAFTING)


@pytest.mark.fast("speculative_tree-llama")
@pytest.mark.parametrize(("policy", "family"), WAYS)
def test_some_texts_are_vanillas(policy: str, family: str) -> None:
    for turn, engine in enumerate(("native", "hf")):
        seen = Seen()
        compare(policy, models_of(family, engine, 0), cases(family, 0, FEW)[turn::2], seen)
        assert seen.accepted and seen.rejections, (engine, seen)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "family"), WAYS)
def test_every_text_is_vanillas(policy: str, family: str) -> None:
    for engine in ("native", "hf"):
        seen = Seen()
        for seed in range(4):
            compare(policy, models_of(family, engine, seed), cases(family, seed, CASES), seen)
        assert not seen.missing() or policy in TREES, (engine, seen)


@pytest.mark.fast("block_verification-t5", "speculative-t5")
@needs_kernels
@pytest.mark.parametrize(("policy", "family"), WAYS)
def test_texts_of_the_kernels_are_vanillas_to_the_last_bit(policy: str, family: str) -> None:
    models = models_of(family, "kernels", 0, torch.bfloat16)
    own = models.method("vanilla", 1)
    expected = [
        replace(one, expected=emitted(own, one.request, Trace())) for one in cases(family, 0, FEW)
    ]
    compare(policy, models, expected, Seen())


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_gives_the_texts_and_the_counts_of_live_runs(family: str) -> None:
    live = models_of(family, "native", 0)
    draft = TranslatedModel(RecordedModel(live.draft.model), live.draft.overlap)
    kept = replace(live, target=RecordedModel(live.target), draft=draft)
    for policy in ("bild", "bild_tree"):
        for case in cases(family, 0, FEW):
            traces = [Trace(), Trace()]
            texts = [
                emitted(models.method(policy, 4), case.request, trace)
                for models, trace in zip((live, kept), traces, strict=True)
            ]
            assert texts[0] == texts[1]
            for one, other in zip(traces[0].rounds, traces[1].rounds, strict=True):
                assert replace(one, stats={}) == replace(other, stats={})
                assert one.stats.keys() == other.stats.keys()
                # a record's scores come from one forward over the whole text
                for name in one.stats:
                    assert one.stats[name] == pytest.approx(other.stats[name], abs=1e-9)
            assert [replace(one, config=None) for one in traces[0].forwards] == [
                replace(one, config=None) for one in traces[1].forwards
            ]
