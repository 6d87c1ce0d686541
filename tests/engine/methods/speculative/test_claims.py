"""What each rule claims about itself, what it does without a draft, and the settings that it
refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bild_lab.engine.draft import Draft
from bild_lab.engine.methods.bild import ReleasedRollback, Rollback
from bild_lab.engine.methods.speculative.block_verification import BlockVerification
from bild_lab.engine.methods.speculative.cascades import (
    Cactus,
    SpeculativeCascade,
    StaticEnsemble,
)
from bild_lab.engine.methods.speculative.exact_match import ExactMatch
from bild_lab.engine.methods.speculative.rejection_sampling import RejectionSampling
from bild_lab.engine.methods.speculative.sampling import (
    OverlapMeasurement,
    SpeculativeSampling,
)
from bild_lab.engine.methods.speculative.tree_acceptance import accepted_path, best_sibling
from bild_lab.engine.methods.speculative.typical_acceptance import (
    MarginAcceptance,
    TruncationSampling,
    TypicalAcceptance,
)
from bild_lab.engine.protocols import Acceptance
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import Sampling
from bild_lab.errors import UserError
from tests.engine.methods.speculative.exact import sampled

CLAIMS = [  # lossless greedily, and sampled
    (ExactMatch(), True, True),
    (RejectionSampling(), True, True),
    (BlockVerification(), True, True),
    (SpeculativeSampling(), True, True),
    (OverlapMeasurement(), True, True),  # it accepts nothing
    (SpeculativeSampling(0.9), False, False),
    (Rollback(0.5), True, False),  # below log 2 the drafted token is the most likely
    (Rollback(math.log(2)), False, False),  # two tokens may have a half each
    # it overlooks what follows a distant token of the target's own
    (ReleasedRollback(0.5), False, False),
    (TypicalAcceptance(0.1, 0.3), False, False),
    (TruncationSampling(ratio=0.1), True, False),
    (SpeculativeCascade("diff", 0.1), False, False),
    (StaticEnsemble(1), True, True),
    (StaticEnsemble(0.99), False, False),
    (Cactus(0), True, True),
    (Cactus(0.01), False, False),
    (MarginAcceptance(1), True, True),
    (MarginAcceptance(0.99), False, False),
]


@pytest.mark.parametrize(
    ("rule", "greedy", "random"), CLAIMS, ids=lambda value: type(value).__name__
)
def test_a_rule_claims_to_be_lossless_only_where_it_is(
    rule: Acceptance, greedy: bool, random: bool
) -> None:
    assert (rule.lossless(Sampling()), rule.lossless(Sampling(1.0))) == (greedy, random)


def test_rules_of_chains_say_that_they_take_no_trees() -> None:
    chains = {type(rule) for rule, *_ in CLAIMS if not rule.accepts_trees}
    others = {SpeculativeCascade, StaticEnsemble, Cactus}
    assert (
        chains
        == {OverlapMeasurement, ReleasedRollback, RejectionSampling, BlockVerification} | others
    )


@pytest.mark.parametrize(
    "rule", [rule for rule, *_ in CLAIMS], ids=lambda rule: type(rule).__name__
)
def test_an_empty_draft_leaves_the_word_to_the_target(rule: Acceptance) -> None:
    logits, nothing = (
        torch.tensor([[0.0, 99.0, 0.0]], dtype=torch.float64),
        torch.empty(0, dtype=torch.long),
    )
    requests = [Request(Source((0,)), Limits(1, 10)), sampled()]
    # which refuses to sample
    for request in requests[:1] if isinstance(rule, ReleasedRollback) else requests:
        for parents in [None, nothing] if rule.accepts_trees else [None]:
            verdict = rule(Draft(nothing, parents), logits, request)
            assert (verdict.path, verdict.next_token) == ((), 1)


NUMBERS = (True, "0.3", math.nan, None)  # which are none


@pytest.mark.parametrize(
    ("make", "refused", "key"),
    [
        (SpeculativeSampling, (0, -0.5, 1.01, *NUMBERS), "lenience"),
        (Rollback, (0, -1, *NUMBERS), "rollback threshold"),
        (lambda value: TypicalAcceptance(value, 0.3), (0, -0.1, 1.1, *NUMBERS), "epsilon"),
        (lambda value: TypicalAcceptance(0.09, value), (0, -0.1, 1.1, *NUMBERS), "delta"),
        (lambda value: SpeculativeCascade("diff", value), (math.inf, *NUMBERS), "alpha"),
        (lambda value: SpeculativeCascade(value, 0.3), ("chaw",), "rule"),
        (StaticEnsemble, (-0.1, 1.1, *NUMBERS), "weight"),
        (Cactus, (-0.1, math.inf, *NUMBERS), "delta"),
        (MarginAcceptance, (0, 1.1, *NUMBERS), "ratio"),
        (lambda value: TruncationSampling(ratio=value), (0, 1.1), "ratio"),
        (lambda value: TruncationSampling(epsilon=value, delta=0.3), (0, 2, None), "epsilon"),
        (lambda value: TruncationSampling(epsilon=0.1, delta=value), (0, 2, None), "delta"),
        (lambda value: TruncationSampling(top_k=value), (0, 1.5), "top_k"),
        (lambda value: TruncationSampling(rollback=value), (0, -1), "rollback"),
        (lambda _: TruncationSampling(), (None,), "bar"),
    ],
)
def test_settings_out_of_range_are_refused(
    make: Callable[[object], Acceptance], refused: tuple[object, ...], key: str
) -> None:
    for value in refused:
        with pytest.raises(UserError, match=key):
            make(value)


def test_of_several_passing_siblings_the_best_is_accepted() -> None:
    draft = Draft(torch.tensor([3, 4, 5]), parents=torch.tensor([-1, -1, -1]))
    assert accepted_path(draft, best_sibling([0.5, 0.9, 0.7], 0.4)) == ((1,), 2)
    assert accepted_path(draft, best_sibling([0.5, 0.9, 0.7], 0.95)) == ((), 0)
