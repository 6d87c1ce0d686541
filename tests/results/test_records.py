"""Results on disk appear whole, survive, and make one table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.results.records import Sweep, finite, point_hash, require_writable
from bild_lab.results.table import write_table
from tests.report.sample import sample_result


def test_a_point_appears_whole(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    assert sweep.finished("abc") is None
    folder = sweep.write_point("abc", "name: x\n", {"value": 1.5}, [{"id": "a"}, {"id": "ä"}])
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "examples.jsonl", "result.json"]
    assert sweep.finished("abc") == {"value": 1.5}
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


def test_a_failure_never_hides_a_result(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path / "sweep")
    sweep.write_failure("abc", "", {"point": "abc", "error": {"message": "once"}})
    assert [failure["point"] for failure in sweep.failures()] == ["abc"]
    sweep.write_point("abc", "", {"point": "abc", "environment": {"started": "1"}}, [])
    assert sweep.failures() == []
    sweep.write_failure("abc", "", {"point": "abc"})
    assert sweep.failures() == []
    assert len(sweep.results()) == 1


def test_numbers_that_json_cannot_hold_become_null_or_words() -> None:
    assert finite({"a": [math.nan, 1.0], "b": math.inf, "c": (1,)}) == {"a": [None, 1.0], "b": "inf", "c": [1]}


def test_a_hash_depends_on_values_and_not_on_order() -> None:
    assert point_hash({"a": 1, "b": 2}) == point_hash({"b": 2, "a": 1})
    assert point_hash({"a": 1, "b": 2}) != point_hash({"a": 1, "b": 3})


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
