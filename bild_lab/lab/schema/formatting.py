"""Formats numbers, knobs and points in the same way for the terminal, the figures and the HTML."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

TIMES = "\u00d7"
MINUS = "\u2212"
MISSING = "\u2013"
INFINITY = "\u221e"
ELLIPSIS = "\u2026"
TRAINED = ("checkpoint", "adapter", "heads")  # what trainings call their results


def number(value: float | None, digits: int = 2) -> str:
    """Write a number with a fixed count of decimals, and a missing number as a dash."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return INFINITY if value > 0 else MINUS + INFINITY
    rounded = f"{abs(value):,.{digits}f}"
    return MINUS + rounded if value < 0 and float(rounded.replace(",", "")) != 0 else rounded


def number_range(values: Iterable[float | None], digits: int = 2) -> str:
    """Write the smallest and the largest of the known numbers: `12 to 74`, or the one that there is;
    nothing without one.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    ends = (number(end, digits) for end in (min(known), max(known)))
    return " to ".join(dict.fromkeys(ends))


def signed(value: float | None, digits: int = 2) -> str:
    """Write a difference with its sign, even if it is positive."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 else text


def times(value: float | None) -> str:
    """Write a speedup: `1.53` and the multiplication sign."""
    return number(value) + TIMES if value is not None else MISSING


def interval(
    low: float | None, high: float | None, digits: int = 2, write: Callable[..., str] = number
) -> str:
    """Write an interval as `[1.48, 1.58]`, of a difference with `signed` as `[-0.30, +0.70]`;
    nothing without one.
    """
    return (
        f"[{write(low, digits)}, {write(high, digits)}]"
        if low is not None and high is not None
        else ""
    )


def percent(share: float | None, digits: int = 0) -> str:
    """Write a share between 0 and 1 as a percentage."""
    return f"{number(share * 100, digits)} %" if share is not None else MISSING


def duration(seconds: float | None) -> str:
    """Write a duration in the unit that reads best: ms, s, min or h."""
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{number(seconds * 1000, 1)} ms"
    if seconds < 120:
        return f"{number(seconds, 1)} s"
    return f"{number(seconds / 60, 1)} min" if seconds < 7200 else f"{number(seconds / 3600, 1)} h"


def counted(count: int, what: str) -> str:
    """Write a count of things, such as `1 point` and `12 points`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def short_name(name: str, limit: int = 28) -> str:
    """Write the name of a model or dataset without folders or owner; a training's result, such as
    outputs/NAME/checkpoint, has the name above it.
    """
    *folders, base_name = str(name).rstrip("/").split("/")
    base_name = folders[-1] if base_name in TRAINED and folders else base_name
    return shortened(base_name, limit)


def shortened(text: str, limit: int) -> str:
    """The text, with an ellipsis at its end if it has more letters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}{ELLIPSIS}"


def knob_value(value: object) -> str:
    """Write a knob's value: `on`/`off`, the infinity sign, numbers without trailing zeros."""
    if value in ("inf", ".inf", "Infinity"):  # JSON has no infinity
        return INFINITY
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, float):
        return number(value) if math.isinf(value) else f"{value:g}"
    return str(value)


def short_value(value: object, others: Iterable[object] = ()) -> str:
    """Write a knob's value for a label: the shortest text that no other value has.

    A URL is written by its host, a path by its last folders, a mapping by its members, and a
    command by its program or, beside other commands, by the options that some of them lack. Other
    values are those of `knob_value`. others: values of the same knob that the label must differ from.
    """
    text = knob_value(value)
    if not isinstance(value, Mapping) and not is_command(value) and "/" not in text:
        return text
    texts = {knob_value(other): other for other in others}
    texts.pop(text, None)
    taken = {short for other in texts.values() for short in _short_texts(other, [text, *texts])}
    return next((short for short in _short_texts(value, list(texts)) if short not in taken), text)


def is_command(value: object) -> bool:
    """Whether a value is a text of several words, which is too long for a label."""
    return isinstance(value, str) and len(value.split()) > 1


def _short_texts(value: object, others: Sequence[str]) -> Iterator[str]:
    """A value in words, shortest first. others: the other values, in full."""
    text = knob_value(value)
    if isinstance(value, Mapping) and value:
        for written in (short_value, knob_value):
            yield ", ".join(f"{key} {written(member)}" for key, member in value.items())
    elif is_command(value):
        yield from _short_commands(text, [other for other in others if is_command(other)])
    elif text.startswith(("http://", "https://")):
        yield urlsplit(text).netloc
    elif "/" in text:
        yield short_name(text)
        folders = text.rstrip("/").split("/")
        for count in range(2, len(folders)):
            yield "/".join(folders[-count:])
    yield text


def _short_commands(command: str, others: Sequence[str]) -> Iterator[str]:
    """Its options that some other command lacks, first with the names of files alone; without such
    options its program.
    """
    program, *options = _options(command)
    options_of_others = [_options(other) for other in others]
    lacking = [
        option
        for option in options
        if any(option not in other_options for other_options in options_of_others)
    ]
    names = [" ".join(map(short_name, option.split(" "))) for option in lacking]
    yield " ".join(names) or f"{short_name(program)} {ELLIPSIS}"
    yield " ".join(lacking) or command


def _options(command: str) -> list[str]:
    """The words of a command, an option together with its value."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        words = command.split()
    options: list[str] = []
    named = False  # whether the word before is an option without a value
    for word in words:
        begins = word.startswith("-")
        if named and not begins:
            options[-1] += f" {word}"
        else:
            options.append(word)
        named = begins and "=" not in word
    return options


def knob_label(
    result: Any, knobs: Sequence[str], separator: str = ", ", among: Sequence[Any] = ()
) -> str:
    """Write the named knobs of a result: `fallback 0.5, rollback 1`. Knobs it lacks are left out.

    result: anything with a policy and its knobs, such as a result or a failure. among: others of
    the same kind; no value is written as that of another of the policy. A peer with weights of its
    own is no faster way to decode the target's, so their precision is always named.
    """
    words = []
    for knob in knobs:
        if knob in result.knobs:
            others = (
                other.knobs[knob]
                for other in among
                if other.policy == result.policy and knob in other.knobs
            )
            words.append(f"{knob} {short_value(result.knobs[knob], others)}")
    weight_precision = getattr(result, "own_weights", None)  # points and failures have none
    return separator.join(
        words if weight_precision is None else [*words, f"weights in {weight_precision}"]
    )


def point_label(result: Any, knobs: Sequence[str], among: Sequence[Any] = ()) -> str:
    """Write a result's policy with the named knobs: `bild (fallback 0.5, rollback 1)`."""
    label = knob_label(result, knobs, among=among)
    return f"{result.policy} ({label})" if label else result.policy


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. In a cell, a bar or a line break would end it, and a bracket begin a
    tag.
    """
    cells = (
        [" ".join(cell.split()).replace("|", r"\|").replace("<", "&lt;") for cell in row]
        for row in rows
    )
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
