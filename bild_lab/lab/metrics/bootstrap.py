"""Percentile bootstrap over examples, from per-example statistics that add up."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float

RESAMPLES = 1000


def resampled_sums(statistics: Float[np.ndarray, "n k"], seed: int) -> Float[np.ndarray, "resamples k"]:
    """Sums of the statistics over resamples of the n examples, drawn with replacement.

    The same seed and n give the same resamples, so two systems are compared in pairs. `sacrebleu` draws the same
    resamples; its default seed is 12345.
    """
    return times_drawn(len(statistics), seed) @ statistics


@lru_cache(maxsize=1)
def times_drawn(count: int, seed: int) -> Float[np.ndarray, "resamples n"]:
    """How often each resample holds each of n examples. Every system of a sweep shares them."""
    generator = np.random.default_rng(seed)
    drawn = [np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(RESAMPLES)]
    return np.array(drawn, dtype=float)


def interval(values: Float[np.ndarray, " resamples"]) -> tuple[float, float]:
    """The central 95 %, from the same order statistics as `sacrebleu.significance`."""
    ordered = np.sort(values)
    cut = len(ordered) // 40
    return float(ordered[cut]), float(ordered[-cut - 1])


def p_value(differences: Float[np.ndarray, " resamples"], observed: float) -> float:
    """Two-sided p-value: how often a difference centred on zero is at least as large as the observed difference.

    `sacrebleu` counts only larger differences, which gives 0.001 for two identical systems. Here they get 1.
    """
    # equal differences must stay equal after rounding
    at_least = np.abs(differences - observed) >= abs(observed) - 1e-9
    return float((at_least.sum() + 1) / (len(differences) + 1))
