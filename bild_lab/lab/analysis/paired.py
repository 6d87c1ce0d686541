"""Points measured on two sides, A and B: which side is faster, which is better, and what may be chance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bild_lab.errors import UserError
from bild_lab.lab.analysis.statistics import Speedup, paired_speedup
from bild_lab.lab.hashing import plain_numbers
from bild_lab.lab.metrics import Difference, compare

SIGNIFICANT = 0.05
SACREBLEU_SEED = 12345  # with it, intervals of BLEU are those of `sacrebleu --paired-bs`
NOT_COMPARED, SAME = "not compared", "no difference"
# keys of the setting that nobody chooses, and so never tell two points of a sweep apart
_DERIVED_KEYS = ("data", "weights", "code", "hardware")
_TASK_KEYS = ("dataset", "split", "metric", "data")


@dataclass(frozen=True)
class Pair:
    """One point on both sides. place: the keys of the setting that, with policy and knobs, tell it from others."""

    a: dict[str, Any]
    b: dict[str, Any]
    place: dict[str, Any]


@dataclass(frozen=True)
class Matching:
    """The points that both sides have, and those that only one has."""

    pairs: list[Pair]
    only_a: list[dict[str, Any]]
    only_b: list[dict[str, Any]]


@dataclass(frozen=True)
class Compared:
    """A pair compared over the examples that both sides decoded.

    latency: B's total latency over A's; below 1 if B is faster. baseline_latency: the same ratio of the baselines that
    were timed with them; it tells how much the machine itself changed. unfit: why latencies are not compared.
    quality: B minus A.
    """

    pair: Pair
    n_examples: int
    latency: Speedup | None
    baseline_latency: Speedup | None
    unfit: str | None
    quality: Difference | None

    @property
    def speed_verdict(self) -> str:
        """faster or slower if the whole 95 % interval says so."""
        if self.latency is None:
            return NOT_COMPARED
        return "faster" if self.latency.high < 1 else "slower" if self.latency.low > 1 else SAME

    @property
    def quality_verdict(self) -> str:
        """better or worse if chance gives a difference this large in fewer than 5 of 100 samples."""
        if self.quality is None:
            return NOT_COMPARED
        if self.quality.p_value >= SIGNIFICANT:
            return SAME
        return "better" if self.quality.value > 0 else "worse"


def match(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> Matching:
    """Pair the results of two sides by policy, knobs and every setting that varies within a side.

    Settings that are the same for a whole side, such as its precision or its code, may differ: they are what is
    compared. A knob that only one side's version of a policy has is used only if it varies. Both sides come oldest
    first, and of equal points the newest counts. Raises UserError if nothing matches, or if matching points differ in
    data or metric.
    """
    varying = [key for key in _setting_keys([*a, *b]) if _varies(a, key) or _varies(b, key)]
    knobs = {policy: _distinguishing_knobs(policy, a, b) for policy in {result["policy"] for result in [*a, *b]}}
    first, second = ({_key(result, knobs, varying): result for result in side} for side in (a, b))
    shared = [key for key in first if key in second]
    if not shared:
        raise UserError(
            f"A and B have no point in common: A has {_listed(first.values())}; B has {_listed(second.values())}; "
            "points match by policy and knobs"
        )
    pairs = [
        Pair(first[key], second[key], {name: flat_setting(first[key]).get(name) for name in varying}) for key in shared
    ]
    for pair in pairs:
        _require_same_task(pair)
    return Matching(
        pairs,
        [result for key, result in first.items() if key not in second],
        [result for key, result in second.items() if key not in first],
    )


def differences(pairs: Iterable[Pair]) -> dict[str, tuple[str, str]]:
    """What else differs between the sides: keys of the setting with A's and B's values, and the commits."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for pair in pairs:
        settings = [{**flat_setting(side), "commit": side["environment"].get("git")} for side in (pair.a, pair.b)]
        for key in dict.fromkeys([*settings[0], *settings[1]]):
            values = [plain_numbers(side.get(key)) for side in settings]
            if key not in pair.place and values[0] != values[1]:
                for side, value in zip(found.setdefault(key, ({}, {})), values, strict=True):
                    side[str(value)] = None
    return {key: (", ".join(a), ", ".join(b)) for key, (a, b) in found.items()}


def compare_pair(
    pair: Pair,
    rows_a: Sequence[Mapping[str, Any]],
    rows_b: Sequence[Mapping[str, Any]],
    references: Mapping[tuple[str, int], Sequence[str]] | None,
) -> Compared:
    """Compare a pair over the examples that both sides have, paired by their ids.

    rows: the sides' stored examples. references: of each example, by `example_key`; None if they are not known. The
    metric agreement needs none. Raises UserError if the sides share no example.
    """
    first, second = ({example_key(row): row for row in rows} for rows in (rows_a, rows_b))
    keys = [key for key in first if key in second]
    if not keys:
        raise UserError(f"{_name(pair.a)}: A and B have no example in common; give them the same dataset.limit")
    a, b = ([side[key] for key in keys] for side in (first, second))
    unfit = _why_not_comparable(pair)
    timed = unfit is None
    return Compared(
        pair,
        len(keys),
        _ratio(a, b, "latency_s") if timed else None,
        _ratio(a, b, "baseline_latency_s") if timed and all("baseline_latency_s" in row for row in [*a, *b]) else None,
        unfit,
        _quality(pair.a["setting"]["metric"], a, b, None if references is None else [references[key] for key in keys]),
    )


def flat_setting(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result's setting in one level, with grouped keys, such as those of its decoding, beside the others."""
    flat: dict[str, Any] = {}
    for key, value in result["setting"].items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat


def example_key(row: Mapping[str, Any]) -> tuple[str, int]:
    """The key of a stored example: its id and the turn of its conversation."""
    return str(row["id"]), row.get("turn", 1)


def _quality(metric: str, a: list, b: list, references: list | None) -> Difference | None:
    if metric == "agreement":  # each output equals the baseline's or not
        outputs = [[str(row["prediction"] == row["baseline_prediction"]) for row in side] for side in (a, b)]
        references = [[str(True)]] * len(a)
    else:
        outputs = [[row["prediction"] for row in side] for side in (a, b)]
    if references is None:
        return None
    return compare(metric, outputs[1], outputs[0], references, seed=SACREBLEU_SEED)


def _ratio(a: list, b: list, key: str) -> Speedup:
    """B's time over A's. Each example counts with the median of its repeats, whose number may differ."""
    medians = [np.array([[float(np.median(row[key]))] for row in side]) for side in (a, b)]
    return paired_speedup(medians[1], medians[0])


def _why_not_comparable(pair: Pair) -> str | None:
    """Why the latencies cannot be compared; None if they can."""
    hardware = [_hardware(side) for side in (pair.a, pair.b)]
    if hardware[0] != hardware[1]:
        return f"different hardware: {hardware[0]}, {hardware[1]}"
    if any(side["environment"].get("shared_device") for side in (pair.a, pair.b)):
        return "timed beside other jobs on the same device"
    return None


def _hardware(result: dict[str, Any]) -> str:
    setting, environment = result["setting"], result["environment"]
    device = str(setting.get("device", "cpu")).partition(":")[0]
    return f"{device} {setting.get('hardware') or environment.get('gpu') or environment.get('cpu')}"


def _require_same_task(pair: Pair) -> None:
    for key in _TASK_KEYS:
        a, b = (side["setting"].get(key) for side in (pair.a, pair.b))
        if a != b and (key != "data" or None not in (a, b)):
            sizes = [side["setting"].get("n_examples") for side in (pair.a, pair.b)]
            counted = f" ({sizes[0]} and {sizes[1]} examples)" if key == "data" else ""
            raise UserError(
                f"A and B must have the same {key} to be compared, got {a} and {b}{counted} at {_name(pair.a)}; "
                "measure one of them again with the dataset keys of the other"
            )


def _distinguishing_knobs(policy: str, a: Sequence[dict], b: Sequence[dict]) -> set[str]:
    """The knobs of a policy that both sides have or that vary within one."""
    sides = [[result["knobs"] for result in side if result["policy"] == policy] for side in (a, b)]
    names = [{name for knobs in side for name in knobs} for side in sides]
    if not all(sides):
        return names[0] | names[1]
    varying = {name for side in sides for name in names[0] ^ names[1] if len({_text(k.get(name)) for k in side}) > 1}
    return (names[0] & names[1]) | varying


def _key(result: dict[str, Any], knobs: Mapping[str, set[str]], varying: Sequence[str]) -> str:
    policy = result["policy"]
    used = {name: value for name, value in result["knobs"].items() if name in knobs[policy]}
    setting = flat_setting(result)
    return _text([policy, used, {key: setting.get(key) for key in varying}])


def _setting_keys(results: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for result in results for key in flat_setting(result))
    return [key for key in keys if key not in _DERIVED_KEYS]


def _varies(results: Sequence[dict[str, Any]], key: str) -> bool:
    return len({_text(flat_setting(result).get(key)) for result in results}) > 1


def _text(value: Any) -> str:
    return json.dumps(plain_numbers(value), sort_keys=True, default=str)


def _name(result: dict[str, Any]) -> str:
    return " ".join([result["policy"], *(f"{knob}={value}" for knob, value in result["knobs"].items())])


def _listed(results: Iterable[dict[str, Any]], most: int = 4) -> str:
    names = [_name(result) for result in results]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
