"""`python scripts/sweeps.py merge`: several sweeps become one, each point once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from scripts import sweeps as script
from tests.report.sample import ENVIRONMENT, sample_example, sample_result

Command = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/sweeps.py merge in an empty folder; returns its exit code and everything it
    printed.
    """
    return lambda *words: command(script, *script.as_overrides(["merge", *words]), config="sweeps")


def write_sweep(
    name: str, fallbacks: list[float], hardware: str, host: str, beside: bool = False
) -> Sweep:
    sweep = Sweep(Path("outputs") / name)
    for fallback in fallbacks:
        changes = {
            "setting": {"hardware": hardware},
            "environment": {**ENVIRONMENT, "host": host},
            "name": name,
        }
        result = sample_result("bild", {"fallback": fallback, "rollback": 2.0}, 1.5, **changes)
        sweep.write_point(result.point, f"name: {name}\n", result, [sample_example()], beside)
    return sweep


def test_points_of_several_machines_become_one_sweep(command: Command) -> None:
    one = write_sweep("one", [0.2, 0.4], "EPYC", "a")
    write_sweep("two", [0.4, 0.6], "EPYC", "b")
    code, printed = command("name=all", "outputs/one", "outputs/two")
    assert code == 0, printed
    assert (
        "outputs/one: 2 of 2 points copied" in printed
        and "outputs/two: 2 of 2 points copied" in printed
    )
    merged = Sweep(Path("outputs/all"))
    frame = pd.read_csv("outputs/all/sweep.csv")
    assert sorted(frame["fallback"]) == [0.2, 0.4, 0.6]
    assert {result.knobs["fallback"]: result.name for result in merged.results()} == {
        0.2: "one",
        0.4: "two",  # measured later
        0.6: "two",
    }
    assert "The points come from 2 sources, which differ in sweep, host." in printed
    page = Path("outputs/all/report.html").read_text()
    assert "Where the points came from" in page
    assert ["one", "a", "1"] in [
        re.findall(r"<td[^>]*>(\w*)</td>", row) for row in page.split("</tr>")
    ]
    assert len(one.results()) == 2  # as it was


def test_timings_of_different_hardware_never_share_a_curve(command: Command) -> None:
    write_sweep("one", [0.2, 0.4], "EPYC", "a")
    write_sweep("two", [0.2, 0.4], "H200, EPYC", "b")
    code, printed = command("name=all", "outputs/one", "outputs/two")
    assert code == 0, printed
    groups = by_setting(Sweep(Path("outputs/all")).results())
    assert [{result.setting.hardware for result in group.results} for group in groups] == [
        {"EPYC"},
        {"H200, EPYC"},
    ]
    assert Path("outputs/all/report.html").read_text().count('<h3 id="pareto-') == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name=all"], "folders of sweeps are needed, got none"),
        (["name=all", "outputs/missing"], "outputs/missing has no finished points"),
    ],
)
def test_what_cannot_be_merged_is_refused(words: list[str], message: str, command: Command) -> None:
    write_sweep("one", [0.2], "EPYC", "a")
    code, printed = command(*words)
    assert code == 2 and message in printed
    assert not Path("outputs/all").exists()
