"""From timed examples to the numbers of one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float

from bild_lab.engine.trace import Trace
from bild_lab.lab.analysis.cost import knows, total
from bild_lab.lab.analysis.statistics import (
    acceptance_by_position,
    acceptance_rate,
    accepted_by_depth,
    latency_summary,
    nothing_accepted,
    paired_speedup,
)
from bild_lab.lab.data.examples import Example
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.metrics import compare, score


def summarize(
    metric: str,
    examples: Sequence[Example],
    timed: dict[str, list[Timed]],
    texts: dict[str, list[str]],
    seed: int,
) -> dict[str, Any]:
    """Quality, latency, speedup and decoding counts of "method", against "baseline" where it was timed."""
    baseline = timed.get("baseline")
    return {
        "quality": quality(metric, examples, texts, seed),
        "latency_s": latency_summary(latencies(timed["method"])),
        "baseline_latency_s": None if baseline is None else latency_summary(latencies(baseline)),
        **speed(timed, seed),
        **counts(timed["method"]),
        "categories": by_category(examples, timed, seed),
    }


def latencies(several: Sequence[Timed]) -> Float[np.ndarray, "examples repeats"]:
    return np.array([one.latency_s for one in several])


def speed(timed: dict[str, list[Timed]], seed: int) -> dict[str, Any]:
    """Tokens a second, and how much faster than "baseline" where it was timed.

    tokens_per_s_ratio: of method and baseline, BiTA's "greedy speedup" (§4.1.3) where decoding is greedy. It equals
    the speedup where both emit as many tokens, as lossless methods do.
    """
    tokens, rates = {}, {}
    for name, several in timed.items():
        tokens[name] = sum(len(one.token_ids) for one in several)
        rates[name] = tokens[name] / float(np.median(latencies(several), axis=1).sum())
    told = {"tokens": tokens["method"], "tokens_per_s": rates["method"]}
    if "baseline" not in timed:
        speedup = dict.fromkeys(("value", "low", "high", "median"))
        return {**told, "baseline_tokens_per_s": None, "tokens_per_s_ratio": None, "speedup": speedup}
    return {
        **told,
        "baseline_tokens_per_s": rates["baseline"],
        "tokens_per_s_ratio": rates["method"] / rates["baseline"] if rates["baseline"] else None,
        "speedup": asdict(paired_speedup(latencies(timed["baseline"]), latencies(timed["method"]), seed)),
    }


def by_category(
    examples: Sequence[Example], timed: dict[str, list[Timed]], seed: int
) -> dict[str, dict[str, Any]] | None:
    """Speed and acceptance within each category of the dataset, in its order (BiTA Table 7); None without any."""
    members: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        if example.category is not None:
            members.setdefault(example.category, []).append(index)
    summaries = {}
    for category, indices in members.items():
        own = {name: [several[index] for index in indices] for name, several in timed.items()}
        judged = counts(own["method"])
        kept = {key: judged[key] for key in ("tokens_per_target_call", "acceptance_rate")}
        summaries[category] = {"n_examples": len(indices), **speed(own, seed), **kept}
    return summaries or None


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


def counts(method: Sequence[Timed]) -> dict[str, Any]:
    """What the rounds add up to; null for a method that has none, such as a peer's own loop."""
    traces = [one.trace for one in method]
    rounds = [(each.depth, each.accepted) for trace in traces for each in trace.rounds]
    if not rounds:
        names = ("tokens_per_target_call", "acceptance_rate", "drafted", "accepted", "draft_calls", "target_calls")
        judged = ("nothing_accepted", "fallbacks", "rollbacks", "acceptance_by_position", "exit_layer_mean")
        return dict.fromkeys((*names, *judged, "accepted_by_depth"))
    target_calls = sum(trace.target_calls for trace in traces)
    tokens = sum(len(one.token_ids) for one in method)
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
        "accepted_by_depth": accepted_by_depth([accepted for _, accepted in rounds]),
        "exit_layer_mean": exit_layer_mean(traces),
    }


def exit_layer_mean(traces: Sequence[Trace]) -> float | None:
    """Behind how many layers a token was taken; None for methods that do not exit early (CALM, BiLD §7.2)."""
    exits = [each.stats["exit_layer"] for trace in traces for each in trace.rounds if "exit_layer" in each.stats]
    return sum(exits) / len(exits) if exits else None


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
