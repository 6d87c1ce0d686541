"""`python scripts/wandb_report.py`: a report over sweeps that were logged, sent with a login."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.cli import words_as_list
from bild_lab.report.wandb.logger import Logged, note
from bild_lab.report.wandb.report import require_logged
from scripts import wandb_report as script

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/wandb_report.py in an empty folder; returns its exit code and everything it printed."""
    return lambda *words: command(script, *words_as_list(list(words), "groups"), config="wandb_report")


@pytest.fixture
def logged(command: Command) -> Command:
    """As `command`, but two sweeps were logged before."""
    for name in ("first", "second"):
        note(Path("outputs") / name, Logged(f"{name}-1", "2026-11-22", "online", "bild_lab", None))
    return command


def test_without_a_login_the_spec_is_written_and_the_command_fails_in_one_line(logged: Command) -> None:
    code, printed = logged("first", "second", "project=mine", "entity=us")
    assert code == 2
    (error,) = [line for line in printed.splitlines() if line.startswith("error")]
    assert "not published" in error and "wandb login" in error
    spec = json.loads(Path("outputs/wandb_report/report.json").read_text())
    assert (spec["project"], spec["entity"], spec["display_name"]) == ("mine", "us", "bild_lab: first, second")


@pytest.mark.parametrize("words", [(), ("offline=true",)])
def test_a_sweep_that_was_never_logged_is_refused_with_the_command_that_logs_it(
    logged: Command, words: tuple[str, ...]
) -> None:
    code, printed = logged("first", "my third", *words)
    assert code == 2 and "python scripts/sweeps.py log 'outputs/my third'" in printed
    assert not Path("outputs/wandb_report").exists()


def test_the_report_holds_all_groups_together_and_each_alone_with_what_runs_log(logged: Command) -> None:
    logged("first", "outputs/second/", "offline=true")
    spec = json.loads(Path("outputs/wandb_report/report.json").read_text())["spec"]
    grids = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    assert [[each["name"] for each in grid["runSets"]] for grid in grids] == [
        ["first", "second"],
        ["first"],
        ["second"],
    ]
    for runset in (runset for grid in grids for runset in grid["runSets"]):
        (chosen,) = runset["filters"]["filters"]
        assert (chosen["key"]["name"], chosen["op"], chosen["value"]) == ("group", "=", runset["name"])
    together, alone, _ = (json.dumps(grid["panelBankSectionConfig"]["panels"]) for grid in grids)
    for key in ("relative_latency", "quality/value", "speedup/value", "acceptance_rate"):
        assert key in together
    for key in ("acceptance_by_position_table", "points", "examples"):
        assert f'"{key}"' in alone


class Service:
    """Stands in for the service's interface: has runs of one group in one project."""

    default_entity = "us"

    def runs(self, place: str, filters: dict[str, str], per_page: int) -> list[str]:
        if place != "us/ours":
            raise ValueError(f"no project {place}")
        return ["a run"] if filters == {"group": "first"} else []


def test_runs_are_asked_of_the_service_where_somebody_is_logged_in(tmp_path: Path) -> None:
    require_logged(["first"], "ours", None, tmp_path, Service())
    for groups, project in ((["first", "second"], "ours"), (["first"], "other")):
        with pytest.raises(UserError, match=f"'{groups[-1]}' has no runs in project '{project}'.*wandb sync"):
            require_logged(groups, project, None, tmp_path, Service())


def test_without_the_library_the_remedy_is_printed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    code, printed = command("first")
    assert code == 2 and "pip install 'bild_lab[reports]'" in printed
