"""What is counted: survivors, those that change nothing, and survivors that are run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.mutants import __main__ as mutants

GROUP = {"modules": ["errors"], "tests": ["test_errors"]}
MODULE = "bild_lab/errors.py"


def survivor(was: str, now: str, number: int = 1) -> dict[str, str]:
    return {"name": f"bild_lab.errors.x_f__mutmut_{number}", "function": "f", "was": was, "now": now}


def test_survivors_that_are_listed_or_alike_are_left_out_of_the_share() -> None:
    known = yaml.safe_load((mutants.HERE / "equivalent.yaml").read_text())
    listed = {"module": "errors", "was": "a = 1", "now": "a = 2", "reason": "nobody reads it"}
    ours = [
        ("a = 1", "a = 2"),
        ("b = zip(x, y, strict=True)", "b = zip(x, y, )"),
        ("b = zip(x, y, strict=True)", "b = zip(x, y, strict=False)"),
        ("c = rows.sum(-1, keepdim=True)", "c = rows.sum(+1, keepdim=True)"),
        ("d = torch.rand(n, device=p.device)", "d = torch.rand(n, )"),
    ]
    real = [
        ("b = zip(x, y, strict=False)", "b = zip(x, y, strict=True)"),
        ("c = rows[-1]", "c = rows[+1]"),
        ("c = rows.tril(-1)", "c = rows.tril(+1)"),
        ("c.append(-1)", "c.append(+1)"),
        ("c = rows.sum(-1)", "c = rows.sum(-2)"),
        ("d = torch.rand(n, device=p.device)", "d = torch.rand(m, )"),
        ("a = 1", "a = 3"),
    ]
    found = {"modules": {MODULE: {"mutants": 27, "survivors": [survivor(*one) for one in (*ours, *real)]}}}
    told = mutants.report({"group": found}, [*known, listed])
    assert "| `errors` | 27 | 5 | 7 |" in told and "68.2% of 22 noticed; 5 equivalent ones left out" in told
    assert all(f"errors: f\n  - {was}\n  + {now}" in told for was, now in real)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The mutants that each run chose; every second of them survives."""
    chosen: list[list[str]] = []
    monkeypatch.setattr(mutants, "RESULTS", tmp_path)
    monkeypatch.setattr(mutants, "prepare", lambda *_: None)
    monkeypatch.setattr(mutants, "run_mutmut", lambda folder, names, log: chosen.append(list(names)))

    def outcome(folder: Path, module: str, names: Sequence[str]) -> dict:
        many = 20 if "*" in names[0] else len(names)
        return {"mutants": many, "survivors": [survivor("", "", number) for number in range(1, many, 2)]}

    monkeypatch.setattr(mutants, "outcome", outcome)
    monkeypatch.setattr(mutants, "content", lambda paths: f"{len(chosen)} of {paths[0]}")
    return chosen


def test_survivors_are_run_again_and_counted_among_all(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no result of this code is stored"):
        mutants.measure("group", GROUP, 1, again=True)
    mutants.measure("group", GROUP, 1, again=False)
    with pytest.raises(RuntimeError, match="no result of this code is stored"):
        mutants.measure("group", GROUP, 1, again=True)  # the code is another
    monkeypatch.setattr(mutants, "content", lambda paths: "new tests" if "tests/" in paths[0] else "0 of " + paths[0])
    mutants.measure("group", GROUP, 1, again=True)
    found = json.loads(mutants.file_of("group").read_text())["modules"][MODULE]
    assert runs == [["*__mutmut_*"], [f"bild_lab.errors.x_f__mutmut_{number}" for number in range(1, 20, 2)]]
    assert (found["mutants"], len(found["survivors"])) == (20, 5)
    mutants.measure("group", GROUP, 1, again=True)  # nothing is new
    mutants.measure("group", GROUP, 10, again=False)
    assert len(runs) == 2


def test_a_mutant_whose_tests_could_not_begin_is_not_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mutants" / "bild_lab").mkdir(parents=True)
    codes = {f"bild_lab.errors.x_f__mutmut_{code}": code for code in (0, 1, 3, 5, 33, 255, -14, -24)}
    meta = tmp_path / "mutants" / f"{MODULE}.meta"
    meta.write_text(json.dumps({"exit_code_by_key": codes}))
    monkeypatch.setattr(mutants, "difference", lambda mutant, module: {"name": mutant})
    told = mutants.outcome(tmp_path, MODULE, ["*__mutmut_*"])
    assert told["mutants"] == 8
    assert [one["name"].rpartition("_")[2] for one in told["survivors"]] == ["0", "5", "33", "255"]
    meta.write_text(json.dumps({"exit_code_by_key": {**codes, "bild_lab.errors.x_f__mutmut_9": None}}))
    with pytest.raises(RuntimeError, match="mutmut ended early"):
        mutants.outcome(tmp_path, MODULE, ["*__mutmut_*"])
