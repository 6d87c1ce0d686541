"""Figures without a clock are drawn from points that were decoded over a record, as equal to live ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.screening.candidates import grid_of
from bild_lab.lab.screening.found import screen
from bild_lab.lab.screening.rows import NUMBERS, Row, write_rows
from bild_lab.lab.screening.screen import Screening, ScreenSpec
from bild_lab.papers.figures import FIGURES
from bild_lab.papers.replayed_points import Replayed, read_replayed
from tests.checkpoints import write_data

SETTING = {"target": "large", "dataset": "toy", "split": "validation", "n_examples": 24, "dtype": "float32"}
SHARE = "share replaced at the target's quality"


def store_replayed(folder: Path, rollbacks: int, dataset: str, difference: float = 0.0) -> None:
    """A screened point, as scripts/screen.py leaves it where nothing is timed."""
    numbers = dict.fromkeys(NUMBERS, 0) | {"on_front": False, "confirmed": "", "quality_metric": "BLEU"}
    numbers |= {"quality": 40.0 + difference, "quality_difference": difference, "predicted_speedup": None}
    numbers |= {"tokens": 1650, "rollbacks": rollbacks}
    row = Row(policy="bild_no_fallback", knobs={"rollback": rollbacks}, split="validation", n_examples=24, **numbers)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, [row])
    setting = {**SETTING, "dataset": dataset, "device": "cpu"}
    (folder / "screen.json").write_text(json.dumps({"setting": setting}))


def cells(points: list[Replayed]) -> dict[tuple[str, str], float]:
    return {(cell.row, cell.quantity): cell.value for cell in FIGURES["bild_fig2"].cells(points)}


def test_the_share_that_the_large_model_replaced_is_rollbacks_over_tokens(tmp_path: Path) -> None:
    store_replayed(tmp_path, 90, "toy")
    assert cells(read_replayed([tmp_path])) == {("small model", SHARE): 90 / 1650, ("vanilla", "quality"): 40.0}


def test_of_several_points_as_good_as_the_target_the_one_that_replaced_least_counts(tmp_path: Path) -> None:
    for rollbacks, difference in ((90, 0.0), (60, -0.1), (30, -1.0)):
        store_replayed(tmp_path, rollbacks, "toy", difference)
    points = read_replayed([tmp_path])
    assert [point.quality.baseline for point in points] == pytest.approx([40.0] * 3)
    assert cells(points)["small model", SHARE] == 60 / 1650


def test_each_folder_is_a_panel_and_one_without_a_screening_none(tmp_path: Path) -> None:
    for name in ("one", "other"):
        store_replayed(tmp_path / name, 90, name)
    points = read_replayed([tmp_path / "one", tmp_path / "other", tmp_path / "none"])
    assert [cell.panel for cell in FIGURES["bild_fig2"].cells(points)] == ["one", "other", "one", "other"]


def test_an_older_screening_is_refused_in_words(tmp_path: Path) -> None:
    store_replayed(tmp_path, 90, "toy")
    (tmp_path / "screen.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"holds no points of scripts/screen\.py: KeyError\('setting'\); make them anew"
    ):
        read_replayed([tmp_path])


def test_texts_and_numbers_over_the_record_are_those_of_live_points(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figure 2's policies on the tiny pair, in float32."""
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "data", rows=3)
    (data / "test.jsonl").rename(data / "validation.jsonl")
    words = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}", "name=figure"]
    words += ["dataset=multi30k", f"dataset.path={data}", "decoding.max_new_tokens=8", "runtime.threads=1"]
    words += ["measure.repeats=1", "measure.warmup=0", "measure.traced_examples=0", "runtime.dtype=float32"]
    words += ["policy=bild_no_fallback", "policy.window=8", "dataset.prompt_template='{source}'"]
    spec = ScreenSpec("validation", "test", 0, None, False, 0, 16, [])
    screening = Screening(grid_of(words, ["policy.rollback=0.01,1,8"], "screen"), "validation", "screen")
    found = screen(screening, spec)
    assert (found.summary.cost_model, found.summary.replayed_live) == ({}, 0)
    points = read_replayed([screening.folder])
    sweep = Sweep(Path("outputs/live"))
    for one, replayed, candidate in zip(found.screened[1:], points, screening.grid.candidates, strict=True):
        live = run_point(prepare(screening.config(candidate, "validation")), sweep)
        texts = [list(example.token_ids) for example in read_examples(live.folder)]
        assert [list(text.token_ids) for text in one.texts] == texts
        assert (replayed.tokens, replayed.rollbacks) == (live.tokens, live.counts.rollbacks)
        assert replayed.quality.value == pytest.approx(live.quality.value)
        assert replayed.quality.baseline == pytest.approx(live.quality.baseline)
        assert (replayed.setting.dataset, replayed.setting.n_examples) == ("multi30k", 3)
    assert len({point.rollbacks for point in points}) > 1
