"""Logistic regression on hidden states, its regularization chosen on held-out texts."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.stats import rankdata
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from bild_lab.engine.adapters.judge import JudgeConfig, JudgeHead
from bild_lab.errors import UserError

STRENGTHS = tuple(10.0 ** (power / 2) for power in range(-10, 3))  # C: the inverse of the penalty's weight
ITERATIONS = 200


@dataclass(frozen=True)
class Labels:
    """Mismatches with their labels. hidden: [n, dim]. important: [n]."""

    hidden: Float[Tensor, "n dim"]
    important: Bool[Tensor, " n"]

    def __len__(self) -> int:
        return self.important.shape[0]


@dataclass(frozen=True)
class Fitted:
    """A classifier with its figures on held-out mismatches.

    strength: C. roc_auc: the chance that an important mismatch is rated above an unimportant one. kept_share: of the
    unimportant mismatches below the threshold. recall: of the important ones, the share at or above it. loss: nats.
    steps: of the optimizer.
    """

    head: JudgeHead
    strength: float
    roc_auc: float
    kept_share: float
    recall: float
    loss: float
    steps: int


def fit(train: Labels, held_out: Labels, recall: float, base: dict, drafter: dict) -> Fitted:
    """The classifier with the largest area under the ROC curve on the held-out mismatches.

    recall: the threshold is the largest one at which so many of the held-out important mismatches are rejected.
    Raises UserError if either part lacks important or unimportant mismatches.
    """
    for name, part in (("to learn from", train), ("held out", held_out)):
        important = int(part.important.sum())
        if not 0 < important < len(part):
            raise UserError(
                f"of the {len(part)} mismatches {name}, {important} change the outcome, and a judge needs both kinds; "
                "search more examples (dataset.limit), or set another judge.tolerance"
            )
    mean, scale = train.hidden.double().mean(0), train.hidden.double().std(0).clamp(min=1e-6)
    best: tuple[float, float, Tensor, Tensor, int] | None = None
    for strength in STRENGTHS:
        weight, bias, steps = regression((train.hidden.double() - mean) / scale, train.important, strength)
        area = roc_auc(((held_out.hidden.double() - mean) / scale) @ weight + bias, held_out.important)
        if best is None or area > best[0]:
            best = (area, strength, weight, bias, steps)
    area, strength, weight, bias, steps = best
    weight, bias = weight / scale, bias - (weight * mean / scale).sum()
    scores = held_out.hidden.double() @ weight + bias
    chances = scores.sigmoid()
    threshold = threshold_at(chances, held_out.important, recall)
    head = JudgeHead(JudgeConfig(weight.shape[0], threshold, base=base, drafter=drafter))
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    below = chances < threshold
    return Fitted(
        head=head,
        strength=strength,
        roc_auc=area,
        kept_share=float(below[~held_out.important].double().mean()),
        recall=float((~below)[held_out.important].double().mean()),
        loss=float(cross_entropy(scores, held_out.important.double())),
        steps=steps,
    )


def regression(
    states: Float[Tensor, "n dim"], important: Bool[Tensor, " n"], strength: float
) -> tuple[Float[Tensor, " dim"], Float[Tensor, ""], int]:
    """Weight and bias that minimize C Σ loss + |w|² / 2, the bias without a penalty; and the optimizer's steps."""
    labels = important.double()
    parameters = torch.zeros(states.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=ITERATIONS, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        weight, bias = parameters[:-1], parameters[-1]
        loss = cross_entropy(states @ weight + bias, labels, reduction="mean")
        loss = loss + weight.square().sum() / (2 * strength * len(labels))
        loss.backward()
        return loss

    optimizer.step(closure)
    found = parameters.detach()
    return found[:-1], found[-1], optimizer.state[parameters]["n_iter"]


def roc_auc(scores: Float[Tensor, " n"], important: Bool[Tensor, " n"]) -> float:
    """The chance that an important mismatch scores above an unimportant one; a tie counts half."""
    ranks, positive = rankdata(scores.numpy()), important.numpy()
    count, others = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def threshold_at(chances: Float[Tensor, " n"], important: Bool[Tensor, " n"], recall: float) -> float:
    """The largest threshold at which at least this share of the important mismatches is not below it."""
    ordered = np.sort(chances[important].numpy())
    return float(ordered[floor(round((1 - recall) * len(ordered), 9))]) if recall > 0 else 1.0
