"""The tables that compare a run with a paper, word by word."""

from __future__ import annotations

import pytest

from bild_lab.papers.cells import Cell
from bild_lab.papers.published import Block, Order, Published, StandsFor
from bild_lab.papers.verdicts import compare, digits, markdown, overlapping

FOLDERS = {"paper": [], "small": []}
STANDS_FOR = StandsFor("wmt", {"tiny": "large"})
PUBLISHED = Published("A paper, 2023", "Table 1", "one GPU", "all", FOLDERS, FOLDERS, STANDS_FOR, values=[
    Block("speedup", 0.1, ["wmt", "wmt, tokens 1-2"], {"large": [1.5, 2.5], "other": [3.0, None]}),
    Block("quality", 1.0, ["wmt", "toy"], {"large": [30.0, 40.0]}),
], orders=[Order("tiny | is faster", "speedup", ["tiny", "slow"])])  # fmt: skip
CELLS = [
    Cell("toy", "tiny", "speedup", 0.75, 0.6125, 1.9),
    Cell("toy", "tiny", "speedup", 2.625, part="tokens 1-2"),
    Cell("toy", "slow", "speedup", 0.5),
    Cell("toy", "tiny", "quality", -12.3456),
    Cell("toy", "a|b", "layers run", 9.0, formula=20.0),
]
TABLES = r"""
| claim of the paper | panel | rows, none below the next | quantity | here |
| --- | --- | --- | --- | --- |
| tiny \| is faster | toy | tiny ≥ slow | speedup | holds |

| panel | row | quantity | here | paper | tolerance | verdict |
| --- | --- | --- | --- | --- | --- | --- |
| toy | tiny | speedup | 0.750 [0.613, 1.900] | 1.50 | ± 0.1 | agrees |
| toy, tokens 1-2 | tiny | speedup | 2.62 | 2.50 | ± 0.1 | higher |
| toy | slow | speedup | 0.500 | – | – | – |
| toy | tiny | quality | −12.35 | 40.00 | ± 1 | lower |
| toy | a\|b | layers run | 9.00 | 20.00 (formula) | ± 2 | lower |
"""


def test_both_tables_of_a_comparison() -> None:
    compared = compare(CELLS, PUBLISHED, "small")
    assert markdown(compared) == TABLES.strip()
    assert compared.missing == 2  # the printed ones are five
    assert compared.quantities == ["speedup", "quality", "layers run"]
    assert [line.cell.value for line in compared.of("speedup")] == [0.75, 2.625, 0.5]
    whole = compare(CELLS, PUBLISHED, "paper")
    assert ([line.beside for line in whole.lines], whole.missing) == ([None, None, None, None, 20.0], 5)


def test_a_comparison_without_claims_or_numbers_has_no_such_table() -> None:
    claims, numbers = TABLES.strip().split("\n\n")
    nothing = Published("p", "i", "h", "g", FOLDERS, FOLDERS, STANDS_FOR, values=PUBLISHED.values, orders=[])
    assert markdown(compare(CELLS, nothing, "small")) == numbers
    unmeasured = markdown(compare([], PUBLISHED, "small"))
    assert unmeasured == claims.replace("| toy |", "| – |").replace("holds", "not measured")
    assert markdown(compare([], nothing, "small")) == ""


def test_the_papers_number_has_decimals_of_its_own() -> None:
    compared = compare([Cell("toy", "a", "latency", 1.2, formula=0.96)], PUBLISHED, "small")
    assert "| toy | a | latency | 1.20 | 0.960 (formula) | ± 0.096 | higher |" in markdown(compared)


@pytest.mark.parametrize(("value", "decimals"), [(0.999, 3), (-0.5, 3), (1.0, 2), (-1.0, 2), (40.0, 2)])
def test_numbers_below_one_have_three_decimals(value: float, decimals: int) -> None:
    assert digits(value) == decimals


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1.0, 2.0), (2.0, 3.0), True),
        ((2.0, 3.0), (1.0, 2.0), True),
        ((1.0, 2.0), (2.1, 3.0), False),
        ((2.1, 3.0), (1.0, 2.0), False),
        ((1.0, 2.0), (None, None), False),
    ],
)
def test_intervals_that_touch_overlap(one: tuple, other: tuple, expected: bool) -> None:
    first, second = (Cell("p", "r", "q", 1.5, *bounds) for bounds in (one, other))
    assert overlapping(first, second) == expected
