"""The lossless certificate: ties are told from defects by the target's own scores."""

from __future__ import annotations

import pytest
import torch

from bild_lab.engine.request import Limits, Request, Source
from bild_lab.lab.measure.certificate import (
    DEFECT,
    EQUAL,
    SESSION_DEFECT,
    TIE,
    Certificate,
    certify,
    count_verdicts,
    most_noise,
)
from bild_lab.lab.schema.result import CertificateCounts
from tests.stubs import StubModel

REQUEST = Request(Source((0,)), Limits(1, 8))


def scoring(values: dict[int, float]) -> StubModel:
    """The same logits after every text."""
    logits = torch.zeros(6, dtype=torch.float64)
    for token, value in values.items():
        logits[token] = value
    return StubModel(lambda _: logits)


def test_equal_texts_are_equal() -> None:
    assert certify(scoring({}), REQUEST, [1, 2], [1, 2]) == Certificate(EQUAL)


def test_a_tie_in_the_targets_scores_is_a_numerical_tie() -> None:
    found = certify(scoring({3: 5.0, 4: 5.0}), REQUEST, [3, 4, 1], [3, 3, 1])
    assert (found.verdict, found.position, found.token, found.target_token) == (TIE, 1, 4, 3)
    assert (found.gap, found.margin) == (0.0, 0.0)


def test_a_token_that_the_target_thinks_less_of_is_a_defect() -> None:
    found = certify(scoring({3: 5.0, 4: 4.9}), REQUEST, [4], [3])
    assert found.verdict == DEFECT
    assert found.gap == pytest.approx(0.1)
    assert found.margin == pytest.approx(0.1)


def test_two_tokens_tied_below_the_best_are_a_defect() -> None:
    assert certify(scoring({2: 9.0, 3: 5.0, 4: 5.0}), REQUEST, [3], [4]).verdict == DEFECT


def test_what_counts_as_a_tie_is_what_the_targets_own_scores_vary_by() -> None:
    class Noisy(StubModel):
        """Scores that depend on how many rows are fed at once, as in half precision."""

        def start(self, source: Source, room: int, *_: object):  # type: ignore[no-untyped-def]
            session = super().start(source, room)
            extend = session.extend

            def noisy(tokens, want):  # type: ignore[no-untyped-def]
                scores = extend(tokens, want)
                if len(tokens) > 1:
                    scores.logits[:, 4] += 0.06
                return scores

            session.extend = noisy  # type: ignore[method-assign]
            return session

    def logits(_: list[int]) -> torch.Tensor:
        return torch.tensor([0, 0, 0, 5.0, 4.9, 0], dtype=torch.float64)

    assert certify(StubModel(logits), REQUEST, [3, 4], [3, 3]).verdict == DEFECT
    assert certify(Noisy(logits, dtype=torch.bfloat16), REQUEST, [3, 4], [3, 3]).verdict == TIE
    found = certify(Noisy(logits), REQUEST, [3, 4], [3, 3])  # no rounding in float32 comes to 0.06 nats
    assert found.verdict == SESSION_DEFECT == "defect of the model's session"
    assert count_verdicts([found]) == CertificateCounts(equal=0, ties=0, defects=1)


def test_scores_of_two_tokens_vary_by_their_rounding_at_least() -> None:
    eps = torch.finfo(torch.float32).eps
    assert certify(scoring({3: 8.0, 4: 7.0, 5: 64.0}), REQUEST, [4], [3]).noise == 8 * eps
    tied, apart = (certify(scoring({3: 8.0, 4: 8.0 - gap}), REQUEST, [4], [3]) for gap in (32 * eps, 33 * eps))
    assert (tied.verdict, apart.verdict) == (TIE, DEFECT)  # four times the noise, and more


def test_a_session_may_vary_by_the_rounding_of_two_sums_in_each_layer() -> None:
    assert most_noise(torch.bfloat16, 8) == pytest.approx(4 * 2**-7 * 4)
    assert most_noise(torch.bfloat16, 2) == pytest.approx(4 * 2**-7 * 2)
    assert most_noise(torch.float32, 8) == 3e-4


def test_a_text_that_goes_on_where_the_target_ends_is_a_defect() -> None:
    assert certify(scoring({}), REQUEST, [1, 2, 3], [1, 2]) == Certificate(DEFECT, 2, 3, None)
    assert certify(scoring({}), REQUEST, [1], [1, 2]) == Certificate(DEFECT, 1, None, 2)


def test_a_forbidden_token_is_a_defect_and_forbidden_ones_are_no_scores() -> None:
    forbidden = -float("inf")
    assert certify(scoring({3: 5.0, 4: forbidden}), REQUEST, [4], [3]) == Certificate(DEFECT, 0, 4, 3)
    tied = certify(scoring({2: forbidden, 3: 5.0, 4: 5.0}), REQUEST, [4], [3])
    assert (tied.verdict, tied.gap) == (TIE, 0.0)
    assert certify(scoring({2: forbidden, 3: 5.0, 4: 4.9}), REQUEST, [4], [3]).verdict == DEFECT


def test_verdicts_are_counted() -> None:
    each = [Certificate(EQUAL), Certificate(EQUAL), Certificate(TIE), Certificate(DEFECT)]
    assert count_verdicts(each) == CertificateCounts(equal=2, ties=1, defects=1)
