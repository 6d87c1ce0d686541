"""Whether a system is no worse than another by a margin: one-sided tests at 5 %, paired by example.

A metric that is right or wrong for each example has a score test of the difference of paired
proportions (Tango, 1998, Statistics in Medicine 17, 891-908; for non-inferiority Liu, Hsueh, Hsieh
and Chen, 2002, Statistics in Medicine 21, 231-245). It stays honest where hardly an example
differs: a bootstrap of such examples has an interval of no width. Any other metric has the paired
bootstrap, and so have turns of conversations: no independent pairs, as the score test takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, ndtri

from bild_lab.lab.metrics.bootstrap import least_p_value
from bild_lab.lab.schema.numbers import NON_INFERIORITY_LEVEL, NonInferiority

WRONG, RIGHT = 0.0, 100.0  # the values of an example by a metric of right and wrong
SCORE, BOOTSTRAP = "score", "bootstrap"


def non_inferiority(
    values: Sequence[float] | None,
    baseline_values: Sequence[float] | None,
    differences: Float[np.ndarray, " resamples"],
    margin: float,
    count: int,
) -> NonInferiority:
    """Test whether a system is no worse than the baseline by `margin` points of a metric.

    values, baseline_values: of each example, in the same order; None where the metric has no such,
    and for turns of conversations.
    differences: of both systems over paired bootstrap resamples, system minus baseline, in points.
    count: how many independent examples there are.
    """
    if values is None or baseline_values is None:
        return bootstrap_test(differences, margin, count)
    if not {*values, *baseline_values} <= {WRONG, RIGHT}:
        return bootstrap_test(differences, margin, count)
    pairs = list(zip(values, baseline_values, strict=True))
    return score_test(
        gained=pairs.count((RIGHT, WRONG)),
        lost=pairs.count((WRONG, RIGHT)),
        examples=len(pairs),
        margin=margin,
    )


def score_test(gained: int, lost: int, examples: int, margin: float) -> NonInferiority:
    """The score test of paired proportions, and the bound that it would just not reject.

    gained: examples that only the system has right. lost: those that only the baseline has right.
    margin: in points, above 0; one of 100 or more cannot be exceeded.
    """
    share = margin / RIGHT
    p_value = 0.0
    if share < 1:
        p_value = float(ndtr(-score_statistic(gained, lost, examples, -share)))
    bound = RIGHT * _score_lower_bound(gained, lost, examples)
    return NonInferiority(margin=margin, lower_bound=bound, p_value=p_value, test=SCORE)


def score_statistic(gained: int, lost: int, examples: int, difference: float) -> float:
    """How many standard errors the observed difference of proportions lies above this one.

    Tango (1998), equations 2.5 to 2.7: the standard error is that of the most likely proportions
    with this difference, which lies between -1 and 1.
    """
    above = gained - lost - examples * difference
    linear = gained + lost - (2 * examples - gained + lost) * difference
    constant = -lost * difference * (1 - difference)
    root = math.sqrt(max(0.0, linear**2 - 8 * examples * constant))
    lost_share = (linear + root) / (4 * examples)
    variance = examples * (2 * lost_share + difference * (1 - difference))
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)


def _score_lower_bound(gained: int, lost: int, examples: int) -> float:
    """The smallest difference of proportions that the test does not reject."""
    from scipy.optimize import brentq  # it takes most of a second to import

    observed = (gained - lost) / examples
    lowest = -1 + 1e-9
    if observed <= lowest:
        return -1.0
    deviation = float(ndtri(1 - NON_INFERIORITY_LEVEL))

    def excess(difference: float) -> float:
        return score_statistic(gained, lost, examples, difference) - deviation

    return float(brentq(excess, lowest, observed, xtol=1e-10))


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
