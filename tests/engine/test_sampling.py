"""Standardized sampling and the acceptance rules on distributions that can be written down."""

from __future__ import annotations

import math

import pytest
import torch

from bild_lab.engine.draft import Draft, Verdict
from bild_lab.engine.methods.bild import Rollback
from bild_lab.engine.methods.speculative.draft_model import ModelDrafter, require_confidence
from bild_lab.engine.methods.speculative.sampling import residual
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.sampling import COOLEST, HOTTEST, Sampling, pick
from bild_lab.errors import UserError
from bild_lab.training.distillation import DistillationSpec
from tests.stubs import SESSION, StubModel

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.05, 0.25], dtype=torch.float64)
GREEDY = Request(Source((0,)), Limits(1, 10))


def log_rows(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_temperature_zero_is_argmax_with_certainty() -> None:
    assert Sampling().probs(P.log()[None]).tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_every_row_has_its_own_most_likely_token() -> None:
    rows = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    assert Sampling().probs(rows).tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


def test_half_precision_becomes_float32() -> None:
    half = P.log()[None].bfloat16()
    assert Sampling(1.0).probs(half).dtype == torch.float32
    torch.testing.assert_close(Sampling(1.0).probs(half), half.float().softmax(-1), rtol=0, atol=0)


def test_sampling_is_plain_only_without_top_k_and_top_p() -> None:
    assert Sampling(1.0).plain and Sampling(1.0, top_p=1.0).plain
    assert not Sampling(1.0, top_k=2).plain and not Sampling(1.0, top_p=0.9).plain


def test_temperature_divides_the_logits() -> None:
    expected = P.sqrt() / P.sqrt().sum()
    torch.testing.assert_close(Sampling(temperature=2.0).probs(P.log()[None])[0], expected)


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_top_k_keeps_the_most_likely_tokens(kept: int) -> None:
    left = torch.where(torch.arange(4) < kept, P, 0)
    torch.testing.assert_close(
        Sampling(temperature=1.0, top_k=kept).probs(P.log()[None])[0], left / left.sum()
    )


def test_a_top_p_of_1_keeps_what_float32_cannot_add() -> None:
    probs = Sampling(temperature=1.0, top_p=1.0).probs(torch.tensor([[0.0, -30.0, -31.0]]))
    assert (probs > 0).all()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    probs = Sampling(temperature=1.0, top_p=top_p).probs(P.log()[None])[0]
    assert int((probs > 0).sum()) == kept
    assert math.isclose(float(probs.sum()), 1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_sampling_out_of_range_is_refused(values: dict) -> None:
    with pytest.raises(UserError, match=rf"decoding.{next(iter(values))} must"):
        Sampling(**values)


@pytest.mark.parametrize("temperature", [1e-38, 1e-320, 5e-324, 0.9e-5, 1.1e5, 1e39, 1e300])
def test_a_temperature_that_logits_cannot_be_divided_by_is_refused(temperature: float) -> None:
    with pytest.raises(
        UserError, match=r"decoding.temperature must lie in \[1e-05, 100000\] or be 0, .* set 0 for"
    ):
        Sampling(temperature)
    with pytest.raises(UserError, match=r"align.temperature must lie in"):
        DistillationSpec(temperature=temperature)


@pytest.mark.fast(
    "1e-05-None-None",
    "1e-05-1-None",
    "1e-05-1-1e-20",
    "1e-05-1-5e-324",
    "1e-05-3-5e-324",
    "1e-05-5-0.9",
    "1e-05-5-1e-46",
    "1e-05-1000000000-1e-46",
    "1.0-None-None",
    "1.0-None-1e-20",
    "1.0-1-1e-20",
    "1.0-1-5e-324",
    "1.0-3-0.9",
    "1.0-5-0.9",
    "1.0-5-1e-46",
    "1.0-1000000000-None",
    "100000.0-None-None",
    "100000.0-None-1e-20",
    "100000.0-None-5e-324",
    "100000.0-1-5e-324",
    "100000.0-3-0.9",
    "100000.0-3-1e-46",
    "100000.0-5-1e-46",
    "100000.0-1000000000-None",
    "100000.0-1000000000-1e-20",
)
@pytest.mark.parametrize("top_p", [None, 0.9, 1e-20, 1e-46, 5e-324])
@pytest.mark.parametrize("top_k", [None, 1, 3, 5, 10**9])
@pytest.mark.parametrize("temperature", [COOLEST, 1.0, HOTTEST])
def test_whatever_is_kept_is_a_distribution_with_the_most_likely_token(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.tensor([[3e4, 2.9e4, -3e4, float("-inf")], [1.0, 2.0, 0.0, -2.0]])
    probs = Sampling(temperature, top_k, top_p).probs(logits)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert (probs >= 0).all() and probs[0, 0] > 0 and probs[1, 1] > 0
    if temperature == COOLEST or top_k == 1 or (top_p is not None and top_p < 0.1):
        assert (
            probs.argmax(-1).tolist() == logits.argmax(-1).tolist()
            and (probs.amax(-1) > 1 - 1e-6).all()
        )


def test_a_token_without_probability_is_never_picked() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.25, 0.75, 0.0, 0.0]])
    assert pick(probs, torch.tensor([0.0, 0.0])).tolist() == [1, 0]
    assert pick(probs, torch.tensor([0.5, 0.25])).tolist() == [3, 1]
    assert pick(probs, torch.tensor([0.999, 0.999])).tolist() == [3, 1]
    # shares of the sum, which rounding moves
    assert pick(2 * probs, torch.tensor([0.5, 0.25])).tolist() == [3, 1]
    assert pick(P[None], torch.tensor([1.0])).tolist() == [3]  # what rounds up to 1 is the last


def test_rollback_keeps_tokens_before_the_first_disagreement() -> None:
    logits = log_rows([0.9, 0.1, 0.0], [0.2, 0.2, 0.6], [0.98, 0.01, 0.01], [0.1, 0.8, 0.1])
    draft = Draft(torch.tensor([0, 1, 0]))
    verdict = Rollback(1.0)(draft, logits, GREEDY)
    assert verdict.path == (0,)
    assert verdict.next_token == 2
    assert list(verdict.stats["distance"]) == pytest.approx(
        [-math.log(0.9), -math.log(0.2), -math.log(0.98)]
    )


def test_rollback_judges_at_temperature_1_whatever_the_tokens_are_drawn_at() -> None:
    logits = log_rows([0.25, 0.75], [0.5, 0.5])
    request = Request(
        Source((0,)), Limits(1, 9), Sampling(temperature=4.0), torch.Generator().manual_seed(0)
    )
    # at temperature 4 the distance is 0.84
    verdict = Rollback(1.3)(Draft(torch.tensor([0])), logits, request)
    assert verdict.stats["distance"] == pytest.approx([-math.log(0.25)]) and verdict.path == ()


def test_a_drafters_confidence_is_that_at_temperature_1_whatever_the_tokens_are_drawn_at() -> None:
    model = StubModel(lambda _: P.log())
    drafter = ModelDrafter(model, 3, 0.45)
    request = Request(
        Source((0,)), Limits(1, 9), Sampling(temperature=4.0), torch.Generator().manual_seed(0)
    )
    drafter = drafter.start(request, SESSION)
    draft = drafter.propose([0])
    assert (len(draft), draft.stats["fallback"]) == (3, False)
    assert draft.stats["confidence"] == pytest.approx([float(P.max())] * 3)


def test_a_distance_equal_to_the_threshold_is_accepted() -> None:
    logits = log_rows([0.5, 0.5], [0.5, 0.5])
    threshold = float(-logits[0].log_softmax(-1)[1])
    assert Rollback(threshold)(Draft(torch.tensor([1])), logits, GREEDY).path == (0,)
    assert (
        Rollback(math.nextafter(threshold, 0))(Draft(torch.tensor([1])), logits, GREEDY).path == ()
    )


def test_rollback_keeps_the_most_likely_branch_of_a_tree() -> None:
    """Siblings 0 and 1 behind the root, both near enough; behind 1 none is."""
    logits = log_rows(
        [0.4, 0.6, 0.0], [0.9, 0.1, 0.0], [0.1, 0.2, 0.7], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]
    )
    draft = Draft(torch.tensor([0, 1, 0, 1]), torch.tensor([-1, -1, 0, 1]))
    verdict = Rollback(1.0)(draft, logits, GREEDY)
    assert (verdict.path, verdict.next_token) == ((1,), 2)
    assert verdict.stats["distance"] == pytest.approx([-math.log(p) for p in (0.4, 0.6, 0.9, 0.2)])
    assert Rollback(2.0)(draft, logits, GREEDY).path == (1, 3)


def test_an_infinite_threshold_never_rolls_back() -> None:
    logits = log_rows([1.0, 0.0], [0.0, 1.0])
    assert Rollback(math.inf)(Draft(torch.tensor([1])), logits, GREEDY) == Verdict(
        (0,), 1, {"distance": (math.inf,)}
    )


def test_thresholds_of_certainty_and_of_nothing_are_allowed() -> None:
    assert [require_confidence(threshold) for threshold in (0, 0.0, 1, 1.0)] == [0, 0, 1, 1]


def test_a_drafter_at_its_threshold_drafts() -> None:
    even = StubModel(lambda _: torch.zeros(2, dtype=torch.float64))
    for threshold, drafted in ((0.5, 1), (math.nextafter(0.5, 1), 0)):
        assert len(ModelDrafter(even, 1, threshold).start(GREEDY, SESSION).propose([0])) == drafted


def test_the_residual_is_what_p_has_and_q_lacks() -> None:
    expected = torch.tensor([0.3, 0.0, 0.1, 0.0], dtype=torch.float64) / 0.4
    torch.testing.assert_close(residual(P[None], Q[None])[0], expected)
    assert torch.equal(residual(P[None], P[None])[0], P)
