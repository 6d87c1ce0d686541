"""Tests of grouping results by setting."""

from dataclasses import replace

import pytest

from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.groups import (
    Position,
    by_setting,
    data_title,
    differing_keys,
    points_of_choice,
    setting_title,
    setting_value,
    varying_keys,
)
from bild_lab.report.phrases import quality_claim
from tests.report.sample import (
    SETTING,
    sample_baseline,
    sample_log_probability,
    sample_replayed,
    sample_result,
    sample_sweep,
    with_quality,
    with_speedup,
)


def test_results_of_different_settings_never_share_a_group():
    groups = by_setting(sample_sweep() + sample_sweep(setting={"dataset": "iwslt"}))
    assert [{result.setting.dataset for result in group.results} for group in groups] == [
        {"multi30k"},
        {"iwslt"},
    ]
    assert differing_keys(groups) == ["dataset"]
    warmer = {"decoding": {**SETTING["decoding"], "temperature": 0.7}}
    groups = by_setting(sample_sweep() + sample_sweep(setting=warmer))
    assert differing_keys(groups) == ["decoding.temperature"]
    values = [setting_value(group.setting, "decoding.temperature") for group in groups]
    assert values == [SETTING["decoding"]["temperature"], 0.7]


def test_keys_vary_if_their_values_differ_and_not_if_their_numbers_are_written_otherwise():
    first = {"temperature": 0, "window": 4, "stop": ["a"]}
    assert varying_keys([first, {"temperature": 0.0, "stop": ["a"], "batch": 2}]) == [
        "window",
        "batch",
    ]
    assert varying_keys([first]) == []


def test_a_position_is_one_over_the_speedup_and_the_paired_difference():
    result = sample_result("bild", {}, 1.6, -0.5)
    (group,) = by_setting([sample_baseline(), result])
    horizontal, vertical = (
        (1 / 1.6, 1 / (1.6 + 0.05), 1 / (1.6 - 0.05)),
        (40.5, 41.0 + (-0.5 - 0.45), 41.0),
    )
    assert group.position(result) == Position(*horizontal, *vertical)


def test_without_a_baseline_a_position_is_the_mean_latency():
    result = sample_result("bild", {}, None, setting={"baseline": None})
    (group,) = by_setting([result])
    assert (group.relative, group.position(result).x) == (False, 0.110)


def test_a_point_that_the_baseline_beats_is_not_on_the_front():
    slow = sample_result("bild", {}, 0.9, -0.2)
    (group,) = by_setting([slow])  # the baseline's own result is not in the folder
    assert group.front == []


def test_the_front_of_the_sample_sweep_trades_speed_for_quality():
    (group,) = by_setting(sample_sweep())
    front = [(result.speedup.value, result.quality.difference) for result in group.front]
    assert front == [
        (1.83, -1.31),
        (1.70, -0.74),
        (1.68, -0.42),
        (1.61, -0.12),
        (1.55, 0.05),
        (1.53, 0.21),
    ]


def test_a_label_names_the_knobs_that_vary_or_of_a_lone_point_those_that_differ_from_its_file():
    (group,) = by_setting(sample_sweep())
    knobs = {result.policy: group.knobs(result) for result in group.results}
    assert knobs["bild"] == ["fallback", "rollback"]
    assert knobs["speculative"] == ["window"]
    assert knobs["hf_assisted"] == ["window"]
    assert group.varying_knobs() == ["fallback", "rollback", "window"]


def test_a_label_of_servers_names_where_they_differ_and_a_lone_one_no_command():
    port = "llama-server -m a.gguf --port"
    knobs = [
        {"url": f"http://127.0.0.1:{number}/v1", "launch": f"{port} {number}", "body": body}
        for number, body in ((8000, None), (8001, {"n": 3}))
    ]
    first, second = (sample_result("server", values, 1.5) for values in knobs)
    (group,) = by_setting([first, second])
    assert group.label(first) == "server (url 127.0.0.1:8000, launch --port 8000, body none)"
    assert group.label(second) == "server (url 127.0.0.1:8001, launch --port 8001, body n 3)"
    (lone,) = by_setting([second])
    assert lone.label(second) == "server (url 127.0.0.1:8001, body n 3)"
    (group,) = by_setting([sample_result("answers", {"file": f"{f}/a.jsonl"}, 1.5) for f in "bc"])
    assert [group.knob_label(result) for result in group.results] == [
        "file b/a.jsonl",
        "file c/a.jsonl",
    ]


def test_a_peer_far_slower_than_the_baseline_is_beside_the_axis_and_squeezes_nothing():
    slow = [sample_result("hf_generate", {}, speedup, -0.1) for speedup in (0.04, 0.2)]
    fast = [
        sample_baseline(),
        sample_result("bild", {}, 2.0),
        sample_result("hf_assisted", {}, 0.5),
    ]
    (group,) = by_setting([*fast, *slow])
    assert [one.speedup.value for one in group.off_axis] == [0.2, 0.04] and not group.needs_log_axis
    assert group.limits()[0][1] < 2.5 and len(group.placed) == 3
    # a slow point that is better beyond chance is drawn
    better = sample_result("calm", {}, 0.2, 1.0)
    (group,) = by_setting([*fast, better])
    assert group.off_axis == [] and group.needs_log_axis
    doubtful = with_quality(better, p_value=0.057)  # though its interval leaves out 0
    (group,) = by_setting([*fast, doubtful])
    assert group.off_axis == [doubtful]
    (group,) = by_setting([fast[0], *slow])  # so is one without others
    assert group.off_axis == []


def test_the_axis_of_a_log_probability_is_as_long_as_its_differences() -> None:
    (group,) = by_setting([sample_log_probability(1.5, -0.003), sample_log_probability(1.2, 0.001)])
    bottom, top = group.limits()[1]
    assert -0.25 < bottom < -0.2415 and -0.2275 < top < -0.22


@pytest.mark.parametrize("baseline", [-0.5, -20.0])
def test_a_quality_below_zero_is_not_low_for_being_as_good_as_the_baseline(baseline):
    """As log-probabilities are, and 100 minus many edits."""
    points = [
        with_quality(
            sample_result("bild", {"fallback": place}, 1.5 + place),
            value=factor * baseline,
            baseline=baseline,
        )
        for place, factor in enumerate((1.0, 1.1, 0.3))  # the last one is better
    ]
    (group,) = by_setting(points)
    assert group.off_axis == [] and len(group.placed) == 3


def test_titles_name_models_by_their_last_part():
    (group,) = by_setting([sample_result("bild", {}, 1.5, setting={"target": "google/mt5-large"})])
    assert (
        setting_title(group.setting) == "mt5-large drafted by t5-tiny, multi30k test, 100 examples"
    )


def test_a_whole_number_is_the_same_setting_however_it_was_written():
    first = sample_result("bild", {}, 1.2, setting={"seed": 0, "threads": 2})
    second = sample_result("bild", {"window": 3}, 1.3, setting={"seed": 0.0, "threads": 2.0})
    assert len(by_setting([first, second])) == 1


def test_the_baselines_policy_with_other_knobs_is_compared_with_it():
    setting = {"baseline": "bita"}
    own = sample_result("bita", {"top_k": 4}, 1.0, setting=setting, same_as_baseline=True)
    fewer = sample_result("bita", {"top_k": 2}, 1.5, setting=setting, same_as_baseline=False)
    (group,) = by_setting(
        [with_quality(own, value=30.0), with_quality(fewer, value=29.0, baseline=30.0)]
    )
    assert (group.policies, group.baseline_quality) == (["bita"], 30.0)
    assert [
        [one.knobs["top_k"] for one in chosen] for chosen in (group.of_policy("bita"), group.front)
    ] == [[2], [2]]
    assert [one.knobs["top_k"] for one in group.notable()] == [2, 4]
    assert best_at_loss(group.results, 1.0).knobs == {"top_k": 2}
    assert best_at_loss(group.results, 0.0) is None
    assert group.position(fewer).x == 1 / 1.5


def test_points_of_half_the_quality_or_twice_the_latency_squeeze_no_axis_even_on_the_front():
    others = [sample_baseline(), sample_result("bild", {}, 1.5, -0.5)]
    poor = sample_result("typical_acceptance", {}, 3.0, -38.0)  # the fastest, so it is on the front
    lucky = with_quality(sample_result("hf_generate", {}, 0.4, 0.2), difference_low=-0.1)
    (group,) = by_setting([*others, poor, lucky])
    assert {one.policy for one in group.front} == {"typical_acceptance", "bild", "hf_generate"}
    assert {one.policy for one in group.off_axis} == {"typical_acceptance", "hf_generate"}
    (_, right), (bottom, _) = group.limits()
    assert right < 1.5 and bottom > 38


def test_a_lone_point_is_named_by_what_differs_from_its_policys_file():
    usual = {"fallback": 0.5, "rollback": 2.0, "window": 10, "verify_tail": True}
    (group,) = by_setting(
        [sample_baseline(), sample_result("bild", {**usual, "fallback": 0.4}, 1.5)]
    )
    assert group.label(group.of_policy("bild")[0]) == "bild (fallback 0.4)"
    # there is no file to compare with
    (own,) = by_setting([sample_result("users_own", {"depth": 3}, 1.5)])
    assert own.label(own.results[0]) == "users_own (depth 3)"
    pair = [sample_result("bild", {**usual, "rollback": value}, 1.5) for value in (2.0, 5.0)]
    (group,) = by_setting(pair)
    assert {group.label(one) for one in group.results} == {"bild (rollback 2)", "bild (rollback 5)"}


def test_a_quality_that_is_no_number_is_not_drawn_and_no_baseline():
    nan = float("nan")
    lost = with_quality(sample_result("bild", {}, 1.5), value=nan, baseline=nan, difference=nan)
    (group,) = by_setting([lost])
    assert (group.baseline_quality, group.front, group.placed) == (None, [], [])


def test_replayed_texts_have_no_place_in_the_plane():
    replayed = sample_replayed(difference=+5.0)
    (group,) = by_setting([replayed, *sample_sweep()])
    (without,) = by_setting(sample_sweep())
    assert group.results[-1] is replayed and group.position(replayed) is None
    assert group.front == without.front and group.limits() == without.limits()
    for loss in (0.0, 1.0):
        assert best_at_loss(group.results, loss) == best_at_loss(without.results, loss)
    (alone,) = by_setting([replayed])
    assert (alone.relative, alone.placed, alone.front) == (False, [], [])


def test_one_example_is_written_as_one() -> None:
    result = sample_result("bild", {}, 1.5, setting={"n_examples": 1})
    assert data_title(result.setting) == "multi30k test, 1 example"
    (group,) = by_setting([result])
    assert quality_claim(group, result).partition(";")[0].endswith(" on 1 example")


def test_of_a_batch_a_point_is_judged_that_says_how_far_its_clock_is_off():
    points = [
        sample_result("bild", {"fallback": place}, 1.5, setting={"batch": 8}) for place in range(2)
    ]
    (group,) = by_setting(
        [with_speedup(one, noise=noise) for one, noise in zip(points, (0.01, None), strict=True)]
    )
    assert [one.knobs["fallback"] for one in group.judged] == [0]


def test_points_of_enough_texts_are_judged_whatever_others_of_their_setting_have():
    points = [
        sample_result("bild", {"fallback": texts}, 1.5, independent_texts=texts)
        for texts in (40, 10, 30)
    ]
    (group,) = by_setting([*points, sample_replayed()])
    assert [one.counted_texts for one in group.judged] == [40, 30]


def test_a_choice_is_among_every_timed_point_and_seeds_are_none():
    seeds = [sample_result("bild", {}, 1.5, setting={"seed": seed}) for seed in range(3)]
    few = sample_result("server", {}, 9.0, independent_texts=3)
    found = points_of_choice([sample_baseline(), *seeds, few, sample_replayed()])
    assert [[one.policy for one in point] for point in found] == [["bild"] * 3, ["server"]]


def test_without_a_baseline_the_first_is_the_one_of_the_least_latency():
    points = [
        sample_result("bild", {"fallback": place}, None, setting={"baseline": None})
        for place in range(3)
    ]
    timed = [
        replace(one, latency_s=replace(one.latency_s, mean=mean_s))
        for one, mean_s in zip(points, (0.2, 0.1, 0.3), strict=True)
    ]
    (group,) = by_setting(timed)
    assert [one.knobs["fallback"] for one in group.results] == [1, 0, 2]


def test_few_of_many_results_are_the_fastest_the_best_at_each_loss_and_the_front():
    # speedup and difference of quality; the scale's small loss is one point
    places = {
        0.1: (2.0, -4.0),
        0.2: (1.8, -3.0),
        0.3: (1.6, -0.9),
        0.4: (1.2, 0.0),
        0.5: (1.1, -2.0),
    }
    points = [sample_result("bild", {"fallback": at}, *place) for at, place in places.items()]
    (group,) = by_setting([sample_baseline(), *points])
    assert group.scale.small_loss == 1.0
    notable = [one.knobs.get("fallback") for one in group.notable() if not one.is_baseline]
    assert notable == [0.1, 0.3, 0.4]
    few = [one.knobs.get("fallback") for one in group.selected(3) if not one.is_baseline]
    assert few == [0.1, 0.2, 0.3, 0.4] and group.selected(6) == group.results
