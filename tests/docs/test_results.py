"""Each number of a table on a page of results is in the CSV beside the page."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGES = sorted(page.stem for page in RESULTS.glob("*.md"))
ONE = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
NUMBER = re.compile(rf"(?<![\w.]){ONE}(?!\w)")
# with its interval, if it has one
CLAIMED = re.compile(rf"(?<![\w.])({ONE})(?!\w)(?: \[({ONE}), ({ONE})\])?")


def rows_of(text: str) -> list[str]:
    """The rows of all tables, without their headings."""
    lines = text.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    return [
        lines[at]
        for at in rows
        if at - 1 in rows and not lines[at].startswith("|-") and at - 2 in rows
    ]


def shown(row: str) -> list[tuple[list[str], bool]]:
    """What a row claims: numbers, each with the ends of its interval, and whether they are
    percentages.

    All with a decimal point or an exponent, and whole ones in cells without words.
    """
    found = []
    for cell in re.sub(r"`[^`]*`|\]\([^)]*\)|\*\*", "", row).split("|"):
        words = re.search(r"[A-Za-z]", NUMBER.sub("", cell).replace(" of ", ""))
        claimed = [[one for one in match if one] for match in CLAIMED.findall(cell)]
        found += [(one, "%" in cell) for one in claimed if not words or re.search(r"\.|e", one[0])]
    return found


def value(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def rounds_to(number: float, text: str, percent: bool) -> bool:
    if "e" in text:
        return f"{number:.0e}" == text
    half = 0.5000001 * 10 ** -len(text.partition(".")[2])
    return any(
        abs(value(text) - number * scale) <= half for scale in ([1, 100] if percent else [1])
    )


def is_among(claim: tuple[list[str], bool], numbers: list[float]) -> bool:
    """Whether the number and the ends of its interval follow one another in a line of a CSV."""
    texts, percent = claim
    places = range(len(numbers) - len(texts) + 1)
    return any(
        all(rounds_to(numbers[at + i], text, percent) for i, text in enumerate(texts))
        for at in places
    )


def is_beside(row: str, lines: list[list[float]]) -> bool:
    """Whether a line of the CSVs has all numbers of a row."""
    claims = shown(row)
    return any(all(is_among(one, line) for one in claims) for line in lines)


def numbers_in(fields: list[str]) -> list[float]:
    return [value(one) for field in fields for one in NUMBER.findall(field)]


def lines_beside(page: str) -> list[list[float]]:
    """The numbers in each line of the page's CSVs; the register has those of all pages."""
    files = sorted(RESULTS.glob("*.csv" if page == "README" else f"{page}_*.csv"))
    return [numbers_in(line) for file in files for line in list(csv.reader(file.open()))[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_each_number_of_a_table_is_in_the_csv_beside_its_page(page: str) -> None:
    text, lines = (RESULTS / f"{page}.md").read_text(), lines_beside(page)
    rows = rows_of(text)
    assert [row for row in rows if not is_beside(row, lines)] == []
    numbers = {
        row: [one[0] for one, _ in shown(row) if re.search(r"\.\d\d", one[0])] for row in rows
    }
    wrong = [
        row.replace(one[-1], one[-1][:-1] + str((int(one[-1][-1]) + 3) % 10), 1)
        for row, one in numbers.items()
        if one
    ]
    found = [row for row in wrong if not is_beside(row, lines)]
    # the line may have the wrong number too
    assert len(wrong) >= 5 and len(found) >= 0.9 * len(wrong)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.csv")), ids=lambda file: file.stem)
def test_no_two_rows_of_a_csv_have_one_timing(file: Path) -> None:
    names = ("speedup", "speedup_low", "speedup_high", "low", "high")
    timings = [[row.get(name) for name in names] for row in csv.DictReader(file.open())]
    timed = [tuple(timing) for timing in timings if timing[0] and any(timing[1:])]
    assert len(timed) == len(set(timed))


def test_every_csv_has_a_page_and_every_picture_is_shown() -> None:
    pages = "".join(
        page.read_text()
        for page in [RESULTS.parents[1] / "README.md", *RESULTS.parent.rglob("*.md")]
    )
    assert [
        one.name
        for one in RESULTS.glob("*.csv")
        if not any(one.stem.startswith(f"{page}_") for page in PAGES)
    ] == []
    assert {file.name for file in RESULTS.rglob("*.png") if f"{file.name})" not in pages} == set()
    assert len(PAGES) <= 7


def test_the_pages_of_results_are_short() -> None:
    assert sum(len((RESULTS / f"{page}.md").read_text().split()) for page in PAGES) <= 8_000


def test_what_a_row_claims_and_where_it_is_found() -> None:
    row = "| `bild 0.5` | window 3 | 92 % | −1.86 [−5.11, +1.27] | 2,336 |"
    assert shown(row) == [(["92"], True), (["−1.86", "−5.11", "+1.27"], False), (["2,336"], False)]
    line = [0.9217, 2336, -1.859, -5.112, 1.266]
    assert is_beside(row, [line]) and rows_of(f"| a | b |\n|---|---|\n{row}\n") == [row]
    for at, wrong in ((0, 0.9257), (1, 2337), (2, 1.859), (3, -5.2), (4, 1.28)):
        assert not is_beside(row, [[*line[:at], wrong, *line[at + 1 :]]])
    assert not is_beside(row, [line[:3], line[3:]])  # all in one line
