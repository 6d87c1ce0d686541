"""No worse by a margin: the score test of paired proportions, the betting test, the bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, multinomial

from bild_lab.errors import UserError
from bild_lab.lab.config.schemas import MeasureSpec
from bild_lab.lab.metrics.non_inferiority import (
    BETTING,
    BOOTSTRAP,
    SCORE,
    _betting_p_value,
    betting_test,
    bootstrap_test,
    non_inferiority,
    score_test,
)
from bild_lab.lab.metrics.proportions import exact_p_value, score_statistic
from bild_lab.lab.metrics.quality import (
    Scoring,
    p_value,
    score_pool,
    score_values,
    score_with_baseline,
)


def test_the_score_test_gives_the_published_example() -> None:
    """Tango (1998): two ways to disinfect contact lenses, 44 pairs, margin 0.1: Z = 1.709."""
    assert score_statistic(0, 1, 44, -0.1) == pytest.approx(1.709, abs=5e-4)
    # where a tenth is lost and nothing gained, one or none of 44 is by chance
    by_chance = binom.cdf(1, 44, 0.1)
    assert score_test(0, 1, 44, 10).p_value == pytest.approx(by_chance, abs=1e-6)


@pytest.mark.parametrize(
    ("gained", "lost", "pairs", "published"),
    [
        # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8
        (6, 16, 161, (-0.1240, -0.0054)),
        (1, 7, 21, (-0.517, -0.026)),
    ],
)
def test_differences_that_are_just_rejected_are_the_ends_of_tangos_interval(
    gained: int, lost: int, pairs: int, published: tuple[float, float]
) -> None:
    def excess(difference: float, deviation: float) -> float:
        return score_statistic(gained, lost, pairs, difference) - deviation

    ends = [brentq(excess, -0.99, 0.99, args=(deviation,)) for deviation in (1.959964, -1.959964)]
    assert ends == pytest.approx(published, abs=6e-4 if pairs == 21 else 6e-5)


@pytest.mark.parametrize("counts", [(0, 0, 10), (0, 1, 44), (6, 16, 161), (5, 0, 5), (3, 3, 7)])
def test_the_bound_is_the_margin_that_is_just_shown(counts: tuple[int, int, int]) -> None:
    bound = score_test(*counts, margin=5).lower_bound
    below, above = (exact_p_value(*counts, bound / 100 + step) for step in (-1e-6, 1e-6))
    assert below <= 0.05 < above
    for margin in (1, 5, 10, 20, 40):
        tested = score_test(*counts, margin)
        assert tested.shown == (tested.lower_bound >= -margin)


def test_texts_that_are_all_alike_leave_a_bound_below_zero() -> None:
    """A bootstrap of them would have no width."""
    alike = [100.0] * 40 + [0.0] * 60
    tested = score_values("pass@1", alike, alike, margin=5).score.non_inferiority
    assert (tested.test, tested.shown) == (SCORE, True)
    assert tested.lower_bound == pytest.approx(100 * (0.05 ** (1 / 100) - 1), abs=1e-3)  # -2.95
    # the more pairs, the less may be lost; with ten a loss of 5 points is not excluded
    assert not score_test(0, 0, 10, 5).shown
    assert bootstrap_test(np.zeros(1000), 5, 100).lower_bound == 0


def test_everything_lost_is_inferior_and_everything_gained_is_not() -> None:
    assert score_test(0, 5, 5, 5).lower_bound == -100 and score_test(0, 5, 5, 5).p_value > 0.9
    assert score_test(5, 0, 5, 5).lower_bound > 0 and score_test(5, 0, 5, 5).shown
    assert score_test(0, 5, 5, 100).shown  # no more than everything can be lost


def test_right_and_wrong_have_the_score_test_bounded_values_the_bet_others_the_bootstrap() -> None:
    differences = np.linspace(-4, 4, 1000)
    assert non_inferiority([100.0, 0.0], [0.0, 0.0], differences, 5, 2, 1).test == SCORE
    for values in ([100.0, 50.0], None):
        assert non_inferiority(values, [0.0, 0.0], differences, 5, 2, 2).test == BOOTSTRAP
    bounded = non_inferiority([100.0, 50.0], [0.0, 0.0], differences, 5, 2, 2, bounded=True)
    assert bounded == betting_test([100.0, 50.0], 5)
    nats = score_values("log probability", [-9.0, -250.0, 3.5], [-9.5, -240.0, 3.0], margin=5)
    assert nats.score.non_inferiority.test == BOOTSTRAP
    # one count of each kind, by hand: the second example was lost
    lost = non_inferiority([100.0, 0.0, 0.0], [100.0, 100.0, 0.0], differences, 5, 3, 1)
    assert lost == score_test(0, 1, 3, 5)


@pytest.mark.parametrize("seed", range(3))
def test_the_bet_shows_just_the_margins_above_its_bound(seed: int) -> None:
    random = np.random.default_rng(seed)
    differences = np.clip(random.normal(-1, 20, 200), -100, 100)
    bound = betting_test(differences, 5).lower_bound
    assert betting_test(differences, -bound + 0.01).shown
    assert not betting_test(differences, -bound - 0.01).shown
    p_values = [betting_test(differences, margin).p_value for margin in (1, 2, 5, 10, 20)]
    assert p_values == sorted(p_values, reverse=True)
    assert betting_test(-np.full(9, 100.0), 5).lower_bound == -100
    assert betting_test(-np.full(9, 100.0), 100).shown  # no more than everything can be lost


def test_what_is_staked_on_a_text_depends_on_the_texts_before_it_alone() -> None:
    """The capital of a player, one text after the other."""
    losses, share = np.random.default_rng(0).normal(0, 0.3, 100).clip(-1, 1), 0.05
    capital = largest = 1.0
    for place, loss in enumerate(losses):
        spread = place * losses[:place].var() if place else 0.0
        variance = (0.25 + spread) / (place + 1)
        stake = min(np.sqrt(2 * np.log(20) / (len(losses) * variance)), 0.9 / (1 - share))
        capital *= 1 + stake * (share - loss)
        largest = max(largest, capital)
    found = _betting_p_value(losses, np.ones(100), share)
    assert found == pytest.approx(1 / largest) and largest > 1


def test_equal_texts_need_three_over_the_margin_of_them() -> None:
    """As one that loses everything may be missing: 0.95^59 < 0.05 < 0.95^58; the bet needs a few
    more.
    """
    for fewest, margin in ((66, 5), (335, 1)):
        assert betting_test(np.zeros(fewest), margin).shown
        assert not betting_test(np.zeros(fewest - 1), margin).shown


@pytest.mark.parametrize(("texts", "share", "lost"), [(40, 0.02, 50), (100, 0.01, 100)])
def test_rare_large_losses_of_the_whole_margin_are_not_called_no_worse(
    texts: int, share: float, lost: float
) -> None:
    """Most draws of these texts hold no loss, or hardly one."""
    random, shown = np.random.default_rng(0), 0
    for _ in range(100):
        baseline = np.full(texts, 60.0 if lost < 60 else 100.0)
        values = baseline - lost * (random.random(texts) < share)
        values[0] -= 1e-9  # neither right nor wrong
        tested = score_values("ROUGE-L", values.tolist(), baseline.tolist(), margin=1, bounded=True)
        shown += tested.score.non_inferiority.shown
    assert shown <= 5


def test_turns_of_a_conversation_count_once() -> None:
    right, conversations = [100.0] * 80, [place // 2 for place in range(80)]
    tested = score_values("pass@1", right, right, margin=5, conversations=conversations)
    found = tested.score.non_inferiority
    assert found == betting_test(np.zeros(40), 5) and found.test == BETTING and not found.shown
    differences = np.random.default_rng(0).normal(-1, 10, 50)
    twice = betting_test(np.repeat(differences, 2), 5, [place // 2 for place in range(100)])
    assert twice.p_value == pytest.approx(betting_test(differences, 5).p_value)


def test_a_corpus_metric_shows_nothing_where_hardly_a_text_differs() -> None:
    references = [["a b c d e f"]] * 100
    baseline = ["a b c d e f"] * 100
    for changed, shown in ((0, False), (7, False), (8, True)):
        texts = ["a b c d e g"] * changed + baseline[changed:]
        scored = score_with_baseline("bleu", texts, baseline, references, margin=10)
        assert scored.score.non_inferiority.shown == shown, changed
    # seven conversations of which every turn differs are as few
    turns = [place // 2 for place in range(100)]
    texts = ["a b c d e g"] * 14 + baseline[14:]
    scored = score_with_baseline(
        "bleu", texts, baseline, references, margin=10, conversations=turns
    )
    assert not scored.score.non_inferiority.shown
    pooled = score_pool(
        "bleu",
        ["a b c d e f", "a b c d e g"],
        references[:2],
        [[1] * 7 + [0] * 93],
        [0] * 100,
        margin=10,
    )
    assert not pooled[0][0].non_inferiority.shown


@pytest.mark.parametrize("count", [1000, 100])
def test_the_bootstraps_bound_and_p_value_agree(count: int) -> None:
    differences = np.random.default_rng(0).normal(-2, 1, count)
    bound = bootstrap_test(differences, 5, 100).lower_bound
    assert bound == pytest.approx(np.quantile(differences, 0.05), abs=0.15)
    assert bootstrap_test(differences, -bound + 1e-9, 100).shown
    assert not bootstrap_test(differences, -bound, 100).shown


def test_what_is_no_number_shows_nothing() -> None:
    """As a log-probability per token of texts without tokens."""
    assert bootstrap_test(np.full(1000, np.nan), 5, 100).p_value == 1
    half = np.where(np.arange(1000) % 2, np.nan, 1.0)
    assert not bootstrap_test(half, 5, 100).shown
    assert p_value(np.full(1000, np.nan), np.nan) == p_value(np.full(1000, np.nan), 1.0) == 1


def test_each_way_of_scoring_tests_the_leading_metric_alone() -> None:
    references = [["a"], ["b"], ["c d e f"], ["x y z w"]] * 8
    baseline = ["a", "b", "c d e f", "x y z w"] * 8
    texts = ["a", "c", "c d e f", "x y z w"] * 8
    scored = Scoring(("exact_match", "bleu"), margin=30).score_outputs(
        texts, baseline, references, 0
    )
    tested = scored["exact_match"].score.non_inferiority
    assert tested == score_test(0, 8, 32, 30)
    assert scored["bleu"].score.non_inferiority is None
    corpus = score_with_baseline("bleu", texts, baseline, references, margin=30)
    assert corpus.score.non_inferiority.test == BOOTSTRAP
    plain = score_with_baseline("exact_match", texts, baseline, references)
    assert plain.score.non_inferiority is None
    pool, picks = ["a", "b", "c"], [[0, 1], [0, 2]]
    (alone, _), (pooled, _) = score_pool(
        "exact_match", pool, [["a"], ["b"], ["b"]], picks, picks[0], margin=30
    )
    assert alone.non_inferiority == score_test(0, 0, 2, 30)
    assert pooled.non_inferiority == score_test(0, 1, 2, 30)


def test_a_margin_must_be_above_zero_and_needs_a_baseline() -> None:
    assert MeasureSpec(margin=0.5).margin == 0.5
    for values in ({"margin": 0.0}, {"margin": -5.0}, {"margin": 5.0, "baseline": None}):
        with pytest.raises(UserError, match=r"measure\.margin"):
            MeasureSpec(**values)


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "margin"), [(50, 10), (100, 5), (200, 5)])
@pytest.mark.parametrize("gained_share", [0.0, 0.02, 0.1])
def test_a_loss_of_the_whole_margin_is_called_no_worse_in_at_most_five_of_a_hundred(
    examples: int, margin: int, gained_share: float
) -> None:
    """Exactly, over all tables that such a system can give."""
    lost_share = gained_share + margin / 100
    shares = [gained_share, lost_share, 1 - gained_share - lost_share]
    error = 0.0
    for gained in range(int(binom.ppf(1 - 1e-9, examples, gained_share)) + 1):
        for lost in range(examples - gained + 1):
            if exact_p_value(gained, lost, examples, -margin / 100) <= 0.05:
                counts = [gained, lost, examples - gained - lost]
                error += multinomial.pmf(counts, examples, shares)
    assert 0.02 < error <= 0.0505


@pytest.mark.slow
def test_the_bootstrap_calls_a_loss_of_the_whole_margin_no_worse_as_seldom() -> None:
    generator = np.random.default_rng(0)
    shown = 0
    for _ in range(400):
        baseline = generator.uniform(0, 100, 80)
        values = baseline - 5 + generator.normal(0, 8, 80)
        tested = score_values("any", values.tolist(), baseline.tolist(), margin=5)
        shown += tested.score.non_inferiority.shown
    assert 0.02 < shown / 400 < 0.085
