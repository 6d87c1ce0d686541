"""A metric of some outputs, ready to be taken over any of their examples, and the bootstrap over examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from jaxtyping import Float

RESAMPLES = 1000
CORPUS_RESAMPLES = 100  # of a metric that must be computed anew for each of them


@dataclass(frozen=True)
class Measure:
    """A metric of outputs: statistics of each example that add up, and the function from their sums to the value.

    metric: its name as shown. statistics: None if there are none that add up; then the "sums" are how often each of
    the `count` examples is there. value_of: for one row of sums, or for several. signature: how it is computed. extra:
    further scores. per_example: each example's value; None if the metric is not the mean of such values.
    """

    metric: str
    count: int
    value_of: Callable[[Float[np.ndarray, "*batch k"]], Float[np.ndarray, "*batch"]]
    statistics: Float[np.ndarray, "n k"] | None
    signature: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    per_example: tuple[float, ...] | None = None

    @property
    def resamples(self) -> int:
        return CORPUS_RESAMPLES if self.statistics is None else RESAMPLES

    def value(self, picks: Sequence[int] | None = None) -> float:
        """Of the examples at these places, of all if None."""
        every = np.ones((1, self.count if picks is None else len(picks)))
        return float(self.value_of(self._sums(every, picks)[0]))

    def resampled(self, seed: int, picks: Sequence[int] | None = None) -> Float[np.ndarray, " resamples"]:
        """Of resamples of these examples. The same seed and number of examples give the same draws."""
        drawn = times_drawn(self.count if picks is None else len(picks), seed)
        return self.value_of(self._sums(drawn[: self.resamples], picks))

    def _sums(self, times: Float[np.ndarray, "m n"], picks: Sequence[int] | None) -> Float[np.ndarray, "m k"]:
        """times: how often each of the picked examples counts."""
        chosen = np.arange(self.count) if picks is None else np.array(picks)
        if self.statistics is not None:
            return times @ self.statistics[chosen]
        return np.array([np.bincount(chosen, weights=row, minlength=self.count) for row in times])


def mean_of(
    metric: str, values: Sequence[float], signature: str | None = None, extra: Mapping[str, float] | None = None
) -> Measure:
    """The mean of a value of each example, such as 100 for a right answer and 0 for a wrong one."""
    counted = np.stack([np.array(values, dtype=float), np.ones(len(values))], axis=1)
    each = tuple(counted[:, 0].tolist())
    return Measure(metric, len(each), lambda sums: sums[..., 0] / sums[..., 1], counted, signature, extra or {}, each)


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
