"""Parameters of which some are fast tests and the others slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int, names: Iterable[str] | None = None) -> list[Any]:
    """Every `step`-th case, from the first on, as a fast test.

    A case with several values is a tuple.
    """
    cases = list(cases)
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    named = [{} for _ in cases] if names is None else [{"id": name} for name in names]
    marks = [[] if index % step == 0 else [pytest.mark.slow] for index in range(len(cases))]
    return [
        pytest.param(*case, marks=mark, **name)
        for case, mark, name in zip(several, marks, named, strict=True)
    ]
