"""A sweep is screened on every example and timed on a few: the commands, what a figure joins, and
that both ways give the same texts and qualities.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import bild_lab.lab.application as run
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.papers.cells import read_points
from bild_lab.papers.figures import draw_figure
from bild_lab.papers.recorded_quality import Recording, notes, protocol, recorded_of
from bild_lab.papers.runs.paper_runs import found_configuration
from bild_lab.papers.runs.recorded_steps import recorded_commands
from bild_lab.papers.runs.steps import steps_of
from bild_lab.screening.candidates import as_overrides
from bild_lab.screening.recorded_text import RecordedText
from bild_lab.screening.replay import ReplayedText
from bild_lab.screening.rows import Row, write_rows
from bild_lab.screening.text_log import LoggedExample, TextLog
from scripts import screen
from tests.papers.samples import bild, known
from tests.report.sample import sample_baseline, sample_example, with_quality

Command = Callable[..., tuple[int, str]]
FOLDER = "bild_fig4_small"
SWEEP = ("python", "run.py", "experiment=bild/fig4", "pair=mt5_iwslt2017")
TEXTS = [(5, 7, 1), (6, 1)]  # live ones of the timed examples


def test_a_sweep_is_a_screening_of_all_examples_and_a_sweep_of_the_timed_ones() -> None:
    with found_configuration():
        sweep = (*SWEEP, "hydra.job.num=1")
        screened, timed = recorded_commands(sweep, ["screen.batch=8", "measure.repeats=2"])
        fewer = (*SWEEP, "dataset.limit=100", "pair.draft=DIR")
        screened_fewer, timed_fewer = recorded_commands(fewer)
    assert shlex.join(screened) == (
        "python scripts/screen.py experiment=bild/fig4 pair=mt5_iwslt2017"
        " name=quality_bild_fig4_paper_bild_mt5_iwslt2017_iwslt2017 screen.select=validation"
        " screen.confirmations=0 screen.keep=texts screen.batch=8"
    )
    assert timed == (*sweep, "dataset.limit=200")
    # fewer than would be timed, and another model
    assert timed_fewer == fewer and "dataset.limit=100" in screened_fewer
    (name,) = [word for word in screened_fewer if word.startswith("name=")]
    assert name.startswith("name=quality_bild_fig4_paper_bild_mt5_iwslt2017_iwslt2017_")


def test_a_screening_is_named_by_what_changes_its_texts_in_whatever_order() -> None:
    def name_of(*words: str) -> str:
        screened, *_ = recorded_commands((*SWEEP, *words))
        return next(word for word in screened if word.startswith("name="))

    changes = ("runtime.dtype=float32", "decoding.max_new_tokens=9")
    with found_configuration():
        assert name_of("measure.repeats=2") == name_of()
        assert name_of(*changes) == name_of(*reversed(changes)) != name_of()


def test_a_small_sweep_times_its_first_twelve_examples() -> None:
    words = ("python", "run.py", "experiment=bild/fig4", "scale=small", "pair=toy")
    with found_configuration():
        screened, timed = recorded_commands(words)
    assert "screen.timed_s=5" in screened and timed == (*words, "dataset.limit=12")


@pytest.mark.parametrize(
    "words",
    [
        (*SWEEP, "decoding=sample"),
        (*SWEEP, "measure.baseline=hf_generate"),
        ("python", "scripts/figures.py", "bild_fig4"),
    ],
)
def test_what_no_record_holds_stays_as_it_is(words: tuple[str, ...]) -> None:
    with found_configuration():
        assert recorded_commands(words) == [words]


@pytest.mark.slow
def test_an_item_is_recorded_unless_all_is_to_be_live() -> None:
    commands = [step.command for step in steps_of("bild_speculative", "small")]
    assert [command.split()[1] for command in commands] == [
        *["run.py"] * 2,  # `vanilla` against `generate`, greedy and sampled
        *["scripts/screen.py", "run.py"] * 2,
        "run.py",
        "scripts/figures.py",
    ]
    assert [command for command in commands if "decoding=sample" in command] == [
        f"python run.py experiment=bild/{name} scale=small decoding=sample"
        for name in ("generate", "speculative")
    ]
    figure = steps_of("bild_speculative", "small")[-1]
    assert {"quality_bild_fig4_small_bild_toy_toy", "bild_fig4_small"} <= set(figure.reads)
    live = [step.command for step in steps_of("bild_speculative", "small", live=True)]
    assert live == [
        command.removesuffix(" dataset.limit=12")
        for command in commands
        if "screen.py" not in command
    ]


def timed_point(**changes: Any) -> Result:
    """A point of two timed examples."""
    return known(
        "toy", bild(1.5, setting={"n_examples": 2, **changes.pop("setting", {})}, **changes)
    )


def leave(outputs: Path, points: Sequence[Result], **screened: Any) -> None:
    """Timed points, and a screening of them on five examples whose quality is one point lower.

    screened: changes of the setting.
    """
    examples = [sample_example(str(place), token_ids=text) for place, text in enumerate(TEXTS)]
    for number, point in enumerate(points):
        Sweep(outputs / FOLDER).write_point(f"{number:012d}", "", point, examples)
    folder = outputs / f"quality_{FOLDER}_bild_toy_toy"
    first = points[0]
    fields = dict.fromkeys(Row.__dataclass_fields__, 0) | {
        "policy": first.policy,
        "knobs": first.knobs,
        "split": first.setting.split,
        "n_examples": 5,
        "on_front": False,
        "predicted_speedup": None,
        "quality_metric": first.quality.metric,
        "quality": 39.0,
        "quality_low": 38.0,
        "quality_high": 40.0,
        "quality_difference": -1.0,
        "quality_difference_low": -2.0,
        "quality_difference_high": 0.0,
    }
    folder.mkdir()
    write_rows(folder, [Row(**fields)])
    setting = {**first.setting, "n_examples": 5, **screened}
    summary = {"setting": setting, "replayed_ties": 0, "replayed_defects": 0}
    (folder / "screen.json").write_text(json.dumps(summary))
    logged = [{"policy": "vanilla", "knobs": {}}, {"policy": "bild", "knobs": dict(first.knobs)}]
    log = TextLog(folder, {"points": logged})
    for place in (4, 1, 0):  # as examples end
        tokens = (TEXTS[place] if place < 2 else (9, 1), (8, 1))[::-1]
        log.append(
            LoggedExample(place, "", [ReplayedText(text, Counter(), {}) for text in tokens], {})
        )


def test_a_timed_point_has_the_quality_of_all_examples_and_its_own_speed(tmp_path: Path) -> None:
    leave(tmp_path, [timed_point()])
    (point,) = read_points([tmp_path / FOLDER])
    quality = point.quality
    assert (quality.value, quality.low, quality.high, quality.baseline) == (39, 38, 40, 40)
    assert (quality.difference, quality.difference_low, quality.difference_high) == (-1, -2, 0)
    assert point.speedup == timed_point().speedup and point.setting.n_examples == 2
    assert recorded_of(point) == {
        "examples": 5, "timed": 2, "compared": 2, "differing": 0, "ties": 0, "defects": 0,
    }  # fmt: skip
    assert notes([point]) == [
        "Quality of all 5 examples over a record, speed of the first 2 live. Of 2 timed texts that"
        " were decoded over the record too, 0 differ."
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", "other"),
        ("draft", "other"),
        ("dataset", "other"),
        ("split", "train"),
        ("dtype", "float16"),
        ("decoding", {"max_new_tokens": 3, "temperature": 0.0}),
        ("stop", ["w7"]),
        ("processors", "checkpoint"),
        ("metric", "chrf"),
        ("prompt_template", "{source}"),
        ("chat_template", ["{q}"]),
        ("max_source_tokens", 7),
        ("weight_bits", 8),
        ("draft_weight_bits", 8),
        ("engine", "kernels"),
        ("device", "cuda"),
        ("device_map", "auto"),
    ],
)
def test_a_screening_of_other_models_or_data_is_not_joined(
    key: str, value: Any, tmp_path: Path
) -> None:
    leave(tmp_path, [timed_point()], **{key: value})
    (point,) = read_points([tmp_path / FOLDER])
    assert recorded_of(point) is None and point.quality == timed_point().quality
    assert protocol([point]) == "quality and speed of the same examples, decoded live"


def test_a_setting_is_the_same_in_whatever_order_its_keys_are_written(tmp_path: Path) -> None:
    decoding = timed_point().setting["decoding"]
    assert len(decoding) > 1
    leave(tmp_path, [timed_point()], decoding=dict(reversed(decoding.items())))
    (point,) = read_points([tmp_path / FOLDER])
    assert point.quality.value == 39


def test_of_a_table_the_rows_of_as_many_examples_as_were_screened_are_joined(
    tmp_path: Path,
) -> None:
    leave(tmp_path, [timed_point()])
    (file,) = tmp_path.glob("quality_*/screen.csv")
    table = pd.read_csv(file)
    fewer = table.assign(n_examples=2, quality=11.0)
    pd.concat([fewer, table]).to_csv(file, index=False)
    (point,) = read_points([tmp_path / FOLDER])
    assert point.quality.value == 39


def test_a_point_with_other_knobs_is_not_joined_and_a_figure_says_so(tmp_path: Path) -> None:
    other = timed_point(rollback=3.0)
    leave(tmp_path, [timed_point(), other])
    points = read_points([tmp_path / FOLDER])
    assert [recorded_of(point) is None for point in points] == [False, True]
    assert points[1].quality == other.quality
    told = "speed of the first 2 live; of 1 point both live"
    assert protocol(points).endswith(told)
    assert protocol([*points, sample_baseline()]).endswith(told)  # which is no point of a curve


def test_a_point_that_was_measured_live_on_all_examples_counts_alone(tmp_path: Path) -> None:
    whole = with_quality(timed_point(setting={"n_examples": 5}), value=39.2)
    leave(tmp_path, [timed_point(), whole])
    (point,) = read_points([tmp_path / FOLDER])
    assert point.quality == whole.quality and point.setting.n_examples == 5
    assert protocol([point]) == "quality and speed of the same examples, decoded live"
    assert "Of 2 timed texts that were decoded over the record too, 0 differ" in notes([point])[0]


def test_a_text_that_the_record_has_otherwise_is_counted_on_the_figure(tmp_path: Path) -> None:
    leave(tmp_path, [timed_point()])
    (log,) = tmp_path.glob("quality_*/texts/*.jsonl")
    log.write_text(log.read_text().replace("[5,7,1]", "[5,8,1]"))  # the planted fault
    drawn = draw_figure("bild_fig4", tmp_path, tmp_path / "figures", kinds=["png"])
    table = drawn.path.with_suffix(".md").read_text()
    assert "Quality of all 5 examples over a record, speed of the first 2 live." in table
    assert "2 timed texts that were decoded over the record too, 1 differ." in table
    assert "differ by a tie within rounding" in table


def test_of_two_commands_texts_the_newer_ones_are_compared(tmp_path: Path) -> None:
    """Each point's are in the newest file that has it."""
    other = timed_point(rollback=3.0)
    leave(tmp_path, [timed_point(), other])
    (log,) = tmp_path.glob("quality_*/texts/*.jsonl")
    points = json.loads(log.read_text().splitlines()[0])["points"]
    earlier = TextLog(
        log.parents[1], {"points": [*points, {"policy": "bild", "knobs": dict(other.knobs)}]}
    )
    same, wrong = (ReplayedText(tokens, Counter(), {}) for tokens in (TEXTS[0], (9, 9)))
    for place in range(2):
        earlier.append(LoggedExample(place, "", [same, wrong, same], {}))
    os.utime(earlier.file, (1, 1))
    summary = {"setting": {"n_examples": 5, "split": "test"}}
    recording = Recording(log.parents[1], summary)
    assert recording.texts(timed_point(), 2) == dict(enumerate(TEXTS))
    assert recording.texts(other, 2) == {0: TEXTS[0], 1: TEXTS[0]}
    assert recording.texts(timed_point(), 1) == {0: TEXTS[0]}
    # fault: in one process the texts of a screening that was made anew were those of before
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    assert Recording(log.parents[1], summary).texts(timed_point(), 2) == {1: TEXTS[1]}


def test_a_defect_that_a_screening_found_is_on_the_figure(tmp_path: Path) -> None:
    leave(tmp_path, [timed_point()])
    (file,) = tmp_path.glob("quality_*/screen.json")
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "replayed_defects": 1}))
    (defect,) = read_points([tmp_path / FOLDER])
    assert "judged 1 text a defect of its record" in notes([defect])[0]
    # also behind a point of another screening, which found none
    fact = {**recorded_of(defect), "defects": 0}
    sound = replace(defect, facts={**defect.facts, "recorded": fact})
    assert "judged 1 text a defect of its record" in notes([sound, defect])[0]


LISTS = ["policy.fallback=0.3,0.7", "policy.rollback=0.5,5"]
TOY = ["experiment=bild/fig4", "scale=small", "dataset.limit=6", "measure.warmup=0"]


def both_ways(command: Command, metric: str) -> list[Result]:
    """The points of the toy pair live, joined with a screening of the same examples."""
    words = [*TOY, f"dataset.metric={metric}", "measure.traced_examples=0", *LISTS]
    code, told = command(run, *words)
    assert code == 0, told
    kept = ["pair=toy", "dataset=toy", "screen.keep=texts", "screen.timed_s=0"]
    name = f"name=quality_{FOLDER}_bild_toy_toy"
    words = [*words, *kept, name, "screen.confirmations=0"]
    code, told = command(screen, *as_overrides(words, "screen.space"), config="screen")
    assert code == 0, told
    return read_points([Path("outputs") / FOLDER])


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["bleu", "rougeLsum"])
def test_live_and_by_record_the_same_points_have_the_same_quality_and_the_same_texts(
    metric: str, command: Command
) -> None:
    points = both_ways(command, metric)
    assert len(points) == 4 and len({point.quality.value for point in points}) > 1
    (file,) = Path("outputs").glob("quality_*/screen.json")
    recording = Recording(file.parent, json.loads(file.read_text()))
    for point in points:
        recorded, live = recording.quality(point), point.quality
        assert recorded.metric == live.metric
        for name in ("value", "baseline", "difference", "low", "high"):
            assert getattr(recorded, name) == pytest.approx(getattr(live, name), abs=1e-9), name
        fact = recorded_of(point)
        assert (fact["compared"], fact["differing"]) == (6, 0)


@pytest.mark.slow
def test_a_wrong_row_of_the_record_shows_in_the_texts_that_are_compared(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a record that gives a row of another token."""
    rows = RecordedText.rows

    def shifted(self: RecordedText, *arguments: Any) -> list[Any]:
        nodes = rows(self, *arguments)
        for node in nodes:
            if node.number % 5 == 0:
                node.rows["logits"] = node.rows["logits"].roll(1, -1)
        return nodes

    monkeypatch.setattr(RecordedText, "rows", shifted)
    points = both_ways(command, "bleu")
    assert sum(recorded_of(point)["differing"] for point in points) > 0
    assert any("differ" in note for note in notes(points))
