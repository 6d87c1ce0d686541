"""Settings of one sweep in one picture, where they may be compared: the same target, data and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bild_lab.lab.analysis.paired import DERIVED_KEYS, flat_setting
from bild_lab.lab.formatting import knob_value, short_name
from bild_lab.lab.hashing import plain_numbers
from bild_lab.lab.results.groups import Group

# what settings must share to be in one picture, in the words of the reason if they do not
_SHARED = {
    "target": "target",
    "weights": "weights of the target",
    "dataset": "data set",
    "split": "split",
    "data": "examples",
    "n_examples": "number of examples",
    "prompt_template": "prompt template",
    "chat_template": "chat template",
    "max_source_tokens": "length of the source",
    "metric": "quality metric",
    "device": "device",
    "hardware": "hardware",
}
# what does not change the baseline, so that latencies relative to it can be compared
_BESIDE_THE_BASELINE = ("draft", "second_draft", "compile_drafter", "repeats", "warmup")
_LONGEST_LABEL = 40


@dataclass(frozen=True)
class Part:
    """A setting in the picture. number: of the setting, from 1. baseline_s: its baseline's mean latency, if drawn."""

    number: int
    label: str
    group: Group
    baseline_s: float | None


@dataclass(frozen=True)
class Overlay:
    """Settings that may be compared. whole: all their points. differing: the keys of the setting that differ."""

    parts: list[Part]
    whole: Group
    differing: list[str]


def overlays(groups: Sequence[Group]) -> tuple[list[Overlay], list[str]]:
    """Return a picture for each set of several settings that may be compared, and why others are apart.

    Latencies are relative to the baseline if only the drafter differs; otherwise they are in seconds, as each setting
    has a baseline of its own.
    """
    classes: dict[str, list[tuple[int, Group]]] = {}
    for number, group in enumerate(groups, start=1):
        classes.setdefault(str(_conditions(group)), []).append((number, group))
    together = [_overlay(members) for members in classes.values() if len(members) > 1]
    return together, _reasons(list(classes.values()))


def _conditions(group: Group) -> dict[str, Any]:
    return {"quality metric": group.metric} | {key: plain_numbers(group.setting.get(key)) for key in _SHARED}


def _overlay(members: Sequence[tuple[int, Group]]) -> Overlay:
    flat = {number: plain_numbers(flat_setting(group.results[0])) for number, group in members}
    keys = dict.fromkeys(key for one in flat.values() for key in one)
    differing = [key for key in keys if len({str(one.get(key)) for one in flat.values()}) > 1]
    relative = set(differing) <= set(_BESIDE_THE_BASELINE) and all(group.relative for _, group in members)
    named = [key for key in differing if key not in DERIVED_KEYS]
    labels = {number: ", ".join(_value(key, flat[number].get(key)) for key in named) for number, _ in members}
    if len(set(labels.values())) < len(members) or max(map(len, labels.values())) > _LONGEST_LABEL:
        labels = {number: f"setting {number}" for number, _ in members}
    parts = [
        Part(number, labels[number], replace(group, in_seconds=not relative), None if relative else _baseline_s(group))
        for number, group in members
    ]
    everything = sorted((one for part in parts for one in part.group.results), key=lambda one: one.latency_s.mean)
    return Overlay(parts, Group(members[0][1].setting, everything, in_seconds=not relative), differing)


def _value(key: str, value: Any) -> str:
    if key in ("draft", "second_draft"):
        return "no drafter" if value is None else short_name(value)
    return f"{key} {knob_value(value)}"


def _baseline_s(group: Group) -> float | None:
    """The median over the points of the baseline's mean latency, timed beside each."""
    beside = [one.baseline_latency_s.mean for one in group.results if one.baseline_latency_s is not None]
    return median(beside) if beside else None


def _reasons(classes: Sequence[Sequence[tuple[int, Group]]]) -> list[str]:
    """Say of each set of settings why it is not in the picture of the first one."""
    (first, *others) = classes or [[]]
    sentences = []
    for members in others:
        mine, theirs = _conditions(members[0][1]), _conditions(first[0][1])
        differing = [_SHARED.get(key, key) for key in theirs if str(mine.get(key)) != str(theirs[key])]
        named = "data set" if "data set" in differing else ", ".join(differing[:3])
        sentences.append(f"{_settings(members)} cannot be drawn with {_settings(first)}: they differ in {named}.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _settings(members: Sequence[tuple[int, Group]]) -> str:
    numbers = [str(number) for number, _ in members]
    return f"setting {numbers[0]}" if len(numbers) == 1 else f"settings {', '.join(numbers[:-1])} and {numbers[-1]}"
