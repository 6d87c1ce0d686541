"""Scores of a module's predictors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bild_lab.training.frozen.contexts import AnsweredPrompt, ContextChooser
from bild_lab.training.frozen.predictions import PredictionEvaluator, PredictionLoss, leading_hits

ROW = AnsweredPrompt(np.array([10, 11, 12, 20, 21, 22, 23, 24]), prompt_length=3)


class Parrot(nn.Module):
    """Gives these logits for any input."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        return self.logits[: contexts.shape[0]]


def test_an_evaluation_counts_hits_by_predictor_and_the_leading_ones() -> None:
    chosen = torch.tensor([[[21, 22], [5, 23], [23, 0], [24, 0]]])  # of labels 21 22, 22 23, 23 24, 24 –
    logits = 10.0 * nn.functional.one_hot(chosen, 30).float()
    logits[0, 2, 1, 24] = 9.0  # the second choice
    chooser = ContextChooser((1, 2), per_answer=None, seed=0)
    evaluate = PredictionEvaluator([ROW], chooser, ("a", "b"), "accepted", leading_hits, batch_size=4)
    scores = evaluate(Parrot(logits), PredictionLoss((1.0, 0.5)))
    assert scores["top_1_a"] == pytest.approx(3 / 4) and scores["top_1_b"] == pytest.approx(2 / 3)
    assert scores["top_5_b"] == 1.0
    assert scores["accepted"] == (2 + 0 + 1 + 1) / 4
    right, rest = -np.log(np.e**10 / (np.e**10 + 29)), np.log(np.e**10 + 29)
    second = np.log(np.e**10 + np.e**9 + 28) - 9
    assert scores["loss"] == pytest.approx((3 * right + rest + 0.5 * (2 * right + second)) / 7, rel=1e-5)
