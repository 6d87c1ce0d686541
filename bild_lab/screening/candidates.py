"""The points to screen: several policies, each with all values of the knobs that it has, written as
for a sweep.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.config.command_line import key_of, list_override
from bild_lab.lab.config.compose import (
    alternatives,
    compose_config,
    compose_policy,
    knob_values,
    override_words,
    require_own_files,
    resolved_policy,
    without_step_error,
)
from bild_lab.lab.config.policies import policy_label

Values = tuple[str, ...]  # overrides such as policy.window=3
KNOB = "policy."
CONFIG = "screen"  # the command's configuration, conf/screen.yaml
NOT_A_POINTS = ("hydra", "screen")


@dataclass(frozen=True)
class Candidate:
    """A policy with its knobs. words: the overrides that give it, beside those that all share."""

    words: Values
    name: str
    knobs: Mapping[str, Any]
    policy: DictConfig


@dataclass(frozen=True)
class Space:
    """A policy and the values of its knobs. words: that choose it. lists: the overrides of each
    knob.
    """

    words: Values
    base: DictConfig
    lists: Mapping[str, Values]

    def candidate(self, knob_words: Sequence[str] = ()) -> Candidate:
        """The candidate with these overrides of knobs."""
        policy = copy.deepcopy(self.base)
        for word in knob_words:
            OmegaConf.update(policy, key_of(word).removeprefix(KNOB), _value(word))
        knobs = knob_values(OmegaConf.to_container(policy, resolve=False))
        # resolving all takes long, and most policies have plain knobs
        if "${" in str(knobs):
            knobs = knob_values(resolved_policy(policy))
        return Candidate((*self.words, *knob_words), policy_label(self.base), knobs, policy)


@dataclass(frozen=True)
class CandidateGrid:
    """The overrides that all points share, and the points of each policy."""

    shared: Values
    spaces: tuple[Space, ...]

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every combination of the values of every policy."""
        combinations = [
            (space, words)
            for space in self.spaces
            for words in itertools.product(*space.lists.values())
        ]
        return tuple(space.candidate(words) for space, words in combinations)

    def config(self, candidate: Candidate, split: str) -> DictConfig:
        """A point's whole configuration, composed as `python run.py` does."""
        composed = compose_config(
            [*self.shared, *candidate.words, f"dataset.split={split}"], CONFIG
        )
        return OmegaConf.masked_copy(composed, [key for key in composed if key not in NOT_A_POINTS])


def grid_of(task: Sequence[str], lists: Sequence[str]) -> CandidateGrid:
    """Every combination of the lists, for every policy of `policy=a,b`, which takes the lists of
    the knobs it has.

    task: overrides with single values. Raises UserError for a list over anything but policies and
    their knobs, and for a knob that none of the policies has.
    """
    varied = read_lists(lists)
    policies = [value.partition("=")[2] for value in varied.pop("policy", ())]
    for key in varied:
        if not key.startswith(KNOB):
            raise UserError(
                f"a screening varies policies and their knobs, got a list for {key}; give it one"
                " value"
            )
    values = {
        **{key_of(word): (word,) for word in task if word.startswith(KNOB)},
        **varied,
    }
    shared = tuple(
        word
        for word in task
        if not word.startswith(KNOB) and not (policies and word.startswith("policy="))
    )
    spaces = []
    for words in [(f"policy={policy}",) for policy in policies] or [()]:
        config = compose_config([*shared, *words], CONFIG)
        require_own_files(config)
        base = config.policy
        space_lists = {
            key: words_of_key
            for key, words_of_key in values.items()
            if key.removeprefix(KNOB).split(".")[0] in base
        }
        spaces.append(Space(words, base, space_lists))
    if unknown := sorted(set(values) - {key for space in spaces for key in space.lists}):
        names = ", ".join(space.base.name for space in spaces)
        knobs = dict.fromkeys(knob for space in spaces for knob in knob_values(space.base))
        raise UserError(
            f"{names} has no knob {unknown[0].removeprefix(KNOB)!r}; it has"
            f" {', '.join(knobs) or 'none'}"
        )
    return CandidateGrid(shared, tuple(spaces))


def vanilla() -> Candidate:
    """The target alone."""
    return Space(("policy=vanilla",), compose_policy("vanilla"), {}).candidate()


@lru_cache(maxsize=1024)
def _value(word: str) -> Any:
    return OverridesParser.create().parse_override(word).value()


def read_lists(words: Sequence[str]) -> dict[str, Values]:
    """The values of each key as overrides, numbers in ascending order. If a key is given twice, the
    later one counts.

    Raises UserError for anything except choices and ranges.
    """
    lists: dict[str, Values] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        values = list(dict.fromkeys(without_step_error(alternatives(override))))
        with suppress(ValueError):  # words keep their order
            values.sort(key=lambda override_word: float(override_word.partition("=")[2]))
        lists[override.get_key_element()] = tuple(values)
    return lists


def as_overrides(words: Sequence[str], key: str) -> list[str]:
    """The command line with its lists of values in `key`: Hydra allows lists only in sweeps, not in
    one run.
    """

    def is_list(word: str) -> bool:
        with suppress(HydraException):  # Hydra reports it later
            return (
                "=" in word
                and word[:1] != "-"
                and OverridesParser.create().parse_override(word).is_sweep_override()
            )
        return False

    lists = [word for word in words if is_list(word)]
    other_words = [word for word in words if word not in ("-m", "--multirun", *lists)]
    return [*other_words, *([list_override(key, lists)] if lists else []), "hydra.mode=RUN"]


def command_line_lists(hydra_config: DictConfig) -> tuple[Values, list[str]]:
    """The command line's overrides with single values, and the lists of an experiment that they do
    not fix.
    """
    groups = tuple(f"{name}." for name in NOT_A_POINTS)
    words = override_words(hydra_config)
    task = tuple(word for word in words if not word.lstrip("+~").startswith(groups))
    keys = {key_of(word) for word in task}
    list_words = [
        f"{key}={value}" for key, value in (hydra_config.sweeper.get("params") or {}).items()
    ]
    return task, [word for word in list_words if key_of(word) not in keys]
