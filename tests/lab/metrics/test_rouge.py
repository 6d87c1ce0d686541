"""ROUGE against rouge_score, its longest common subsequences against a literal table."""

from __future__ import annotations

import random

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer, lcs_ind

from bild_lab.lab.metrics import score
from bild_lab.lab.metrics.rouge import NAMES, common_subsequence, common_subsequence_length, rouge_statistics

WORDS = "the cats cat running runs quickly on under mats 42 x-ray naïve .".split()
SCORER = RougeScorer(list(NAMES), use_stemmer=True)


def random_text(generator: random.Random, lines: int) -> str:
    return "\n".join(" ".join(generator.choices(WORDS, k=generator.randint(0, 9))) for _ in range(lines))


@pytest.mark.parametrize(("lines", "others", "count"), [(1, 1, 150), (4, 4, 150), (1, 4, 30), (4, 1, 30)])
def test_every_f_measure_is_that_of_rouge_score(lines: int, others: int, count: int) -> None:
    generator = random.Random(lines)
    predictions = [random_text(generator, lines) for _ in range(count)]
    references = [[random_text(generator, others)] for _ in range(count)]
    expected = [
        [100 * SCORER.score(several[0], prediction)[name].fmeasure for name in NAMES]
        for prediction, several in zip(predictions, references, strict=True)
    ]
    np.testing.assert_allclose(rouge_statistics(predictions, references)[0], expected, rtol=1e-12)


def test_the_headline_is_rouge_l_and_lsum_stands_apart() -> None:
    quality = score("rouge", ["x y\na b"], [["a b\nx y"]])
    assert (quality.metric, quality.value) == ("ROUGE-L", 50.0)  # as one text, the lines are out of order
    assert quality.extra == {"rouge1": 100.0, "rouge2": pytest.approx(200 / 3), "rougeLsum": 100.0}
    assert "stemmer:yes" in quality.signature


def test_words_are_stemmed() -> None:
    assert score("rouge", ["running cats"], [["run cat"]]).value == 100.0


def test_the_best_of_several_references_counts() -> None:
    assert score("rouge", ["a b"], [["c d", "a b"]]).value == 100.0


def test_an_empty_prediction_scores_nothing() -> None:
    quality = score("rouge", ["", "a"], [["a b"], ["a"]])
    assert quality.value == 50.0 and quality.extra["rougeLsum"] == 50.0


def test_common_subsequences_are_those_of_the_literal_table() -> None:
    generator = random.Random(0)
    for _ in range(300):
        target, output = (tuple(generator.choices("abcd", k=generator.randint(0, 12))) for _ in range(2))
        expected = lcs_ind(target, output)
        assert sorted(common_subsequence(target, output)) == expected
        assert common_subsequence_length(target, output) == len(expected)
