"""Why each policy is as fast as it is, one line each, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable

from bild_lab.lab.analysis.pareto import best_at_loss
from bild_lab.lab.analysis.prediction import (
    DRAFTER,
    HOST,
    MISSES,
    REJECTIONS,
    VERIFICATION,
    WINDOW,
    Change,
    Reasons,
    reasons,
)
from bild_lab.lab.formatting import number, percent, point_label, times
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import Result


def reason_lines(group: Group) -> list[tuple[str, str]]:
    """Label and explanation of each policy's fastest point at no loss, or of its fastest; none for what is not traced.

    `bild (fallback 0.5), 1.98×` and `6.90 tokens a call (α 98 %); a drafter step costs 13 % …`.
    """
    lines = []
    for policy in group.policies:
        results = group.of_policy(policy)
        chosen = best_at_loss(results, 0.0) or results[0]
        if (why := reasons(chosen)) is not None:
            label = f"{point_label(chosen, group.knobs(chosen))}, {times(chosen.speedup.value)}"
            lines.append((label, explanation(chosen, why)))
    return lines


def explanation(result: Result, why: Reasons) -> str:
    """What the speedup is made of, and the change that would help most."""
    return f"{'; '.join([*_gained(result), *_spent(why)])}. {_helpful(why)}"


def _gained(result: Result) -> list[str]:
    """What is gained in a round, before any cost."""
    counts, pipeline = result.counts, result.pipeline
    if pipeline is not None:
        rate = percent(pipeline.match_rate)
        theorem = "" if pipeline.theorem is None else f", for which Theorem 4.1 gives {times(pipeline.theorem)}"
        return [f"{rate} of the predictions right{theorem}"]
    if counts.exit_layer_mean is not None and not counts.drafted:
        return [f"a token leaves after {number(counts.exit_layer_mean, 1)} layers on average"]
    if not counts.drafted or counts.tokens_per_target_call is None:
        return []
    return [f"{number(counts.tokens_per_target_call)} tokens a call (α {percent(counts.acceptance_rate)})"]


def _spent(why: Reasons) -> list[str]:
    costs = []
    if why.drafter_cost is not None and why.verification is not None:
        step, check = _share(why.drafter_cost), number(why.verification)
        costs = [f"a drafter step costs {step} of a target token (c), checking a draft {check} tokens"]
    stages = [f"{stage} {percent(share)}" for stage, share in why.shares.items() if share >= 0.005]
    return [*costs, f"time: {', '.join(stages)}"]


def _helpful(why: Reasons) -> str:
    """The change that helps most, and the best that needs no other model."""
    if not why.changes:
        return "No part of it, made cheaper, would help."
    best = why.changes[0]
    text = f"Most would help: {_NAMES[best.what](best)}, {times(best.speedup)}"
    for change in why.changes[1:]:
        if change.what == WINDOW:
            text += f"; {_NAMES[WINDOW](change)} alone, {times(change.speedup)}"
    return f"{text}."


def _share(value: float | None) -> str:
    """A cost in percent, with a decimal if it is small."""
    return percent(value, 0 if value is None or value >= 0.095 else 1)


_NAMES: dict[str, Callable[[Change], str]] = {
    DRAFTER: lambda change: "a drafter twice as fast" + ("" if change.value is None else f" ({_share(change.value)})"),
    VERIFICATION: lambda change: f"checking for {number(change.value)} tokens, half of what it costs above one",
    HOST: lambda change: "half the host’s time",
    REJECTIONS: lambda change: f"half as many rejections (α {percent(change.value)})",
    WINDOW: lambda change: f"window {number(change.value, 0)}",
    MISSES: lambda change: f"half as many wrong predictions ({percent(change.value)} right)",
}
