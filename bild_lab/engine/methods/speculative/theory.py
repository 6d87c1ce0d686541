"""Predicted gain of speculative decoding: the closed forms of Leviathan et al. (2023), section 3.

A cheaper model drafts the target's tokens, `window` (γ) at a time. Each is accepted with
probability `acceptance_rate` (α), independently of the others. `cost_ratio` (c) is the cost of one
drafter step divided by that of one target step: in seconds for walltime, in operations for
operations. Every function raises UserError for values out of range.
"""

from __future__ import annotations

import math

from bild_lab.errors import require_finite, require_number, require_whole


def expected_tokens(acceptance_rate: float, window: float) -> float:
    """Tokens per target call, including the target's own: (1 − α^(γ+1)) / (1 − α) (Eq. 1).

    The window γ may be fractional, such as the mean window of an adaptive drafter.
    """
    _require_rate(acceptance_rate)
    require_finite("the draft window", window, 0, remedy="0 drafts nothing")
    if acceptance_rate == 0:
        return 1.0
    if acceptance_rate == 1:
        return window + 1.0
    # expm1 keeps the precision that 1 − α^(γ+1) loses near α = 1
    return -math.expm1((window + 1) * math.log(acceptance_rate)) / (1 - acceptance_rate)


def walltime_improvement(acceptance_rate: float, window: float, cost_ratio: float) -> float:
    """Speedup over the target alone: (1 − α^(γ+1)) / ((1 − α)(γc + 1)) (Theorem 3.8).

    cost_ratio: seconds of one drafter step divided by seconds of one target step. Assumes that the
    target verifies a whole window in the time of one token.
    """
    _require_ratio(cost_ratio)
    return expected_tokens(acceptance_rate, window) / (window * cost_ratio + 1)


def operations_increase(acceptance_rate: float, window: float, cost_ratio: float) -> float:
    """Operations divided by those of the target alone: (1 − α)(γĉ + γ + 1) / (1 − α^(γ+1)) (Theorem
    3.11).

    cost_ratio: ĉ, operations of one drafter step divided by those of one target step.
    """
    _require_ratio(cost_ratio)
    return (window * cost_ratio + window + 1) / expected_tokens(acceptance_rate, window)


def optimal_window(acceptance_rate: float, cost_ratio: float, max_window: int = 100) -> int:
    """The integer window of at most `max_window` tokens with the largest walltime improvement (§3.5).

    0 if drafting does not pay, that is, if α <= c (Corollary 3.9).
    """
    _require_rate(acceptance_rate)
    _require_ratio(cost_ratio)
    require_whole("the largest window", max_window, 0)
    if acceptance_rate <= cost_ratio:
        return 0
    window, best = 0, 1.0
    # a concave numerator over a linear denominator: once the gain falls, it never rises again
    while (
        window < max_window
        and (gain := walltime_improvement(acceptance_rate, window + 1, cost_ratio)) > best
    ):
        window, best = window + 1, gain
    return window


def oracle_improvement(acceptance_rate: float, cost_ratio: float) -> float:
    """The walltime improvement if each draft ended just before its first rejection: 1 / (1 − α +
    cα) (§3.5).

    Such drafts give 1 / (1 − α) tokens per target call and take α / (1 − α) drafter steps. Up to a
    cost ratio of 1 no choice of windows is better, beyond it not to draft is; at cost ratio 0 it is
    the limit for infinite windows (§3.6).
    """
    _require_rate(acceptance_rate)
    _require_ratio(cost_ratio)
    cost = 1 - acceptance_rate + cost_ratio * acceptance_rate
    return 1 / cost if cost > 0 else math.inf


def _require_rate(acceptance_rate: float) -> None:
    require_number(
        "an acceptance rate",
        acceptance_rate,
        0,
        1,
        remedy="give accepted / (accepted + rejections)",
    )


def _require_ratio(cost_ratio: float) -> None:
    require_finite(
        "a cost ratio", cost_ratio, 0, remedy="give a drafter step's cost over a target step's"
    )
