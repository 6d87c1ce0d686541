"""Why a point has its speed: tokens in a round, the cost of drafting and of verifying, the stages'
shares of the time.
"""

from __future__ import annotations

from bild_lab.lab.measure.prediction import Reasons, reasons
from bild_lab.lab.schema.formatting import number, percent, times
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.groups import Group
from bild_lab.report.provenance import disturbance


def reason_lines(group: Group) -> list[tuple[str, str]]:
    """Label and explanation of each policy's fastest point at no loss, or of its fastest.

    They read `bild (fallback 0.5), 1.98×` and `6.90 tokens a call (α 98 %); a drafter step costs
    13 % …`. Points that were not traced have none.
    """
    lines = []
    for policy in group.policies:
        results = group.of_policy(policy)
        best = best_at_loss(results, 0.0) or results[0]
        best_reasons = reasons(best)
        if best_reasons is not None:
            speed = ", ".join(filter(None, [times(best.speedup.value), disturbance(best)]))
            lines.append((f"{group.label(best)}, {speed}", _explanation(best, best_reasons)))
    return lines


def _explanation(result: Result, point_reasons: Reasons) -> str:
    """What the speedup is made of."""
    parts = _gains(result)
    drafter_cost, verification = point_reasons.drafter_cost, point_reasons.verification
    if drafter_cost is not None and verification is not None:
        step = percent(drafter_cost, 0 if drafter_cost >= 0.095 else 1)
        parts.append(
            f"a drafter step costs {step} of a target token (c), checking a draft"
            f" {number(verification)} tokens"
        )
    stages = [
        f"{stage} {percent(share)}"
        for stage, share in point_reasons.shares.items()
        if share >= 0.005
    ]
    return "; ".join([*parts, f"time: {', '.join(stages)}"]) + "."


def _gains(result: Result) -> list[str]:
    """What is gained in a round, before any cost."""
    counts, pipeline = result.counts, result.pipeline
    if pipeline is not None:
        right = f"{percent(pipeline.match_rate)} of the predictions right"
        if pipeline.theorem is None:
            return [right]
        return [f"{right}, for which Theorem 4.1 gives {times(pipeline.theorem)}"]
    if counts.drafted:
        if counts.tokens_per_target_call is None:
            return []
        accepted = percent(counts.acceptance_rate)
        return [f"{number(counts.tokens_per_target_call)} tokens a call (α {accepted})"]
    if counts.exit_layer_mean is None:
        return []
    return [f"a token leaves after {number(counts.exit_layer_mean, 1)} layers on average"]
