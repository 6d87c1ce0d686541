"""Tokens per call along the texts: counted where they are, and told only of enough texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.store.groups import by_setting
from bild_lab.report.along_text import stretches_of
from bild_lab.report.page.figures import along_text_figure
from bild_lab.report.style import marks
from bild_lab.report.tables import folder_name
from tests.report.sample import sample_baseline, sample_example, sample_result


def text(name: str, accepted: list[int], length: int, tail: int = 0) -> MeasuredExample:
    """A text of so many tokens. accepted: of each round. tail: tokens of a last, unverified draft."""
    rounds = [{"drafted": [7] * 9, "accepted": count, "next_token": 7} for count in accepted]
    if tail:
        rounds.append({"drafted": [7] * tail, "accepted": tail, "next_token": None})
    return sample_example(name, token_ids=[7] * length, rounds=rounds)


def test_each_call_counts_where_its_first_token_lies() -> None:
    # eight tokens a call up to the 24th, then two; the last of 30 tokens has no room for its second
    texts = [text(str(index), [7, 7, 7, 1, 1, 1], 29) for index in range(20)]
    first, second = stretches_of(texts)
    assert (first.words, first.calls, first.tokens_per_call) == ("1 to 16", 40, 8.0)
    assert (second.words, second.calls, second.texts) == ("17 to 32", 80, 20)
    assert second.tokens_per_call == pytest.approx((8 + 2 + 2 + 1) / 4)
    assert second.low == second.tokens_per_call == second.high  # all texts are alike


def test_a_draft_that_was_not_verified_is_no_call() -> None:
    with_tail = [text(str(index), [3], 9, tail=5) for index in range(20)]
    (only,) = stretches_of(with_tail)
    assert (only.calls, only.tokens_per_call) == (20, 4.0)


def test_a_call_behind_15_tokens_begins_with_the_16th() -> None:
    (only,) = stretches_of([text(str(index), [6, 7, 3], 19) for index in range(20)])
    assert (only.words, only.calls) == ("1 to 16", 60)


def test_few_texts_have_no_stretch_and_a_conversation_is_one_text() -> None:
    assert stretches_of([text(str(index), [3], 4) for index in range(19)]) == []
    turns = [text(f"{index}{turn}", [3], 4) for index in range(10) for turn in ("", "/2", "/3")]
    assert stretches_of(turns) == []
    on_ten_passages = [
        replace(text(f"{index}", [3], 4), same_source=str(index % 10)) for index in range(30)
    ]
    assert stretches_of(on_ten_passages) == []
    assert stretches_of([sample_example(str(index)) for index in range(30)]) == []


def test_the_interval_holds_the_ratio_of_all_texts_in_95_of_100_draws() -> None:
    random = np.random.default_rng(0)
    rates = random.beta(4, 2, size=4000)  # of acceptance, which differ between texts
    drawn = [random.geometric(1 - rate, size=3).clip(max=5) for rate in rates]
    everything = sum(tokens.sum() for tokens in drawn) / (3 * len(drawn))
    held = 0
    for start in range(0, 4000, 40):
        texts = [
            text(str(index), [int(tokens) - 1 for tokens in drawn[index]], 100)
            for index in range(start, start + 40)
        ]
        (stretch,) = stretches_of(texts)
        held += stretch.low <= everything <= stretch.high
    assert 90 <= held <= 99


def test_the_figure_has_a_line_for_each_point_that_drafts() -> None:
    result, without_drafts = sample_result("bild", {}, 1.5, drafted=9), sample_result("calm", {}, 2)
    (group,) = by_setting([sample_baseline(), result, without_drafts])
    texts = [text(str(index), [7, 7, 7, 1, 1, 1], 29) for index in range(20)]
    stored = {folder_name(one): texts for one in group.results}
    figure = along_text_figure(group, stored, marks(group.policies))
    (trace,) = figure["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("bild", ["1 to 16", "17 to 32"], [8.0, 3.25])
    assert trace["customdata"] == ["40 calls in 20 texts", "80 calls in 20 texts"]
    assert trace["error_y"]["array"] == trace["error_y"]["arrayminus"] == [0, 0]  # all are alike
    assert along_text_figure(group, {folder_name(result): texts[:5]}, {}) is None
    short = [text(str(index), [3], 9) for index in range(20)]  # a single place is no line
    assert along_text_figure(group, {folder_name(result): short}, {}) is None
