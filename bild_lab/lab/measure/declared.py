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
FALSE_ALARM = 1e-9  # how often a rule that emits what it declares is called one that does not


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
    for one in deviations:
        for name, (above, variance) in one.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + above, before[1] + variance
    return sums


def are_by_chance(sums: Mapping[str, tuple[float, float]]) -> bool:
    """Whether chance explains how far these sums are from 0."""
    return all(
        abs(above) == 0
        or 2 * math.exp(-(above**2) / (2 * (variance + abs(above) / 3))) > FALSE_ALARM
        for above, variance in sums.values()
    )
