"""The Weights & Biases logger: what runs are given, offline runs, and the way there when nothing
can be reached.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.data.prompts import Example, SourcePrompt
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.loggers import NoLogger
from bild_lab.report.trackers.wandb import (
    TRAINING,
    WandbLogger,
    private_mode,
    recorded_runs,
)
from bild_lab.report.trackers.wandb_panels import (
    flat_metrics,
    front_key,
    front_lines,
    logged_points,
    point_panels,
    run_title,
)
from bild_lab.training.reports import LogToRun
from tests.report.sample import (
    sample_baseline,
    sample_drafted,
    sample_example,
    sample_failure,
    sample_log_probability,
    sample_result,
    sample_sweep,
)


def logger(directory, mode):
    return WandbLogger(
        "bild_lab", None, group="first", mode=mode, tags=["test"], directory=str(directory)
    )


def offline_runs(directory):
    """The ids of the runs: the names of their folders without the word offline and the time."""
    return sorted(
        path.name.split("-", 3)[3] for path in (directory / "wandb").glob("offline-run-*")
    )


@pytest.mark.slow
def test_every_point_becomes_one_offline_run_under_the_outputs(tmp_path):
    results = [sample_baseline(), sample_result("bild", {"fallback": 0.5}, 1.5)]
    offline = logger(tmp_path / "outputs" / "first", "offline")
    for result in (*results, *results):  # the second time they are known
        offline.log_point(result, {"policy": {"fallback": 0.5}})
    assert offline_runs(tmp_path / "outputs" / "first") == sorted(
        f"first-{result.point}" for result in results
    )


class GivenRun:
    """Stands in for a run of wandb: keeps what it is given."""

    url = "https://wandb.example/run"

    def __init__(self, **about: Any) -> None:
        self.about, self.logged, self.summary, self.artifacts, self.finished = (
            about,
            {},
            {},
            [],
            False,
        )
        self.metrics: dict[str, dict[str, Any]] = {}

    def log(self, several: dict[str, Any]) -> None:
        self.logged |= several

    def log_artifact(self, artifact: wandb.Artifact, aliases: list[str] | None = None) -> None:
        self.artifacts.append((artifact, aliases))

    def define_metric(self, name: str, **about: Any) -> None:
        self.metrics[name] = about

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[GivenRun]:
    """Every run that begins."""
    begun: list[GivenRun] = []
    monkeypatch.setattr(wandb, "init", lambda **about: begun.append(GivenRun(**about)) or begun[-1])
    return begun


@dataclass
class LoggedSweep:
    """A sweep of one point that was logged online: its point, its logger, and what the runs of the
    point and of the whole sweep were given.
    """

    point: Result
    online: WandbLogger
    point_run: GivenRun
    sweep_run: GivenRun


PANEL = "multi30k test, BLEU"


@pytest.fixture
def logged_sweep(runs: list[GivenRun], tmp_path: Path, data: Path) -> LoggedSweep:
    folder = tmp_path / "my sweep"
    words = [
        "dataset=multi30k",
        f"dataset.path={data}",
        "pair.target=/models/big",
        "pair.draft=/models/small",
    ]
    config = compose_config(words)
    examples = load_examples(DatasetSpec(**OmegaConf.to_container(config.dataset)))
    result = sample_drafted(
        "bild", {"fallback": 0.5, "rollback": 2.0, "window": 3}, 1.6, 0.1, (0.8, 0.5)
    )
    setting = replace(result.setting, entries={**result.setting, "data": data_hash(examples)})
    texts = [sample_example(one.id, prediction=one.references[0]) for one in examples]
    sweep, result = Sweep(folder), replace(result, setting=setting)
    point = replace(
        result, folder=sweep.write_point(result.point, OmegaConf.to_yaml(config), result, texts)
    )
    for name in ("report.html", "sweep.csv"):
        (folder / name).write_text(f"{name} of a sweep")
    Image.new("RGB", (8, 4)).save(folder / "pareto.png")
    online = WandbLogger(
        "ours", None, group="my sweep", mode="online", tags=["test"], directory=str(folder)
    )
    online.log_point(point, OmegaConf.to_container(config, resolve=True))
    online.log_sweep(sweep)
    return LoggedSweep(point, online, *runs)


def test_a_point_is_logged_with_its_configuration_numbers_texts_and_curve(
    logged_sweep: LoggedSweep,
) -> None:
    run, point = logged_sweep.point_run, logged_sweep.point
    assert run.about["id"].endswith(point.point) and run.about["id"].startswith("my-sweep-")
    assert {
        key: run.about[key] for key in ("project", "group", "name", "job_type", "tags", "mode")
    } == {
        "project": "ours",
        "group": "my sweep",
        "name": "bild (fallback 0.5, window 3)",
        "job_type": "point",
        "tags": ["test", "t5-large drafted by t5-tiny", "multi30k"],
        "mode": "online",
    }
    assert run.about["settings"].x_disable_stats
    assert run.about["resume"] == "allow"  # measured again, it takes the place of itself
    given = run.about["config"]
    assert (given["pair"]["name"], given["point"]) == ("t5-large drafted by t5-tiny", point.point)
    assert "logger" not in given  # where it was logged is no part of a point
    assert given["composition"] == point.composition and given["dataset"]["name"] == "multi30k"
    assert (run.summary["relative_latency"], run.summary["speedup/value"]) == (1 / 1.6, 1.6)
    assert [run.summary[key] for key in ("policy", "panel", "on_front")] == ["bild", PANEL, True]
    table = run.logged["examples"]
    first, *others = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    assert first["reference"] == first["prediction"] and first["prompt"] and len(others) == 5
    assert run.logged["points"].data[0][:2] == ["bild", "fallback 0.5, rollback 2, window 3"]
    assert run.logged["acceptance_by_position"].table.data == [[1, 0.86], [2, 0.83], [3, 0.8]]
    assert run.finished


def test_a_sweep_is_logged_with_its_headline_points_picture_and_front(
    logged_sweep: LoggedSweep,
) -> None:
    whole = logged_sweep.sweep_run
    assert (whole.about["name"], whole.about["job_type"]) == ("my sweep", "sweep")
    assert (
        "1.60×" in whole.summary["headline"] and whole.about["notes"] == whole.summary["headline"]
    )
    assert whole.logged["sweep_points"].data[0][:3] == [
        True,
        "bild",
        "fallback 0.5, rollback 2, window 3",
    ]
    assert "pareto" in whole.logged and whole.summary["panels"] == [PANEL]
    front = whole.logged[front_key(PANEL)].table
    assert front.columns == ["step", "lineKey", "lineVal"]
    assert {row[1] for row in front.data} == {"bild, my sweep", "vanilla (baseline), my sweep"}
    assert whole.finished
    assert logged_sweep.online.closing() == [
        f"logged to Weights & Biases: 2 runs in group my sweep. {GivenRun.url}"
    ]


def test_a_sweep_keeps_its_report_and_the_best_points_under_aliases(
    logged_sweep: LoggedSweep,
) -> None:
    (report, _), *best = logged_sweep.sweep_run.artifacts
    assert set(report.manifest.entries) == {"report.html", "pareto.png", "sweep.csv"}
    ((stored, aliases),) = logged_sweep.point_run.artifacts
    assert aliases == [logged_sweep.point.point] and "result.json" in stored.manifest.entries
    assert [(one.digest == stored.digest, aliases) for one, aliases in best] == [
        (True, ["best"]),
        (True, ["best-within-one-point"]),
    ]


def test_the_alias_of_a_small_loss_allows_a_hundredth_of_a_nat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1.4: 0.002, 1.6: -0.0083, 2.5: -0.9}
    points = [replace(sample_log_probability(*one), folder=tmp_path) for one in losses.items()]
    (group,), run = by_setting(points), GivenRun()
    monkeypatch.setattr(WandbLogger, "_files", lambda _, result: result.speedup.value)
    logger(tmp_path, "offline")._name_best_points(run, group)
    assert run.artifacts == [(1.4, ["best"]), (1.6, ["best-within-one-point"])]


def test_points_of_few_examples_are_called_best_by_no_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WandbLogger, "_files", lambda _, result: result.policy)
    for examples, named in ((10, []), (100, ["best", "best-within-one-point"])):
        setting = {"n_examples": examples}
        point = replace(sample_result("bild", {}, 1.5, setting=setting), folder=tmp_path)
        (group,), run = by_setting([point]), GivenRun()
        logger(tmp_path, "offline")._name_best_points(run, group)
        assert run.artifacts == [("bild", [alias]) for alias in named]


def test_a_sweep_has_as_its_setting_what_all_of_its_points_share(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    sweep = Sweep(tmp_path / "first")
    config = OmegaConf.to_yaml(compose_config(["policy=bild"]))
    for draft in ("t5-tiny", "t5-small"):
        result = sample_result("bild", {}, 1.5, setting={"draft": draft})
        sweep.write_point(result.point, config, result, [])
    sweep.write_failure(sample_failure("no memory"), "")
    logger(sweep.folder, "online").log_sweep(sweep)
    setting, summary = runs[-1].about["config"]["setting"], runs[-1].summary
    assert setting["target"] == "t5-large" and "draft" not in setting
    assert (summary["points"], summary["failed"]) == (2, 1)


def test_runs_of_a_folder_that_is_named_from_here_are_written_here(
    runs: list[GivenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service of wandb has a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    logger("outputs/first", "offline").begin("one", "one", {}, "point")
    assert runs[0].about["dir"] == str(tmp_path / "outputs" / "first")


def test_the_id_of_a_run_is_short_and_its_own_also_in_a_group_with_a_long_name(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    for group in ("g" * 60, "g" * 61, "g" * 62):
        WandbLogger("ours", None, group, "offline", [], str(tmp_path)).begin("0" * 12, "", {}, "")
    ids = [run.about["id"] for run in runs]
    assert ids[0] == f"{'g' * 60}-{'0' * 12}" and len(set(ids)) == 3
    assert [len(one) for one in ids] == [60 + 13] * 3


def test_texts_with_and_without_a_trace_are_rows_of_one_table() -> None:
    """Of a text that was not traced the prompt comes from the dataset, which knows its source."""
    examples = [
        sample_example("a", prompt="German: eins"),
        sample_example("b"),
        sample_example("b", turn=2),
    ]
    known = {
        (name, turn): Example(name, source, SourcePrompt(source, ("German: ", "")), ("one",))
        for name, turn, source in (("a", 1, "a"), ("b", 1, "b"), ("b", 2, "later"))
    }
    table = point_panels(sample_result("bild", {}, 1.5), examples, known)["examples"]
    assert [row[1] for row in table.data] == ["German: eins", "German: b", "German: later"]
    assert {type(row[1]) for row in table.data} == {str}


def test_a_row_of_a_text_has_its_numbers_beside_the_baselines() -> None:
    example = replace(
        sample_example("a"),
        token_ids=[1, 2],
        baseline_token_ids=[1, 3],
        latency_s=[3.0, 1.0, 2.0],
        baseline_latency_s=[6.0, 4.0, 5.0],
        prediction="x",
        baseline_prediction="x",
    )
    table = point_panels(sample_result("bild", {}, 1.5), [example], {})["examples"]
    row = dict(zip(table.columns, table.data[0], strict=True))
    assert (row["latency_s"], row["baseline_latency_s"], row["tokens"]) == (2.0, 5.0, 2)
    assert row["same_output"] is False  # other tokens, though the same words


def test_tables_of_points_with_different_knobs_have_the_same_columns() -> None:
    bild, plain = (
        logged_points([sample_result(policy, knobs, 1.5)])
        for policy, knobs in (("bild", {"fallback": 0.5}), ("speculative", {"window": 4}))
    )
    assert bild.columns == plain.columns and bild.data[0][:2] == ["bild", "fallback 0.5"]


def test_what_a_point_does_not_have_is_no_panel():
    alone = sample_result("bild", {}, None, setting={"baseline": None})
    assert set(point_panels(alone, [], {})) == {"points"}
    assert set(point_panels(sample_baseline(), [], {})) == {"points"}


def test_a_panel_has_a_line_for_each_policy_and_one_for_the_baseline() -> None:
    fast, good = (
        sample_result("bild", {"fallback": 0.3}, 2.0, -1.0),
        sample_result("bild", {"fallback": 0.5}, 1.25, 1.0),
    )
    worse, other = sample_result("bild", {"fallback": 0.9}, 1.0, -2.0), {"dataset": "xsum"}
    alone = sample_result("speculative", {}, 1.6, setting=other)
    lines = front_lines([sample_baseline(), good, fast, worse, alone], "first")
    assert list(lines) == [PANEL, "xsum test, BLEU"]  # two data sets share none
    bild, vanilla = lines[PANEL].values()
    assert bild[:-1] == [(0.5, 40.0), (0.8, 40.0), (0.8, 42.0)] and bild[-1][1] == 42.0
    assert vanilla == [(1.0, 41.0), (bild[-1][0], 41.0)] and bild[-1][0] > 1.0
    assert list(lines["xsum test, BLEU"]) == ["speculative, first", "vanilla (baseline), first"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            [{"draft": "small"}, {"draft": "tiny"}],
            ["bild, s, draft small", "bild, s, draft tiny"],
        ),
        # which differ in what means nothing to a reader
        ([{"weights": "a1"}, {"weights": "b2"}], ["bild, s, setting 1", "bild, s, setting 2"]),
    ],
)
def test_lines_of_one_policy_are_told_apart_by_their_settings(
    settings: list[dict[str, str]], names: list[str]
) -> None:
    points = [sample_result("bild", {}, 2.0, setting=setting) for setting in settings]
    assert [line for line in front_lines(points, "s")[PANEL] if "baseline" not in line] == names


def test_a_point_without_a_baseline_is_on_a_panel_in_seconds() -> None:
    lone = sample_result("bild", {}, None, setting={"baseline": None})
    in_seconds = front_lines([lone], "first")
    assert {panel: list(lines) for panel, lines in in_seconds.items()} == {
        "multi30k test, BLEU, in seconds": ["bild, first"]
    }


def test_points_without_a_score_or_with_an_impossible_speed_are_on_no_line() -> None:
    good = sample_result("bild", {"fallback": 0.5}, 1.25, 1.0)
    unscored = replace(good, quality=replace(good.quality, value=None))  # it has no place
    assert front_lines([good, unscored], "first").keys() == {PANEL}
    fast = sample_result("bild", {"fallback": 0.3}, 2.0, -1.0)
    impossible = replace(fast, counts=replace(fast.counts, drafted=9), tokens_per_s_ratio=2.0)
    assert impossible.impossible  # one token a call
    (panel,) = front_lines([sample_baseline(), good, impossible], "first").values()
    assert panel["bild, first"][0] == (0.8, 42.0)


def test_a_point_that_left_the_front_is_logged_again(runs: list[GivenRun], tmp_path: Path) -> None:
    sweep, config = Sweep(tmp_path / "first"), OmegaConf.to_yaml(compose_config(["policy=bild"]))
    online = WandbLogger(
        "ours", None, group="first", mode="online", tags=[], directory=str(sweep.folder)
    )
    for speedup in (1.5, 2.0):
        result = sample_result("bild", {"window": int(4 * speedup)}, speedup)
        folder = sweep.write_point(result.point, config, result, [])
        online.log_point(replace(result, folder=folder), {})
    online.log_sweep(sweep)
    online.log_sweep(sweep)
    points = [
        (run.about["name"], run.summary["on_front"])
        for run in runs
        if run.about["job_type"] == "point"
    ]
    slow, fast = "bild (window 6)", "bild (window 8)"
    assert points == [(slow, True), (fast, True), (slow, False)]
    assert [one.on_front for one in recorded_runs(sweep.folder)] == [True, True, False, None, None]


def test_a_point_that_was_logged_costs_no_look_at_the_sweep(
    runs: list[GivenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a thousand finished points are a million readings when their sweep goes on."""
    sweep = Sweep(tmp_path / "first")
    online = WandbLogger(
        "ours", None, group="first", mode="online", tags=[], directory=str(sweep.folder)
    )
    result = sample_result("bild", {}, 1.5)
    point = replace(result, folder=sweep.write_point(result.point, "", result, []))
    online.log_point(point, {})
    monkeypatch.setattr(Sweep, "results", None)
    online.log_point(point, {})
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("second_point", "patience_s", "logged"), [("same", 0.5, 1), ("other", 60.0, 2)]
)
def test_a_point_that_two_processes_end_at_once_is_logged_by_one(
    second_point: str,
    patience_s: float,
    logged: int,
    runs: list[GivenRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: the second looks at the record while the first still writes; and another point waits
    for the first one's upload.
    """
    second_ended = threading.Event()
    write, first = WandbLogger._write_point, replace(sample_baseline(), point="same")

    def write_slowly(*point: Any) -> None:
        monkeypatch.setattr(WandbLogger, "_write_point", write)
        second.start()
        assert second_ended.wait(patience_s) == (second_point == "other")
        write(*point)

    def log_second() -> None:
        logger(tmp_path, "offline").log_point(replace(first, point=second_point), {})
        second_ended.set()

    second = threading.Thread(target=log_second)
    monkeypatch.setattr(WandbLogger, "_write_point", write_slowly)
    logger(tmp_path, "offline").log_point(first, {})
    second.join()
    assert len(runs) == len(recorded_runs(tmp_path)) == logged


def test_a_point_that_a_newer_one_replaced_is_logged_once_more_apart_from_the_others(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    """Fault: after a change of code a group has two runs of equal policy, knobs and setting, both on
    the front.
    """
    sweep, config = Sweep(tmp_path / "first"), OmegaConf.to_yaml(compose_config(["policy=bild"]))
    online = WandbLogger(
        "ours", None, group="first", mode="online", tags=[], directory=str(sweep.folder)
    )
    for point in ("before", "after"):
        result = sample_result("bild", {}, 1.5, point=point)
        folder = sweep.write_point(point, config, result, [])
        online.log_point(replace(result, folder=folder), {})
        for _ in range(2):
            online.log_sweep(sweep)
    logged = [
        (run.about["config"]["point"], run.summary["panel"], run.summary["on_front"])
        for run in runs
        if run.about["job_type"] == "point"
    ]
    panel = "multi30k test, BLEU"
    assert logged == [
        ("before", panel, True),
        ("after", panel, True),
        ("before", "replaced by a newer point", None),
    ]
    # asked for again, it is the one that reports show
    shown = sweep.show(sweep.newest("before"))
    online.log_point(shown, {})
    online.log_sweep(sweep)
    assert [(run.about["config"]["point"], run.summary["on_front"]) for run in runs[-3:-1]] == [
        ("before", True),
        ("after", None),
    ]


def test_under_an_agent_of_wandb_a_command_is_one_point_whose_run_nothing_writes_over(
    runs: list[GivenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the agent names the process's one run, and the sweep as a whole took its place. A
    finished point gave the agent no run.
    """
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc12")
    sweep = Sweep(tmp_path / "first")
    result = sample_result("bild", {}, 1.5)
    point = replace(result, folder=sweep.write_point(result.point, "", result, []))
    for _ in range(2):  # two runs of the agent
        online = WandbLogger(
            "ours", None, group="first", mode="online", tags=[], directory=str(sweep.folder)
        )
        online.log_point(point, {})
        online.log_sweep(sweep)
    assert [run.about["job_type"] for run in runs] == ["point", "point"]
    assert recorded_runs(sweep.folder) == []
    assert f"python scripts/sweeps.py log {sweep.folder}" in online.closing()[-1]
    with pytest.raises(UserError, match="abc12 is one point, got several in one command"):
        online.log_point(point, {})


def test_a_server_that_is_lost_holds_up_one_run_and_later_ones_are_offline(
    runs: list[GivenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the end of a run waits for its server for ever, and so does the sweep."""

    def lost(run: GivenRun) -> None:
        if run.about["mode"] == "online":
            raise TimeoutError("Timed out finishing run.")

    monkeypatch.setattr(GivenRun, "finish", lost)
    online, (first, second) = logger(tmp_path, "online"), sample_sweep()[:2]
    with pytest.raises(TimeoutError, match="within 120 s; later runs are logged offline"):
        online.log_point(first, {})
    assert recorded_runs(tmp_path) == []
    online.log_point(second, {})
    assert [run.about["mode"] for run in runs] == ["online", "offline"]
    settings = runs[0].about["settings"]
    assert settings.finish_timeout == 120 and settings.finish_timeout_raises
    training = online.begin("one", "one", {}, TRAINING).about["settings"]
    assert training.finish_timeout == 120 and not training.finish_timeout_raises


def test_a_run_after_a_line_that_was_cut_short_is_recorded(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    online = logger(tmp_path, "offline")
    online.log_point(sample_baseline(), {})
    assert online.closing()[0].startswith("logged offline: 1 run. Send with: wandb sync ")
    with (tmp_path / "wandb" / "logged.jsonl").open("ab") as file:
        file.write(b'{"run": "first-\xc3')
    online.log_point(sample_result("bild", {}, 1.5), {})
    assert len(recorded_runs(tmp_path)) == 2


def test_sweeps_that_share_a_group_have_runs_lines_and_artifacts_of_their_own(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    config, result = (
        OmegaConf.to_yaml(compose_config(["policy=bild"])),
        sample_result("bild", {}, 2.0),
    )
    for name in ("one", "two"):
        sweep = Sweep(tmp_path / name)
        point = replace(result, folder=sweep.write_point(result.point, config, result, []))
        online = WandbLogger(
            "ours", None, group="paper", mode="online", tags=[], directory=str(sweep.folder)
        )
        online.log_point(point, {})
        online.log_sweep(sweep)
        assert [one.run for one in recorded_runs(sweep.folder)] == [
            f"paper-{name}-{result.point}",
            f"paper-{name}-sweep",
        ]
    assert {run.about["group"] for run in runs} == {"paper"}
    assert len({run.about["id"] for run in runs}) == 4
    wholes = [run for run in runs if run.about["job_type"] == "sweep"]
    assert [whole.about["name"] for whole in wholes] == ["one", "two"]
    (chart,) = (key for key in wholes[0].logged if key.startswith("front_"))
    assert [{row[1] for row in whole.logged[chart].table.data} for whole in wholes] == [
        {f"bild, {name}", f"vanilla (baseline), {name}"} for name in ("one", "two")
    ]
    assert [whole.artifacts[0][0].name for whole in wholes] == ["sweep-one", "sweep-two"]
    assert [whole.artifacts[1][0].name for whole in wholes] == ["points-one", "points-two"]


def test_a_trainings_curves_have_its_steps_also_after_resuming_and_the_machine_is_sampled(
    runs: list[GivenRun], tmp_path: Path
) -> None:
    run = logger(tmp_path, "offline").begin("one", "one", {}, TRAINING)
    assert not run.about["settings"].x_disable_stats
    LogToRun(run, "bleu").on_log(
        None, SimpleNamespace(global_step=7), None, {"loss": 1.5, "note": "text"}
    )
    assert run.logged == {"loss": 1.5, "step": 7}
    assert run.metrics["*"] == {"step_metric": "step"}
    assert {
        name: about.get("summary") for name, about in run.metrics.items() if "eval" in name
    } == {
        "eval_loss": "min",
        "eval_bleu": "max",
    }


def test_an_online_run_that_cannot_start_falls_back_to_offline_with_a_warning(tmp_path, caplog):
    online = logger(tmp_path, "online")
    with caplog.at_level(logging.WARNING):
        online.log_point(sample_baseline(), {})
        online.log_point(sample_result("bild", {}, 1.5), {})
    warnings = [
        record.message
        for record in caplog.records
        if record.name == "bild_lab.report.trackers.wandb"
    ]
    assert len(warnings) == 1  # the second point does not try again
    assert "logged offline" in warnings[0]
    assert len(offline_runs(tmp_path)) == 2


def test_metrics_are_flat_and_missing_ones_are_left_out():
    metrics = flat_metrics(sample_baseline())
    assert (metrics["quality/value"], metrics["speedup/value"], metrics["stages_s/draft"]) == (
        41.0,
        1.0,
        0.0,
    )
    assert not {"acceptance_rate", "quality/difference", "policy", "setting/seed"} & set(metrics)


def test_a_run_is_named_by_policy_and_knobs_of_paths_the_last_part_at_most_128_characters():
    assert run_title(sample_baseline()) == "vanilla"
    own = sample_result(
        "medusa", {"heads": "outputs/medusa/heads", "top_k": 3, "tree": "auto"}, 1.5
    )
    assert run_title(own) == "medusa (heads medusa, tree auto)"
    long = run_title(sample_result("bild", {f"knob_{number}": number for number in range(40)}, 1.5))
    assert len(long) == 128 and long.endswith("…")


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match="disabled"):
        logger(tmp_path, "disabled")


def test_no_logger_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    NoLogger().log_point(sample_baseline(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"project": "owner/project"}, "cannot contain characters .* correct logger.project"),
        ({"project": "p" * 129}, "exceeded 128 characters"),
        ({"tags": ["t" * 65]}, "is 65 characters"),
        ({"tags": ["good", ""]}, "Tag at index 1 is empty"),
        ({"tags": "word"}, "logger.tags must be a list"),
        ({"tags": [{"a": 1}]}, "logger.tags must be a list"),
    ],
)
def test_what_wandb_would_refuse_later_is_refused_at_once(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    usual = {
        "project": "bild_lab",
        "entity": None,
        "group": "first",
        "mode": "offline",
        "tags": [],
        "directory": "x",
    }
    with pytest.raises(UserError, match=message):
        WandbLogger(**{**usual, **wrong})
    WandbLogger(**{**usual, "tags": ["t" * 64, 3], "entity": "owner", "group": "a b/c" * 40})


@pytest.mark.parametrize(
    ("mode", "environment", "counts"),
    [
        ("online", "offline", "offline"),
        ("online", "disabled", "disabled"),
        ("offline", "disabled", "disabled"),
        ("offline", "online", "offline"),
        ("online", None, "online"),
        ("online", "", "online"),
    ],
)
def test_the_more_private_of_environment_and_key_counts(
    mode: str, environment: str | None, counts: str
) -> None:
    assert private_mode(mode, environment) == counts


def test_where_wandb_is_disabled_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    silent = logger(tmp_path / "first", "online")
    silent.log_point(sample_baseline(), {})
    silent.log_sweep(Sweep(tmp_path / "first"))
    assert silent.closing() == ["not logged to Weights & Biases, as WANDB_MODE=disabled is set"]
    assert not (tmp_path / "first").exists()
    monkeypatch.setenv("WANDB_MODE", "silent")
    with pytest.raises(UserError, match="WANDB_MODE must be one of online, offline, disabled"):
        logger(tmp_path, "online")


def test_the_environments_project_and_owner_are_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    chosen = compose_config(["logger=wandb"]).logger
    assert (chosen.project, chosen.entity) == ("theirs", "team")
    assert compose_config(["logger=wandb", "logger.project=mine"]).logger.project == "mine"
    assert compose_config([], "wandb_report").project == "theirs"
    monkeypatch.delenv("WANDB_PROJECT")
    monkeypatch.delenv("WANDB_ENTITY")
    chosen = compose_config(["logger=wandb"]).logger
    assert (chosen.project, chosen.entity) == ("bild_lab", None)
