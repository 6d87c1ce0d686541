"""The same points measured twice: what matches, which verdict, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from bild_lab.errors import UserError
from bild_lab.lab.metrics.non_inferiority import score_test
from bild_lab.lab.metrics.quality import score_values, score_with_baseline
from bild_lab.lab.schema.examples import MeasuredExample
from bild_lab.lab.schema.numbers import LENGTH_NAME, Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.report.matching import MatchedPoint, differences, match_points
from bild_lab.report.paired_comparison import SACREBLEU_SEED, PointComparison, compare_point
from tests.lab.metrics.test_text_metrics import corpus
from tests.report.sample import (
    ENVIRONMENT,
    sample_example,
    sample_replayed,
    sample_result,
    with_quality,
    with_speedup,
)


def bild(fallback: float = 0.5, **changes: Any) -> Result:
    knobs = {"fallback": fallback, "rollback": 2.0, **changes.pop("knobs", {})}
    return sample_result("bild", knobs, 1.5, **changes)


def decoded(
    latencies: list[float], predictions: list[str] | None = None, baseline_s: float = 2.0
) -> list[MeasuredExample]:
    texts = predictions or ["the same words"] * len(latencies)
    return [
        sample_example(
            str(index),
            prediction=text,
            baseline_prediction="the same words",
            latency_s=[latency, 9.0, latency / 2],  # the median counts
            baseline_latency_s=[baseline_s],
        )
        for index, (latency, text) in enumerate(zip(latencies, texts, strict=True))
    ]


def references(count: int, text: str = "the same words") -> dict:
    return {(str(index), 1): [text] for index in range(count)}


def compared(
    a: list[MeasuredExample],
    b: list[MeasuredExample],
    expected: dict | None = None,
    left: Result | None = None,
    right: Result | None = None,
) -> PointComparison:
    return compare_point(MatchedPoint(left or bild(), right or bild(), {}), a, b, expected)


def test_points_match_by_policy_and_knobs_whatever_else_they_have_in_common() -> None:
    a = [bild(0.3), bild(0.5), sample_result("vanilla", {}, 1.0)]
    b = [
        bild(0.5, setting={"dtype": "float32", "code": "new"}),
        bild(0.7, setting={"dtype": "float32", "code": "new"}),
    ]
    matching = match_points(a, b)
    assert [(pair.a.knobs["fallback"], pair.b.knobs["fallback"]) for pair in matching.pairs] == [
        (0.5, 0.5)
    ]
    assert [result.policy for result in matching.only_a] == ["bild", "vanilla"]
    with_new_knob = [replace(one, knobs={**one.knobs, "new": 1}) for one in b]
    assert len(match_points(a, with_new_knob).pairs) == 1
    assert [result.knobs["fallback"] for result in matching.only_b] == [0.7]
    assert differences(matching.pairs) == {
        "dtype": ("bfloat16", "float32"),
        "code": ("None", "new"),
    }


def test_a_setting_that_varies_within_a_sweep_distinguishes_its_points() -> None:
    greedy, sampled = {"temperature": 0.0}, {"temperature": 1.0}
    a = [bild(setting={"decoding": decoding}) for decoding in (greedy, sampled)]
    b = [bild(setting={"decoding": decoding}) for decoding in (sampled, greedy)]
    assert [pair.distinct for pair in match_points(a, b).pairs] == [greedy, sampled]
    for pair in match_points(a, b).pairs:
        assert pair.a.setting == pair.b.setting


def test_every_value_that_differs_is_told_with_those_of_the_commit() -> None:
    newer = {"environment": {**ENVIRONMENT, "git": "def5678"}}
    first = MatchedPoint(
        bild(setting={"threads": 2, "note": "old"}), bild(setting={"threads": 4}, **newer), {}
    )
    second = MatchedPoint(
        bild(setting={"threads": 8, "note": "old"}), bild(setting={"threads": 1}, **newer), {}
    )
    assert differences([first, second]) == {
        "threads": ("2, 8", "4, 1"),
        "note": ("old", "None"),
        "commit": ("abc1234", "def5678"),
    }


def test_of_points_alike_the_newest_counts() -> None:
    old, new = bild(tokens=1), bild(tokens=2)
    assert match_points([old, new], [bild()]).pairs[0].a is new


def test_another_dataset_metric_or_split_is_refused() -> None:
    changes = [
        ({"dataset": "iwslt"}, "same dataset"),
        ({"metric": "rouge"}, "same metric"),
        ({"split": "dev"}, "same split"),
    ]
    for setting, message in changes:
        with pytest.raises(UserError, match=message):
            match_points([bild(setting={"data": "x"})], [bild(setting={"data": "y", **setting})])


def test_the_same_rows_under_another_name_are_compared() -> None:
    named = [
        bild(setting={"data": "x", "dataset": name, "split": split})
        for name, split in (("a", "dev"), ("b", "test"))
    ]
    matching = match_points(named[:1], named[1:])
    assert differences(matching.pairs) == {"dataset": ("a", "b"), "split": ("dev", "test")}
    with pytest.raises(UserError, match="same metric"):
        match_points(named[:1], [bild(setting={"data": "x", "metric": "rouge"})])


def test_other_examples_match_and_are_no_difference_of_the_setting() -> None:
    matching = match_points(
        [bild(setting={"data": "x"})], [bild(setting={"data": "y", "n_examples": 60})]
    )
    assert len(matching.pairs) == 1 and differences(matching.pairs) == {}


def test_the_latency_ratio_is_total_time_over_total_time_on_shared_examples() -> None:
    newer = bild(setting={"code": "new"})
    found = compared(decoded([1.0, 3.0, 50.0]), decoded([0.5, 1.5], baseline_s=2.2), right=newer)
    assert found.n_examples == 2
    assert found.latency_ratio.value == pytest.approx(0.5)
    assert found.baseline_latency_ratio.value == pytest.approx(1.1)


def test_a_machine_that_has_become_slower_makes_no_point_slower() -> None:
    """Both take longer in B, the method less so: its speedup rose from 2 to 2.4."""
    a, b = decoded([1.0] * 20), decoded([1.25] * 20, baseline_s=3.0)
    same = compared(a, b, right=bild(setting={"draft": "another", "split": "test"}))
    assert (same.latency_ratio.value, same.latency_ratio, same.speed_verdict) == (
        pytest.approx(2 / 2.4),
        same.relative_latency_ratio,
        "faster",
    )
    changed = compared(a, b, right=bild(setting={"code": "new"}))
    assert (changed.latency_ratio.value, changed.relative_latency_ratio, changed.speed_verdict) == (
        1.25,
        same.relative_latency_ratio,
        "unclear",
    )
    alone = [replace(one, baseline_latency_s=None) for one in b]
    assert (compared(a, alone).relative_latency_ratio, compared(a, alone).speed_verdict) == (
        None,
        "slower",
    )
    everything = compared(
        a, decoded([0.5] * 20, baseline_s=1.0), right=bild(setting={"code": "new"})
    )
    # as faster kernels make it
    assert (everything.relative_latency_ratio.value, everything.speed_verdict) == (1.0, "faster")


def test_replayed_texts_are_compared_in_quality_alone() -> None:
    untimed = [replace(one, latency_s=[], baseline_latency_s=[]) for one in decoded([1.0, 2.0])]
    for a, b in (
        (untimed, untimed),
        (decoded([1.0, 2.0]), untimed),
        (untimed, decoded([1.0, 2.0])),
    ):
        left, right = (sample_replayed() if side is untimed else bild() for side in (a, b))
        found = compared(a, b, references(2), left, right)
        assert (found.latency_ratio, found.speed_verdict) == (None, "not compared")
        assert (found.not_compared_reason, found.quality.verdict) == (
            "replayed texts were not timed",
            "no difference",
        )
    assert (
        compared(untimed[:1], untimed, references(2), sample_replayed(), sample_replayed())
        .speedups[1]
        .value
        is None
    )


def test_only_examples_with_the_same_text_count_and_numbers_are_theirs() -> None:
    a, b = (
        decoded([1.0, 2.0, 4.0]),
        decoded([1.0, 1.0, 1.0], ["the same words", "the same words", "other words"]),
    )
    pair = MatchedPoint(bild(setting={"metric": "rouge"}), bild(setting={"metric": "rouge"}), {})
    found = compare_point(pair, a, b, references(3), same={("0", 1), ("2", 1)})
    assert (found.n_examples, found.n_decoded) == (2, (3, 3))
    assert found.latency_ratio.value == pytest.approx(2 / 5)
    assert [one.value for one in found.speedups] == pytest.approx([4 / 5, 4 / 2])
    assert found.quality.values[0] == pytest.approx(100) and found.quality.values[1] < 80
    with pytest.raises(UserError, match="no example in common, of 3 and 3"):
        compare_point(pair, a, b, references(3), same=set())


def test_of_all_examples_speedup_and_quality_are_those_of_the_results() -> None:
    found = compared(decoded([1.0, 2.0]), decoded([1.0, 2.0]))
    assert [one.value for one in found.speedups] == [1.5, 1.5] and found.quality.values == (
        41.0,
        41.0,
    )


def failed(example: MeasuredExample, side: str = "reports") -> MeasuredExample:
    """The example, of which a server never gave the text: at once or after a long wait."""
    return replace(example, **{side: [{"error": None}, {"error": "it has died"}]})


def test_seconds_of_texts_that_never_came_do_not_count() -> None:
    a, b = decoded([1.0] * 30), decoded([1.0] * 30)
    b[0] = failed(replace(b[0], latency_s=[0.0, 0.0, 0.0]))
    a[1] = failed(replace(a[1], baseline_latency_s=[90.0]), "baseline_reports")
    found = compared(a, b)
    assert found.n_examples == 30 and found.latency_ratio.value == 1.0
    assert found.speed_verdict == "no difference"
    assert found.baseline_latency_ratio.value == 1.0
    fewer = compared(a, b[:20])  # so A's own speedup is of these alone
    assert fewer.speedups[0].value == pytest.approx(2.0)
    none_came = compared([failed(one) for one in a], b)
    assert (none_came.speed_verdict, none_came.latency_ratio) == ("not compared", None)
    assert none_came.not_compared_reason.startswith("of every text")


@pytest.mark.parametrize("count", [1, 2, 19, 20])
def test_few_examples_make_no_side_faster_or_better(count: int) -> None:
    """An interval of one text has no width, and two texts that agree seem certain."""
    a = [replace(one, scores={"bleu": 50.0}) for one in decoded([1.0] * count)]
    b = [
        replace(one, latency_s=[0.9 - 0.001 * place], scores={"bleu": 51.0 + place})
        for place, one in enumerate(a)
    ]
    found = compare_point(MatchedPoint(bild(), bild(), {}), a, b, None, margin=1)
    assert found.speed_verdict == ("too few" if count < 20 else "faster")
    assert found.quality.verdict == {1: "no difference", 2: "no difference"}.get(
        count, "too few" if count < 20 else "better"
    )
    assert (found.enough_answered, found.quality.enough) == (count >= 20,) * 2
    in_turns = [[replace(one, id="all", turn=int(one.id) + 1) for one in side] for side in (a, b)]
    assert compared(*in_turns).speed_verdict == "too few"


def test_a_batch_is_compared_with_the_error_of_its_clock() -> None:
    """Its texts share their clock: timed once, nothing says how far that is off."""
    a, b = decoded([1.0] * 30), [replace(one, latency_s=[0.9]) for one in decoded([1.0] * 30)]

    def found(batch: int, noise: float | None, repeats: int) -> PointComparison:
        side = bild(setting={"batch": batch})
        timed = replace(side, speedup=replace(side.speedup, noise=noise, repeats=repeats))
        return compare_point(MatchedPoint(timed, timed, {}), a, b, None)

    assert found(1, None, 1).speed_verdict == "faster"
    assert found(8, None, 1).speed_verdict == "too few"
    steady, shaken = found(8, 0.01, 3), found(8, 0.2, 3)
    assert steady.speed_verdict == "faster" and shaken.speed_verdict == "no difference"
    # the errors of both sides, in logarithms, as squares
    width = np.log1p(0.01) * np.sqrt(2)
    assert steady.latency_ratio.high == pytest.approx(0.9 * np.exp(width))
    assert steady.latency_ratio.low == pytest.approx(0.9 * np.exp(-width))
    assert found(1, 0.2, 3).latency_ratio.high == pytest.approx(0.9)  # the interval has it already
    known, unknown = (
        with_speedup(bild(setting={"batch": 8}), noise=noise) for noise in (0.01, None)
    )
    for sides in ((known, unknown), (unknown, known)):
        assert compare_point(MatchedPoint(*sides, {}), a, b, None).speed_verdict == "too few"


def test_turns_of_a_conversation_are_compared_as_one() -> None:
    """What differs in both turns of one of many conversations differs once."""
    a, b = decoded([1.0] * 40), decoded([1.0] * 40)
    in_turns = [
        [
            replace(example, id=str(place // 2), turn=1 + place % 2, scores={"bleu": value})
            for place, (example, value) in enumerate(zip(side, values, strict=True))
        ]
        for side, values in ((a, [0.0] * 40), (b, [100.0] * 6 + [0.0] * 34))
    ]
    together = compared(*in_turns).quality.difference
    alone = [[replace(one, id=f"{one.id}-{one.turn}", turn=1) for one in side] for side in in_turns]
    apart = compared(*alone).quality.difference
    assert together.value == apart.value == 15
    on_one_source = [
        [replace(one, same_source=one.id.partition("-")[0]) for one in side] for side in alone
    ]
    assert compared(*on_one_source).quality.difference == together
    on_19_sources = [
        [
            replace(one, same_source="0" if one.same_source == "19" else one.same_source)
            for one in side
        ]
        for side in on_one_source
    ]
    assert [compared(*sides).quality.enough for sides in (on_one_source, on_19_sources)] == [
        True,
        False,
    ]
    assert together.p_value > 1.5 * apart.p_value and together.low < apart.low
    turns = [replace(one, id="0", turn=1 + place) for place, one in enumerate(decoded([1.0, 2.0]))]
    speedup = compared(turns, [*turns, *decoded([9.0, 9.0])[1:]]).speedups[1]
    assert speedup.low == speedup.value == 4 / 3  # of the two turns that both sides have


def test_the_verdict_needs_the_whole_interval() -> None:
    slower = compared(decoded([1.0] * 20), decoded([1.1] * 20))
    mixed = compared(decoded([1.0] * 20), decoded([0.5, 1.6] * 10))
    assert (slower.speed_verdict, mixed.speed_verdict) == ("slower", "no difference")
    assert mixed.latency_ratio.low < 1 < mixed.latency_ratio.high
    for touching in (Speedup(0.9, 0.8, 1.0, 0.9), Speedup(1.1, 1.0, 1.2, 1.1)):
        assert (
            replace(mixed, latency_ratio=touching, relative_latency_ratio=None).speed_verdict
            == "no difference"
        )


def test_cards_of_one_kind_are_the_same_hardware() -> None:
    environment = {**ENVIRONMENT, "gpu": "NVIDIA H100"}
    first, second = (
        bild(setting={"device": f"cuda:{card}"}, environment=environment) for card in (0, 1)
    )
    assert (
        compared(decoded([1.0]), decoded([0.5]), left=first, right=second).latency_ratio.value
        == 0.5
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"setting": {"hardware": "another CPU"}},
            "different hardware: cpu AMD EPYC 7B13, cpu another CPU",
        ),
        (
            {"environment": {**ENVIRONMENT, "shared_device": True}},
            "timed beside other jobs on the same device",
        ),
    ],
)
def test_latencies_that_say_nothing_are_not_compared_but_quality_is(
    change: dict, reason: str
) -> None:
    found = compared(decoded([1.0, 1.0]), decoded([0.5, 0.5]), references(2), right=bild(**change))
    assert (found.latency_ratio, found.baseline_latency_ratio, found.not_compared_reason) == (
        None,
        None,
        reason,
    )
    assert (found.speed_verdict, found.quality.verdict) == ("not compared", "no difference")


def test_the_quality_difference_is_that_of_sacrebleus_paired_bootstrap() -> None:
    worse, expected = corpus(40, seed=0)
    better = [
        several[0] if index % 3 else text
        for index, (several, text) in enumerate(zip(expected, worse, strict=True))
    ]
    expectations = {(str(index), 1): several for index, several in enumerate(expected)}
    found = compared(
        decoded([1.0] * 40, worse), decoded([1.0] * 40, better), expectations
    ).quality.difference
    streams = [list(stream) for stream in zip(*expected, strict=True)]
    metrics = {"BLEU": BLEU(references=streams)}
    _, scores = PairedTest(
        [("A", worse), ("B", better)], metrics, None, test_type="bs", n_samples=1000
    )()
    assert found.value == pytest.approx(scores["BLEU"][1].score - scores["BLEU"][0].score)
    assert found.p_value == pytest.approx(scores["BLEU"][1].p_value)
    assert found.p_value < 0.05
    assert (
        found
        == score_with_baseline("bleu", better, worse, expected, seed=SACREBLEU_SEED).difference
    )


def test_stored_scores_of_examples_are_compared_without_references() -> None:
    """Programs, above all, do not run again."""
    own = {"setting": {"metric": "pass_at_1"}}
    a = [replace(one, scores={"pass_at_1": 0.0}) for one in decoded([1.0] * 30)]
    b = [
        replace(one, scores={"pass_at_1": 100.0 * (index % 2)})
        for index, one in enumerate(decoded([1.0] * 30))
    ]
    found = compared(a, b, left=bild(**own), right=bild(**own))
    assert (found.quality.difference.value, found.quality.verdict) == (50, "better")
    values = [one.scores["pass_at_1"] for one in b]
    assert (
        found.quality.difference
        == score_values("BLEU", values, [0.0] * 30, seed=SACREBLEU_SEED).difference
    )
    few = compared(a, b[:10], left=bild(**own), right=bild(**own))
    # of A's own ten; B has no others
    assert (few.n_examples, few.quality.values) == (10, (0, 41.0))


def test_texts_that_differ_and_are_as_right_leave_the_difference_open() -> None:
    own = {"setting": {"metric": "pass_at_1"}}
    a, b = (
        [replace(one, scores={"pass_at_1": 100.0}) for one in decoded([1.0] * 30, [words] * 30)]
        for words in ("some words", "other words")
    )
    same = compared(a, a, left=bild(**own), right=bild(**own)).quality.difference
    found = compared(a, b, left=bild(**own), right=bild(**own)).quality.difference
    assert (same.low, same.high) == (0, 0) and found.low < -5 < 5 < found.high


def test_turns_that_differ_count_once_for_their_conversation() -> None:
    side = with_quality(bild(setting={"metric": "length"}), metric=LENGTH_NAME)
    a, b = (
        [
            replace(one, id=str(place // 4), turn=1 + place % 4, scores={"length": length})
            for place, one in enumerate(decoded([1.0] * 16, [words] * 16))
        ]
        for words, length in (("some words", 9.0), ("words", 8.0))
    )
    # four that are shorter are so by chance once in eight times
    assert compared(a, b, left=side, right=side).quality.difference.p_value >= 2 * 0.5**4


def test_metrics_that_both_have_are_compared_behind_the_leading_one() -> None:
    rouge = {"metric": "ROUGE-L", "value": 70.0, "low": 60.0, "high": 80.0}
    sides = {
        "left": bild(further_qualities={"rouge": rouge, "ter": rouge}),
        "right": bild(further_qualities={"rouge": rouge}),
    }
    better = ["the same words"] * 30
    found = compared(
        decoded([1.0] * 30, ["the same end"] * 30),
        decoded([1.0] * 30, better),
        references(30),
        **sides,
    )
    further = found.metric_comparisons[1]
    assert (further.metric, further.values, further.verdict) == ("ROUGE-L", (70, 70), "better")
    assert further.difference.value == pytest.approx(100 / 3)
    assert [(one.metric, one.values) for one in found.metric_comparisons] == [
        ("BLEU", found.quality.values),
        ("ROUGE-L", (70, 70)),
    ]
    stored = [replace(one, scores={"rouge": 50.0}) for one in decoded([1.0])]
    assert compared(stored, stored, **sides).metric_comparisons[1].difference.metric == "ROUGE-L"
    assert (
        compared(decoded([1.0]), decoded([1.0]), **sides).metric_comparisons[1].verdict
        == "not compared"
    )


def test_with_a_margin_b_is_tested_against_a_by_the_leading_metric() -> None:
    own = {"setting": {"metric": "pass_at_1"}}
    a = [replace(one, scores={"pass_at_1": 100.0}) for one in decoded([1.0] * 100)]
    b = [
        replace(one, scores={"pass_at_1": 0.0 if index < 1 else 100.0})
        for index, one in enumerate(a)
    ]
    pair = MatchedPoint(bild(**own), bild(**own), {})
    tested = compare_point(pair, a, b, None, margin=5).quality.non_inferiority
    assert tested == score_test(0, 1, 100, 5) and tested.shown
    assert compare_point(pair, b, a, None, margin=5).quality.non_inferiority.lower_bound > -3
    assert compare_point(pair, a, b, None).quality.non_inferiority is None


def test_agreement_is_that_of_each_side_with_its_own_baseline() -> None:
    same, other = "the same words", "others"
    a = decoded([1.0] * 4, [same, other, other, same])
    b = decoded([1.0] * 4, [same, same, same, other])
    left, right = (bild(setting={"metric": "agreement"}) for _ in range(2))
    quality = compared(a, b, None, left, right).quality
    assert quality.difference.value == 25.0
