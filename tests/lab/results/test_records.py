"""Results on disk appear whole, survive, and make one table."""

from __future__ import annotations

import json
import math
import shutil
from datetime import datetime, tzinfo
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.results.records import Sweep, finite, require_writable
from bild_lab.lab.results.table import write_table
from tests.report.sample import sample_result


def test_a_point_appears_whole(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    assert sweep.finished("abc") is None
    folder = sweep.write_point("abc", "name: x\n", {"value": 1.5}, [{"id": "a"}, {"id": "ä"}])
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "examples.jsonl", "result.json"]
    stored = sweep.finished("abc")
    assert stored["value"] == 1.5 and sorted(stored) == ["stored", "value"]
    assert [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()] == [
        {"id": "a"},
        {"id": "ä"},
    ]


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")

    def breaking():
        yield {"id": "a"}
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        sweep.write_point("abc", "", {}, breaking())
    assert list((tmp_path).rglob("*.json*")) == []


def test_a_failure_stands_beside_results_until_it_is_forgotten(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_point("abc", "", {"point": "abc"}, [])
    for message in ("once", "twice"):
        sweep.write_failure("fed", "", {"point": "fed", "error": {"message": message}})
    assert [failure["error"]["message"] for failure in sweep.failures()] == ["twice"]
    assert [result["point"] for result in sweep.results()] == ["abc"]
    sweep.forget_failure("fed")
    assert sweep.failures() == []
    assert len(sweep.results()) == 1


def test_a_point_measured_twice_at_once_is_stored_once(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    first = sweep.write_point("abc", "", {"value": 1}, [])
    assert sweep.write_point("abc", "", {"value": 2}, []) == first
    assert sweep.finished("abc")["value"] == 1
    assert [folder.name for folder in sweep.points.glob("[!.]*")] == ["abc"]


def test_a_point_measured_anew_stands_beside_the_older_one(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    for value in (1, 2, 3):
        sweep.write_point("abc", "", {"value": value}, [{"of": value}], beside=True)
    assert sorted(folder.name for folder in sweep.points.glob("[!.]*")) == ["abc", "abc.2", "abc.3"]
    assert sweep.finished("abc")["value"] == 3
    assert sweep.examples("abc") == [{"of": 3}]
    assert [(result["value"], result["folder"]) for result in sweep.results()] == [(3, "abc.3")]
    assert sweep.older() == 2


def test_the_newest_is_the_last_stored_also_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        hour_now = 12

        @classmethod
        def now(cls, zone: tzinfo | None = None) -> datetime:
            return datetime(2026, 1, 1, cls.hour_now, tzinfo=zone)

    monkeypatch.setattr("bild_lab.lab.results.records.datetime", Clock)
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_point("first", "", {"point": "first", "value": 1}, [])
    Clock.hour_now = 3
    sweep.write_point("second", "", {"point": "second", "value": 2}, [])
    assert [result["value"] for result in sweep.results()] == [2]  # alike in policy and setting
    sweep.write_point("first", "", {"point": "first", "value": 3}, [], beside=True)
    assert [result["value"] for result in sweep.results()] == [3]
    assert sweep.finished("first")["value"] == 3
    Clock.hour_now = 14
    sweep.write_point("second", "", {"point": "second", "value": 4}, [], beside=True)
    assert sweep.finished("second")["stored"] == "2026-01-01T14:00:00.000+00:00"  # the clock's own again


def test_results_from_before_the_stored_time_was_kept_are_ordered_by_their_start(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    for point, started in (("abc", "2026-02"), ("bcd", "2026-01")):
        (sweep.points / point).mkdir(parents=True)
        result = {"point": point, "environment": {"started": started}}
        (sweep.points / point / "result.json").write_text(json.dumps(result))
    assert [result["point"] for result in sweep.results()] == ["abc"]


@pytest.mark.parametrize("content", ["", '{"point": "ab', "\0\0\0", "[]"])
def test_a_damaged_result_is_told_and_measured_again(content: str, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    folder = sweep.write_point("abc", "", {"point": "abc", "value": 1}, [])
    (folder / "result.json").write_text(content)
    assert sweep.finished("abc") is None and sweep.results() == []
    (told,) = sweep.failures()
    assert "abc/result.json cannot be read" in told["error"]["message"]
    sweep.write_point("abc", "", {"point": "abc", "value": 2}, [])
    assert sweep.finished("abc")["value"] == 2
    assert sweep.failures() == []


def test_a_disk_that_is_full_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(UserError, match=r"whose disk is full \(5,000 bytes free\)"):
        require_writable(tmp_path / "outputs" / "name")


def test_a_point_of_another_sweep_is_adopted_once(tmp_path: Path) -> None:
    here, there = Sweep(tmp_path / "here"), Sweep(tmp_path / "there")
    there.write_point("abc", "name: there", {"point": "abc", "value": 1}, [{"id": "a"}])
    newest = there.newest("abc")
    assert here.adopt(newest) and not here.adopt(newest)
    assert here.finished("abc") == there.finished("abc")
    assert here.examples("abc") == [{"id": "a"}]
    there.write_point("abc", "name: there", {"point": "abc", "value": 2}, [], beside=True)
    assert here.adopt(there.newest("abc"))
    assert not here.adopt(newest)  # it is there already, and older
    assert here.finished("abc")["value"] == 2 and here.older() == 1


def test_numbers_that_json_cannot_hold_become_null_or_words() -> None:
    assert finite({"a": [math.nan, 1.0], "b": math.inf, "c": (1,)}) == {"a": [None, 1.0], "b": "inf", "c": [1]}


def test_the_table_has_every_knob_and_leaves_those_of_others_empty(tmp_path: Path) -> None:
    results = [
        sample_result("bild", {"fallback": 0.5, "rollback": 2.0}, 1.5),
        sample_result("speculative", {"window": 5}, 1.2),
    ]
    write_table(results, tmp_path / "sweep.csv")
    frame = pd.read_csv(tmp_path / "sweep.csv")
    assert list(frame.columns[:5]) == ["point", "policy", "fallback", "rollback", "window"]
    assert frame["fallback"].tolist()[0] == 0.5
    assert math.isnan(frame["fallback"].tolist()[1])


def test_a_folder_below_a_file_cannot_hold_results(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(UserError, match="is not a folder that can be written"):
        require_writable(tmp_path / "outputs" / "name")
    require_writable(tmp_path / "elsewhere" / "name")
    assert not (tmp_path / "elsewhere").exists()
