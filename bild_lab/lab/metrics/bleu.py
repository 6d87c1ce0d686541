"""BLEU of a corpus from the n-gram counts of its sentences, as sacrebleu computes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float

ORDERS = 4  # n-grams of one to four tokens


def bleu_statistics(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[Float[np.ndarray, "n 10"], str]:
    """Per-sentence counts, and sacrebleu's signature.

    The columns are prediction length, closest reference length, matches of orders 1 to 4, totals of
    orders 1 to 4. Sentences may have different numbers of references.
    """
    metric = _metric(tuple(tuple(several) for several in references))
    counts = metric._extract_corpus_statistics(predictions, None)
    return np.array(counts, dtype=float), str(metric.get_signature())


@lru_cache(maxsize=4)
def _metric(references: tuple[tuple[str, ...], ...]) -> Any:
    """A `sacrebleu.metrics.BLEU` with its references counted. Every point of a sweep shares it."""
    from sacrebleu.metrics import BLEU

    return BLEU(references=list(zip_longest(*references)))  # None where a sentence has fewer references


def bleu_from_sums(sums: Float[np.ndarray, "*batch 10"]) -> Float[np.ndarray, "*batch"]:
    """Corpus BLEU, 0 to 100, of summed counts: sacrebleu's default, with exponential smoothing."""
    lengths, matches, totals = np.split(sums, [2, 2 + ORDERS], axis=-1)
    unmatched = (matches == 0) & (totals > 0)
    # each order without a match counts half as much as the order before it
    smoothed = np.where(unmatched, 0.5 ** np.cumsum(unmatched, axis=-1), matches)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precisions = np.log(100.0 * smoothed / totals)
        brevity_penalty = np.exp(np.minimum(0.0, 1.0 - lengths[..., 1] / lengths[..., 0]))
        scores = brevity_penalty * np.exp(log_precisions.mean(axis=-1))
    # no match at all, or predictions too short for any 4-gram
    undefined = (matches.sum(axis=-1) == 0) | (totals == 0).any(axis=-1)
    return np.where(undefined, 0.0, scores)
