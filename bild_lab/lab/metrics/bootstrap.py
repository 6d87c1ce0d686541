"""A metric's value over all examples, over some of them, and over bootstrap resamples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

RESAMPLES = 1000
CORPUS_RESAMPLES = 100  # for a metric that must be computed anew for each resample


@dataclass(frozen=True)
class MetricSums:
    """A metric of outputs: statistics of each example that add up, and the function from their sums
    to the value.

    metric: its name as shown. statistics: None if there are none that add up; then the "sums" are
    how often each of the `count` examples is there. value_of: for one row of sums, or for several.
    signature: how it is computed.
    per_example: each example's value; None if the metric is not the mean of such values. bounded:
    whether each of these lies between 0 and 100, whatever the texts.
    """

    metric: str
    count: int
    value_of: Callable[[Float[np.ndarray, "*batch k"]], Float[np.ndarray, "*batch"]]
    statistics: Float[np.ndarray, "n k"] | None
    signature: str | None = None
    per_example: tuple[float, ...] | None = None
    bounded: bool = False

    @property
    def resamples(self) -> int:
        """How many bootstrap resamples the metric gets."""
        return CORPUS_RESAMPLES if self.statistics is None else RESAMPLES

    def value(self, picks: Sequence[int] | None = None) -> float:
        """The metric of the examples at these places; of all examples if None."""
        once_each = np.ones((1, self._count(picks)))
        sums = self._sums(once_each, picks)
        return float(self.value_of(sums[0]))

    def resampled(
        self,
        seed: int,
        picks: Sequence[int] | None = None,
        conversations: Sequence[int] | None = None,
    ) -> Float[np.ndarray, " resamples"]:
        """The metric of each bootstrap resample of these examples.

        The same seed and number of examples give the same draws. conversations: of these examples,
        as in `resample_counts`.
        """
        counts = resample_counts(self._count(picks), seed, conversations)
        return self.weighted(counts[: self.resamples], picks)

    def weighted(
        self, counts: Float[np.ndarray, "m n"], picks: Sequence[int] | None = None
    ) -> Float[np.ndarray, " m"]:
        """The metric of these examples, each as often as a row of `counts` says."""
        return self.value_of(self._sums(counts, picks))

    def _count(self, picks: Sequence[int] | None) -> int:
        return self.count if picks is None else len(picks)

    def _sums(
        self, counts: Float[np.ndarray, "m n"], picks: Sequence[int] | None
    ) -> Float[np.ndarray, "m k"]:
        """The sums that `value_of` takes. counts: how often each of the picked examples counts."""
        indices = np.arange(self.count) if picks is None else np.array(picks)
        if self.statistics is not None:
            return counts @ self.statistics[indices]
        return np.array([np.bincount(indices, weights=row, minlength=self.count) for row in counts])


def mean_metric(metric: str, values: Sequence[float], signature: str | None = None) -> MetricSums:
    """The mean of a value of each example, such as 100 for a right answer and 0 for a wrong one."""
    return ratio_metric(metric, [(value, 1.0) for value in values], signature)


def ratio_metric(
    metric: str, sums: Sequence[tuple[float, float]], signature: str | None = None
) -> MetricSums:
    """A sum over all examples, divided by a count over all of them: nats per token, or tokens per
    text.
    """
    statistics = np.array(sums, dtype=float).reshape(-1, 2)
    values, divisors = statistics[:, 0], statistics[:, 1]
    return MetricSums(
        metric,
        len(statistics),
        value_of=lambda totals: totals[..., 0] / totals[..., 1],
        statistics=statistics,
        signature=signature,
        per_example=tuple(values.tolist()) if (divisors == 1).all() else None,
    )


def resample_counts(
    count: int, seed: int, conversations: Sequence[int] | None = None
) -> Float[np.ndarray, "resamples n"]:
    """How often each resample holds each of n examples. Every system of a sweep shares them.

    The same seed and n give the same resamples, so two systems are compared in pairs. `sacrebleu`
    draws the same resamples; its default seed is 12345.
    conversations: of each example, as `conversations_of` numbers them: a resample holds all turns
    of a conversation equally often, as they are no independent examples. None: each is its own.
    """
    if conversations is None:
        return _drawn_counts(count, seed)
    return _drawn_counts(independent(count, conversations), seed)[:, list(conversations)]


def independent(count: int, conversations: Sequence[int] | None) -> int:
    """How many of so many examples are independent: the conversations, if they are turns of such."""
    return count if conversations is None else max(conversations) + 1


def least_p_value(count: int) -> float:
    """The least one-sided p-value that so many independent examples can have: how often chance alone
    makes all of them better, where each is as likely better as worse. A bootstrap of a few, which
    draws the same ones again and again, has a smaller one. count: in a test of equal systems without
    the examples that are alike, which are neither.
    """
    return 0.5**count


@lru_cache(maxsize=1)
def _drawn_counts(count: int, seed: int) -> Float[np.ndarray, "resamples n"]:
    generator = np.random.default_rng(seed)
    drawn = [
        np.bincount(generator.integers(count, size=count), minlength=count)
        for _ in range(RESAMPLES)
    ]
    return np.array(drawn, dtype=float)


def central_interval(values: Float[np.ndarray, " resamples"]) -> tuple[float, float]:
    """The central 95 %, from the same order statistics as `sacrebleu.significance`."""
    ordered = np.sort(values)
    cut = len(ordered) // 40
    return float(ordered[cut]), float(ordered[-cut - 1])
