"""chrF and TER from summed counts against sacrebleu itself."""

from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.metrics import CHRF, TER

from bild_lab.lab.metrics import score
from bild_lab.lab.metrics.sacrebleu_counts import sacrebleu_statistics
from tests.lab.metrics.test_bleu import corpus


def test_the_values_are_those_of_sacrebleu() -> None:
    predictions, references = corpus(40, seed=3)
    streams = [[several[0] for several in references]]
    assert score("chrf", predictions, references).value == pytest.approx(
        CHRF().corpus_score(predictions, streams).score
    )
    edits = TER().corpus_score(predictions, streams).score
    assert edits > 5 and score("ter", predictions, references).value == pytest.approx(100 - edits)


def test_more_is_better_for_both_and_the_names_say_what_they_are() -> None:
    for metric, name in (("chrf", "chrF"), ("ter", "100-TER")):
        good, bad = (score(metric, [text], [["the cat sat on the mat"]]) for text in ("the cat sat on a mat", "a dog"))
        assert good.metric == name and 100 > good.value > bad.value
        assert score(metric, ["the cat sat"], [["the cat sat"]]).value == pytest.approx(100)


def test_sentences_may_have_different_numbers_of_references() -> None:
    predictions, references = ["the cat sat", "a dog ran"], [["a cat sat", "the cat sat"], ["a dog ran off"]]
    expected = CHRF().corpus_score(predictions, [["a cat sat", "a dog ran off"], ["the cat sat", None]])
    quality = score("chrf", predictions, references, seed=3)
    assert quality.value == pytest.approx(expected.score)
    assert quality.signature.startswith("nrefs:var|case:mixed|eff:yes|nc:6|nw:0")
    assert quality.signature.endswith("|bs:1000|seed:3")


@pytest.mark.parametrize(("name", "kind"), [("chrF", CHRF), ("100-TER", TER)])
def test_a_resample_is_scored_as_sacrebleu_would_score_it(name: str, kind: type) -> None:
    predictions, references = corpus(12, seed=2)
    statistics, value_of, _ = sacrebleu_statistics(name, predictions, references)
    drawn = np.random.default_rng(0).integers(12, size=(3, 12))
    expected = [
        kind().corpus_score([predictions[at] for at in one], [[references[at][0] for at in one]]).score for one in drawn
    ]
    values = value_of(statistics[drawn].sum(axis=1))
    assert (100 - values if kind is TER else values).tolist() == pytest.approx(expected)
