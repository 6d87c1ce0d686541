"""Spec-Bench's table: means over questions, turns together, MT-Bench's categories as one task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bild_lab.benchmark import spec_bench
from bild_lab.benchmark.spec_bench import (
    answered_questions,
    questions_per_s,
    spec_bench_row,
    speedup_of_means,
)
from bild_lab.errors import UserError
from bild_lab.lab.schema.examples import MeasuredExample, MeasuredRound
from bild_lab.lab.schema.result import Setting
from tests.report.sample import sample_result


def example(
    id: str, category: str, tokens: int, seconds: float, baseline_s: float, turn: int = 1
) -> MeasuredExample:
    return MeasuredExample(
        id=id,
        category=category,
        turn=turn,
        prediction="",
        token_ids=[7] * tokens,
        latency_s=[seconds, 9 * seconds, seconds / 2],
        rounds=[MeasuredRound(drafted=[7, 7, 7], accepted=2, next_token=7)],
        baseline_prediction="",
        baseline_token_ids=[7] * tokens,
        baseline_latency_s=[baseline_s],
    )


EXAMPLES = [
    example("81", "writing", 100, 1.0, 2.0),
    example("81/2", "writing", 20, 2.0, 4.0, turn=2),  # the question: 120 tokens in 3 s, 6 s
    example("120", "math", 10, 1.0, 1.0),
    example("7", "translation", 30, 1.0, 3.0),
]


def test_a_questions_turns_count_together_and_repeats_by_their_median() -> None:
    assert questions_per_s(EXAMPLES[:3]) == [120 / 3, 10.0]
    assert questions_per_s(EXAMPLES[:3], baseline=True) == [120 / 6, 10.0]


def test_a_speedup_is_a_ratio_of_means_over_questions() -> None:
    """Neither the mean of ratios (1.5) nor that of all tokens over all seconds (1.75)."""
    assert speedup_of_means(EXAMPLES[:3]) == pytest.approx((40 + 10) / (20 + 10))


def test_the_row_has_each_task_accepted_tokens_and_all_questions() -> None:
    mt_bench, translation, *others, accepted, overall = spec_bench_row(EXAMPLES)
    assert (mt_bench, translation, accepted) == ("1.67×", "3.00×", "3.00")
    assert others == ["–"] * 4
    assert overall == "2.00×"  # (40 + 10 + 30) / (20 + 10 + 10)


def test_a_draft_that_ends_a_text_unverified_is_no_verification() -> None:
    """Fault: it counts, with a token of the target that there is not: 3.67 in place of 3.00."""
    tail = MeasuredRound(drafted=[7, 7, 7, 7], accepted=4, next_token=None)
    unverified = replace(EXAMPLES[0], rounds=[*EXAMPLES[0].rounds, tail])
    assert spec_bench_row([unverified, EXAMPLES[3]])[-2] == "3.00"


def test_a_question_that_a_server_failed_to_answer_counts_nowhere() -> None:
    report = {"pieces_s": [], "rounds": None, "attempts": 3, "error": "status 500"}
    failed = replace(EXAMPLES[1], token_ids=[], reports=[report])
    answered = answered_questions([EXAMPLES[0], failed, *EXAMPLES[2:]])
    assert answered == EXAMPLES[2:]
    of_baseline = replace(EXAMPLES[3], baseline_token_ids=[], baseline_reports=[report])
    assert answered_questions([*EXAMPLES[:3], of_baseline]) == EXAMPLES[:3]


def test_a_server_tells_totals_of_its_rounds_and_nothing_is_nothing() -> None:
    told = [replace(example, rounds=[]) for example in EXAMPLES]
    assert spec_bench_row(told, 3.5)[-2] == "3.50" and spec_bench_row(told)[-2] == "–"
    empty = [replace(EXAMPLES[0], token_ids=[], baseline_token_ids=[], rounds=[])]
    assert spec_bench_row(empty) == spec_bench_row([]) == ["–"] * 8


def test_the_table_tells_settings_apart_and_says_how_many_questions_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec_bench, "read_examples", lambda folder: EXAMPLES)
    plain = sample_result("bild", {"fallback": 0.2}, 1.5)
    hot = {**plain.setting.decoding, "temperature": 1.0}
    sampled = replace(plain, setting=Setting({**plain.setting, "decoding": hot}))
    head, _, greedy, sampling, *notes = spec_bench.spec_bench_table([plain, sampled]).splitlines()
    assert head.startswith("| policy | MT-Bench |")
    assert "1.0" in sampling.split("|")[1] and greedy.split("|")[1] != sampling.split("|")[1]
    assert [note for note in notes if note.endswith("over 3 of the 480 questions.")] == notes[1::2]
    assert len(notes[1::2]) == 2


def test_another_datasets_categories_are_refused() -> None:
    with pytest.raises(UserError, match="no category 'coding_2'"):
        spec_bench_row([*EXAMPLES, example("1", "coding_2", 1, 1.0, 1.0)])
