"""Random models of every family, and texts that vanilla answers, for comparisons with lossless
policies.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.trace import Trace
from tests.engine.loops import NEVER
from tests.engine.lossless.greedy import (
    WINDOWS,
    Case,
    Models,
    emitted,
)
from tests.policies import in_memory
from tests.tiny import TINY, VOCABULARY, relative_of, scale_layer, source_of

CASES = 25  # of each pair
LONGEST = 24
DEVICE = torch.device(os.environ.get("BILD_LAB_TEST_DEVICE", "cpu"))  # `make gpu` decodes on a GPU


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
