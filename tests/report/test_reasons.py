"""Tests of the lines that say why a policy is as fast as it is."""

import pytest

from bild_lab.lab.results.groups import by_setting
from bild_lab.report.reasons import reason_lines
from tests.report.sample import sample_baseline, sample_prediction, sample_result, sample_sweep

STAGES = {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "host": 0.1}


def line(*results):
    (group,) = by_setting(list(results))
    return dict(reason_lines(group))


def test_every_traced_policy_has_a_line_about_its_fastest_point_at_no_loss():
    assert list(line(*sample_sweep())) == ["bild (fallback 0.3, rollback 1), 1.55×", "speculative (window 4), 1.38×"]


def test_a_policy_that_always_loses_is_explained_by_its_fastest_point():
    slow, fast = (sample_result("bild", {"fallback": speed}, speed, -0.5, stages_s=STAGES) for speed in (1.2, 1.7))
    assert list(line(slow, fast)) == ["bild (fallback 1.7), 1.70×"]


def test_a_line_tells_gains_costs_and_the_change_that_helps_most():
    prediction = {
        **sample_prediction("bild", {}, 2.0, 0.8),
        "rounds": 3.0,
        "verify": 2.4,
        "prefill": 2.0,
        "measured": 2.0,
    }
    prediction |= {"cost_ratio": 0.169}
    counts = {"tokens_per_target_call": 4.2, "acceptance_rate": 0.8, "drafted": 900}
    result = sample_result("bild", {}, 2.0, stages_s=STAGES, prediction=prediction, **counts)
    assert line(result) == {
        "bild, 2.00×": (
            "4.20 tokens a call (α 80 %); a drafter step costs 17 % of a target token (c), checking a draft "
            "1.36 tokens; time: prefill 10 %, draft 20 %, verify 60 %, host 10 %. "
            "Most would help: a drafter twice as fast (8.5 %), 2.22×."
        )
    }


def test_another_window_is_named_beside_what_needs_another_drafter():
    rates = {"acceptance_by_position": [0.5] * 8, "accepted_by_depth": [0.5**depth for depth in range(1, 9)]}
    prediction = {**sample_prediction("speculative", {"window": 8}, 1.2, 0.5), "prefill": 1.2}
    own = {**rates, "acceptance_rate": 0.5, "drafted": 800, "prediction": prediction, "stages_s": STAGES}
    (text,) = line(sample_result("speculative", {"window": 8}, 1.2, **own)).values()
    assert "Most would help: half as many rejections (α 75 %), " in text
    assert text.endswith("; window 3 alone, 1.37×.")


def test_methods_that_draft_nothing_are_told_by_their_own_measure():
    calm = sample_result("calm", {}, 1.1, exit_layer_mean=3.42, stages_s={**STAGES, "prefill": 0.3, "draft": 0.0})
    assert line(calm)["calm, 1.10×"].startswith(
        "a token leaves after 3.4 layers on average; time: prefill 30 %, verify"
    )
    pipeline = {"match_rate": 0.5, "latency_units": 4.6, "compute_units": 9.0, "predicted_latency_units": 4.5}
    pipeline |= {"predicted_compute_units": 9.1, "layers": 6, "exit_layer": 3, "theorem": 1.33}
    ppd = sample_result("ppd", {}, 1.1, pipeline=pipeline, stages_s=STAGES)
    assert line(ppd)["ppd, 1.10×"].startswith("50 % of the predictions right, for which Theorem 4.1 gives 1.33×; time:")
    assert line(ppd)["ppd, 1.10×"].endswith("Most would help: half as many wrong predictions (75 % right), 1.27×.")


@pytest.mark.parametrize("stages", [None, {"prefill": 1.0, "draft": 0.0, "verify": 0.0, "host": 0.0}])
def test_nothing_is_said_to_help_where_nothing_would(stages):
    lines = line(sample_baseline(), sample_result("bild", {}, 1.5, stages_s=stages))
    assert list(lines.values()) == (
        [] if stages is None else ["time: prefill 100 %. No part of it, made cheaper, would help."]
    )
