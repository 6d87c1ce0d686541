"""Every figure and table of the papers is drawn from outputs alone, with the paper's numbers and a verdict."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

import scripts.figures
from bild_lab.errors import UserError
from bild_lab.lab.cli import run_application
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result
from bild_lab.papers import finished_points as rows
from bild_lab.papers.cells import Cell, Cells
from bild_lab.papers.drawings import Picture, legend_columns, quality_lines
from bild_lab.papers.figures import FIGURES, draw_figure
from bild_lab.papers.finished_points import read_points
from bild_lab.papers.published import Order, load_published, published_names
from bild_lab.papers.verdicts import AGREES, FAILS, HIGHER, HOLDS, LOWER, UNKNOWN, WITHIN, compare, judged, markdown
from bild_lab.report.style import marks
from tests.papers.test_replayed_points import store_replayed
from tests.report.sample import BASELINE_QUALITY, ENVIRONMENT, sample_drafted, sample_example, sample_result
from tests.thinned import thinned

PIPELINE = {"match_rate": 0.5, "latency_units": 4.6, "compute_units": 9.0, "predicted_latency_units": 4.5}
PIPELINE |= {"layers": 6, "exit_layer": 3}
ALIGNED = {"draft": "t5-tiny-aligned"}  # other weights are another setting
PIPELINE |= {"predicted_compute_units": 9.1, "theorem": 1.33}


def bild(speedup: float, loss: float = 0.0, rollback: float = 2.0, **changes: object) -> Result:
    knobs = {"fallback": 0.5, "rollback": rollback, "window": 10, "verify_tail": True}
    return sample_drafted("bild", knobs, speedup, -loss, (0.8, 0.9), rollbacks=100, **changes)


def other(policy: str, speedup: float = 1.5, loss: float = 0.0, **knobs: object) -> Result:
    return sample_drafted(policy, {"window": 5, **knobs}, speedup, -loss, (0.7, 1.0), rollbacks=90)


def bita(speedup: float = 2.0, policy: str = "bita", trained: dict | None = None, **knobs: object) -> Result:
    adapter = {"adapter": "outputs/any/adapter", "decoding": "efficient_tree", "top_k": 5}
    facts = {"trained": {"adapter": {"prompt": "deep", "prompt_tokens": 16, "mask_tokens": 3, **(trained or {})}}}
    coding = {"n_examples": 1, "tokens": 9, "tokens_per_s": 5.0, "baseline_tokens_per_s": 2.0, "speedup": {}}
    coding |= {"tokens_per_s_ratio": 2.5, "tokens_per_target_call": 2.0, "acceptance_rate": 0.5}
    own = {"tokens_per_s_ratio": speedup, "categories": {"coding": coding}, "facts": facts}
    return sample_result(policy, {**adapter, **knobs}, speedup, **own)


def texts() -> list[MeasuredExample]:
    """Two tokens are the target's: the second, and the end."""
    rounds = [{"drafted": [3], "accepted": 1, "next_token": 4}, {"drafted": [5], "accepted": 1, "next_token": 1}]
    pieces = {"3": "a", "4": " small", "5": " house", "1": "</s>"}
    own = {"prompt": "ein Haus", "token_ids": [3, 4, 5, 1], "rounds": rounds, "pieces": pieces}
    return [sample_example(**own, prediction="a small house", baseline_prediction="a little house")]


def drafters_own() -> list[MeasuredExample]:
    return [sample_example(prompt="ein Haus", token_ids=[], prediction="one house")]


# for each figure what its runs leave: the pair, the result, its examples
Run = tuple[str, Result, Sequence[MeasuredExample]]
RUNS: dict[str, Callable[[], list[Run]]] = {
    "bild_fig4": lambda: [
        ("toy", bild(1.5), ()),
        ("toy", bild(1.7, 1.0, 5.0), ()),
        ("toy_aligned", bild(1.6, setting=ALIGNED), ()),
    ],
    "bild_fig5": lambda: [("toy_aligned", bild(1.6), ()), ("toy_aligned", other("bild_no_rollback", 1.4, 1.0), ())],
    "bild_fig6_7": lambda: [("user", other("bild_early_exit", 1.6), ()), ("user", other("calm", 1.3, 0.5), ())],
    "bild_fig8": lambda: [("toy_aligned", bild(1.6), ())],
    "bild_fig9": lambda: [("toy_aligned", bild(1.6), ()), ("toy_aligned", bild(1.7, 1.0, 5.0), ())],
    "bild_fig10": lambda: [
        ("toy", bild(1.6), texts()),
        ("toy", sample_result("vanilla", {}, None, setting={"target": "t5-tiny", "baseline": None}), drafters_own()),
    ],
    "bild_speculative": lambda: [("toy", bild(1.6), ()), ("toy", other("speculative", 1.4, lenience=1.0), ())],
    "bild_cascades": lambda: [
        ("toy", bild(1.6), ()),
        ("toy", other("speculative_cascade", rule="chow"), ()),
        ("toy", other("typical_acceptance"), ()),
        ("toy", other("speculative", lenience=0.3), ()),
        *(("toy", other(policy), ()) for policy in ("static_ensemble", "relaxed", "fly", "judge", "step_cascade")),
    ],
    "spec_tab2": lambda: [("toy", other("speculative", lenience=1.0), ())],
    "spec_tab3": lambda: [("toy", other("speculative", lenience=1.0), ()), ("toy", other("ngram", order=2), ())],
    "spec_tab4": lambda: [("toy", other("speculative", lenience=1.0), ())],
    "spec_tab5": lambda: [
        ("toy", other("speculative", lenience=0.5), ()),
        ("toy", other("speculative", lenience=1.0), ()),
    ],
    "spec_fig2_4": lambda: [("toy", other("synthetic", acceptance_rate=0.7), ())],
    "bita_tab1": lambda: [("user", bita(), ())],
    "bita_tab2": lambda: [("user", bita(), ()), ("user", bita(1.1, "layer_skip"), ())],
    "bita_tab3_8": lambda: [("user", bita(), ()), ("user", bita(1.5, trained={"prompt": "none"}), ())],
    "bita_tab4_9": lambda: [("user", bita(), ()), ("user", bita(1.5, decoding="straightforward"), ())],
    "bita_tab7": lambda: [("user", bita(), ())],
    "bita_fig7": lambda: [("user", bita(), ()), ("user", bita(1.6, "medusa"), ())],
    "bita_fig8": lambda: [("user", bita(mask_tokens=1), ())],
    "bita_fig9": lambda: [("user", bita(prompt_tokens=8), ())],
    "ppd_fig2": lambda: [("toy", ppd(), ())],
    "ppd_fig4": lambda: [("toy", ppd(), ())],
}


def ppd() -> Result:
    return sample_result("ppd", {"exit_layer": 3, "top_k": 3, "heads": "shared"}, 0.9, pipeline=PIPELINE)


def store(folder: Path, runs: Sequence[Run]) -> None:
    """Finished points, as a sweep leaves them."""
    for number, (pair, result, examples) in enumerate(runs):
        Sweep(folder).write_point(f"{number:012d}", "", known(pair, result), examples)


def known(pair: str, result: Result) -> Result:
    """The result with the facts of its pair."""
    return replace(result, facts={**(result.facts or {}), "pair": pair, "aligned": pair == "toy_aligned"})


def store_match_rates(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps({"settings": {"dataset.name": "squad"}}))
    with (folder / "match_rates.csv").open("w") as stream:
        rows = csv.writer(stream)
        rows.writerow("layer top_k heads position matches count rate".split())
        rows.writerow([20, 3, "shared", "1-2", 3, 10, 0.3])
        rows.writerow([20, 3, "outputs/heads/heads", "all", 684, 1000, 0.684])


def outputs_of(name: str, outputs: Path, scale: str) -> None:
    folder = outputs / load_published(name).folders[scale][0]
    if name in RUNS:
        store(folder, RUNS[name]())
    elif name == "bild_fig2":
        store_replayed(folder, 90, "toy")
    else:
        store_match_rates(folder)


def points(name: str) -> list[Result]:
    return [known(pair, result) for pair, result, _ in RUNS[name]()]


def values(cells: Cells, name: str) -> dict[tuple[str, str], float]:
    return {(cell.row, cell.quantity): cell.value for cell in cells(points(name))}


def test_every_published_figure_can_be_drawn_and_every_drawing_has_its_numbers() -> None:
    assert sorted(FIGURES) == published_names()


@pytest.mark.parametrize("name", thinned(published_names(), 5))
def test_a_figure_is_a_png_and_a_pdf_with_a_table_that_ends_in_verdicts(name: str, tmp_path: Path) -> None:
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
    assert name == "bild_fig10" or "| panel | row | quantity | here | paper | tolerance | verdict |" in table


def test_points_timed_on_a_busy_machine_are_told_below_the_title_and_in_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, busy = bild(1.5), bild(1.7, 1.0, 5.0, environment={**ENVIRONMENT, "busy_elsewhere_percent": 74.4})
    store(tmp_path / load_published("bild_fig4").folders["small"][0], [("toy", quiet, ()), ("toy", busy, ())])
    drawn: list[Picture] = []
    monkeypatch.setitem(FIGURES, "bild_fig4", replace(FIGURES["bild_fig4"], draw=lambda one, _: drawn.append(one)))
    text = draw_figure("bild_fig4", tmp_path, tmp_path).path.with_suffix(".md").read_text()
    assert drawn[0].subtitle.endswith(", 1 of 2 points timed on a busy machine")
    assert "1 of 2 points was timed while other programs used 74 % of the machine" in text


def test_the_papers_scale_comes_before_the_small_one(tmp_path: Path) -> None:
    for scale in ("small", "paper"):
        outputs_of("bild_fig4", tmp_path, scale)
    assert draw_figure("bild_fig4", tmp_path, tmp_path / "figures").scale == "paper"
    small = draw_figure("bild_fig4", tmp_path, tmp_path / "figures", "small")
    compared = [line for line in small.comparison.lines if line.beside is not None]
    agree = [line.verdict for line in compared].count(AGREES)
    assert small.scale == "small" and 0 < agree < len(compared)
    assert small.summary.splitlines() == [
        f"{small.path}.png, .pdf, .md: small scale",
        "  within the intervals: an aligned drafter is faster at minimal loss (multi30k)",
        "  within the intervals: an aligned drafter is faster at one point of loss (multi30k)",
        f"  {agree} of {len(compared)} numbers agree with the paper, whose models, data and hardware are others",
    ]


@pytest.mark.parametrize("name", published_names())
def test_without_outputs_the_message_names_what_to_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} wants finished points in {tmp_path}/") as refused:
        draw_figure(name, tmp_path, tmp_path / "figures")
    commands = load_published(name).commands
    lines = str(refused.value).splitlines()
    for command in [*commands["paper"], *commands["small"]]:
        assert f"  {command}" in lines
    assert commands["paper"] != []
    assert (f"  python scripts/figures.py {name} scale=small run=true" in lines) == bool(commands["small"])
    assert not (tmp_path / "figures").exists()


def test_bild_with_both_drafters_is_one_panel_of_two_curves(tmp_path: Path) -> None:
    outputs_of("bild_fig4", tmp_path, "small")
    lines = draw_figure("bild_fig4", tmp_path, tmp_path / "figures").comparison.lines
    told = {(line.cell.row, line.cell.quantity): (line.cell.value, line.beside, line.verdict) for line in lines}
    assert told["unaligned", "speedup at minimal loss"] == (1.5, 1.5, AGREES)  # beside the paper's average
    assert told["unaligned", "speedup at one point of loss"] == (1.7, 1.7, AGREES)
    assert told["aligned", "speedup at one point of loss"] == (1.6, 1.85, LOWER)
    assert told["aligned", "speedup at minimal loss"][1] == 1.61
    assert {line.cell.panel for line in lines} == {"multi30k"}


def test_a_curve_that_always_loses_more_has_no_speedup() -> None:
    cells = FIGURES["bild_fig4"].cells([known("toy", bild(2.0, loss=3.0))])
    assert [(cell.row, cell.quantity) for cell in cells] == [("unaligned", "best quality"), ("vanilla", "quality")]
    assert cells[1].value == BASELINE_QUALITY


def test_curves_of_another_figures_folder_alone_are_no_panel(tmp_path: Path) -> None:
    own, borrowed = load_published("bild_fig5").folders["small"]
    store(
        tmp_path / borrowed,
        [("toy_aligned", bild(1.6, setting={"dataset": dataset}), ()) for dataset in ("toy", "wmt")],
    )
    with pytest.raises(UserError, match="wants finished points"):
        draw_figure("bild_fig5", tmp_path, tmp_path / "figures")
    ablation = bild(1.5, setting={"dataset": "toy"})
    ablation = replace(ablation, policy="bild_no_rollback")
    store(tmp_path / own, [("toy_aligned", ablation, ())])
    drawn = draw_figure("bild_fig5", tmp_path, tmp_path / "figures")
    assert {line.cell.panel for line in drawn.comparison.lines} == {"toy"}
    assert {line.cell.row for line in drawn.comparison.lines} == {"bild", "bild_no_rollback", "vanilla"}


def test_bitas_rows_are_named_after_what_was_varied() -> None:
    assert [row for row, _ in values(FIGURES["bita_tab3_8"].cells, "bita_tab3_8")] == ["deep prompt", "masks only"]
    assert [row for row, _ in values(FIGURES["bita_tab4_9"].cells, "bita_tab4_9")] == [
        "efficient_tree, k = 5",
        "straightforward",
    ]
    assert [row for row, _ in values(FIGURES["bita_fig8"].cells, "bita_fig8")] == ["16 prompt tokens"]
    assert [row for row, _ in values(FIGURES["bita_fig9"].cells, "bita_fig9")] == ["3 mask tokens"]
    fewer = known("user", bita(mask_tokens=1, prompt_tokens=8))  # than the 3 and 16 that were trained
    assert (rows.mask_tokens(fewer), rows.prompt_tokens(fewer)) == ("1 mask tokens", "8 prompt tokens")


def test_match_rates_agree_with_the_table_they_are_set_beside(tmp_path: Path) -> None:
    outputs_of("ppd_tab4_6", tmp_path, "paper")
    lines = draw_figure("ppd_tab4_6", tmp_path, tmp_path / "figures").comparison.lines
    assert [(line.cell.panel, line.beside, line.verdict) for line in lines] == [
        ("squad, tokens 1-2", 0.3015, AGREES),
        ("squad", 0.6837, AGREES),
    ]
    (line,) = draw_figure("ppd_tab1", tmp_path, tmp_path / "figures").comparison.lines
    assert line.cell.row == "layer 20, trained, k = 3"


def test_match_rates_of_a_small_model_stand_beside_those_behind_half_of_the_papers_layers() -> None:
    half, last = "layer 3, trained, k = 5", "layer 5, trained, k = 5"
    cells = [Cell("toy", half, "match rate", 0.7, part=part) for part in ("", "tokens 3-4", "tokens 17-18")]
    compared = compare([*cells, Cell("toy", last, "match rate", 0.9)], load_published("ppd_tab4_6"), "small")
    assert [line.beside for line in compared.lines] == [0.7415, 0.7905, None, None]
    assert [line.verdict for line in compared.lines[:2]] == [AGREES, LOWER]


def test_texts_mark_the_targets_tokens(tmp_path: Path) -> None:
    outputs_of("bild_fig10", tmp_path, "small")
    drawn = draw_figure("bild_fig10", tmp_path, tmp_path / "figures")
    assert (
        drawn.path.with_suffix(".md")
        .read_text()
        .endswith("- source: ein Haus\n- large: a little house\n- small: one house\n- BiLD: a **small** house\n")
    )


@pytest.mark.parametrize(
    ("value", "bounds", "verdict"),
    [
        (1.60, (None, None), AGREES),
        (1.80, (None, None), HIGHER),
        (1.40, (None, None), LOWER),
        (1.77, (None, None), AGREES),  # the tolerance is 0.15
        (1.47, (None, None), AGREES),
        (1.90, (1.5, 2.3), AGREES),
        (1.90, (1.62, 2.3), AGREES),
        (1.30, (1.1, 1.62), AGREES),
        (1.90, (1.63, 2.3), HIGHER),
    ],
)
def test_a_verdict_asks_for_the_tolerance_or_the_interval(value: float, bounds: tuple, verdict: str) -> None:
    cell = Cell("iwslt2017", "aligned", "speedup at minimal loss", value, *bounds)  # the paper's is 1.62
    (line,) = compare([cell], load_published("bild_fig4"), "paper").lines
    assert (line.beside, line.verdict) == (1.62, verdict)


def test_at_the_papers_scale_another_data_set_has_nothing_beside_it() -> None:
    cell = Cell("multi30k", "aligned", "speedup at minimal loss", 1.6)
    compared = compare([cell], load_published("bild_fig4"), "paper")
    assert compared.lines[0].beside is None
    assert compared.missing == len(load_published("bild_fig4").printed)


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (Cell("p", "a", "q", 2.0), Cell("p", "b", "q", 1.0), HOLDS),
        (Cell("p", "a", "q", 1.0), Cell("p", "b", "q", 2.0), FAILS),
        (Cell("p", "a", "q", 2.0), Cell("p", "b", "q", 2.0), HOLDS),
        (Cell("p", "a", "q", 1.0, 0.8, 1.9), Cell("p", "b", "q", 2.0, 1.7, 2.3), WITHIN),
        (Cell("p", "a", "q", 2.0, 1.7, 2.3), Cell("p", "b", "q", 1.9, 1.6, 2.2), WITHIN),
        (Cell("p", "a", "q", 2.0, 1.9, 2.1), Cell("p", "b", "q", 1.0, 0.9, 1.1), HOLDS),
        (Cell("p", "a", "q", 2.0), Cell("p", "b", "other", 1.0), UNKNOWN),
    ],
)
def test_a_claim_is_judged_by_values_and_intervals(first: Cell, second: Cell, verdict: str) -> None:
    assert judged(Order("a is above b", "q", ["a", "b"]), "p", [second, first]) == verdict


def test_claims_that_hold_come_first_and_before_the_numbers() -> None:
    orders = [Order(f"{row} is above b", "q", [row, "b"]) for row in "xca"]
    published = replace(load_published("bild_fig4"), orders=orders)
    cells = [Cell("p", row, "q", value) for row, value in (("a", 2.0), ("b", 1.0), ("c", 0.5))]
    comparison = compare(cells, published, "paper")
    assert [(line.order.rows[0], line.verdict) for line in comparison.claims] == [
        ("a", HOLDS),
        ("c", FAILS),
        ("x", UNKNOWN),
    ]
    text = markdown(comparison)
    assert text.index("a is above b") < text.index("c is above b") < text.index("| panel | row |")


@pytest.mark.parametrize(("values", "verdict"), [((3, 1, 2), FAILS), ((1, 3, 2), FAILS), ((3, 2, 1), HOLDS)])
def test_a_claim_of_several_steps_fails_with_any_of_them(values: Sequence[float], verdict: str) -> None:
    cells = [Cell("p", row, "q", value) for row, value in zip("abc", values, strict=True)]
    assert judged(Order("a is above b, b above c", "q", ["a", "b", "c"]), "p", cells) == verdict


@pytest.mark.parametrize(
    ("row", "result", "missing"),
    [
        (rows.alignment, bild(1.5), "facts.aligned"),
        (rows.prompt_design, bita(), "facts.trained.adapter.prompt"),
    ],
)
def test_a_point_of_a_version_without_these_facts_has_to_be_measured_again(
    row: rows.RowOf, result: Result, missing: str, tmp_path: Path
) -> None:
    Sweep(tmp_path / "sweep").write_point("0" * 12, "", replace(result, facts=None), ())
    (point,) = read_points([tmp_path / "sweep"])
    with pytest.raises(UserError, match=f"does not hold {missing}, .* remove {tmp_path}/sweep and measure again"):
        row(point)


def test_no_name_of_a_pair_or_a_folder_tells_a_row() -> None:
    aligned = replace(bild(1.5), facts={"pair": "mine", "aligned": True})
    assert rows.alignment(aligned) == "aligned"
    renamed = replace(aligned, facts={"pair": "mine_aligned", "aligned": False})
    assert rows.alignment(renamed) == "unaligned"
    assert rows.prompt_design(bita(adapter="outputs/bita_none/adapter")) == "deep prompt"
    assert rows.mask_tokens(bita(adapter="outputs/bita_m5/adapter")) == "3 mask tokens"


def script(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["figures.py", *words])
    with pytest.raises(SystemExit) as ended:
        run_application(scripts.figures.main)
    return ended.value.code


def test_the_script_draws_into_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    outputs_of("spec_tab4", tmp_path, "small")
    assert script(["spec_tab4", f"outputs={tmp_path}"], monkeypatch) == 0
    assert (tmp_path / "figures" / "spec_tab4_small.png").is_file()
    assert capsys.readouterr().out.endswith(": small scale\n")  # numbers beside a formula are not counted
    assert script(["spec_tab4", "bild_fig4", f"outputs={tmp_path}"], monkeypatch) == 0  # what there is
    told = capsys.readouterr().err
    assert "bild_fig4 wants finished points" in told and "scale=small run=true" in told
    assert "experiment=" not in told  # of several figures no commands
    assert script(["bild_fig4", f"outputs={tmp_path}"], monkeypatch) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a figure is needed, got none; choose from bild_cascades"),
        (["bild_fig4", "output=x"], "settings are outputs=DIR, scale=paper|small and run=true, got output"),
        (["bild_fig4", "scale=tiny"], "scale must be paper or small, got 'tiny'"),
        (["bild_fig4", "run=maybe"], "run must be true or false, got 'maybe'"),
        (["all", "run=true"], "give scale=small and no outputs"),
        (["bild_fig11"], "figure must be one of"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert script(words, monkeypatch) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_only_what_is_missing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess:
        ran.append(command[2:])
        outputs_of("spec_tab4", tmp_path / "outputs", "small")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(scripts.figures.subprocess, "run", run)
    words = ["spec_tab4", "scale=small", "run=true"]
    assert script(words, monkeypatch) == 0
    assert ran == [["experiment=spec_tab4/small"]]
    assert (tmp_path / "outputs" / "figures" / "spec_tab4_small.png").is_file()
    assert script(words, monkeypatch) == 0
    assert len(ran) == 1


def test_a_command_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts.figures.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    assert script(["spec_tab4", "scale=small", "run=true"], monkeypatch) == 2
    assert "this command failed" in capsys.readouterr().err


def test_the_quality_of_other_data_gets_no_verdict() -> None:
    cells = [Cell("toy", "speculative", what, value) for what, value in (("quality", 39.9), ("speedup", 1.3))]
    quality, speedup = compare(cells, load_published("bild_speculative"), "small").lines
    assert (quality.beside, quality.verdict) == (None, "–")
    assert (speedup.beside, speedup.verdict) == (1.28, "agrees")
    assert compare([replace(cells[0], data="iwslt2017")], load_published("bild_speculative"), "paper").lines[0].beside


def test_a_legend_has_as_many_columns_as_fit() -> None:
    short, long = ["bild", "calm"] * 6, ["relaxed acceptance", "calm"] * 6
    assert (legend_columns(short, 7.0), legend_columns(long, 7.0), legend_columns(long, 1.0)) == (5, 3, 1)


def test_rows_with_models_of_their_own_have_a_baseline_each() -> None:
    def quality(baseline: float) -> Result:
        result = bild(1.5)
        return replace(result, quality=replace(result.quality, baseline=baseline))

    looks, apart = marks(["bild", "calm"]), ["baseline of bild", "", "baseline of calm", ""]
    for other_baseline, lines, names in ((39.0, 2, ["baseline", "−1 point"]), (41.0, 4, apart)):
        axes = Figure().add_subplot()
        drawn = quality_lines(axes, {"bild": [quality(39.0)], "calm": [quality(other_baseline)]}, looks)
        assert len(axes.lines) == lines and [text.get_text() for text in axes.texts] == names
        assert [value for value, _ in drawn] == ([39.0] if lines == 2 else [39.0, 41.0])
