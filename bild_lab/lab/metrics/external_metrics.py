"""Metrics from elsewhere: functions of the user's own, and those of Hugging Face's `evaluate`."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from bild_lab.errors import UserError, cause_in_words, one_line, warn_once
from bild_lab.lab.metrics.bootstrap import MetricSums, mean_metric
from bild_lab.lab.metrics.writing import BY_SCRIPT, ENGLISH, SPACED, References, Writing

EVALUATE = "evaluate:"  # before the name or path of a metric of `evaluate`
# examples that show the scale of a metric of `evaluate`, and whether it is a mean
TRIED_EXAMPLES = 8
NONSENSE = "x"  # a text that is right nowhere
LISTS = ("list", "List", "LargeList", "Sequence")  # features that hold several references
# metrics of `evaluate` whose own tokenizer takes English letters
ENGLISH_ONLY = ("rouge", "meteor")
# metrics of `evaluate` whose own tokenizer takes words between spaces
SPACED_ONLY = ("bleu", "google_bleu", "sacrebleu", "nist_mt", "ter", "wer")


def user_function(path: str, noun: str = "metric") -> Callable[..., Any]:
    """The user's function `MODULE.FUNCTION`: as a metric, of a text and its references, a number, or
    true or false.

    noun: what it is, for messages. Raises UserError if it cannot be imported, and for Python's own:
    a configuration must not run commands.
    """
    try:
        if path.partition(".")[0] in sys.stdlib_module_names:
            raise UserError("it belongs to Python itself")
        if not callable(function := pkgutil.resolve_name(path)):
            raise UserError(f"it is a {type(function).__name__}")
    except Exception as error:  # a module may raise anything
        remedy = "give MODULE.FUNCTION of your own; PYTHONPATH=DIR says where its module lies"
        raise UserError(f"the {noun} {path} cannot be used ({error}): {remedy}") from error
    return function


def mean_of_function(
    function: Callable[[str, Sequence[str]], float],
    scale: int | None,
    shown: str,
    texts: Sequence[str],
    references: References,
    writing: Writing,
) -> MetricSums:
    """The mean of a user's function over texts, on a scale of 100.

    It gets texts without white space around them, as metrics of `evaluate` do. scale: the scale of
    its numbers; None: its author did not say, so 100.

    Raises UserError where it fails, or gives no number of its scale.
    """
    values, numbers = [], []
    for text, text_references in zip(texts, references, strict=True):
        try:
            value = function(text.strip(), text_references)
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"the metric {shown} fails for {text!r:.60}: {cause_in_words(error)}; correct the"
                " function"
            ) from error
        if isinstance(value, bool | np.bool_):
            values.append(100.0 * value)
            continue
        is_number = isinstance(value, Real | np.number)
        if not is_number or not 0 <= value <= (scale or 100):
            remedy = "; correct the function"
            if is_number and not scale and not np.isnan(value):
                remedy = f"; {shown}.scale = 1 says that its numbers are from 0 to 1"
            raise UserError(
                f"the metric {shown} must give a number from 0 to {scale or 100}, got {value!r} for"
                f" {text!r:.60}{remedy}"
            )
        numbers.append(float(value))
        values.append(100.0 * float(value) / (scale or 100))
    if scale is None and any(numbers) and max(numbers) <= 1:
        warn_once(
            f"the metric {shown} gives numbers from 0 to 1, which are taken as shares of 100"
            f" points; if 1 is a perfect text, write {shown}.scale = 1 below the function, else"
            f" {shown}.scale = 100"
        )
    return mean_metric(shown, values)


def evaluate_metric(
    metric: str, predictions: Sequence[str], references: References, writing: Writing = BY_SCRIPT
) -> MetricSums:
    """A metric `evaluate:NAME_OR_PATH` or `evaluate:NAME_OR_PATH@KEY`, where the key names one of
    several results.

    Its scale and direction are what it says of the references themselves and of nonsense: where
    both are at most 1, values are multiplied by 100; where the references get less, as with error
    rates, the value is 100 minus it. A metric whose value is the mean over single examples is
    resampled as such; any other is computed for every resample. Raises UserError for a metric that
    cannot be loaded, that fails, or that does not tell references from nonsense.
    """
    location, _, key = metric.removeprefix(EVALUATE).partition("@")
    module = evaluate_module(location)
    _warn_of_english(metric, module.name, writing.of(references))
    outputs = [text.strip() for text in predictions]
    expected = _expected(metric, module, references)
    raw_value = partial(_value, metric, module, key)
    tried_references = expected[:TRIED_EXAMPLES]
    right_texts = [text_references[0] for text_references in references[:TRIED_EXAMPLES]]
    best = raw_value(right_texts, tried_references)
    worst = raw_value([NONSENSE] * len(tried_references), tried_references)
    shown, scaled = scale_of(metric, key or module.name, best, worst)

    def compute(picks: Sequence[int]) -> float:
        picked_outputs = [outputs[index] for index in picks]
        picked_references = [expected[index] for index in picks]
        return scaled(raw_value(picked_outputs, picked_references))

    def value_of(counts: np.ndarray) -> np.ndarray:
        indices = np.arange(len(outputs))
        return np.apply_along_axis(
            lambda row: compute(np.repeat(indices, row.astype(int)).tolist()), -1, counts
        )

    script_hash = getattr(module, "_hash", None)
    signature = f"evaluate:{module.name}|script:{script_hash[:12]}" if script_hash else None
    if (values := _means(compute, len(outputs))) is not None:
        return mean_metric(shown, values, signature)
    return MetricSums(shown, len(outputs), value_of, None, signature)


def _warn_of_english(metric: str, name: str, writing: Writing) -> None:
    """Warn of a metric of `evaluate` whose tokenizer does not fit the references."""
    english = name in ENGLISH_ONLY and writing.kind != ENGLISH
    if english or (name in SPACED_ONLY and writing.kind not in (ENGLISH, SPACED)):
        what = (
            "drops or stems letters as if they were English"
            if english
            else "takes words between spaces"
        )
        warn_once(
            f"{metric} {what}, and the references are of another kind; choose bleu, rouge or chrf"
            " of our own"
        )


def script_of(name: str) -> Path | None:
    """The script of a metric of `evaluate` in a local folder; None for one of the hub."""
    path = Path(name.removeprefix(EVALUATE).partition("@")[0]).expanduser()
    return next((file for file in (path, path / f"{path.name}.py") if file.is_file()), None)


@lru_cache(maxsize=4)
def evaluate_module(location: str) -> Any:
    """The loaded metric. Raises UserError if there is none of this name."""
    import evaluate  # takes seconds

    try:
        return evaluate.load(str(script_of(location) or location), keep_in_memory=True)
    except Exception as error:  # a script may raise anything
        raise UserError(
            f"the metric {EVALUATE}{location} cannot be loaded: {one_line(error)};"
            f" without the hub give a folder NAME with its script NAME.py: {EVALUATE}PATH/NAME"
        ) from error


def _expected(metric: str, module: Any, references: References) -> list[Any]:
    """The references as the metric takes them: lists of texts, or single texts."""
    features = module.features if isinstance(module.features, list) else [module.features]
    if any(type(feature.get("references")).__name__ in LISTS for feature in features):
        return [list(text_references) for text_references in references]
    if any(len(text_references) != 1 for text_references in references):
        raise UserError(
            f"{metric} takes one reference for each text, got several; choose another metric"
        )
    return [text_references[0] for text_references in references]


def _value(
    metric: str, module: Any, key: str, outputs: Sequence[str], expected: Sequence[Any]
) -> float:
    """The metric's own value. Raises UserError if it fails or gives no number."""
    try:
        results = module.compute(predictions=list(outputs), references=list(expected))
    except Exception as error:  # a script may raise anything
        raise UserError(f"{metric} fails: {cause_in_words(error)}") from error
    numbers = {name: value for name, value in results.items() if _is_number(value)}
    result_key = key or module.name
    if not key and module.name not in numbers and len(numbers) == 1:
        (result_key,) = numbers
    if result_key not in numbers:
        raise UserError(
            f"{metric} gives {', '.join(results)}; choose a number among them:"
            f" {metric.partition('@')[0]}@KEY"
        )
    return float(np.mean(numbers[result_key]))


def _is_number(value: Any) -> bool:
    """A number, or a list of one for each example."""
    if isinstance(value, list) and value:
        return all(_is_number(number) for number in value)
    return isinstance(value, Real | np.number) and not isinstance(value, bool)


def scale_of(
    metric: str, name: str, best: float, worst: float
) -> tuple[str, Callable[[float], float]]:
    """The name as shown, and the function from a metric's own value to ours, by its values of right
    and wrong texts.
    """
    if best == worst:
        raise UserError(
            f"{metric} gives the references themselves {best:g}, and {NONSENSE!r} too: it judges no"
            " texts"
        )
    factor = 100.0 if max(abs(best), abs(worst)) <= 1.0 + 1e-6 else 1.0
    if best > worst:
        return name, lambda value: factor * value
    return f"100-{name}", lambda value: 100.0 - factor * value


def _means(compute: Callable[[Sequence[int]], float], count: int) -> list[float] | None:
    """The value of each example, if their mean is the value of all, and of some resamples; else
    None.
    """
    for size in (min(TRIED_EXAMPLES, count), count):
        try:
            values = np.array([compute([index]) for index in range(size)])
        except UserError:  # some metrics have no value for a single text
            return None
        generator = np.random.default_rng(0)
        for picks in (np.arange(size), *generator.integers(size, size=(TRIED_EXAMPLES, size))):
            if not np.isclose(values[picks].mean(), compute(picks.tolist()), rtol=1e-6, atol=1e-6):
                return None
    return values.tolist()
