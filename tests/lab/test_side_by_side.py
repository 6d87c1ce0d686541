"""Points that are timed side by side: each one's own texts and numbers, one baseline, the same work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bild_lab.engine.request import Request
from bild_lab.errors import UserError
from bild_lab.lab import point as points
from bild_lab.lab import runner
from bild_lab.lab.config import compose_config
from bild_lab.lab.point import Point, prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import require_same_work, run_point, run_points, time_methods
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.score import PARTS, result_of
from scripts import sweeps as script

Command = Callable[..., tuple[int, str]]
BILD = ["policy=bild", "policy.fallback=0.1", "policy.rollback=inf"]
SPECULATIVE = ["policy=speculative", "policy.window=2"]


@pytest.fixture(scope="module")
def words(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("data") / "test.jsonl"
    prompts = ["w5 w9 w30 w12", "w7 w8", "w39 w38 w3 w20", "w11 w4 w6"]
    file.write_text("".join(json.dumps({"de": prompt, "en": "w5 w9 w30 w12"}) + "\n" for prompt in prompts))
    words = [f"pair.target={checkpoints / 'llama'}", "dataset=multi30k", f"dataset.path={file}"]
    words += ["decoding.max_new_tokens=8", "runtime.threads=1", "measure.repeats=2", "measure.traced_examples=1"]
    return [*words, f"pair.draft={checkpoints / 'llama-draft'}"]


def prepared(*words: str) -> Point:
    points.cached_examples.cache_clear()
    return prepare(compose_config(list(words)))


@pytest.fixture(scope="module")
def several(words: list[str], checkpoints: Path) -> list[Point]:
    """BiLD without rollback, whose texts are not the target's, speculative decoding, and it with another drafter."""
    other = [*words[:-1], f"pair.draft={checkpoints / 'llama'}"]
    return [prepared(*words, *BILD), prepared(*words, *SPECULATIVE), prepared(*other, *SPECULATIVE)]


@pytest.fixture(scope="module")
def alone(several: list[Point], tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return [run_point(point, Sweep(tmp_path_factory.mktemp("alone"))) for point in several]


def test_each_point_has_its_own_texts_and_all_share_one_baseline(
    several: list[Point], alone: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, advanced, stages = [], [], []

    def noted(methods: dict, *rest: object) -> object:
        timed.append(list(methods.values()))
        return time_methods(methods, *rest)

    monkeypatch.setattr(runner, "time_methods", noted)
    found = run_points(several, Sweep(tmp_path), 30.0, advanced.append, stages.append)
    decoders = [*(one.decoders["method"] for one in several), several[0].decoders["baseline"]]
    assert timed == [[one.method for one in decoders]]  # once, and one baseline
    assert sum(advanced) == pytest.approx(4)
    assert set(stages) == {*PARTS.values(), "loading llama", "loading llama-draft"}
    examples = [read_examples(one.folder) for one in found]
    for one, own, rows in zip(found, alone, examples, strict=True):
        assert (one.point, one.policy, one.knobs) == (own.point, own.policy, own.knobs)
        assert (one.quality, one.counts, one.agreement_with_target) == (
            own.quality,
            own.counts,
            own.agreement_with_target,
        )
        assert [row.token_ids for row in rows] == [row.token_ids for row in read_examples(own.folder)]
        assert one.speedup.value == pytest.approx(one.baseline_latency_s.total / one.latency_s.total, rel=1e-3)
        assert one.setting.draft == own.setting.draft and one.environment["side_by_side"] == 3
        assert [bool(row.spans) for row in rows] == [True, False, False, False]
        assert one.seconds["setup"] == 10.0 and one.seconds["decode"] > 0
        assert one.seconds["total"] == pytest.approx(sum(one.seconds[part] for part in ("setup", *PARTS)))
    assert found[0].agreement_with_target < 1 == found[1].agreement_with_target
    assert found[2].counts.tokens_per_target_call > found[1].counts.tokens_per_target_call  # drafted by the target
    baselines = [[row.baseline_latency_s for row in rows] for rows in examples]
    assert baselines[0] == baselines[1] == baselines[2]
    own_s = [[row.latency_s for row in rows] for rows in examples]
    assert own_s[0] != own_s[1] != own_s[2] and all(len(one) == 2 for rows in own_s for one in rows)
    assert "side_by_side" not in alone[0].environment


def test_without_a_baseline_and_in_batches_too(words: list[str], tmp_path: Path) -> None:
    more = ["measure.baseline=null", "runtime.batch=2"]
    found = run_points([prepared(*words, *more, *each) for each in (BILD, SPECULATIVE)], Sweep(tmp_path))
    assert [one.policy for one in found] == ["bild", "speculative"]
    assert {one.environment["side_by_side"] for one in found} == {2}
    assert all(one.speedup.value is None and one.latency_s.total > 0 for one in found)


def test_points_of_other_work_are_refused(words: list[str], several: list[Point]) -> None:
    fewer = prepared(*words, *SPECULATIVE, "dataset.limit=3", "decoding.max_new_tokens=7")
    with pytest.raises(UserError, match="bild and speculative differ in .*n_examples, data"):
        require_same_work([several[0], fewer])
    with pytest.raises(UserError, match="decoding"):
        run_points([several[0], fewer], Sweep(Path("unused")))
    baseline = replace(several[1], setting={**several[1].setting, "pairs": 1})
    with pytest.raises(UserError, match="differ in pairs"):
        require_same_work([several[0], baseline])
    talk = replace(several[1], examples=tuple(replace(one, category="talk") for one in several[1].examples))
    with pytest.raises(UserError, match="differ in categories"):
        require_same_work([several[0], talk])
    second = replace(several[1], setting={**several[1].setting, "second_draft": "a third model"})
    require_same_work([*several, second])


@pytest.mark.parametrize(("positions", "others", "fits"), [(99, None, False), (99, 98, False), (300, 290, True)])
def test_points_may_end_at_different_positions_far_from_the_texts(
    positions: int,
    others: int | None,
    fits: bool,
    several: list[Point],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Point.requests

    def requested(point: Point, examples: object) -> list[Request]:
        ends = positions if point is several[1] else others
        return [replace(one, limits=replace(one.limits, positions=ends)) for one in own(point, examples)]

    monkeypatch.setattr(Point, "requests", requested)
    if fits:
        assert len(run_points(several[:2], Sweep(tmp_path))) == 2
        return
    with pytest.raises(UserError, match="end at different positions, near these texts"):
        run_points(several[:2], Sweep(tmp_path))


def test_a_fault_behind_the_timing_of_one_point_stores_none(
    several: list[Point], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(point: Point, *others: object) -> object:
        if point is several[1]:
            raise ValueError("no scores")
        return result_of(point, *others)

    monkeypatch.setattr(runner, "result_of", scored)
    with pytest.raises(ValueError, match="no scores"):
        run_points(several[:2], Sweep(tmp_path))
    assert not Sweep(tmp_path).all_results()


@pytest.fixture
def command(command: Command) -> Command:
    return lambda *words: command(script, *script.as_overrides(["interleave", *words]), config="sweeps")


@pytest.fixture
def measured(several: list[Point], command: Command) -> list[Result]:
    """Two sweeps: one with BiLD, one with both points of speculative decoding."""
    names = ("outputs/first", "outputs/second", "outputs/second")
    return [run_point(point, Sweep(Path(name))) for name, point in zip(names, several, strict=True)]


def test_finished_points_of_sweeps_are_timed_again_and_ranked(measured: list[Result], command: Command) -> None:
    before = {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    code, printed = command("name=together", "outputs/first", "outputs/second", "limit=3", "repeats=1")
    assert code == 0, printed
    found = Sweep(Path("outputs/together")).results()
    assert len(found) == 3 and {one.name for one in found} == {"together"}
    assert {one.environment.side_by_side for one in found} == {3}
    assert {one.peak_memory_mb for one in found} == {None}  # it would be that of all of them
    assert {(one.setting.n_examples, one.setting["repeats"]) for one in found} == {(3, 1)}
    assert all(one.seconds["setup"] > 0 for one in found)
    lines = [line for line in printed.splitlines() if "fastest" in line]
    fastest = min(found, key=lambda one: one.latency_s.total)
    slowest = max(found, key=lambda one: one.latency_s.total)
    assert len(lines) == 3 and f"drafter {Path(fastest.setting.draft).name}" in lines[0]
    assert ": the fastest, " in lines[0]
    assert sorted(line.partition(", drafter ")[0] for line in lines) == ["bild", "speculative", "speculative"]
    assert "fallback 0.1 rollback ∞" in "".join(lines)
    ratio = slowest.latency_s.total / fastest.latency_s.total
    assert lines[2].startswith(slowest.policy) and f"{ratio:.2f}× the time of the fastest [" in lines[2]
    assert all("as fast as vanilla, BLEU " in line for line in lines)
    assert Path("outputs/together/report.html").is_file()
    after = {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    kept = {file: content for file, content in after.items() if file.parts[1] in ("first", "second")}
    assert kept == before
    code, printed = command("name=together", "outputs/first", "outputs/second")
    assert code == 2 and "outputs/together has points already" in printed
    assert Sweep(Path("outputs/together")).results() == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "folders of sweeps are needed"),
        (["outputs/nowhere"], "outputs/nowhere has no finished points"),
        (["outputs/first"], "two points or more are timed side by side, got 1"),
        (["points=[none]", "outputs/first"], "no point of these sweeps begins with none"),
        (["outputs/first", "outputs/second", "repeats=0"], "repeats must be"),
        (["outputs/first", "outputs/second", "limit=0"], "limit must be"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    given: list[str], said: str, measured: list[Result], command: Command
) -> None:
    code, printed = command("name=together", *given)
    assert code == 2 and said in printed
    assert not Path("outputs/together").exists()


def test_an_interrupt_says_that_nothing_is_stored(
    measured: list[Result], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "time_methods", interrupted)
    code, printed = command("name=together", "outputs/first", "outputs/second")
    assert code == 130 and "nothing is stored" in printed
    assert not Sweep(Path("outputs/together")).results()
