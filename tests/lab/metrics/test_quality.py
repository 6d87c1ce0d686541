"""Scores, intervals and paired differences, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bild_lab.errors import UserError
from bild_lab.lab.metrics import text_metrics
from bild_lab.lab.metrics.bootstrap import resample_counts
from bild_lab.lab.metrics.non_inferiority import BETTING, BOOTSTRAP
from bild_lab.lab.metrics.quality import (
    Difference,
    Scoring,
    p_value,
    score,
    score_pool,
    score_values,
    score_with_baseline,
)
from bild_lab.lab.metrics.text_metrics import METRICS
from tests.lab.metrics.test_text_metrics import corpus


def compare(
    metric: str, ours: list[str], theirs: list[str], references: list[list[str]], **options: object
) -> Difference:
    return score_with_baseline(metric, ours, theirs, references, **options).difference


def test_metrics_of_tokens_are_over_all_tokens_and_over_all_texts_with_paired_differences() -> None:
    scoring = Scoring(("log_probability", "length"))
    ours, theirs = [(2, -1.0), (8, -2.0)], [(4, -1.0), (8, -2.0)]
    found = scoring.score_outputs(["a", "b"], ["c", "b"], [(), ()], seed=3, tokens=(ours, theirs))
    likely, length = found["log_probability"], found["length"]
    # no mean of means
    assert (likely.score.metric, likely.score.value) == ("log-probability", pytest.approx(-3 / 10))
    assert likely.difference.value == pytest.approx(-3 / 10 + 3 / 12) and likely.per_example is None
    assert (length.score.value, length.difference.value, length.per_example) == (5, -1, (2, 8))
    # the second text has its length in both
    assert length.difference.low == -2 and length.difference.high == 0
    alone = scoring.score_outputs(["a", "b"], None, [(), ()], seed=3, tokens=(ours, None))
    assert alone["length"].difference is None and alone["length"].score.value == length.score.value


OF_TEXTS = ("bleu", "chrf", "ter", "rouge", "exact_match", "agreement")


def test_agreement_is_the_percentage_of_predictions_equal_to_the_baselines_output() -> None:
    quality = score("agreement", ["a", "b", "c", "d"], [["a"], ["b"], ["x"], ["d"]])
    assert (quality.metric, quality.value, quality.signature) == ("agreement", 75.0, None)
    assert quality.low <= 75.0 <= quality.high
    spaced = Scoring(("agreement",)).score_outputs(
        ["a", "b c"], ["a", "b  c"], [("x",)] * 2, seed=0
    )
    assert spaced["agreement"].score.value == 50 and spaced["agreement"].difference.value == -50


def test_the_interval_of_a_mean_is_near_the_binomial_one() -> None:
    quality = score("agreement", ["a"] * 400, [["a"]] * 200 + [["b"]] * 200)
    half_width = 196.0 * 0.5 / 20  # 1.96 standard errors of 400 fair coins, in percent
    assert quality.high - quality.value == pytest.approx(half_width, rel=0.15)
    assert quality.value - quality.low == pytest.approx(half_width, rel=0.15)


@pytest.mark.parametrize("metric", OF_TEXTS)
def test_the_difference_is_that_of_the_scores_and_changes_sign_with_its_order(metric: str) -> None:
    worse, references = corpus(40, seed=0)
    better = [several[0] for several in references]
    difference, reverse = (
        compare(metric, better, worse, references),
        compare(metric, worse, better, references),
    )
    expected = score(metric, better, references).value - score(metric, worse, references).value
    assert difference.value == pytest.approx(expected) == pytest.approx(-reverse.value)
    assert 0 < difference.low <= difference.value <= difference.high
    assert difference.p_value == reverse.p_value
    if metric in ("exact_match", "agreement"):  # exact
        assert difference.p_value < 1e-6
    else:
        assert difference.p_value == pytest.approx(1 / 1001)


def test_pairing_makes_a_small_constant_gain_certain() -> None:
    """Scores spread over 0 to 100, the gain is the same in every example."""
    references = [["a b c d e f g h"]] * 8
    baseline = [" ".join("a b c d e f g h".split()[:length]) for length in range(8)]
    gained = [" ".join("a b c d e f g h".split()[: length + 1]) for length in range(8)]
    difference = compare("rouge", gained, baseline, references)
    unpaired = score("rouge", baseline, references)
    assert difference.high - difference.low < (unpaired.high - unpaired.low) / 2
    assert difference.low > 0


def test_a_p_value_counts_centred_differences_that_are_as_large() -> None:
    # 3 from the centre, as one is
    assert p_value(np.array([1.0, 2.0, 3.0, 5.0]), 2.0) == (1 + 1) / (4 + 1)
    assert p_value(np.array([0.0, 4.0, 3.0]), 2.0) == (2 + 1) / (3 + 1)  # exactly as large
    assert p_value(np.array([0.6, 0.0]), 0.1 + 0.2) == 1  # but for rounding


def test_programs_run_in_every_function_only_where_that_was_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(
        text_metrics, "passes", lambda texts, _: ran.extend(texts) or [0.0] * len(texts)
    )
    given = "pass_at_1", ["a", "b"], [["{answer}"]] * 2
    for measured in (
        lambda **run: score(*given, **run),
        lambda **run: score_with_baseline(*given[:2], ["c", "d"], given[2], **run),
        lambda **run: score_pool(*given, [[0, 1]], [1, 0], **run),
        lambda **run: Scoring(("pass_at_1",), **run).score_outputs(
            given[1], None, given[2], seed=0
        ),
    ):
        with pytest.raises(UserError, match=r"measure\.run_code=true"):
            measured()
        assert ran == []
        measured(run_code=True)
        assert ran
        ran.clear()


def test_resamples_are_sums_over_draws_with_replacement() -> None:
    statistics = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    drawn = np.random.default_rng(7).choice(3, size=(1000, 3))
    np.testing.assert_array_equal(
        resample_counts(len(statistics), seed=7) @ statistics, statistics[drawn].sum(axis=1)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
def test_few_examples_are_never_less_by_chance_than_their_signs_allow(count: int) -> None:
    """That all of n examples are better happens by chance once in 2^n; a bootstrap of one example
    draws the same one a thousand times.
    """
    values, baseline = [60.0 + place for place in range(count)], [50.0] * count
    found = score_values("x", values, baseline, margin=1)
    assert found.difference.p_value >= min(1, 2 * 0.5**count)
    assert found.score.non_inferiority.p_value >= 0.5**count
    ((_, pooled),) = score_pool("exact_match", ["a", "b"], [["a"]] * 2, [[0] * count], [1] * count)
    assert pooled.p_value >= min(1, 2 * 0.5**count)
    together = score_values("x", values, baseline, margin=1, conversations=[0] * count)
    assert together.difference.p_value == 1 and not together.score.non_inferiority.shown


def test_examples_that_are_alike_are_no_evidence_that_one_system_is_better() -> None:
    """Fault: five texts of a hundred that lost a little had p = 0.03, though the signs of five are
    alike once in sixteen draws.
    """
    baseline = [50.0 + place % 7 for place in range(100)]
    for lost, least in ((1, 1.0), (5, 2 * 0.5**5), (6, 2 * 0.5**6)):
        values = [value - (place < lost) for place, value in enumerate(baseline)]
        for different in (None, 100):  # texts that differ and are as good are no evidence either
            p = score_values("x", values, baseline, different=different).difference.p_value
            assert p >= least and (p < 0.05) == (lost == 6)
    assert score_values("x", baseline, baseline).difference.p_value == 1
    references = [["a b c d e f"]] * 100
    texts = ["a b c d e g"] * 5 + ["a b c d e f"] * 95
    assert compare("bleu", texts, ["a b c d e f"] * 100, references).p_value >= 2 * 0.5**5


@pytest.mark.parametrize("metric", ["bleu", "rouge", "exact_match"])
def test_a_resample_holds_all_turns_of_a_conversation_equally_often(metric: str) -> None:
    """Turns that repeat the one before leave the interval as it is."""
    predictions, references = corpus(30, seed=0)
    baseline = [
        several[0] if place % 3 else text
        for place, (several, text) in enumerate(zip(references, predictions, strict=True))
    ]
    alone = [*range(30)]  # conversations of one turn each, which are resampled too
    once = score_with_baseline(
        metric, predictions, baseline, references, margin=5, conversations=alone
    )
    twice = [[*texts, *texts] for texts in (predictions, baseline, references)]
    conversations = [*range(30), *range(30)]
    together = score_with_baseline(metric, *twice, margin=5, conversations=conversations)
    for name in ("value", "low", "high", "difference", "difference_low", "difference_high"):
        assert getattr(together.score, name) == pytest.approx(getattr(once.score, name)), name
    assert 0 <= once.score.p_value <= 1
    assert together.score.p_value == pytest.approx(once.score.p_value)
    apart = score_with_baseline(metric, *twice, margin=5, conversations=[*range(60)])
    difference_of = [one.score.difference_high - one.score.difference_low for one in (apart, once)]
    assert difference_of[0] < 0.85 * difference_of[1]
    # no independent pairs, so never the score test
    assert together.score.non_inferiority.test == (BOOTSTRAP if metric == "bleu" else BETTING)
    picks, base_picks = [*range(30)] * 2, [*range(30, 60)] * 2
    ((pooled, _),) = score_pool(
        metric,
        [*predictions, *baseline],
        [*references, *references],
        [picks],
        base_picks,
        margin=5,
        conversations=conversations,
    )
    assert (pooled.low, pooled.high) == pytest.approx((once.score.low, once.score.high))
    assert pooled.non_inferiority == together.score.non_inferiority


@pytest.mark.parametrize(
    ("predictions", "references"),
    [([], []), (["a", "b"], [["a"]]), (["a"], [["a"], ["b"]]), (["a"], [[]]), (["a"], ["a"])],
)
def test_predictions_without_a_list_of_references_each_are_refused(
    predictions: list, references: list
) -> None:
    """Fault: the letters of a text in place of a list were references, and two predictions were
    scored by one.
    """
    with pytest.raises(
        UserError, match=f"a list of references for each of {len(predictions)} pred"
    ):
        score("rouge", predictions, references)


@pytest.mark.parametrize("metric", ["bleu", "rouge"])
def test_a_text_is_scored_once_however_many_resamples_there_are(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    row = METRICS[metric]

    def counted(shown: str, predictions: list[str], *given: object) -> object:
        scored.extend(predictions)
        return row.measure(shown, predictions, *given)

    monkeypatch.setitem(METRICS, metric, replace(row, measure=counted))
    predictions, references = corpus(30, seed=0)
    baseline, _ = corpus(30, seed=1)
    score(metric, predictions, references)
    assert scored == predictions
    compare(metric, predictions, baseline, references)
    assert scored == [*predictions, *predictions, *baseline]
    compare(metric, predictions, list(predictions), references)  # as those of a lossless policy
    assert scored == [*predictions, *predictions, *baseline, *predictions]


@pytest.mark.parametrize("metric", OF_TEXTS)
def test_a_pool_of_texts_gives_every_system_the_scores_it_has_alone(metric: str) -> None:
    pool = ["a b c d e", "a b c d f", "b c d e f g", "x y z w v", "b c d e f", "x y z w u"]
    references = (
        [["a b c d e"]] * 2 + [["b c d e f"], ["x y z w v"]] + [["b c d e f"], ["x y z w v"]]
    )
    systems, baseline = [[0, 2, 3], [1, 4, 5], [0, 2, 3], [1, 2, 3]], [0, 4, 3]
    found = score_pool(metric, pool, references, systems, baseline, seed=3)
    base, own = [pool[at] for at in baseline], [references[at] for at in baseline]
    for picks, (scored, difference) in zip(systems, found, strict=True):
        texts = [pool[at] for at in picks]
        alone = score(metric, texts, own, seed=3)
        assert scored.metric == alone.metric
        assert (scored.value, scored.low, scored.high) == pytest.approx(
            (alone.value, alone.low, alone.high)
        )
        assert vars(difference) == pytest.approx(vars(compare(metric, texts, base, own, seed=3)))


def test_values_of_examples_that_were_stored_judge_as_the_texts_did() -> None:
    ours, references = corpus(30, seed=0)
    theirs, _ = corpus(30, seed=1)
    judged = score_with_baseline("rouge", ours, theirs, references, seed=5)
    base = score_with_baseline("rouge", theirs, None, references, seed=5)
    stored = score_values("ROUGE-L", judged.per_example, base.per_example, seed=5)
    assert stored.difference == judged.difference and base.difference is None
    assert score_values("ROUGE-L", base.per_example, seed=5).difference is None
    assert (stored.score.value, stored.score.low, stored.score.high) == pytest.approx(
        (judged.score.value, judged.score.low, judged.score.high)
    )
    assert (
        score_with_baseline("bleu", ours, theirs, references).per_example is None
    )  # corpus BLEU is no mean


@pytest.mark.parametrize(
    ("metric", "last", "message"),
    [
        ("bleu", (), "bleu: example 2 has no references; leave it out of the data"),
        ("exact_match", (), "exact_match: example 2 has no references"),
        ("rouge", ("", " \n"), "rouge: the reference of example 2 is empty"),
        ("numeric", ("none",), "numeric: the reference of example 2 holds no number, got 'none'"),
        (
            "numeric",
            ("5", "so 1 3/4"),
            "example 2 ends within a mixed number, a date, a ratio or a power.*'so 1 3/4'",
        ),
    ],
)
def test_a_reference_that_no_text_can_reach_is_found_before_decoding(
    metric: str, last: tuple[str, ...], message: str
) -> None:
    references = [("7 cats",), ("a", "8 dogs")]
    scoring = Scoring((metric,))
    assert scoring.fitted(references).writing.kind == "English"
    with pytest.raises(UserError, match=message):
        scoring.fitted([*references, last])


THINKING = "<think>\nIs it 3 dogs?\n</think>\n\n"


# of gpt-oss's channels, without their marks
CHANNELS = "analysisIs it 3 dogs?assistantanalysisOr 4?assistantfinal"


@pytest.mark.parametrize("thoughts", [THINKING, CHANNELS])
@pytest.mark.parametrize(
    "metric", ["exact_match", "rouge1", "bleu", "chrf", "numeric", "judged.by"]
)
def test_an_answer_is_scored_without_what_the_model_thought_before_it(
    metric: str, thoughts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: thoughts as a part of the answer, by which a right one is a wrong one."""
    (tmp_path / "judged.py").write_text(
        "def by(text, references):\n    return text in references\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    answers, references = (
        ["There are 7 cats and 2 birds"] * 2,
        [["There are 7 cats and 2 birds"]] * 2,
    )
    thought = [thoughts + answer for answer in answers]
    assert score(metric, thought, references).value == pytest.approx(100)
    # the template may have begun the thoughts
    assert score(metric, [text.removeprefix("<think>") for text in thought], references).value == (
        pytest.approx(100)
    )
    # an answer that the length limit kept from coming is an empty one, whatever the thoughts hold
    cut = [thoughts.split("</think>")[0].removesuffix("assistantfinal") + answers[0]] * 2
    assert score(metric, cut, references).value == pytest.approx(0)
    if metric != "numeric":  # a reference that thinks is one of both
        both = [[text] for text in thought]
        assert score(metric, thought, both).value == pytest.approx(100)
        assert score(metric, answers, both).value < 100


def test_agreement_is_of_thoughts_and_answers() -> None:
    scoring = Scoring(("agreement",))
    texts = [THINKING + "7", "Is it 8?</think>7"]
    judged = scoring.score_outputs(texts, [THINKING + "7", "Is it 9?</think>7"], [(), ()], seed=0)
    assert judged["agreement"].score.value == 50


def test_an_empty_reference_is_one_for_exact_match_and_no_matter_to_agreement() -> None:
    assert Scoring(("exact_match",)).fitted([("",), ("a",)])
    assert Scoring(("agreement", "length")).fitted([(), ()]).writing.kind is None


def test_a_metric_that_fails_on_its_first_call_is_found_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_metric.py").write_text(
        "def fails(text, references):\n    return references['a']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="the metric fails fails for 'a': TypeError"):
        Scoring(("chrf", "failing_metric.fails")).fitted([("a",), ("b",)])


def test_scores_of_a_few_examples_use_the_tokenizer_of_all() -> None:
    scoring = Scoring(("rouge1",)).fitted([("Кошка спит",), ("yes",)])
    judged = scoring.score_outputs(["yes"], None, [("yes",)], seed=0)
    assert judged["rouge1"].score.metric == "ROUGE-1 (unicode)"
