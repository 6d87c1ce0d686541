"""The pages' copy of plotly.js is the one that npm has, and a report with it stays small."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from bild_lab.report.page.html import write_html
from bild_lab.report.page.plots import figure_of, plotly_js
from bild_lab.report.style import COLOURS, MUTED, STAGE_COLOURS
from tests.report.sample import sample_sweep

BASIC_4_1_1 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"  # of plotly-basic.min.js
PAGES = Path(__file__).parents[3] / "bild_lab" / "report" / "page" / "report.css"


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_library_is_the_published_one() -> None:
    assert hashlib.sha256(plotly_js().encode()).hexdigest() == BASIC_4_1_1


def test_a_report_stays_under_two_megabytes(tmp_path: Path) -> None:
    write_html("first", sample_sweep(), [], tmp_path / "report.html")
    assert len(plotly_js()) < (tmp_path / "report.html").stat().st_size < 1_500_000


def test_marks_bars_and_lines_stand_out_by_three_to_one_on_both_pages() -> None:
    grounds = re.findall(r"--page: (#[0-9a-f]+)", PAGES.read_text().replace("#fff;", "#ffffff;"))
    assert len(grounds) == 2
    for colour in (*COLOURS, *STAGE_COLOURS.values(), MUTED):
        assert min(contrast(colour, ground) for ground in grounds) >= 3, colour


def test_axes_of_a_figure_keep_what_the_page_gives_them() -> None:
    figure = figure_of(
        [], {"xaxis": {"title": "x", "range": [0, 1]}, "xaxis2": {"side": "top"}, "barmode": "stack"}, 300
    )
    axes = {name: axis for name, axis in figure["layout"].items() if "axis" in name}
    assert set(axes) == {"xaxis", "yaxis", "xaxis2"}
    assert axes["xaxis"]["title"]["text"] == "x" and axes["xaxis"]["range"] == [0, 1]
    assert not any(axis["zeroline"] for axis in axes.values())
    assert (figure["layout"]["barmode"], figure["layout"]["height"]) == ("stack", 300)
