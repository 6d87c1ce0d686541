"""The points to screen: several policies, each with all values of the knobs that it has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config import compose_config, compose_policy, knob_values
from bild_lab.lab.decoding.build import policy_label
from bild_lab.lab.screening.space import Values, read_lists

KNOB = "policy."


@dataclass(frozen=True)
class Candidate:
    """A policy with its knobs. words: the overrides that give it, beside those that all share."""

    words: Values
    name: str
    knobs: Mapping[str, Any]
    policy: DictConfig


@dataclass(frozen=True)
class Grid:
    """The overrides that all points share, and the points. base: of each policy, the first one's configuration."""

    shared: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def config(self, candidate: Candidate, split: str, name: str) -> DictConfig:
        """A point's whole configuration, composed as `python run.py` does."""
        composed = compose_config([*self.shared, *candidate.words, f"dataset.split={split}"], name)
        return OmegaConf.masked_copy(composed, [key for key in composed if key not in NOT_A_POINTS])


NOT_A_POINTS = ("hydra", "tune", "screen", "record", "machine")


def grid_of(task: Sequence[str], lists: Sequence[str], config_name: str) -> Grid:
    """Every combination of the lists, for every policy of `policy=a,b`, which takes the lists of the knobs it has.

    task: overrides with single values. Raises UserError for a list over anything but policies and their knobs, and for
    a knob that none of the policies has.
    """
    space = read_lists(lists)
    policies = [value.partition("=")[2] for value in space.pop("policy", ())]
    for key in space:
        if not key.startswith(KNOB):
            raise UserError(f"a screening varies policies and their knobs, got a list for {key}; give it one value")
    values = {**{word.partition("=")[0]: (word,) for word in task if word.startswith(KNOB)}, **space}
    shared = tuple(word for word in task if not word.startswith(KNOB) and not (policies and word.startswith("policy=")))
    named = [(f"policy={policy}",) for policy in policies] or [()]
    candidates: list[Candidate] = []
    known: set[str] = set()
    for words in named:
        base = compose_config([*shared, *words], config_name).policy
        own = {key: several for key, several in values.items() if key.removeprefix(KNOB).split(".")[0] in base}
        known |= set(own)
        name = policy_label(base)
        candidates += [_candidate(name, base, (*words, *chosen)) for chosen in itertools.product(*own.values())]
    if unknown := sorted(set(values) - known):
        names = ", ".join(policies) or base.name
        knobs = {knob: None for one in candidates for knob in one.knobs}
        raise UserError(f"{names} has no knob {unknown[0].removeprefix(KNOB)!r}; it has {', '.join(knobs) or 'none'}")
    return Grid(shared, tuple(candidates))


def _candidate(name: str, base: DictConfig, words: Values) -> Candidate:
    policy = copy.deepcopy(base)
    for word in words:
        if word.startswith(KNOB):
            OmegaConf.update(policy, word.partition("=")[0].removeprefix(KNOB), _value(word))
    return Candidate(words, name, knob_values(OmegaConf.to_container(policy, resolve=False)), policy)


@lru_cache(maxsize=1024)
def _value(word: str) -> Any:
    return OverridesParser.create().parse_override(word).value()


def vanilla() -> Candidate:
    """The target alone."""
    return _candidate("vanilla", compose_policy("vanilla"), ("policy=vanilla",))
