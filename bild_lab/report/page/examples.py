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
from bild_lab.report.tables import folder_name

MOST_CHARACTERS = 300_000  # of all texts of a setting, to keep the page small
MOST_TRACED = 20  # texts of a point, to keep the page small
# words of both texts, of the baseline's alone, of the point's alone
IN_BOTH, IN_BASELINE, IN_POINT = range(3)
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
        folder_name(result): {example.key: example for example in examples}
        for result in group.selected()
        if not result.is_baseline
        if (
            examples := [
                example
                for example in stored[folder_name(result)]
                if example.baseline_prediction is not None
            ]
        )
    }
    if not measured:
        return None
    labels = {
        folder_name(result): group.label(result)
        for result in group.results
        if folder_name(result) in measured
    }
    known, missing = examples_of([result for result in group.results if result.folder is not None])
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
    decodings = [examples.get(key) for examples in measured.values()]
    first_decoding = next(decoding for decoding in decodings if decoding is not None)
    target = first_decoding.baseline_prediction or ""
    texts = list(
        dict.fromkeys(decoding.prediction for decoding in decodings if decoding is not None)
    )
    return {
        "id": f"{key[0]}" if key[1] == 1 else f"{key[0]}, turn {key[1]}",
        "place": place,
        "source": known.source if known is not None else first_decoding.prompt,
        "references": list(known.references) if known is not None else [],
        "texts": [words_of(target, text) for text in texts],
        "changes": [change(target, text) for text in texts],
        "of": [
            None if decoding is None else texts.index(decoding.prediction) for decoding in decodings
        ],
        "speedups": [None if decoding is None else _speedup(decoding) for decoding in decodings],
    }


def change(baseline_text: str, text: str) -> float:
    """The share of words that differ, from 0 for equal texts to 1 for texts with no common word."""
    baseline_words, words = baseline_text.split(), text.split()
    if baseline_words == words:
        return 0.0
    matcher = SequenceMatcher(None, baseline_words, words, autojunk=False)
    return round(1 - matcher.ratio(), 4)


def words_of(baseline_text: str, text: str) -> list[tuple[int, str]]:
    """Both texts as one: runs of words, each with whose they are."""
    baseline_words, words = baseline_text.split(), text.split()
    matcher = SequenceMatcher(None, baseline_words, words, autojunk=False)
    runs = []
    for _, baseline_start, baseline_stop, start, stop in matcher.get_opcodes():
        baseline_run = " ".join(baseline_words[baseline_start:baseline_stop])
        run = " ".join(words[start:stop])
        if run == baseline_run:
            runs.append((IN_BOTH, run))
        else:
            runs += [(IN_BASELINE, baseline_run), (IN_POINT, run)]
    return [(side, run) for side, run in runs if run]


def _speedup(example: MeasuredExample) -> float | None:
    if not example.baseline_latency_s or example.failed:
        return None
    latency_s = median(example.latency_s)
    return round(median(example.baseline_latency_s) / latency_s, 3) if latency_s else None


def _within(rows: Sequence[dict]) -> list[dict]:
    """The first rows, as long as their texts are not longer than `MOST_CHARACTERS`; at least
    one.
    """
    shown_rows, characters_left = [], MOST_CHARACTERS
    for row in rows:
        texts = [words for text in row["texts"] for _, words in text]
        characters_left -= sum(map(len, [row["source"] or "", *row["references"], *texts]))
        if shown_rows and characters_left < 0:
            break
        shown_rows.append(row)
    return shown_rows


def traced_points(group: Group, stored: Stored) -> list[dict[str, Any]]:
    """Return what the trace viewer shows of a setting: the selected points that have traced texts,
    fastest first.
    """
    shown = []
    for result in group.selected():
        traced = [
            example for example in stored[folder_name(result)] if example.pieces and example.rounds
        ]
        if traced:
            texts = [_traced(example, result.knobs) for example in traced[:MOST_TRACED]]
            label = group.label(result)
            shown.append({"point": folder_name(result), "label": label, "examples": texts})
    return shown


def _traced(example: MeasuredExample, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """One text: its rounds, and its spans in milliseconds."""
    pieces, tokens = example.pieces, iter(example.token_ids)
    rounds = []
    for measured_round in example.rounds:
        accepted_tokens = list(islice(tokens, measured_round.accepted))
        # None also if the text was cut before it
        target_token = next(tokens, None) if measured_round.next_token is not None else None
        rounds.append(_round(measured_round, accepted_tokens, target_token, pieces, knobs))
    spans = [
        (stage, round(1000 * start, 3), round(1000 * end, 3)) for stage, start, end in example.spans
    ]
    return {"id": example.id, "prompt": example.prompt, "rounds": rounds, "spans": spans}


def _round(
    measured_round: MeasuredRound,
    accepted_tokens: Sequence[int],
    target_token: int | None,
    pieces: Mapping[str, str],
    knobs: Mapping[str, Any],
) -> dict[str, Any]:
    """One round. tokens: each with its class in `report.css`; rows: what was drafted, with the
    drafter's numbers.
    """
    drafted = measured_round.drafted
    chain = drafted[: len(accepted_tokens)] == list(accepted_tokens)  # else a tree
    dropped = drafted[measured_round.accepted :]
    tokens = [(token, "accepted") for token in accepted_tokens]
    tokens += [(token, "dropped") for token in dropped if chain]
    if target_token is not None:
        kind = "fallback" if measured_round.fallback else "own"
        tokens.append((target_token, "replacement" if dropped else kind))
    rows = []
    if drafted:
        words = [pieces[str(token)].strip() or "␣" for token in drafted]
        rows.append(("drafted" if chain else "tree of drafts", words))
    for name, knob, side in (
        ("confidence", "fallback", "below"),
        ("distance", "rollback", "above"),
    ):
        values = measured_round.statistics.get(name)
        if values:
            limit = f" ({knob} {side} {knobs[knob]})" if knob in knobs else ""
            texts = ["–" if value is None else f"{value:.3g}" for value in values]
            rows.append((f"{name}{limit}", texts))
    shown = [(pieces[str(token)].replace("\n", "↵\n"), kind) for token, kind in tokens]
    return {
        "tokens": shown,
        "said": _sentence(measured_round, accepted_tokens, target_token),
        "rows": rows,
    }


def _sentence(
    measured_round: MeasuredRound, accepted_tokens: Sequence[int], target_token: int | None
) -> str:
    n_drafted, n_accepted = len(measured_round.drafted), len(accepted_tokens)
    if not n_drafted:
        return "Nothing was drafted; the target wrote the token."
    if target_token is None and n_accepted == n_drafted:
        return "The text ends there."
    sentence = f"{n_accepted} of {n_drafted} drafted tokens were accepted."
    if measured_round.fallback:
        sentence += " The drafter handed over, as it was not confident enough."
    return sentence
