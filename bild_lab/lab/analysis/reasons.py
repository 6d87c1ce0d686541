"""Why a point is as fast as it is: the parts of its time, and what it would gain if one of them were cheaper.

The parts come from the traced pass, as shares of its time, and are applied to the timed speedup: the waits of the
traced pass, and a machine that was slower in one of the two, do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bild_lab.engine.ppd.theory import latency_per_token
from bild_lab.lab.schema.result import Result

LONGER = 2  # windows are considered up to so many times the measured one
LEAST_GAIN = 1.01  # a change that helps less is not named
DRAFTER, VERIFICATION, HOST, REJECTIONS, WINDOW, MISSES = (
    "drafter",
    "verification",
    "host",
    "rejections",
    "window",
    "misses",
)


@dataclass(frozen=True)
class Change:
    """One change, and the speedup that the point would have with it.

    what: the drafter's time, the time that verification takes above one token of the target, the host's time, the
    rejections, the pipeline's wrong predictions (each halved), or the window. value: afterwards, the acceptance rate,
    the window, or the cost in tokens of the target (None if not known, or for the host).
    """

    what: str
    value: float | None
    speedup: float


@dataclass(frozen=True)
class Reasons:
    """What a point's speedup is made of.

    shares: each stage's share of the method's time. drafter_cost: a drafter step, and verification: checking one
    draft, both in tokens of the target alone; None if the point drafts nothing or its baseline is not the target.
    changes: the one that helps most first; only those that help.
    """

    shares: Mapping[str, float]
    drafter_cost: float | None
    verification: float | None
    changes: Sequence[Change]


def reasons(result: Result) -> Reasons | None:
    """Explain a point; None if its stages were not traced, or if it has no speedup to explain."""
    speedup, stages = result.speedup.value, result.stages_s
    if result.is_baseline or speedup is None or not stages or sum(stages.values()) <= 0:
        return None
    shares = {stage: seconds / sum(stages.values()) for stage, seconds in stages.items()}
    drafter_cost, verification = _costs(result) or (None, None)
    found = [Change(HOST, None, speedup / (1 - shares["host"] / 2))]
    if result.pipeline is not None:
        found += _fewer_misses(result, shares)
    elif shares["draft"] and result.counts.drafted:
        half = None if drafter_cost is None else drafter_cost / 2
        found.append(Change(DRAFTER, half, speedup / (1 - shares["draft"] / 2)))
    if verification is not None and verification > 1:
        saved = shares["verify"] * (verification - 1) / verification / 2
        found.append(Change(VERIFICATION, (1 + verification) / 2, speedup / (1 - saved)))
    if verification is not None:
        found += _other_window(result, shares, verification)
    found += _fewer_rejections(result, shares)
    helpful = [change for change in found if change.speedup > LEAST_GAIN * speedup]
    return Reasons(shares, drafter_cost, verification, sorted(helpful, key=lambda change: -change.speedup))


def _costs(result: Result) -> tuple[float, float] | None:
    """A drafter step and a verification, in tokens of the target alone at the timed pass's pace; None if not known.

    The steps of the prediction differ by one cost each, so the costs can be read back from them: with D and V the
    drafting and the verification of a round in tokens of the target, and P tokens a round, `rounds` is P / (D + 1) and
    `verify` P / (D + V). D / V is that of the traced seconds.
    """
    predicted, stages = result.prediction, result.stages_s
    if predicted is None or not stages["verify"]:
        return None
    ratio = stages["draft"] / stages["verify"]
    verification = predicted.rounds / (predicted.verify * (ratio + 1) - predicted.rounds * ratio)
    baseline_s = predicted.prefill * sum(stages.values())
    pace = predicted.prefill / predicted.measured  # timed seconds of the method over traced ones
    target_s, traced_target_s = baseline_s - pace * stages["prefill"], baseline_s - stages["prefill"]
    if target_s <= 0:
        return None
    factor = pace * traced_target_s / target_s
    return predicted.cost_ratio * factor, verification * factor


def _fewer_rejections(result: Result, shares: Mapping[str, float]) -> list[Change]:
    """Half as many rejections at every position of a draft, with drafts as long as they were."""
    kept, rates = result.counts.accepted_by_depth, result.counts.acceptance_by_position
    if not kept or not rates or result.counts.acceptance_rate in (None, 1.0):
        return []
    total, before, reached = 0.0, 1.0, 1.0  # shares of rounds; `reached` with the better drafter
    for share, rate in zip(kept, rates, strict=False):  # positions at which nothing was accepted have no share
        drafted = share / rate / before  # of the rounds that accepted all tokens before, how many drafted one here
        reached *= drafted * (1 + rate) / 2
        total, before = total + reached, share
    fewer_rounds = (1 + sum(kept)) / (1 + total)
    return [Change(REJECTIONS, (1 + result.counts.acceptance_rate) / 2, _with_rounds(result, shares, fewer_rounds))]


def _other_window(result: Result, shares: Mapping[str, float], verification: float) -> list[Change]:
    """The best window, if drafts have a fixed length and another one is faster.

    Every row of a verification is taken to cost the same. Positions behind the measured window are accepted like its
    last one.
    """
    window, kept = None if result.prediction is None else result.prediction.window, result.counts.accepted_by_depth
    rates = result.counts.acceptance_by_position
    if window is None or not kept or not rates or rates[-1] is None or result.knobs.get("window") != window:
        return []
    drafting, host = (verification * shares[stage] / shares["verify"] for stage in ("draft", "host"))
    above_one = max(verification - 1, 0.0)
    depths = [kept[place] if place < len(kept) else 0.0 for place in range(window)]
    depths += [depths[-1] * rates[-1] ** extra for extra in range(1, (LONGER - 1) * window + 1)]

    def cost_of_token(length: int) -> float:
        round_cost = (drafting + above_one) * length / window + 1 + host
        return round_cost / (1 + sum(depths[:length]))

    best = min(range(1, LONGER * window + 1), key=cost_of_token)
    return [Change(WINDOW, best, _with_rounds(result, shares, cost_of_token(best) / cost_of_token(window)))]


def _fewer_misses(result: Result, shares: Mapping[str, float]) -> list[Change]:
    """Half as many wrong predictions of the pipeline, by Theorem 4.1."""
    pipeline = result.pipeline
    if pipeline.match_rate is None or pipeline.layers is None:
        return []
    better = (1 + pipeline.match_rate) / 2
    units = [latency_per_token(pipeline.layers, pipeline.exit_layer, rate) for rate in (pipeline.match_rate, better)]
    saved = (shares["draft"] + shares["verify"]) * (1 - units[1] / units[0])
    return [Change(MISSES, better, result.speedup.value / (1 - saved))]


def _with_rounds(result: Result, shares: Mapping[str, float], factor: float) -> float:
    """The speedup if everything but the prefill took `factor` times as long."""
    return result.speedup.value / (shares["prefill"] + (1 - shares["prefill"]) * factor)
