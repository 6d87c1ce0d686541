"""Greedy decoding on random models, in float64 where nothing ties: every lossless policy gives
vanilla's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.engine.lossless.greedy import (
    LOSSLESS,
    Case,
    Models,
    Seen,
    compare,
    drafts,
    table_of,
)
from tests.engine.lossless.random_models import CASES, DEVICE, cases_of, models_of
from tests.policies import FAMILIES, REFUSED, WINDOWED, engines, is_peer
from tests.sessions import needs_kernels

PAIRS = 8
QUICK = 6  # of one pair, shared among the engines
Comparison = Callable[..., tuple[Models, list[Case]]]

# what the drafts of a policy never do, such as one that never proposes an end token
RARE = {"repeat": {"ended_in_draft"}}  # of docs/adding.md, which says to run these tests


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Models of a family, a seed and an engine, with their cases, which the native engine's vanilla
    answers.

    In bfloat16 the engine's own vanilla answers them.
    """
    folder = tmp_path_factory.mktemp("tables")

    @cache
    def models(family: str, seed: int, engine: str, dtype: torch.dtype) -> Models:
        return models_of(family, seed, engine, folder / f"{family}{seed}{dtype}.safetensors", dtype)

    @cache
    def cases(family: str, seed: int, engine: str, dtype: torch.dtype, count: int) -> list[Case]:
        answering = models(family, seed, engine, dtype)
        found = cases_of(family, seed, answering, count)
        texts = [[case.request.source.prompt[-1], *case.expected] for case in found]
        table_of(texts, answering.target, answering.table)
        return found

    def compared(
        family: str, seed: int, engine: str, count: int, dtype: torch.dtype = torch.float64
    ) -> tuple[Models, list[Case]]:
        answering = engine if dtype == torch.bfloat16 else "native"
        return models(family, seed, engine, dtype), cases(family, seed, answering, dtype, count)

    return compared


@pytest.mark.fast("early_exit_speculative", "hybrid", "speculative_adaptive", "token_recycling")
@pytest.mark.parametrize("policy", LOSSLESS)
def test_some_texts_on_every_engine_and_family_are_vanillas(
    policy: str, comparison: Comparison
) -> None:
    for family in FAMILIES:
        for turn, engine in enumerate(engines(policy)):
            if (policy, family) not in REFUSED:
                models, cases = comparison(family, 0, engine, QUICK)
                compare(policy, models, cases[turn :: len(engines(policy))], Seen())


@pytest.mark.fast("speculative", "suffix")
@pytest.mark.parametrize("policy", [one for one in LOSSLESS if (one, "llama") not in REFUSED])
def test_some_texts_of_windowed_families_are_vanillas(policy: str, comparison: Comparison) -> None:
    for family in WINDOWED:
        if (policy, family) not in REFUSED:
            models, cases = comparison(family, 0, engines(policy)[0], QUICK)
            compare(policy, models, cases[: QUICK // 2], Seen())


@pytest.mark.fast("early_exit_speculative", "medusa", "speculative_hierarchy", "suffix")
@needs_kernels
@pytest.mark.skipif(DEVICE.type != "cpu", reason="they run on a CPU")
@pytest.mark.parametrize("policy", [policy for policy in LOSSLESS if not is_peer(policy)])
def test_texts_of_the_kernels_are_vanillas_to_the_last_bit(
    policy: str, comparison: Comparison
) -> None:
    """In bfloat16 too, where a sum in another order would change some of the tokens."""
    for family in FAMILIES:
        if (policy, family) not in REFUSED:
            compare(policy, *comparison(family, 0, "kernels", QUICK, torch.bfloat16), Seen())


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_some_texts_end_inside_a_draft_and_some_are_cut_there(
    family: str, comparison: Comparison
) -> None:
    seen = Seen()
    compare("speculative", *comparison(family, 0, "native", CASES), seen)
    assert not seen.missing(), seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", LOSSLESS)
def test_every_text_is_vanillas(policy: str, family: str, comparison: Comparison) -> None:
    if (policy, family) in REFUSED:
        pytest.skip("refused")
    for engine in engines(policy):
        seen = Seen()
        for seed in range(PAIRS):
            compare(policy, *comparison(family, seed, engine, CASES), seen)
        assert not (drafts(policy) and seen.missing() - RARE.get(policy, set())), (engine, seen)
