"""A grid of knobs screened over a record and confirmed live: grids, the command as a whole, and
what it refuses.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab.data.prompts import Example
from bild_lab.lab.measure.certificate import DEFECT, TIE
from bild_lab.lab.metrics.quality import Scoring
from bild_lab.lab.point.decoder import METHOD
from bild_lab.lab.store.commands import read_commands
from bild_lab.screening import record_store as store
from bild_lab.screening.candidates import Candidate, command_line_lists, grid_of, read_lists
from bild_lab.screening.cost_model import CostModel, TimedText
from bild_lab.screening.guarantee import GuaranteeSpec
from bild_lab.screening.replay import ReplayedPoint, ReplayedText, ReplayVerdict
from bild_lab.screening.rows import (
    Row,
    read_table,
    require_comparable_rows,
    with_front,
    write_rows,
    write_summary,
)
from bild_lab.screening.screen import Screening, farthest_points
from bild_lab.screening.screen_spec import ScreenSpec
from bild_lab.screening.screened_sweep import confirmation, differences_of, row_label, to_confirm
from scripts.screen import confirmed, require_split
from tests.policies import load
from tests.report.sample import sample_drafted

Command = Callable[..., tuple[int, str]]


def test_lists_are_those_of_a_sweep_in_the_order_of_their_numbers() -> None:
    lists = read_lists(
        [
            "policy.rollback=10,2,1",
            "policy.window=range(3,6)",
            "policy.rule=opt,chow",
            "policy=bild",
        ]
    )
    assert lists == {
        "policy.rollback": ("policy.rollback=1", "policy.rollback=2", "policy.rollback=10"),
        "policy.window": ("policy.window=3", "policy.window=4", "policy.window=5"),
        "policy.rule": ("policy.rule=opt", "policy.rule=chow"),
        "policy": ("policy=bild",),
    }
    assert read_lists(["policy.window=3,5", "policy.window=7"]) == {
        "policy.window": ("policy.window=7",)
    }
    (steps,) = read_lists(["policy.fallback=range(0.05,0.25,0.05)"]).values()
    # not 0.15000000000000002
    assert [step.partition("=")[2] for step in steps] == ["0.05", "0.1", "0.15", "0.2"]


@pytest.mark.parametrize("word", ["policy.window=interval(1,5)", "policy=glob(*)"])
def test_what_is_no_list_of_values_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=r"interval|glob"):
        read_lists([word])


def test_every_policy_takes_the_lists_of_the_knobs_it_has() -> None:
    lists = [
        "policy=bild,typical_acceptance",
        "policy.fallback=0.3,0.6",
        "policy.epsilon=0.1,0.2",
        "policy.window=3,5",
    ]
    grid = grid_of(["policy.rollback=3", "dataset.limit=7"], lists)
    found = [(one.name, dict(one.knobs)) for one in grid.candidates]
    assert len(found) == 8 and grid.shared == ("dataset.limit=7",)
    unset = {"draft_vocabulary": None, "draft_vocabulary_from": None}
    bild = {"fallback": 0.3, "rollback": 3, "window": 3, "verify_tail": True, **unset}
    assert found[0] == ("bild", bild)
    assert found[-1] == ("typical_acceptance", {"epsilon": 0.2, "delta": 0.3, "window": 5, **unset})


def test_a_point_of_the_grid_is_composed_as_run_py_does() -> None:
    grid = grid_of(["pair=toy", "policy=bild"], ["policy.fallback=0.3,0.6"])
    cfg = grid.config(grid.candidates[1], "test")
    assert (cfg.policy.fallback, cfg.dataset.split, "screen" in cfg) == (0.6, "test", False)


def test_a_knob_that_follows_another_one_does_so_at_every_point() -> None:
    words = ["policy.rollback=${policy.fallback}", "screen.select=test"]
    command = OmegaConf.create(
        {"policy": {"fallback": 9}, "hydra": {"overrides": {"task": words}, "sweeper": {}}}
    )
    task, _ = command_line_lists(command.hydra)
    grid = grid_of(task, ["policy=bild", "policy.fallback=0.3,0.6"])
    assert [one.knobs["rollback"] for one in grid.candidates] == [0.3, 0.6]
    configs = [grid.config(candidate, "test") for candidate in grid.candidates]
    assert [cfg.policy.rollback for cfg in configs] == [0.3, 0.6]


def test_a_value_inside_a_knob_that_follows_another_knob_does_so_at_every_point() -> None:
    task = ["policy=hybrid", "policy.first_knobs={factor:${policy.min_depth}}"]
    grid = grid_of(task, ["policy.min_depth=2,3"])
    assert [one.knobs["first_knobs"] for one in grid.candidates] == [{"factor": 2}, {"factor": 3}]


@pytest.mark.parametrize(
    ("lists", "wanted"),
    [
        (["dataset.limit=3,5"], "got a list for dataset.limit"),
        (
            ["policy.epsilon=0.1,0.2"],
            "bild has no knob 'epsilon'; it has fallback, rollback, window, verify_tail",
        ),
        (["policy=bild,vanilla", "policy.alpha=1,2"], "bild, vanilla has no knob 'alpha'"),
    ],
)
def test_lists_that_no_policy_takes_are_refused(lists: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted):
        grid_of([], lists)


@pytest.mark.slow
def test_a_grid_is_screened_confirmed_and_continued(screen: Command) -> None:
    lists = ["policy.fallback=0.2,0.5,0.9", "policy.rollback=0.5,3"]
    code, printed = screen(*lists, "screen.confirmations=1")
    assert code == 0, printed
    assert "chosen on validation, measured on test: bild" in printed
    frame, summary = (
        pd.read_csv("outputs/grid/screen.csv"),
        json.loads(Path("outputs/grid/screen.json").read_text()),
    )
    assert len(frame) == summary["points"] == 6 and set(frame.split) == {"validation"}
    assert frame.confirmed.notna().sum() == len(summary["confirmed"]) == 1
    assert frame.on_front.any() and frame.target_calls.sum() == summary["live_target_calls"]
    assert (
        summary["vanilla_target_calls"]
        <= summary["recorded_target_calls"]
        < summary["live_target_calls"]
        and summary["replayed_differently"]
        == summary["replayed_ties"]
        == summary["replayed_defects"]
        == 0
    )
    assert summary["prediction_error_median"] == summary["prediction_error_largest"] > 0
    (one,) = summary["confirmed"]
    assert one["selected_speedup"] == frame.predicted_speedup[frame.confirmed.notna()].item()
    assert one["predicted_speedup"] != one["selected_speedup"]  # other texts
    assert summary["prediction_error_median"] == abs(one["predicted_speedup"] / one["speedup"] - 1)
    (point,) = pd.read_csv("outputs/grid/sweep.csv").point
    assert point == frame.confirmed.dropna().item()

    code, printed = screen(
        "policy=typical_acceptance,speculative", "policy.epsilon=0.1,0.5", "screen.confirmations=0"
    )
    assert code == 0, printed
    given = [command.line for command in read_commands(Path("outputs/grid"))]
    assert ["screen.confirmations=0" in line for line in given] == [False, True]
    both = pd.read_csv("outputs/grid/screen.csv")
    assert both.policy.value_counts().to_dict() == {
        "bild": 6,
        "typical_acceptance": 2,
        "speculative": 1,
    }
    again = json.loads(Path("outputs/grid/screen.json").read_text())
    assert again["recorded_target_calls"] >= summary["recorded_target_calls"]

    code, printed = screen(*lists, "screen.confirmations=0")
    last = json.loads(Path("outputs/grid/screen.json").read_text())
    assert last["recorded_target_calls"] == again["recorded_target_calls"]
    assert len(pd.read_csv("outputs/grid/screen.csv")) == 9
    code, printed = screen(*lists, "dataset.metric=chrf")
    assert code == 2 and "with metric=bleu, but this command has metric=chrf; choose" in printed
    code, printed = screen(*lists, "dataset.skip=1", "dataset.limit=2", "screen.confirmations=0")
    assert code == 0, printed
    code, printed = screen(*lists, "dataset.limit=2", "screen.confirmations=0")
    assert code == 2 and "was screened on 2 other texts of validation" in printed


_KILLED = """
import os, signal
from bild_lab.screening import record_store as store
save_file, files = store.save_file, []
def half(tensors, file, words):
    save_file(tensors, file, words)
    files.append(file)
    if len(files) == 4:  # after the drafter's and the target's rows of the first text, and one's of the second
        os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
store.save_file = half
"""


@pytest.mark.slow
def test_a_record_killed_while_it_is_written_keeps_every_finished_text(
    screen: Command, killed_screen: Callable[..., None]
) -> None:
    lists = [
        "policy=bild",
        "policy.fallback=0.2,0.9",
        "policy.rollback=0.5,3",
        "screen.confirmations=0",
    ]
    killed_screen(_KILLED, *lists)
    whole = {
        file: file.read_bytes() for file in Path("outputs/grid/record").glob(f"*/{store.BLOCKS}")
    }
    assert len(whole) == 3
    code, printed = screen(*lists)
    assert code == 0, printed
    assert all(file.read_bytes() == content for file, content in whole.items())
    code, printed = screen(*lists, "name=fresh")
    assert code == 0, printed
    counted = [
        json.loads(Path(f"outputs/{name}/screen.json").read_text()) for name in ("grid", "fresh")
    ]
    assert counted[0]["recorded_target_calls"] == counted[1]["recorded_target_calls"]
    frames = [pd.read_csv(f"outputs/{name}/screen.csv") for name in ("grid", "fresh")]
    timed = ["predicted_speedup", "on_front"]
    assert frames[0].drop(columns=timed).equals(frames[1].drop(columns=timed))


SPEC = {
    "select": "validation",
    "confirm": "test",
    "confirmations": 8,
    "max_loss": None,
    "each_policy": False,
    "timed_s": 40,
    "batch": 16,
    "space": [],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"confirm": "val"},
        {"confirmations": -1},
        {"timed_s": -1},
        {"timed_s": 0},  # and points to confirm
        {"timed_s": True},
        {"max_loss": -1},
        {"batch": 1.5},
        {"keep": "rows"},
    ],
)
def test_a_screening_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"screen\.({'|'.join(changed)}|select)"):
        ScreenSpec(**{**SPEC, **changed})


def test_points_that_are_not_measured_live_may_be_screened_on_any_split() -> None:
    changes = {"confirm": "val", "confirmations": 0}
    assert ScreenSpec(**{**SPEC, **changes}).confirmations == 0
    with pytest.raises(UserError, match="must be two splits"):
        ScreenSpec(**{**SPEC, **changes, "guarantee": GuaranteeSpec(loss=0.02)})


def test_a_split_that_would_not_be_screened_is_refused() -> None:
    for word in ("dataset.split=dev", "dataset.split='dev'", "dataset.split=${screen.select}"):
        require_split([word, "dataset.limit=3"], "dev", "validation")
    require_split(["dataset.limit=3"], "test", "validation")  # the dataset's own
    for word in ("dataset.split=test", "+dataset.split=test"):
        with pytest.raises(UserError, match=r"so dataset\.split=test would change nothing"):
            require_split([word], "test", "validation")


def test_points_of_batches_are_not_chosen_by_the_speed_of_one_text(screen: Command) -> None:
    code, printed = screen("policy.fallback=0.2,0.9", "runtime.batch=2")
    assert code == 2 and "speed of one text at a time, got runtime.batch=2; set" in printed
    assert not list(Path("outputs").iterdir())


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["policy=ppd", "policy.exit_layer=choice(1)"], "this method reads states inside it"),
        (["policy=vanilla,hf_generate"], "policy hf_generate has texts or a loop of"),
        (["policy.fallback=0.2,0.9", "dataset.split=test"], "dataset.split=test would change"),
        (["policy.fallback=0.2,0.9", "screen.batch=0"], "screen.batch must be a whole number"),
    ],
)
def test_a_refused_screening_leaves_no_folder_but_one_with_something_in_it(
    screen: Command, others: list[str], said: str
) -> None:
    kept = Path("outputs/grid/mine.txt")
    for there in (False, True):
        if there:
            kept.parent.mkdir(parents=True)
            kept.write_text("mine")
        code, printed = screen(*others)
        assert code == 2 and said in printed
        assert there or not list(Path("outputs").iterdir())
    assert kept.read_text() == "mine"


def test_a_refused_screening_leaves_an_empty_folder_that_was_there_before(screen: Command) -> None:
    """Fault: it was removed as if the command had made it."""
    mine = Path("outputs/grid")
    mine.mkdir(parents=True)
    os.utime(mine, (1e9, 1e9))  # long before the command began
    code, printed = screen("policy.fallback=0.2,0.9", "screen.batch=0")
    assert code == 2 and "screen.batch must be a whole number" in printed
    assert mine.is_dir()


def test_a_screening_scores_the_texts_that_a_run_does(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without white space at the end, which then is no loss."""
    decoder = load(checkpoints, "llama", "vanilla")
    monkeypatch.setattr(type(decoder), "text", lambda _, ids: " text" + "\n" * len(ids))
    screening = Screening(grid=None, split="test")
    vars(screening)["point"] = SimpleNamespace(
        decoders={METHOD: decoder},
        scoring=Scoring(("agreement",)),
        examples=[Example("0", "a", "a")],
    )
    points = [
        ReplayedPoint(None, [ReplayedText(token_ids, Counter(), {})])
        for token_ids in ((5,), (5, 6))
    ]
    assert screening.losses(points).per_text.tolist() == [[0.0]]


def test_a_row_has_the_acceptance_of_judged_tokens_and_the_interval_of_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bild_lab.screening.screen.code_of", lambda *_: "code")
    monkeypatch.setattr("bild_lab.screening.screen.resolved_policy", lambda _: {})
    screening = Screening(grid=None, split="test")
    vars(screening)["point"] = SimpleNamespace(
        decoders={METHOD: SimpleNamespace(scored_text=lambda ids: "right" if ids == (5,) else "")},
        scoring=Scoring(("exact_match",)),
        examples=[Example("7", "", "", ("right",), turn=turn) for turn in (1, 2)],
        seed=0,
        specs=None,
        setting={"data": "data"},
    )
    counts = Counter(tokens=4, target_calls=1, drafted=5, judged=3, accepted=2)
    candidate = Candidate((), "bild", {}, None)
    alone, other = (
        ReplayedPoint(candidate, [ReplayedText(token_ids, counts, {}) for token_ids in several])
        for several in (((5,), (5,)), ((5,), (6,)))
    )
    (found,) = screening.rows([alone, other], None)
    assert (found.acceptance_rate, found.tokens_per_target_call) == (2 / 3, 4)
    ends = (found.quality_difference_low, found.quality_difference_high)
    assert found.quality_difference == -50 and ends == (-50, -50)
    apart = [Example(name, "", "", ("right",), same_source="7") for name in ("7", "8")]
    vars(screening)["point"].examples = apart
    (found,) = screening.rows([alone, other], None)
    assert (found.quality_difference_low, found.quality_difference_high) == (-50, -50)


def test_a_predicted_speedup_is_of_the_target_alone_over_the_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bild_lab.screening.screen.code_of", lambda *_: "code")
    monkeypatch.setattr("bild_lab.screening.screen.resolved_policy", lambda _: {})
    screening = Screening(grid=None, split="test")
    vars(screening)["point"] = SimpleNamespace(
        decoders={METHOD: SimpleNamespace(scored_text=lambda ids: "right")},
        scoring=Scoring(("exact_match",)),
        examples=[Example(place, "", "", ("right",)) for place in "ab"],
        seed=0,
        specs=None,
        setting={"data": "data"},
    )
    candidate = Candidate((), "bild", {}, None)
    screened = [
        ReplayedPoint(
            candidate,
            [ReplayedText((5,), Counter(), {"target forwards": calls}) for calls in several],
        )
        for several in ((6, 2), (1, 3), (8, 8))
    ]
    faster, slower = screening.rows(screened, CostModel({"target forwards": 0.5}))
    assert (faster.predicted_speedup, slower.predicted_speedup) == (2.0, 0.5)
    assert (faster.on_front, slower.on_front) == (True, False)


def test_timed_points_differ_most_in_their_calls_and_each_policy_has_some() -> None:
    def points(policy: str, *calls: tuple[int, int]) -> list[ReplayedPoint]:
        return [
            ReplayedPoint(
                Candidate((), policy, {}, None),
                [ReplayedText((), Counter(target_calls=target, draft_calls=draft), {})],
            )
            for target, draft in calls
        ]

    bild = points("bild", (7, 6), (1, 4), (9, 7), (7, 4), (8, 5))
    twins = points("suffix", (3, 0), (3, 0))
    chosen = [*(bild[place] for place in (1, 2, 3, 0)), twins[0]]
    found = farthest_points([*bild, *twins], 4)
    assert [id(point) for point in found] == [id(point) for point in chosen]


@pytest.mark.parametrize(
    "changed",
    [
        {"decoding": {"max_new_tokens": 9}},
        {"stop": ["w7"]},
        {"processors": "checkpoint"},
        {"contents": {"outputs/heads": "b"}},
        {"code": "changed"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_texts_that_others_decoding_wrote_are_in_another_log(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"decoding": {"max_new_tokens": 8}, "stop": None, "processors": "none"}
    same |= {"contents": {"outputs/heads": "a"}, "code": "code"}
    candidate = Candidate((), "bild", {"fallback": 0.3}, None)
    monkeypatch.setattr("bild_lab.screening.screen.resolved_policy", lambda _: {})

    def file(setting: dict[str, Any]) -> Path:
        monkeypatch.setattr("bild_lab.screening.screen.code_of", lambda *_: setting["code"])
        monkeypatch.setattr("bild_lab.screening.screen.contents_of", lambda _: setting["contents"])
        screening = Screening(grid=None, split="test")
        vars(screening)["point"] = SimpleNamespace(specs=None, setting=setting)
        vars(screening)["records"] = SimpleNamespace(models={})
        vars(screening)["folder"] = tmp_path
        return screening.text_log([candidate]).file

    assert file(same) == file(dict(same)) != file(same | changed)


def row(speedup: float, quality: float, **knobs: Any) -> Row:
    own = {
        "policy": "bild",
        "knobs": knobs,
        "split": "validation",
        "n_examples": 3,
        "quality_metric": "BLEU",
    }
    own |= {"quality": quality, "predicted_speedup": speedup, "quality_difference": quality - 40}
    return Row(
        **dict.fromkeys(Row.__dataclass_fields__, 0) | {"on_front": False, "confirmed": ""} | own
    )


def test_rows_of_several_commands_make_one_table_with_one_front(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        with_front([row(2.0, 40.0, fallback=0.5), row(1.5, 39.0, fallback=1, verify_tail=True)]),
    )
    write_rows(
        tmp_path,
        with_front([row(1.2, 41.0, fallback=1.0, verify_tail=True), row(1.1, 40.5, rule="opt")]),
    )
    frame = pd.read_csv(tmp_path / "screen.csv")
    assert list(zip(frame.predicted_speedup, frame.on_front, strict=True)) == [
        (2.0, True),
        (1.2, True),
        (1.1, False),
    ]
    assert list(frame.columns[:3]) == ["policy", "fallback", "verify_tail"]


def test_a_row_is_known_again_whatever_its_knobs_are(tmp_path: Path) -> None:
    for _ in range(2):
        write_rows(tmp_path, [row(2.0, 40.0, stop=None, keep=True, blocks=[1, 3], fallback=1)])
    assert len(pd.read_csv(tmp_path / "screen.csv")) == 1


def test_rows_of_other_code_of_a_policy_leave_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(code: str, *windows: int, **own: str) -> list[Row]:
        return [replace(row(2.0, 40.0, window=window), code=code, **own) for window in windows]

    write_rows(tmp_path, [*rows("old", 1, 2), *rows("theirs", 1, policy="other")])
    write_rows(tmp_path, rows("old", 3))
    assert len(read_table(tmp_path / "screen.csv")) == 4 and not caplog.messages
    write_rows(tmp_path, rows("new", 2))
    table = read_table(tmp_path / "screen.csv")
    assert list(zip(table.code, table.window, strict=True)) == [("theirs", 1), ("new", 2)]
    (told,) = caplog.messages
    assert "no longer has 3 points that other code" in told


HASHES = ("12e456789012", "280573986041")  # as numbers they would be infinite and rounded


def test_hashes_that_look_like_numbers_stay_as_they_are(tmp_path: Path) -> None:
    text, point = HASHES
    for place, own_point in enumerate((point, "", "")):
        own = replace(row(2.0, 40.0, window=place), data=text, confirmed=own_point)
        write_rows(tmp_path, [own])
    table = read_table(tmp_path / "screen.csv")
    assert list(table.data) == [text] * 3 and list(table.confirmed.dropna()) == [point]


@pytest.mark.parametrize(
    "key",
    [
        "dataset",
        "weights",
        "dtype",
        "weight_bits",
        "draft",
        "metric",
        "prompt_template",
        "device",
        "hardware",
        "threads",
        "engine",
        "code",
    ],
)
def test_a_table_of_other_data_models_or_precision_is_not_added_to(
    key: str, tmp_path: Path
) -> None:
    setting = {"dataset": "multi30k", "weights": "abc", "dtype": "float32", "split": "validation"}
    require_comparable_rows(tmp_path, setting)
    (tmp_path / "screen.json").write_text(json.dumps({"setting": setting, "contents": {}}))
    require_comparable_rows(tmp_path, {**setting, "split": "test"})
    with pytest.raises(
        UserError,
        match=f"holds a screening with {key}={setting.get(key)}, but this command has {key}=other; choose"
        " another name=NAME, or remove",
    ):
        require_comparable_rows(tmp_path, {**setting, key: "other"})


def test_a_table_of_another_drafter_at_the_same_path_is_not_added_to(tmp_path: Path) -> None:
    setting, contents = {"split": "validation", "draft": "outputs/small"}, {"outputs/small": "a"}
    require_comparable_rows(tmp_path, setting, contents)
    write_summary(tmp_path, {"confirmed": [], "setting": setting, "contents": contents})
    require_comparable_rows(tmp_path, setting, {**contents, "outputs/heads": "h"})
    with pytest.raises(UserError, match="was screened before outputs/small changed, and would mix"):
        require_comparable_rows(tmp_path, setting, {"outputs/small": "b"})


def test_a_table_grows_by_other_splits_and_numbers_of_texts_but_by_no_other_limit_of_tokens(
    tmp_path: Path,
) -> None:
    setting = {"split": "validation", "n_examples": 3, "data": HASHES[0], "repeats": 3}
    setting |= {"decoding": {"max_new_tokens": 128, "temperature": 0.0}, "chat_template": ["{q}"]}
    write_rows(tmp_path, [replace(row(2.0, 40.0), data=HASHES[0])])
    write_summary(tmp_path, {"confirmed": [], "setting": setting, "contents": {}})
    other_data = {"data": HASHES[1]}
    require_comparable_rows(tmp_path, setting)
    require_comparable_rows(tmp_path, {**setting, **other_data, "split": "test"})
    require_comparable_rows(tmp_path, {**setting, **other_data, "n_examples": 4, "repeats": 5})
    with pytest.raises(UserError, match="was screened on 3 other texts of validation than this"):
        require_comparable_rows(tmp_path, {**setting, **other_data})
    shorter = {"decoding": {"max_new_tokens": 6, "temperature": 0.0}}
    with pytest.raises(
        UserError, match=r"decoding\.max_new_tokens=128, but this command has .*=6; choose"
    ):
        require_comparable_rows(tmp_path, {**setting, **shorter})


def test_a_confirmed_point_says_how_far_the_machine_drifted_from_the_cost_model() -> None:
    result = sample_drafted("bild", {"fallback": 0.3}, 1.5, 0.0, (0.8, 0.5))
    predicted_s = result.baseline_latency_s.total / 0.8  # the target alone took a fifth less
    found = confirmation(row(2.0, 40.0), result, predicted_s, predicted_s / 2)
    assert (found["predicted_speedup"], found["baseline_drift"]) == (2, pytest.approx(-0.2))


def test_the_summary_counts_ties_and_defects_of_texts_that_differ_live() -> None:
    timed = [TimedText("0", {}, 1.0)] * 5
    verdicts = [ReplayVerdict(TIE, 1e-3), ReplayVerdict(DEFECT, 0.5), ReplayVerdict(TIE, 2e-3)]
    found = differences_of(timed, verdicts)
    counts = [found[f"replayed_{kind}"] for kind in ("live", "differently", "ties", "defects")]
    assert (counts, found["replayed_largest"]) == ([8, 3, 2, 1], 0.5)


def test_the_summary_says_how_far_predictions_are_from_what_was_measured(tmp_path: Path) -> None:
    confirmed = [
        {"predicted_speedup": predicted, "selected_speedup": 9.0, "speedup": 2.0}
        for predicted in (3.0, 1.8, 1.6)
    ]
    write_summary(tmp_path, {"confirmed": confirmed})
    found = json.loads((tmp_path / "screen.json").read_text())
    assert found["prediction_error_median"] == pytest.approx(0.2)
    assert found["prediction_error_largest"] == pytest.approx(0.5)


def test_points_to_confirm_are_ends_and_the_fastest_at_no_loss() -> None:
    rows = with_front([row(3 - place / 10, 38 + place / 3) for place in range(12)])
    assert all(one.on_front for one in rows)
    spec = ScreenSpec(**SPEC)
    assert to_confirm(rows, replace(spec, confirmations=3)) == [0, 6, 11]
    assert to_confirm(rows, replace(spec, confirmations=20)) == list(range(12))
    assert to_confirm(rows, replace(spec, confirmations=0)) == []
    assert to_confirm(rows, replace(spec, confirmations=1)) == [6]
    # the fastest within the loss
    assert to_confirm(rows, replace(spec, confirmations=1, max_loss=1)) == [3]


def test_no_point_is_confirmed_that_lost_more_than_is_allowed() -> None:
    rows = with_front(
        [
            replace(row(3 - place / 10, 40 - 3 + place), quality_difference=place - 3)
            for place in range(6)
        ]
    )
    spec = ScreenSpec(**{**SPEC, "max_loss": 1})
    assert to_confirm(rows, spec) == [2, 3, 4, 5]
    assert to_confirm(rows[:2], spec) == []


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("log-probability", "log-probability −0.0042 (where it was chosen +0.0013)"),
        ("BLEU", "BLEU 0.00 (where it was chosen +0.00)"),
    ],
)
def test_a_confirmed_point_is_told_with_the_digits_of_its_metric(metric: str, words: str) -> None:
    names = ("speedup", "speedup_low", "speedup_high", "predicted_speedup", "selected_speedup")
    point = {**dict.fromkeys(names, 1.5), "baseline_drift": 0.01, "metric": metric}
    differences = {"confirmed_difference": -0.0042, "selected_difference": 0.0013}
    told = confirmed({**point, **differences}, "bild (fallback 0.5)")
    assert told.startswith("bild (fallback 0.5): 1.50x [1.50, 1.50]") and told.endswith(words)


def test_a_screened_point_is_told_by_the_knobs_that_differ_among_the_screened() -> None:
    fixed = {"window": 10, "verify_tail": True, "draft_vocabulary": None}
    rows = [
        SimpleNamespace(policy="bild", knobs={"fallback": fallback, "rollback": 7, **fixed})
        for fallback in (0.3, 0.5)
    ]
    assert [row_label(row, rows) for row in rows] == ["bild (fallback 0.3)", "bild (fallback 0.5)"]


def test_each_policy_can_have_its_own_front_confirmed() -> None:
    faster = [row(3, 40), row(2, 41)]
    slower = [
        replace(one, policy="typical_acceptance")
        for one in (row(1.5, 39), row(1.4, 38), row(1.2, 40))
    ]
    rows = with_front([*faster, *slower])
    assert to_confirm(rows, ScreenSpec(**SPEC)) == [0, 1]
    assert to_confirm(rows, ScreenSpec(**{**SPEC, "each_policy": True})) == [0, 1, 2, 4]
