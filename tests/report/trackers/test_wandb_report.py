"""`python scripts/wandb_report.py`: a report over sweeps that were logged, sent with a login."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.config.command_line import words_as_list
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.wandb import LoggedRun, record_run
from bild_lab.report.trackers.wandb_panels import front_key
from bild_lab.report.trackers.wandb_report import group_report, logged_panels, publish
from scripts import wandb_report as script
from tests.report.sample import sample_result

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/wandb_report.py in an empty folder; returns its exit code and everything it
    printed.
    """
    return lambda *words: command(
        script, *words_as_list(list(words), "groups"), config="wandb_report"
    )


@pytest.fixture
def logged(command: Command) -> Command:
    """As `command`, but two sweeps were logged before."""
    for name in ("first", "second"):
        folder = Path("outputs") / name
        record_run(folder, LoggedRun(f"{name}-1", "2026-11-22", "online", "bild_lab", None))
        result = sample_result(
            "bild", {}, 1.5, setting={"dataset": "multi30k" if name == "first" else "xsum"}
        )
        Sweep(folder).write_point(result.point, "", result, [])
    return command


def test_without_a_login_the_spec_is_written_and_the_command_fails_in_one_line(
    logged: Command,
) -> None:
    code, printed = logged("first", "second", "project=mine", "entity=us")
    assert code == 2
    (error,) = [line for line in printed.splitlines() if line.startswith("error")]
    assert "not published" in error and "wandb login" in error
    spec = json.loads(Path("outputs/wandb_report/report.json").read_text())
    assert (spec["project"], spec["entity"], spec["display_name"]) == (
        "mine",
        "us",
        "bild_lab: first, second",
    )


@pytest.mark.parametrize("words", [(), ("offline=true",)])
def test_a_sweep_that_was_never_logged_is_refused_with_the_command_that_logs_it(
    logged: Command, words: tuple[str, ...]
) -> None:
    code, printed = logged("first", "my third", *words)
    assert code == 2 and "python scripts/sweeps.py log 'outputs/my third'" in printed
    assert not Path("outputs/wandb_report").exists()


def test_the_report_holds_all_groups_together_and_each_alone_with_what_runs_log(
    logged: Command,
) -> None:
    logged("first", "outputs/second/", "offline=true")
    spec = json.loads(Path("outputs/wandb_report/report.json").read_text())["spec"]
    grids = [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]
    assert [[each["name"] for each in grid["runSets"]] for grid in grids] == [
        *[["first", "second"]] * 3,
        ["first"],
        ["second"],
    ]
    panels = ["multi30k test, BLEU", "xsum test, BLEU"]
    more = [{"jobType": "sweep"}, *({"panel": panel} for panel in panels), {}, {}]
    for grid, filters in zip(grids, more, strict=True):
        for runset in grid["runSets"]:
            chosen = {
                one["key"]["name"]: one["value"]
                for one in runset["filters"]["filters"]
                if one["op"] == "="
            }
            assert chosen == {"group": runset["name"], **filters}
            grouped = [key["name"] for key in runset["grouping"]]
            assert grouped == (
                ["policy.value.name", "pair.value.name"] if "panel" in filters else []
            )
    *charts, picture, _ = fronts = grids[0]["panelBankSectionConfig"]["panels"]
    assert [
        (one["config"]["panelDefId"], one["config"]["stringSettings"]["title"]) for one in charts
    ] == [("wandb/lineseries/v0", panel) for panel in panels]
    assert (
        picture["config"]["mediaKeys"] == ["pareto"]
        and picture["layout"]["x"] == charts[0]["layout"]["w"]
    )
    shown = [json.dumps(grid["panelBankSectionConfig"]["panels"]) for grid in grids]
    assert all(f'"{front_key(panel)}_table"' in json.dumps(fronts) for panel in panels)
    assert all(
        key in shown[1] for key in ("speedup/value", "acceptance_rate", "quality/difference")
    )
    assert all(
        f'"{key}"' in shown[3] for key in ("acceptance_by_position_table", "points", "examples")
    )


class Service:
    """Stands in for the service's interface: has the run of one whole sweep in one project."""

    default_entity = "us"

    def runs(self, place: str, filters: dict[str, str]) -> list[SimpleNamespace]:
        if place != "us/ours":
            raise ValueError(f"no project {place}")
        whole = SimpleNamespace(summary={"panels": ["xsum test, ROUGE-L"]})
        return [whole] if filters == {"group": "first", "jobType": "sweep"} else []


def test_panels_are_asked_of_the_service_where_somebody_is_logged_in(tmp_path: Path) -> None:
    assert logged_panels(["first"], "ours", None, tmp_path, Service()) == ["xsum test, ROUGE-L"]
    for groups, project in ((["first", "second"], "ours"), (["first"], "other")):
        with pytest.raises(
            UserError, match=f"'{groups[-1]}' has no runs in project '{project}'.*wandb sync"
        ):
            logged_panels(groups, project, None, tmp_path, Service())


def test_the_panels_of_all_sweeps_of_a_group_are_shown(tmp_path: Path) -> None:
    class SharedGroup(Service):
        def runs(self, place: str, filters: dict[str, str]) -> list[SimpleNamespace]:
            return [SimpleNamespace(summary={"panels": panels}) for panels in (["a"], ["b", "a"])]

    assert logged_panels(["paper"], "ours", None, tmp_path, SharedGroup()) == ["a", "b"]


def test_without_the_library_the_remedy_is_printed(
    logged: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    code, printed = logged("first")
    assert code == 2 and "pip install 'bild_lab[reports]'" in printed


def test_a_title_names_the_sweeps_or_counts_them_and_fits() -> None:
    names = [f"a_sweep_of_a_long_name_{number}" for number in range(9)]
    for groups, given, title in (
        (names[:2], None, f"bild_lab: {names[0]}, {names[1]}"),
        (names, None, "bild_lab: 9 sweeps"),
        (names[:1], "x" * 128, "x" * 128),
    ):
        assert group_report(groups, [], "mine", None, given).title == title
    for groups, given, told in (
        (names[:1], "x" * 129, "at most 128 characters, got 129"),
        (names[:1] * 2, None, "names of different groups are wanted"),
        ([], None, "names of different groups are wanted, got none"),
    ):
        with pytest.raises(UserError, match=told):
            group_report(groups, [], "mine", None, given)


def test_a_report_is_published_for_the_owner_that_was_given_or_who_is_logged_in() -> None:
    for entity, expected in (("team", "team"), ("", "me")):
        report = SimpleNamespace(entity=entity, save=lambda: SimpleNamespace(url="there"))
        assert publish(report, SimpleNamespace(default_entity="me")) == ("there", "")
        assert report.entity == expected
