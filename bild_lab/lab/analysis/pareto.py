"""Which points of a sweep are worth using: the Pareto front, and the best point at a given loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import Result

TOLERANCE = 1e-9  # two scores of identical outputs may differ in the last bits


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the undominated (cost, quality) points, cheapest first.

    A point is dominated when another costs no more, is no worse, and is better in one of the two. Points with equal
    cost and equal quality are all kept, in their order. Raises UserError for a cost or quality that is not finite.
    """
    _require_finite(points)
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1], index))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


def hypervolume(points: Sequence[tuple[float, float]], reference: tuple[float, float]) -> float:
    """The area that (cost, quality) points dominate up to a reference point, in units of cost times quality.

    Points that do not beat the reference in both cost and quality add nothing. Raises UserError as `pareto_front` does.
    """
    _require_finite([*points, reference])
    cost_limit, quality_limit = reference
    inside = [point for point in points if point[0] < cost_limit and point[1] > quality_limit]
    if not inside:
        return 0.0
    corners = sorted({inside[index] for index in pareto_front(inside)})
    ends = [cost for cost, _ in corners[1:]] + [cost_limit]
    return sum((end - cost) * (quality - quality_limit) for (cost, quality), end in zip(corners, ends, strict=True))


def best_at_loss(results: Sequence[Result], loss: float) -> Result | None:
    """The fastest result whose quality is at least its baseline's minus `loss` points.

    Every result is compared with the baseline's quality in its own setting. The baseline itself, and results
    measured without a baseline, do not count. Among equally fast results the one with better quality wins.
    """
    known = (one for one in results if None not in (one.speedup.value, one.quality.value, one.quality.baseline))
    kept = [
        one for one in known if not one.is_baseline and one.quality.value >= one.quality.baseline - loss - TOLERANCE
    ]
    return max(kept, key=lambda one: (one.speedup.value, one.quality.value), default=None)


def _require_finite(points: Sequence[tuple[float, float]]) -> None:
    for index, point in enumerate(points):
        if not all(map(math.isfinite, point)):
            raise UserError(
                f"a Pareto front needs finite costs and qualities, got {point} at point {index}; leave it out"
            )
