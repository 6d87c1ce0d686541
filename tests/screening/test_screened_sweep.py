"""What follows a screening: its points are measured on the other split, and certified there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.records import Sweep
from bild_lab.screening import screened_sweep
from bild_lab.screening.candidates import Candidate
from bild_lab.screening.cost_model import CostModel
from bild_lab.screening.guarantee import GuaranteeSpec, Losses, mean_losses
from bild_lab.screening.replay import ReplayedPoint, ReplayedText
from bild_lab.screening.rows import read_table
from bild_lab.screening.screen_spec import ScreenSpec
from bild_lab.screening.screened_sweep import ScreeningResult
from tests.report.sample import sample_drafted
from tests.screening.test_screen import SPEC, row

FALLBACKS = (0.1, 0.2, 0.3)
# seconds of a text, and what each text loses, by split: of the target alone, then of each fallback
SECONDS = {"validation": (6.0, 3.0, 4.0, 2.0), "test": (8.0, 4.0, 5.0, 1.0)}
LOSSES = {"validation": (0.0, 0.05, 0.3, 0.0), "test": (0.0, 0.06, 0.3, 0.01)}
TEXTS = 200


@dataclass(frozen=True)
class FixedScreening:
    """A screening whose texts take and lose what the tables say of their split."""

    folder: Path
    split: str = "validation"
    point = SimpleNamespace(seed=0, scoring=SimpleNamespace(lead="chrf"))

    def decode(self, candidates: Sequence[Candidate]) -> list[ReplayedPoint]:
        alone = Candidate((), "vanilla", {}, None)
        return [self._decoded(candidate) for candidate in (alone, *candidates)]

    def _decoded(self, candidate: Candidate) -> ReplayedPoint:
        seconds = SECONDS[self.split][place_of(candidate)]
        text = ReplayedText((5,), Counter(), {"texts": seconds})
        return ReplayedPoint(candidate, [text])

    def held_out(self, split: str) -> FixedScreening:
        return replace(self, split=split)

    def losses(self, decoded: Sequence[ReplayedPoint]) -> Losses:
        several = [LOSSES[self.split][place_of(point.candidate)] for point in decoded[1:]]
        return mean_losses(np.repeat(np.array(several)[:, None], TEXTS, axis=1))

    def config(self, candidate: Candidate, split: str) -> tuple[Candidate, str]:
        return candidate, split

    @contextmanager
    def stage(self, name: str, shown: str = "") -> Iterator[None]:
        yield


def place_of(candidate: Candidate) -> int:
    """Of a point in the tables."""
    return 0 if candidate.name == "vanilla" else 1 + FALLBACKS.index(candidate.knobs["fallback"])


@pytest.fixture
def screened(tmp_path: Path) -> ScreeningResult:
    """Three points of which the second is slower than the third, and loses more."""
    screening = FixedScreening(tmp_path / "grid")
    candidates = [Candidate((), "bild", {"fallback": fallback}, None) for fallback in FALLBACKS]
    speeds = (2.0, 1.1, 1.5)
    rows = [
        row(speed, 40.0, fallback=fallback)
        for speed, fallback in zip(speeds, FALLBACKS, strict=True)
    ]
    summary: dict[str, Any] = {"confirmed": [], "seconds": {}, "shared_texts": 3}
    decoded, model = screening.decode(candidates), CostModel({"texts": 1.0})
    return ScreeningResult(screening, decoded, rows, model, summary, [])


def test_a_measured_point_is_beside_what_was_predicted_of_the_same_texts(
    screened: ScreeningResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[float, Result] = {}

    def measure(cfg: tuple[Candidate, str]) -> None:
        candidate, split = cfg
        assert split == "test"
        results[candidate.knobs["fallback"]] = sample_drafted(
            "bild", dict(candidate.knobs), 1.5, 0.0, (0.8, 0.5)
        )

    monkeypatch.setattr(
        screened_sweep, "prepare", lambda cfg: SimpleNamespace(id=cfg[0].knobs["fallback"])
    )
    monkeypatch.setattr(Sweep, "newest", lambda _, point: results.get(point))
    screened.to_measure = [2, 0]
    screened.confirm("test", measure)
    assert list(results) == [0.3, 0.1]
    folder = screened.screening.folder
    confirmed = json.loads((folder / "screen.json").read_text())["confirmed"]
    assert [
        (one["knobs"]["fallback"], one["selected_speedup"], one["predicted_speedup"])
        for one in confirmed
    ] == [(0.3, 1.5, 8.0 / 1.0), (0.1, 2.0, 8.0 / 4.0)]
    assert [one["point"] for one in confirmed] == [one.point for one in results.values()]
    table = read_table(folder / "screen.csv").set_index("fallback").confirmed.fillna("")
    assert table.to_dict() == {0.1: results[0.1].point, 0.2: "", 0.3: results[0.3].point}


def test_a_screening_without_points_to_measure_decodes_nothing_more(
    screened: ScreeningResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FixedScreening, "decode", None)
    screened.confirm("test", lambda _: None)
    assert screened.summary["confirmed"] == []
    assert len(read_table(screened.screening.folder / "screen.csv")) == 3


def test_a_certificate_is_of_the_point_that_was_tested_on_the_other_texts(
    screened: ScreeningResult,
) -> None:
    goal = GuaranteeSpec(loss=0.1, probability=0.9)
    told = screened.guarantee(ScreenSpec(**{**SPEC, "guarantee": goal}))
    found = screened.summary["guarantee"]
    tested = [(one["knobs"]["fallback"], one["mean_loss"], one["kept"]) for one in found["tested"]]
    # the surest first; the second point is on no front
    assert tested == [(0.3, pytest.approx(0.01), True), (0.1, pytest.approx(0.06), True)]
    assert (found["knobs"], found["predicted_speedup"]) == ({"fallback": 0.1}, 2.0)
    assert (found["n"], found["split"], found["left_out"]) == (TEXTS, "test", 3)
    words = "mean loss at most 0.1 with probability 0.9"
    assert [one.certified for one in screened.rows] == [words, 0, words]
    assert screened.to_measure == [0]
    assert told == (
        "certified on 200 texts of test (without 3 texts of validation): bild (fallback 0.1),"
        " predicted 2.00x: mean loss of chrf at most 0.1 with probability 0.9 (0.0600 there)"
    )


def test_where_nothing_is_certified_the_surest_point_is_told(screened: ScreeningResult) -> None:
    goal = GuaranteeSpec(loss=0.005, probability=0.9)
    told = screened.guarantee(ScreenSpec(**{**SPEC, "guarantee": goal}))
    found = screened.summary["guarantee"]
    assert (found["certified"], found["policy"], found["knobs"]) == (False, None, None)
    assert [one.certified for one in screened.rows] == [0, 0, 0] and screened.to_measure == []
    assert told == (
        "nothing certified on 200 texts of test (without 3 texts of validation) (mean loss of chrf"
        " at most 0.005 with probability 0.9): the surest point, bild (fallback 0.3), lost 0.0100"
        " there; no number of texts would be enough, so add stricter knobs"
    )
