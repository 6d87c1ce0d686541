"""Formats numbers, knobs and points in the same way for the terminal, the figures and the HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

TIMES = "\u00d7"
MINUS = "\u2212"
MISSING = "\u2013"
INFINITY = "\u221e"


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with a fixed count of decimals, and a missing number as a dash."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return INFINITY if value > 0 else MINUS + INFINITY
    rounded = f"{abs(value):,.{digits}f}"
    return MINUS + rounded if value < 0 and float(rounded.replace(",", "")) != 0 else rounded


def signed(value: float | None, digits: int = 2) -> str:
    """Write a difference with its sign, even if it is positive."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 else text


def times(value: float | None) -> str:
    """Write a speedup: `1.53` and the multiplication sign."""
    return number(value) + TIMES if value is not None else MISSING


def interval(
    low: float | None, high: float | None, digits: int = 2, write: Callable[..., str] = number
) -> str:
    """Write an interval as `[1.48, 1.58]`, of a difference with `signed` as `[-0.30, +0.70]`;
    nothing without one.
    """
    return (
        f"[{write(low, digits)}, {write(high, digits)}]"
        if low is not None and high is not None
        else ""
    )


def percent(share: float | None, digits: int = 0) -> str:
    """Write a share between 0 and 1 as a percentage."""
    return f"{number(share * 100, digits)} %" if share is not None else MISSING


def duration(seconds: float | None) -> str:
    """Write a duration in the unit that reads best: ms, s, min or h."""
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{number(seconds * 1000, 1)} ms"
    if seconds < 120:
        return f"{number(seconds, 1)} s"
    return f"{number(seconds / 60, 1)} min" if seconds < 7200 else f"{number(seconds / 3600, 1)} h"


def counted(count: int, what: str) -> str:
    """Write a count of things, such as `1 point` and `12 points`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def short_name(name: str, limit: int = 28) -> str:
    """Write the name of a model or dataset without folders or owner; a folder `checkpoint` has the
    name above it.
    """
    *folders, base_name = str(name).rstrip("/").split("/")
    base_name = folders[-1] if base_name == "checkpoint" and folders else base_name
    return base_name if len(base_name) <= limit else f"{base_name[: limit - 1]}\u2026"


def knob_value(value: object) -> str:
    """Write a knob's value: `on`/`off`, the infinity sign, numbers without trailing zeros."""
    if value in ("inf", ".inf", "Infinity"):  # JSON has no infinity
        return INFINITY
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, float):
        return number(value) if math.isinf(value) else f"{value:g}"
    return str(value)


def knob_label(result: Any, knobs: Sequence[str], separator: str = ", ") -> str:
    """Write the named knobs of a result: `fallback 0.5, rollback 1`. Knobs it lacks are left out.

    result: anything with a policy and its knobs, such as a result or a failure. A peer with weights
    of its own is no faster way to decode the target's, so their precision is always named.
    """
    words = [f"{knob} {knob_value(result.knobs[knob])}" for knob in knobs if knob in result.knobs]
    weight_precision = getattr(result, "own_weights", None)  # points and failures have none
    return separator.join(
        words if weight_precision is None else [*words, f"weights in {weight_precision}"]
    )


def point_label(result: Any, knobs: Sequence[str]) -> str:
    """Write a result's policy with the named knobs: `bild (fallback 0.5, rollback 1)`."""
    label = knob_label(result, knobs)
    return f"{result.policy} ({label})" if label else result.policy
