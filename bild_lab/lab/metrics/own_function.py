"""Metrics of the user's own: a function of a text and its references."""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real

import numpy as np

from bild_lab.errors import UserError
from bild_lab.lab.metrics.measures import Measure, mean_of
from bild_lab.lab.metrics.writing import References, Writing

log = logging.getLogger(__name__)


def own_function(path: str) -> Callable[[str, Sequence[str]], float]:
    """The user's function `MODULE.FUNCTION`: of a text and its references, a number, or true or
    false.

    Raises UserError if it cannot be imported, and for Python's own: a configuration must not run
    commands.
    """
    try:
        if path.partition(".")[0] in sys.stdlib_module_names:
            raise UserError("it belongs to Python itself")
        if not callable(function := pkgutil.resolve_name(path)):
            raise UserError(f"it is a {type(function).__name__}")
    except Exception as error:  # a module may raise anything
        remedy = "give MODULE.FUNCTION of your own; PYTHONPATH=DIR says where its module lies"
        raise UserError(f"the metric {path} cannot be used ({error}): {remedy}") from error
    return function


def mean_of_function(
    function: Callable[[str, Sequence[str]], float],
    scale: int | None,
    shown: str,
    texts: Sequence[str],
    references: References,
    writing: Writing,
) -> Measure:
    """Of a user's function, on a scale of 100. scale: that of its numbers; None: not said, so 100.

    Raises UserError where it fails, or gives no number of its scale.
    """
    values, numbers = [], []
    for text, text_references in zip(texts, references, strict=True):
        try:
            value = function(text, text_references)
        except Exception as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UserError(
                f"the metric {shown} fails for {text!r:.60}: {reason}; correct the function"
            ) from error
        if isinstance(value, bool | np.bool_):
            values.append(100.0 * value)
            continue
        if not isinstance(value, Real | np.number) or not 0 <= value <= (scale or 100):
            said = "" if scale else f"; {shown}.scale = 1 says that its numbers are from 0 to 1"
            raise UserError(
                f"the metric {shown} must give a number from 0 to {scale or 100}, got {value!r} for"
                f" {text!r:.60}{said}"
            )
        numbers.append(float(value))
        values.append(100.0 * float(value) / (scale or 100))
    if scale is None and any(numbers) and max(numbers) <= 1:
        warn(
            f"the metric {shown} gives numbers from 0 to 1, which are taken as shares of 100"
            f" points; if 1 is a perfect text, write {shown}.scale = 1 below the function, else"
            f" {shown}.scale = 100"
        )
    return mean_of(shown, values)


@lru_cache
def warn(text: str) -> None:
    """Log this warning, if it was not yet."""
    log.warning(text)
