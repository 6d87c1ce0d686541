"""Results on disk appear whole, survive, and make one table."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import SCHEMA, Failure, FailureCause, Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep, require_writable
from bild_lab.lab.store.table import write_table
from tests.report.sample import sample_example, sample_result


def result(point: str = "abc", tokens: int = 1, **changes: Any) -> Result:
    return sample_result("bild", {"fallback": 0.5}, 1.5, point=point, tokens=tokens, **changes)


def test_a_point_appears_whole(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    assert sweep.newest("abc") is None
    examples = [
        sample_example("a"),
        sample_example("ä", rounds=[{"drafted": [3], "accepted": 1, "next_token": None}]),
    ]
    folder = sweep.write_point("abc", "name: x\n", result(), examples)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.yaml",
        "examples.jsonl",
        "result.json",
    ]
    found = sweep.newest("abc")
    assert found.stored_at is not None and found.folder == folder
    assert replace(found, stored_at=None) == result()
    assert read_examples(folder) == examples
    lines = (folder / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "ä"]


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")

    def breaking():
        yield sample_example("a")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        sweep.write_point("abc", "", result(), breaking())
    assert list((tmp_path).rglob("*.json*")) == []


def test_a_failure_stands_beside_results_until_it_is_forgotten(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_point("abc", "", result(), [])
    for message in ("once", "twice"):
        sweep.write_failure(Failure("fed", "bild", {}, FailureCause("UserError", message)), "")
    assert [failure.error.message for failure in sweep.failures()] == ["twice"]
    assert [one.point for one in sweep.results()] == ["abc"]
    sweep.forget_failure("fed")
    assert sweep.failures() == []
    assert len(sweep.results()) == 1


def test_a_point_measured_twice_at_once_is_stored_once(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    first = sweep.write_point("abc", "", result(tokens=1), [])
    assert sweep.write_point("abc", "", result(tokens=2), []) == first
    assert sweep.newest("abc").tokens == 1
    assert [folder.name for folder in sweep.points.glob("[!.]*")] == ["abc"]


def test_a_point_measured_anew_stands_beside_the_older_one(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    for tokens in (1, 2, 3):
        sweep.write_point(
            "abc", "", result(tokens=tokens), [sample_example(str(tokens))], keep_both=True
        )
    assert sorted(folder.name for folder in sweep.points.glob("[!.]*")) == ["abc", "abc.2", "abc.3"]
    assert sweep.newest("abc").tokens == 3
    assert [one.tokens for one in sweep.all_results()] == [1, 2, 3]
    (newest,) = sweep.results()
    assert (newest.tokens, newest.folder.name) == (3, "abc.3")
    assert [one.id for one in read_examples(newest.folder)] == ["3"]
    assert sweep.older() == 2


def test_the_newest_is_the_last_stored_also_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        hour_now = 12

        @classmethod
        def now(cls, zone: tzinfo | None = None) -> datetime:
            return datetime(2026, 1, 1, cls.hour_now, tzinfo=zone)

    monkeypatch.setattr("bild_lab.lab.store.records.datetime", Clock)
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_point("first", "", result("first", 1), [])
    Clock.hour_now = 3
    sweep.write_point("second", "", result("second", 2), [])
    assert [one.tokens for one in sweep.results()] == [2]  # alike in policy and setting
    sweep.write_point("first", "", result("first", 3), [], keep_both=True)
    assert [one.tokens for one in sweep.results()] == [3]
    assert sweep.newest("first").tokens == 3
    Clock.hour_now = 14
    sweep.write_point("second", "", result("second", 4), [], keep_both=True)
    # the clock's own again
    assert sweep.newest("second").stored_at == "2026-01-01T14:00:00.000+00:00"


DAMAGED = ["", '{"point": "ab', "\0\0\0", "[]", "{}", '{"schema": 3, "point": "abc"}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_result_is_told_and_measured_again(content: str, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    folder = sweep.write_point("abc", "", result(tokens=1), [])
    (folder / "result.json").write_text(content)
    assert sweep.newest("abc") is None and sweep.results() == []
    (failure,) = sweep.failures()
    assert "abc/result.json cannot be read" in failure.error.message
    sweep.write_point("abc", "", result(tokens=2), [])
    assert sweep.newest("abc").tokens == 2
    assert sweep.failures() == []


def test_a_result_is_read_again_only_where_its_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a report parses each file of a large sweep four times, and each logged point all."""
    sweep, read, from_json = Sweep(tmp_path / "sweep"), [], Result.from_json
    points = [
        sample_result("bild", {"fallback": fallback}, 1.5, point=f"p{fallback}")
        for fallback in (1, 2, 3)
    ]
    folders = [sweep.write_point(one.point, "", one, []) for one in points]
    monkeypatch.setattr(
        Result,
        "from_json",
        lambda content, folder: read.append(folder) or from_json(content, folder),
    )
    for _ in range(2):
        assert (len(sweep.results()), sweep.failures(), sweep.older()) == (3, [], 0)
    assert sorted(read) == folders
    file = folders[0] / "result.json"
    file.write_text(file.read_text().replace('"tokens": 1650', '"tokens": 99'))
    assert [one.tokens for one in sweep.results()] == [99, 1650, 1650]
    file.write_text("damaged")
    assert (len(sweep.results()), len(sweep.failures())) == (2, 1)
    file.unlink()
    assert (len(sweep.results()), sweep.failures()) == (2, [])


@pytest.mark.parametrize(
    "stamp", ["2026-11-30T07:00:00", "2026-11-30", "9999-12-31T23:59:59.999+00:00", "", "\0"]
)
def test_a_damaged_time_of_the_last_point_costs_no_measurement(stamp: str, tmp_path: Path) -> None:
    """Fault: a time without its zone, as of a copy that broke off, ends the write of a point."""
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_point("abc", "", result(tokens=1), [])
    (sweep.folder / ".latest").write_text(stamp)
    sweep.write_point("abc", "", result(tokens=2), [], keep_both=True)
    assert sweep.newest("abc").tokens == 2


def test_a_quality_that_is_no_number_has_no_place_on_the_front() -> None:
    nothing = sample_result("bild", {}, 1.5)
    nothing = replace(nothing, quality=replace(nothing.quality, value=float("nan")))
    (group,) = by_setting([sample_result("speculative", {}, 1.2), nothing])
    assert [one.policy for one in group.front] == ["speculative"] and group.limits()


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    folder = sweep.write_point("abc", "", result(), [])
    content = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**content, "schema": SCHEMA + 1}))
    for read in (sweep.results, sweep.failures, lambda: sweep.newest("abc")):
        with pytest.raises(UserError, match=f"got schema {SCHEMA + 1}"):
            read()


def test_a_disk_that_is_full_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(UserError, match=r"whose disk is full \(5,000 bytes free\)"):
        require_writable(tmp_path / "outputs" / "name")


def test_a_point_of_another_sweep_is_adopted_once(tmp_path: Path) -> None:
    here, there = Sweep(tmp_path / "here"), Sweep(tmp_path / "there")
    there.write_point("abc", "name: there", result(tokens=1), [sample_example("a")])
    first = there.newest("abc")
    assert here.adopt(first) and not here.adopt(first)
    assert here.newest("abc") == first
    assert [one.id for one in read_examples(here.newest("abc").folder)] == ["a"]
    there.write_point("abc", "name: there", result(tokens=2), [], keep_both=True)
    assert here.adopt(there.newest("abc"))
    assert not here.adopt(first)  # it is there already, and older
    assert here.newest("abc").tokens == 2 and here.older() == 1


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


def test_a_point_that_is_asked_for_again_is_the_one_that_reports_show(tmp_path: Path) -> None:
    """With the first drafter, with another at the same path, and with the first again."""
    sweep = Sweep(tmp_path / "sweep")
    for point, tokens in (("first", 1), ("second", 2)):
        sweep.write_point(point, f"name: {point}\n", result(point, tokens), [sample_example(point)])
    assert [one.tokens for one in sweep.results()] == [2]
    second = sweep.newest("second")
    assert sweep.show(second) == second and len(sweep.all_results()) == 2
    again = sweep.show(sweep.newest("first"))
    assert (again.tokens, again.folder.name) == (1, "first.2")
    assert sweep.results() == [again] == [sweep.newest("first")]
    assert [one.id for one in read_examples(again.folder)] == ["first"]
    assert sweep.show(again) == again and len(sweep.all_results()) == 3
    assert [one.tokens for one in (sweep.show(second), *sweep.results())] == [2, 2]


def test_points_of_one_command_that_differ_in_no_setting_are_not_stored_at_each_resume(
    tmp_path: Path,
) -> None:
    """As those of `measure.margin=1,2`, of which reports show one."""
    sweep = Sweep(tmp_path / "sweep")
    for point, tokens in (("first", 1), ("second", 2)):
        sweep.write_point(point, "", result(point, tokens), [])
    for _ in range(3):
        reported: set[str] = set()
        for point in ("first", "second"):
            assert sweep.show(sweep.newest(point), reported).point == point
            reported.add(point)
    assert len(sweep.all_results()) == 3


def test_a_point_measured_again_after_its_models_moved_is_one_point(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    for tokens, folder in enumerate(("/old/large", "/new/large")):
        moved = result(tokens=tokens, setting={"target": folder})
        sweep.write_point("abc", "", moved, [], keep_both=True)
    (shown,) = sweep.results()
    assert (shown.tokens, shown.setting.target, sweep.older()) == (1, "/new/large", 1)


def test_a_point_measured_after_one_was_adopted_from_a_clock_ahead_is_the_newest(
    tmp_path: Path,
) -> None:
    here, there = Sweep(tmp_path / "here"), Sweep(tmp_path / "there")
    file = there.write_point("abc", "", result(tokens=1), []) / "result.json"
    ahead = {**json.loads(file.read_text()), "stored_at": "2100-01-01T00:00:00.000+00:00"}
    file.write_text(json.dumps(ahead))
    assert here.adopt(there.newest("abc"))
    here.write_point("abc", "", result(tokens=2), [], keep_both=True)
    assert here.newest("abc").tokens == 2
