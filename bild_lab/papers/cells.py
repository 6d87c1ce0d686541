"""The numbers that a run gives for a paper's figure or table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bild_lab.engine.ppd.pipeline import SHARED
from bild_lab.engine.speculative_theory import expected_tokens
from bild_lab.lab.analysis.pareto import best_at_loss
from bild_lab.lab.schema.result import Result
from bild_lab.papers import finished_points as rows
from bild_lab.papers.finished_points import RowOf, baseline_quality, curves
from bild_lab.papers.match_rates import TOTAL, Rate
from bild_lab.papers.published import Key
from bild_lab.papers.replayed_points import Replayed

MINIMAL_LOSS, ONE_POINT = 0.12, 1.19  # the largest losses of quality, in points, in BiLD's Table 1


@dataclass(frozen=True)
class Cell:
    """A measured number, with its 95 % interval if it has one.

    data: what its panel shows, usually a data set. part: the part of that data, such as "tokens 1-2"; empty for all of
    it. formula: the value of the paper's formula for this run, if the number is compared with the formula.
    """

    data: str
    row: str
    quantity: str
    value: float
    low: float | None = None
    high: float | None = None
    formula: float | None = None
    part: str = ""

    @property
    def key(self) -> Key:
        return (self.panel, self.row, self.quantity)

    @property
    def panel(self) -> str:
        return panel_of(self.data, self.part)


def panel_of(data: str, part: str) -> str:
    """The name of the panel of a data set, or of a part of it."""
    return f"{data}, {part}" if part else data


Cells = Callable[[Sequence[Result]], list[Cell]]


def at_losses(row: RowOf) -> Cells:
    """The fastest point of each curve at minimal loss and at one point of loss, and its best text."""

    def cells(points: Sequence[Result]) -> list[Cell]:
        found = []
        for (panel, name), curve in curves(points, row).items():
            for words, loss in (("minimal loss", MINIMAL_LOSS), ("one point of loss", ONE_POINT)):
                if (best := best_at_loss(curve, loss)) is not None:
                    found += [_speedup(panel, name, best, f"speedup at {words}")]
                    found += [_quality(panel, name, best, f"quality at {words}")]
            best = max(curve, key=lambda point: point.quality.value)
            found.append(_quality(panel, name, best, "best quality"))
        return [*found, *_vanilla(points)]

    return cells


def replaced_share(points: Sequence[Replayed]) -> list[Cell]:
    """BiLD Figure 2: the smallest share of replaced tokens with which quality reaches the large model's."""
    found = []
    for (panel, name), curve in curves(points, lambda _: "small model").items():
        quality = baseline_quality(curve)
        if quality is None:
            continue
        enough = [replaced(point) for point in curve if point.quality.value >= quality - MINIMAL_LOSS]
        if enough:
            found.append(Cell(panel, name, "share replaced at the target's quality", min(enough)))
    return [*found, *_vanilla(points)]


def replaced(point: Replayed) -> float:
    """The share of a run's tokens that the target put in place of drafted ones."""
    return point.rollbacks / point.tokens


def cost_ratios(points: Sequence[Result]) -> list[Cell]:
    """BiLD Figure 8: the costs of the fastest point at minimal loss, relative to the baseline's."""
    found = []
    for (panel, name), curve in curves(points, rows.alignment).items():
        best = best_at_loss(curve, MINIMAL_LOSS)
        if best is None or best.cost is None:
            continue
        cost = best.cost
        found += [
            Cell(panel, name, "FLOPs", cost.flops_ratio),
            Cell(panel, name, "memory operations", cost.bytes_ratio),
            Cell(panel, name, "arithmetic intensity", cost.intensity_ratio),
            _speedup(panel, name, best, "speedup"),
        ]
    return found


def against_speculative(points: Sequence[Result]) -> list[Cell]:
    """BiLD §4.2: the fastest speculative point, and how far BiLD is ahead of it at equal quality and at equal speed."""
    found = []
    both = curves(points, rows.unaligned_or_speculative)
    for (panel, name), curve in both.items():
        timed = [point for point in curve if point.speedup.value is not None]
        if name != "speculative" or not timed:
            continue
        rival = max(timed, key=lambda point: point.speedup.value)
        found += [_speedup(panel, name, rival, "speedup"), _quality(panel, name, rival, "quality")]
        bild = [point for point in both.get((panel, "bild"), []) if point.speedup.value is not None]
        as_good = [point.speedup.value for point in bild if point.quality.value >= rival.quality.value - MINIMAL_LOSS]
        as_fast = [point.quality.value for point in bild if point.speedup.value >= rival.speedup.value]
        if as_good:
            found.append(Cell(panel, "bild", "speedup ahead of speculative", max(as_good) - rival.speedup.value))
        if as_fast:
            found.append(Cell(panel, "bild", "quality ahead of speculative", max(as_fast) - rival.quality.value))
    return found


def speculative_table(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Tables 2 and 3: each drafter's best speedup and its α, by temperature."""
    found = []
    for point in points:
        name = rows.drafter(point)
        if name is not None:
            at, rate = f"temperature {point.setting.temperature:g}", point.counts.acceptance_rate
            found += _known(
                _speedup(point.setting.dataset, name, point, f"speedup, {at}"),
                _number(point.setting.dataset, name, f"acceptance rate, {at}", rate),
            )
    return greatest(found)


def lenience_table(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Table 5: α, the predicted and the measured speedup, by lenience and temperature."""
    found = []
    for point in points:
        name = rows.lenience(point)
        if name is not None:
            at, rate = f"temperature {point.setting.temperature:g}", point.counts.acceptance_rate
            found += _known(
                _number(point.setting.dataset, name, f"acceptance rate, {at}", rate),
                _number(point.setting.dataset, name, f"Theorem 3.8, {at}", _theorem(point)),
                _speedup(point.setting.dataset, name, point, f"speedup, {at}"),
            )
    return greatest(found)


def theorem_table(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Table 4: the measured speedup beside Theorem 3.8 with the run's own α and c."""
    found = []
    for point in points:
        name, theorem = rows.drafter(point), _theorem(point)
        if name is None or theorem is None:
            continue
        row = f"{name}, window {point.knobs['window']}, temperature {point.setting.temperature:g}"
        speedup = point.speedup
        found.append(Cell(point.setting.dataset, row, "speedup", speedup.value, speedup.low, speedup.high, theorem))
    return found


def tokens_per_call(points: Sequence[Result]) -> list[Cell]:
    """Speculative decoding Figure 2: tokens per target call beside Equation 1 at the run's own α."""
    found = []
    for point in points:
        counts = point.counts
        if point.policy not in ("synthetic", "synthetic_with_cost") or counts.acceptance_rate is None:
            continue
        window = point.knobs["window"]
        name = f"drafted right with {point.knobs['acceptance_rate']:g}"
        expected = expected_tokens(counts.acceptance_rate, window)
        calls = counts.tokens_per_target_call
        found.append(Cell(f"window {window}", name, "tokens per target call", calls, formula=expected))
    return found


def greedy_speedups(row: RowOf, panel: RowOf | None = None) -> Cells:
    """BiTA's tables: tokens per second over the baseline's. panel: None takes the data set as the panel."""

    def cells(points: Sequence[Result]) -> list[Cell]:
        found = []
        for point in points:
            name, where = row(point), point.setting.dataset if panel is None else panel(point)
            if not point.is_baseline and name is not None and where is not None:
                found += _known(_number(where, name, "greedy speedup", point.tokens_per_s_ratio))
        return greatest(found)

    return cells


def by_category(points: Sequence[Result]) -> list[Cell]:
    """BiTA Table 7: tokens per second over the baseline's, by category of the data set."""
    found = []
    for point in points:
        if point.is_baseline or not point.categories:
            continue
        for category, part in {**point.categories, "overall": point}.items():
            found += _known(_number(category, rows.fact(point, "pair"), "greedy speedup", part.tokens_per_s_ratio))
    return greatest(found)


def pipeline_trade_off(points: Sequence[Result]) -> list[Cell]:
    """PPD Figure 2: match rate, the latency that the theorem gives for it, mean number of processes, and speedup."""
    found = []
    for (panel, name), several in curves(points, rows.pipeline).items():
        for point in several:
            pipeline = point.pipeline
            found += _known(_number(panel, name, "match rate", pipeline.match_rate))
            if pipeline.theorem is not None:
                found.append(Cell(panel, name, "latency per token by the theorem", 1 / pipeline.theorem))
            average = pipeline.compute_units / pipeline.latency_units
            found += [Cell(panel, name, "processes on average", average)]
            found += _known(_speedup(panel, name, point, "speedup"))
    return found


def pipeline_compute(points: Sequence[Result]) -> list[Cell]:
    """PPD Figure 4: layers run per token and the speedup, each beside Theorem 4.1 with the measured match rate."""
    found = []
    for (panel, name), several in curves(points, rows.pipeline).items():
        for point in several:
            pipeline, speedup = point.pipeline, point.speedup
            predicted = pipeline.predicted_compute_units
            found.append(Cell(panel, name, "layers run per token", pipeline.compute_units, formula=predicted))
            if speedup.value is not None:
                bounds = (speedup.low, speedup.high)
                found.append(Cell(panel, name, "speedup", speedup.value, *bounds, pipeline.theorem))
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
    """For each row the cell with the greatest value: a row may have several points, such as one per window."""
    best: dict[Key, Cell] = {}
    for cell in cells:
        if cell.key not in best or cell.value > best[cell.key].value:
            best[cell.key] = cell
    return list(best.values())


def _vanilla(points: Sequence[Result]) -> list[Cell]:
    panels = list(dict.fromkeys(point.setting.dataset for point in points))
    known = {panel: baseline_quality([point for point in points if point.setting.dataset == panel]) for panel in panels}
    return [Cell(panel, "vanilla", "quality", value) for panel, value in known.items() if value is not None]


def _theorem(point: Result) -> float | None:
    """The speedup by Theorem 3.8; None if nothing was predicted."""
    return None if point.prediction is None else point.prediction.theorem


def _speedup(panel: str, row: str, point: Result, quantity: str) -> Cell | None:
    speedup = point.speedup
    return None if speedup.value is None else Cell(panel, row, quantity, speedup.value, speedup.low, speedup.high)


def _quality(panel: str, row: str, point: Result, quantity: str) -> Cell:
    quality = point.quality
    return Cell(panel, row, quantity, quality.value, quality.low, quality.high)


def _number(panel: str, row: str, quantity: str, value: float | None) -> Cell | None:
    return None if value is None else Cell(panel, row, quantity, value)


def _known(*cells: Cell | None) -> list[Cell]:
    return [cell for cell in cells if cell is not None]
