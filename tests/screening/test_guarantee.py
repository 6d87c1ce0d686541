"""What is certified keeps its loss as often as it says: exactly for one test, by simulation for
whole choices.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from bild_lab.errors import UserError
from bild_lab.lab.metrics.quality import metric_sums
from bild_lab.lab.metrics.text_metrics import METRICS
from bild_lab.screening import guarantee as module
from bild_lab.screening.candidates import grid_of
from bild_lab.screening.guarantee import (
    GuaranteeSpec,
    Losses,
    accepted_prefix,
    bootstrapped,
    guarantee,
    losses_of,
    mean_losses,
    order_of_testing,
    p_values,
    require_losses,
    required_n,
)
from bild_lab.screening.screen import Screening
from tests.screening.test_screen import Command

ASKED = GuaranteeSpec(loss=0.1, probability=0.9)


@pytest.mark.parametrize("lost", [1.0, 0.3])
@pytest.mark.parametrize("probability", [0.6, 0.9])
def test_a_loss_that_is_just_too_large_has_a_small_p_value_as_seldom_as_it_says(
    lost: float, probability: float
) -> None:
    """Exactly, for ten texts in every order that lose `lost` or gain 0.5 and have a mean loss of
    0.1.
    """
    chance, asked = (0.1 + 0.5) / (lost + 0.5), GuaranteeSpec(0.1, probability)
    every = np.array(list(itertools.product((True, False), repeat=10)))
    weights = np.where(every, chance, 1 - chance).prod(axis=1)
    values = np.array(p_values(asked, np.zeros((len(every), 2)), np.where(every, lost, -0.5)))
    assert weights.sum() == pytest.approx(1) and values.max() == 1
    for level in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8):
        assert weights[values <= level].sum() <= level
    assert weights[values <= asked.error * 1.0001].sum() > 0
    assert p_values(asked, np.zeros((1, 2)), np.ones((1, 5000))) == [1]


def test_the_stake_is_what_the_texts_that_are_left_need() -> None:
    """The capital of a player, one text after the other."""
    generator = np.random.default_rng(0)
    others, each = (np.clip(generator.normal(0.05, 0.2, (1, 600)), -1, 1) for _ in range(2))
    variance = (0.25 + 600 * others.var()) / 601
    capital = largest = 1.0
    stakes = []
    for place, loss in enumerate(each[0]):
        lacks = max(0.0, math.log(1 / ASKED.error / capital))
        stake = min(math.sqrt(2 * lacks / ((600 - place) * variance)), 0.9 / (1 - ASKED.loss))
        stakes.append(stake)
        capital *= 1 + stake * (ASKED.loss - loss)
        largest = max(largest, capital)
    assert p_values(ASKED, others, each) == [pytest.approx(1 / largest)] and largest > 1
    assert 0 < stakes[0] < max(stakes)  # the first ones are not truncated


def test_texts_whose_easy_ones_come_first_certify_nothing_by_their_order() -> None:
    each = np.repeat([[0.0, 1.0]], 100, axis=1)
    alone = np.ones(1), np.zeros((1, 10))
    assert guarantee(ASKED, *alone, mean_losses(each), 0).certified == []
    assert guarantee(ASKED, *alone, mean_losses(each / 100), 0).certified == [0]


def test_a_p_value_of_nan_certifies_nothing() -> None:
    """Fault: a text without a token has a log-probability of NaN a token, and NaN is above nothing."""
    losses = np.zeros((2, 300))
    losses[0, 7] = np.nan
    found = guarantee(ASKED, np.ones(2), np.zeros((2, 10)), mean_losses(losses), 0)
    assert math.isnan(found.p_values[0]) and found.certified == []
    assert accepted_prefix([0.01, math.nan, 0.01], 0.05) == [0]
    assert accepted_prefix([0.05, 0.051, 0.01], 0.05) == [0]  # a level is reached at itself


def share_broken(settings: int, count: int, loss: float, rare: float) -> float:
    """How often something is certified where every setting loses a little more than is asked.

    rare: how often a text of a setting loses all; else it loses nothing.
    """
    asked, generator = GuaranteeSpec(loss=loss, probability=0.9), np.random.default_rng(1)
    speeds = np.linspace(1, 2, settings)
    found = []
    for _ in range(150):
        others, each = (generator.random((settings, count)) < rare for _ in range(2))
        order = order_of_testing(asked, speeds, mean_losses(others.astype(float)))
        result = guarantee(
            asked,
            speeds[order],
            others[order].astype(float),
            mean_losses(each[order].astype(float)),
            0,
        )
        found.append(result.fastest is not None)
    return float(np.mean(found))


def normal_p_values(asked: GuaranteeSpec, others: np.ndarray, each: np.ndarray) -> list[float]:
    """Too small where losses are rare."""
    error = each.std(axis=1) / math.sqrt(each.shape[1])
    return norm.cdf((each.mean(axis=1) - asked.loss) / np.maximum(error, 1e-9)).tolist()


def every_one_that_passes(p_values: list[float], error: float) -> list[int]:
    """Without a correction for how many were tested."""
    return [at for at, one in enumerate(p_values) if one <= error]


def along_all(asked: GuaranteeSpec, speeds: np.ndarray, select: Losses) -> list[int]:
    return list(range(len(speeds)))


@pytest.mark.fast("faults0-world0")
@pytest.mark.parametrize(
    ("faults", "world"),
    [
        ({"p_values": normal_p_values}, (1, 100, 0.01, 0.0101)),
        (
            {"accepted_prefix": every_one_that_passes, "order_of_testing": along_all},
            (40, 200, 0.1, 0.1001),
        ),
    ],
)
def test_what_is_certified_is_broken_no_more_often_than_asked_and_planted_faults_break_it(
    faults: dict[str, Callable[..., Any]],
    world: tuple[int, int, float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert share_broken(*world) <= 0.1
    for name, fault in faults.items():
        monkeypatch.setattr(module, name, fault)
        monkeypatch.setitem(globals(), name, fault)
    assert share_broken(*world) > 0.2


def test_the_number_that_would_be_enough_is_and_a_tenth_of_it_is_not() -> None:
    assert (
        required_n(np.zeros(20), GuaranteeSpec(0.02))
        == math.ceil(-math.log(0.05) / 0.9 / 0.02)
        == 167
    )
    assert required_n(np.full(20, 0.02), GuaranteeSpec(0.02)) is None
    generator = np.random.default_rng(0)
    for spread in (0.05, 0.2):
        count = required_n(np.array([0.005 - spread, 0.005 + spread]), GuaranteeSpec(0.02))
        each = np.clip(generator.normal(0.005, spread, (2, 100, count)), -1, 1)
        gap = 0.02 - 0.005
        assert count == math.ceil(-math.log(0.05) * (8 * spread**2 + gap / 0.9) / gap**2)
        certified = [
            np.array(p_values(GuaranteeSpec(0.02), *each[..., :n])) <= 0.05
            for n in (count, count // 10)
        ]
        assert certified[0].mean() >= 0.95 and certified[1].mean() <= 0.6


def test_the_surest_settings_of_the_front_are_tested_first_until_one_fails() -> None:
    generator = np.random.default_rng(0)
    true = np.array([0.0, 0.3, 0.03, 0.5, 0.06])
    # the fourth is slower than the third and loses more
    speeds = np.array([1.0, 2.0, 1.5, 1.4, 1.7])
    others, each = (
        np.clip(generator.normal(true[:, None], 0.05, (5, 300)), -1, 1) for _ in range(2)
    )
    order = order_of_testing(ASKED, speeds, mean_losses(others))
    assert order == [0, 2, 4, 1]
    found = guarantee(ASKED, speeds[order], others[order], mean_losses(each[order]), 0)
    assert (found.certified, found.fastest) == ([0, 1, 2], 2)
    assert found.p_values[2] < 0.1 < found.p_values[3] and found.mean[3] == pytest.approx(
        0.3, abs=0.02
    )
    assert found.required_n == required_n(each[0], ASKED)
    each[2] += 0.2  # the next is not looked at after one that fails
    assert guarantee(
        ASKED, speeds[order], others[order], mean_losses(each[order]), 0
    ).certified == [0]


TEXTS = ["ein mann steht", "ein mann", "eine frau geht", "ein hund"]
REFERENCES = [["ein mann steht"]] * 2 + [["eine frau geht"]] * 2


def test_a_text_loses_what_its_metric_says_on_a_scale_of_one() -> None:
    picks = [[0, 2], [1, 2], [1, 3]]  # the target alone, and two settings
    for metric in ("chrf", "rouge", "exact_match"):
        pool = metric_sums(metric, TEXTS, REFERENCES, False)
        single = [
            metric_sums(metric, [text], [own], False).value()
            for text, own in zip(TEXTS, REFERENCES, strict=True)
        ]
        lost = [
            [(single[0] - single[1]) / 100, 0],
            [(single[0] - single[1]) / 100, (single[2] - single[3]) / 100],
        ]
        found = losses_of(metric, pool, picks)
        assert found.per_text == pytest.approx(np.array(lost)) and found.mean == pytest.approx(
            np.mean(lost, axis=1)
        )
        assert 0 < found.per_text.max() <= 1
    nats = METRICS["log_probability"].of([(-2.0, 4), (-6.0, 4), (-1.0, 1), (-9.0, 1)], [("",)] * 4)
    lost = losses_of("log_probability", nats, [picks[0], [1, 3], [0, 2]]).per_text
    assert lost == pytest.approx(np.array([[1 - math.exp(-1), 1 - math.exp(-8)], [0, 0]]))
    gained = losses_of("log_probability", nats, [[1, 3], [0, 2]]).per_text
    assert gained.tolist() == [[-1, -1]]  # however much is gained
    pool = metric_sums("bleu", TEXTS, REFERENCES, False)
    bleu = losses_of("bleu", pool, picks)
    assert bleu.per_text is None
    assert bleu.mean == pytest.approx(
        [(pool.value(picks[0]) - pool.value(one)) / 100 for one in picks[1:]]
    )


def test_a_bootstrap_over_the_choice_is_stricter_than_the_choice() -> None:
    generator = np.random.default_rng(0)
    each = generator.normal(np.array([[0.0], [0.05], [0.098], [0.15]]), 0.3, (4, 200))
    each += np.array([[0.0], [0.05], [0.098], [0.15]]) - each.mean(axis=1, keepdims=True)
    losses, speeds = Losses(200, mean_losses(each).weighted, None), np.array([1.0, 1.5, 1.8, 2.0])
    assert np.flatnonzero(losses.mean <= ASKED.loss).tolist() == [0, 1, 2]
    assert bootstrapped(ASKED, speeds, losses, 0) in ([0], [0, 1])
    assert (
        bootstrapped(ASKED, speeds[3:], Losses(200, mean_losses(each[3:]).weighted, None), 0) == []
    )
    # within the loss by about a standard error, on the texts that it was chosen on
    near = each[2:3] - 0.018
    assert bootstrapped(ASKED, speeds[:1], Losses(200, mean_losses(near).weighted, None), 0) == []
    found = guarantee(ASKED, speeds, None, losses, 0)
    assert (found.p_values, found.required_n) == (None, None) and found.fastest in (0, 1)


def test_random_halves_break_a_choice_by_the_mean_and_not_a_guarantee() -> None:
    generator, speeds = np.random.default_rng(2), np.linspace(1, 2, 21)
    true = np.linspace(0, 0.2, 21)[:, None]
    others, each = (np.clip(generator.normal(true, 0.3, (21, 400)), -1, 1) for _ in range(2))
    asked, own, broken, taken = GuaranteeSpec(loss=0.1, probability=0.9), each.mean(axis=1), [], []
    for _ in range(100):
        half = each[:, generator.permutation(400)[:200]]
        # the fastest whose mean is within the loss
        (naive,) = np.flatnonzero(half.mean(axis=1) <= asked.loss)[-1:]
        certified = guarantee(asked, speeds, others, mean_losses(half), 0).fastest
        broken.append(
            (own[naive] > asked.loss, certified is not None and own[certified] > asked.loss)
        )
        taken.append((speeds[naive], 1.0 if certified is None else speeds[certified]))
    naive, certified = np.mean(broken, axis=0)
    assert certified <= 0.1 and naive > 0.2
    fast, sure = np.mean(taken, axis=0) / speeds[own <= asked.loss].max()
    assert fast > sure > 0.7


@pytest.mark.parametrize("given", [{"loss": 0}, {"loss": 2}, {"loss": 0.1, "probability": 1}])
def test_a_guarantee_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"screen\.guarantee\.({'|'.join(given)}) "):
        GuaranteeSpec(**given)
    with pytest.raises(UserError, match="got length; set dataset.metric=chrf"):
        require_losses("length", 1)
    with pytest.raises(UserError, match="got 2 turns a text; set dataset.turns=1"):
        require_losses("agreement", 2)


def test_texts_that_points_were_chosen_on_are_left_out_of_a_guarantee(words: list[str]) -> None:
    (data,) = [Path(word.partition("=")[2]) for word in words if word.startswith("dataset.path")]
    rows = (data / "validation.jsonl").read_text().splitlines(keepends=True)
    own_rows = (data / "test.jsonl").read_text().splitlines(keepends=True)
    with (data / "test.jsonl").open("a") as stream:
        stream.writelines([*rows[1:], own_rows[0]])  # one text comes twice
    (data / "train.jsonl").write_text(rows[0])
    shared_words = [word for word in words if not word.startswith("screen.")]
    screening = Screening(grid_of(shared_words, ["policy=bild"]), "validation")
    assert screening.shared_texts("test") == 2
    left = [example.prompt for example in screening.held_out("test").point.examples]
    assert len(left) == len(set(left)) == 3 and not {*left} & {
        one.prompt for one in screening.point.examples
    }
    templates = "dataset.chat_template=['[{question}]','<{question}>']"
    twice = Screening(grid_of([*shared_words, templates], ["policy=bild"]), "validation")
    assert len(twice.held_out("test").point.examples) == 3
    with pytest.raises(UserError, match="every text of train is one of validation too; give"):
        screening.shared_texts("train")


@pytest.mark.slow
def test_the_command_certifies_or_says_what_would_be_enough(screen: Command) -> None:
    lists = [
        "policy=bild",
        "policy.fallback=0.2,0.9",
        "policy.rollback=0.69,5",
        "dataset.metric=chrf",
    ]
    sure = ["screen.guarantee.loss=0.9", "screen.guarantee.probability=0.6"]
    code, printed = screen(*lists, *sure, "screen.confirmations=1")
    assert code == 0, printed
    assert "certified on 3 texts of test: bild (" in printed
    summary = json.loads(Path("outputs/grid/screen.json").read_text())
    found = summary["guarantee"]
    assert (found["loss"], found["probability"], found["metric"], found["n"]) == (
        0.9,
        0.6,
        "chrf",
        3,
    )
    assert found["certified"] and found["policy"] == "bild" and found["enough"] == 2
    rows = pd.read_csv("outputs/grid/screen.csv")
    kept = [one["knobs"] for one in found["tested"] if one["kept"]]
    assert len(kept) == rows.certified.notna().sum() and found["knobs"] in kept
    assert (
        "mean loss at most 0.9 with probability 0.6" in Path("outputs/grid/report.html").read_text()
    )
    assert found["knobs"] in [one["knobs"] for one in summary["confirmed"]]  # measured live too

    strict = ["screen.guarantee.loss=0.02", "screen.confirmations=0"]
    code, printed = screen(*lists, *strict, "name=few")
    assert code == 0 and "nothing certified on 3 texts of test" in printed
    found = json.loads(Path("outputs/few/screen.json").read_text())["guarantee"]
    assert (found["certified"], found["policy"], found["knobs"]) == (False, None, None)
    assert f"about {found['enough']:,} texts would be enough" in printed or found["enough"] is None
    code, printed = screen(*lists, *strict, "name=bleu", "dataset.metric=bleu")
    assert code == 0 and "no certificate, as bleu is no mean over texts; a bootstrap" in printed
    code, printed = screen(*lists, *strict, "screen.timed_s=0")
    assert code == 2 and "a guarantee needs speeds" in printed


@pytest.mark.slow
def test_the_command_says_how_many_texts_both_splits_have(
    screen: Command, words: list[str]
) -> None:
    (data,) = [Path(word.partition("=")[2]) for word in words if word.startswith("dataset.path")]
    with (data / "test.jsonl").open("a") as stream:
        stream.write((data / "validation.jsonl").read_text().splitlines(keepends=True)[0])
    lists = ["policy=bild", "policy.fallback=0.2,0.9", "dataset.metric=chrf"]
    code, printed = screen(*lists, "screen.guarantee.loss=0.9", "screen.confirmations=1")
    assert code == 0, printed
    assert "certified on 3 texts of test (without 1 text of validation)" in printed
    assert "measured on test (with 1 text of validation): bild" in printed
    summary = json.loads(Path("outputs/grid/screen.json").read_text())
    assert summary["guarantee"]["left_out"] == summary["shared_texts"] == 1
