"""The pages' copy of plotly.js is the one that npm has, colours stand out, and figures have the
page's look.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from bild_lab.report.page.base import error_bars, escape, plotly_js, scatter
from bild_lab.report.style import COLOURS, MUTED, STAGE_COLOURS, marks

# of plotly-basic.min.js
BASIC_4_1_1 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
STYLE = Path(__file__).parents[3] / "bild_lab" / "report" / "page" / "report.css"


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_library_is_the_published_one() -> None:
    assert hashlib.sha256(plotly_js().encode()).hexdigest() == BASIC_4_1_1


def test_a_label_is_escaped_with_entities_that_the_library_knows() -> None:
    label = escape("<b>\"quoted\"</b> & 'more'")
    assert label == "&lt;b&gt;\"quoted\"&lt;/b&gt; &amp; 'more'"
    known = re.search(r"\{mu:[^}]*\}", str(plotly_js())).group()
    assert {"lt:", "gt:", "amp:"} <= set(re.findall(r"\w+:", known)) and "quot" not in known


def test_marks_bars_and_lines_stand_out_by_three_to_one_on_both_pages() -> None:
    grounds = re.findall(r"--page: (#[0-9a-f]+)", STYLE.read_text().replace("#fff;", "#ffffff;"))
    assert len(grounds) == 2
    for colour in (*COLOURS, *STAGE_COLOURS.values(), MUTED):
        assert min(contrast(colour, ground) for ground in grounds) >= 3, colour


def test_policies_differ_in_their_marker_and_many_in_colour_or_marker() -> None:
    looks = list(marks([f"policy {index}" for index in range(60)]).values())
    assert len({(mark.colour, mark.marker) for mark in looks}) == 60
    for names in zip(*((mark.marker, mark.plotly_symbol) for mark in looks[:11]), strict=True):
        assert len(set(names)) == 11


def test_a_trace_has_its_places_and_bars_reach_from_their_values() -> None:
    assert scatter([(1, 2), (3, 4)], "lines", name="a") == {
        **{"type": "scatter", "mode": "lines", "name": "a"},
        **{"x": [1, 3], "y": [2, 4]},
    }
    assert scatter([], "lines")["x"] == []
    bars = error_bars([(1.0, 2.0, 5.0)], "red")
    assert (bars["arrayminus"], bars["array"], bars["symmetric"]) == ([1.0], [3.0], False)
