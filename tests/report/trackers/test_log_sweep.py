"""`python scripts/sweeps.py log outputs/NAME`: logs what was measured before, also twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.store.records import Sweep
from bild_lab.report.trackers.wandb import recorded_runs
from scripts import sweeps as script
from tests.report.sample import sample_baseline, sample_drafted, sample_example

Command = Callable[..., tuple[int, str]]
LAST = "logged offline: {} runs. Send with: wandb sync {}/offline-run-*"


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/sweeps.py log in an empty folder; returns its exit code and everything it
    printed.
    """
    return lambda *words: command(script, *script.as_overrides(["log", *words]), config="sweeps")


def sweep(name: str, *overrides: str) -> Sweep:
    written = Sweep(Path("outputs") / name)
    for result in (
        sample_baseline(),
        sample_drafted("bild", {"fallback": 0.5}, 1.6, 0.1, (0.8, 0.5)),
    ):
        config = compose_config(["policy=vanilla", *overrides])
        written.write_point(result.point, OmegaConf.to_yaml(config), result, [sample_example("a")])
    return written


@pytest.mark.slow
def test_a_finished_sweep_is_logged_and_the_last_line_says_how_to_send_it(
    command: Command, data: Path
) -> None:
    measured = sweep("my sweep", "dataset=multi30k", f"dataset.path={data}")
    code, printed = command("outputs/my sweep", "logger.mode=offline")
    assert code == 0, printed
    assert printed.splitlines()[-1] == LAST.format(3, "'outputs/my sweep/wandb'")
    assert "outputs/my sweep: logging point 2 of 2, bild" in printed
    record = recorded_runs(measured.folder)
    assert [one.run.rpartition("-")[2] for one in record] == [
        *(one.point for one in measured.results()),
        "sweep",
    ]
    assert {(one.mode, one.project, one.entity) for one in record} == {
        ("offline", "bild_lab", None)
    }
    assert len(list((measured.folder / "wandb").glob("offline-run-*"))) == 3


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "none"),
        (("outputs/first", "outputs/empty"), "outputs/empty"),
        (("outputs/first", "logger.mode=no"), "mode"),
    ],
)
def test_bad_input_is_refused_and_logs_nothing(
    command: Command, words: tuple[str, ...], fault: str
) -> None:
    measured = sweep("first")
    code, printed = command(*words)
    assert code == 2 and fault in printed
    assert recorded_runs(measured.folder) == []
