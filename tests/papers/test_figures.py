"""Every figure and table of the papers is drawn from outputs alone, with the paper's numbers and a
verdict.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

import scripts.figures
from bild_lab.errors import UserError
from bild_lab.lab.config.entrypoint import run_application
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.store.records import Sweep
from bild_lab.papers import drawings
from bild_lab.papers.drawings import quality_lines, traced_texts
from bild_lab.papers.figures import (
    FIGURES,
    GENERATE,
    against_generate,
    answers_left_out,
    draw_figure,
    over_generate,
)
from bild_lab.papers.published import AGREES, SCALES, load_published, published_names
from bild_lab.report.style import marks, paper_figure
from tests.papers.samples import RUNS, bild, bita, outputs_of, points, store
from tests.report.sample import sample_result, with_quality, with_speedup


def test_every_published_figure_can_be_drawn_and_every_drawing_has_its_numbers() -> None:
    assert sorted(FIGURES) == published_names()


@pytest.mark.fast("bild_fig8", "bita_tab4_9")
@pytest.mark.parametrize("name", published_names())
def test_a_figure_is_a_png_and_a_pdf_with_a_table_that_ends_in_verdicts(
    name: str, tmp_path: Path
) -> None:
    outputs_of(name, tmp_path, "small")
    drawn = draw_figure(name, tmp_path, tmp_path / "figures")
    assert (drawn.scale, drawn.path) == ("small", tmp_path / "figures" / f"{name}_small")
    files = sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert files == [f"{name}_small.{kind}" for kind in ("md", "pdf", "png")]
    with Image.open(drawn.path.with_suffix(".png")) as image:
        assert min(image.size) > 200
    assert drawn.path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    table = drawn.path.with_suffix(".md").read_text()
    assert load_published(name).hardware in table
    assert f"python scripts/figures.py {name} scale=small" in table
    assert (
        name == "bild_fig10"
        or "| panel | row | quantity | here | paper | tolerance | verdict |" in table
    )


@pytest.mark.slow
def test_the_papers_scale_comes_before_the_small_one(tmp_path: Path) -> None:
    for scale in ("small", "paper"):
        outputs_of("bild_fig4", tmp_path, scale)
    assert draw_figure("bild_fig4", tmp_path, tmp_path / "figures").scale == "paper"
    small = draw_figure("bild_fig4", tmp_path, tmp_path / "figures", "small")
    compared = [line for line in small.comparison.lines if line.reference is not None]
    agree = [line.verdict for line in compared].count(AGREES)
    assert small.scale == "small" and 0 < agree < len(compared)
    assert small.summary.splitlines() == [
        f"{small.path}.png, .pdf, .md: small scale",
        "  within the intervals: an aligned drafter is faster at minimal loss (multi30k)",
        "  within the intervals: an aligned drafter is faster at one point of loss (multi30k)",
        (
            f"  {agree} of {len(compared)} numbers agree with the paper, whose models, data and"
            " hardware are others"
        ),
    ]


@pytest.mark.parametrize("name", ["bild_fig4", "bita_tab7", "ppd_tab1"])
def test_without_outputs_the_message_names_what_to_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} wants finished points in {tmp_path}/") as refused:
        draw_figure(name, tmp_path, tmp_path / "figures")
    lines = str(refused.value).splitlines()
    assert all(
        f"  python scripts/paper_run.py {name} scale={scale} run=true" in lines for scale in SCALES
    )
    assert not (tmp_path / "figures").exists()


def test_points_that_give_a_figure_no_number_are_not_called_missing(tmp_path: Path) -> None:
    (folder, _) = load_published("bild_fig8").folders["small"]
    store(tmp_path / folder, [("toy_aligned", bild(1.5, loss=3.0), ())])
    with pytest.raises(UserError, match="got 1 point without a number for it, as those that lose"):
        draw_figure("bild_fig8", tmp_path, tmp_path / "figures")


def test_curves_of_another_figures_folder_alone_are_no_panel(tmp_path: Path) -> None:
    own, borrowed, _ = load_published("bild_fig5").folders["small"]
    others = [
        ("toy_aligned", bild(1.6, setting={"dataset": dataset}), ()) for dataset in ("toy", "wmt")
    ]
    store(tmp_path / borrowed, others)
    with pytest.raises(UserError, match="wants finished points"):
        draw_figure("bild_fig5", tmp_path, tmp_path / "figures")
    ablation = replace(bild(1.5, setting={"dataset": "toy"}), policy="bild_no_rollback")
    store(tmp_path / own, [("toy_aligned", ablation, ())])
    drawn = draw_figure("bild_fig5", tmp_path, tmp_path / "figures")
    assert {line.cell.panel for line in drawn.comparison.lines} == {"toy"}
    assert {line.cell.row for line in drawn.comparison.lines} == {
        "bild",
        "bild_no_rollback",
        "vanilla",
    }


def test_a_figure_says_which_answers_its_adapters_did_not_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = [bita(adapter=f"outputs/{name}/adapter") for name in ("with", "without", "gone")]
    for name, data in {"with": "9 answers to lima + cip", "without": "9 answers to cip"}.items():
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / f"outputs/{name}/metrics.json").write_text(json.dumps({"data": data}))
    (told,) = answers_left_out(points)
    assert told.startswith("1 of the 2 trained modules learned no answers to GAIR/lima")
    assert answers_left_out([points[0], points[2], bild(1.5)]) == []
    # PPD's heads, and answers of a file, of which it is not known what they answer
    for data in ("9 conversations of sharegpt", "9 answers to llama2/assembled"):
        (tmp_path / "outputs/without/metrics.json").write_text(json.dumps({"data": data}))
        assert answers_left_out([points[1]]) == []


@pytest.mark.slow
def test_match_rates_agree_with_the_table_they_are_set_beside(tmp_path: Path) -> None:
    outputs_of("ppd_tab4_6", tmp_path, "paper")
    lines = draw_figure("ppd_tab4_6", tmp_path, tmp_path / "figures").comparison.lines
    assert [(line.cell.panel, line.reference, line.verdict) for line in lines] == [
        ("squad, tokens 1-2", 0.3015, AGREES),
        ("squad", 0.6837, AGREES),
    ]
    (line,) = draw_figure("ppd_tab1", tmp_path, tmp_path / "figures").comparison.lines
    assert line.cell.row == "layer 20, trained, k = 3"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is drawn."""
    drawn: list[Figure] = []

    @contextmanager
    def page(*_: object) -> Iterator[Figure]:
        drawn.append(Figure())
        yield drawn[-1]

    monkeypatch.setattr(drawings, "_page", page)
    return drawn


def test_lines_lie_at_the_baseline_of_all_rows_and_a_point_lower() -> None:
    axes = Figure().subplots()
    quality_lines(axes, {"a": [bild(2.0)], "b": [bild(1.5)]}, marks(["a", "b"]))
    assert [line.get_ydata()[0] for line in axes.lines] == [41.0, 40.0]


@pytest.mark.parametrize(("metric", "stars"), [("ROUGE-Lsum", 2), ("ROUGE-L", 0)])
def test_the_papers_qualities_are_marked_on_an_axis_of_their_metric_alone(
    metric: str, stars: int, tmp_path: Path, pages: list[Figure]
) -> None:
    """Of another metric its speeds are lines: 41.5 is no ROUGE-L of CNN/DailyMail."""
    point = with_quality(bild(1.7, setting={"dataset": "cnn_dailymail"}), metric=metric)
    store(tmp_path / "bild_fig4_paper", [("toy", point, ())])
    draw_figure("bild_fig4", tmp_path, tmp_path, kinds=["png"])
    (axes,) = pages[0].axes
    spots = defaultdict(list)
    for line in axes.lines:
        spots[line.get_marker()].append((line.get_xdata()[0], line.get_ydata()[0]))
    assert spots["*"] == [(1 / 1.71, 41.44), (1 / 2.05, 40.57)][:stars]
    assert spots["o"] == [(1 / 1.7, 41.0)]
    (legend,) = pages[0].legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["unaligned", "paper" if stars else "the paper's speed"]


def test_a_legend_of_many_rows_is_within_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: three names beside one another were cut off at both sides."""
    ends: list[tuple[float, float]] = []

    @contextmanager
    def page(*words: object) -> Iterator[Figure]:
        with paper_figure(*words) as figure:
            yield figure
            figure.draw_without_rendering()
            box = figure.legends[0].get_window_extent()
            ends.append((box.x0 / figure.bbox.width, box.x1 / figure.bbox.width))

    monkeypatch.setattr(drawings, "_page", lambda path, inches, _: page(path, inches, "", ""))
    outputs_of("bild_lossy", tmp_path, "small")
    draw_figure("bild_lossy", tmp_path, tmp_path, kinds=["pdf"])
    ((left, right),) = ends
    assert 0 <= left < right <= 1


def test_the_share_that_was_replaced_is_drawn_in_percent(
    tmp_path: Path, pages: list[Figure]
) -> None:
    outputs_of("bild_fig2", tmp_path, "small")
    draw_figure("bild_fig2", tmp_path, tmp_path, kinds=["png"])
    (axes,) = pages[0].axes
    (share,) = {line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    assert share == pytest.approx(100 * 100 / 1650)


def test_texts_mark_the_targets_tokens(tmp_path: Path) -> None:
    outputs_of("bild_fig10", tmp_path, "small")
    (text,) = traced_texts(
        [result for folder in tmp_path.iterdir() for result in Sweep(folder).results()]
    )
    told = {name: "".join(piece.text for piece in pieces).strip() for name, pieces in text.items()}
    assert told == {
        "source": "ein Haus",
        "large": "a little house",
        "small": "one house",
        "BiLD": "a small house",
    }
    assert [(piece.text, piece.by_target) for piece in text["BiLD"]] == [
        ("a", False), (" small", True), (" house", False), ("", True),
    ]  # fmt: skip


def script(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["figures.py", *words])
    with pytest.raises(SystemExit) as ended:
        run_application(scripts.figures.main, None)
    return ended.value.code


def test_the_script_draws_into_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    outputs_of("spec_tab4", tmp_path, "small")
    assert script(["spec_tab4", f"outputs={tmp_path}"], monkeypatch) == 0
    assert (tmp_path / "figures" / "spec_tab4_small.png").is_file()
    # numbers beside a formula are not counted
    assert capsys.readouterr().out.endswith(": small scale\n")
    # what there is
    assert script(["spec_tab4", "bild_fig4", f"outputs={tmp_path}"], monkeypatch) == 0
    told = capsys.readouterr().err
    assert "bild_fig4 wants finished points" in told and "scale=small run=true" in told
    assert "experiment=" not in told  # of several figures no commands
    assert script(["bild_fig4", f"outputs={tmp_path}"], monkeypatch) == 2


@pytest.mark.parametrize("name", ["bild_fig4", "spec_tab4"])
def test_a_vector_figure_is_as_wide_as_a_column(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs_of(name, tmp_path, "small")
    assert script([name, f"outputs={tmp_path}", "format=svg"], monkeypatch) == 0
    files = sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert files == [f"{name}_small.md", f"{name}_small.svg"]
    (width,) = re.findall(
        r'width="([\d.]+)pt"', (tmp_path / "figures" / f"{name}_small.svg").read_text()
    )
    assert float(width) / 72 * 2.54 == pytest.approx(8, abs=0.01)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "bild_fig10"),
        (["bild_fig4", "format=gif"], "got gif"),
        (["bild_fig4", "output=x"], "output"),
        (["bild_fig4", "scale=tiny"], "'tiny'"),
        (["all", "scale=small", "run=true"], "got run; leave it out"),
        (["bild_fig11"], "'bild_fig11'"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert script(words, monkeypatch) == 2
    assert named in " ".join(capsys.readouterr().err.split())


def generate(speedup: float, **setting: object) -> Result:
    """The point of vanilla that is timed against `generate`."""
    own = {"baseline": "hf_generate", "n_examples": 200, **setting}
    return sample_result("vanilla", {}, speedup, setting=own, tokens_per_s_ratio=speedup)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_every_item_with_a_speedup_times_the_papers_own_baseline(name: str) -> None:
    quantities = {number.quantity for number in FIGURES[name].numbers(points(name))}
    published, timed = load_published(name), any("speedup" in one for one in quantities)
    for scale in SCALES:
        assert any(GENERATE in folder for folder in published.folders[scale]) == timed
        written = [one for one in published.commands[scale] if "/generate" in one]
        assert bool(written) == timed, published.commands[scale]


def test_a_speed_over_generate_is_that_over_vanilla_times_vanillas() -> None:
    fast = with_speedup(bild(2.0), low=1.8, high=2.3)
    vanilla = with_speedup(generate(1.5), low=1.4, high=1.6)
    (one,) = over_generate([fast], [vanilla])
    wide = ((2 / 1.8, 1.5 / 1.4), (2.3 / 2, 1.6 / 1.5))
    down, up = (math.exp(math.hypot(*map(math.log, pair))) for pair in wide)
    found = (one.speedup.value, one.speedup.low, one.speedup.high)
    assert found == pytest.approx((3.0, 3 / down, 3 * up))
    assert over_generate([bita(2.0)], [vanilla])[0].categories["coding"].tokens_per_s_ratio == 3.75
    # a ratio of tokens a second is multiplied by one, as texts of other lengths count in it
    (longer,) = over_generate([bita(2.0)], [replace(vanilla, tokens_per_s_ratio=1.25)])
    assert (longer.tokens_per_s_ratio, longer.speedup.value) == (2.5, 3.0)
    # more than its tokens per call, which bound a speed over `vanilla`: figures left it out
    (over_slow,) = over_generate([fast], [generate(15.0)])
    assert replace(fast, speedup=over_slow.speedup, tokens_per_s_ratio=30.0).impossible
    assert not replace(over_slow, tokens_per_s_ratio=30.0).impossible
    for key, other in {
        "dtype": "float16",
        "dataset": "wmt",
        "weights": "x",
        "compile": "x",
        "hardware": "x",
        "device": "cuda",
        "threads": 64,
        "batch": 4,
    }.items():
        assert over_generate([fast], [generate(1.5, **{key: other})]) == []


def test_a_figure_tells_its_speedups_over_vanilla_and_over_generate(tmp_path: Path) -> None:
    outputs_of("bita_tab1", tmp_path, "small")
    text = draw_figure("bita_tab1", tmp_path, tmp_path).path.with_suffix(".md").read_text()
    printed = "printed ones are over the decoding loop of Transformers (§4.1.3)"
    assert f"Speedups are over `vanilla`; {printed}. Over `generate` they were not" in text
    store(tmp_path / "bita_generate_small", [("user", generate(1.25), ())])
    drawn = draw_figure("bita_tab1", tmp_path, tmp_path)
    assert {line.cell.value for line in drawn.comparison.lines} == {2.0}
    text = drawn.path.with_suffix(".md").read_text()
    above, told, below = text.partition(f"Speedups above are over `vanilla`; {printed}.")
    assert (
        told and "`vanilla` itself is 1.25 times as fast as `generate`, on the first 200" in below
    )
    assert "| greedy speedup | 2.00 |" in above and "| greedy speedup | 2.50 |" in below


def in_setting(result: Result, **changes: object) -> Result:
    """The point of another setting, which has a hash of its own."""
    setting = {**result.setting, **changes}
    return replace(result, point=f"{result.point} {changes}", setting=Setting(setting))


def test_a_trial_on_few_examples_and_an_earlier_measurement_do_not_count(tmp_path: Path) -> None:
    """Each is faster than what counts: the greatest number of a row would be theirs."""
    seeded, trial = in_setting(bita(2.5), seed=1), in_setting(bita(3.4), n_examples=10)
    other_knobs = in_setting(bita(1.5, top_k=1), n_examples=10)
    store(
        tmp_path / "bita_tab1_small",
        [("user", one, ()) for one in (trial, other_knobs, seeded, bita(2.0))],
    )
    store(
        tmp_path / "bita_generate_small",
        [("user", one, ()) for one in (generate(1.25), in_setting(generate(1.9), n_examples=10))],
    )
    drawn = draw_figure("bita_tab1", tmp_path, tmp_path)
    assert [line.cell.value for line in drawn.comparison.lines] == [2.0]
    text = drawn.path.with_suffix(".md").read_text()
    assert "`vanilla` itself is 1.25 times as fast" in text and "| 2.50 |" in text
    assert "\n\nThe points have bita top_k " in text


def test_generate_counts_once_for_each_machine_and_batch(tmp_path: Path) -> None:
    """A later one elsewhere does not take the place of one that a figure's points need."""
    alike = [generate(1.25), generate(1.5, threads=64), generate(1.75, batch=4)]
    store(tmp_path / "bita_generate_small", [("user", one, ()) for one in alike])
    counted = against_generate(load_published("bita_tab1"), tmp_path, "small")
    assert [point.speedup.value for point in counted] == [1.25, 1.5, 1.75]


def test_another_policy_that_was_timed_against_generate_is_not_vanilla(tmp_path: Path) -> None:
    """As `paper_run.py bild/fig4 policy=bild_released` leaves it."""
    outputs_of("bita_tab1", tmp_path, "small")
    own = {"baseline": "hf_generate", "n_examples": 200}
    released = sample_result("bild_released", {}, 3.0, setting=own, tokens_per_s_ratio=3.0)
    store(tmp_path / "bita_generate_small", [("user", released, ())])
    text = draw_figure("bita_tab1", tmp_path, tmp_path).path.with_suffix(".md").read_text()
    assert "Over `generate` they were not measured" in text


def test_a_figure_says_where_sentences_were_split_without_nltks_data(tmp_path: Path) -> None:
    for splitter, told in (("punkt_tab", False), ("punkt_abbreviations", True)):
        signed = with_quality(bita(), signature=f"rouge_score|sentences:{splitter}")
        store(tmp_path / splitter / "bita_tab1_small", [("user", signed, ())])
        drawn = draw_figure("bita_tab1", tmp_path / splitter, tmp_path / splitter)
        text = drawn.path.with_suffix(".md").read_text()
        assert ("In 1 of 1 points ROUGE-Lsum split sentences by a short list" in text) == told
