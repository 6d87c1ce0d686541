"""Whether a system is no worse than another by a margin: one-sided tests at 5 %, paired by example.

A metric that is right or wrong for each example has the exact test of the difference of paired
proportions by their score statistic (`proportions`). It stays honest where hardly an example
differs: a bootstrap of such examples has an interval of no width.

Another metric whose examples have values from 0 to 100 has a betting test (Waudby-Smith and Ramdas,
2010.09686, §3.2), and so have turns of conversations, which are no independent pairs. It is valid
for every distribution of such values. The bootstrap is not: simulated with a loss of the whole
margin, it says "no worse" in 70, 39 and 5 of 100 cases at 40, 100 and 1000 texts where the margin is
one point and few texts lose everything, the betting test in 3 at most, and in 5 whatever else was
tried. Taking the larger p-value of both would only cost power. Its price: not even equal texts show
fewer than 3.3 / margin of the scale, 66 texts for five points and 335 for one. From there on it finds
what the bootstrap finds, such as 97 of 100 at 100 texts whose differences have a deviation of 8
points, with a margin of five; rare large gains and losses take more texts (44 where it finds 74).
A corpus metric, such as BLEU, has no bound for each example: the paired bootstrap, which shows
nothing where hardly an example differs. It errs in 7 of 100 cases at 20 texts and in 6 at 100, in 12
and 7 where few texts lose much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from bild_lab.lab.metrics.bootstrap import least_p_value
from bild_lab.lab.metrics.proportions import (
    RIGHT,
    are_right_or_wrong,
    exact_p_value,
    gained_and_lost,
)
from bild_lab.lab.schema.numbers import NON_INFERIORITY_LEVEL, NonInferiority
from bild_lab.lab.schema.statistics import ENOUGH_DIFFERENT

SCORE, BETTING, BOOTSTRAP = "score", "betting", "bootstrap"
MOST_STAKED = 0.9  # the share of the capital that an example which loses everything may cost


def non_inferiority(
    values: Sequence[float] | None,
    baseline_values: Sequence[float] | None,
    differences: Float[np.ndarray, " resamples"],
    margin: float,
    count: int,
    different: int,
    bounded: bool = False,
    conversations: Sequence[int] | None = None,
) -> NonInferiority:
    """Test whether a system is no worse than the baseline by `margin` points of a metric.

    values, baseline_values: of each example, in the same order; None where the metric has no such.
    differences: of both systems over paired bootstrap resamples, system minus baseline, in points.
    count, different: how many independent examples there are, and how many of them have another
    text than the baseline. bounded: whether every example has a value from 0 to 100.
    conversations: of which each example is a turn, as `conversations_of` numbers them; None: of
    none.
    """
    if values is None or baseline_values is None:
        return _bootstrap_of_enough(differences, margin, count, different)
    right_or_wrong = are_right_or_wrong(values, baseline_values)
    if right_or_wrong and conversations is None:
        gained, lost = gained_and_lost(values, baseline_values)
        return score_test(gained, lost, len(values), margin)
    if right_or_wrong or bounded:
        return betting_test(np.subtract(values, baseline_values), margin, conversations)
    return _bootstrap_of_enough(differences, margin, count, different)


def score_test(gained: int, lost: int, examples: int, margin: float) -> NonInferiority:
    """The exact score test of paired proportions, and the bound that it would just not reject.

    gained: examples that only the system has right. lost: those that only the baseline has right.
    margin: in points, above 0; one of 100 or more cannot be exceeded.
    """
    return _tested(lambda share: exact_p_value(gained, lost, examples, -share), margin, SCORE)


def betting_test(
    differences: Float[np.ndarray, " examples"],
    margin: float,
    conversations: Sequence[int] | None = None,
) -> NonInferiority:
    """The betting test of a mean of bounded differences, and the bound that it would just not
    reject.

    differences: of each example, system minus baseline, from -100 to 100 points. margin: in points,
    above 0; one of 100 or more cannot be exceeded. conversations: as in `non_inferiority`. One
    counts as one example: the sum of its turns, over the most turns that any has.
    """
    losses = -np.asarray(differences, dtype=float) / RIGHT
    turns = np.ones(len(losses))
    if conversations is not None:
        losses, turns = np.bincount(conversations, losses), np.bincount(conversations)
    most_turns = turns.max()
    order = np.random.default_rng(0).permutation(len(losses))
    losses, turns = losses[order] / most_turns, turns[order] / most_turns
    return _tested(lambda share: _betting_p_value(losses, turns, share), margin, BETTING)


def _tested(p_value: Callable[[float], float], margin: float, test: str) -> NonInferiority:
    """What a test finds. p_value: given how much may be lost, as a share of the scale below 1."""
    share = margin / RIGHT
    return NonInferiority(
        margin=margin,
        lower_bound=-RIGHT * _least_share_shown(p_value),
        p_value=p_value(share) if share < 1 else 0.0,
        test=test,
    )


def _betting_p_value(
    losses: Float[np.ndarray, " examples"], turns: Float[np.ndarray, " examples"], share: float
) -> float:
    """How surprising these losses would be if their mean were `share` or more.

    One over the largest capital of a player who begins with 1 and stakes on one example after the
    other that it loses less: who can expect no gain then (Ville's inequality). The stakes are those
    that suit so many examples of the variance that the examples before show, drawn towards 1/4. The
    capital grows with the share, so the p-value falls. losses: from -1 to 1, in random order.
    turns: of each example, as a share of the most. share: between -1 and 1.
    """
    examples = len(losses)
    seen = np.arange(examples)
    sums, squares = (np.cumsum(series) - series for series in (losses, losses**2))
    variance = (0.25 + np.maximum(squares - sums**2 / np.maximum(seen, 1), 0)) / (seen + 1)
    stakes = np.sqrt(-2 * math.log(NON_INFERIORITY_LEVEL) / (examples * variance))
    stakes = np.minimum(stakes, MOST_STAKED / (1 - share))
    capital = np.cumsum(np.log1p(stakes * (share * turns - losses)))  # its logarithm
    return math.exp(-max(0.0, float(capital.max())))


def _least_share_shown(p_value: Callable[[float], float]) -> float:
    """The smallest share of the scale that a test shows not to be lost, to 1e-9; 1 if none is.

    p_value: given the share, falling. The score test's rises here and there by some ten-thousandths:
    where it crosses the level several times, some tenths of a point apart, this is one of them.
    """
    not_shown, shown = -1.0, 1.0
    while shown - not_shown > 1e-9:
        middle = (not_shown + shown) / 2
        if p_value(middle) <= NON_INFERIORITY_LEVEL:
            shown = middle
        else:
            not_shown = middle
    return shown


def _bootstrap_of_enough(
    differences: Float[np.ndarray, " resamples"], margin: float, count: int, different: int
) -> NonInferiority:
    """The paired bootstrap, which says nothing where too few examples differ for its interval."""
    if different < ENOUGH_DIFFERENT:
        return NonInferiority(margin=margin, lower_bound=None, p_value=1.0, test=BOOTSTRAP)
    return bootstrap_test(differences, margin, count)


def bootstrap_test(
    differences: Float[np.ndarray, " resamples"], margin: float, count: int
) -> NonInferiority:
    """The paired bootstrap: its 5 % quantile, and how often a resample lost the margin or more, but
    no less often than `count` independent examples can show. A resample of NaN may have lost it.
    """
    ordered = np.sort(differences)
    place = max(0, int(NON_INFERIORITY_LEVEL * (len(ordered) + 1)) - 1)
    at_least_lost = len(ordered) - int((ordered > -margin).sum())
    return NonInferiority(
        margin=margin,
        lower_bound=float(ordered[place]),
        p_value=max((at_least_lost + 1) / (len(ordered) + 1), least_p_value(count)),
        test=BOOTSTRAP,
    )
