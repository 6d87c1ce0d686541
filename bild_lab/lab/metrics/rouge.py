"""ROUGE f-measures of each example, equal to those of `rouge_score` with its stemmer, but much faster.

`rouge_score` fills a table of Python integers for each pair. Here the rows of the table of longest common
subsequences are bit vectors (Hyyro 2004), and each word is stemmed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Float

NAMES = ("rougeL", "rouge1", "rouge2", "rougeLsum")  # the headline first

Tokens = tuple[str, ...]


def rouge_statistics(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[Float[np.ndarray, "n 4"], str]:
    """F-measures, 0 to 100, in the order of `NAMES`, and a signature.

    With several references each f-measure is the best one. ROUGE-Lsum counts each line of a text as a sentence,
    ROUGE-L the whole text as one.
    """
    from importlib.metadata import version

    scores = np.array(
        [
            np.max([_f_measures(reference, prediction) for reference in several], axis=0)
            for prediction, several in zip(predictions, references, strict=True)
        ]
    )
    return 100.0 * scores, f"stemmer:yes|lsum:newline|version:rouge_score.{version('rouge_score')}"


def _f_measures(reference: str, prediction: str) -> list[float]:
    target, output = _tokenize(reference), _tokenize(prediction)
    longest = common_subsequence_length(target, output)
    rouge_l = _f_measure(longest, len(target), len(output))
    rouge_lsum = _summary_f_measure(reference, prediction) if "\n" in reference or "\n" in prediction else rouge_l
    return [rouge_l, _ngram_f_measure(target, output, 1), _ngram_f_measure(target, output, 2), rouge_lsum]


def _f_measure(hits: int, target_size: int, output_size: int) -> float:
    if not hits:
        return 0.0
    precision, recall = hits / output_size, hits / target_size
    return 2 * precision * recall / (precision + recall)


def _ngram_f_measure(target: Tokens, output: Tokens, order: int) -> float:
    ngrams = [Counter(zip(*(tokens[start:] for start in range(order)), strict=False)) for tokens in (target, output)]
    hits = (ngrams[0] & ngrams[1]).total()
    return _f_measure(hits, ngrams[0].total(), ngrams[1].total())


def _summary_f_measure(reference: str, prediction: str) -> float:
    """ROUGE-Lsum: for each reference line, the union of its common subsequences with the predicted lines."""
    targets = [_tokenize(line) for line in reference.split("\n") if line]
    outputs = [_tokenize(line) for line in prediction.split("\n") if line]
    left_in_targets = Counter(token for tokens in targets for token in tokens)
    left_in_outputs = Counter(token for tokens in outputs for token in tokens)
    target_size, output_size = left_in_targets.total(), left_in_outputs.total()
    hits = 0
    for target in targets:
        union = set().union(*(common_subsequence(target, output) for output in outputs))
        for index in sorted(union):
            token = target[index]
            # a token counts at most as often as it occurs in each text
            if left_in_outputs[token] > 0 and left_in_targets[token] > 0:
                hits += 1
                left_in_outputs[token] -= 1
                left_in_targets[token] -= 1
    return _f_measure(hits, target_size, output_size)


def common_subsequence_length(target: Tokens, output: Tokens) -> int:
    """Length of the longest common subsequence."""
    return _table(target, output)[-1].bit_count()


def common_subsequence(target: Tokens, output: Tokens) -> list[int]:
    """Indices into `target` of the longest common subsequence that `rouge_score` finds."""
    rows = _table(target, output)
    i, j, indices = len(target), len(output), []
    while i > 0 and j > 0:
        if target[i - 1] == output[j - 1]:
            i, j = i - 1, j - 1
            indices.append(i)
            continue
        before = (1 << (j - 1)) - 1
        left = (rows[i] & before).bit_count()  # table[i][j - 1]
        above = (rows[i - 1] & (before << 1 | 1)).bit_count()  # table[i - 1][j]
        i, j = (i, j - 1) if left > above else (i - 1, j)
    return indices


def _table(target: Tokens, output: Tokens) -> list[int]:
    """Rows 0 to len(target) of the table: bit j of row i is set where table[i][j + 1] > table[i][j]."""
    positions: dict[str, int] = {}
    for index, token in enumerate(output):
        positions[token] = positions.get(token, 0) | 1 << index
    row, rows = 0, [0]
    for token in target:
        reachable = row | positions.get(token, 0)
        # in each run between set bits, keep the lowest reachable position
        row = reachable & ~(reachable - (row << 1 | 1))
        rows.append(row)
    return rows


@lru_cache(maxsize=8192)
def _tokenize(text: str) -> Tokens:
    from rouge_score.tokenize import tokenize

    return tuple(tokenize(text, _stemmer()))


class _CachedStemmer:
    """Porter's stemmer, called once for each word: a call takes 20 microseconds."""

    def __init__(self) -> None:
        from nltk.stem.porter import PorterStemmer

        self.stem = lru_cache(maxsize=100_000)(PorterStemmer().stem)


@lru_cache(maxsize=1)
def _stemmer() -> _CachedStemmer:
    return _CachedStemmer()
