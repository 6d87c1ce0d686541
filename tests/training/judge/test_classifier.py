"""The classifier: its minimum, its choice on held-out mismatches, its threshold."""

from __future__ import annotations

import pytest
import torch

from bild_lab.errors import UserError
from bild_lab.training.judge.classifier import Labels, fit, regression, roc_auc, threshold_at


def labels(count: int, seed: int, dim: int = 4) -> Labels:
    """Which mismatch matters is said by the first coordinate, not always truly."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 + 2 * torch.randn(count, dim, generator=generator)
    return Labels(hidden, hidden[:, 0] + torch.randn(count, generator=generator) > 3)


def test_the_regression_is_at_the_minimum_of_its_loss() -> None:
    """The gradient of C Σ loss + |w|² / 2 is zero there, by hand."""
    part, strength = labels(60, 0), 0.3
    states = part.hidden.double() - 3
    weight, bias, steps = regression(states, part.important, strength)
    surplus = (states @ weight + bias).sigmoid() - part.important.double()
    assert (strength * (surplus[:, None] * states).sum(0) + weight).abs().max() < 1e-5
    assert abs(float(surplus.sum())) < 1e-5
    assert 1 < steps < 200
    assert weight[0] > 3 * weight[1:].abs().max()


def test_the_area_is_the_share_of_pairs_in_order_with_ties_as_halves() -> None:
    scores, important = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, True, False, True])
    pairs = [(0.4, 0.1), (0.4, 0.4), (0.9, 0.1), (0.9, 0.4)]
    assert roc_auc(scores, important) == pytest.approx(sum((a > b) + (a == b) / 2 for a, b in pairs) / 4)


@pytest.mark.parametrize(("recall", "expected"), [(1.0, 0.2), (0.9, 0.2), (0.8, 0.3), (0.6, 0.5), (0.0, 1.0)])
def test_the_threshold_rejects_as_many_as_asked(recall: float, expected: float) -> None:
    chances = torch.tensor([0.9, 0.2, 0.5, 0.3, 0.7, 0.1], dtype=torch.float64)
    important = torch.tensor([True, True, True, True, True, False])
    found = threshold_at(chances, important, recall)
    assert found == expected
    assert float((chances[important] >= found).double().mean()) >= recall


def test_the_figures_are_those_of_the_head_that_is_stored() -> None:
    """Its weights hold the standardization: hidden states go in as they are."""
    train, held_out = labels(200, 1), labels(80, 2)
    fitted = fit(train, held_out, 0.9, {"path": "t"}, {"path": "d"})
    chances = fitted.head(held_out.hidden)
    threshold, important = fitted.head.config.threshold, held_out.important
    assert fitted.roc_auc == pytest.approx(roc_auc(chances.detach(), important), abs=1e-6)
    assert fitted.roc_auc > 0.8
    assert fitted.recall == pytest.approx(float((chances >= threshold - 1e-6)[important].double().mean()))
    assert fitted.kept_share == pytest.approx(float((chances < threshold - 1e-6)[~important].double().mean()))
    assert fitted.recall >= 0.9 > 1 - fitted.kept_share
    assert (fitted.head.config.base, fitted.head.config.drafter) == ({"path": "t"}, {"path": "d"})


@pytest.mark.parametrize("value", [True, False])
def test_mismatches_of_one_kind_teach_nothing(value: bool) -> None:
    part = labels(20, 1)
    alike = Labels(part.hidden, torch.full_like(part.important, value))
    for parts, name in (((alike, part), "to learn from"), ((part, alike), "held out")):
        with pytest.raises(UserError, match=f"of the 20 mismatches {name}, {20 * value} change .* both kinds"):
            fit(*parts, 0.9, {}, {})
