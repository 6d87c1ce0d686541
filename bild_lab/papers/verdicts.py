"""A run compared with the paper: a verdict for every number and every claim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bild_lab.lab.formatting import MISSING, interval, number
from bild_lab.papers.cells import Cell, panel_of
from bild_lab.papers.published import Order, Published

FORMULA_TOLERANCE = 0.1  # as a share of the value that the formula gives
QUALITY = "quality"  # comparable only between texts of the same data set

AGREES, HIGHER, LOWER = "agrees", "higher", "lower"
HOLDS, WITHIN, FAILS, UNKNOWN = "holds", "within the intervals", "does not hold", "not measured"
VERDICTS = (HOLDS, WITHIN, FAILS, UNKNOWN)  # on claims, in the order of reports


@dataclass(frozen=True)
class Line:
    """A measured number and the one it is compared with: the paper's, that of a formula, or none."""

    cell: Cell
    beside: float | None
    tolerance: float | None

    @property
    def verdict(self) -> str:
        """Whether both agree: within the tolerance, or the paper's number inside the interval."""
        if self.beside is None or self.tolerance is None:
            return MISSING
        inside = self.cell.low is not None and self.cell.low <= self.beside <= (self.cell.high or self.cell.low)
        if inside or abs(self.cell.value - self.beside) <= self.tolerance + 1e-9:
            return AGREES
        return HIGHER if self.cell.value > self.beside else LOWER


@dataclass(frozen=True)
class ClaimLine:
    """A claim of the paper in one panel, and the verdict on it."""

    panel: str
    order: Order
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """One figure at one scale, compared: claims that hold first. missing: how many of the paper's numbers were not
    measured.
    """

    lines: list[Line]
    claims: list[ClaimLine]
    missing: int

    @property
    def quantities(self) -> list[str]:
        return list(dict.fromkeys(line.cell.quantity for line in self.lines))

    def of(self, quantity: str) -> list[Line]:
        return [line for line in self.lines if line.cell.quantity == quantity]


def compare(cells: Sequence[Cell], published: Published, scale: str) -> Comparison:
    """Compare measured numbers with printed ones; at small scale with those of the paper's panel in `stands_for`.

    A part of the data is compared with the same part. Qualities are compared only on the same texts.
    """
    lines, used = [], set()
    for cell in cells:
        panel, row, quantity = cell.key
        if scale == "small":
            row = published.stands_for.rows.get(row, row)
            if (panel, row, quantity) not in published.printed and quantity != QUALITY:
                panel = panel_of(published.stands_for.panel, cell.part)
        key = (panel, row, quantity)
        beside, tolerance = published.printed.get(key), published.tolerances.get(quantity)
        if cell.formula is not None:
            beside, tolerance = cell.formula, FORMULA_TOLERANCE * abs(cell.formula)
        elif beside is not None:
            used.add(key)
        lines.append(Line(cell, beside, tolerance))
    claims = [line for order in published.orders for line in claim_lines(order, cells)]
    claims.sort(key=lambda line: VERDICTS.index(line.verdict))
    return Comparison(lines, claims, len(published.printed) - len(used))


def claim_lines(order: Order, cells: Sequence[Cell]) -> list[ClaimLine]:
    """The claim in each panel that has all of its rows; a single line "not measured" if none has."""
    panels = dict.fromkeys(cell.panel for cell in cells)
    lines = [ClaimLine(panel, order, judged(order, panel, cells)) for panel in panels]
    return [line for line in lines if line.verdict != UNKNOWN] or [ClaimLine(MISSING, order, UNKNOWN)]


def judged(order: Order, panel: str, cells: Iterable[Cell]) -> str:
    """The verdict on a claim: no row has less of the quantity than the next one."""
    found = {cell.row: cell for cell in cells if (cell.panel, cell.quantity) == (panel, order.quantity)}
    chain = [found.get(row) for row in order.rows]
    if None in chain:
        return UNKNOWN
    steps = list(pairwise(chain))
    apart = [(one, other) for one, other in steps if not overlapping(one, other)]
    if any(one.value < other.value for one, other in apart):
        return FAILS
    return HOLDS if len(apart) == len(steps) else WITHIN


def overlapping(one: Cell, other: Cell) -> bool:
    """Whether the intervals overlap, so that either number may be the larger one; False without intervals."""
    if None in (one.low, one.high, other.low, other.high):
        return False
    return one.low <= other.high and other.low <= one.high


def markdown(comparison: Comparison) -> str:
    """Both tables as Markdown, that of the claims first; empty if neither has rows."""
    parts = []
    if comparison.claims:
        rows = [("claim of the paper", "panel", "rows, none below the next", "quantity", "here"), ("---",) * 5]
        rows += [
            (one.order.claim, one.panel, " ≥ ".join(one.order.rows), one.order.quantity, one.verdict)
            for one in comparison.claims
        ]
        parts.append("\n".join("| " + " | ".join(_safe(cell) for cell in row) + " |" for row in rows))
    if comparison.lines:
        rows = [("panel", "row", "quantity", "here", "paper", "tolerance", "verdict"), ("---",) * 7]
        rows += [_cells(line) for line in comparison.lines]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts)


def digits(value: float) -> int:
    """Decimals that a number of this size is written with."""
    return 3 if abs(value) < 1 else 2


def _cells(line: Line) -> tuple[str, ...]:
    cell = line.cell
    bounds = interval(cell.low, cell.high, digits(cell.value))
    here = f"{number(cell.value, digits(cell.value))} {bounds}".strip()
    beside = MISSING if line.beside is None else number(line.beside, digits(line.beside))
    beside += " (formula)" if cell.formula is not None else ""
    tolerance = MISSING if line.tolerance is None or line.beside is None else f"± {line.tolerance:.2g}"
    return (*map(_safe, cell.key), here, beside, tolerance, line.verdict)


def _safe(text: str) -> str:
    return text.replace("|", "\\|")
