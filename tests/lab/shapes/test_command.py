"""Trees and windows are fitted to texts that a run does not report on, kept, and part of what a point is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from bild_lab.lab.config import compose_config
from bild_lab.lab.point import Point, prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.timed import METHOD
from bild_lab.lab.shapes import command as module
from bild_lab.lab.shapes.fit import Effort
from scripts import fit_shape
from tests.checkpoints import write_data
from tests.engine.adapters.tiny import files_of
from tests.tiny import tiny_llama


def words(checkpoints: Path, data: Path, policy: str, *more: str) -> list[str]:
    needed = files_of(policy, tiny_llama(1).config, checkpoints)
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    rest = ["dataset=multi30k", f"dataset.path={data}", "decoding.max_new_tokens=8", "measure.warmup=0"]
    knobs = [f"policy.{knob}={path}" for knob, path in needed.items()]
    return [*pair, *rest, f"policy={policy}", *knobs, *more]


def point(*overrides: str) -> Point:
    return prepare(compose_config([*overrides, "dataset.split=test"]))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "Effort", partial(Effort, rows=8, widest=3))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "trees"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("medusa", marks=pytest.mark.slow), "bita"])
def test_a_tree_is_fitted_on_another_split_once_and_stands_in_the_result(
    policy: str, cache: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = write_data(tmp_path / "data", 8)
    rows = (data / "test.jsonl").read_text().splitlines(keepends=True)
    (data / "val.jsonl").write_text("".join(rows[3:]))
    (data / "test.jsonl").write_text("".join(rows[:3]))
    mine = words(checkpoints, data, policy, "policy.tree=auto")
    result = run_point(point(*mine), Sweep(tmp_path / "sweep"))
    (kept,) = cache.glob("*.json")
    assert result.agreement_with_target == 1
    assert result.facts["trained"]["tree"] == json.loads(kept.read_text())
    assert result.facts["trained"]["tree"]["texts"] == {
        "dataset": "multi30k",
        "split": "validation",
        "examples": 5,
        "rounds": result.facts["trained"]["tree"]["texts"]["rounds"],
    }
    assert "fitting the tree on 5 texts of multi30k validation" in " ".join(capsys.readouterr().err.split())
    run_point(point(*mine), Sweep(tmp_path / "other"))
    assert "the tree is that of" in capsys.readouterr().err
    assert list(cache.glob("*.json")) == [kept]


@pytest.mark.slow
def test_without_another_split_a_tree_is_fitted_on_the_runs_own_texts_and_it_says_so(
    cache: Path, checkpoints: Path, data: Path, capsys: pytest.CaptureFixture
) -> None:
    fitted = module.with_fitted_tree(point(*words(checkpoints, data, "medusa", "policy.tree=auto")))
    assert fitted.decoders[METHOD].method.drafter.fitted
    assert "the texts of the run itself, as there is no other split" in " ".join(capsys.readouterr().err.split())


def test_a_trees_file_counts_with_its_content(checkpoints: Path, data: Path, tmp_path: Path) -> None:
    base = words(checkpoints, data, "medusa")

    def name_of(rank: int, file: str) -> str:
        trees = [{"parents": [], "ranks": [], "probes": [0]}, {"parents": [-1], "ranks": [rank], "probes": [0, 0]}]
        (tmp_path / file).write_text(json.dumps({"trees": trees}))
        return point(*base, f"policy.tree={tmp_path / file}").id

    here = name_of(0, "here.json")
    assert name_of(0, "there.json") == here != name_of(1, "here.json")
    assert here != point(*base, "policy.tree=auto").id


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["medusa", "speculative"])
def test_the_command_prints_every_budget_and_writes_what_the_policy_takes(
    policy: str, command, checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    small = ["fit.rows=6", "fit.widest=2", "fit.window=3", "name=fitted"]
    mine = words(checkpoints, data, policy, "dataset.split=test", *small)
    code, out = command(fit_shape, *mine, config="fit_shape")
    assert code == 0 and "← fastest" in out and "times the target alone" in out
    content = json.loads((tmp_path / "outputs/fitted/shape.json").read_text())
    assert [one["rows"] for one in content["budgets"]] == [1, 2, 3, 4, *([5, 6] if policy == "medusa" else [])]
    assert set(content["machine"]) == {"hardware", "threads", "engine", "dtype", "device", "code"}
    if policy == "medusa":
        assert point(*words(checkpoints, data, policy, "policy.tree=outputs/fitted/shape.json")).facts["trained"][
            "tree"
        ]
    else:
        assert f"policy.window={content['window']}" in out


@pytest.mark.slow
def test_a_window_is_fitted_to_the_rounds_of_a_finished_sweep(
    command, checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    mine = words(checkpoints, data, "speculative", "dataset.split=test")
    run_point(prepare(compose_config([*mine, "policy.window=4"])), sweep := Sweep(Path("outputs") / "done"))
    rounds = sum(len(each.rounds) for each in module.read_examples(sweep.results()[0].folder))
    asked = [*mine, "fit.window=4", "fit.sweep=outputs/done", "name=fitted"]
    assert command(fit_shape, *asked, config="fit_shape")[0] == 0
    assert json.loads((tmp_path / "outputs/fitted/shape.json").read_text())["texts"]["rounds"] == rounds
    code, out = command(fit_shape, *mine, "fit.window=9", "fit.sweep=outputs/done", config="fit_shape")
    assert code == 2 and "must have a point with window 9, got at most 4; set fit.window=4" in " ".join(out.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["policy=vanilla"], "only trees of candidates"),
        (["policy=medusa", "fit.sweep=outputs/any"], "a sweep's examples hold no ranks"),
        (["policy=medusa", "fit.rows=1"], "fit.rows must be a whole number >= 2, got 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    more: list[str], message: str, command, checkpoints: Path, data: Path
) -> None:
    mine = words(checkpoints, data, more[0].partition("=")[2], *more[1:], "dataset.split=test")
    code, out = command(fit_shape, *mine, config="fit_shape")
    assert code == 2 and message in " ".join(out.split())
