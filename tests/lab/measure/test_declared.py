"""A rule emits what it declares, or the tokens of a point's texts show that it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.sampling import SpeculativeSampling
from bild_lab.engine.methods.speculative.tree_acceptance import PerNode, PerRow
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Trace
from bild_lab.lab.measure.certificate import DEFECT, EXACT, NO_FORM, Certificate
from bild_lab.lab.measure.declared import are_by_chance, deviation, sum_of, token_values
from bild_lab.lab.measure.sampled_certificate import OUTPUT, RULE, certify_sampled, judge_together
from tests.lab.measure.test_sampled_certificate import DRAFTER, TARGET, loaded, request

TEXTS, LENGTH = 12, 40


def test_a_deviation_is_from_the_mean_of_the_declared_distribution() -> None:
    declared, proposed = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.0, 0.3, 0.7])
    values = token_values(declared, proposed)
    assert values["likely"].tolist() == pytest.approx([1, 0.6, 0.4])
    assert values["drafted"].tolist() == pytest.approx([0, 0.5, 7 / 9])
    assert list(token_values(declared, None)) == ["likely"]
    mean = 0.5 + 0.3 * 0.6 + 0.2 * 0.4
    variance = 0.5 + 0.3 * 0.6**2 + 0.2 * 0.4**2 - mean**2
    assert deviation(2, declared, values["likely"]) == pytest.approx((0.4 - mean, variance))


def test_chance_explains_a_sum_by_its_variance() -> None:
    assert are_by_chance({}) and are_by_chance({"likely": (0.0, 0.0)})
    assert are_by_chance({"likely": (70.0, 100.0)}) and are_by_chance({"likely": (-70.0, 100.0)})
    for above in (80.0, -80.0):
        assert not are_by_chance({"likely": (above, 100.0)})
        assert not are_by_chance({"likely": (0.0, 100.0), "drafted": (above, 100.0)})
    assert are_by_chance({"likely": (5.0, 0.0)}) and not are_by_chance({"likely": (20.0, 0.0)})
    assert sum_of([{"likely": (1.0, 2.0)}, {"likely": (-3.0, 1.0), "drafted": (1.0, 1.0)}]) == {
        "likely": (-2.0, 3.0),
        "drafted": (1.0, 1.0),
    }


class Lenient(SpeculativeSampling):
    """Accepts more than it should, and says that it emits the target's distribution."""

    def output_distribution(
        self, draft: Draft, logits: PerRow, request: Request, proposal_probs: PerNode
    ) -> PerRow:
        return request.sampling.probs(logits)


class MostLikely(ExactMatch):
    """Emits the target's most likely token, and says that it draws."""

    def __call__(self, draft: Draft, logits: PerRow, request: Request) -> Verdict:
        return Verdict((), int(logits[0].argmax()))


def certificates(rule: Acceptance) -> list[Certificate]:
    method = DraftThenVerify(loaded(TARGET), ModelDrafter(loaded(DRAFTER), 3), rule)
    return [
        certify_sampled(
            method,
            method.target,
            request(seed, LENGTH),
            method.decode(request(seed, LENGTH), Trace())[1:],
        )
        for seed in range(TEXTS)
    ]


@pytest.mark.parametrize("rule", [Lenient(0.2), MostLikely()], ids=["lenient", "most likely"])
def test_a_rule_that_does_not_emit_what_it_declares_is_a_defect(rule: Acceptance) -> None:
    """Fault: its own word was all that spoke for it."""
    found = certificates(rule)
    assert {one.verdict for one in found} == {EXACT}
    assert {(one.verdict, one.check) for one in judge_together(found)} == {(DEFECT, RULE)}


@pytest.fixture(scope="module")
def sound() -> list[Certificate]:
    return certificates(SpeculativeSampling())


def test_a_sound_rule_emits_what_it_declares(sound: list[Certificate]) -> None:
    assert judge_together(sound) == sound
    assert all(set(one.deviations) == {"likely", "drafted"} for one in sound)


def test_texts_that_are_not_the_targets_say_nothing_of_the_others(
    sound: list[Certificate],
) -> None:
    lossy = certificates(SpeculativeSampling(0.2))
    assert {one.verdict for one in lossy} == {DEFECT}
    assert judge_together([*sound, *lossy]) == [*sound, *lossy]


def test_which_texts_agree_depends_on_their_tokens(sound: list[Certificate]) -> None:
    """Fault: texts of a truthful lossy rule in which nothing was drafted, and so few tokens repeat,
    were judged without those in which something was.
    """
    undrafted = [replace(one, deviations={"likely": (-10.0, 10.0)}) for one in sound]
    drafted = replace(sound[0], verdict=DEFECT, check=OUTPUT, deviations={"likely": (118.0, 9.0)})
    assert {one.check for one in judge_together(undrafted)} == {RULE}
    assert judge_together([*undrafted, drafted]) == [*undrafted, drafted]
    without_form = replace(drafted, verdict=NO_FORM, check=None)
    assert judge_together([*undrafted, without_form]) == [*undrafted, without_form]
