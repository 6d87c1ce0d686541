"""What a method changed in the texts: how many, where, how long they are, and how likely the target finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from bild_lab.lab.metrics.measures import interval, resampled_sums
from bild_lab.lab.schema.numbers import Change
from bild_lab.lab.schema.timed import BASELINE, METHOD, Timed


def change_of(
    timed: Mapping[str, Sequence[Timed]],
    log_probabilities: Mapping[str, Sequence[float]] | None,
    greedy: bool,
    seed: int,
) -> Change:
    """Compare the method's texts with the baseline's, if it was timed.

    log_probabilities: the target's of every text, in nats; None if they were not asked for.
    """
    tokens = {name: [one.token_ids for one in several] for name, several in timed.items()}
    found: dict[str, Any] = {}
    if BASELINE in tokens:
        pairs = list(zip(tokens[METHOD], tokens[BASELINE], strict=True))
        if greedy:
            shared = [_shared(own, base) for own, base in pairs]
            changed = [length for length in shared if length is not None]
            found |= {"changed": len(changed) / len(shared), "first_difference": median(changed) if changed else None}
        lengths = np.array([[len(own), len(base)] for own, base in pairs], dtype=float)
        found |= _estimate("length_ratio", _ratio(lengths.sum(axis=0)), _ratio(resampled_sums(lengths, seed)))
    if log_probabilities is not None:
        found |= _likelihood(tokens, log_probabilities, seed)
    return Change(**found)


def _likelihood(
    tokens: Mapping[str, Sequence[Sequence[int]]], log_probabilities: Mapping[str, Sequence[float]], seed: int
) -> dict[str, float]:
    means, resampled = {}, {}
    for name, texts in tokens.items():
        sums = np.array([[value, len(text)] for value, text in zip(log_probabilities[name], texts, strict=True)])
        means[name], resampled[name] = _ratio(sums.sum(axis=0)), _ratio(resampled_sums(sums, seed))
    found = _estimate("log_probability", means[METHOD], resampled[METHOD])
    if BASELINE in means:
        difference, differences = (each[METHOD] - each[BASELINE] for each in (means, resampled))
        found |= {"log_probability_baseline": float(means[BASELINE])}
        found |= _estimate("log_probability_difference", difference, differences)
    return found


def _shared(own: Sequence[int], base: Sequence[int]) -> int | None:
    """How many tokens two texts share before the first that differs; None for equal texts."""
    if list(own) == list(base):
        return None
    pairs = enumerate(zip(own, base, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(own), len(base)))


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def _estimate(name: str, value: float, resampled: np.ndarray) -> dict[str, float]:
    low, high = interval(resampled)
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}
