"""The acceptance figures that serving engines and Spec-Bench print, from our counts (docs/acceptance.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bild_lab.errors import UserError
from bild_lab.lab.schema.numbers import Counts
from bild_lab.lab.schema.result import Result

Value = float | list[float] | None


@dataclass(frozen=True)
class Totals:
    """The counts that all figures are made of, over the rounds of all examples.

    tokens: emitted. calls: verifications by the target, with and without a draft. drafts: rounds that drafted a token.
    drafted: proposed tokens, of trees all nodes. depth: the sum of the drafts' lengths, of trees of their longest
    branches. accepted: drafted tokens that the target accepted. at: how many drafts had a token accepted at each
    position.
    """

    tokens: int
    calls: int
    drafts: int
    drafted: int
    depth: int
    accepted: int
    at: Sequence[int]


@dataclass(frozen=True)
class Figure:
    """A figure of an engine. name: as the engine prints it. of: from the totals; None if it divides by nothing."""

    name: str
    of: Callable[[Totals], Value]


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _one_more(accepted: int, rounds: int) -> float | None:
    """Accepted tokens of a round, and the target's own."""
    return 1 + accepted / rounds if rounds else None


FIGURES: dict[str, tuple[Figure, ...]] = {
    "vllm": (  # vllm/v1/spec_decode/metrics.py
        Figure("Mean acceptance length", lambda t: _one_more(t.accepted, t.drafts)),
        Figure("Avg Draft acceptance rate", lambda t: _ratio(t.accepted, t.drafted)),
        Figure("Per-position acceptance rate", lambda t: [count / t.drafts for count in t.at]),
    ),
    "sglang": (  # the request's meta_info
        Figure("spec_accept_length", lambda t: _ratio(t.tokens, t.calls)),
        Figure("spec_accept_rate", lambda t: _ratio(t.accepted, t.drafted)),
        Figure("spec_verify_ct", lambda t: t.calls),
    ),
    "tensorrt_llm": (  # the request's performance metrics
        Figure("acceptance_length", lambda t: _ratio(t.tokens, t.calls)),
        Figure("acceptance_rate", lambda t: _ratio(t.accepted, t.depth)),
    ),
    "spec_bench": (  # evaluation/speed.py
        Figure("Mean accepted tokens", lambda t: _one_more(t.accepted, t.calls)),
    ),
}


def require_engines(names: Sequence[str]) -> None:
    """Raise UserError for a name that is not an engine's."""
    if unknown := [name for name in names if name not in FIGURES]:
        raise UserError(f"names must be of {', '.join(FIGURES)}, got {unknown[0]!r}")


def totals(counts: Counts, tokens: int) -> Totals | None:
    """The totals of a result; None if it drafted nothing, or is older than the counts by position."""
    judged = counts.judged_by_position
    if not judged or counts.target_calls is None:
        return None
    return Totals(
        tokens=tokens,
        calls=counts.target_calls,
        drafts=sum(judged[0]),
        drafted=counts.drafted,
        depth=sum(map(sum, judged)),
        accepted=counts.accepted,
        at=[accepted for accepted, _, _ in judged],
    )


def figures(result: Result, engine: str) -> dict[str, Value]:
    """The engine's figures of a result, by the engine's names; all None if they are not known."""
    found = totals(result.counts, result.tokens)
    return {figure.name: None if found is None else figure.of(found) for figure in FIGURES[engine]}
