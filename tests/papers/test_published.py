"""The papers' printed numbers agree with their own text, and measured ones get the right verdicts
beside them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.papers.published import (
    AGREES,
    FAILS,
    FOLDER,
    HIGHER,
    HOLDS,
    LOWER,
    SCALES,
    UNKNOWN,
    WITHIN,
    MeasuredNumber,
    Order,
    Published,
    PublishedQuantity,
    StandsFor,
    compare,
    judged,
    load_published,
    markdown,
    published_names,
)

PAPERS = Path(__file__).resolve().parents[3] / "shared" / "papers"

FOLDERS = {"paper": [], "small": []}
STANDS_FOR = StandsFor("wmt", {"tiny": "large"})
PUBLISHED = Published("A paper, 2023", "Table 1", "one GPU", "all", FOLDERS, FOLDERS, STANDS_FOR, values=[
    PublishedQuantity("speedup", 0.1, ["wmt", "wmt, tokens 1-2"], {"large": [1.5, 2.5], "other": [3.0, None]}),
    PublishedQuantity("quality", 1.0, ["wmt", "toy"], {"large": [30.0, 40.0]}),
], orders=[Order("tiny | is faster", "speedup", ["tiny", "slow"])])  # fmt: skip
CELLS = [
    MeasuredNumber("toy", "tiny", "speedup", 0.75, 0.6125, 1.9),
    MeasuredNumber("toy", "tiny", "speedup", 2.625, part="tokens 1-2"),
    MeasuredNumber("toy", "slow", "speedup", 0.5),
    MeasuredNumber("toy", "tiny", "quality", -12.3456, metric="BLEU"),
    MeasuredNumber("toy", "a|b", "layers run", 1.2, formula=0.96),
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
| toy | a\|b | layers run | 1.20 | 0.960 (formula) | ± 0.096 | higher |
"""


@pytest.mark.parametrize("name", published_names())
def test_a_file_opens_with_its_command_and_names_others(name: str) -> None:
    published = load_published(name)
    assert (
        (FOLDER / f"{name}.yaml")
        .read_text()
        .partition("\n")[0]
        .endswith(f": python scripts/figures.py {name}")
    )
    assert sorted(published.folders) == sorted(published.commands) == sorted(SCALES)
    commands = [*published.commands["paper"], *published.commands["small"]]
    assert all(published.commands.values()) and all(
        one.startswith(("python run.py", "python scripts/")) for one in commands
    )
    assert all(block.tolerance > 0 for block in published.values)


FILES = {"bild": "bild", "bita": "bita", "ppd": "ppd", "spec": "speculative_decoding"}
SENTENCES = {"ppd_fig2", "bita_fig7"}  # whose numbers stand one by one in the text


def has_in_order(line: list[float], values: Sequence[float]) -> bool:
    """Whether a line has these values, or their percentages, one after another."""
    rest = iter(line)
    return all(any(number in (value, round(100 * value, 4)) for number in rest) for value in values)


def printed_lines(name: str) -> list[list[float]]:
    """The values of a figure or table as its paper prints them, a list for each line."""
    blocks = load_published(name).values
    rows = [
        [value for value in values if value is not None]
        for block in blocks
        for values in block.rows.values()
    ]
    if name in ("bita_tab3_8", "bita_tab4_9"):  # two data sets in each of two tables
        return [half for row in rows for half in (row[:2], row[2:])]
    # Table 1 has quality and speedup side by side; the averages are in sentences
    if name == "bild_fig4":
        averages = [[row.pop()] for row in rows if len(row) == 5]
        speedups, qualities, (vanilla,) = rows[:4], rows[4:8], rows[8:]
        pairs = [zip(*two, strict=True) for two in zip(qualities, speedups, strict=True)]
        return [
            *averages,
            vanilla,
            *([number for pair in line for number in pair] for line in pairs),
        ]
    if name == "ppd_tab1":  # a column for each layer, a line for each data set, k and heads
        by_layer = [rows[start : start + 6] for start in range(0, len(rows), 6)]
        return [
            list(line) for kind in zip(*by_layer, strict=True) for line in zip(*kind, strict=True)
        ]
    return [[value] for row in rows for value in row] if name in SENTENCES else rows


@pytest.mark.skipif(not PAPERS.is_dir(), reason="no papers beside the project (../shared/papers)")
@pytest.mark.parametrize("name", published_names())
def test_the_numbers_of_a_row_are_in_a_line_of_the_paper(name: str) -> None:
    text = (PAPERS / f"{FILES[name.partition('_')[0]]}.txt").read_text()
    lines = [
        [float(one) for one in re.findall(r"\d+(?:\.\d+)?", line)] for line in text.splitlines()
    ]
    missing = [
        row for row in printed_lines(name) if not any(has_in_order(line, row) for line in lines)
    ]
    if name == "ppd_fig2":  # "reduced by 34 %"
        missing = [
            row for row in missing if not any(has_in_order(line, [1 - row[0]]) for line in lines)
        ]
    assert missing == []


@pytest.mark.parametrize(
    ("value", "bounds", "verdict"),
    [(1.80, (None, None), HIGHER), (1.40, (None, None), LOWER),
     (1.77, (None, None), AGREES), (1.47, (None, None), AGREES),  # the tolerance is 0.15
     (1.90, (1.62, 2.3), AGREES), (1.30, (1.1, 1.62), AGREES), (1.90, (1.63, 2.3), HIGHER)],
)  # fmt: skip
def test_a_verdict_asks_for_the_tolerance_or_the_interval(
    value: float, bounds: tuple, verdict: str
) -> None:
    # the paper's is 1.62
    cell = MeasuredNumber("iwslt2017", "aligned", "speedup at minimal loss", value, *bounds)
    (line,) = compare([cell], load_published("bild_fig4"), "paper").lines
    assert (line.reference, line.verdict) == (1.62, verdict)


def test_an_interval_that_ends_at_zero_has_an_end() -> None:
    """Fault: zero counted as no end."""
    cell = MeasuredNumber("wmt", "large", "quality", -4.0, -8.0, 0.0)
    printed = replace(
        PUBLISHED, values=[PublishedQuantity("quality", 1.0, ["wmt"], {"large": [-1.0]})]
    )
    (line,) = compare([cell], printed, "paper").lines
    assert line.verdict == AGREES


def test_the_quality_of_other_data_gets_no_verdict() -> None:
    cells = [
        MeasuredNumber("toy", "speculative, sampled", what, value)
        for what, value in (("quality", 39.9), ("speedup", 1.3))
    ]
    quality, speedup = compare(cells, load_published("bild_speculative"), "small").lines
    assert (quality.reference, quality.verdict) == (None, "–")
    assert (speedup.reference, speedup.verdict) == (1.28, "agrees")
    of_the_papers_data = replace(cells[0], data="iwslt2017")
    compared = compare([of_the_papers_data], load_published("bild_speculative"), "paper")
    assert compared.lines[0].reference


def test_match_rates_of_a_small_model_are_beside_those_after_half_of_the_papers_layers() -> None:
    half, last = "layer 3, trained, k = 5", "layer 5, trained, k = 5"
    cells = [
        MeasuredNumber("toy", half, "match rate", 0.7, part=part)
        for part in ("", "tokens 3-4", "tokens 17-18")
    ]
    compared = compare(
        [*cells, MeasuredNumber("toy", last, "match rate", 0.9)],
        load_published("ppd_tab4_6"),
        "small",
    )
    assert [line.reference for line in compared.lines] == [0.7415, 0.7905, None, None]
    assert [line.verdict for line in compared.lines[:2]] == [AGREES, LOWER]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (MeasuredNumber("p", "a", "q", 2.0), MeasuredNumber("p", "b", "q", 1.0), HOLDS),
        (MeasuredNumber("p", "a", "q", 1.0), MeasuredNumber("p", "b", "q", 2.0), FAILS),
        (MeasuredNumber("p", "a", "q", 2.0), MeasuredNumber("p", "b", "q", 2.0), HOLDS),
        (
            MeasuredNumber("p", "a", "q", 1.0, 0.8, 1.9),
            MeasuredNumber("p", "b", "q", 2.0, 1.7, 2.3),
            WITHIN,
        ),
        (
            MeasuredNumber("p", "a", "q", 2.0, 1.7, 2.3),
            MeasuredNumber("p", "b", "q", 1.9, 1.6, 2.2),
            WITHIN,
        ),
        (
            MeasuredNumber("p", "a", "q", 2.0, 1.9, 2.1),
            MeasuredNumber("p", "b", "q", 1.0, 0.9, 1.1),
            HOLDS,
        ),
        (MeasuredNumber("p", "a", "q", 2.0), MeasuredNumber("p", "b", "other", 1.0), UNKNOWN),
    ],
)
def test_a_claim_is_judged_by_values_and_intervals(
    first: MeasuredNumber, second: MeasuredNumber, verdict: str
) -> None:
    assert judged(Order("a is above b", "q", ["a", "b"]), "p", [second, first]) == verdict


@pytest.mark.parametrize(
    ("values", "width", "verdict"),
    [
        ((3, 1, 2), 0.4, FAILS),
        ((1, 3, 2), 0.4, FAILS),
        ((3, 2, 1), 0.4, HOLDS),
        ((4, 2, 1), 0.6, WITHIN),  # of one step alone
    ],
)
def test_a_claim_of_several_steps_fails_with_any_of_them(
    values: Sequence[float], width: float, verdict: str
) -> None:
    """width: of each interval to either side."""
    cells = [
        MeasuredNumber("p", row, "q", value, value - width, value + width)
        for row, value in zip("abc", values, strict=True)
    ]
    assert judged(Order("a is above b, b above c", "q", ["a", "b", "c"]), "p", cells) == verdict


def test_claims_that_hold_come_first_and_before_the_numbers() -> None:
    orders = [Order(f"{row} is above b", "q", [row, "b"]) for row in "xca"]
    published = replace(load_published("bild_fig4"), orders=orders)
    cells = [
        MeasuredNumber("p", row, "q", value) for row, value in (("a", 2.0), ("b", 1.0), ("c", 0.5))
    ]
    comparison = compare(cells, published, "paper")
    told = [(line.order.rows[0], line.verdict) for line in comparison.claims]
    assert told == [("a", HOLDS), ("c", FAILS), ("x", UNKNOWN)]
    text = markdown(comparison)
    assert text.index("a is above b") < text.index("c is above b") < text.index("| panel | row |")


def test_numbers_stand_beside_the_papers_in_tables_with_verdicts() -> None:
    compared = compare(CELLS, PUBLISHED, "small")
    assert markdown(compared) == TABLES.strip()
    assert compared.missing == 2  # the other row's, and the quality of wmt
