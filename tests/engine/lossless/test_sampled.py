"""Sampled texts are distributed exactly as they should be: chi-square tests that notice an error of
2 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from bild_lab.engine.methods.speculative import (
    block_verification,
    rejection_sampling,
)
from bild_lab.engine.methods.speculative import (
    sampling as speculative_sampling,
)
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.cascades import SpeculativeCascade, StaticEnsemble
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.draft_tree import ModelTreeDrafter
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.protocols import Acceptance, Drafter
from tests.engine.lossless.toy import (
    Judge,
    TableModel,
    TreeDrafter,
    own_law,
    p_value,
    sampled_texts,
    text_law,
)
from tests.engine.methods.speculative.test_cascades import FORMULAS, mixture

WINDOW, LENGTH = 2, 3
FEW, SOME, MANY = 600, 1500, 12000  # texts
FAIR = 1e-4  # a smaller p-value is no chance
LENIENCE = 0.6
WEIGHT = 0.8  # lower ones reject too rarely for an error after a rejection to show
ALPHAS = {"chow": 0.3, "diff": 0.1, "opt": 0.2, "token_v1": 0.2, "token_v2": 0.3, "token_v3": 0.4}
# the drafter is mostly wrong behind tokens 0 and 1, where every rule defers, and sure of itself
# behind token 2
APART_TARGET = torch.tensor(
    [[0.02, 0.95, 0.03], [0.03, 0.02, 0.95], [0.30, 0.15, 0.55]], dtype=torch.float64
)
APART_DRAFTER = torch.tensor(
    [[0.49, 0.02, 0.49], [0.48, 0.48, 0.04], [0.10, 0.05, 0.85]], dtype=torch.float64
)
# it is mostly right, and rules differ in what they defer
NEAR_TARGET = torch.tensor(
    [[0.35, 0.45, 0.20], [0.20, 0.25, 0.55], [0.60, 0.25, 0.15]], dtype=torch.float64
)
NEAR_DRAFTER = torch.tensor(
    [[0.15, 0.75, 0.10], [0.30, 0.40, 0.30], [0.52, 0.20, 0.28]], dtype=torch.float64
)
PAIRS = {"apart": (APART_TARGET, APART_DRAFTER), "near": (NEAR_TARGET, NEAR_DRAFTER)}
Pair = tuple[Tensor, Tensor]  # what the target and the drafter say after each token


def judge_speculatively(lenience: float) -> Judge:
    """Algorithm 1 and A.5 of the speculative decoding paper, term by term."""

    def judge(p: list[float], q: list[float]) -> tuple[list[float], list[float]]:
        accepted = [min(b, a / lenience) for a, b in zip(p, q, strict=True)]
        rest = [max(0.0, a - lenience * b) for a, b in zip(p, q, strict=True)]
        return accepted, [share / (sum(rest) or 1.0) for share in rest]

    return judge


def judge_by_rejection(p: list[float], q: list[float]) -> tuple[list[float], list[float]]:
    """A.2 of the same paper."""
    bound = max(a / b for a, b in zip(p, q, strict=True))
    return [a / bound for a in p], p


def judge_by_cascade(rule: str) -> Judge:
    """Algorithm 1 towards the mixture of the rule."""

    def judge(p: list[float], q: list[float]) -> tuple[list[float], list[float]]:
        return judge_speculatively(1.0)(
            mixture(FORMULAS[rule], np.array(p), np.array(q), ALPHAS[rule]), q
        )

    return judge


def judge_by_ensemble(p: list[float], q: list[float]) -> tuple[list[float], list[float]]:
    """Algorithm 1 towards the mixture."""
    return judge_speculatively(1.0)(
        [WEIGHT * a + (1 - WEIGHT) * b for a, b in zip(p, q, strict=True)], q
    )


@dataclass(frozen=True)
class Setting:
    """A rule, what drafts for it, and what it should do; no judge: its texts should be the target's
    own.
    """

    rule: Acceptance
    judge: Judge | None = None
    drafter: Callable[[Tensor], Drafter] = lambda probs: ModelDrafter(
        TableModel(probs), WINDOW, keeps_probs=True
    )

    def law(self, pair: Pair) -> Tensor:
        return (
            own_law(pair[0], LENGTH)
            if self.judge is None
            else text_law(self.judge, *pair, WINDOW, LENGTH)
        )

    def texts(self, pair: Pair, count: int, seed: int) -> list[tuple[int, ...]]:
        return sampled_texts(pair[0], self.drafter(pair[1]), self.rule, LENGTH, count, seed)


def grown(probs: Tensor) -> Drafter:
    return ModelTreeDrafter(TableModel(probs), nodes=4, window=2, width=2, children=2)


LOSSLESS = {
    "speculative sampling": Setting(SpeculativeSampling()),
    "speculative sampling of trees": Setting(SpeculativeSampling(), drafter=TreeDrafter),
    "speculative sampling of grown trees": Setting(SpeculativeSampling(), drafter=grown),
    "rejection sampling": Setting(RejectionSampling()),
    "block verification": Setting(BlockVerification()),
}
OTHERS = {
    "lenience": Setting(SpeculativeSampling(LENIENCE), judge_speculatively(LENIENCE)),
    **{
        rule: Setting(SpeculativeCascade(rule, alpha), judge_by_cascade(rule))
        for rule, alpha in ALPHAS.items()
    },
    "static ensemble": Setting(StaticEnsemble(WEIGHT), judge_by_ensemble),
}
SETTINGS = {**LOSSLESS, **OTHERS}


def off_by_two_percent(probs: Tensor) -> Tensor:
    """The distribution with 2 % of its mass moved to other tokens."""
    return 0.98 * probs + 0.02 * probs.roll(1, -1)


@pytest.fixture
def planted_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection, 2 % of the mass is on the wrong tokens."""
    residual, draw = speculative_sampling.residual, rejection_sampling.draw
    for module in (speculative_sampling, block_verification):
        monkeypatch.setattr(module, "residual", lambda p, q: off_by_two_percent(residual(p, q)))
    monkeypatch.setattr(
        rejection_sampling, "draw", lambda probs, chance: draw(off_by_two_percent(probs), chance)
    )


def p_values(setting: Setting, pair: Pair, count: int) -> list[float]:
    """Of the next token, of the next two, and of whole texts."""
    texts, law = setting.texts(pair, count, seed=count), setting.law(pair)
    return [p_value([text[:n] for text in texts], of_first(n, law)) for n in range(1, LENGTH + 1)]


def of_first(n: int, law: Tensor) -> Tensor:
    """The law of the first tokens, whatever follows them."""
    return law.reshape(*law.shape[:n], -1).sum(-1)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_distributions_of_lossless_rules_are_the_targets_and_those_of_others_are_not(
    pair: Pair,
) -> None:
    for judge in (judge_speculatively(1.0), judge_by_rejection):
        torch.testing.assert_close(text_law(judge, *pair, WINDOW, LENGTH), own_law(pair[0], LENGTH))
    for setting in OTHERS.values():
        law = setting.law(pair)
        assert float(law.sum()) == pytest.approx(1.0)
        assert float((law - own_law(pair[0], LENGTH)).abs().sum()) > 0.05


@pytest.mark.fast("rejection sampling-near", "token_v2-near")
@pytest.mark.parametrize(("name", "pair"), [*product(SETTINGS, PAIRS)])
def test_some_texts_are_distributed_exactly(name: str, pair: str) -> None:
    values = p_values(
        SETTINGS[name], PAIRS[pair], SOME if name in LOSSLESS and pair == "apart" else FEW
    )
    assert min(values) > FAIR, values


@pytest.mark.fast("speculative sampling")
@pytest.mark.parametrize("name", ["speculative sampling", "speculative sampling of trees"])
def test_an_error_of_two_percent_is_noticed_in_some_texts(name: str, planted_error: None) -> None:
    assert p_values(SETTINGS[name], PAIRS["apart"], SOME)[-1] < FAIR


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SETTINGS)
def test_many_texts_are_distributed_exactly(name: str, pair: str) -> None:
    values = p_values(SETTINGS[name], PAIRS[pair], MANY)
    assert min(values) > FAIR, values


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_an_error_of_two_percent_is_noticed_in_many_texts(name: str, planted_error: None) -> None:
    assert p_values(SETTINGS[name], PAIRS["apart"], MANY)[-1] < FAIR


@pytest.mark.fast("speculative sampling")
@pytest.mark.parametrize("name", LOSSLESS)
def test_texts_are_the_same_to_the_token_for_the_same_seed(name: str) -> None:
    texts = [SETTINGS[name].texts(PAIRS["near"], 40, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
