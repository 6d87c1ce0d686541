"""chrF and TER of a corpus from the counts of its sentences, as sacrebleu computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from jaxtyping import Float

CHRF, TER = "chrF", "100-TER"


def sacrebleu_statistics(
    metric: str, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[Float[np.ndarray, "n k"], Callable[[np.ndarray], np.ndarray], str]:
    """Counts of each sentence, the function from their sums to the value, and sacrebleu's signature.

    metric: `CHRF`, character n-grams of up to six (Popović, 2015), or `TER`: 100 minus the edits per 100 words of the
    reference (Snover et al., 2006), so that more is better; below 0 if there are more edits than words.
    """
    scorer = _scorer(metric, tuple(tuple(several) for several in references))
    counts = np.array(scorer._extract_corpus_statistics(predictions, None), dtype=float)

    def value_of(sums: np.ndarray) -> np.ndarray:
        scores = np.apply_along_axis(lambda one: scorer._compute_score_from_stats(one.tolist()).score, -1, sums)
        return 100.0 - scores if metric == TER else scores

    return counts, value_of, str(scorer.get_signature())


@lru_cache(maxsize=4)
def _scorer(metric: str, references: tuple[tuple[str, ...], ...]) -> Any:
    """The metric of sacrebleu with its references counted. Every point of a sweep shares it."""
    from sacrebleu import metrics

    kind = {CHRF: metrics.CHRF, TER: metrics.TER}[metric]
    return kind(references=list(zip_longest(*references)))  # None where a sentence has fewer references
