"""Which points of a sweep are worth using: the Pareto front, and the best point at a given loss."""

import math
from collections.abc import Sequence

from bild_lab.errors import UserError
from bild_lab.lab.schema.result import Result

# Two scores of identical outputs may differ in the last bits.
_TOLERANCE = 1e-9


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the undominated (cost, quality) points, cheapest first.

    A point is dominated when another costs no more, is no worse, and is better in one of the two.
    Points with equal cost and equal quality do not dominate each other: all of them are kept, in their order.

    Raises:
        UserError: a cost or a quality is not finite, so there is no order.
    """
    _require_finite(points)
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1], index))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


def hypervolume(points: Sequence[tuple[float, float]], reference: tuple[float, float]) -> float:
    """Return the area that (cost, quality) points dominate up to a reference point, in units of cost times quality.

    Points that do not beat the reference in both cost and quality add nothing.

    Raises:
        UserError: a cost or a quality, of a point or of the reference, is not finite.
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
    """Return the fastest result whose quality is at least its baseline's minus `loss` points.

    Every result is compared with the baseline's quality in its own setting. The baseline itself, and results
    measured without a baseline, do not count. Among equally fast results the one with better quality wins.
    """
    kept = [result for result in results if _loses_at_most(result, loss)]
    return max(kept, key=lambda result: (result.speedup.value, result.quality.value), default=None)


def _loses_at_most(result: Result, loss: float) -> bool:
    quality = result.quality
    if result.is_baseline or None in (result.speedup.value, quality.value, quality.baseline):
        return False
    return quality.value >= quality.baseline - loss - _TOLERANCE


def _require_finite(points: Sequence[tuple[float, float]]) -> None:
    for index, (cost, quality) in enumerate(points):
        if not (math.isfinite(cost) and math.isfinite(quality)):
            raise UserError(
                f"a Pareto front needs finite costs and qualities, got cost {cost} and quality {quality} "
                f"at point {index}; leave that point out"
            )
