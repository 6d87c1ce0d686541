"""All metrics, one row each, computed by sacrebleu, rouge_score and Hugging Face's `evaluate`."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import numpy as np

from bild_lab.errors import UserError, suggestion
from bild_lab.lab.metrics.bootstrap import MetricSums, mean_metric, ratio_metric
from bild_lab.lab.metrics.external_metrics import (
    EVALUATE,
    evaluate_metric,
    mean_of_function,
    user_function,
)
from bild_lab.lab.metrics.numerals import same_number
from bild_lab.lab.metrics.programs import passes
from bild_lab.lab.metrics.writing import (
    ASCII,
    BY_SCRIPT,
    CHAR,
    ENGLISH,
    JA,
    ZH,
    References,
    Writing,
    rouge_tokenizer,
    sacrebleus_tokenizer,
    sentence_lines,
    splitter_name,
)
from bild_lab.lab.schema.numbers import LENGTH_NAME, LOG_PROBABILITY_NAME

AGREEMENT = "agreement"
PASS_AT_1 = "pass_at_1"
LOG_PROBABILITY = "log_probability"
LENGTH = "length"
MOST_NATS = 1.0  # a token, of a margin
ROUGE = ("rougeL", "rouge1", "rouge2", "rougeLsum")

Options = tuple[tuple[str, Any], ...]  # the arguments of a class of sacrebleu, by name


@dataclass(frozen=True)
class Metric:
    """A metric of texts, where more is better, up to 100 unless it is one of tokens.

    shown: what tables call it. measure: its measure of predictions and references, aggregated over
    examples as a mean (`mean_metric`) or from sums of counts. higher_is_better: if not, the value
    is 100 minus the measure's. bounded: whether every text has a value from 0 to 100, of which the
    metric is the mean, or may be taken as one. runs_code: whether it runs programs that a model
    wrote. of_tokens: what it takes in place of a text, a sum and a count, given the number of its
    tokens and the log-probability, in nats, that the target gives them; such a metric has no
    references.
    """

    shown: str
    measure: Callable[[str, Sequence[str], References, Writing], MetricSums]
    higher_is_better: bool = True
    bounded: bool = False
    runs_code: bool = False
    of_tokens: Callable[[int, float | None], tuple[float, float]] | None = None

    def of(
        self, predictions: Sequence[str], references: References, writing: Writing = BY_SCRIPT
    ) -> MetricSums:
        """The metric's sums over these outputs."""
        fitting = writing if self.of_tokens is not None else writing.of(references)
        measured = self.measure(self.shown, predictions, references, fitting)
        measured = replace(measured, bounded=self.bounded)
        if self.higher_is_better:
            return measured
        per_example = measured.per_example and tuple(
            100.0 - value for value in measured.per_example
        )
        turned = {
            "metric": f"100-{measured.metric}",
            "value_of": lambda sums: 100.0 - measured.value_of(sums),
        }
        return replace(measured, per_example=per_example, **turned)


def metric_named(name: str) -> Metric:
    """Raises UserError unless there is such a metric.

    Whether `evaluate` has one is found out when it is loaded.
    """
    if name.startswith(EVALUATE) and name != EVALUATE:
        return Metric(name, evaluate_metric)
    if "." in name:
        return user_metric(name)
    if name not in METRICS:
        raise UserError(
            f"metric must be one of {METRIC_NAMES}, got {name!r}{suggestion(name, METRICS)}"
        )
    return METRICS[name]


def user_metric(path: str) -> Metric:
    """The user's function `MODULE.FUNCTION`, with what its attributes say.

    scale: 1 or 100, the value of a perfect text; 100 if it has none. higher_is_better: True if it
    has none. Raises UserError as `user_function` does, and for other values of these.
    """
    function = user_function(path)
    scale, higher = getattr(function, "scale", None), getattr(function, "higher_is_better", True)
    if scale not in (None, 1, 100) or isinstance(scale, bool):
        raise UserError(f"the metric {path} must have scale = 1 or scale = 100, got {scale!r}")
    if not isinstance(higher, bool):
        raise UserError(
            f"the metric {path} must have higher_is_better = True or False, got {higher!r}"
        )
    measure = partial(mean_of_function, function, scale)
    return Metric(path.rpartition(".")[2], measure, higher_is_better=higher, bounded=True)


def needs_references(name: str) -> bool:
    """Whether a metric compares texts with references of the dataset."""
    return name != AGREEMENT and metric_named(name).of_tokens is None


def bleu(
    shown: str, predictions: Sequence[str], references: References, writing: Writing
) -> MetricSums:
    """Corpus BLEU. Raises UserError for a tokenizer that is not installed."""
    name = writing.bleu
    sacrebleus_tokenizer(name)  # refuses
    return counted_by_sacrebleu(
        "BLEU",
        _name_with_tokenizer(shown, name, "13a"),
        predictions,
        references,
        (("tokenize", name),),
    )


def chrf(
    shown: str, predictions: Sequence[str], references: References, writing: Writing
) -> MetricSums:
    """chrF, of the characters of any language."""
    return counted_by_sacrebleu("CHRF", shown, predictions, references)


def ter(
    shown: str, predictions: Sequence[str], references: References, writing: Writing
) -> MetricSums:
    """TER, whose words are characters in Chinese and Japanese.

    Raises UserError for other languages without spaces.
    """
    if writing.kind == CHAR:
        raise UserError(
            "the metric ter counts words, and sacrebleu finds none in this language, which writes"
            " no spaces; choose dataset.metric=chrf, or bleu, which takes characters"
        )
    asian = writing.kind in (ZH, JA)
    options = (("normalized", True), ("asian_support", True)) if asian else ()
    return counted_by_sacrebleu(
        "TER", f"{shown} (asian)" if asian else shown, predictions, references, options
    )


def counted_by_sacrebleu(
    kind: str, shown: str, predictions: Sequence[str], references: References, options: Options = ()
) -> MetricSums:
    """A corpus metric from the counts of its sentences, as sacrebleu adds them up. kind: its class
    in sacrebleu.
    """
    scorer = _sacrebleu(
        kind, tuple(tuple(text_references) for text_references in references), options
    )
    counts = np.array(scorer._extract_corpus_statistics(predictions, None), dtype=float)

    def value_of(sums: np.ndarray) -> np.ndarray:
        return np.apply_along_axis(
            lambda row: scorer._compute_score_from_stats(row.tolist()).score, -1, sums
        )

    return MetricSums(shown, len(counts), value_of, counts, str(scorer.get_signature()))


@lru_cache(maxsize=4)
def _sacrebleu(kind: str, references: tuple[tuple[str, ...], ...], options: Options) -> Any:
    """The metric with its references counted. Every point of a sweep shares it."""
    from sacrebleu import metrics

    # None for fewer references
    return getattr(metrics, kind)(references=list(zip_longest(*references)), **dict(options))


def _name_with_tokenizer(shown: str, tokenizer: str, usual: str) -> str:
    """A metric's name, with its tokenizer unless that is the usual one."""
    return shown if tokenizer == usual else f"{shown} ({tokenizer})"


def rouge(
    lead: str, shown: str, predictions: Sequence[str], references: References, writing: Writing
) -> MetricSums:
    """The mean f-measure of `rouge_score`, of English with its stemmer; of several references the
    best one counts.

    ROUGE-Lsum compares sentence by sentence, split as Transformers' run_summarization.py splits
    them; the others take the whole text.
    """
    name, english = writing.rouge, writing.kind == ENGLISH
    pairs = zip(predictions, references, strict=True)
    scored = [
        _rouge(prediction, tuple(text_references), name, english)
        for prediction, text_references in pairs
    ]
    stemmer = "yes" if name == ASCII else "no"
    sentences = f"sentences:{splitter_name(english)}"
    # NLTK stems, and from 3.10.2 on ends a sentence behind a closing quotation mark such as ”
    versions = f"version:rouge_score.{version('rouge_score')}|nltk:{version('nltk')}"
    signature = f"tokenizer:{name}|stemmer:{stemmer}|{sentences}|{versions}"
    return mean_metric(
        _name_with_tokenizer(shown, name, ASCII), [scores[lead] for scores in scored], signature
    )


@lru_cache(maxsize=100_000)  # baselines repeat from point to point
def _rouge(
    prediction: str, references: tuple[str, ...], tokenizer: str, english: bool
) -> dict[str, float]:
    split = partial(sentence_lines, english=english)
    scores = _rouge_scorer(tokenizer).score_multi([*map(split, references)], split(prediction))
    return {name: 100.0 * scores[name].fmeasure for name in ROUGE}


@lru_cache(maxsize=4)
def _rouge_scorer(tokenizer: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True, tokenizer=rouge_tokenizer(tokenizer))


def share_of(
    right: Callable[[str, Sequence[str]], bool],
    shown: str,
    texts: Sequence[str],
    references: References,
    writing: Writing,
) -> MetricSums:
    """The share of texts that are right, in percent."""
    return mean_metric(
        shown,
        [
            100.0 * right(text, text_references)
            for text, text_references in zip(texts, references, strict=True)
        ],
    )


def equals(text: str, references: Sequence[str]) -> bool:
    """Whether a text equals a reference, white space aside.

    A letter with its marks may be one character or two.
    """
    return _words(text) in map(_words, references)


def _words(text: str) -> list[str]:
    return unicodedata.normalize("NFC", text).split()


def numeric(
    shown: str, texts: Sequence[str], references: References, writing: Writing
) -> MetricSums:
    """The share of texts whose last number is right.

    A decimal comma is one where the language has it.
    """
    comma = writing.decimal_comma
    measured = share_of(
        partial(same_number, decimal_comma=comma), shown, texts, references, writing
    )
    return replace(measured, signature="decimals:comma") if comma else measured


METRICS = {
    "bleu": Metric("BLEU", bleu),
    # character n-grams of up to six (Popović, 2015)
    "chrf": Metric("chrF", chrf, bounded=True),
    # edits per 100 words of the reference (Snover et al., 2006); 100 minus it is below 0 with more
    # edits than words
    "ter": Metric("TER", ter, higher_is_better=False),
    "rouge": Metric("ROUGE-L", partial(rouge, "rougeL"), bounded=True),
    **{
        name: Metric(f"ROUGE-{name.removeprefix('rouge')}", partial(rouge, name), bounded=True)
        for name in ROUGE
    },
    "exact_match": Metric("exact match", partial(share_of, equals), bounded=True),
    "numeric": Metric("numeric match", numeric, bounded=True),
    PASS_AT_1: Metric(
        "pass@1",
        lambda shown, texts, references, _: mean_metric(shown, passes(texts, references)),
        bounded=True,
        runs_code=True,
    ),
    # per token, over all texts; higher is not better where greedy texts repeat themselves, so read
    # it beside the length
    LOG_PROBABILITY: Metric(
        LOG_PROBABILITY_NAME,
        lambda shown, sums, *_: ratio_metric(shown, sums),
        of_tokens=lambda tokens, nats: (nats, tokens),
    ),
    # tokens of a text; "more" is no quality, and the difference from the baseline's is what to look
    # at
    LENGTH: Metric(
        LENGTH_NAME,
        lambda shown, sums, *_: ratio_metric(shown, sums),
        of_tokens=lambda tokens, _: (tokens, 1.0),
    ),
    AGREEMENT: Metric(
        "agreement",
        partial(share_of, lambda text, text_references: text in text_references),
        bounded=True,
    ),
}
METRIC_NAMES = ", ".join([*METRICS, f"{EVALUATE}NAME_OR_PATH", "MODULE.FUNCTION"])


def require_margin(key: str, margin: float, metric: str) -> None:
    """Raise UserError for a margin of `log_probability` that can only be meant in points: a nat a
    token is 2.7 times the perplexity.

    key: by which the margin was given. metric: the first one, by its name in the configuration.
    """
    if metric == LOG_PROBABILITY and margin >= MOST_NATS:
        raise UserError(
            f"{key}={margin:g} would be {margin:g} nats a token of log_probability, e^{margin:g} times"
            f" the perplexity; give less than {MOST_NATS:g}, such as 0.01, a hundredth of a nat"
        )
