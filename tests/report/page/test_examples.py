"""Single texts: every point's beside the baseline's, those that differ most first; and who wrote
which token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from bild_lab.lab.config.schemas import typed
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.result import Result, Setting
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.hashing import data_hash
from bild_lab.lab.store.records import Sweep
from bild_lab.report.page import examples
from bild_lab.report.page.examples import (
    IN_BASELINE,
    IN_BOTH,
    IN_POINT,
    change,
    text_browser,
    traced_points,
)
from bild_lab.report.tables import folder_name
from tests.report.sample import sample_baseline, sample_drafted, sample_example

TARGET = "a man in a red hat"
KNOBS = {"fallback": 0.5, "rollback": 1.0, "window": 10}
WORDS = {1: "</s>", 10: " a", 11: " red", 12: " car", 13: " bus\n"}
FAST = sample_drafted("bild", {"rollback": 5}, 1.8, -1.0, (0.9, 0.5))
SLOW = sample_drafted("bild", {"rollback": 1}, 1.2, 0.0, (0.8, 1.0))


def example(number: int, text: str, latency_s: float = 1.0) -> MeasuredExample:
    own = {
        "baseline_prediction": TARGET,
        "baseline_token_ids": [1],
        "baseline_latency_s": [2.0, 3.0, 9.0],
    }
    return sample_example(f"test-{number}", prediction=text, latency_s=[latency_s], **own)


def browsed(*points: tuple[Result, list[MeasuredExample]]) -> dict:
    (group,) = by_setting([sample_baseline(), *(result for result, _ in points)])
    stored = {folder_name(result): several for result, several in points}
    return text_browser(group, {folder_name(result): [] for result in group.results} | stored)


def test_examples_have_their_distinct_texts_and_each_points_place_among_them() -> None:
    page = browsed(
        (FAST, [example(0, TARGET), example(1, "a man in a blue hat", 4.0)]),
        (SLOW, [example(0, TARGET), example(1, TARGET)]),
    )
    assert [point["label"] for point in page["points"]] == [
        "bild (rollback 5)",
        "bild (rollback 1)",
    ]
    first, second = page["examples"]
    assert (first["id"], first["of"]) == ("test-1", [0, 1])
    assert first["texts"] == [
        [(IN_BOTH, "a man in a"), (IN_BASELINE, "red"), (IN_POINT, "blue"), (IN_BOTH, "hat")],
        [(IN_BOTH, TARGET)],
    ]
    assert first["changes"] == [pytest.approx(1 / 6, abs=1e-4), 0.0]
    assert first["speedups"] == [0.75, 3.0]  # of medians
    assert (second["id"], second["texts"], second["of"]) == (
        "test-0",
        [[(IN_BOTH, TARGET)]],
        [0, 0],
    )


def test_an_example_that_a_point_lacks_has_no_text_of_it() -> None:
    page = browsed((FAST, [example(0, TARGET), example(1, TARGET)]), (SLOW, [example(1, TARGET)]))
    assert {one["id"]: one["of"] for one in page["examples"]} == {
        "test-0": [0, None],
        "test-1": [0, 0],
    }


def test_change_is_the_share_of_words_that_differ() -> None:
    assert change(TARGET, TARGET) == change(TARGET, f" {TARGET}\n") == 0
    assert change("one two three four", "one two three five") == 0.25
    assert change("one", "two") == change("one", "") == 1


def test_only_the_most_changed_examples_are_kept_if_the_texts_are_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "MOST_CHARACTERS", 80)
    page = browsed(
        (FAST, [example(number, TARGET if number != 7 else "another text") for number in range(9)])
    )
    assert page["count"] == 9
    assert [one["id"] for one in page["examples"]] == ["test-7", "test-0", "test-1"]


def test_an_example_is_as_changed_as_the_point_that_changed_it_most_and_one_is_always_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "MOST_CHARACTERS", 1)
    page = browsed(
        (FAST, [example(0, TARGET + " too"), example(1, TARGET)]),
        (SLOW, [example(0, TARGET), example(1, "another text")]),
    )
    assert [one["id"] for one in page["examples"]] == ["test-1"]


def test_a_text_that_never_came_has_no_speedup() -> None:
    report = {"pieces_s": [], "rounds": None, "attempts": 3, "error": "it has died"}
    failed = replace(example(0, ""), reports=[report])
    (one,) = browsed((FAST, [failed]))["examples"]
    assert one["speedups"] == [None]


def test_without_stored_texts_there_is_no_browser() -> None:
    assert browsed((FAST, [])) is None
    assert browsed((FAST, [sample_example()])) is None  # no baseline was timed


def test_sources_and_references_are_read_from_the_data_set(tmp_path: Path, data: Path) -> None:
    config = f"""
dataset: {{name: multi30k, path: "{data}", split: test, source_column: de, reference_column: en, metric: bleu}}
"""
    known = data_hash(
        load_examples(typed(DatasetSpec, OmegaConf.create(config).dataset, "dataset"))
    )
    result = replace(FAST, setting=Setting({**FAST.setting, "data": known}))
    Sweep(tmp_path).write_point(FAST.point, config, result, [example(0, "a man in a blue hat")])
    (group,) = by_setting(Sweep(tmp_path).results())
    stored = {folder_name(one): [example(0, "a man in a blue hat")] for one in group.results}
    (only,) = text_browser(group, stored)["examples"]
    assert only["source"] and only["references"]
    (folder,) = (tmp_path / "points").iterdir()
    (folder / "config.yaml").unlink()
    without = text_browser(group, stored)
    assert without["missing"] and without["examples"][0]["source"] is None


def a_round(drafted: list[int], accepted: int, next_token: int | None, **more: Any) -> dict:
    return {
        "drafted": drafted,
        "accepted": accepted,
        "next_token": next_token,
        "fallback": False,
        **more,
    }


def rounds_of(rounds: list[dict], token_ids: list[int]) -> list[dict]:
    """What the viewer shows of a text with these rounds."""
    result = sample_drafted("bild", KNOBS, 1.5, 0.0, (0.8, 1.0))
    pieces = {str(token): piece for token, piece in WORDS.items()}
    traced = sample_example(token_ids=token_ids, rounds=rounds, prompt="ein Auto", pieces=pieces)
    (group,) = by_setting([result])
    (point,) = traced_points(group, {folder_name(result): [traced]})
    return point["examples"][0]["rounds"]


def test_a_rejected_draft_is_dropped_and_the_target_replaces_it() -> None:
    first, second = rounds_of([a_round([10, 13, 12], 1, 11), a_round([12], 1, 1)], [10, 11, 12, 1])
    assert first["tokens"] == [
        (" a", "accepted"),
        (" bus↵\n", "dropped"),
        (" car", "dropped"),
        (" red", "replacement"),
    ]
    assert first["said"] == "1 of 3 drafted tokens were accepted."
    assert second["tokens"] == [(" car", "accepted"), ("</s>", "own")]


def test_a_fallback_asks_the_target_and_numbers_have_their_threshold() -> None:
    numbers = {"confidence": [0.8, 0.3], "distance": [0.123456]}
    (only,) = rounds_of([a_round([10], 1, 11, **{**numbers, "fallback": True})], [10, 11])
    assert only["tokens"][-1] == (" red", "fallback") and "not confident enough" in only["said"]
    assert only["rows"] == [
        ("drafted", ["a"]),
        ("confidence (fallback below 0.5)", ["0.8", "0.3"]),
        ("distance (rollback above 1.0)", ["0.123"]),
    ]


@pytest.mark.parametrize(
    "next_token", [13, None], ids=["an accepted token ends the text", "nobody verified the tail"]
)
def test_a_text_that_ends_with_a_draft_has_no_token_of_the_targets_after_it(
    next_token: int | None,
) -> None:
    (only,) = rounds_of([a_round([10, 1], 2, next_token)], [10, 1])
    assert (only["tokens"], only["said"]) == (
        [(" a", "accepted"), ("</s>", "accepted")],
        "The text ends there.",
    )


def test_a_tree_of_drafts_is_shown_whole() -> None:
    first, _ = rounds_of([a_round([13, 10, 11], 2, 12), a_round([], 0, 1)], [10, 11, 12, 1])
    assert [kind for _, kind in first["tokens"]] == ["accepted", "accepted", "replacement"]
    assert first["rows"] == [("tree of drafts", ["bus", "a", "red"])]


def test_points_without_traced_texts_are_not_shown() -> None:
    (group,) = by_setting([FAST])
    assert (
        traced_points(group, {folder_name(FAST): [sample_example(rounds=[a_round([10], 1, 11)])]})
        == []
    )
