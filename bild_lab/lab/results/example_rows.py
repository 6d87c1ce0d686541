"""What a result keeps of every example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from bild_lab.engine.trace import Round, Span
from bild_lab.lab.data.examples import Example
from bild_lab.lab.measure.certificate import Certificate
from bild_lab.lab.measure.timing import BASELINE, METHOD, Timed


def example_rows(
    examples: Sequence[Example],
    timed: dict[str, list[Timed]],
    texts: dict[str, list[str]],
    certificates: Sequence[Certificate] = (),
) -> list[dict[str, Any]]:
    """A row for each example: texts, tokens, latencies in seconds, rounds, and the certificate where there is one."""
    rows = []
    for index, example in enumerate(examples):
        one = timed[METHOD][index]
        row = {
            "id": example.id,
            **({} if example.category is None else {"category": example.category}),
            **({} if example.turn == 1 else {"turn": example.turn}),
            "prediction": texts[METHOD][index],
            "token_ids": one.token_ids,
            "latency_s": one.latency_s,
            "rounds": [_round(each) for each in one.trace.rounds],
        }
        if BASELINE in timed:
            other = timed[BASELINE][index]
            row |= {
                "baseline_prediction": texts[BASELINE][index],
                "baseline_token_ids": other.token_ids,
                "baseline_latency_s": other.latency_s,
            }
        if certificates:
            row["certificate"] = asdict(certificates[index])
        rows.append(row)
    return rows


def with_trace(
    row: dict[str, Any], prompt: str, spans: Sequence[Span], pieces: Callable[[Iterable[int]], dict[int, str]]
) -> dict[str, Any]:
    """The row with what the trace viewer needs besides: the prompt, every stage's seconds, the text of every token."""
    tokens = {*row["token_ids"], *(token for one in row["rounds"] for token in one["drafted"])}
    timeline = [(stage, round(start, 6), round(end, 6)) for stage, start, end in spans]  # to microseconds
    return {**row, **({"spans": timeline} if spans else {}), "prompt": prompt, "pieces": pieces(sorted(tokens))}


def _round(one: Round) -> dict[str, Any]:
    """A round's counts and a method's own statistics; lists of numbers that are empty are left out."""
    return {
        "drafted": list(one.drafted),
        "accepted": one.accepted,
        "draft_calls": one.draft_calls,
        "next_token": one.next_token,
        **{name: _rounded(value) for name, value in one.stats.items() if value not in ((), None)},
    }


def _rounded(value: Any) -> Any:
    """Fractions to four digits."""
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
