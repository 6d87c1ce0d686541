"""Prices of forwards and rounds, learned from timed texts."""

from __future__ import annotations

import random

import pytest
from transformers import LlamaConfig

from bild_lab.engine.trace import Forward, Round, Trace
from bild_lab.lab.measure.cost import dimensions
from bild_lab.screening import cost_model
from bild_lab.screening.cost_model import TimedText, features_of, fit_cost_model

PRICES = {
    "texts": 0.002,
    "target forwards": 0.006,
    "target rows": 0.0004,
    "drafter 1 forwards": 0.0005,
}


def texts(noise: float, systems: int = 6) -> list[TimedText]:
    """Of vanilla, system 0, and of points that make more or fewer calls."""
    chance = random.Random(0)
    found = []
    for system in range(systems):
        for _ in range(20):
            calls = chance.randint(3, 12)
            features = {
                "texts": 1,
                "target forwards": calls,
                "target rows": calls * chance.randint(1, system + 1),
            }
            features |= (
                {"drafter 1 forwards": calls * system * chance.randint(1, 2)} if system else {}
            )
            seconds = sum(PRICES[name] * count for name, count in features.items())
            found.append(
                TimedText(str(system), features, seconds * chance.uniform(1 - noise, 1 + noise))
            )
    return found


def test_prices_are_those_that_the_texts_were_made_with() -> None:
    model = fit_cost_model(texts(0.0), "0")
    assert model.prices_s == pytest.approx(PRICES)
    assert model.worst == pytest.approx(0.0, abs=1e-6)
    assert model.seconds({"texts": 2, "target forwards": 10}) == pytest.approx(0.064)


def test_a_disturbed_text_changes_nothing() -> None:
    several = texts(0.0)
    several[30] = TimedText(several[30].system, several[30].features, 50 * several[30].seconds)
    assert fit_cost_model(several, "0").prices_s == pytest.approx(PRICES)


def test_features_count_what_ran() -> None:
    target, draft = object(), object()
    forwards = [
        Forward(target, 9, source=9, encoder=True),
        Forward(draft, 2, cached=3),
        Forward(target, 4, cached=5, scored=4, source=9),
        Forward(target, 1, layers=1),
    ]
    trace = Trace(rounds=[Round(), Round()], forwards=forwards)
    assert features_of("bild", trace, {id(target): "target", id(draft): "drafter 1"}, 4) == {
        "texts": 1,
        "rounds of bild": 2,
        "source tokens": 9,
        "drafter 1 forwards": 1,
        "target forwards": 1,
        "target forwards of one row": 0.25,
        "target rows": 4,
        "target rows x context": 56,
        "target part forwards": 1,
    }


def test_skipped_blocks_and_tokens_that_a_head_does_not_score_cost_nothing() -> None:
    target, draft = object(), LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64)
    forwards = [
        Forward(target, 1, skipped_attention=1, skipped_feed_forward=1),
        Forward(draft, 1, vocabulary=10),
    ]
    models = {id(target): "target", id(draft): "drafter 1"}
    found = features_of("self_speculative", Trace(forwards=forwards), models, 4)
    assert found["target forwards of one row"] == 1 - 2 / (2 * 4)
    assert found["drafter 1 forwards"] == dimensions(draft).share_with(10) < 1


ONE = {"baseline": ({"forwards": 1}, 1.0), "a": ({"forwards": 1, "rows": 1}, 2.0)}


@pytest.mark.parametrize(
    ("features", "error"),
    [({"forwards": 1, "rows": 3}, 0.5), ({"forwards": 1, "rounds of b": 1}, None)],
)
def test_the_error_of_a_point_is_that_of_the_prices_of_the_others(
    features: dict[str, float], error: float | None
) -> None:
    """A point that takes 2 s, and would take 4 s at these prices; or that has things of its own."""
    timed = {**ONE, "b": (features, 2.0)}
    several = [TimedText(system, *text) for system, text in timed.items()]
    assert cost_model._left_out_error(several, "b", "baseline") == pytest.approx(error)


def test_the_error_of_a_model_is_the_median_of_its_points_and_of_two_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {"1": 0.1, "2": 0.4, "3": 0.2}
    monkeypatch.setattr(cost_model, "_left_out_error", lambda _, system, __: errors[system])
    model = fit_cost_model(texts(0.0, systems=4), "0")
    assert (model.error, model.worst) == (0.2, 0.4)
    assert fit_cost_model(texts(0.0, systems=3), "0").error is None
