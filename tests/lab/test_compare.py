"""`python scripts/compare.py A B` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from bild_lab.lab.config.command_line import words_as_list
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.schema import statistics
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.records import Sweep
from bild_lab.report.style import COLOURS
from scripts import compare
from tests.report.sample import ENVIRONMENT, sample_example, sample_result

Command = Callable[..., tuple[int, str]]
FALLBACKS = (0.3, 0.6)


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/compare.py in an empty folder; returns its exit code and everything it
    printed.
    """
    return lambda *words: command(compare, *words_as_list(list(words), "sweeps"), config="compare")


@pytest.fixture
def sweep(data: Path) -> Callable[..., Sweep]:
    """Writes a sweep of two points over six examples of a local dataset."""

    def write(
        name: str,
        latency_s: float,
        right: int = 6,
        git: str = "aaa1111",
        data: Path = data,
        limit: int | None = None,
        **setting: str,
    ) -> Sweep:
        limited = [] if limit is None else [f"dataset.limit={limit}"]
        config = compose_config(["dataset=multi30k", f"dataset.path={data}", *limited])
        examples = load_examples(DatasetSpec(**OmegaConf.to_container(config.dataset)))
        for fallback in FALLBACKS:
            own_setting = {
                "data": data_hash(examples),
                "n_examples": len(examples),
                "code": git,
                **setting,
            }
            own = {"setting": own_setting, "environment": {**ENVIRONMENT, "git": git}}
            judged = {"accepted": 3, "drafted": 6, "judged_by_position": [[2, 1, 0], [1, 0, 2]]}
            result = sample_result(
                "bild", {"fallback": fallback, "rollback": 2.0}, 1.5, **own, **judged
            )
            decoded = [
                sample_example(
                    one.id,
                    prediction=one.references[0] if index < right else "nothing of it",
                    latency_s=[latency_s * (1 + fallback)],
                    baseline_latency_s=[1.0],
                )
                for index, one in enumerate(examples)
            ]
            Sweep(Path("outputs") / name).write_point(
                result.point, OmegaConf.to_yaml(config), result, decoded
            )
        return Sweep(Path("outputs") / name)

    return write


def table() -> pd.DataFrame:
    return pd.read_csv("outputs/compare/compare.csv")


def test_two_sweeps_are_compared_point_by_point(
    command: Command, sweep: Callable[..., Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep("before", 1.0)
    sweep("after", 0.8, right=0, dtype="float32")  # five of six lost would be chance: p = 1/16
    code, printed = command("outputs/before", "outputs/after")
    assert code == 0, printed
    assert "B against A: 2 too few in speed; 2 too few in quality." in printed
    assert "Below 20 examples" in printed
    page = Path("outputs/compare/compare.html").read_text()
    assert COLOURS[0] not in page.partition('<script type="application/json">')[2]  # rings
    monkeypatch.setattr(statistics, "ENOUGH_EXAMPLES", 6)
    code, printed = command("outputs/before", "outputs/after")
    assert code == 0 and "too few" not in printed
    assert "2 points compared. B against A: 2 faster in speed; 2 worse in quality." in printed
    assert "dtype: A bfloat16, B float32" in printed
    frame = table()
    assert frame["fallback"].tolist() == [0.3, 0.6]
    assert frame["latency_ratio"].tolist() == pytest.approx([0.8, 0.8])
    assert frame["baseline_latency_ratio"].tolist() == [1, 1]
    assert frame["compared_examples"].tolist() == [6, 6]
    assert (frame["quality_difference"] < -50).all()
    page = Path("outputs/compare/compare.html").read_text()
    assert '<b class="good">faster</b>' in page and '<b class="bad">worse</b>' in page
    parts = page.split('<script type="application/json">')[1:]
    speeds, qualities = (json.loads(part.split("</script>")[0]) for part in parts)
    assert [trace["marker"]["color"] for trace in speeds["data"]] == [COLOURS[0]] * 2  # faster
    assert [trace["marker"]["color"] for trace in qualities["data"]] == [COLOURS[1]] * 2  # worse
    assert speeds["layout"]["yaxis"]["ticktext"] == ["bild fallback 0.3", "bild fallback 0.6"]


@pytest.mark.slow
def test_sweeps_of_more_and_fewer_examples_are_compared_over_those_that_both_have(
    command: Command, sweep: Callable[..., Sweep]
) -> None:
    sweep("all", 1.0, right=3)
    sweep("few", 0.5, right=2, limit=3)
    for a, b in (("all", "few"), ("few", "all")):
        code, printed = command(f"outputs/{a}", f"outputs/{b}")
        assert code == 0, printed
        first, second = (6, 3) if a == "all" else (3, 6)
        assert (
            f"Compared over the 3 examples that both have: A decoded {first}, B {second}."
            in printed
        )
        frame = table()
        assert frame["compared_examples"].tolist() == [3, 3]
        assert (frame["examples_a"][0], frame["examples_b"][0]) == (first, second)
    # the six examples have a speedup of 1.5 and a BLEU of their own; of the three, all are right
    # and none is faster
    assert (
        frame["speedup_b"].tolist() == pytest.approx([1 / 1.3, 1 / 1.6])
        and frame["speedup_a"].tolist() == [1.5] * 2
    )
    assert frame["quality_b"].tolist() == pytest.approx([100, 100])
    assert frame["latency_ratio"].tolist() == pytest.approx([2, 2])
    assert "n_examples" not in printed and "data:" not in printed


def test_different_data_that_cannot_be_read_again_are_refused(
    command: Command, sweep: Callable[..., Sweep], data: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(data)
    sweep("before", 1.0)
    sweep("after", 1.0, data=moved, limit=3)
    moved.unlink()
    code, printed = command("outputs/before", "outputs/after")
    assert code == 2 and "which examples they share cannot be checked" in printed
    assert not Path("outputs/compare").exists()


def test_data_that_moved_is_read_from_where_the_other_side_has_it(
    command: Command, sweep: Callable[..., Sweep], data: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(data)
    sweep("before", 1.0, data=moved)
    sweep("after", 1.0)
    moved.unlink()
    assert "no difference in quality" in command("outputs/before", "outputs/after")[1]
    moved.symlink_to(data)
    sweep("after2", 1.0, data=moved)
    moved.unlink()
    code, printed = command("outputs/before", "outputs/after2")
    assert code == 0
    assert "Qualities are not compared, as the references cannot be read:" in printed
    assert (
        "2 no difference in speed" in printed
        and table()["quality"].tolist() == ["not compared"] * 2
    )


def test_a_machine_that_drifted_is_named(command: Command, sweep: Callable[..., Sweep]) -> None:
    sweep("before", 1.0)
    after = sweep("after", 1.0)
    for file in after.points.glob("*/examples.jsonl"):
        file.write_text(
            file.read_text().replace('"baseline_latency_s": [1.0]', '"baseline_latency_s": [1.5]')
        )
    assert (
        "The baseline itself took 1.50 times as long in B at 2 of 2"
        in command("outputs/before", "outputs/after")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["outputs/before"], "two sweeps are needed, got 1"),
        (["outputs/before", "outputs/nowhere"], "outputs/nowhere has no finished points"),
        (["outputs/before", "outputs/before", "name=a/b"], "name must be a plain folder name"),
        (
            ["outputs/before", "outputs/before", "margin=0"],
            "margin must be a finite number > 0, got 0",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(
    command: Command, sweep: Callable[..., Sweep], words: list[str], message: str
) -> None:
    sweep("before", 1.0)
    code, printed = command(*words)
    assert (code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert not Path("outputs/compare").exists()


def test_a_margin_in_points_is_refused_where_the_metric_has_nats(
    command: Command, sweep: Callable[..., Sweep]
) -> None:
    sweep("before", 1.0, metric="log_probability")
    code, printed = command("outputs/before", "outputs/before", "margin=5")
    assert code == 2 and "margin=5 would be 5 nats a token of log_probability" in printed
    assert not Path("outputs/compare").exists()


def test_runs_of_a_point_lie_side_by_side(command: Command, sweep: Callable[..., Sweep]) -> None:
    for name in ("monday", "tuesday", "wednesday"):
        sweep(name, 1.0)
    folders = [f"outputs/{name}" for name in ("monday", "tuesday", "wednesday")]
    code, printed = command(*folders, "format=machines", "name=runs")
    assert code == 0, printed
    assert printed.count("3 runs") == 2 and "outputs/runs/machines.csv" in printed
    assert len(pd.read_csv("outputs/runs/machines.csv")) == 6
    code, printed = command("format=machines")
    assert code != 0 and "needs the folders of runs" in printed
