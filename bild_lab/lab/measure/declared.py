"""Whether a rule emits what it declares: are drafted tokens, or likely ones, emitted more often than
its own distributions say?

Each token has a value in [0, 1]. Where tokens are drawn from the declared distributions, the sum of
their values less the values' means is a martingale, and Freedman's inequality (1975) says how far
from 0 it may be by chance, whatever the distributions are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxtyping import Float
from torch import Tensor

Distribution = Float[Tensor, " vocab"]
FALSE_ALARM = 1e-6  # how often a rule that emits what it declares is called one that does not
STEP_OF_BOUNDS = 1.1  # of the variance: 1, 1.1, 1.21, …


def token_values(declared: Distribution, proposed: Distribution | None) -> dict[str, Distribution]:
    """The value of each token by which a rule may emit too much or too little of some.

    proposed: what was drafted from; None where nothing was.
    """
    values = {"likely": declared / declared.max()}
    if proposed is not None:
        both = proposed + declared
        values["drafted"] = (proposed / both).where(both > 0, 0.0)
    return values


def deviation(token: int, declared: Distribution, values: Distribution) -> tuple[float, float]:
    """How much the value of an emitted token is above the mean, and the variance of the values."""
    mean = (declared * values).sum()
    variance = (declared * (values - mean) ** 2).sum()
    return float(values[token] - mean), float(variance)


def sum_of(
    deviations: Iterable[Mapping[str, tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """The sums of deviations and variances, by the name of the values."""
    sums: dict[str, tuple[float, float]] = {}
    for deviations_by_name in deviations:
        for name, (above, variance) in deviations_by_name.items():
            total = sums.get(name, (0.0, 0.0))
            sums[name] = total[0] + above, total[1] + variance
    return sums


def are_by_chance(sums: Mapping[str, tuple[float, float]]) -> bool:
    """Whether chance explains how far these sums are from 0.

    The inequality needs a bound of the variance that does not depend on the tokens. So it is used
    with each of a series of bounds, and the chance of a false alarm is divided among them and the
    sums.
    """
    for above, variance in sums.values():
        place = max(0, math.ceil(math.log(max(variance, 1.0)) / math.log(STEP_OF_BOUNDS)))
        bound = STEP_OF_BOUNDS**place
        share = 1 / (len(sums) * (place + 1) * (place + 2))  # over all places these sum to 1
        exponent = above**2 / (2 * (bound + abs(above) / 3))
        if 2 * math.exp(-exponent) <= FALSE_ALARM * share:
            return False
    return True
