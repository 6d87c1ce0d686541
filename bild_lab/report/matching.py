"""The points that sweeps share: two of them, A and B, with what else differs, or several runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bild_lab.errors import UserError
from bild_lab.lab.schema.columns import knob_columns
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import flat_setting, varying_keys
from bild_lab.lab.store.hashing import canonical_text, plain_numbers

# keys of the setting that the user does not choose, so they never distinguish two points of a sweep
DERIVED_KEYS = ("data", "weights", "code", "hardware")
# and those that a machine has of its own
MACHINE_KEYS = (*DERIVED_KEYS, "threads")
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
    identity = _identity_over([a, b])
    results_a = {identity.key(result): result for result in a}
    results_b = {identity.key(result): result for result in b}
    pairs = [
        MatchedPoint(result, results_b[key], identity.distinct(result))
        for key, result in results_a.items()
        if key in results_b
    ]
    if not pairs:
        raise UserError(
            f"A and B have no point in common: A has {_point_list(results_a.values())}; B has"
            f" {_point_list(results_b.values())}; points match by policy and knobs"
        )
    for pair in pairs:
        _require_same_task(pair.a, pair.b, "A and B")
    only_a = [result for key, result in results_a.items() if key not in results_b]
    only_b = [result for key, result in results_b.items() if key not in results_a]
    return Matching(pairs, only_a, only_b)


@dataclass(frozen=True)
class MatchedRuns:
    """One point in several runs of it, on other machines or days.

    results: by the name of the sweep. distinct: as in `MatchedPoint`.
    """

    results: dict[str, Result]
    distinct: dict[str, Any]


def match_runs(
    sweeps: Mapping[str, Sequence[Result]], merged: Iterable[Sequence[Result]]
) -> list[MatchedRuns]:
    """The points of all sweeps, in the order in which they are met, each with its result in every
    sweep that has it.

    sweeps: by their names, each with its results, oldest first. merged: the results of sweeps that
    stand here as one for each of their machines; values that vary within those, but for the
    machines' own, tell points apart, too. Points match as in `match_points`, of equal points in one
    sweep the newest counts. Raises UserError if matching points have other datasets or metrics.
    """
    identity = _identity_over(list(sweeps.values()), list(merged))
    points: dict[str, MatchedRuns] = {}
    for name, results in sweeps.items():
        for result in results:
            runs = points.setdefault(
                identity.key(result), MatchedRuns({}, identity.distinct(result))
            )
            runs.results[name] = result
    for runs in points.values():
        (first_name, first_result), *further_runs = runs.results.items()
        for name, other_result in further_runs:
            _require_same_task(first_result, other_result, f"{first_name} and {name}")
    return list(points.values())


@dataclass(frozen=True)
class _PointIdentity:
    """What tells the points of sweeps apart: by policy the knobs, and keys of the setting."""

    knobs: Mapping[str, set[str]]
    varying: Sequence[str]

    def distinct(self, result: Result) -> dict[str, Any]:
        """The values of the setting that tell a point from others."""
        setting = flat_setting(result)
        return {key: setting.get(key) for key in self.varying}

    def key(self, result: Result) -> str:
        """A text that equal points share."""
        matched_knobs = {
            name: value for name, value in result.knobs.items() if name in self.knobs[result.policy]
        }
        return canonical_text([result.policy, matched_knobs, self.distinct(result)])


def _identity_over(
    sweeps: Sequence[Sequence[Result]], merged: Sequence[Sequence[Result]] = ()
) -> _PointIdentity:
    # in their order
    varying = dict.fromkeys(
        key
        for group, left_out in ((sweeps, DERIVED_KEYS), (merged, MACHINE_KEYS))
        for results in group
        for key in varying_keys([flat_setting(result) for result in results])
        if key not in left_out
    )
    policies = {result.policy for results in sweeps for result in results}
    knobs = {policy: _matched_knobs(policy, sweeps) for policy in policies}
    return _PointIdentity(knobs, list(varying))


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


def _require_same_task(a: Result, b: Result, names: str) -> None:
    """Raise UserError unless both have the same metric, and the same dataset or, under two names,
    the same rows.

    names: of the two sweeps, for the message.
    """
    setting_a, setting_b = a.setting, b.setting
    keys = ["metric", "tokenize", "language"]
    if setting_a.data is None or setting_a.data != setting_b.data:
        keys = ["dataset", "split", *keys]
    for key in keys:
        value_a, value_b = setting_a.get(key), setting_b.get(key)
        if value_a != value_b:
            raise UserError(
                f"{names} must have the same {key} to be compared, got {value_a} and {value_b} at"
                f" {point_text(a)}; measure one of them again with the dataset keys of the"
                " other"
            )


def _matched_knobs(policy: str, sweeps: Sequence[Sequence[Result]]) -> set[str]:
    """The knobs of a policy that all sweeps with it have, or that vary within one."""
    knobs_by_sweep = [
        [result.knobs for result in results if result.policy == policy] for results in sweeps
    ]
    knobs_by_sweep = [knobs for knobs in knobs_by_sweep if knobs]
    names = [set().union(*knobs) for knobs in knobs_by_sweep]
    matched = set.intersection(*names)
    return matched.union(*map(varying_keys, knobs_by_sweep))


def point_text(result: Result) -> str:
    """A point as a command names it: `bild fallback=0.5 rollback=2`."""
    knobs = [f"{knob}={value}" for knob, value in result.knobs.items()]
    return " ".join([result.policy, *knobs])


def identity_columns(result: Result, distinct: Mapping[str, Any]) -> dict[str, Any]:
    """What names a point in a table: its policy, its knobs, and the values of the setting that tell
    it from others.
    """
    return {"policy": result.policy, **knob_columns(result.knobs, distinct), **distinct}


def _point_list(results: Collection[Result]) -> str:
    """The first points by name, and how many more there are."""
    texts = [point_text(result) for result in results]
    listed = ", ".join(texts[:_LISTED_POINTS])
    more = len(texts) - _LISTED_POINTS
    return f"{listed} and {more} more" if more > 0 else listed
