"""Knobs searched on validation and confirmed on test: the space, the search, kills, and the script as a whole."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.result import Result
from bild_lab.lab.screening.space import Space, read_lists, read_space
from bild_lab.lab.tuning.search import Study, TuneSpec, Tuning
from scripts import tune as script
from tests.checkpoints import write_data
from tests.report.sample import sample_result, with_quality
from tests.thinned import thinned

Places = tuple[float, ...]


def spec(trials: int, loss: float | None = None) -> TuneSpec:
    return TuneSpec(trials, loss, "validation", "test", [])


class Bench:
    """A tuning whose points have made-up qualities and speedups: x saves time, y costs quality."""

    def __init__(self, folder: Path, told: TuneSpec, counts: tuple[int, int] = (3, 3)) -> None:
        x, y = (tuple(f"{key}={number}" for number in range(count)) for key, count in zip("xy", counts, strict=True))
        self.spec, self.space = told, Space((x, y), ())
        self.key, self.sweep = "key", Sweep(folder / "a b")
        self.asked: list[Places] = []
        self.fault: Callable[[Places], None] = lambda place: None
        self.done: dict[tuple[str, ...], Result] = {}

    def result(self, values: tuple[str, ...], split: str) -> Result | None:
        assert split == "validation"
        place = tuple(float(value.partition("=")[2]) for value in values)
        self.asked.append(place)
        if self.fault(place) == "failed":
            return None
        speedup = 1 + place[0] / 4 - (place[1] - 1) ** 2 / 20
        result = sample_result("made-up", {"values": values}, speedup)
        self.done[values] = with_quality(result, value=30 - place[0] / 4 - place[1] / 10, baseline=30.0)
        return self.done[values]

    def finished(self, values: tuple[str, ...], split: str) -> Result | None:
        return self.done.get(values)

    def objectives(self, result: Result) -> list[float]:
        return Tuning.objectives(self, result)  # type: ignore[arg-type]


def test_a_ranges_steps_are_as_one_would_type_them() -> None:
    (values,) = read_lists(["policy.fallback=range(0.05,0.4,0.05)"]).values()
    assert [value.partition("=")[2] for value in values] == ["0.05", "0.1", "0.15", "0.2", "0.25", "0.3", "0.35"]


def test_a_space_is_the_lists_of_a_sweep_in_the_order_of_their_numbers() -> None:
    space = read_space(["policy.rollback=10,2,1", "policy.window=range(3,6)", "policy=bild", "policy.rule=opt,chow"])
    assert space.lists == (
        ("policy.rollback=1", "policy.rollback=2", "policy.rollback=10"),
        ("policy.window=3", "policy.window=4", "policy.window=5"),
        ("policy.rule=opt", "policy.rule=chow"),
    )
    assert space.fixed == ("policy=bild",)
    assert space.size == 18


def test_of_two_lists_for_one_knob_the_later_counts() -> None:
    assert read_space(["policy.window=3,5", "policy.window=7,9"]).lists == (("policy.window=7", "policy.window=9"),)


@pytest.mark.parametrize("words", [["policy.window=3"], ["policy.window=interval(1,5)"], [], ["policy=glob(*)"]])
def test_what_is_no_list_of_values_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="lists"):
        read_space(words)


def test_corners_hold_the_ends_of_every_list_and_no_point_twice() -> None:
    space = Space((("x=1", "x=2", "x=3"), ("y=1", "y=2")), ())
    assert space.corners() == [("x=1", "y=1"), ("x=3", "y=1"), ("x=1", "y=2")]


@pytest.mark.parametrize("changed", [{"trials": 0}, {"loss": -1}, {"loss": True}, {"validation": "test"}])
def test_a_search_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"tune\."):
        TuneSpec(**{"trials": 5, "loss": None, "validation": "dev", "test": "test", "space": [], **changed})


@pytest.mark.slow
def test_as_many_trials_as_points_measure_every_point_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(1000))
    found = Study(bench, 0, True).search()
    assert sorted(bench.asked) == sorted(itertools.product(range(3), range(3)))
    assert len(found) == 9


def test_a_search_ends_after_its_trials_and_repeats_no_point(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(7), (9, 9))
    assert len(Study(bench, 0, True).search()) == 7
    assert len(set(bench.asked)) == len(bench.asked) == 7


def test_a_killed_search_goes_on_with_the_point_it_was_killed_in(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(6), (9, 9))

    def killed(place: Places) -> None:
        if len(bench.asked) == 4:
            raise KeyboardInterrupt

    bench.fault = killed
    with pytest.raises(KeyboardInterrupt):
        Study(bench, 0, True).search()
    before = list(bench.asked)
    bench.fault = lambda place: None
    assert len(Study(bench, 0, True).search()) == 6
    assert bench.asked[4] == before[3]
    assert len(set(bench.asked)) == len(bench.asked) - 1 == 6


def test_a_search_begun_anew_leaves_the_earlier_one_and_is_the_one_gone_on_with(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(3), (9, 9))
    Study(bench, 0, True).search()
    Study(bench, 1, False).search()
    assert len(bench.asked) == 6
    bench.spec = spec(4)
    assert len(Study(bench, 1, True).search()) == 4
    assert len(bench.asked) == 7


def test_points_that_fail_are_left_out_and_tried_once_a_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(1000))
    bench.fault = lambda place: "failed" if place[0] == 2 else None
    assert len(Study(bench, 0, True).search()) == 6
    assert len(bench.asked) == 9
    bench.fault = lambda place: None
    assert len(Study(bench, 0, True).search()) == 9
    assert [place[0] for place in bench.asked[9:]] == [2, 2, 2]


def test_a_loss_is_worse_than_any_speedup_beyond_what_may_be_lost(tmp_path: Path) -> None:
    def cost(quality: float, speedup: float) -> float:
        result = with_quality(sample_result("bild", {}, speedup), value=quality, baseline=30.0)
        (value,) = Bench(tmp_path, spec(1, loss=1.0)).objectives(result)
        return value

    assert cost(29.0, 2.0) == 0.5
    assert cost(28.5, 2.0) == 1.5
    assert cost(28.5, 0.5) == 2.5


def test_without_a_baseline_latency_is_in_seconds(tmp_path: Path) -> None:
    result = with_quality(sample_result("bild", {}, None), value=30.0, baseline=None)
    assert Bench(tmp_path, spec(1)).objectives(result) == [30.0, result.latency_s.mean]


def test_a_few_trials_find_nearly_the_best_within_a_loss(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec(24, loss=1.0), (8, 6))
    results = list(Study(bench, 0, True).search().values())
    (chosen,) = Tuning.chosen(bench, results)  # type: ignore[arg-type]
    assert chosen.quality.value >= 29.0
    whole = [bench.result((f"x={x}", f"y={y}"), "validation") for x in range(8) for y in range(6)]
    best = max(one.speedup.value for one in whole if one.quality.value >= 29.0)
    assert chosen.speedup.value >= 0.8 * best


def test_nothing_is_chosen_where_no_point_keeps_the_quality() -> None:
    lossy = sample_result("bild", {}, 2.0, -10.0)
    assert Tuning.chosen(SimpleNamespace(spec=spec(1, loss=1.0)), [lossy]) == []  # type: ignore[arg-type]


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs scripts/tune.py in an empty folder; returns its exit code and everything it printed."""
    return lambda *words: command(script, *script.as_overrides(list(words), "tune.space"), config="tune")


@pytest.fixture
def base(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = write_data(tmp_path_factory.mktemp("splits"), rows=4)
    rows = (data / "test.jsonl").read_text().splitlines(keepends=True)
    (data / "validation.jsonl").write_text("".join(rows[:2]))
    (data / "test.jsonl").write_text("".join(rows[2:]))
    words = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}", "dataset=multi30k"]
    words += [f"dataset.path={data}", "decoding.max_new_tokens=6", "measure.repeats=1", "measure.warmup=0"]
    return [*words, "measure.traced_examples=0", "runtime.threads=1", "name=tuned"]


@pytest.mark.slow
def test_what_is_chosen_on_validation_is_confirmed_on_test_in_one_report(command: Command, base: list[str]) -> None:
    words = ["policy.fallback=0.2,0.6", "policy.rollback=0.69,50", "tune.loss=0", "tune.trials=3", "tune.live=true"]
    code, printed = command(*base, *words)
    assert code == 0, printed
    assert "chosen: policy.fallback=" in printed
    (pair,) = json.loads(Path("outputs/tuned/tuned.json").read_text())
    frame = pd.read_csv("outputs/tuned/sweep.csv").set_index("point")
    assert sorted(frame["split"]) == ["test", "validation", "validation", "validation"]
    assert frame.loc[pair["validation"]["point"], "split"] == "validation"
    assert frame.loc[pair["test"]["point"], "split"] == "test"
    same = frame.loc[[pair["validation"]["point"], pair["test"]["point"]], ["fallback", "rollback", "window"]]
    assert len(same.drop_duplicates()) == 1
    assert pair["validation"]["difference"] >= 0
    assert "Best of 2 settings (split" in printed and Path("outputs/tuned/report.html").is_file()
    before = {file: file.stat().st_mtime_ns for file in Path("outputs/tuned/points").rglob("result.json")}
    code, printed = command(*base, *words)
    assert code == 0, printed
    assert {file: file.stat().st_mtime_ns for file in before} == before  # and only what was chosen is looked at again
    assert len(list(Path("outputs/tuned/points").iterdir())) == 4


@pytest.mark.slow
def test_trials_over_a_record_leave_only_what_is_confirmed(command: Command, base: list[str]) -> None:
    words = ["policy.fallback=0.2,0.6", "policy.rollback=0.69,50", "tune.loss=0", "tune.trials=3"]
    code, printed = command(*base, *words)
    assert code == 0, printed
    (pair,) = json.loads(Path("outputs/tuned/tuned.json").read_text())
    frame = pd.read_csv("outputs/tuned/sweep.csv").set_index("point")
    assert list(frame["split"]) == ["test"] and frame.index[0] == pair["test"]["point"]
    assert pair["validation"]["difference"] >= 0 and pair["validation"]["predicted_speedup"] > 0
    assert "predicted; test BLEU" in printed


REFUSED = {
    "sampled": (["policy.window=3,5", "decoding=sample"], "replays greedy decoding, got decoding.temperature"),
    "no lists": ([], "a search needs lists of values, got none"),
    "one split": (["policy.window=3,5", "tune.validation=test"], "must be two splits"),
    "missing split": (["policy.window=3,5", "tune.validation=train"], "has no split 'train'"),
    "out of range at an end": (["policy.fallback=0.5,1.5"], "must lie in [0, 1], got 1.5"),
    "misspelt key": (["policy.windw=3,5"], "no configuration key policy.windw; did you mean policy.window?"),
    "misspelt key of the search": (["policy.window=3,5", "tune.trails=3"], "did you mean tune.trials?"),
    "loss without a baseline": (["policy.window=3,5", "tune.loss=1", "measure.baseline=null"], "tune.loss is a loss"),
    "malformed": (["policy.window=3,5", "policy.rollback=[1"], "no viable alternative at input '[1'"),
}


@pytest.mark.parametrize("case", thinned(REFUSED, 3))
def test_a_search_that_cannot_run_leaves_nothing(case: str, command: Command, base: list[str]) -> None:
    words, message = REFUSED[case]
    code, printed = command(*base, *words)
    assert code == 2, printed
    assert message in " ".join(printed.split()) and "Traceback" not in printed
    assert [file for file in Path().rglob("*") if file.is_file()] == []


@pytest.mark.slow
def test_a_second_search_under_a_name_is_refused_while_the_first_runs(command: Command, base: list[str]) -> None:
    sweep = Sweep(Path("outputs/tuned"))
    with sweep.search_lock():
        code, printed = command(*base, "policy.window=3,5")
        assert code == 2, printed
        assert "another process searches in outputs/tuned; wait" in " ".join(printed.split())
        assert [file.name for file in sweep.folder.iterdir()] == [".search.lock"]
    with sweep.search_lock():
        pass  # what was held is given back


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_folder_that_knows_no_locks_is_searched_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    entered = []
    with Sweep(tmp_path / "tuned").search_lock():
        entered.append("search")
    with Sweep(tmp_path / "tuned").report_lock():
        entered.append("report")
    assert entered == ["search", "report"]


@pytest.mark.slow
def test_validation_that_is_test_under_another_name_is_refused(command: Command, base: list[str], data: Path) -> None:
    copied = write_data(Path("copied"))
    (copied / "validation.jsonl").write_text((copied / "test.jsonl").read_text())
    code, printed = command(*base, "policy.window=3,5", f"dataset.path={copied.absolute()}")
    assert code == 2
    assert "validation and test are the same examples" in printed
