"""The list of runs, as a page and in the terminal: what each folder holds, whatever is in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote

import pytest

from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.store.table import write_table
from bild_lab.report.headline import headline
from bild_lab.report.page import index
from bild_lab.report.page.index import PAGE, Run, read_runs, write_index
from scripts import sweeps
from tests.report.sample import (
    ENVIRONMENT,
    sample_baseline,
    sample_example,
    sample_log_probability,
    sample_result,
    sample_sweep,
    with_quality,
    with_speedup,
)

Command = Callable[..., tuple[int, str]]


def listed(command: Command, *words: str) -> tuple[int, str]:
    return command(sweeps, *sweeps.as_overrides(["list", *words]), config="sweeps")


# drafts gave more speed than tokens per call of the target
TOO_FAST = {"drafted": 9, "tokens_per_target_call": 2.0, "tokens_per_s_ratio": 9.0}
IMPOSSIBLE = sample_result("bild", {"window": 3}, 9.0, **TOO_FAST)
ONE_SEED = sample_result("bild", {}, 1.5)
# the baseline as a point, which says how noisy the machine is
TIMED_TWICE = sample_result("vanilla", {}, 1.02)
TIMED_ONCE = sample_result("bild", {}, 1.8, setting={"batch": 8})
ATTACK = "<img src=x> 50% of #1?"


def other_seed(speedup: float | None, **changes: object) -> Result:
    """The point of `ONE_SEED` with another seed."""
    return sample_result("bild", {}, speedup, setting={"seed": 1}, **changes)


def write_run(folder: Path, results: list[Result], command: str = "") -> None:
    for result in results:
        Sweep(folder).write_point(result.point, "policy: {}\n", result, [sample_example()])
    write_table(results, folder / "sweep.csv")
    (folder / "report.html").write_text("a report")
    if command:
        line = {"started": "2026-11-20T10:00:00+00:00", "line": command}
        (folder / "commands.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs"
    write_run(folder / "first", sample_sweep(), "python run.py -m policy=bild")
    write_run(folder / ATTACK, sample_sweep(setting={"n_examples": 6, "dataset": "iwslt"})[:3])
    (folder / "stopped/points/.draft").mkdir(parents=True)
    (folder / "stopped/points/.draft/result.json").write_text("{}")
    (folder / "figures").mkdir()
    (folder / "a file").write_text("not a folder")
    return folder


def run(outputs: Path, name: str) -> Run:
    return next(one for one in read_runs(outputs) if one.name == name)


def test_a_run_has_its_models_data_points_command_and_best_points(outputs: Path) -> None:
    assert run(outputs, "first") == Run(
        name="first",
        link="first/report.html",
        date="2026-11-20T10:00:00+00:00",
        pair="t5-large drafted by t5-tiny",
        data="multi30k test, 100 examples",
        points=20,
        without_loss="bild (fallback 0.3, rollback 1) 1.55× [1.47, 1.63]",
        within_small_loss="bild (fallback 0.5, rollback 5) 1.70× [1.62, 1.78]",
        command="python run.py -m policy=bild",
    )


@pytest.mark.parametrize(
    ("results", "free", "cheap"),
    [
        ([sample_baseline()], "–", "–"),
        (
            [IMPOSSIBLE, sample_result("bild", {"window": 5}, 1.8)],
            *["bild (window 5) 1.80× [1.74, 1.86]"] * 2,
        ),
        ([IMPOSSIBLE], "–", "–"),
        ([TIMED_TWICE, sample_result("bild", {}, 0.7)], *["bild 0.70× [0.65, 0.75]"] * 2),
        (
            [sample_result("bild", {}, 1.8, environment={**ENVIRONMENT, "gpu_slowed_by": "heat"})],
            *["bild 1.80× [1.75, 1.85], GPU slowed by heat"] * 2,
        ),
        (sample_sweep(setting={"n_examples": 19}), "too few examples", "too few examples"),
        (
            [sample_result("bild", {}, 1.5, independent_texts=19)],
            *["too few examples"] * 2,
        ),
        ([TIMED_ONCE], "batches timed once", "batches timed once"),
        ([sample_result("bild", {}, 2.0, -0.5)], "–", "bild 2.00× [1.95, 2.05]"),
        ([sample_result("bild", {}, 2.0, -3.0)], "–", "–"),
        ([sample_log_probability(2.0, -0.008)], "–", "bild 2.00× [1.95, 2.05]"),
        ([sample_log_probability(2.0, -0.8)], "–", "–"),
        ([sample_result("bild", {}, None, setting={"baseline": None})], "–", "–"),
        ([sample_result("server", {}, 2.0, empty=1.0)], "–", "–"),
        ([with_quality(sample_result("bild", {}, 2.0), difference=None)], "–", "–"),
        ([ONE_SEED, other_seed(None)], "–", "–"),
        ([ONE_SEED, other_seed(9.0, **TOO_FAST)], "–", "–"),
        ([ONE_SEED, other_seed(1.5, independent_texts=3)], *["too few examples"] * 2),
        (
            [ONE_SEED, other_seed(1.5, environment={**ENVIRONMENT, "gpu_slowed_by": "heat"})],
            *["bild 1.50×, mean of 2 seeds, GPU slowed by heat"] * 2,
        ),
    ],
    ids=[
        "only the baseline",
        "an impossible speedup",
        "nothing but an impossible speedup",
        "the baseline beside itself",
        "a slowed GPU",
        "too few examples",
        "too few conversations",
        "a batch",
        "a small loss",
        "a loss",
        "a hundredth of a nat",
        "much of a nat",
        "no baseline",
        "texts without a word",
        "no quality beside the baseline's",
        "a seed without a speedup",
        "a seed with an impossible speedup",
        "a seed of too few examples",
        "a seed on a slowed GPU",
    ],
)
def test_only_points_that_kept_the_quality_are_best(
    tmp_path: Path, results: list[Result], free: str, cheap: str
) -> None:
    write_run(tmp_path / "one", results)
    (one,) = read_runs(tmp_path)
    assert (one.without_loss, one.within_small_loss) == (free, cheap)


def test_seeds_are_no_choice_and_settings_are(tmp_path: Path) -> None:
    seeds = [
        sample_result("bild", {}, speedup, setting={"seed": seed})
        for seed, speedup in enumerate([1.4, 1.5, 1.6])
    ]
    write_run(tmp_path / "seeds", seeds)
    # Student's t of the logarithms, with two degrees of freedom: 4.303
    assert run(tmp_path, "seeds").without_loss == "bild 1.50× [1.27, 1.77], mean of 3 seeds"
    slower = sample_result("bild", {}, 1.45, setting={"draft": "t5-small"})
    write_run(tmp_path / "drafters", [*seeds, slower])
    # 6.205 for the better of two points
    assert run(tmp_path, "drafters").without_loss == "bild 1.50× [1.18, 1.90], mean of 3 seeds"
    losing = sample_result("bild", {}, 1.9, -1.5, setting={"seed": 3})
    write_run(tmp_path / "losing", [*seeds, losing])
    assert run(tmp_path, "losing").without_loss == "–"
    # on average it has lost less than a point
    assert run(tmp_path, "losing").within_small_loss.startswith("bild 1.59×")


def test_its_best_point_has_the_interval_that_the_headline_gives_it(tmp_path: Path) -> None:
    """Fault: a point that no text came for is one of the choice in one place, and not in another."""
    few = sample_result("server", {}, 2.5, independent_texts=3)
    wide = with_speedup(sample_result("bild", {}, 1.5), low=1.2, high=1.875)
    results = [wide, sample_result("speculative", {}, 1.4), few]
    write_run(tmp_path / "one", results)
    (one,) = read_runs(tmp_path)
    label, _, bounds = one.without_loss.partition(" 1.50× ")
    assert label == "bild" and "Best of 3 points on these examples" in headline(results)
    assert f"Corrected for that choice (Bonferroni), bild has {bounds}" in headline(results)


def test_a_run_without_commands_is_as_old_as_its_table(tmp_path: Path) -> None:
    """A page that is written anew makes its numbers no newer."""
    write_run(tmp_path / "one", [ONE_SEED])
    os.utime(tmp_path / "one" / "sweep.csv", (1e9, 1e9))
    assert run(tmp_path, "one").date == "2001-09-09T01:46:40+00:00"


def test_the_newest_comes_first_and_other_folders_are_no_runs(outputs: Path) -> None:
    runs = read_runs(outputs)
    assert [one.date for one in runs] == sorted((one.date for one in runs), reverse=True)
    # .draft is unfinished
    assert {one.name: one.points for one in runs} == {"first": 20, ATTACK: 3, "stopped": 0}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file: file.write_bytes(b"\x00\xff\xfe{[<"),
    "other columns": lambda file: file.write_text("a,b\n1,2\n"),
    "words for numbers": lambda file: file.write_text(file.read_text().replace("1.55", "many")),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.fast(
    "result.json-noise", "result.json-words for numbers", "commands.jsonl-cut", "result.json-folder"
)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["result.json", "commands.jsonl"])
def test_damaged_files_never_break_the_list_of_runs(outputs: Path, name: str, damage: str) -> None:
    for file in sorted((outputs / "first").rglob(name)):
        DAMAGE[damage](file)
    assert {one.name for one in write_index(outputs)} == {"first", ATTACK, "stopped"}
    assert (run(outputs, ATTACK).points, run(outputs, "first").points) == (3, 20)


def test_of_two_sweeps_that_end_together_the_list_has_both(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: what the first had read, without the second, was written last."""
    has_read, second_began = Event(), Event()

    def slowly_read(folder: Path) -> list[Run]:
        runs = read_runs(folder)
        if not has_read.is_set():
            has_read.set()
            assert second_began.wait(60)
        return runs

    monkeypatch.setattr(index, "read_runs", slowly_read)
    first, second = (Thread(target=write_index, args=[outputs]) for _ in range(2))
    first.start()
    assert has_read.wait(60)
    write_run(outputs / "second", [sample_result("bild", {}, 1.5)])
    second.start()
    second.join(1)  # it ends before the first, or waits for it
    second_began.set()
    first.join()
    second.join()
    assert "second/report.html" in (outputs / PAGE).read_text()


def test_the_page_escapes_names_links_to_what_is_there_and_loads_nothing(outputs: Path) -> None:
    write_index(outputs)
    page = (outputs / PAGE).read_text()
    targets = re.findall(r'href="([^"]*)"', page)
    assert len(targets) == 3 and all((outputs / unquote(one)).exists() for one in targets)
    assert "<img" not in page and "://" not in page and "&lt;img src=x&gt;" in page


@pytest.mark.fast("80")
@pytest.mark.parametrize("columns", [80, 120])
def test_the_terminal_lists_the_runs_and_its_lines_fit(
    command: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, printed = listed(command, f"outputs={outputs}")
    assert code == 0 and "2026-11-20" in printed and "too few" in printed
    assert max(map(len, printed.splitlines())) <= max(columns, len(str(outputs)) + 60)
    assert "first" in (outputs / PAGE).read_text()


@pytest.mark.slow
def test_a_sweep_is_printed_as_a_markdown_table(command: Command, outputs: Path) -> None:
    code, printed = listed(command, str(outputs / "first"))
    assert code == 0 and printed.startswith("bild (fallback 0.3, rollback 0.69) decodes 1.46×")
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 22 and len({line.count("|") for line in rows}) == 1
    assert (
        "| bild fallback 0.3, rollback 5 | 1.83× [1.78, 1.88] | 39.69 [37.39, 42.19] |" in rows[2]
    )
    assert "Knobs with a single value: bild: verify_tail on; speculative" in printed
    code, printed = listed(command, str(outputs / "first"), "latex=true")
    assert (
        code == 0
        and printed.startswith("% t5-large drafted by t5-tiny")
        and printed.count("\\\\\n") == 21
    )
    assert listed(command, "latex=maybe")[0] == 2


@pytest.mark.parametrize("words", [["outputs=nowhere"], ["outputz=nowhere"]])
def test_bad_input_is_refused_in_a_line_and_writes_nothing(
    command: Command, words: list[str]
) -> None:
    code, printed = listed(command, *words)
    assert (code, printed.count("\n")) == (2, 1) and not Path("outputs").exists()


def test_a_point_measured_again_is_judged_by_its_newest_measurement(tmp_path: Path) -> None:
    busy = {**ENVIRONMENT, "busy_elsewhere_percent": 74.0}
    first, sweep = sample_result("bild", {}, 1.8, environment=busy), Sweep(tmp_path / "again")
    for result in (first, sample_result("bild", {}, 1.5)):
        sweep.write_point(result.point, "policy: {}\n", result, [], keep_both=True)
    write_table(sweep.results(), sweep.folder / "sweep.csv")
    assert run(tmp_path, "again").without_loss == "bild 1.50× [1.45, 1.55]"


def test_a_switch_as_in_the_policys_file_is_not_named(tmp_path: Path) -> None:
    knobs = {"fallback": 0.5, "rollback": 2.0, "window": 10, "verify_tail": True}
    write_run(tmp_path / "one", [sample_result("bild", knobs, 1.5)])
    assert run(tmp_path, "one").without_loss == "bild (fallback 0.5) 1.50× [1.45, 1.55]"


def test_a_speedup_over_another_baseline_than_the_usual_one_names_it(tmp_path: Path) -> None:
    over = {"setting": {"baseline": "hf_generate"}}
    write_run(tmp_path / "first", [sample_result("bild", {}, 9.0, **over)])
    write_run(tmp_path / "second", [sample_result("bild", {}, 1.5)])
    assert run(tmp_path, "first").without_loss == "bild 9.00× [8.95, 9.05], over hf_generate"
    assert run(tmp_path, "second").without_loss == "bild 1.50× [1.45, 1.55]"
