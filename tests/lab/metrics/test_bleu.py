"""BLEU from summed counts against sacrebleu itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from bild_lab.lab.metrics import score
from bild_lab.lab.metrics.bleu import bleu_from_sums, bleu_statistics

WORDS = "a the cat dog sat ran on under mat tree quickly .".split()


def corpus(count: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """Random references and predictions that share most of their words."""
    generator = random.Random(seed)
    references = [[" ".join(generator.choices(WORDS, k=generator.randint(4, 12)))] for _ in range(count)]
    predictions = [
        " ".join(word if generator.random() < 0.8 else generator.choice(WORDS) for word in several[0].split())
        for several in references
    ]
    return predictions, references


@pytest.mark.parametrize("seed", range(5))
def test_the_value_is_that_of_sacrebleu(seed: int) -> None:
    predictions, references = corpus(60, seed)
    expected = BLEU().corpus_score(predictions, [[several[0] for several in references]])
    assert score("bleu", predictions, references).value == pytest.approx(expected.score, rel=1e-14)


def test_the_interval_is_that_of_sacrebleus_own_bootstrap() -> None:
    predictions, references = corpus(80, seed=1)
    metric = BLEU()
    expected = metric.corpus_score(predictions, [[several[0] for several in references]], n_bootstrap=1000)
    quality = score("bleu", predictions, references, seed=12345)  # sacrebleu's default seed
    assert (quality.high - quality.low) / 2 == pytest.approx(expected._ci, abs=1e-4)  # sacrebleu sums in float32


def test_the_signature_is_sacrebleus_with_the_bootstrap() -> None:
    quality = score("bleu", ["a b"], [["a b", "c"]], seed=3)
    assert quality.signature.startswith("nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:2.")
    assert quality.signature.endswith("|bs:1000|seed:3")


def test_every_resample_scores_as_sacrebleu_would_score_it() -> None:
    predictions, references = corpus(12, seed=2)
    statistics, _ = bleu_statistics(predictions, references)
    generator = np.random.default_rng(0)
    for size in (1, 1, 1, 2, 3, 12):  # small ones have orders without a match
        sums = statistics[generator.integers(12, size=size)].sum(axis=0)
        expected = BLEU()._compute_score_from_stats(list(sums)).score
        assert bleu_from_sums(sums) == pytest.approx(expected, rel=1e-12)


def test_several_references_and_sentences_with_fewer_of_them() -> None:
    predictions = ["the cat sat on the mat", "a dog ran"]
    references = [["the cat sat on a mat", "the cat sat on the mat"], ["a dog ran off"]]
    expected = BLEU().corpus_score(predictions, [[references[0][0], references[1][0]], [references[0][1], None]])
    quality = score("bleu", predictions, references)
    assert quality.value == pytest.approx(expected.score, rel=1e-14)
    assert quality.signature.startswith("nrefs:var|")


FEW = ["", "x", "cat", "the cat sat", "the cat sat home", "the dog ran home now", "mat of lions eating fish"]
FEW = [*FEW, "lions eat fish with salt", "the cat sat on the mat", "there the cat sat on the mat again"]


def test_texts_scored_at_once_score_as_each_alone() -> None:
    """As resamples do; a text without a match, or too short for a 4-gram, counts for itself alone."""
    statistics, _ = bleu_statistics(FEW, [["the cat sat on the mat"]] * len(FEW))
    expected = [BLEU()._compute_score_from_stats(list(row)).score for row in statistics]
    assert bleu_from_sums(statistics).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("prediction", FEW)
def test_predictions_with_few_or_no_matches_score_as_in_sacrebleu(prediction: str) -> None:
    expected = BLEU().corpus_score([prediction], [["the cat sat on the mat"]]).score
    assert score("bleu", [prediction], [["the cat sat on the mat"]]).value == pytest.approx(expected, rel=1e-12)


def test_equal_texts_score_one_hundred() -> None:
    quality = score("bleu", ["the cat sat on the mat"] * 3, [["the cat sat on the mat"]] * 3)
    assert (quality.metric, round(quality.value, 9), round(quality.low, 9)) == ("BLEU", 100.0, 100.0)
