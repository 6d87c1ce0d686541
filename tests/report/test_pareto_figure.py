"""The static figure: size, formats, ticks, and labels that cover nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.store.groups import by_setting
from bild_lab.report import pareto_figure
from bild_lab.report.pareto_figure import draw_pareto
from bild_lab.report.pareto_layout import free_place
from bild_lab.report.style import front_corners, log_ticks, speedup_ticks
from tests.report.sample import (
    ENVIRONMENT,
    sample_baseline,
    sample_result,
    sample_sweep,
    with_quality,
)

BOUNDS = Bbox.from_extents(0, 0, 400, 300)
LABEL = Bbox.from_bounds(0, 0, 60, 20)


def test_the_figure_is_a_small_png_of_the_promised_width_and_a_pdf(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pareto.png"
    draw_pareto(sample_sweep(), path)
    assert Image.open(path).size[0] == 1200 and path.stat().st_size < 150_000
    assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert len(list(path.parent.iterdir())) == 2  # no temporary file is left


@pytest.mark.slow
def test_vector_files_are_eight_centimetres_wide_and_have_fonts_that_journals_take(
    tmp_path: Path,
) -> None:
    draw_pareto(sample_sweep(), tmp_path / "pareto", ["pdf", "svg"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["pareto.pdf", "pareto.svg"]
    pdf = (tmp_path / "pareto.pdf").read_bytes()
    (width,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+)", pdf)
    assert float(width) / 72 * 2.54 == pytest.approx(8, abs=0.01) and b"/Type3" not in pdf
    (width,) = re.findall(r'width="([\d.]+)pt"', (tmp_path / "pareto.svg").read_text())
    assert float(width) / 72 * 2.54 == pytest.approx(8, abs=0.01)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is drawn."""
    figures, make = [], pareto_figure.written_figure

    @contextmanager
    def written(*given: Any) -> Iterator[Figure]:
        with make(*given) as figure:
            yield figure
            figures.append(figure)

    monkeypatch.setattr(pareto_figure, "written_figure", written)
    return figures


def test_in_a_column_every_text_can_be_read_and_lies_inside_beside_the_others(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    slow = sample_result("hf_generate_with_a_long_name", {}, 0.04)
    draw_pareto([*sample_sweep(), slow], tmp_path / "pareto", ["pdf"])
    (figure,) = drawn
    texts = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]
    assert min(one.get_size() for one in texts) >= 5
    (part,) = figure.subfigs
    legend, *below = [
        part.legends[0].get_window_extent(),
        *(one.get_window_extent() for one in part.texts),
    ]
    axes = part.axes[0].get_tightbbox()
    assert (
        below
        and not any(one.overlaps(legend) or one.overlaps(axes) for one in below)
        and not legend.overlaps(axes)
    )
    for box in (*below, legend, axes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0
    assert "beyond the axis: hf_generate_with_a_long_name 0.04×" in part.axes[0].get_xlabel()
    assert "hf_generate_with_a_long_name" not in [
        one.get_text() for one in part.legends[0].get_texts()
    ]


def test_on_a_screen_long_names_lie_inside_the_picture_and_cover_nothing(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    setting = {"target": "a-target-with-a-long-name.gguf", "draft": "a-drafter-with-a-long-name"}
    setting |= {"dataset": "summaries_of_whole_books", "baseline": "hf_prompt_lookup"}
    long = sample_result("bild", {}, 1.5, setting=setting)
    draw_pareto([with_quality(long, metric="evaluate:rouge@rougeLsum")], tmp_path / "a", ["png"])
    (figure,) = drawn
    (part,) = figure.subfigs
    for text in (*part.texts, *part.axes[0].texts):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
    boxes = [text.get_window_extent() for text in part.texts]
    axes = part.axes[0].get_tightbbox()
    assert len(boxes) == 5  # two lines of the title, two below it, the front
    assert not any(box.overlaps(axes) for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.slow
def test_each_setting_gets_its_own_panel(tmp_path: Path) -> None:
    heights = []
    for results in (sample_sweep(), sample_sweep() + sample_sweep(setting={"dataset": "iwslt"})):
        draw_pareto(results, tmp_path / "pareto.png")
        heights.append(Image.open(tmp_path / "pareto.png").size[1])
    assert heights[1] == pytest.approx(2 * heights[0], abs=2)


def test_each_panel_says_what_tells_its_setting_from_the_others(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    results = [
        sample_result("bild", {}, 1.5, setting={"batch": batch, "seed": 7}) for batch in (1, 4)
    ]
    draw_pareto(results, tmp_path / "pareto", ["png", "pdf"])
    for figure in drawn:
        for place, part in enumerate(figure.subfigs):
            words = " ".join(text.get_text() for text in part.texts).lower()
            assert f"setting {place + 1}, batch {(1, 4)[place]}" in words and "seed" not in words
    draw_pareto(results[:1], tmp_path / "alone", ["png"])
    assert not any("setting" in text.get_text().lower() for text in drawn[-1].subfigs[0].texts)


def test_in_a_column_the_title_of_long_numbers_lies_inside(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    tiny = with_quality(sample_result("bild", {}, 1.5, 0.001), value=-100.125, baseline=-100.126)
    draw_pareto([tiny], tmp_path / "pareto", ["pdf"])
    (figure,) = drawn
    axes = figure.subfigs[0].axes[0]
    assert axes.get_tightbbox().x0 >= figure.bbox.x0


@pytest.mark.parametrize(
    "results",
    [
        [sample_result("a$b_{$", {"k": "$x^{"}, 1.5)],
        [sample_result("bild", {"fallback": 0.5}, None, setting={"baseline": None})],
        [
            sample_baseline(),
            sample_result("bild", {"fallback": 0.5}, 2.0),
            sample_result("hf_generate", {}, 0.04),
        ],
    ],
    ids=["dollar signs in names", "no baseline", "a logarithmic axis"],
)
def test_whatever_was_measured_is_drawn(tmp_path: Path, results: list) -> None:
    draw_pareto(results, tmp_path / "pareto.png")
    assert Image.open(tmp_path / "pareto.png").size[0] == 1200


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got none"):
        draw_pareto([], tmp_path / "pareto.png")


def test_points_timed_on_a_busy_machine_are_counted_below_the_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    monkeypatch.setattr(
        "matplotlib.figure.FigureBase.text",
        lambda *given, **_: texts.append(" ".join(given[3].split())),
    )
    busy = sample_result(
        "bild", {}, 1.5, environment={**ENVIRONMENT, "busy_elsewhere_percent": 74.4}
    )
    draw_pareto([sample_baseline(), busy], tmp_path / "pareto.png")
    draw_pareto([sample_baseline()], tmp_path / "pareto.png")
    # on a screen and in a column, of the first
    told = ["1 of 2 points timed unreliably" in text for text in texts]
    assert sum(told) == 2


def test_marks_bars_lines_and_ticks_lie_where_the_numbers_are(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    points = [
        sample_result("bild", {"fallback": at}, speedup, loss)
        for at, speedup, loss in ((0.5, 2.0, -0.5), (0.9, 1.25, -0.6))
    ]
    draw_pareto(points, tmp_path / "pareto", ["png"])
    axes = drawn[0].subfigs[0].axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    hollow = {line.get_xdata()[0]: line.get_markerfacecolor() == "white" for line in marks}
    assert hollow == {0.5: False, 0.8: True}  # the second is slower and worse
    (group,) = by_setting(points)
    bars = [bar.get_segments()[0] for bar in axes.collections]
    for _, at in group.placed:
        for ends in (
            [(at.x_low, at.y), (at.x_high, at.y)],
            [(at.x, at.y_low), (at.x, at.y_high)],
        ):
            assert any(np.allclose(bar, ends) for bar in bars)
    levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
    assert levels == [41.0, 40.0]
    (top,) = axes.child_axes
    speedups = [round(1 / place, 6) for place in top.get_xticks()]
    assert speedups == speedup_ticks(*group.limits()[0])


def test_ticks_are_round_and_within_the_axis() -> None:
    assert speedup_ticks(0.5, 1.1) == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert speedup_ticks(0.9, 1.02) == [1.0, 1.1]
    assert log_ticks(0.03, 4.0) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]


def test_the_front_ends_at_the_baseline_when_nothing_faster_is_as_good() -> None:
    (group,) = by_setting([sample_baseline(), sample_result("bild", {}, 2.0, -0.5)])
    assert front_corners(group) == [(0.5, 40.5), (1.0, 41.0)]


def test_labels_cover_neither_each_other_nor_points_and_stay_inside() -> None:
    anchors = [(100.0 + 6 * at, 100.0) for at in range(5)]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    for anchor in anchors:
        box = free_place(anchor, LABEL, taken, [], BOUNDS, 5)
        assert box.count_overlaps(taken) == 0 and (round(box.width), round(box.height)) == (62, 22)
        assert 0 <= box.x0 and box.x1 <= 400 and 0 <= box.y0 and box.y1 <= 300
        taken.append(box)


def test_marks_of_the_front_have_their_number_beside_them_and_their_knobs_in_a_list_below(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw_pareto(sample_sweep(), tmp_path / "pareto")
    (group,) = by_setting(sample_sweep())
    for figure in drawn:
        (part,) = figure.subfigs
        axes = part.axes[0]
        numbers = {
            one.get_text(): one.get_window_extent()
            for one in axes.texts
            if one.get_text().isdigit()
        }
        assert list(numbers) == ["1", "2", "3", "4", "5", "6"]
        marks = [axes.transData.transform((at.x, at.y)) for _, at in group.placed]
        for number, box in numbers.items():
            at = group.position(group.front[int(number) - 1])
            middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
            nearest = min(marks, key=lambda mark, middle=middle: math.dist(mark, middle))
            assert tuple(nearest) == tuple(axes.transData.transform((at.x, at.y)))
            assert math.dist(nearest, middle) < 40
        listed = [one.get_text() for one in part.texts if one.get_text()[:1].isdigit()]
        assert sorted(line.split(":")[0] for line in listed)[:2] == [
            "1  bild (fallback 0.3, rollback 5)",
            "2  bild (fallback 0.5, rollback 5)",
        ]
        assert len(listed) == 6


@pytest.mark.slow
def test_of_a_long_front_both_ends_are_listed_and_the_others_counted(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    results = [
        sample_result("bild", {"fallback": at}, 2 - at / 100, -1 + at / 100) for at in range(50)
    ]
    draw_pareto([sample_baseline(), *results], tmp_path / "pareto", ["png"])
    (part,) = drawn[0].subfigs
    lines = [one.get_text() for one in part.texts]
    assert any(line.startswith("1  bild (fallback 0)") for line in lines)
    assert any(line.startswith("50  bild (fallback 49)") for line in lines)
    assert "and 38 more on the front, in the report" in lines
