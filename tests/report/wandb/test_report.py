"""`python scripts/wandb_report.py`: a report over groups, written in any case, sent with a login."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.lab.cli import words_as_list
from bild_lab.report.wandb import report as wandb_report
from scripts import wandb_report as script

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/wandb_report.py in an empty folder; returns its exit code and everything it printed."""
    return lambda *words: command(script, *words_as_list(list(words), "groups"), config="wandb_report")


@pytest.fixture
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(report: object) -> str:
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb_report, "publish", refuse)


def grids() -> list[dict]:
    spec = json.loads(Path("outputs/wandb_report/report.json").read_text())["spec"]
    return [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]


@pytest.mark.usefixtures("no_login")
def test_without_a_login_the_spec_is_written_and_that_is_said(command: Command) -> None:
    code, printed = command("first", "second", "project=mine", "entity=us")
    assert code == 0, printed
    assert "outputs/wandb_report/report.json: the spec of 'bild_lab: first, second'" in printed
    assert "not published: No API key configured" in printed and "log in with `wandb login`" in printed
    told = json.loads(Path("outputs/wandb_report/report.json").read_text())
    assert (told["project"], told["entity"], told["display_name"]) == ("mine", "us", "bild_lab: first, second")


def test_the_report_holds_all_groups_together_and_each_alone(command: Command) -> None:
    command("first", "second", "offline=true")
    runsets = [[each["name"] for each in grid["runSets"]] for grid in grids()]
    assert runsets == [["first", "second"], ["first"], ["second"]]
    for grid in grids():
        for runset in grid["runSets"]:
            (chosen,) = runset["filters"]["filters"]
            assert chosen["key"] == {"section": "run", "name": "group"}
            assert (chosen["op"], chosen["value"]) == ("=", runset["name"])


def test_the_panels_show_what_runs_log(command: Command) -> None:
    command("first", "offline=true")
    together, alone = (json.dumps(grid["panelBankSectionConfig"]["panels"]) for grid in grids())
    for key in ("relative_latency", "quality/value", "speedup/value", "acceptance_rate"):
        assert key in together
    for key in ("acceptance_by_position_table", "points", "examples"):
        assert f'"{key}"' in alone


def test_with_a_login_the_report_is_saved_and_its_address_told(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb_workspaces.reports.v2 import Report

    saved = []
    monkeypatch.setattr(wandb, "Api", lambda: type("Api", (), {"default_entity": "our-team"}))
    monkeypatch.setattr(Report, "save", lambda report: saved.append(report.entity) or report)
    monkeypatch.setattr(Report, "url", property(lambda report: "https://wandb.example/report"))
    code, printed = command("first")
    assert (code, saved) == (0, ["our-team"])
    assert "published at https://wandb.example/report" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "names of different groups are wanted, got none"),
        (["first", "first"], "names of different groups are wanted, got first, first"),
        (["first", f"title={'x' * 129}"], "title must have at most 128 characters, got 129"),
        (["first", "offline=maybe"], "offline must be true or false, got 'maybe'"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(command: Command, words: list[str], message: str) -> None:
    code, printed = command(*words)
    assert code == 2
    assert message in printed
    assert not Path("outputs").exists()


def test_without_the_library_the_remedy_is_told(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    code, printed = command("first")
    assert code == 2
    assert "pip install 'bild_lab[reports]'" in printed


def test_many_groups_get_a_title_that_fits(command: Command) -> None:
    groups = [f"a_long_name_of_sweep_{number}" for number in range(9)]
    assert "the spec of 'bild_lab: 9 sweeps'" in command(*groups, "offline=true")[1]
