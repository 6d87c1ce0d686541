"""What a search of knobs goes through: lists of values, given as to a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from bild_lab.errors import UserError

Values = tuple[str, ...]  # one override for each list of the space


@dataclass(frozen=True)
class Space:
    """What is searched: every list of values as its overrides, `policy.window=3` and so on, numbers in their order."""

    lists: tuple[Values, ...]
    fixed: tuple[str, ...]  # values that are no lists

    @property
    def size(self) -> int:
        return math.prod(len(values) for values in self.lists)

    def at(self, places: Sequence[int]) -> Values:
        return tuple(values[place] for values, place in zip(self.lists, places, strict=True))

    def corners(self) -> list[Values]:
        """Points in which each list's first and last value comes."""
        firsts = [0] * len(self.lists)
        lasts = [len(values) - 1 for values in self.lists]
        changed = [[*firsts[:number], last, *firsts[number + 1 :]] for number, last in enumerate(lasts)]
        return list(dict.fromkeys(self.at(places) for places in [firsts, *changed]))


def read_space(words: Sequence[str]) -> Space:
    """The lists among overrides such as `policy.window=3,5` or `policy.fallback=range(0.2,0.9,0.1)`.

    Of two for one key the later counts. Raises UserError for anything else than choices and ranges, or no list.
    """
    lists: dict[str, Values] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        try:
            (jobs,) = BasicSweeper.split_arguments([override], None)
        except HydraException as error:
            raise UserError(f"a search wants lists or ranges of values, got {override.input_line}") from error
        lists[override.get_key_element()] = _ordered([job[0] for job in jobs])
    searched = tuple(values for values in lists.values() if len(values) > 1)
    if not searched:
        raise UserError("a search wants lists of values, got none; give some: policy.fallback=0.3,0.5,0.7")
    return Space(searched, tuple(values[0] for values in lists.values() if len(values) == 1))


def _ordered(overrides: list[str]) -> Values:
    """Numbers ascending, so that neighbours in a list are alike; others as they were given."""
    try:
        return tuple(sorted(dict.fromkeys(overrides), key=lambda one: float(one.partition("=")[2])))
    except ValueError:
        return tuple(dict.fromkeys(overrides))
