"""Speedup against the batch: curves of points that differ in nothing else, where drafting stops paying, and why.

The more texts a forward serves, the less a drafted row is for free: at batch 1 a forward reads the weights, whatever
the number of rows, and at some batch it multiplies for most of its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

from bild_lab.lab.formatting import point_label
from bild_lab.lab.hashing import plain_numbers
from bild_lab.lab.results.groups import varying_knobs
from bild_lab.lab.schema.json_values import to_json
from bild_lab.lab.schema.result import Result

Seconds = Callable[[float], float]  # of one forward with so many rows


@dataclass(frozen=True)
class BatchPoint:
    """A point at one batch. predicted: the speedup that `predicted_speedup` gives, None without its numbers."""

    batch: int
    result: Result
    predicted: float | None = None


@dataclass(frozen=True)
class BatchCurve:
    """One policy with one choice of knobs, by batch. label: its name, with the knobs that tell it from others."""

    policy: str
    label: str
    points: tuple[BatchPoint, ...]

    @property
    def break_even(self) -> float | None:
        """The batch from which on it is not faster than the baseline; None if it is at all measured ones.

        Interpolated between the two batches around it, over log2(batch) as the curves are drawn.
        """
        known = [(one.batch, one.result.speedup.value) for one in self.points if one.result.speedup.value is not None]
        if not known or known[-1][1] > 1:
            return None
        above = [place for place, (_, speedup) in enumerate(known) if speedup > 1]
        if not above:
            return float(known[0][0])
        (batch, speedup), (later, less) = known[above[-1] : above[-1] + 2]
        return 2 ** (log2(batch) + (speedup - 1) / (speedup - less) * log2(later / batch))


def batch_curves(results: Sequence[Result]) -> list[BatchCurve]:
    """The curves of all points that were measured at more than one batch, in order of appearance."""
    groups: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.is_baseline:
            continue
        setting = {key: value for key, value in plain_numbers(to_json(result.setting)).items() if key != "batch"}
        key = json.dumps([result.policy, plain_numbers(dict(result.knobs)), setting], sort_keys=True, default=str)
        groups.setdefault(key, {})[result.setting.batch] = result
    curves = []
    for group in groups.values():
        if len(group) < 2:
            continue
        of_policy = [one for each in groups.values() for one in each.values() if one.policy == group[min(group)].policy]
        steps = step_seconds(list(group.values()))
        points = tuple(
            BatchPoint(batch, one, predicted_speedup(group.get(1), batch, steps))
            for batch, one in sorted(group.items())
        )
        first = points[0].result
        curves.append(BatchCurve(first.policy, point_label(first, varying_knobs(of_policy)), points))
    return curves


def step_seconds(results: Sequence[Result]) -> Seconds | None:
    """Seconds of one step of the target alone by its rows, from the baselines of points at several batches.

    At batch n a step of the baseline has n rows and emits n tokens. Between two batches, and behind the last one, it is
    linear in the rows. None unless there are two batches.
    """
    known = sorted(
        {
            one.setting.batch: one.setting.batch / one.baseline_tokens_per_s
            for one in results
            if one.baseline_tokens_per_s
        }.items()
    )
    if len(known) < 2:
        return None

    def seconds(rows: float) -> float:
        place = min(max(1, sum(batch < rows for batch, _ in known)), len(known) - 1)
        (low, before), (high, after) = known[place - 1 : place + 1]
        return before + (rows - low) / (high - low) * (after - before)

    return seconds


def predicted_speedup(alone: Result | None, batch: int, step_s: Seconds | None) -> float | None:
    """The speedup at a batch, from what the policy did at batch 1 and the cost of the target's rows.

    A round of n texts is one target forward with the rows of all their drafts, the drafter's forwards with n rows, and
    the host's work for each text. The drafter's forwards are taken to grow with their rows as the target's do.
    alone: the point at batch 1, with its prediction. None if that lacks.
    """
    if alone is None or alone.prediction is None or step_s is None or not alone.counts.target_calls:
        return None
    counts, parts = alone.counts, alone.prediction
    rows = 1 + counts.drafted / counts.target_calls
    per_round = parts.rounds * (1 + _drafting(alone))
    host = max(0.0, per_round / parts.host - per_round / parts.verify)
    round_s = step_s(batch * rows) + _drafting(alone) * step_s(batch) + batch * host * step_s(1)
    return counts.tokens_per_target_call * step_s(batch) / round_s


def _drafting(alone: Result) -> float:
    """Seconds of a round's drafting, in steps of the target."""
    steps = (alone.counts.draft_calls or alone.counts.drafted) / alone.counts.target_calls
    return steps * alone.prediction.cost_ratio


def roofline(weights: int, bytes_per_value: int, bandwidth: float, flops: float) -> Seconds:
    """Seconds of a forward on a device that does nothing but read weights and multiply.

    weights: numbers in all matrices that a forward reads. bandwidth: bytes per second. flops: per second.
    """
    return lambda rows: max(weights * bytes_per_value / bandwidth, 2 * weights * rows / flops)


def device_speedup(alone: Result, batch: int, target_s: Seconds, drafter_s: Seconds | None) -> float:
    """`predicted_speedup` on a device of which only these two costs are known, without a host."""
    counts = alone.counts
    rows, steps = 1 + counts.drafted / counts.target_calls, counts.draft_calls / counts.target_calls
    drafting = 0.0 if drafter_s is None else steps * drafter_s(batch)
    return counts.tokens_per_target_call * target_s(batch) / (target_s(batch * rows) + drafting)
