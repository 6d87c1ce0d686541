"""From timed examples to the numbers of one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bild_lab.analysis.cost import knows, total
from bild_lab.analysis.statistics import (
    acceptance_by_position,
    acceptance_rate,
    latency_summary,
    nothing_accepted,
    paired_speedup,
)
from bild_lab.data.tasks import Example
from bild_lab.measure.timing import Timed
from bild_lab.metrics import compare, score


def summarize(
    metric: str,
    examples: Sequence[Example],
    timed: dict[str, list[Timed]],
    texts: dict[str, list[str]],
    seed: int,
) -> dict[str, Any]:
    """Quality, latency, speedup and decoding counts of "method", against "baseline" where it was timed."""
    method, baseline = timed["method"], timed.get("baseline")
    latency = np.array([one.latency_s for one in method])  # [examples, repeats]
    tokens = sum(len(one.token_ids) for one in method)
    summary = {
        "quality": quality(metric, examples, texts, seed),
        "latency_s": latency_summary(latency),
        "baseline_latency_s": None,
        "speedup": {"value": None, "low": None, "high": None, "median": None},
        "tokens": tokens,
        "tokens_per_s": tokens / float(np.median(latency, axis=1).sum()),
        **counts(method, tokens),
    }
    if baseline is not None:
        paired = np.array([one.latency_s for one in baseline])
        summary["baseline_latency_s"] = latency_summary(paired)
        summary["speedup"] = asdict(paired_speedup(paired, latency, seed))
    return summary


def agreement(timed: dict[str, list[Timed]]) -> float:
    """The share of examples whose tokens all equal the baseline's."""
    pairs = zip(timed["method"], timed["baseline"], strict=True)
    same = [one.token_ids == other.token_ids for one, other in pairs]
    return sum(same) / len(same)


def quality(metric: str, examples: Sequence[Example], texts: dict[str, list[str]], seed: int) -> dict[str, Any]:
    """The metric of the outputs with its interval, and its paired difference from the baseline's."""
    baseline = texts.get("baseline")
    references = [[text] for text in baseline or []] if metric == "agreement" else [one.references for one in examples]
    result: dict[str, Any] = asdict(score(metric, texts["method"], references, seed=seed))
    result |= dict.fromkeys(("baseline", "difference", "difference_low", "difference_high", "p_value"))
    if baseline is not None:
        difference = compare(metric, texts["method"], baseline, references, seed=seed)
        result["baseline"] = result["value"] - difference.value
        result["difference"] = difference.value
        result["difference_low"], result["difference_high"] = difference.low, difference.high
        result["p_value"] = difference.p_value
    return result


def counts(method: Sequence[Timed], tokens: int) -> dict[str, Any]:
    """What the rounds add up to; null for a method that has none, such as a peer's own loop."""
    traces = [one.trace for one in method]
    rounds = [(len(each.drafted), each.accepted) for trace in traces for each in trace.rounds]
    if not rounds:
        names = ("tokens_per_target_call", "acceptance_rate", "drafted", "accepted", "draft_calls", "target_calls")
        return dict.fromkeys((*names, "nothing_accepted", "fallbacks", "rollbacks", "acceptance_by_position"))
    target_calls = sum(trace.target_calls for trace in traces)
    return {
        "tokens_per_target_call": tokens / target_calls if target_calls else None,
        "acceptance_rate": acceptance_rate(rounds),
        "nothing_accepted": nothing_accepted(rounds),
        "drafted": sum(trace.drafted for trace in traces),
        "accepted": sum(trace.accepted for trace in traces),
        "draft_calls": sum(trace.draft_calls for trace in traces),
        "target_calls": target_calls,
        "fallbacks": sum(trace.fallbacks for trace in traces),
        "rollbacks": sum(trace.rollbacks for trace in traces),
        "acceptance_by_position": acceptance_by_position(rounds),
    }


def cost_account(timed: dict[str, list[Timed]], bytes_per_value: int) -> dict[str, Any] | None:
    """Operations and memory traffic of "method", and over those of "baseline" (BiLD Figure 8).

    None where a forward was not recorded (a peer's own loop) or its architecture's cost is unknown.
    """
    forwards = {name: [each for one in several for each in one.trace.forwards] for name, several in timed.items()}
    own = forwards["method"]
    if not own or not all(knows(each.config) for several in forwards.values() for each in several):
        return None
    spent, tokens = total(own, bytes_per_value), sum(len(one.token_ids) for one in timed["method"])
    account = {
        "flops_per_token": spent.flops / tokens,
        "bytes_per_token": spent.bytes_moved / tokens,
        "flops_per_byte": spent.intensity,
        "forwards": len(own),
        **dict.fromkeys(("flops_ratio", "bytes_ratio", "intensity_ratio")),
    }
    if forwards.get("baseline"):
        base = total(forwards["baseline"], bytes_per_value)
        account["flops_ratio"] = spent.flops / base.flops
        account["bytes_ratio"] = spent.bytes_moved / base.bytes_moved
        account["intensity_ratio"] = account["flops_ratio"] / account["bytes_ratio"]
    return account
