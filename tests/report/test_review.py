"""The report answers what reviewers ask: hardware, baselines, how thresholds were chosen, the lossy
rules' control.
"""

from __future__ import annotations

from collections.abc import Sequence

from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.groups import by_setting
from bild_lab.report.review import review_answers
from bild_lab.report.screened_points import ScreenedPoint
from tests.report.sample import sample_baseline, sample_result, with_quality, with_speedup

SAMPLED = {"decoding": {"max_new_tokens": 128, "temperature": 1.0, "top_k": None, "top_p": None}}


def answered(*results: Result, screened: Sequence[ScreenedPoint] = ()) -> dict[str, str]:
    (group,) = by_setting(results)
    found = dict(review_answers(group, screened))
    return {question.split("?")[0].split(",")[0]: answer for question, answer in found.items()}


def test_hardware_sizes_runs_and_baselines_are_answered() -> None:
    facts = {"parameters": {"target": 737_000_000, "draft": 1_530_000}}
    peer = sample_result("hf_assisted", {"window": 5}, 1.1, engine="hf", precision="bfloat16")
    own = sample_baseline(engine="kernels", precision="bfloat16")
    found = answered(own, peer, sample_result("bild", {}, 1.5, facts=facts))
    assert found["On which hardware"] == "AMD EPYC 7B13, 2 threads of 2 cores; bfloat16, batch 1"
    assert found["How large are the models"] == "target 737 M, draft 1.5 M"
    assert found["How often was it run"].startswith("each text 3 times, in turn with vanilla")
    assert (
        found["With which settings ran the baselines"]
        == "hf_assisted (window 5): engine hf, bfloat16, transformers 5.23.0; "
        "vanilla: engine kernels, bfloat16, transformers 5.23.0"
    )


def test_thresholds_chosen_on_the_reported_texts_are_said_to_be_and_screened_ones_not() -> None:
    points = [sample_result("bild", {"fallback": fallback}, 1.5) for fallback in (0.5, 0.9)]
    how = "How were thresholds chosen"
    assert answered(*points)[how].startswith(
        "the best of 2 points was chosen on the texts that it is reported on"
    )
    row = {"split": "validation", "n_examples": 200}
    screened = [ScreenedPoint("bild", {}, row, point) for point in (points[0], None, None)]
    assert (
        answered(*points, screened=screened)[how]
        == "1 of 3 points that were screened on validation (200 texts), measured once on test; 1"
        " more chosen without it"
    )
    assert (
        answered(points[0])[how]
        == "no knob has several values here, so none was chosen on these texts"
    )


def test_a_lossy_rule_that_is_ahead_is_set_beside_truncation() -> None:
    ahead = with_quality(
        sample_result("typical_acceptance", {}, 1.5, 2.0, setting=SAMPLED), difference_low=0.9
    )
    control = sample_result("truncation", {"epsilon": 0.15}, 1.0, 1.8, setting=SAMPLED)
    merit = "Is a lossy rule ahead"
    assert "not measured, add policy=truncation" in answered(ahead)[merit]
    found = answered(ahead, control)[merit]
    assert found.startswith("typical_acceptance BLEU +2.00 [+0.90, +2.50] and 1.50×; its control")
    assert found.endswith("truncation (epsilon 0.15) BLEU +1.80 [+1.35, +2.30]")
    assert (
        answered(sample_result("bild", {}, 1.5, 0.1))[merit]
        == "no point has more BLEU than vanilla beyond chance"
    )
    # the better of two needs an interval 1.164 times as wide: 1.9 - 1.164 · 1.8 < 0
    other = sample_result("bild", {}, 1.4, 1.0, setting=SAMPLED)
    of_two = answered(ahead, other, control)[merit]
    assert of_two.startswith("of 2 points (Bonferroni), typical_acceptance BLEU +2.00 [+0.72, ")
    chance = with_quality(sample_result("bild", {}, 1.5, 1.9, setting=SAMPLED), difference_low=0.1)
    assert answered(chance)[merit].startswith("bild BLEU +1.90")
    equal = sample_result("medusa", {}, 1.4, 0.1, setting=SAMPLED)
    assert answered(chance, equal)[merit] == "no point has more BLEU than vanilla beyond chance"
    doubtful = with_quality(ahead, p_value=0.057)  # of right and wrong answers: four of 100 gained
    assert answered(doubtful)[merit] == "no point has more BLEU than vanilla beyond chance"
    few = with_quality(
        sample_result("bild", {}, 1.5, 1.9, setting={**SAMPLED, "n_examples": 19}),
        difference_low=0.9,
    )
    assert answered(few)[merit] == "no point has more BLEU than vanilla beyond chance"
    greedy = with_quality(sample_result("bild", {}, 1.5, 2.0), difference_low=0.9)
    assert "writes the target’s own text" in answered(greedy)[merit]


def test_repeats_are_those_that_were_timed_and_no_baseline_is_none() -> None:
    how, precise = "How often was it run", {"precision": 0.05, "most_repeats": 30}
    points = [
        with_speedup(
            sample_result("bild", {"fallback": repeats / 100}, 1.5, setting=precise),
            repeats=repeats,
        )
        for repeats in (6, 17)
    ]
    assert answered(*points)[how].startswith("each text 6 to 17 times, in turn with vanilla, after")
    few = sample_result("server", {}, 1.2, setting=precise, independent_texts=3)
    assert answered(*points, few)[how].endswith("intervals are over 3 to 100 texts")
    alone = sample_result("bild", {}, None, setting={"baseline": None, "repeats": 1})
    found = answered(with_quality(alone, baseline=None, difference=None, difference_low=None))
    assert found[how].startswith("each text 1 time, after 3 to warm up")
    assert "Is a lossy rule ahead" not in found
