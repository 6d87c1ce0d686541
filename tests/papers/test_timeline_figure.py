"""Tests of the trace diagram: what its lanes hold, which points get one, and the script that draws
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

import run
from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.timeline_figure import Lane, draw_lane, draw_trace, selected, timelines_of
from scripts import sweeps
from tests.report.sample import (
    sample_baseline,
    sample_drafted,
    sample_example,
    sample_sweep,
)

# drafted tokens, how many are accepted, calls of the drafter
Rounds = list[tuple[list[int], int, int]]


def example(
    rounds: Rounds, tokens: int, verified: bool = True, name: str = "test-0"
) -> MeasuredExample:
    """An example whose stages take a second each, with one between them; `verified`: the last round
    is too.
    """
    stages = ["prefill", *["draft", "verify"] * len(rounds)]
    spans = [(stage, 2 * index, 2 * index + 1) for index, stage in enumerate(stages)]
    return sample_example(
        name,
        token_ids=list(range(tokens)),
        rounds=[
            {"drafted": one, "accepted": kept, "draft_calls": calls} for one, kept, calls in rounds
        ],
        spans=spans if verified else spans[:-1],
    )


ALONE: Rounds = [([], 0, 0)] * 6
DRAFTED: Rounds = [([5, 6, 7], 3, 3), ([5, 6, 7], 0, 3)]


def write(sweep: Sweep, *points: tuple[Result, list[MeasuredExample]]) -> Sweep:
    for result, examples in points:
        sweep.write_point(result.point, "", result, examples)
    return sweep


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """The baseline and two windows on one example."""
    drafted = [
        (
            sample_drafted("speculative", {"window": window}, speedup, 0.0, (0.8, 1.0)),
            [example(DRAFTED, 5)],
        )
        for window, speedup in ((3, 1.6), (7, 1.3))
    ]
    return write(Sweep(tmp_path / "sweep"), (sample_baseline(), [example(ALONE, 6)]), *drafted)


def test_the_baseline_comes_first_and_a_lane_holds_every_call_and_its_end(sweep: Sweep) -> None:
    alone, _, lane = lanes = timelines_of(sweep).lanes
    assert [(one.policy, one.knobs[-1:]) for one in lanes] == [
        ("vanilla", ""),
        ("speculative", "7"),
        ("speculative", "3"),  # the fastest last
    ]
    assert lane.knobs == "window\N{NO-BREAK SPACE}3"
    assert lane.calls["prefill"] == [(0, 1000)] and lane.calls["verify"] == [
        (4000, 5000),
        (8000, 9000),
    ]
    starts = [2000, 2333.3, 2666.7, 6000, 6333.3, 6666.7]
    assert [start for start, _ in lane.calls["draft"]] == pytest.approx(starts, abs=0.1)
    assert (lane.end, lane.tokens, lane.rejected) == (9000, 5, [8500])
    assert alone.calls["draft"] == []
    axes = Figure().subplots()
    draw_lane(axes, 0, lane, points_per_ms=1.0)
    bars = [path.get_extents().intervalx.tolist() for path in axes.collections[-1].get_paths()]
    assert bars == [[4000, 5000], [8000, 9000]]


def lane_of(policy: str, row: MeasuredExample, folder: Path) -> Lane:
    sweep = write(Sweep(folder), (sample_drafted(policy, {}, 1.5, 0.0, (0.8, 1.0)), [row]))
    (lane,) = timelines_of(sweep).lanes
    return lane


def test_a_heading_of_several_lines_has_room_above_the_legend(sweep: Sweep, tmp_path: Path) -> None:
    usual, heights = timelines_of(sweep), []
    for words in (1, 40):
        draw_trace(replace(usual, example="a-name " * words), tmp_path / "trace.png")
        heights.append(Image.open(tmp_path / "trace.png").size[1])
    assert heights[1] - heights[0] >= 2 * 20  # pixels, of two lines more


def test_a_tail_that_nobody_verified_ends_with_its_draft(tmp_path: Path) -> None:
    lane = lane_of(
        "bild", example([([5, 6, 7], 3, 4), ([5, 6], 2, 2)], 6, verified=False), tmp_path
    )
    assert (lane.end, len(lane.calls["draft"]), len(lane.calls["verify"])) == (7000, 6, 1)
    assert lane.rejected == []


def test_a_drafter_without_a_model_has_one_part_a_draft(tmp_path: Path) -> None:
    lane = lane_of("ngram", example([([5, 6, 7], 3, 0)], 2), tmp_path)
    assert (lane.calls["draft"], lane.end) == ([(2000, 3000)], 5000)


def test_of_many_points_the_baseline_and_five_selected_ones_have_a_lane() -> None:
    (group,) = by_setting(sample_sweep())
    chosen = selected(group)
    assert len(chosen) == 6
    assert chosen[0].policy == "vanilla"
    assert {result.policy for result in chosen} > {"bild", "speculative"}
    speedups = [result.speedup.value for result in chosen[1:]]
    assert speedups == sorted(speedups)


def test_of_several_examples_one_of_median_length_is_shown(tmp_path: Path) -> None:
    lengths = {"long": 9, "short": 3, "usual": 5}
    rows = [example(DRAFTED, tokens, name=name) for name, tokens in lengths.items()]
    point = sample_drafted("bild", {}, 1.5, 0.0, (0.8, 1.0))
    assert timelines_of(write(Sweep(tmp_path), (point, rows))).example == "usual"


def test_a_sweep_without_spans_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"measure\.traced_examples=1"):
        timelines_of(Sweep(tmp_path))


@pytest.mark.slow
def test_a_run_keeps_the_spans_of_traced_examples_and_the_script_draws_them(
    command: Callable, checkpoints: Path, data: Path
) -> None:
    pair = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "name=tested",
    ]
    small = [
        "dataset=multi30k",
        f"dataset.path={data}",
        "dataset.limit=3",
        "decoding.max_new_tokens=8",
    ]
    quick = [
        "measure.repeats=1",
        "measure.warmup=0",
        "measure.traced_examples=2",
        "measure.baseline=null",
    ]
    code, printed = command(run, *pair, *small, *quick, "policy=speculative", "policy.window=3")
    assert code == 0, printed
    (file,) = Path("outputs/tested/points").glob("*/examples.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["spans" in row for row in rows] == [True, True, False]
    for row in rows[:2]:
        stages = [stage for stage, _, _ in row["spans"]]
        assert stages == ["prefill", *["draft", "verify"] * len(row["rounds"])]
        assert all(round(moment, 6) == moment for _, *span in row["spans"] for moment in span)
        assert [one["draft_calls"] for one in row["rounds"]] == [
            len(one["drafted"]) for one in row["rounds"]
        ]
    traced = sweeps.as_overrides(["trace", "outputs/tested"])
    assert command(sweeps, *traced, "example=test-1") == (
        0,
        "outputs/tested/trace.png shows example test-1\n",
    )
    assert Image.open("outputs/tested/trace.png").size[0] == 1500
    for name, begin in (("one.png", b"\x89PNG"), ("one.pdf", b"%PDF"), ("one.svg", b"<?xml")):
        code, printed = command(sweeps, *traced, f"output=there/{name}")
        assert code == 0 and Path("there", name).read_bytes().startswith(begin), printed
    code, printed = command(sweeps, *traced, "output=there/one.jpg")
    assert (code, "must end in .png, .pdf or .svg, got there/one.jpg" in printed) == (2, True)
