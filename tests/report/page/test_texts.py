"""The example browser has every point's text beside the baseline's, those that differ most first."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.lab.results.groups import by_setting
from bild_lab.lab.results.records import Sweep
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result
from bild_lab.report.page import texts
from bild_lab.report.page.tables import name_of
from bild_lab.report.page.texts import change, text_browser
from tests.report.sample import sample_baseline, sample_drafted, sample_example

TARGET = "a man in a red hat"


def example(number: int, text: str, latency_s: float = 1.0) -> MeasuredExample:
    own = {"baseline_prediction": TARGET, "baseline_token_ids": [1], "baseline_latency_s": [2.0, 3.0, 9.0]}
    return sample_example(f"test-{number}", prediction=text, latency_s=[latency_s], **own)


def browsed(*points: tuple[Result, list[MeasuredExample]]) -> dict:
    (group,) = by_setting([sample_baseline(), *(result for result, _ in points)])
    stored = {name_of(result): examples for result, examples in points}
    return text_browser(group, {name_of(result): [] for result in group.results} | stored)


FAST = sample_drafted("bild", {"rollback": 5}, 1.8, -1.0, (0.9, 0.5))
SLOW = sample_drafted("bild", {"rollback": 1}, 1.2, 0.0, (0.8, 1.0))


def test_examples_have_their_distinct_texts_and_each_points_place_among_them() -> None:
    page = browsed(
        (FAST, [example(0, TARGET), example(1, "a man in a blue hat", 4.0)]),
        (SLOW, [example(0, TARGET), example(1, TARGET)]),
    )
    assert [point["label"] for point in page["points"]] == ["bild (rollback 5)", "bild (rollback 1)"]
    first, second = page["examples"]
    assert (first["id"], first["texts"], first["of"]) == ("test-1", ["a man in a blue hat", TARGET], [0, 1])
    assert first["changes"] == [pytest.approx(1 / 6, abs=1e-4), 0.0]
    assert first["speedups"] == [0.75, 3.0]  # of medians
    assert (second["id"], second["texts"], second["of"]) == ("test-0", [TARGET], [0, 0])


def test_an_example_that_a_point_lacks_has_no_text_of_it() -> None:
    page = browsed((FAST, [example(0, TARGET), example(1, TARGET)]), (SLOW, [example(1, TARGET)]))
    assert {one["id"]: one["of"] for one in page["examples"]} == {"test-0": [0, None], "test-1": [0, 0]}


def test_change_is_the_share_of_words_that_differ() -> None:
    assert change(TARGET, TARGET) == change(TARGET, f" {TARGET}\n") == 0
    assert change("one two three four", "one two three five") == 0.25
    assert change("one", "two") == change("one", "") == 1


def test_only_the_most_changed_examples_are_kept_if_the_texts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MOST_CHARACTERS", 110)
    examples = [example(number, TARGET if number != 7 else "another text") for number in range(9)]
    page = browsed((FAST, examples))
    assert page["count"] == 9
    assert [one["id"] for one in page["examples"]] == ["test-7", "test-0", "test-1"]


def test_without_stored_texts_there_is_no_browser() -> None:
    assert browsed((FAST, [])) is None
    assert browsed((FAST, [sample_example()])) is None  # no baseline was timed


def test_sources_and_references_are_read_from_the_data_set(tmp_path: Path, data: Path) -> None:
    config = f"""
dataset: {{name: multi30k, path: "{data}", split: test, source_column: de, reference_column: en, metric: bleu}}
"""
    Sweep(tmp_path).write_point(FAST.point, config, FAST, [example(0, "a man in a blue hat")])
    (group,) = by_setting(Sweep(tmp_path).results())
    stored = {name_of(one): [example(0, "a man in a blue hat")] for one in group.results}
    (only,) = text_browser(group, stored)["examples"]
    assert only["source"] and only["references"]
    missing = {name_of(one): [example(0, "a man in a blue hat")] for one in group.results}
    (folder,) = (tmp_path / "points").iterdir()
    (folder / "config.yaml").unlink()
    told = text_browser(group, missing)
    assert told["missing"] and told["examples"][0]["source"] is None
