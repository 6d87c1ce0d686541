"""From decoded examples to the lines of `examples.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bild_lab.engine.trace import Round, Span
from bild_lab.lab.data.examples import Example
from bild_lab.lab.measure.certificate import Certificate
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.schema.timed import BASELINE, METHOD, Timed


def measured_examples(
    examples: Sequence[Example],
    timed: Mapping[str, Sequence[Timed]],
    texts: Mapping[str, Sequence[str]],
    certificates: Sequence[Certificate] = (),
    scores: Sequence[Mapping[str, float]] = (),
    log_probabilities: Mapping[str, Sequence[float]] | None = None,
) -> list[MeasuredExample]:
    """Each example's texts, tokens, latencies and rounds; its certificate, scores and log-probabilities if known."""
    likely = log_probabilities or {}
    found = []
    for index, example in enumerate(examples):
        one = timed[METHOD][index]
        measured = MeasuredExample(
            id=example.id,
            category=example.category,
            turn=example.turn,
            prediction=texts[METHOD][index],
            token_ids=one.token_ids,
            latency_s=one.latency_s,
            rounds=[measured_round(each) for each in one.trace.rounds],
            certificate=asdict(certificates[index]) if certificates else None,
            scores=scores[index] or None if scores else None,
            log_probability=likely[METHOD][index] if likely.get(METHOD) else None,
        )
        if BASELINE in timed:
            other = timed[BASELINE][index]
            measured = replace(
                measured,
                baseline_prediction=texts[BASELINE][index],
                baseline_token_ids=other.token_ids,
                baseline_latency_s=other.latency_s,
                baseline_log_probability=likely[BASELINE][index] if likely.get(BASELINE) else None,
            )
        found.append(measured)
    return found


def with_trace(
    example: MeasuredExample,
    prompt: str,
    spans: Sequence[Span],
    pieces: Callable[[Iterable[int]], Mapping[int, str]],
) -> MeasuredExample:
    """The example with additional data for the trace viewer: the prompt, each stage's times, each token's text."""
    tokens = {*example.token_ids, *(token for one in example.rounds for token in one.drafted)}
    timeline = tuple((stage, round(start, 6), round(end, 6)) for stage, start, end in spans)  # to microseconds
    return replace(
        example,
        prompt=prompt,
        spans=timeline,
        pieces={str(token): piece for token, piece in pieces(sorted(tokens)).items()},
    )


def measured_round(one: Round) -> MeasuredRound:
    """The stored form of a round. Empty statistics are left out."""
    return MeasuredRound(
        drafted=one.drafted,
        accepted=one.accepted,
        next_token=one.next_token,
        fallback=bool(one.stats.get("fallback", False)),
        draft_calls=one.draft_calls,
        statistics={
            name: _rounded(value)
            for name, value in one.stats.items()
            if name != "fallback" and value is not None and value != ()
        },
    )


def _rounded(value: Any) -> Any:
    """Floats rounded to four significant digits, also in lists."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
