"""The small pictures of the lab book."""

from __future__ import annotations

import math

import pytest

from bild_lab.lab.results.groups import by_setting
from bild_lab.report.book.entry import HEIGHT, WIDTH, Picture
from bild_lab.report.book.pictures import MOST_DOTS, curve, intervals, plane
from tests.report.sample import sample_baseline, sample_result, sample_sweep, with_quality


def drawn(results: list) -> Picture | None:
    return plane(by_setting(results)[0])


def test_faster_is_left_better_is_up_and_the_front_is_a_line_through_its_dots() -> None:
    slow, fast, poor = (
        sample_result("bild", {"fallback": at}, speedup, difference)
        for at, speedup, difference in ((0.9, 1.1, 2.0), (0.1, 2.0, -1.0), (0.5, 1.2, -3.0))
    )
    picture = drawn([sample_baseline(), slow, fast, poor])
    weak, *strong = picture.dots
    left, right = sorted(strong, key=lambda dot: dot.x)
    assert left.y > right.y and not weak.strong and weak.y > left.y
    (front,) = [line for line in picture.lines if line.role == "front"]
    assert front.corners == [(left.x, left.y), (right.x, left.y), (right.x, right.y)]
    assert picture.label == "BLEU against relative latency, 4 points; faster is left, better is up"


@pytest.mark.parametrize("fastest", [1.5, 40.0])
def test_everything_is_inside_the_frame_on_both_kinds_of_axes(fastest: float) -> None:
    results = [*sample_sweep(), sample_result("ngram", {}, fastest)]
    assert by_setting(results)[0].wide == (fastest > 8)
    picture = drawn(results)
    places = [(dot.x, dot.y) for dot in picture.dots] + [place for line in picture.lines for place in line.corners]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
    assert len({x for x, _ in places}) > 5


def test_without_a_baseline_the_axis_is_the_latency() -> None:
    alone = [sample_result("bild", {"fallback": at}, None, setting={"baseline": None}) for at in (0.1, 0.2)]
    picture = drawn(alone)
    assert "against latency" in picture.label and len(picture.dots) == 2
    assert not [line for line in picture.lines if line.role == "base"]


def test_a_point_without_quality_is_not_drawn() -> None:
    assert drawn([with_quality(sample_result("bild", {}, 1.5), value=None)]) is None
    assert drawn([with_quality(sample_result("bild", {}, 1.5), value=math.nan)]) is None


def test_many_points_keep_their_front() -> None:
    many = [sample_result("bild", {"fallback": at / 500}, 1.2 - at / 1000, -1.0) for at in range(200)]
    picture = drawn([*many, sample_result("ngram", {}, 1.5, 2.0)])
    assert len(picture.dots) == MOST_DOTS and [dot.strong for dot in picture.dots].count(True) == 1


def test_a_loss_that_falls_is_drawn_falling() -> None:
    picture = curve("loss", [(100.0 * at, 5.0 - at / 100) for at in range(400)], [(20000.0, 3.2)])
    corners = picture.lines[0].corners
    assert len(corners) <= MOST_DOTS + 3 and corners[0][1] < corners[-1][1]  # y grows downwards
    assert corners[0][0] < picture.dots[0].x < corners[-1][0]
    assert curve("loss", [(1.0, 2.0), (2.0, math.nan)]) is None


def test_an_interval_that_leaves_the_line_stands_out() -> None:
    picture = intervals("ratios", [(0.7, 0.8, 0.9), (0.9, 1.0, 1.1), (1.2, 1.5, 1.9)])
    middle = picture.lines[0].corners[0][0]
    assert [dot.strong for dot in picture.dots] == [True, False, True]
    assert picture.dots[0].x < middle < picture.dots[2].x and picture.dots[1].x == middle
    assert intervals("ratios", [(0.0, 0.5, 1.0)]) is None
