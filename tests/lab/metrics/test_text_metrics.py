"""Metrics of texts against sacrebleu and rouge_score themselves, and answers that must equal a text
or a number.
"""

from __future__ import annotations

import random
from importlib.metadata import version

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF, TER

from bild_lab.errors import UserError
from bild_lab.lab.metrics.bootstrap import mean_metric
from bild_lab.lab.metrics.quality import score
from bild_lab.lab.metrics.sentence_data import english_splitter
from bild_lab.lab.metrics.text_metrics import METRICS, ROUGE, Metric, equals, metric_named
from bild_lab.lab.metrics.writing import Writing, sentence_lines, splitter_name

WORDS = "a the cat dog sat ran on under mat tree quickly .".split()
LINES = "the cats cat running runs quickly on under mats 42 x-ray naïve .".split()
KINDS = {"bleu": BLEU, "chrf": CHRF, "ter": TER}
FEW = [
    "",
    "x",
    "cat",
    "the cat sat",
    "the cat sat home",
    "the dog ran home now",
    "mat of lions eating fish",
]
FEW = [
    *FEW,
    "lions eat fish with salt",
    "the cat sat on the mat",
    "there the cat sat on the mat again",
]


def corpus(count: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """Random references and predictions that share most of their words."""
    generator = random.Random(seed)
    references = [
        [" ".join(generator.choices(WORDS, k=generator.randint(4, 12)))] for _ in range(count)
    ]
    predictions = [
        " ".join(
            word if generator.random() < 0.8 else generator.choice(WORDS)
            for word in several[0].split()
        )
        for several in references
    ]
    return predictions, references


def sacrebleus(metric: str, predictions: list[str], references: list[list[str]]) -> float:
    """The library's own value, of first references."""
    value = (
        KINDS[metric]().corpus_score(predictions, [[several[0] for several in references]]).score
    )
    return 100 - value if metric == "ter" else value


@pytest.mark.parametrize("metric", KINDS)
def test_the_value_is_that_of_sacrebleu_for_all_texts_and_for_resamples(metric: str) -> None:
    predictions, references = corpus(40, seed=3)
    quality = score(metric, predictions, references)
    assert quality.metric == {"bleu": "BLEU", "chrf": "chrF", "ter": "100-TER"}[metric]
    assert 5 < quality.value == pytest.approx(sacrebleus(metric, predictions, references))
    measure = METRICS[metric].of(predictions, references)
    for picks in ([3], [5, 5, 7], list(np.random.default_rng(0).integers(40, size=40))):
        drawn = [predictions[at] for at in picks], [references[at] for at in picks]
        assert measure.value(picks) == pytest.approx(sacrebleus(metric, *drawn))
    assert score(
        metric, ["the cat sat on the mat"], [["the cat sat on the mat"]]
    ).value == pytest.approx(100)


def test_the_interval_is_that_of_sacrebleus_own_bootstrap() -> None:
    predictions, references = corpus(80, seed=1)
    metric = BLEU()
    expected = metric.corpus_score(
        predictions, [[several[0] for several in references]], n_bootstrap=1000
    )
    quality = score("bleu", predictions, references, seed=12345)  # sacrebleu's default seed
    # sacrebleu sums in float32
    assert (quality.high - quality.low) / 2 == pytest.approx(expected._ci, abs=1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("prediction", FEW)
def test_predictions_with_few_or_no_matches_score_as_in_sacrebleu(prediction: str) -> None:
    reference = [["the cat sat on the mat"]]
    assert score("bleu", [prediction], reference).value == pytest.approx(
        sacrebleus("bleu", [prediction], reference)
    )


def random_text(generator: random.Random, lines: int) -> str:
    return "\n".join(
        " ".join(generator.choices(LINES, k=generator.randint(0, 9))) for _ in range(lines)
    )


@pytest.mark.parametrize(("lines", "others"), [(1, 1), (4, 4), (1, 4), (4, 1)])
def test_every_rouge_is_the_mean_of_rouge_scores_f_measures(lines: int, others: int) -> None:
    generator = random.Random(lines)
    predictions = [random_text(generator, lines) for _ in range(30)]
    references = [[random_text(generator, others)] for _ in range(30)]
    scorer, english = RougeScorer(list(ROUGE), use_stemmer=True), Writing(language="en")
    several = (
        [sentence_lines(text) for text in texts]
        for texts in ([one for (one,) in references], predictions)
    )
    scores = [scorer.score(*pair) for pair in zip(*several, strict=True)]
    lcs = (score(name, predictions, references, writing=english) for name in ("rouge", "rougeL"))
    assert next(lcs) == next(lcs)
    for name in ROUGE:
        found = score(name, predictions, references, writing=english)
        expected = pytest.approx(100 * np.mean([one[name].fmeasure for one in scores]))
        assert (found.metric, found.value) == (f"ROUGE-{name[5:]}", expected)


def test_rouge_lsum_compares_the_sentences_of_a_summary_whether_or_not_it_has_lines() -> None:
    """As run_summarization.py: highlights have lines, a model's summary has none.

    Dr. and J. end no sentence.
    """
    reference = "Dr. Smith met the dog of the house at home .\nIt was late ."
    prediction = "At home it was late. Dr. Smith met the dog of the house."
    lines = "At home it was late.\nDr. Smith met the dog of the house."
    assert sentence_lines(prediction) == lines == sentence_lines(lines)
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    whole, split = (
        scorer.score(reference, one)["rougeLsum"].fmeasure for one in (prediction, lines)
    )
    assert whole < 0.9 and split == 1.0
    quality = score("rougeLsum", [prediction], [[reference]])
    assert (
        quality.value == pytest.approx(100)
        and score("rougeL", [prediction], [[reference]]).value < 90
    )
    assert f"sentences:{splitter_name()}" in quality.signature
    # whose versions split sentences in several ways
    assert f"|nltk:{version('nltk')}|" in quality.signature


def test_the_short_list_splits_nearly_as_nltks_data_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where NLTK's data is not installed, that is looked for first all the same."""
    asked = []

    def missing(language: str) -> None:
        asked.append(language)
        raise LookupError(language)

    english_splitter.cache_clear()
    monkeypatch.setattr("nltk.tokenize.punkt.PunktTokenizer", missing)
    text = (
        "Mr. Brown of the U.S. team met Prof. Li, e.g. at 5 p.m. on Feb. 3. They won! Did they?"
        " Yes."
    )
    assert sentence_lines(text).splitlines()[1:] == ["They won!", "Did they?", "Yes."]
    assert asked == ["english"] and splitter_name() == "punkt_abbreviations"
    monkeypatch.undo()
    english_splitter.cache_clear()


def test_an_exact_answer_may_differ_in_white_space_only() -> None:
    assert [equals(answer, ["x", "a b"]) for answer in (" a\nb ", "A b", "a b.")] == [
        True,
        False,
        False,
    ]
    assert equals("cafe\u0301", ["caf\u00e9"])  # written as two characters and as one
    shown = {
        name: score(name, ["7"], [["7"]]).metric for name in ("exact_match", "numeric", "agreement")
    }
    assert shown == {
        "exact_match": "exact match",
        "numeric": "numeric match",
        "agreement": "agreement",
    }


def test_a_metric_of_which_less_is_better_is_turned_round_with_its_values() -> None:
    metric = Metric(
        "errors", lambda shown, *_: mean_metric(shown, [10.0, 30.0]), higher_is_better=False
    )
    found = metric.of(["a", "b"], [["a"], ["b"]])
    assert (found.metric, found.value(), found.per_example) == ("100-errors", 80.0, (90.0, 70.0))


@pytest.mark.parametrize("name", ["meteor", "evaluate:", ""])
def test_an_unknown_metric_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UserError, match=rf"bleu, chrf, .*, MODULE.FUNCTION, got '{name}'"):
        metric_named(name)
