"""Figures without a clock are drawn from points that were decoded over a record, as equal to live ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.errors import UserError
from bild_lab.lab.point import prepare
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.runner import run_point
from bild_lab.lab.schema.measured_examples import read_examples
from bild_lab.lab.screening.candidates import grid_of
from bild_lab.lab.screening.found import screen
from bild_lab.lab.screening.screen import RecordSpec, Screening, ScreenSpec
from bild_lab.papers.figures import FIGURES
from bild_lab.papers.points import read_replayed
from tests.checkpoints import write_data
from tests.papers.samples import store_replayed

SHARE = "share replaced at the target's quality"


def test_of_several_points_as_good_as_the_target_the_one_that_replaced_least_counts(tmp_path: Path) -> None:
    """A share is rollbacks over tokens; each folder is a panel, and one without a screening none."""
    for rollbacks, difference in ((90, 0.0), (60, -0.1), (30, -1.0)):
        store_replayed(tmp_path / "one", rollbacks, "one", difference)
    store_replayed(tmp_path / "other", 90, "other")
    points = read_replayed([tmp_path / "one", tmp_path / "other", tmp_path / "none"])
    assert [point.quality.baseline for point in points] == pytest.approx([40.0] * 4)
    cells = FIGURES["bild_fig2"].cells(points)
    assert [(cell.panel, cell.quantity, cell.value) for cell in cells] == [
        ("one", SHARE, 60 / 1650),
        ("other", SHARE, 90 / 1650),
        ("one", "quality", 40.0),
        ("other", "quality", 40.0),
    ]


def test_a_screening_of_another_form_is_refused(tmp_path: Path) -> None:
    store_replayed(tmp_path, 90, "toy")
    (tmp_path / "screen.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds no points of scripts/screen\.py: KeyError\('setting'\)"):
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
    spec = ScreenSpec("validation", "test", 0, None, False, 0, 1, [])
    screening = Screening(grid_of(words, ["policy.rollback=0.01,1,8"], "screen"), "validation", RecordSpec(1), "screen")
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
