"""The rule of whole steps: its score against the formula, and that a step is kept whole or not at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bild_lab.engine.acceptance import StepScore
from bild_lab.engine.acceptance.step_score import MeanLogProbability
from bild_lab.engine.draft import Draft, Verdict
from tests.engine.acceptance.exact import GREEDY, sampled

LOGITS = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
STEP = Draft(torch.tensor([1, 0]))
MEAN = (math.log(0.3) + math.log(0.1)) / 2


def test_the_score_is_the_mean_log_probability_at_temperature_1() -> None:
    assert MeanLogProbability()(STEP, LOGITS).tolist() == pytest.approx([MEAN])
    assert MeanLogProbability()(STEP, 3 + LOGITS).tolist() == pytest.approx([MEAN])  # logits without a normalizer
    for request in (GREEDY, sampled(0.3)):
        assert StepScore(-9)(STEP, LOGITS, request).stats["score"] == pytest.approx(MEAN)


def test_a_step_is_kept_whole_at_the_threshold_and_dropped_whole_below() -> None:
    at = float(MeanLogProbability()(STEP, LOGITS))
    assert StepScore(at)(STEP, LOGITS, GREEDY) == Verdict((0, 1), 0, {"score": at})
    assert StepScore(math.nextafter(at, 0))(STEP, LOGITS, GREEDY) == Verdict((), 0, {"score": at})
    assert StepScore(-math.inf)(Draft(torch.tensor([2, 0])), LOGITS, GREEDY).path == (0, 1)


def test_another_scorer_takes_its_place() -> None:
    class Shortest:
        def __call__(self, draft: Draft, logits: Tensor) -> Tensor:
            return torch.tensor([-float(len(draft))])

    assert StepScore(-2, Shortest())(STEP, LOGITS, GREEDY).path == (0, 1)
    assert StepScore(-1.9, Shortest())(STEP, LOGITS, GREEDY).path == ()  # by the mean it would be kept


def test_the_token_after_a_step_is_the_targets_own() -> None:
    drawn = {StepScore(-9)(STEP, LOGITS, sampled()).next_token}
    request = sampled()
    drawn |= {StepScore(-9)(STEP, LOGITS, request).next_token for _ in range(40)}
    assert drawn == {0, 1, 2}
    assert StepScore(-1)(Draft(torch.empty(0, dtype=torch.long)), LOGITS[:1], GREEDY) == Verdict((), 0)
