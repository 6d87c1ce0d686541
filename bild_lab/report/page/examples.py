"""Single texts on the page: what each point changed in them, and how they were written round by
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice
from statistics import median
from typing import Any

from bild_lab.lab.data.prompts import Example
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.store.groups import Group, setting_title
from bild_lab.lab.store.inputs import examples_of
from bild_lab.report.page.tables import name_of

MOST_CHARACTERS = 300_000  # of all texts of a setting, to keep the page small
MOST_TRACED = 20  # texts of a point, to keep the page small
SAME, BEFORE, AFTER = range(3)  # words of both texts, of the baseline's alone, of the point's alone
Key = tuple[str, int]
Stored = Mapping[str, Sequence[MeasuredExample]]  # the examples of each selected point, by its name


def text_browser(group: Group, stored: Stored) -> dict[str, Any] | None:
    """Return what the browser shows of a setting: the selected points with the baseline's text
    beside theirs.

    An example has its distinct texts, each as runs of words, with the share of words that differ
    from the baseline's text; a point has the place of its text among them and its speedup there.
    Examples whose texts differ most come first, as many as `MOST_CHARACTERS` allow. None if no text
    was stored beside a baseline's.
    """
    measured = {
        name_of(result): {one.key: one for one in examples}
        for result in group.selected()
        if not result.is_baseline
        if (
            examples := [
                one for one in stored[name_of(result)] if one.baseline_prediction is not None
            ]
        )
    }
    if not measured:
        return None
    labels = {name_of(one): group.label(one) for one in group.results if name_of(one) in measured}
    known, missing = examples_of([one for one in group.results if one.folder is not None])
    keys = list(dict.fromkeys(key for examples in measured.values() for key in examples))
    rows = [_row(place, key, measured, (known or {}).get(key)) for place, key in enumerate(keys)]
    return {
        "title": setting_title(group.setting),
        "baseline": str(group.setting.baseline),
        "missing": missing,
        "count": len(rows),
        "points": [{"point": name, "label": labels[name]} for name in measured],
        "examples": _within(sorted(rows, key=lambda row: -max(row["changes"]))),
    }


def _row(
    place: int,
    key: Key,
    measured: Mapping[str, Mapping[Key, MeasuredExample]],
    known: Example | None,
) -> dict:
    """One example. of: for each point, the place of its text, or None if it has none."""
    own = [examples.get(key) for examples in measured.values()]
    first = next(one for one in own if one is not None)
    target = first.baseline_prediction or ""
    texts = list(dict.fromkeys(one.prediction for one in own if one is not None))
    return {
        "id": f"{key[0]}" if key[1] == 1 else f"{key[0]}, turn {key[1]}",
        "place": place,
        "source": known.source if known is not None else first.prompt,
        "references": list(known.references) if known is not None else [],
        "texts": [words_of(target, text) for text in texts],
        "changes": [change(target, text) for text in texts],
        "of": [None if one is None else texts.index(one.prediction) for one in own],
        "speedups": [None if one is None else _speedup(one) for one in own],
    }


def change(before: str, after: str) -> float:
    """The share of words that differ, from 0 for equal texts to 1 for texts with no common word."""
    words = before.split(), after.split()
    if words[0] == words[1]:
        return 0.0
    return round(1 - SequenceMatcher(None, *words, autojunk=False).ratio(), 4)


def words_of(before: str, after: str) -> list[tuple[int, str]]:
    """Both texts as one: runs of words, each with whose they are."""
    mine, theirs = before.split(), after.split()
    runs = []
    for _, start, end, begin, stop in SequenceMatcher(
        None, mine, theirs, autojunk=False
    ).get_opcodes():
        if mine[start:end] == theirs[begin:stop]:
            runs.append((SAME, " ".join(mine[start:end])))
        else:
            runs += [(BEFORE, " ".join(mine[start:end])), (AFTER, " ".join(theirs[begin:stop]))]
    return [(whose, words) for whose, words in runs if words]


def _speedup(one: MeasuredExample) -> float | None:
    if not one.baseline_latency_s or not (own := median(one.latency_s)):
        return None
    return round(median(one.baseline_latency_s) / own, 3)


def _within(rows: Sequence[dict]) -> list[dict]:
    """The first rows, as long as their texts are not longer than `MOST_CHARACTERS`; at least
    one.
    """
    kept, left = [], MOST_CHARACTERS
    for row in rows:
        texts = [words for text in row["texts"] for _, words in text]
        left -= sum(map(len, [row["source"] or "", *row["references"], *texts]))
        if kept and left < 0:
            break
        kept.append(row)
    return kept


def traced_points(group: Group, stored: Stored) -> list[dict[str, Any]]:
    """Return what the trace viewer shows of a setting: the selected points that have traced texts,
    fastest first.
    """
    shown = []
    for result in group.selected():
        traced = [one for one in stored[name_of(result)] if one.pieces and one.rounds]
        if traced:
            texts = [_traced(one, result.knobs) for one in traced[:MOST_TRACED]]
            label = group.label(result)
            shown.append({"point": name_of(result), "label": label, "examples": texts})
    return shown


def _traced(example: MeasuredExample, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """One text: its rounds, and its spans in milliseconds."""
    pieces, tokens = example.pieces, iter(example.token_ids)
    rounds = []
    for one in example.rounds:
        kept = list(islice(tokens, one.accepted))
        # None also if the text was cut before it
        own = next(tokens, None) if one.next_token is not None else None
        rounds.append(_round(one, kept, own, pieces, knobs))
    spans = [
        (stage, round(1000 * start, 3), round(1000 * end, 3)) for stage, start, end in example.spans
    ]
    return {"id": example.id, "prompt": example.prompt, "rounds": rounds, "spans": spans}


def _round(
    one: MeasuredRound,
    kept: Sequence[int],
    own: int | None,
    pieces: Mapping[str, str],
    knobs: Mapping[str, Any],
) -> dict[str, Any]:
    """One round. tokens: each with its class in `report.css`; rows: what was drafted, with the
    drafter's numbers.
    """
    chain = one.drafted[: len(kept)] == list(kept)  # else a tree
    dropped = one.drafted[one.accepted :]
    tokens = [(token, "accepted") for token in kept]
    tokens += [(token, "dropped") for token in dropped if chain]
    if own is not None:
        tokens.append((own, "replacement" if dropped else "fallback" if one.fallback else "own"))
    rows = []
    if one.drafted:
        words = [pieces[str(token)].strip() or "␣" for token in one.drafted]
        rows.append(("drafted" if chain else "tree of drafts", words))
    for name, knob, side in (
        ("confidence", "fallback", "below"),
        ("distance", "rollback", "above"),
    ):
        if values := one.statistics.get(name):
            limit = f" ({knob} {side} {knobs[knob]})" if knob in knobs else ""
            rows.append(
                (f"{name}{limit}", ["–" if value is None else f"{value:.3g}" for value in values])
            )
    shown = [(pieces[str(token)].replace("\n", "↵\n"), kind) for token, kind in tokens]
    return {"tokens": shown, "said": _said(one, kept, own), "rows": rows}


def _said(one: MeasuredRound, kept: Sequence[int], own: int | None) -> str:
    if not one.drafted:
        return "Nothing was drafted; the target wrote the token."
    if own is None and len(kept) == len(one.drafted):
        return "The text ends there."
    asked = " The drafter handed over, as it was not confident enough." if one.fallback else ""
    return f"{len(kept)} of {len(one.drafted)} drafted tokens were accepted.{asked}"
