"""The numbers that a run gives for a paper's figure or table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.engine.speculative_theory import expected_tokens
from bild_lab.lab.analysis.statistics import best_at_loss
from bild_lab.lab.schema.numbers import Quality, Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.papers import points as rows
from bild_lab.papers.match_rates import TOTAL, Rate
from bild_lab.papers.points import RowOf, baseline_quality, curves
from bild_lab.papers.published import Cell, Key

MINIMAL_LOSS, ONE_POINT = 0.12, 1.19  # the largest losses of quality, in points, in BiLD's Table 1

Number = float | Speedup | Quality | None
Cells = Callable[[Sequence[Result]], list[Cell]]


def cell(data: str, row: str, quantity: str, number: Number, formula: float | None = None) -> list[Cell]:
    """The number as a cell; no cell for a number that is not known."""
    if isinstance(number, Speedup | Quality):
        value, bounds = number.value, (number.low, number.high)
    else:
        value, bounds = number, (None, None)
    return [] if value is None else [Cell(data, row, quantity, value, *bounds, formula)]


def at_losses(row: RowOf) -> Cells:
    """The fastest point of each curve at minimal loss and at one point of loss, and its best text."""

    def cells(points: Sequence[Result]) -> list[Cell]:
        found = []
        for (panel, name), curve in curves(points, row).items():
            for words, loss in (("minimal loss", MINIMAL_LOSS), ("one point of loss", ONE_POINT)):
                if (best := best_at_loss(curve, loss)) is not None:
                    found += cell(panel, name, f"speedup at {words}", best.speedup)
                    found += cell(panel, name, f"quality at {words}", best.quality)
            best = max(curve, key=lambda point: point.quality.value)
            found += cell(panel, name, "best quality", best.quality)
        return [*found, *_vanilla(points)]

    return cells


def replaced_share(points: Sequence[Result]) -> list[Cell]:
    """BiLD Figure 2: the smallest share of replaced tokens with which quality reaches the large model's."""
    found = []
    for (panel, name), curve in curves(points, lambda _: "small model").items():
        if (quality := baseline_quality(curve)) is not None:
            enough = [replaced(point) for point in curve if point.quality.value >= quality - MINIMAL_LOSS]
            found += cell(panel, name, "share replaced at the target's quality", min(enough, default=None))
    return [*found, *_vanilla(points)]


def replaced(point: Result) -> float:
    """The share of a run's tokens that the target put in place of drafted ones."""
    return point.counts.rollbacks / point.tokens


def cost_ratios(points: Sequence[Result]) -> list[Cell]:
    """BiLD Figure 8: the costs of the fastest point at minimal loss, relative to the baseline's."""
    found = []
    for (panel, name), curve in curves(points, rows.alignment).items():
        best = best_at_loss(curve, MINIMAL_LOSS)
        if best is not None and best.cost is not None:
            found += cell(panel, name, "FLOPs", best.cost.flops_ratio)
            found += cell(panel, name, "memory operations", best.cost.bytes_ratio)
            found += cell(panel, name, "arithmetic intensity", best.cost.intensity_ratio)
            found += cell(panel, name, "speedup", best.speedup)
    return found


def against_speculative(points: Sequence[Result]) -> list[Cell]:
    """BiLD §4.2: the fastest speculative point, and how far BiLD is ahead of it at equal quality and at equal speed."""
    timed = [point for point in points if point.speedup.value is not None]
    both, found = curves(timed, rows.unaligned_or_speculative), []
    for (panel, name), curve in both.items():
        if name != "speculative":
            continue
        rival = max(curve, key=lambda point: point.speedup.value)
        found += cell(panel, name, "speedup", rival.speedup) + cell(panel, name, "quality", rival.quality)
        bild = both.get((panel, "bild"), [])
        as_good = [point.speedup.value for point in bild if point.quality.value >= rival.quality.value - MINIMAL_LOSS]
        as_fast = [point.quality.value for point in bild if point.speedup.value >= rival.speedup.value]
        for what, best, own in (("speedup", as_good, rival.speedup.value), ("quality", as_fast, rival.quality.value)):
            found += cell(panel, "bild", f"{what} ahead of speculative", max(best) - own if best else None)
    return found


def table(
    row: RowOf,
    quantities: Mapping[str, Callable[[Result], Number]],
    panel: RowOf = rows.dataset,
    by_temperature: bool = False,
) -> Cells:
    """A table of these quantities, each the greatest of a row's points: a row may have a point for each window."""

    def cells(points: Sequence[Result]) -> list[Cell]:
        found = []
        for point in points:
            name, where = row(point), panel(point)
            if not point.is_baseline and name is not None and where is not None:
                at = f", temperature {point.setting.temperature:g}" if by_temperature else ""
                for quantity, number in quantities.items():
                    found += cell(where, name, f"{quantity}{at}", number(point))
        return greatest(found)

    return cells


def theorem(point: Result) -> float | None:
    """The speedup by Theorem 3.8; None if nothing was predicted."""
    return None if point.prediction is None else point.prediction.theorem


def by_category(points: Sequence[Result]) -> list[Cell]:
    """BiTA Table 7: tokens per second over the baseline's, by category of the data set."""
    found = []
    for point in points:
        if not point.is_baseline and point.categories:
            for category, part in {**point.categories, "overall": point}.items():
                found += cell(category, rows.pair(point), "greedy speedup", part.tokens_per_s_ratio)
    return greatest(found)


def theorem_table(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Table 4: the measured speedup beside Theorem 3.8 with the run's own α and c."""
    found = []
    for point in points:
        name, predicted = rows.drafter(point), theorem(point)
        if name is not None and predicted is not None:
            row = f"{name}, window {point.knobs['window']}, temperature {point.setting.temperature:g}"
            found += cell(rows.dataset(point), row, "speedup", point.speedup, predicted)
    return found


def tokens_per_call(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Figure 2: tokens per target call beside Equation 1 at the run's own α."""
    found = []
    for point in points:
        rate = point.counts.acceptance_rate
        if point.policy in ("synthetic", "synthetic_with_cost") and rate is not None:
            window, name = point.knobs["window"], f"drafted right with {point.knobs['acceptance_rate']:g}"
            calls, expected = point.counts.tokens_per_target_call, expected_tokens(rate, window)
            found += cell(f"window {window}", name, "tokens per target call", calls, expected)
    return found


def pipeline_trade_off(points: Sequence[Result]) -> list[Cell]:
    """PPD Figure 2: match rate, the latency that the theorem gives for it, mean number of processes, and speedup."""
    found = []
    for (panel, name), several in curves(points, rows.pipeline).items():
        for point in several:
            pipeline = point.pipeline
            found += cell(panel, name, "match rate", pipeline.match_rate)
            latency = None if pipeline.theorem is None else 1 / pipeline.theorem
            found += cell(panel, name, "latency per token by the theorem", latency)
            found += cell(panel, name, "processes on average", pipeline.compute_units / pipeline.latency_units)
            found += cell(panel, name, "speedup", point.speedup)
    return found


def pipeline_compute(points: Sequence[Result]) -> list[Cell]:
    """PPD Figure 4: layers run per token and the speedup, each beside Theorem 4.1 with the measured match rate."""
    found = []
    for (panel, name), several in curves(points, rows.pipeline).items():
        for point in several:
            pipeline = point.pipeline
            layers, predicted = pipeline.compute_units, pipeline.predicted_compute_units
            found += cell(panel, name, "layers run per token", layers, predicted)
            found += cell(panel, name, "speedup", point.speedup, pipeline.theorem)
    return found


def match_rates(rates: Sequence[tuple[str, Rate]], positions: bool) -> list[Cell]:
    """PPD Table 1, or Tables 4 to 6 by position of the token."""
    found = []
    for dataset, one in rates:
        whole = one.position == TOTAL
        name = f"layer {one.layer}, {'shared' if one.heads == SHARED else 'trained'}, k = {one.top_k}"
        if whole or positions:
            part = "" if whole else f"tokens {one.position}"
            found.append(Cell(dataset, name, "match rate", one.rate, part=part))
    return found


def greatest(cells: Sequence[Cell]) -> list[Cell]:
    """For each row the cell with the greatest value."""
    best: dict[Key, Cell] = {}
    for one in cells:
        if one.key not in best or one.value > best[one.key].value:
            best[one.key] = one
    return list(best.values())


def _vanilla(points: Sequence[Result]) -> list[Cell]:
    found = []
    for panel in dict.fromkeys(map(rows.dataset, points)):
        quality = baseline_quality(point for point in points if rows.dataset(point) == panel)
        found += cell(panel, "vanilla", "quality", quality)
    return found
