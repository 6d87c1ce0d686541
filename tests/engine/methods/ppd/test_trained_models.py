"""The pipeline on trained checkpoints in float32, 200 sentences of Multi30k: the target's own text
at every exit.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from bild_lab.engine.methods.ppd.pipeline import PredictivePipeline
from bild_lab.engine.methods.vanilla import target_alone
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.request import Limits, Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.prediction import PipelineLog, pipeline_log
from bild_lab.lab.point.read_model import load_model
from tests.checkpoints import SHARED, needs_shared

SENTENCES, LONGEST = 200, 40
TEMPLATES = {"t5": "{}", "llama": "German: {} English:"}
EXITS = {"t5": (3, 4, 5), "llama": (5, 6, 7, 8, 9)}  # of 6 and of 10 layers
TOP_KS = (1, 2, 3, 5)

pytestmark = [needs_shared, pytest.mark.slow]


def match_rate(logs: list[PipelineLog]) -> float:
    matches = [matched for log in logs for matched in log.matches]
    return sum(matches) / len(matches)


@cache
def texts_of(family: str) -> tuple[NativeModel, list[tuple[Request, list[int]]]]:
    """A trained target, and its own text of every sentence."""
    target = load_model(
        str(SHARED / "models" / f"{family}-large"), None, "cpu", torch.float32, "native"
    )
    vanilla = target_alone(target)
    found = []
    for line in (SHARED / "data" / "multi30k" / "test.jsonl").read_text().splitlines()[:SENTENCES]:
        source = target.source(TEMPLATES[family].format(json.loads(line)["de"]))
        request = Request(source, Limits(len(source.prompt), LONGEST, target.checkpoint.end_tokens))
        found.append((request, vanilla.decode(request, Trace())))
    return target, found


@pytest.mark.parametrize(
    ("family", "exit_layer"), [(family, one) for family, exits in EXITS.items() for one in exits]
)
def test_every_text_is_the_targets_own(family: str, exit_layer: int) -> None:
    target, texts = texts_of(family)
    logs = []
    for number, (request, expected) in enumerate(texts):
        trace = Trace()
        pipeline = PredictivePipeline(target, exit_layer, TOP_KS[number % len(TOP_KS)])
        assert pipeline.decode(request, trace) == expected, f"sentence {number}"
        logs.append(pipeline_log(trace))
    assert 0.05 < match_rate(logs) < 1


@pytest.mark.parametrize("family", EXITS)
def test_the_match_rate_rises_with_layer_and_candidates(family: str) -> None:
    """Table 1's pattern; a quarter of the sentences tells it."""
    target, texts = texts_of(family)

    def rate(exit_layer: int, top_k: int) -> float:
        logs = []
        for request, _ in texts[::4]:
            trace = Trace()
            PredictivePipeline(target, exit_layer, top_k).decode(request, trace)
            logs.append(pipeline_log(trace))
        return match_rate(logs)

    first, last = EXITS[family][0], EXITS[family][-1]
    assert rate(first, 1) < rate(first, 5)
    assert rate(first, 3) < rate(last, 3)
