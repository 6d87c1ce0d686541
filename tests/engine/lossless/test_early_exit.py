"""BiLD over the target's own first layers, in float32: below ln 2 its texts are vanilla's, wherever
it exits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.early_exit.views import EarlyExit
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.point.build import build_method
from bild_lab.lab.point.read_model import load_model
from tests.checkpoints import SHARED, needs_shared
from tests.engine.loops import NEVER
from tests.engine.lossless.random_models import random_source, random_target
from tests.policies import FAMILIES, WINDOWED, in_memory, shipped

TEXTS = 12  # of random models
SENTENCES = 200  # of trained ones
FALLBACKS = (0.0, 0.3, 0.6)
ROLLBACK = 0.69  # < ln 2
TEMPLATES = {"t5": "{}", "llama": "German: {} English:"}
DEPTHS = {"t5": 6, "llama": 10}  # of the trained targets
EXITS = [(family, exit_layer) for family in FAMILIES for exit_layer in range(1, DEPTHS[family] + 1)]


def emitted(
    method: DraftThenVerify, requests: Sequence[Request], traces: Sequence[Trace]
) -> list[list[int]]:
    return [
        method.decode(*pair)[pair[0].limits.prompt_length :]
        for pair in zip(requests, traces, strict=True)
    ]


def vanilla(target: NativeModel, requests: Sequence[Request]) -> list[list[int]]:
    method = build_method(shipped("vanilla"), {"target": lambda: target})
    return emitted(method, requests, [Trace() for _ in requests])


def early_exit(
    target: NativeModel, exit_layer: int, window: int, fallback: float
) -> DraftThenVerify:
    drafter = ModelDrafter(EarlyExit(target, exit_layer), window, fallback)
    return DraftThenVerify(target, drafter, Rollback(ROLLBACK))


def compare(
    target: NativeModel, exit_layer: int, requests: Sequence[Request], expected: Sequence[list[int]]
) -> list[Trace]:
    """Decode with one fallback threshold and window after the other; returns what happened."""
    traces = [Trace() for _ in requests]
    for turn, fallback in enumerate(FALLBACKS):
        mine = slice(turn, None, len(FALLBACKS))
        method = early_exit(target, exit_layer, 10 - 3 * turn, fallback)
        assert emitted(method, requests[mine], traces[mine]) == list(expected[mine]), (
            exit_layer,
            fallback,
        )
    return traces


@pytest.mark.fast("llama-2")
@pytest.mark.parametrize("exit_layer", [2, 1, 3])
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_random_models_give_vanillas_texts_at_every_exit(family: str, exit_layer: int) -> None:
    target = in_memory(random_target(family, 2).float(), "native")
    chance = random.Random(exit_layer)
    sources = [random_source(family, chance) for _ in range(TEXTS)]
    requests = [
        Request(each, Limits(len(each.prompt), chance.randint(1, 24), NEVER)) for each in sources
    ]
    traces = compare(target, exit_layer, requests, vanilla(target, requests))
    assert sum(trace.accepted for trace in traces) > 0
    assert sum(trace.fallbacks for trace in traces) > 0
    assert sum(trace.rollbacks for trace in traces) > 0


@cache
def trained(family: str) -> tuple[NativeModel, list[Request], list[list[int]]]:
    """A trained target, requests of which three in four are cut short, and its own texts."""
    target = load_model(
        str(SHARED / "models" / f"{family}-large"), None, "cpu", torch.float32, "native"
    )
    chance = random.Random(0)
    requests = []
    for line in (SHARED / "data" / "multi30k" / "test.jsonl").read_text().splitlines()[:SENTENCES]:
        source = target.source(TEMPLATES[family].format(json.loads(line)["de"]))
        length = 40 if chance.random() < 0.25 else chance.randint(1, 10)
        requests.append(
            Request(source, Limits(len(source.prompt), length, target.checkpoint.end_tokens))
        )
    return target, requests, vanilla(target, requests)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize(("family", "exit_layer"), EXITS)
def test_trained_models_give_vanillas_texts_at_every_exit(family: str, exit_layer: int) -> None:
    target, requests, expected = trained(family)
    assert len(target.decoder.layers) == DEPTHS[family]
    traces = compare(target, exit_layer, requests, expected)
    assert sum(trace.drafted for trace in traces) > 0
