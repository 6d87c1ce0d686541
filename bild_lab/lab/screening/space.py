"""The space of a search: lists of values for each knob, written as for a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from bild_lab.errors import UserError

Values = tuple[str, ...]  # one override for each list of the space
MOST_DIGITS = 14  # of a number that somebody typed


@dataclass(frozen=True)
class Space:
    """The lists of values to search, each as overrides such as `policy.window=3`; numbers in ascending order."""

    lists: tuple[Values, ...]
    fixed: tuple[str, ...]  # overrides with a single value

    @property
    def size(self) -> int:
        return math.prod(len(values) for values in self.lists)

    def at(self, places: Sequence[int]) -> Values:
        return tuple(values[place] for values, place in zip(self.lists, places, strict=True))

    def corners(self) -> list[Values]:
        """A few points that contain the first and the last value of every list."""
        firsts = [0] * len(self.lists)
        lasts = [len(values) - 1 for values in self.lists]
        changed = [[*firsts[:number], last, *firsts[number + 1 :]] for number, last in enumerate(lasts)]
        return list(dict.fromkeys(self.at(places) for places in [firsts, *changed]))


def read_space(words: Sequence[str]) -> Space:
    """The space of overrides such as `policy.window=3,5` or `policy.fallback=range(0.2,0.9,0.1)`.

    If a key is given twice, the later one counts. Raises UserError for anything except choices and ranges, and if
    there is no list.
    """
    lists = read_lists(words)
    searched = tuple(values for values in lists.values() if len(values) > 1)
    if not searched:
        raise UserError("a search needs lists of values, got none; give some: policy.fallback=0.3,0.5,0.7")
    return Space(searched, tuple(values[0] for values in lists.values() if len(values) == 1))


def read_lists(words: Sequence[str]) -> dict[str, Values]:
    """The values of each key as overrides. If a key is given twice, the later one counts.

    Raises UserError for anything except choices and ranges.
    """
    lists: dict[str, Values] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        try:
            (jobs,) = BasicSweeper.split_arguments([override], None)
        except HydraException as error:
            raise UserError(f"a search needs lists or ranges of values, got {override.input_line}") from error
        lists[override.get_key_element()] = _ordered([_rounded(job[0]) for job in jobs])
    return lists


def as_overrides(words: Sequence[str], key: str) -> list[str]:
    """The command line with its lists of values in `key`: Hydra allows lists only in sweeps, not in one run."""

    def is_list(word: str) -> bool:
        with suppress(HydraException):  # Hydra reports it later
            return "=" in word and word[:1] != "-" and OverridesParser.create().parse_override(word).is_sweep_override()
        return False

    lists = [word for word in words if is_list(word)]
    others = [word for word in words if word not in ("-m", "--multirun", *lists)]
    quoted = ",".join("'" + word.replace("\\", "\\\\").replace("'", "\\'") + "'" for word in lists)
    return [*others, *([f"{key}=[{quoted}]"] if lists else []), "hydra.mode=RUN"]


def given_lists(hydra_config: DictConfig, own: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The command line's overrides with single values, and the lists of an experiment that they do not fix.

    own: the command's own groups, which are left out.
    """
    groups = tuple(f"{name}." for name in own)
    task = tuple(word for word in hydra_config.overrides.task if not word.lstrip("+~").startswith(groups))
    keys = {word.partition("=")[0] for word in task}
    given = [f"{key}={value}" for key, value in (hydra_config.sweeper.get("params") or {}).items()]
    return task, [word for word in given if word.partition("=")[0] not in keys]


def _rounded(override: str) -> str:
    """The override of a range's step without the error of adding floats: 0.35 and not 0.35000000000000003."""
    key, _, value = override.partition("=")
    try:
        return f"{key}={round(float(value), 12)}" if len(value) > MOST_DIGITS else override
    except ValueError:
        return override


def _ordered(overrides: list[str]) -> Values:
    """Numbers in ascending order, so that neighbours in a list are similar. Other values keep their order."""
    try:
        return tuple(sorted(dict.fromkeys(overrides), key=lambda one: float(one.partition("=")[2])))
    except ValueError:
        return tuple(dict.fromkeys(overrides))
