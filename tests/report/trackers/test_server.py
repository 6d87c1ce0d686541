"""What the real client sends, kept by a server on the loopback: runs, artifacts, reports, and runs
sent later.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wandb
from omegaconf import OmegaConf
from PIL import Image

from bild_lab.lab.config.command_line import words_as_list
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.wandb import sync_command
from scripts import sweeps, wandb_report
from tests.report.sample import sample_baseline, sample_drafted, sample_example
from tests.report.trackers.loopback import KEY, LoopbackWandb, loopback_wandb

Command = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.slow
PANEL = "multi30k test, BLEU"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackWandb]:
    """A server that the client finds, and an account on it."""
    wandb.teardown()  # its service keeps the server of an earlier test
    with loopback_wandb() as served:
        monkeypatch.setenv("WANDB_BASE_URL", served.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield served
        wandb.teardown()


@pytest.fixture
def sweep(command: Command, data: Path) -> Sweep:
    """Two finished points under outputs/first."""
    written = Sweep(Path("outputs/first"))
    config = OmegaConf.to_yaml(
        compose_config(["policy=bild", "dataset=multi30k", f"dataset.path={data}"])
    )
    for result in (
        sample_baseline(),
        sample_drafted("bild", {"fallback": 0.5}, 1.6, 0.1, (0.8, 0.5)),
    ):
        written.write_point(
            result.point, config, result, [sample_example(str(number)) for number in range(6)]
        )
    Image.new("RGB", (8, 4)).save(written.folder / "pareto.png")
    return written


def sent(server: LoopbackWandb, kind: str) -> list[dict]:
    """The runs of one type of job that have arrived whole, by name."""
    return sorted(server.of_kind(kind), key=lambda run: run["about"]["displayName"])


def test_a_sweeps_runs_and_its_report_arrive(
    server: LoopbackWandb, sweep: Sweep, command: Command
) -> None:
    code, printed = command(sweeps, *sweeps.as_overrides(["log", "outputs/first"]), config="sweeps")
    assert code == 0, printed
    bild, vanilla = sent(server, "point")
    assert [run["about"]["displayName"] for run in (bild, vanilla)] == [
        "bild (fallback 0.5)",
        "vanilla",
    ]
    assert {run["about"]["groupName"] for run in server.runs.values()} == {"first"}
    summary = bild["summary"]
    assert [summary[key] for key in ("policy", "panel", "on_front")] == ["bild", PANEL, True]
    assert summary["speedup/value"] == 1.6 and {"points", "examples"} <= set(summary)
    (whole,) = sent(server, "sweep")
    assert whole["summary"]["panels"] == [PANEL] and "1.60×" in whole["summary"]["headline"]
    assert any("pareto" in name and content for name, content in whole["files"].items())
    assert all(artifact["committed"] for artifact in server.artifacts)
    assert {"result.json", "report.html"} & set().union(
        *(artifact["files"] for artifact in server.artifacts)
    )

    code, printed = command(
        wandb_report, *words_as_list(["first"], "groups"), config="wandb_report"
    )
    assert code == 0 and "published at" in printed, printed
    (report,) = server.reports
    (first, *_) = [
        block["metadata"] for block in report["spec"]["blocks"] if block["type"] == "panel-grid"
    ]
    chart = first["panelBankSectionConfig"]["panels"][0]["config"]
    assert chart["stringSettings"]["title"] == PANEL
    # of the summary, by the chart
    (read,) = [key for key in whole["summary"] if f'"{key}"' in json.dumps(chart)]
    assert whole["summary"][read]["_type"] == "table-file"


def test_runs_that_were_written_offline_arrive_by_the_printed_command(
    server: LoopbackWandb, sweep: Sweep, command: Command
) -> None:
    code, printed = command(
        sweeps,
        *sweeps.as_overrides(["log", "outputs/first", "logger.mode=offline"]),
        config="sweeps",
    )
    assert code == 0 and server.runs == {}, printed
    order = sync_command(Path("outputs/first"))
    assert order in printed
    wandb_command = Path(sys.executable).parent / "wandb"
    subprocess.run(
        order.replace("wandb", shlex.quote(str(wandb_command)), 1),
        shell=True,
        check=True,
        timeout=120,
    )
    assert [run["about"]["displayName"] for run in sent(server, "point")] == [
        "bild (fallback 0.5)",
        "vanilla",
    ]
    (whole,) = sent(server, "sweep")
    assert whole["summary"]["panels"] == [PANEL]
