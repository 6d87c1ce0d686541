"""A sweep's points as a frame."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import bild_lab
from bild_lab.errors import UserError
from bild_lab.lab.store.records import Sweep
from bild_lab.lab.store.table import to_frame, write_table
from tests.report.sample import sample_result


def write(folder: Path, *points: tuple[str, dict]) -> Sweep:
    sweep = Sweep(folder)
    for policy, knobs in points:
        result = sample_result(policy, knobs, 1.5)
        sweep.write_point(result.point, "", result, [])
    return sweep


def test_several_sweeps_are_one_frame_with_a_row_per_point(tmp_path: Path) -> None:
    first = write(tmp_path / "first", ("bild", {"fallback": 0.5, "rollback": 2.0}), ("vanilla", {}))
    write(tmp_path / "second", ("speculative", {"window": 4}))
    frame = bild_lab.load_results(tmp_path / "first", str(tmp_path / "second"))
    assert frame["sweep"].tolist() == ["first", "first", "second"]
    assert frame["policy"].tolist() == ["bild", "vanilla", "speculative"]
    assert (
        frame["fallback"].tolist()[0] == 0.5
        and math.isnan(frame["fallback"][2])
        and frame["window"][2] == 4
    )
    write_table(first.results(), tmp_path / "sweep.csv")
    columns = (tmp_path / "sweep.csv").read_text().splitlines()[0].split(",")
    assert bild_lab.load_results(tmp_path / "first").columns.tolist() == ["sweep", *columns]


def test_an_infinite_knob_is_a_number(tmp_path: Path) -> None:
    sweep = write(tmp_path / "first", ("bild", {"rollback": math.inf}), ("bild", {"rollback": 2.0}))
    assert bild_lab.load_results(sweep.folder)["rollback"].tolist() == [math.inf, 2.0]
    assert to_frame(sweep.results())["rollback"].dtype == float


def test_a_folder_without_points_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="nowhere has no finished points; give the folder of a sweep"
    ):
        bild_lab.load_results(tmp_path / "nowhere")
    with pytest.raises(UserError, match="a folder is needed, got none"):
        bild_lab.load_results()
    with pytest.raises(UserError, match="folders are given one by one"):
        bild_lab.load_results([tmp_path])


def test_results_are_read_without_torch(tmp_path: Path) -> None:
    sweep = write(tmp_path / "first", ("bild", {"fallback": 0.5}))
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None); import bild_lab; "
        "print(bild_lab.load_results(sys.argv[1])['speedup'].tolist())"
    )
    ran = subprocess.run([sys.executable, "-c", code, sweep.folder], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[1.5]\n", "")


def test_the_package_has_what_it_lists() -> None:
    assert [name for name in bild_lab.__all__ if not callable(getattr(bild_lab, name))] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bild_lab.nothing


def test_metrics_behind_the_leading_one_are_the_last_columns() -> None:
    both = sample_result("bild", {}, 1.5, further_qualities={"chrf": FURTHER})
    frame = to_frame([sample_result("vanilla", {}, 1.0), both])
    names = [
        "chrf",
        "chrf_low",
        "chrf_high",
        "chrf_difference",
        "chrf_difference_low",
        "chrf_difference_high",
    ]
    assert frame.columns.tolist()[-6:] == names
    assert frame.iloc[1][names].tolist() == [61.0, 60.0, 62.0, -0.5, -1.0, 0.1]
    assert frame.iloc[0][names].isna().all()


FURTHER = {
    **{
        "metric": "chrF",
        "value": 61.0,
        "low": 60.0,
        "high": 62.0,
        "baseline": 61.5,
        "p_value": 0.2,
    },
    **{"difference": -0.5, "difference_low": -1.0, "difference_high": 0.1, "signature": "nc:6"},
}


def test_points_that_differ_in_the_setting_alone_are_told_from_each_other() -> None:
    decoding = {"max_new_tokens": 128, "temperature": 0.0, "top_k": None, "top_p": None}
    settings = [
        {"seed": 0, "decoding": decoding},
        {"seed": 1, "decoding": {**decoding, "temperature": 1, "top_p": 0.9}, "repeats": 5},
    ]
    frame = to_frame([sample_result("bild", {}, 1.5, setting=setting) for setting in settings])
    assert frame.columns.tolist()[-3:] == ["decoding.top_p", "seed", "setting_repeats"]
    assert frame["seed"].tolist() == [0, 1] and frame["setting_repeats"].tolist() == [3, 5]
    assert math.isnan(frame["decoding.top_p"][0]) and frame["decoding.top_p"][1] == 0.9
    assert "seed" not in to_frame([sample_result("bild", {}, 1.5)] * 2)
    # what has a column of its own is in no other
    assert frame.columns.is_unique and "decoding.temperature" not in frame
    others = [sample_result("bild", {}, 1.5, setting={"dataset": name}) for name in ("a", "b")]
    assert "setting_dataset" not in to_frame(others)
