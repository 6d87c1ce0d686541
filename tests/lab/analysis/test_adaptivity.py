"""What the length of each draft can give: fixed, by confidence, in hindsight."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bild_lab.engine.speculative_theory import expected_tokens
from bild_lab.lab.analysis.adaptivity import DraftedText, RoundCosts, audit, in_hindsight

COSTS = RoundCosts(0.2, [1.0, 1.1, 1.25, 1.3, 1.6])


def made(matches: list[bool], confidences: list[float] | None = None) -> DraftedText:
    told = [0.5] * len(matches) if confidences is None else confidences
    return DraftedText(np.array(matches), np.array(told))


def cheapest(matches: list[bool], costs: RoundCosts) -> float:
    """Over all lengths of all rounds, one after the other."""
    if not matches:
        return 0.0
    run = len(list(itertools.takewhile(bool, matches)))
    return min(
        size * costs.draft_s + costs.verify_s[size] + cheapest(matches[min(size, run) + 1 :], costs)
        for size in range(min(costs.largest, len(matches)) + 1)
    )


@pytest.mark.parametrize("seed", range(6))
def test_hindsight_is_the_cheapest_of_all_choices(seed: int) -> None:
    matches = (np.random.default_rng(seed).random(9) < 0.6).tolist()
    found = in_hindsight([made(matches)], COSTS)
    assert found.speedup == pytest.approx(len(matches) * COSTS.verify_s[0] / cheapest(matches, COSTS))


def test_a_fixed_length_costs_what_the_theory_says_where_tokens_match_at_random() -> None:
    """Theorem 3.8 of speculative decoding: (1 - α^(γ+1)) / ((1 - α)(γ c + 1)), where rows are free."""
    alpha, free = 0.7, RoundCosts(0.1, [1.0] * 8)
    chance = np.random.default_rng(1)
    found = audit([made((chance.random(40_000) < alpha).tolist())], free)
    theory = {window: expected_tokens(alpha, window) / (0.1 * window + 1) for window in range(8)}
    best = max(theory, key=theory.get)
    assert found["fixed"]["rule"] == f"window {best}"
    assert found["fixed"]["speedup"] == pytest.approx(theory[best], rel=0.02)
    assert found["fixed"]["accepted"] == pytest.approx(expected_tokens(alpha, best) - 1, rel=0.02)


def test_confidence_that_says_nothing_gains_nothing_and_one_that_says_all_gains_nearly_all() -> None:
    chance = np.random.default_rng(2)
    matches = [(chance.random(300) < 0.7).tolist() for _ in range(8)]
    noise = audit([made(one, chance.random(300).tolist()) for one in matches], COSTS)
    assert noise["seen"] < 0.2
    cheap = RoundCosts(0.001, COSTS.verify_s)  # the token that ends a draft costs a forward too
    sure = audit([made(one, [0.9 if it else 0.1 for it in one]) for one in matches], cheap)
    assert 0.8 < sure["seen"] <= 1
    for found in (noise, sure):
        top = found["hindsight"]["speedup"]
        assert all(found[name]["speedup"] <= top + 1e-9 for name in ("fixed", "confidence", "survival"))


def test_calibration_reads_other_texts_alone() -> None:
    """Confidences that tell each text's own matches by chance do not help: a fit on the same texts would look well."""
    chance = np.random.default_rng(3)
    texts = [made((chance.random(12) < 0.5).tolist(), chance.random(12).tolist()) for _ in range(40)]
    found = audit(texts, COSTS)
    fixed = found["fixed"]["speedup"]
    assert found["survival"]["speedup"] < 1.05 * fixed


def test_where_drafting_does_not_pay_nothing_is_drafted() -> None:
    dear = RoundCosts(2.0, COSTS.verify_s)
    found = audit([made([True, False] * 10)], dear)
    assert found["fixed"]["rule"] == "window 0" and found["hindsight"]["drafted"] == 0
    assert found["seen"] is None
