"""What each rule claims about itself, and which of several passing siblings a tree's path takes."""

from __future__ import annotations

import math

import pytest
import torch

from bild_lab.engine.acceptance.cascades import Diff, SpeculativeCascade
from bild_lab.engine.acceptance.exact_match import ExactMatch
from bild_lab.engine.acceptance.rejection_sampling import RejectionSampling
from bild_lab.engine.acceptance.rollback import Rollback
from bild_lab.engine.acceptance.speculative_sampling import SpeculativeSampling
from bild_lab.engine.acceptance.trees import likeliest_path
from bild_lab.engine.acceptance.typical import TypicalAcceptance
from bild_lab.engine.draft import Draft
from bild_lab.engine.sampling import Sampling

GREEDY, SAMPLED = Sampling(), Sampling(1.0)


@pytest.mark.parametrize(
    ("rule", "greedy", "sampled"),
    [
        (ExactMatch(), True, True),
        (RejectionSampling(), True, True),
        (SpeculativeSampling(), True, True),
        (Rollback(0.5), True, False),  # below log 2 the drafted token is the likeliest
        (Rollback(math.log(2)), False, False),  # two tokens may have a half each
        (Rollback(1.0), False, False),
        (TypicalAcceptance(0.1, 0.3), False, False),
        (SpeculativeCascade(Diff(0.1)), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_claims_to_be_lossless_only_where_it_is(rule: object, greedy: bool, sampled: bool) -> None:
    assert (rule.lossless(GREEDY), rule.lossless(SAMPLED)) == (greedy, sampled)


def test_of_several_passing_siblings_the_best_is_accepted() -> None:
    draft = Draft(torch.tensor([3, 4, 5]), parents=torch.tensor([-1, -1, -1]))
    assert likeliest_path(draft, [0.5, 0.9, 0.7], least=0.4) == ((1,), 2)
    assert likeliest_path(draft, [0.5, 0.9, 0.7], least=0.95) == ((), 0)
