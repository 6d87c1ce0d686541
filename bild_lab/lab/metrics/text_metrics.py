"""All metrics, one row each, computed by sacrebleu, rouge_score and Hugging Face's `evaluate`."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import zip_longest
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.errors import UserError, suggestion
from bild_lab.lab.metrics.programs import passes
from bild_lab.lab.metrics.sentences import sentence_lines, splitter_name

AGREEMENT, PASS_AT_1, LOG_PROBABILITY, LENGTH = "agreement", "pass_at_1", "log_probability", "length"
EVALUATE = "evaluate:"  # before the name or path of a metric of `evaluate`
ROUGE = ("rougeL", "rouge1", "rouge2", "rougeLsum")
TRIED = 8  # examples that show the scale of a metric of `evaluate`, and whether it is a mean
NONSENSE = "x"
LISTS = ("list", "List", "LargeList", "Sequence")  # features that hold several references

References = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Metric:
    """A metric of texts, where more is better, on a scale of 0 to 100 unless it is one of tokens.

    shown: what tables call it. measure: its measure of predictions and references, aggregated over examples as a mean
    (`mean_of`) or from sums of counts. higher_is_better: if not, the value is 100 minus the measure's. runs_code:
    whether it runs programs that a model wrote. of_tokens: what it takes in place of a text, a sum and a count, given
    the number of its tokens and the log-probability, in nats, that the target gives them; such a metric has no
    references.
    """

    shown: str
    measure: Callable[[str, Sequence[str], References], Measure]
    higher_is_better: bool = True
    runs_code: bool = False
    of_tokens: Callable[[int, float | None], tuple[float, float]] | None = None

    def of(self, predictions: Sequence[str], references: References) -> Measure:
        """Of these outputs."""
        found = self.measure(self.shown, predictions, references)
        if self.higher_is_better:
            return found
        each = found.per_example and tuple(100.0 - value for value in found.per_example)
        turned = {"metric": f"100-{self.shown}", "value_of": lambda sums: 100.0 - found.value_of(sums)}
        return replace(found, per_example=each, **turned)


def metric_named(name: str) -> Metric:
    """Raises UserError unless there is such a metric. Whether `evaluate` has one is found out when it is loaded."""
    if name.startswith(EVALUATE) and name != EVALUATE:
        return Metric(name, evaluated)
    if "." in name:
        return Metric(name.rpartition(".")[2], partial(mean_of_function, own_function(name)))
    if name not in METRICS:
        raise UserError(f"metric must be one of {METRIC_NAMES}, got {name!r}{suggestion(name, METRICS)}")
    return METRICS[name]


def own_function(path: str) -> Callable[[str, Sequence[str]], float]:
    """The user's function `MODULE.FUNCTION`: of a text and its references, 0 to 100, more is better; or true or false.

    Raises UserError if it cannot be imported, and for Python's own: a configuration must not run commands.
    """
    try:
        if path.partition(".")[0] in sys.stdlib_module_names:
            raise UserError("it belongs to Python itself")
        if not callable(found := pkgutil.resolve_name(path)):
            raise UserError(f"it is a {type(found).__name__}")
    except Exception as error:  # a module may raise anything
        remedy = "give MODULE.FUNCTION of your own; PYTHONPATH=DIR says where its module lies"
        raise UserError(f"the metric {path} cannot be used ({error}): {remedy}") from error
    return found


def mean_of_function(
    function: Callable[[str, Sequence[str]], float], shown: str, texts: Sequence[str], references: References
) -> Measure:
    """Of a user's function. Raises UserError where it gives no number from 0 to 100."""
    values = []
    for text, several in zip(texts, references, strict=True):
        value = function(text, several)
        value = 100.0 * value if isinstance(value, bool | np.bool_) else value
        if not isinstance(value, Real | np.number) or not 0 <= value <= 100:
            raise UserError(f"the metric {shown} must give a number from 0 to 100, got {value!r} for {text!r:.60}")
        values.append(float(value))
    return mean_of(shown, values)


def needs_references(name: str) -> bool:
    """Whether a metric compares texts with references of the dataset."""
    return name != AGREEMENT and metric_named(name).of_tokens is None


def counted_by_sacrebleu(kind: str, shown: str, predictions: Sequence[str], references: References) -> Measure:
    """A corpus metric from the counts of its sentences, as sacrebleu adds them up. kind: its class in sacrebleu."""
    scorer = _sacrebleu(kind, tuple(tuple(several) for several in references))
    counts = np.array(scorer._extract_corpus_statistics(predictions, None), dtype=float)

    def value_of(sums: np.ndarray) -> np.ndarray:
        return np.apply_along_axis(lambda one: scorer._compute_score_from_stats(one.tolist()).score, -1, sums)

    return Measure(shown, len(counts), value_of, counts, str(scorer.get_signature()))


@lru_cache(maxsize=4)
def _sacrebleu(kind: str, references: tuple[tuple[str, ...], ...]) -> Any:
    """The metric with its references counted. Every point of a sweep shares it."""
    from sacrebleu import metrics

    return getattr(metrics, kind)(references=list(zip_longest(*references)))  # None for fewer references


def rouge(lead: str, shown: str, predictions: Sequence[str], references: References) -> Measure:
    """The mean f-measure of `rouge_score` with its stemmer; of several references the best one counts.

    ROUGE-Lsum compares sentence by sentence, split as Transformers' run_summarization.py splits them; the others take
    the whole text.
    """
    scored = [_rouge(prediction, tuple(several)) for prediction, several in zip(predictions, references, strict=True)]
    signature = f"stemmer:yes|sentences:{splitter_name()}|version:rouge_score.{version('rouge_score')}"
    return mean_of(shown, [one[lead] for one in scored], signature)


@lru_cache(maxsize=100_000)  # baselines repeat from point to point
def _rouge(prediction: str, references: tuple[str, ...]) -> dict[str, float]:
    scores = _rouge_scorer().score_multi([*map(sentence_lines, references)], sentence_lines(prediction))
    return {name: 100.0 * scores[name].fmeasure for name in ROUGE}


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)


def share_of(
    right: Callable[[str, Sequence[str]], bool], shown: str, texts: Sequence[str], references: References
) -> Measure:
    """The share of texts that are right, in percent."""
    return mean_of(shown, [100.0 * right(text, several) for text, several in zip(texts, references, strict=True)])


def equals(text: str, references: Sequence[str]) -> bool:
    """Whether a text equals a reference, white space aside."""
    return text.split() in [reference.split() for reference in references]


def same_number(text: str, references: Sequence[str]) -> bool:
    """Whether a text's last number is the last one of a reference (Cobbe et al., 2021).

    A text without a number is wrong. Commas between thousands, and zeros after a point, do not count.
    """
    number = last_number(text)
    return number is not None and number in map(last_number, references)


_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none."""
    found = [match[0] for match in _NUMBER.finditer(text) if match[0]]
    return Decimal(found[-1].replace(",", "")) if found else None


METRICS = {
    "bleu": Metric("BLEU", partial(counted_by_sacrebleu, "BLEU")),
    # character n-grams of up to six (Popović, 2015)
    "chrf": Metric("chrF", partial(counted_by_sacrebleu, "CHRF")),
    # edits per 100 words of the reference (Snover et al., 2006); 100 minus it is below 0 with more edits than words
    "ter": Metric("TER", partial(counted_by_sacrebleu, "TER"), higher_is_better=False),
    "rouge": Metric("ROUGE-L", partial(rouge, "rougeL")),
    **{name: Metric(f"ROUGE-{name.removeprefix('rouge')}", partial(rouge, name)) for name in ROUGE},
    "exact_match": Metric("exact match", partial(share_of, equals)),
    "numeric": Metric("numeric match", partial(share_of, same_number)),
    PASS_AT_1: Metric("pass@1", lambda shown, *texts: mean_of(shown, passes(*texts)), runs_code=True),
    # per token, over all texts; higher is not better where greedy texts repeat themselves, so read it beside the length
    LOG_PROBABILITY: Metric(
        "log-probability", lambda shown, sums, _: ratio_of(shown, sums), of_tokens=lambda tokens, nats: (nats, tokens)
    ),
    # tokens of a text; "more" is no quality, and the difference from the baseline's is what to look at
    LENGTH: Metric("length", lambda shown, sums, _: ratio_of(shown, sums), of_tokens=lambda tokens, _: (tokens, 1.0)),
    AGREEMENT: Metric("agreement", partial(share_of, lambda text, several: text in several)),
}
METRIC_NAMES = ", ".join([*METRICS, f"{EVALUATE}NAME_OR_PATH", "MODULE.FUNCTION"])


def evaluated(asked: str, predictions: Sequence[str], references: References) -> Measure:
    """A metric `evaluate:NAME_OR_PATH` or `evaluate:NAME_OR_PATH@KEY`, where the key names one of several results.

    Its scale and direction are what it says of the references themselves and of nonsense: where both are at most 1,
    values are multiplied by 100; where the references get less, as with error rates, the value is 100 minus it. A
    metric whose value is the mean over single examples is resampled as such; any other is computed for every resample.
    Raises UserError for a metric that cannot be loaded, that fails, or that does not tell references from nonsense.
    """
    place, _, key = asked.removeprefix(EVALUATE).partition("@")
    module = _module(place)
    outputs, expected = [text.strip() for text in predictions], _expected(asked, module, references)
    raw = partial(_value, asked, module, key)
    few = expected[:TRIED]
    best, worst = raw([several[0] for several in references[:TRIED]], few), raw([NONSENSE] * len(few), few)
    name, scaled = scale_of(asked, key or module.name, best, worst)

    def compute(picks: Sequence[int]) -> float:
        return scaled(raw([outputs[at] for at in picks], [expected[at] for at in picks]))

    def value_of(times: np.ndarray) -> np.ndarray:
        every = np.arange(len(outputs))
        return np.apply_along_axis(lambda one: compute(np.repeat(every, one.astype(int)).tolist()), -1, times)

    signature = f"evaluate:{module.name}|script:{module._hash[:12]}" if getattr(module, "_hash", None) else None
    if (values := _means(compute, len(outputs))) is not None:
        return mean_of(name, values, signature)
    return Measure(name, len(outputs), value_of, None, signature)


def require_loadable(asked: str) -> None:
    """Raise UserError, before anything is decoded, for a metric that cannot be loaded or compares no texts."""
    _expected(asked, _module(asked.removeprefix(EVALUATE).partition("@")[0]), [])


def script_of(asked: str) -> Path | None:
    """The script of a metric of `evaluate` in a local folder; None for one of the hub."""
    path = Path(asked.removeprefix(EVALUATE).partition("@")[0]).expanduser()
    return next((one for one in (path, path / f"{path.name}.py") if one.is_file()), None)


@lru_cache(maxsize=4)
def _module(place: str) -> Any:
    """The loaded metric. Raises UserError if there is none of this name."""
    import evaluate  # takes seconds

    try:
        return evaluate.load(str(script_of(place) or place), keep_in_memory=True)
    except Exception as error:  # a script may raise anything
        raise UserError(
            f"the metric {EVALUATE}{place} cannot be loaded: {' '.join(str(error).split())}; without the hub give a "
            f"folder NAME with its script NAME.py: {EVALUATE}PATH/NAME"
        ) from error


def _expected(asked: str, module: Any, references: References) -> list[Any]:
    """The references as the metric takes them: lists of texts, or single texts."""
    features = module.features if isinstance(module.features, list) else [module.features]
    if any("references" not in one or "predictions" not in one for one in features):
        raise UserError(f"{asked} compares no predictions with references; choose another metric")
    if any(type(one["references"]).__name__ in LISTS for one in features):
        return [list(one) for one in references]
    if any(len(one) != 1 for one in references):
        raise UserError(f"{asked} takes one reference for each text, got several; choose another metric")
    return [one[0] for one in references]


def _value(asked: str, module: Any, key: str, outputs: Sequence[str], expected: Sequence[Any]) -> float:
    """The metric's own value. Raises UserError if it fails or gives no number."""
    try:
        found = module.compute(predictions=list(outputs), references=list(expected))
    except Exception as error:  # a script may raise anything
        raise UserError(f"{asked} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    numbers = {name: value for name, value in found.items() if _is_number(value)}
    wanted = key or (module.name if module.name in numbers else next(iter(numbers), "") if len(numbers) == 1 else "")
    if wanted not in numbers:
        raise UserError(f"{asked} gives {', '.join(found)}; choose a number among them: {asked.partition('@')[0]}@KEY")
    return float(np.mean(numbers[wanted]))


def _is_number(value: Any) -> bool:
    """A number, or a list of one for each example."""
    if isinstance(value, list) and value:
        return all(_is_number(one) for one in value)
    return isinstance(value, Real | np.number) and not isinstance(value, bool)


def scale_of(asked: str, name: str, best: float, worst: float) -> tuple[str, Callable[[float], float]]:
    """The name as shown, and the function from a metric's own value to ours, by its values of right and wrong texts."""
    if best == worst:
        raise UserError(f"{asked} gives the references themselves {best:g}, and {NONSENSE!r} too: it judges no texts")
    factor = 100.0 if max(abs(best), abs(worst)) <= 1.0 + 1e-6 else 1.0
    if best > worst:
        return name, lambda value: factor * value
    return f"100-{name}", lambda value: 100.0 - factor * value


def _means(compute: Callable[[Sequence[int]], float], count: int) -> list[float] | None:
    """The value of each example, if their mean is the value of all, and of some resamples; else None."""
    for size in (min(TRIED, count), count):
        try:
            values = np.array([compute([at]) for at in range(size)])
        except UserError:  # some metrics have no value for a single text
            return None
        generator = np.random.default_rng(0)
        for picks in (np.arange(size), *generator.integers(size, size=(TRIED, size))):
            if not np.isclose(values[picks].mean(), compute(picks.tolist()), rtol=1e-6, atol=1e-6):
                return None
    return values.tolist()


RESAMPLES = 1000
CORPUS_RESAMPLES = 100  # of a metric that must be computed anew for each of them


@dataclass(frozen=True)
class Measure:
    """A metric of outputs: statistics of each example that add up, and the function from their sums to the value.

    metric: its name as shown. statistics: None if there are none that add up; then the "sums" are how often each of
    the `count` examples is there. value_of: for one row of sums, or for several. signature: how it is computed.
    per_example: each example's value; None if the metric is not the mean of such values.
    """

    metric: str
    count: int
    value_of: Callable[[Float[np.ndarray, "*batch k"]], Float[np.ndarray, "*batch"]]
    statistics: Float[np.ndarray, "n k"] | None
    signature: str | None = None
    per_example: tuple[float, ...] | None = None

    @property
    def resamples(self) -> int:
        return CORPUS_RESAMPLES if self.statistics is None else RESAMPLES

    def value(self, picks: Sequence[int] | None = None) -> float:
        """Of the examples at these places, of all if None."""
        every = np.ones((1, self.count if picks is None else len(picks)))
        return float(self.value_of(self._sums(every, picks)[0]))

    def resampled(self, seed: int, picks: Sequence[int] | None = None) -> Float[np.ndarray, " resamples"]:
        """Of resamples of these examples. The same seed and number of examples give the same draws."""
        drawn = times_drawn(self.count if picks is None else len(picks), seed)
        return self.weighted(drawn[: self.resamples], picks)

    def weighted(self, times: Float[np.ndarray, "m n"], picks: Sequence[int] | None = None) -> Float[np.ndarray, " m"]:
        """Of these examples, each as often as a row of `times` says."""
        return self.value_of(self._sums(times, picks))

    def _sums(self, times: Float[np.ndarray, "m n"], picks: Sequence[int] | None) -> Float[np.ndarray, "m k"]:
        """times: how often each of the picked examples counts."""
        chosen = np.arange(self.count) if picks is None else np.array(picks)
        if self.statistics is not None:
            return times @ self.statistics[chosen]
        return np.array([np.bincount(chosen, weights=row, minlength=self.count) for row in times])


def mean_of(metric: str, values: Sequence[float], signature: str | None = None) -> Measure:
    """The mean of a value of each example, such as 100 for a right answer and 0 for a wrong one."""
    return ratio_of(metric, [(value, 1.0) for value in values], signature)


def ratio_of(metric: str, sums: Sequence[tuple[float, float]], signature: str | None = None) -> Measure:
    """A sum over all examples, divided by a count over all of them: nats per token, or tokens per text."""
    counted = np.array(sums, dtype=float).reshape(-1, 2)
    each = tuple(counted[:, 0].tolist()) if (counted[:, 1] == 1).all() else None
    return Measure(metric, len(counted), lambda totals: totals[..., 0] / totals[..., 1], counted, signature, each)


def resampled_sums(statistics: Float[np.ndarray, "n k"], seed: int) -> Float[np.ndarray, "resamples k"]:
    """Sums of the statistics over resamples of the n examples, drawn with replacement.

    The same seed and n give the same resamples, so two systems are compared in pairs. `sacrebleu` draws the same
    resamples; its default seed is 12345.
    """
    return times_drawn(len(statistics), seed) @ statistics


@lru_cache(maxsize=1)
def times_drawn(count: int, seed: int) -> Float[np.ndarray, "resamples n"]:
    """How often each resample holds each of n examples. Every system of a sweep shares them."""
    generator = np.random.default_rng(seed)
    drawn = [np.bincount(generator.integers(count, size=count), minlength=count) for _ in range(RESAMPLES)]
    return np.array(drawn, dtype=float)


def interval(values: Float[np.ndarray, " resamples"]) -> tuple[float, float]:
    """The central 95 %, from the same order statistics as `sacrebleu.significance`."""
    ordered = np.sort(values)
    cut = len(ordered) // 40
    return float(ordered[cut]), float(ordered[-cut - 1])
