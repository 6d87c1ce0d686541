"""What arrives at a Weights & Biases server: the real client sends it to one on the loopback."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from PIL import Image

from bild_lab.errors import UserError
from bild_lab.lab.config import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.hashing import data_hash
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from bild_lab.report.sweep import report_sweep
from bild_lab.report.wandb.logger import WandbLogger
from bild_lab.report.wandb.report import connect, group_report, publish, require_logged
from tests.report.sample import sample_baseline, sample_drafted, sample_example
from tests.report.wandb.loopback_wandb import ENTITY, KEY, LoopbackWandb, ServedArtifact

KNOBS = {"fallback": 0.5, "rollback": 2.0, "window": 3}


def logger(directory: Path, mode: str = "online") -> WandbLogger:
    return WandbLogger("ours", None, group=directory.name, mode=mode, tags=["test"], directory=str(directory))


def stored(folder: Path, data: Path, *results: Result) -> tuple[Sweep, dict, list[Result]]:
    """The results as points of a sweep over the six examples of a local dataset, and their configuration."""
    words = ["dataset=multi30k", f"dataset.path={data}", "pair.target=/models/big", "pair.draft=/models/small"]
    config = compose_config(words)
    examples = load_examples(DatasetSpec(**OmegaConf.to_container(config.dataset)))
    sweep, written = Sweep(folder), []
    for result in results:
        setting = replace(result.setting, entries={**result.setting, "data": data_hash(examples)})
        texts = [sample_example(one.id, prediction=one.references[0]) for one in examples]
        own = replace(result, setting=setting)
        written.append(replace(own, folder=sweep.write_point(result.point, OmegaConf.to_yaml(config), own, texts)))
    return sweep, OmegaConf.to_container(config, resolve=True), written


def drafted() -> Result:
    return sample_drafted("bild", KNOBS, 1.6, 0.1, (0.8, 0.5))


def report_of(server: LoopbackWandb) -> ServedArtifact:
    """The one artifact that is the report of a sweep; tables are artifacts too."""
    (artifact,) = [one for one in server.artifacts.values() if one.about["artifactTypeName"] == "sweep"]
    return artifact


def test_a_sweep_arrives_with_runs_tables_curves_picture_headline_and_report(
    server: LoopbackWandb, tmp_path: Path, data: Path
) -> None:
    folder = tmp_path / "my sweep"
    sweep, config, (point,) = stored(folder, data, drafted())
    for name in ("report.html", "sweep.csv"):
        (folder / name).write_text(f"{name} of a sweep")
    Image.new("RGB", (8, 4)).save(folder / "pareto.png")
    online = logger(folder)
    online.log_point(point, config)
    online.log_sweep(sweep)
    run, whole = server.runs.values()
    assert run.id.endswith(point.point) and run.id.startswith("my-sweep-")
    assert {key: run.about[key] for key in ("project", "groupName", "displayName", "jobType", "tags")} == {
        "project": "ours",
        "groupName": "my sweep",
        "displayName": "bild (fallback 0.5, rollback 2, window 3)",
        "jobType": "point",
        "tags": ["test", "t5-large drafted by t5-tiny", "multi30k"],
    }
    assert (run.config["pair"]["name"], run.config["point"]) == ("t5-large drafted by t5-tiny", point.point)
    assert run.config["composition"] == point.composition and run.config["dataset"]["name"] == "multi30k"
    assert (run.summary["relative_latency"], run.summary["speedup/value"]) == (1 / 1.6, 1.6)
    examples = run.table("examples")
    (first, *others) = [dict(zip(examples["columns"], row, strict=True)) for row in examples["data"]]
    assert first["reference"] == first["prediction"] and first["prompt"] and len(others) == 5
    assert run.table("points")["data"][0][:2] == ["bild", "fallback 0.5, rollback 2, window 3"]
    assert run.table("acceptance_by_position_table")["data"] == [[1, 0.86], [2, 0.83], [3, 0.8]]
    assert (whole.about["displayName"], whole.about["jobType"]) == ("my sweep", "sweep")
    assert "1.60×" in whole.summary["headline"] and whole.about["notes"] == whole.summary["headline"]
    assert [row[:3] for row in whole.table("sweep_points")["data"]] == [
        [True, "bild", "fallback 0.5, rollback 2, window 3"]
    ]
    (picture,) = (content for name, content in whole.files.items() if name.startswith("media/images/pareto"))
    assert picture == (folder / "pareto.png").read_bytes()
    artifact = report_of(server)
    assert artifact.committed and set(artifact.files) == {"report.html", "pareto.png", "sweep.csv"}
    assert artifact.files["report.html"] == (folder / "report.html").read_bytes()
    assert [one.exit_code for one in server.runs.values()] == [0, 0]
    (line,) = online.closing()
    assert line.endswith(f"2 runs in group my sweep. {server.url}/{ENTITY}/ours/runs/{whole.id}")
    assert KEY not in repr(server) and [file for file in folder.rglob("*") if holds(file, KEY)] == []


def holds(file: Path, secret: str) -> bool:
    return file.is_file() and secret.encode() in file.read_bytes()


@pytest.mark.slow
def test_a_report_is_published_where_its_sweeps_are(server: LoopbackWandb, tmp_path: Path, data: Path) -> None:
    _, config, (point,) = stored(tmp_path / "first", data, sample_baseline())
    logger(tmp_path / "first").log_point(point, config)
    api, why = connect()
    assert why == ""
    require_logged(["first"], "ours", None, tmp_path, api)
    for groups, project in ((["first", "second"], "ours"), (["first"], "other")):
        with pytest.raises(UserError, match=f"'{groups[-1]}' has no runs in project '{project}'.*wandb sync"):
            require_logged(groups, project, ENTITY, tmp_path / "elsewhere", api)
    address, why = publish(group_report(["first"], "ours", None, None), api)
    (sent,) = server.reports
    assert (sent["entityName"], sent["projectName"], sent["displayName"]) == (ENTITY, "ours", "bild_lab: first")
    assert why == "" and address.startswith(f"{server.url}/{ENTITY}/ours/reports/")


@pytest.mark.slow
def test_the_printed_command_sends_what_was_logged_offline(server: LoopbackWandb, tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "my sweep"
    sweep, config, (point,) = stored(folder, data, drafted())
    report_sweep(sweep)
    offline = logger(folder, "offline")
    offline.log_point(point, config)
    offline.log_sweep(sweep)
    (line,) = offline.closing()
    assert server.runs == {}
    command = line.partition("Send with: ")[2].replace("wandb", f"{shlex.quote(sys.executable)} -m wandb", 1)
    subprocess.run(command, shell=True, check=True, timeout=120, cwd=tmp_path)  # where wandb writes its logs
    assert sorted(run.about["jobType"] for run in server.runs.values()) == ["point", "sweep"]
    artifact = report_of(server)
    assert artifact.committed and set(artifact.files) == {"report.html", "pareto.png", "sweep.csv"}
