"""Speedups over the number of texts that decode at once, a curve for each policy with its knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

from bild_lab.lab.schema.formatting import point_label, short_name
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import (
    HASH_KEYS,
    by_setting,
    differing_in,
    differing_keys,
    setting_value,
    varying_knobs,
)


@dataclass(frozen=True)
class BatchCurve:
    """One policy with one choice of knobs, a point for each batch. label: its name, with the knobs
    that tell it.
    """

    policy: str
    label: str
    points: tuple[Result, ...]

    @property
    def break_even(self) -> float | None:
        """The batch from which on it is not faster than the baseline; None if it is at all measured
        ones.

        Interpolated between the two batches around it, over log2(batch) as the curves are drawn.
        """
        speedups = [
            (point.setting.batch, point.speedup.value)
            for point in self.points
            if point.speedup.value is not None
        ]
        if not speedups or speedups[-1][1] > 1:
            return None
        faster = [index for index, (_, speedup) in enumerate(speedups) if speedup > 1]
        if not faster:
            return float(speedups[0][0])
        batch, speedup = speedups[faster[-1]]
        next_batch, next_speedup = speedups[faster[-1] + 1]
        share = (speedup - 1) / (speedup - next_speedup)
        return 2 ** (log2(batch) + share * log2(next_batch / batch))


def batch_curves(results: Sequence[Result]) -> list[BatchCurve]:
    """The curves of all points that were measured at more than one batch, in order of
    appearance.
    """
    groups = differing_in("batch", results)
    results_of_policy: dict[str, list[Result]] = {}
    for group in groups:
        for result in group.values():
            results_of_policy.setdefault(result.policy, []).append(result)
    curves = []
    for group in groups:
        if len(group) < 2:
            continue
        points = tuple(result for _, result in sorted(group.items()))
        policy = points[0].policy
        knobs = varying_knobs(results_of_policy[policy])
        label = point_label(points[0], knobs, results_of_policy[policy])
        curves.append(BatchCurve(policy, label, points))
    return _with_distinct_labels(curves)


def _with_distinct_labels(curves: Sequence[BatchCurve]) -> list[BatchCurve]:
    """The curves; those of one label also say in what their settings differ: `bild, seed 1`."""
    labelled_curves = []
    for curve in curves:
        of_label = [
            same_curve.points[:1] for same_curve in curves if same_curve.label == curve.label
        ]
        keys = differing_keys([by_setting(points)[0] for points in of_label])
        setting = curve.points[0].setting
        words = [
            f"{key} {short_name(str(setting_value(setting, key)))}"
            for key in keys
            if key not in (*HASH_KEYS, "batch")
        ]
        labelled_curves.append(replace(curve, label=", ".join([curve.label, *words])))
    return labelled_curves
