"""What the papers print, one YAML of `bild_lab/papers/published` for each figure, and verdicts on
measured numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

from omegaconf import OmegaConf

from bild_lab.errors import require_choice
from bild_lab.lab.schema.formatting import MISSING, interval, markdown_table, number

FOLDER = Path(__file__).parent / "published"
SCALES = ("paper", "small")
FORMULA_TOLERANCE = 0.1  # as a share of the value that the formula gives
QUALITY = "quality"  # comparable only between texts of the same data set
SPEEDUP = "speedup"  # a part of the name of every quantity that is relative to a baseline's time
# by paper: what its printed speedups are over
PAPER_BASELINES = {
    "bild": "the large model alone, decoded by the authors' code on Transformers (§4.1)",
    "bita": "the decoding loop of Transformers (§4.1.3)",
    "ppd": "the target alone, by theory",
    "spec": "the target alone in T5X on a TPU (§4.1)",
}

AGREES, HIGHER, LOWER = "agrees", "higher", "lower"
HOLDS, WITHIN, FAILS, UNKNOWN = "holds", "within the intervals", "does not hold", "not measured"
VERDICTS = (HOLDS, WITHIN, FAILS, UNKNOWN)  # on claims, in the order of reports

Key = tuple[str, str, str]  # panel, row, quantity


@dataclass(frozen=True)
class MeasuredNumber:
    """A measured number, with its 95 % interval if it has one.

    data: what its panel shows, usually a data set. part: the part of that data, such as "tokens
    1-2"; empty for all of it. formula: the value of the paper's formula for this run, if the number
    is compared with the formula. metric: of a quality, as tables call it.
    """

    data: str
    row: str
    quantity: str
    value: float
    low: float | None = None
    high: float | None = None
    formula: float | None = None
    part: str = ""
    metric: str | None = field(default=None, compare=False)

    @property
    def key(self) -> Key:
        return (self.panel, self.row, self.quantity)

    @property
    def panel(self) -> str:
        return panel_of(self.data, self.part)


def panel_of(data: str, part: str) -> str:
    """The name of the panel of a data set, or of a part of it."""
    return f"{data}, {part}" if part else data


@dataclass(frozen=True)
class PublishedQuantity:
    """One quantity of a table: a value for each row and panel, None if the paper has none.

    tolerance: how far, in the quantity's own unit, a value may be from the paper's to agree with
    it.
    """

    quantity: str
    tolerance: float
    panels: list[str]
    rows: dict[str, list[float | None]]


@dataclass(frozen=True)
class Order:
    """An order that the paper claims: no row has less of the quantity than the next one."""

    claim: str
    quantity: str
    rows: list[str]


@dataclass(frozen=True)
class StandsFor:
    """What a run at small scale is compared with: a panel of the paper, and the paper's names of
    its rows.
    """

    panel: str
    rows: dict[str, str]


@dataclass(frozen=True)
class Published:
    """A figure or table of a paper.

    given: which of its numbers the paper's text prints, and what was left out. folders: where in
    `outputs` its points are, by scale. commands: those that produce the points, by scale. metrics:
    of the printed qualities, by panel.
    same_rows: the paper's row that a further row of ours is compared with. recorded: whether the
    quality of its greedy sweeps comes from a record.
    """

    paper: str
    item: str
    hardware: str
    given: str
    folders: dict[str, list[str]]
    commands: dict[str, list[str]]
    stands_for: StandsFor
    values: list[PublishedQuantity]
    orders: list[Order]
    metrics: dict[str, str] = field(default_factory=dict)
    same_rows: dict[str, str] = field(default_factory=dict)
    recorded: bool = False

    @cached_property
    def printed(self) -> dict[Key, float]:
        """Every number, by panel, row and quantity."""
        return {
            (panel, row, block.quantity): float(value)
            for block in self.values
            for row, values in block.rows.items()
            for panel, value in zip(block.panels, values, strict=True)
            if value is not None
        }

    def is_of(self, panel: str, metric: str) -> bool:
        """Whether the qualities that are printed for a panel are of this metric."""
        return self.metrics.get(panel, metric) == metric


def published_names() -> list[str]:
    """Every figure and table there is, in alphabetical order."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


@cache
def load_published(name: str) -> Published:
    """The printed numbers of a figure. Raises UserError for an unknown figure."""
    require_choice("figure", name, published_names())
    content = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    stands_for, values, orders = (content.pop(key) for key in ("stands_for", "values", "orders"))
    blocks = [PublishedQuantity(**quantity) for quantity in values]
    return Published(
        **content,
        stands_for=StandsFor(**stands_for),
        values=blocks,
        orders=[Order(**o) for o in orders],
    )


@dataclass(frozen=True)
class ComparedNumber:
    """A measured number and the one it is compared with: the paper's, that of a formula, or
    none.
    """

    cell: MeasuredNumber
    reference: float | None
    tolerance: float | None

    @property
    def verdict(self) -> str:
        """Whether both agree: within the tolerance, or the paper's number inside the interval."""
        if self.reference is None or self.tolerance is None:
            return MISSING
        bounds = (self.cell.low, self.cell.high)
        inside = None not in bounds and bounds[0] <= self.reference <= bounds[1]
        if inside or abs(self.cell.value - self.reference) <= self.tolerance + 1e-9:
            return AGREES
        return HIGHER if self.cell.value > self.reference else LOWER


@dataclass(frozen=True)
class ClaimLine:
    """A claim of the paper in one panel, and the verdict on it."""

    panel: str
    order: Order
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """One figure at one scale, compared: claims that hold first. missing: how many of the paper's
    numbers were not measured.
    """

    lines: list[ComparedNumber]
    claims: list[ClaimLine]
    missing: int


def compare(cells: Sequence[MeasuredNumber], published: Published, scale: str) -> Comparison:
    """Compare measured numbers with printed ones; at small scale with those of the paper's panel in
    `stands_for`.

    A part of the data is compared with the same part. Qualities are compared only on the same texts
    and by the paper's metric: ROUGE-L of CNN/DailyMail is ten points below the ROUGE-Lsum that BiLD
    prints.
    """
    lines, used = [], set()
    tolerances = {block.quantity: block.tolerance for block in published.values}
    for cell in cells:
        panel, row, quantity = cell.key
        row = published.same_rows.get(row, row)
        if scale == "small":
            row = published.stands_for.rows.get(row, row)
            if (panel, row, quantity) not in published.printed and quantity != QUALITY:
                panel = panel_of(published.stands_for.panel, cell.part)
        key = (panel, row, quantity)
        reference, tolerance = published.printed.get(key), tolerances.get(quantity)
        if cell.formula is not None:
            reference, tolerance = cell.formula, FORMULA_TOLERANCE * abs(cell.formula)
        elif cell.metric is not None and not published.is_of(panel, cell.metric):
            reference = None
        elif reference is not None:
            used.add(key)
        lines.append(ComparedNumber(cell, reference, tolerance))
    claims = [line for order in published.orders for line in claim_lines(order, cells)]
    claims.sort(key=lambda line: VERDICTS.index(line.verdict))
    return Comparison(lines, claims, len(published.printed) - len(used))


def claim_lines(order: Order, cells: Sequence[MeasuredNumber]) -> list[ClaimLine]:
    """The claim in each panel that has all of its rows; a single line "not measured" if none
    has.
    """
    panels = dict.fromkeys(cell.panel for cell in cells)
    lines = [ClaimLine(panel, order, judged(order, panel, cells)) for panel in panels]
    return [line for line in lines if line.verdict != UNKNOWN] or [
        ClaimLine(MISSING, order, UNKNOWN)
    ]


def judged(order: Order, panel: str, cells: Iterable[MeasuredNumber]) -> str:
    """The verdict on a claim: no row has less of the quantity than the next one."""
    numbers = {
        cell.row: cell for cell in cells if (cell.panel, cell.quantity) == (panel, order.quantity)
    }
    chain = [numbers.get(row) for row in order.rows]
    if None in chain:
        return UNKNOWN
    steps = list(pairwise(chain))
    separate = [(higher, lower) for higher, lower in steps if not overlapping(higher, lower)]
    if any(higher.value < lower.value for higher, lower in separate):
        return FAILS
    return HOLDS if len(separate) == len(steps) else WITHIN


def overlapping(left: MeasuredNumber, right: MeasuredNumber) -> bool:
    """Whether the intervals overlap, so that either number may be the larger one; False without
    intervals.
    """
    if None in (left.low, left.high, right.low, right.high):
        return False
    return left.low <= right.high and right.low <= left.high


def markdown(comparison: Comparison) -> str:
    """Both tables as Markdown, that of the claims first; empty if neither has rows."""
    claims = [
        (
            claim.order.claim,
            claim.panel,
            " ≥ ".join(claim.order.rows),
            claim.order.quantity,
            claim.verdict,
        )
        for claim in comparison.claims
    ]
    tables = [
        (("claim of the paper", "panel", "rows, none below the next", "quantity", "here"), claims),
        (
            ("panel", "row", "quantity", "here", "paper", "tolerance", "verdict"),
            [_texts(line) for line in comparison.lines],
        ),
    ]
    return "\n\n".join(markdown_table(titles, rows) for titles, rows in tables if rows)


def digits(value: float) -> int:
    """Decimals that a number of this size is written with."""
    return 3 if abs(value) < 1 else 2


def _texts(line: ComparedNumber) -> tuple[str, ...]:
    cell = line.cell
    bounds = interval(cell.low, cell.high, digits(cell.value))
    here = f"{number(cell.value, digits(cell.value))} {bounds}".strip()
    reference = (
        MISSING if line.reference is None else number(line.reference, digits(line.reference))
    )
    reference += " (formula)" if cell.formula is not None else ""
    tolerance = (
        MISSING if line.tolerance is None or line.reference is None else f"± {line.tolerance:.2g}"
    )
    return (*cell.key, here, reference, tolerance, line.verdict)
