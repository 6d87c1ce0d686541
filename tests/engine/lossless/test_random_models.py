"""Greedy decoding on random models, in float64 where nothing ties: every lossless policy gives
vanilla's tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from tests.engine.lossless.greedy import (
    LOSSLESS,
    WINDOWS,
    Case,
    Models,
    Seen,
    compare,
    drafts,
    emitted,
    table_of,
)
from tests.policies import FAMILIES, REFUSED, WINDOWED, engines, in_memory, is_peer
from tests.sessions import needs_kernels
from tests.tiny import TINY, VOCABULARY, relative_of, scale_layer, source_of

PAIRS = 8
CASES = 25  # of each pair
QUICK = 6  # of one pair, shared among the engines
LONGEST = 24
NEVER = frozenset([VOCABULARY])  # an end token that no model can emit
DEVICE = torch.device(os.environ.get("BILD_LAB_TEST_DEVICE", "cpu"))  # `make gpu` decodes on a GPU
Comparison = Callable[..., tuple[Models, list[Case]]]


def random_target(family: str, seed: int, layers: int = 3, **sizes: int) -> PreTrainedModel:
    """Layers of which the later ones add less, so that some of them often agree with all."""
    model = TINY[family](seed, layers=layers, **sizes)
    for index in range(1, layers):
        # Gemma's embeddings weigh more beside layers
        scale_layer(model, index, 0.5 if family == "gemma3" else 0.2)
    return model.double()


def random_source(family: str, chance: random.Random) -> Source:
    words = chance.choices(range(3, VOCABULARY), k=chance.randint(1, 9))
    words *= chance.randint(1, 2)  # what repeats itself can be copied
    return source_of(family, words).to(DEVICE)


def models_of(
    family: str, seed: int, engine: str, table: Path, dtype: torch.dtype = torch.float64
) -> Models:
    target = random_target(family, seed)
    relatives = (relative_of(target, 100 + seed, noise) for noise in (0.05 * (1 + seed % 4), 0.4))
    return Models(
        *(in_memory(model.to(DEVICE, dtype), engine) for model in (target, *relatives)), table
    )


def cases_of(family: str, seed: int, models: Models, count: int) -> list[Case]:
    """Texts that end at the length limit, or by a token that the target emits somewhere."""
    chance = random.Random(seed)
    vanilla = models.method("vanilla", 1)
    cases = []
    for number in range(count):
        source = random_source(family, chance)
        request = Request(source, Limits(len(source.prompt), LONGEST, NEVER))
        text = emitted(vanilla, request, Trace())
        limits = replace(request.limits, max_new_tokens=chance.randint(1, LONGEST))
        if number // 2 % 2:
            known = {
                *source.prompt,
                *([] if source.encoder_ids is None else source.encoder_ids[0].tolist()),
            }
            # a drafter that copies can draft these ends
            copied = [token for token in text if token in known]
            limits = replace(request.limits, end_tokens=frozenset([chance.choice(copied or text)]))
        request = replace(request, limits=limits)
        cases.append(Case(request, 1 + number % WINDOWS, emitted(vanilla, request, Trace())))
    return cases


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
        assert not (drafts(policy) and seen.missing()), (engine, seen)
