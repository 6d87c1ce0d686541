"""Greedy decoding of Multi30k with trained checkpoints in float32: every lossless policy gives
vanilla's tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from bild_lab.engine.request import Limits, Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.point.read_model import load_model
from tests.checkpoints import SHARED, needs_shared
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
from tests.policies import FAMILIES, REFUSED, engines

SENTENCES = 200
LONGEST = 40
NAMES = {
    "t5": ("t5-large", "t5-tiny", "t5-tiny"),
    "llama": ("llama-large", "llama-small", "llama-small"),
}
TEMPLATES = {"t5": "{}", "llama": "German: {} English:"}
RARE = {  # also of parts with random weights
    # what little a translation copies need not be its end; a Llama of random weights ends in such
    # drafts
    "prompt_lookup": {"ended_in_draft", "cut_in_draft"},
    "suffix": {"ended_in_draft", "cut_in_draft"},
    "hybrid": {"ended_in_draft"},
    "repeat": {"ended_in_draft", "cut_in_draft"},  # of docs/adding.md
    **{
        name: {"accepted", "ended_in_draft", "cut_in_draft"}
        for name in ("bita", "medusa", "mtp", "dflash", "eagle", "eagle3")
    },
}
Comparison = Callable[[str, str], tuple[Models, list[Case]]]

pytestmark = needs_shared


def requests_of(family: str, models: Models, count: int) -> list[Request]:
    """Sentences, of which about every fourth one ends where it ends; the others are cut short
    somewhere.
    """
    chance = random.Random(0)
    lines = (SHARED / "data" / "multi30k" / "test.jsonl").read_text().splitlines()[:count]
    found = []
    for line in lines:
        source = models.target.source(TEMPLATES[family].format(json.loads(line)["de"]))
        length = LONGEST if chance.random() < 0.25 else chance.randint(1, 10)
        found.append(
            Request(source, Limits(len(source.prompt), length, models.target.checkpoint.end_tokens))
        )
    return found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Models of a family on an engine, and that engine's vanilla texts."""
    folder = tmp_path_factory.mktemp("tables")

    @cache
    def of(family: str, engine: str) -> tuple[Models, list[Case]]:
        paths = [str(SHARED / "models" / name) for name in NAMES[family]]
        loaded = [load_model(path, None, "cpu", torch.float32, engine) for path in paths]
        models = Models(*loaded, folder / f"{family}-{engine}.safetensors")
        vanilla = models.method("vanilla", 1)
        cases = [  # two sentences a window, for two engines
            Case(request, 1 + number // 2 % WINDOWS, emitted(vanilla, request, Trace()))
            for number, request in enumerate(requests_of(family, models, SENTENCES))
        ]
        table_of(
            [[case.request.source.prompt[-1], *case.expected] for case in cases],
            models.target,
            models.table,
        )
        return models, cases

    return of


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", LOSSLESS)
def test_every_text_is_vanillas(policy: str, family: str, comparison: Comparison) -> None:
    if (policy, family) in REFUSED:
        pytest.skip("refused")
    seen = Seen()
    for turn, engine in enumerate(engines(policy)):
        models, cases = comparison(family, engine)
        compare(policy, models, cases[turn :: len(engines(policy))], seen)
    assert not (drafts(policy) and seen.missing() - RARE.get(policy, set())), seen
