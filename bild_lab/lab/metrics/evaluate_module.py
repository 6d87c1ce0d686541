"""Any metric of Hugging Face's `evaluate`, on our scale: 0 to 100, more is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from bild_lab.errors import UserError
from bild_lab.lab.metrics.measures import Corpora, Mean

PREFIX = "evaluate:"
LOOKED_AT = 8  # examples that show a metric's scale, and whether it is a mean
NONSENSE = "x"
LISTS = ("list", "List", "LargeList", "Sequence")  # features that hold several references


def evaluate_measure(asked: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Mean | Corpora:
    """A metric `evaluate:NAME_OR_PATH` or `evaluate:NAME_OR_PATH@KEY`, where the key names one of several results.

    Its scale and direction are what it says of the references themselves and of nonsense: where both are at most 1,
    values are multiplied by 100; where the references get less, as with error rates, the value is 100 minus it. A
    metric whose value is the mean over single examples is resampled as such; any other is computed for every resample.
    Raises UserError for a metric that cannot be loaded, that fails, or that does not tell references from nonsense.
    """
    place, _, key = asked.removeprefix(PREFIX).partition("@")
    module = _module(place)
    outputs = [text.strip() for text in predictions]
    expected = _references(asked, module, references)
    raw = partial(_value, asked, module, key)
    name, scaled = _scale(asked, key or module.name, raw, references, expected)

    def compute(picks: Sequence[int]) -> float:
        return scaled(raw([outputs[at] for at in picks], [expected[at] for at in picks]))

    signature = f"evaluate:{module.name}|script:{module._hash[:12]}" if getattr(module, "_hash", None) else None
    if (values := _means(compute, len(outputs))) is not None:
        return Mean(name, values, signature)
    return Corpora(name, len(outputs), compute, signature)


def require_loadable(asked: str) -> None:
    """Raise UserError, before anything is decoded, for a metric that cannot be loaded or compares no texts."""
    _references(asked, _module(asked.removeprefix(PREFIX).partition("@")[0]), [])


def script_of(asked: str) -> Path | None:
    """The script of a metric in a local folder; None for one of the hub."""
    path = Path(asked.removeprefix(PREFIX).partition("@")[0]).expanduser()
    return next((one for one in (path, path / f"{path.name}.py") if one.is_file()), None)


@lru_cache(maxsize=4)
def _module(place: str) -> Any:
    """The loaded metric. Raises UserError if there is none of this name."""
    import evaluate  # takes seconds

    script = script_of(place)
    try:
        return evaluate.load(str(script or place), keep_in_memory=True)
    except Exception as error:  # a script may raise anything
        raise UserError(
            f"the metric {PREFIX}{place} cannot be loaded: {' '.join(str(error).split())}; without the hub give a "
            f"folder NAME with its script NAME.py: {PREFIX}PATH/NAME"
        ) from error


def _references(asked: str, module: Any, references: Sequence[Sequence[str]]) -> list[Any]:
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


def _scale(
    asked: str,
    name: str,
    raw: Callable[[Sequence[str], Sequence[Any]], float],
    references: Sequence[Sequence[str]],
    expected: Sequence[Any],
) -> tuple[str, Callable[[float], float]]:
    """The metric's name as shown, and the function from its own value to ours."""
    few = expected[:LOOKED_AT]
    best, worst = raw([several[0] for several in references[:LOOKED_AT]], few), raw([NONSENSE] * len(few), few)
    if best == worst:
        raise UserError(f"{asked} gives the references themselves {best:g}, and {NONSENSE!r} too: it judges no texts")
    factor = 100.0 if max(abs(best), abs(worst)) <= 1.0 + 1e-6 else 1.0
    if best > worst:
        return name, lambda value: factor * value
    return f"100-{name}", lambda value: 100.0 - factor * value


def _means(compute: Callable[[Sequence[int]], float], count: int) -> list[float] | None:
    """The value of each example, if their mean is the value of all, and of some resamples; else None."""
    for size in (min(LOOKED_AT, count), count):
        try:
            values = np.array([compute([at]) for at in range(size)])
        except UserError:  # some metrics have no value for a single text
            return None
        generator = np.random.default_rng(0)
        for picks in (np.arange(size), *generator.integers(size, size=(LOOKED_AT, size))):
            if not np.isclose(values[picks].mean(), compute(picks.tolist()), rtol=1e-6, atol=1e-6):
                return None
    return values.tolist()
