"""A metric of some outputs, ready to be taken over any of their examples: what intervals are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float

from bild_lab.lab.metrics.bootstrap import RESAMPLES, resampled_sums, times_drawn

CORPUS_RESAMPLES = 100  # of a metric that must be computed anew for each of them


class Measure(Protocol):
    """A metric of outputs. metric: its name as shown. signature: how it is computed. extra: further scores."""

    metric: str
    signature: str | None
    extra: Mapping[str, float]

    @property
    def per_example(self) -> tuple[float, ...] | None:
        """Each example's value; None if the metric is not the mean of such values."""

    @property
    def resamples(self) -> int: ...

    def value(self, picks: Sequence[int] | None = None) -> float:
        """Of the examples at these places, of all if None."""

    def resampled(self, seed: int, picks: Sequence[int] | None = None) -> Float[np.ndarray, " resamples"]:
        """Of resamples of these examples. The same seed and number of examples give the same draws."""


@dataclass(frozen=True)
class Sums:
    """Statistics of each example that add up, and the function from their sums to the value."""

    metric: str
    statistics: Float[np.ndarray, "n k"]
    value_of: Callable[[Float[np.ndarray, "*batch k"]], Float[np.ndarray, "*batch"]]
    signature: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    resamples = RESAMPLES
    per_example = None

    def value(self, picks: Sequence[int] | None = None) -> float:
        return float(self.value_of(self._of(picks).sum(axis=0)))

    def resampled(self, seed: int, picks: Sequence[int] | None = None) -> Float[np.ndarray, " resamples"]:
        return self.value_of(resampled_sums(self._of(picks), seed))

    def _of(self, picks: Sequence[int] | None) -> Float[np.ndarray, "n k"]:
        return self.statistics if picks is None else self.statistics[list(picks)]


class Mean(Sums):
    """The mean of a value of each example, such as 100 for a right answer and 0 for a wrong one."""

    def __init__(
        self,
        metric: str,
        values: Sequence[float],
        signature: str | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        counted = np.stack([np.array(values, dtype=float), np.ones(len(values))], axis=1)
        super().__init__(metric, counted, lambda sums: sums[..., 0] / sums[..., 1], signature, extra or {})

    @property
    def per_example(self) -> tuple[float, ...]:
        return tuple(self.statistics[:, 0].tolist())


@dataclass(frozen=True)
class Corpora:
    """A metric that is neither a mean nor made of sums: it is computed anew for every resample.

    compute: its value for the examples at these places, of which some may come several times.
    """

    metric: str
    count: int
    compute: Callable[[Sequence[int]], float]
    signature: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    resamples = CORPUS_RESAMPLES
    per_example = None

    def value(self, picks: Sequence[int] | None = None) -> float:
        return self.compute(range(self.count) if picks is None else picks)

    def resampled(self, seed: int, picks: Sequence[int] | None = None) -> Float[np.ndarray, " resamples"]:
        chosen = np.arange(self.count) if picks is None else np.array(picks)
        drawn = times_drawn(len(chosen), seed)[: self.resamples].astype(int)
        return np.array([self.compute(np.repeat(chosen, times).tolist()) for times in drawn])
