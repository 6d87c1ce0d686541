"""The quality of a point's outputs, and how they differ from the baseline's: parts of `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The quality of the outputs, on the metric's scale of 0 to 100, with its 95 % interval over examples.

    metric: as shown, such as "BLEU". value: None if the metric is undefined. signature: how it was computed.
    extra: further scores of the same outputs, such as rouge1. difference: value minus baseline, on the same examples,
    with its 95 % interval. p_value: of the difference, two-sided. The last five are None without a baseline.
    """

    metric: str
    value: float | None
    low: float | None
    high: float | None
    signature: str | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)
    baseline: float | None = None
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """What differs from the baseline's texts, and how likely the target itself finds the texts.

    changed: the share of texts with other tokens. first_difference: how many tokens the changed texts share with the
    baseline's before the first that differs; the median. Both None when sampling, where texts differ anyway.
    length_ratio: tokens emitted, divided by the baseline's. log_probability: the target's, at temperature 1, of the
    emitted tokens, in nats per token; None if it was not asked for. difference: minus that of the baseline's texts.
    Every low and high is a 95 % bootstrap interval over examples. What needs a baseline is None without one.
    """

    changed: float | None = None
    first_difference: float | None = None
    length_ratio: float | None = None
    length_ratio_low: float | None = None
    length_ratio_high: float | None = None
    log_probability: float | None = None
    log_probability_low: float | None = None
    log_probability_high: float | None = None
    log_probability_baseline: float | None = None
    log_probability_difference: float | None = None
    log_probability_difference_low: float | None = None
    log_probability_difference_high: float | None = None
