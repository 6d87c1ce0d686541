"""The points that two sweeps, A and B, share, and what else differs between the two."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.hashing import plain_numbers

# keys of the setting that the user does not choose, so they never distinguish two points of a sweep
DERIVED_KEYS = ("data", "weights", "code", "hardware")
_LISTED_POINTS = 4  # points that a message names at most


@dataclass(frozen=True)
class MatchedPoint:
    """One point in A and in B.

    distinct: values of the setting that, besides policy and knobs, distinguish it from others.
    """

    a: Result
    b: Result
    distinct: dict[str, Any]


@dataclass(frozen=True)
class Matching:
    """The points that both A and B have, and those that only one of them has."""

    pairs: list[MatchedPoint]
    only_a: list[Result]
    only_b: list[Result]


def match_points(a: Sequence[Result], b: Sequence[Result]) -> Matching:
    """Pair the results of A and of B, each oldest first, by policy, knobs and other values that
    vary within A or B.

    Values that are constant within A and within B may differ between them, such as the precision or
    the code: they are what is compared. A knob that only one version of a policy has distinguishes
    points only if it varies. Of equal points the newest counts. Raises UserError if nothing
    matches, or if matching points have other datasets or metrics.
    """
    varying = list(_varying_keys(a) | _varying_keys(b))
    policies = {result.policy for result in [*a, *b]}
    knobs = {policy: _matched_knobs(policy, a, b) for policy in policies}

    def distinguishing(result: Result) -> dict[str, Any]:
        setting = flat_setting(result)
        return {key: setting.get(key) for key in varying}

    def key_of(result: Result) -> str:
        matched_knobs = {
            name: value for name, value in result.knobs.items() if name in knobs[result.policy]
        }
        return _comparable([result.policy, matched_knobs, distinguishing(result)])

    results_a = {key_of(result): result for result in a}
    results_b = {key_of(result): result for result in b}
    pairs = [
        MatchedPoint(result, results_b[key], distinguishing(result))
        for key, result in results_a.items()
        if key in results_b
    ]
    if not pairs:
        raise UserError(
            f"A and B have no point in common: A has {_point_list(results_a.values())}; B has"
            f" {_point_list(results_b.values())}; points match by policy and knobs"
        )
    for pair in pairs:
        _require_same_task(pair)
    only_a = [result for key, result in results_a.items() if key not in results_b]
    only_b = [result for key, result in results_b.items() if key not in results_a]
    return Matching(pairs, only_a, only_b)


def differences(pairs: Iterable[MatchedPoint]) -> dict[str, tuple[str, str]]:
    """What else differs between A and B: each such key of the setting, or the commit, with the
    values of both.

    Which examples they have is left out: the comparison of a point counts them.
    """
    values_a: dict[str, list[str]] = {}  # the values of each key as texts
    values_b: dict[str, list[str]] = {}
    for pair in pairs:
        setting_a = {**flat_setting(pair.a), "commit": pair.a.environment.git}
        setting_b = {**flat_setting(pair.b), "commit": pair.b.environment.git}
        for key in {**setting_a, **setting_b}:
            if key in pair.distinct or key in ("data", "n_examples"):
                continue
            value_a = plain_numbers(setting_a.get(key))
            value_b = plain_numbers(setting_b.get(key))
            if value_a != value_b:
                values_a.setdefault(key, []).append(str(value_a))
                values_b.setdefault(key, []).append(str(value_b))
    return {
        key: (_each_once(texts_a), _each_once(values_b[key])) for key, texts_a in values_a.items()
    }


def _each_once(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def flat_setting(result: Result) -> dict[str, Any]:
    """A result's setting with its groups, such as decoding, merged into one flat mapping."""
    flat: dict[str, Any] = {}
    for key, value in result.setting.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def _require_same_task(pair: MatchedPoint) -> None:
    """Raise UserError unless both have the same metric, and the same dataset or, under two names,
    the same rows.
    """
    setting_a, setting_b = pair.a.setting, pair.b.setting
    keys = ["metric", "tokenize", "language"]
    if setting_a.data is None or setting_a.data != setting_b.data:
        keys = ["dataset", "split", *keys]
    for key in keys:
        value_a, value_b = setting_a.get(key), setting_b.get(key)
        if value_a != value_b:
            raise UserError(
                f"A and B must have the same {key} to be compared, got {value_a} and {value_b} at"
                f" {point_text(pair.a)}; measure one of them again with the dataset keys of the"
                " other"
            )


def _matched_knobs(policy: str, a: Sequence[Result], b: Sequence[Result]) -> set[str]:
    """The knobs of a policy that both A and B have or that vary within one."""
    knobs_a = [result.knobs for result in a if result.policy == policy]
    knobs_b = [result.knobs for result in b if result.policy == policy]
    names_a = set().union(*knobs_a)
    names_b = set().union(*knobs_b)
    if not knobs_a or not knobs_b:
        return names_a | names_b
    matched = names_a & names_b
    for name in names_a ^ names_b:
        if _varies(name, knobs_a) or _varies(name, knobs_b):
            matched.add(name)
    return matched


def _varying_keys(results: Sequence[Result]) -> dict[str, None]:
    """The keys of the setting that vary among these results, but for those that the user does not
    choose.
    """
    settings = [flat_setting(result) for result in results]
    keys: dict[str, None] = {}  # in their order
    for setting in settings:
        keys |= dict.fromkeys(setting)
    for key in list(keys):
        if key in DERIVED_KEYS or not _varies(key, settings):
            del keys[key]
    return keys


def _varies(key: str, mappings: Sequence[Mapping[str, Any]]) -> bool:
    values = {_comparable(mapping.get(key)) for mapping in mappings}
    return len(values) > 1


def _comparable(value: Any) -> str:
    """A text that equal values share."""
    return json.dumps(plain_numbers(value), sort_keys=True, default=str)


def point_text(result: Result) -> str:
    """A point as a command names it: `bild fallback=0.5 rollback=2`."""
    knobs = [f"{knob}={value}" for knob, value in result.knobs.items()]
    return " ".join([result.policy, *knobs])


def _point_list(results: Collection[Result]) -> str:
    """The first points by name, and how many more there are."""
    texts = [point_text(result) for result in results]
    listed = ", ".join(texts[:_LISTED_POINTS])
    more = len(texts) - _LISTED_POINTS
    return f"{listed} and {more} more" if more > 0 else listed
