"""The headline says no more than the intervals do, and the reasons what each policy's speedup is
made of.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bild_lab.lab.schema.formatting import interval, signed
from bild_lab.lab.schema.numbers import NonInferiority, Speedup, scale_of
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import (
    best_at_loss,
    interval_of_best,
    speedup_interval_of_best,
)
from bild_lab.lab.store.groups import by_setting
from bild_lab.report.headline import best_group, headline, headline_sentences
from bild_lab.report.phrases import reason_lines
from bild_lab.screening.rows import write_rows
from tests.report.page.test_grid import row
from tests.report.sample import (
    ENVIRONMENT,
    SETTING,
    sample_baseline,
    sample_log_probability,
    sample_prediction,
    sample_replayed,
    sample_result,
    sample_sweep,
    sample_tested_quality,
    with_quality,
    with_speedup,
)

EXACT = {"agreement_with_target": 1.0}
CHANGED = {"agreement_with_target": 0.3}
STAGES = {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "host": 0.1}


def test_what_is_certain_comes_before_what_was_only_not_seen():
    assert (
        headline(sample_sweep())
        == "bild (fallback 0.3, rollback 0.69) decodes 1.46× [1.41, 1.51] as fast as vanilla, every"
        " text the target’s own. No loss of BLEU measured: bild (fallback 0.3, rollback 1)"
        " decodes 1.55× [1.50, 1.60] as fast; BLEU +0.05, −0.40 to +0.55 on 100 examples; only 7"
        " texts differ from the target’s, too few to trust this interval. Up to one point of"
        " loss measured: bild (fallback 0.5, rollback 5) decodes 1.70× [1.65, 1.75] as fast;"
        " BLEU −0.74, −1.19 to −0.24 on 100 examples, a loss beyond chance; 66 % of the texts"
        " are the target’s own. Best of 19 points on these examples (test), which flatters them:"
        " choose on validation data, as scripts/screen.py does. Corrected for that choice"
        " (Bonferroni), bild (fallback 0.5, rollback 5) has [1.62, 1.78], BLEU [−1.45, +0.05]."
    )


def bild(speedup: float | None = 1.5, difference: float = 0.0, **changes: Any) -> Result:
    return sample_result("bild", {}, speedup, difference, **changes)


def test_a_small_loss_of_a_log_probability_is_a_hundredth_of_a_nat() -> None:
    points = [sample_log_probability(1.4, 0.0021), sample_log_probability(1.6, -0.0083)]
    words = headline([*points, sample_log_probability(2.5, -0.9)])
    assert "No loss of log-probability measured: bild (rollback 1.4) decodes 1.40×" in words
    assert "Up to 0.01 nats of loss measured: bild (rollback 1.6) decodes 1.60×" in words
    assert "log-probability −0.0083, −0.0103 to −0.0073" in words and "2.50×" not in words
    far = headline([sample_log_probability(2.5, -0.9)])
    assert "No point came within 0.01 nats of the log-probability of vanilla (−0.2315)." in far


def test_a_margin_of_a_log_probability_is_in_nats() -> None:
    tested = NonInferiority(margin=0.01, lower_bound=-0.0042, p_value=0.02, test="bootstrap")
    point = with_quality(sample_log_probability(1.6, -0.0083), non_inferiority=tested)
    assert "no worse by 0.01 nats: p = 0.020" in headline([point])
    assert scale_of("length").amount(1.0) == "1 token"  # fault: "no worse by 1 tokens"
    assert [scale_of("BLEU").amount(1.0), scale_of("length").amount(2.0)] == ["1", "2 tokens"]


def test_an_error_of_the_clock_that_is_larger_than_the_interval_is_told() -> None:
    """An interval over texts does not have the minutes in which the machine was slower."""
    words = "the clock’s error over its repeats, ±9 %, is larger than the interval"
    assert words in headline([with_speedup(bild(1.5), noise=0.09, repeats=3)])
    # relatively, as the error is: 1.55 is 3 % above 1.5
    assert "±4 %" in headline([with_speedup(bild(1.5), noise=0.04, repeats=3)])
    for noise, repeats in ((0.02, 3), (0.09, 2), (None, 1)):
        told = headline([with_speedup(bild(1.5), noise=noise, repeats=repeats)])
        assert "clock" not in told
    batch = bild(1.5, setting={"batch": 4})
    assert "clock" not in headline([with_speedup(batch, noise=0.09, repeats=3)])


def under(**environment: object) -> dict:
    return {"environment": {**ENVIRONMENT, **environment}}


def test_the_verdict_of_a_margin_stands_beside_the_interval():
    for p_value, words in (
        (0.0112, "−0.50 to +0.45 on 100 examples, no worse by 5: p = 0.011"),
        (0.344, "on 100 examples, not shown to be no worse by 5: p = 0.344"),
        (0.0001, "on 100 examples, no worse by 5: p < 0.001"),
    ):
        tested = bild(1.7, quality=sample_tested_quality(-0.05, p_value), **CHANGED)
        assert words in headline([sample_baseline(), tested])


@pytest.mark.parametrize(
    ("p_value", "high", "words"),
    [
        (0.004, -0.1, "−9.84 to −0.10 on 100 examples, a loss beyond chance; 30 %"),
        (0.3, 0.1, "−9.84 to +0.10 on 100 examples; 30 %"),
        # none of 100 answers gained and four lost: Tango's interval leaves out 0, the test does not
        (0.0567, -0.1, "−9.84 to −0.10 on 100 examples, which may be chance (p = 0.057); 30 %"),
        (0.0484, 0.1, "−9.84 to +0.10 on 100 examples, a loss beyond chance (p = 0.048); 30 %"),
    ],
)
def test_the_p_value_alone_says_what_is_beyond_chance(
    p_value: float, high: float, words: str
) -> None:
    """Fault: the interval said "beyond chance" where scripts/compare.py, by the p-value, saw no
    difference.
    """
    lost = with_quality(
        bild(1.5, -0.9, **CHANGED), difference_low=-9.84, difference_high=high, p_value=p_value
    )
    assert words in headline([lost])


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            bild(1.7, 0.1, agreement_with_target=0.9985, setting={"n_examples": 10_000}),
            "; 99.9 % of the texts",
        ),
        (
            bild(1.7, 0.1, agreement_with_target=0.99),
            "; only 1 text differs from the target’s, too few to trust",
        ),
        (
            bild(1.7, 0.1, agreement_with_target=0.93),
            "; only 7 texts differ from the target’s, too few",
        ),
        (bild(1.7, 0.1, agreement_with_target=0.92), "; 92 % of the texts are the target’s own"),
        (bild(setting={"n_examples": 20}), "bild decodes 1.50×"),
        (
            bild(**under(busy_elsewhere_percent=74.4)),
            "own: machine 74 % busy, so time it again before relying on",
        ),
        (
            bild(1.5, 0.5, **CHANGED, **under(shared_device=True)),
            "own: device shared, so time it again",
        ),
        (
            bild(baseline_empty=1.0),
            "own: every text of the baseline is empty, so neither speed nor quality says much.",
        ),
        (
            bild(baseline_loop_share=0.578),
            "own: Python between forwards is 58 % of the baseline’s time, so a model this small",
        ),
        (
            bild(engine="kernels", draft_engine="native"),
            "own: its drafter runs by native and its target by kernels, so the drafter may be slower",
        ),
        (bild(engine="kernels", draft_engine="kernels"), "target’s own. Allowing one point"),
        (bild(baseline_loop_share=0.09), "the target’s own. Allowing one point"),
        (bild(), "Allowing one point of loss finds nothing faster."),
        (bild(0.9), ": not faster than the baseline."),
        (bild(precision="Q4_K_M"), "bild (weights in Q4_K_M) decodes 1.50×"),
        (bild(precision=bild().setting.dtype), "bild decodes 1.50×"),
        (bild(1.04), ": not clearly faster, as the interval holds 1."),
        (
            bild(2.0, -0.5),
            (
                "No point kept the BLEU of vanilla (41.00). Up to one point of loss measured: bild"
                " decodes"
            ),
        ),
        (bild(2.0, -3), "No point came within one point of the BLEU of vanilla (41.00)."),
        (sample_baseline(), "Only the baseline was measured, so there is no speedup to report."),
        (
            bild(None, setting={"baseline": None}),
            "No baseline was measured, so there is no speedup to report.",
        ),
    ],
)
def test_it_says_no_more_than_was_measured(result: Result, words: str) -> None:
    assert words in headline([result])


def test_what_is_not_known_or_not_so_is_not_said() -> None:
    assert "own" not in headline([bild(1.7, 0.1, agreement_with_target=None)])
    assert "time it again" not in headline([bild()])
    assert headline([]) == "No point was measured."


@pytest.mark.parametrize("count", [1, 2, 19])
def test_few_examples_get_no_superlative(count):
    results = [
        sample_result("bild", {"fallback": fallback}, speedup, 0.5, setting={"n_examples": count})
        for fallback, speedup in ((0.3, 3.45), (0.5, 2.0))
    ]
    text = headline(results)
    examples = "1 example is" if count == 1 else f"{count} examples are"
    assert (
        text
        == f"{examples} too few to say which point is faster or better, as intervals are too narrow"
        " below 20. Measured: bild (fallback 0.3) 3.45× [3.40, 3.50], BLEU +0.50, +0.05 to"
        " +1.00, and 1 more in the table."
    )


@pytest.mark.parametrize(
    ("texts", "changes", "why"),
    [
        (3, {"streamed": {"errors": 17, "retries": 0}}, ""),  # seventeen texts never came
        # conversations of four turns
        (
            5,
            {"independent_texts": 5},
            ": 20 texts, but those of one source or conversation count once",
        ),
    ],
)
def test_texts_that_never_came_and_further_turns_are_no_examples(
    texts: int, changes: dict, why: str
) -> None:
    result = bild(setting={"n_examples": 20}, **changes)
    assert headline([result]).startswith(
        f"{texts} examples are too few to say which point is faster or better, as intervals are too"
        f" narrow below 20{why}. Measured"
    )


def test_a_point_of_too_few_texts_does_not_withhold_the_verdict_of_others() -> None:
    few = [
        sample_result("server", {"url": url}, 2.5, streamed={"errors": 97, "retries": 0})
        for url in ("http://a", "http://b", "http://c", "http://d")
    ]
    said = headline([bild(1.5), *few])
    assert said.startswith("bild decodes 1.50×") and "2.50×" not in said
    assert said.endswith(
        "Not judged, as intervals are too narrow below 20 examples: server (url a) with 3 examples,"
        " server (url b) with 3 examples, server (url c) with 3 examples and 1 more."
    )
    # it is the best of all of them, whether they could have been the best or not
    assert "Best of 5 points" in said and "(Bonferroni), bild has [" in said
    assert headline([bild(1.5), *few[:3]]).endswith("server (url c) with 3 examples.")
    assert headline([few[0]]).startswith("3 examples are too few")
    assert "Not judged" not in headline([bild(1.5)])


def test_points_that_are_not_judged_are_named_with_their_own_reason() -> None:
    """Fault: one of a hundred examples, in a batch that was timed once, had "too few examples"."""
    batch = {"setting": {"batch": 8}}
    judged = with_speedup(bild(1.5, **batch), noise=0.01)
    once = sample_result("calm", {}, 2.0, **batch)
    few = sample_result("server", {}, 2.5, streamed={"errors": 97, "retries": 0}, **batch)
    said = headline([judged, once, few])
    assert said.startswith("bild decodes 1.50×") and "2.00×" not in said and "2.50×" not in said
    assert said.endswith(
        "Not judged, as intervals are too narrow below 20 examples: server with 3 examples. Not"
        " judged, as nothing says how far the clock of their batches is off (set measure.repeats=2"
        " or more, beside a baseline): calm."
    )


@pytest.mark.parametrize(("batch", "noise"), [(8, None), (8, 0.01), (1, None)])
def test_a_batch_that_was_timed_once_gets_no_superlative(batch: int, noise: float | None) -> None:
    results = [
        sample_result("bild", {"fallback": fallback}, speedup, 0.5, setting={"batch": batch})
        for fallback, speedup in ((0.3, 3.45), (0.5, 2.0))
    ]
    timed = [replace(one, speedup=replace(one.speedup, noise=noise)) for one in results]
    text = headline(timed)
    unknown = (
        "Texts of a batch share their clock, and nothing says how far it is off: set"
        " measure.repeats=2 or more, beside a baseline. Measured: bild (fallback 0.3) 3.45×"
    )
    assert text.startswith(unknown) == (batch > 1 and noise is None)
    # more repeats would not help so few texts
    few = [replace(one, independent_texts=10) for one in timed]
    assert headline(few).startswith("10 examples are too few to say which point is faster")


def test_a_choice_is_named_with_what_to_do_instead() -> None:
    def chosen(difference: float = 0.0, split: str = "test") -> list[Result]:
        own = {**EXACT, "setting": {"split": split}}
        return [
            sample_result("bild", {"fallback": at}, 1.5, difference, **own) for at in (0.3, 0.5)
        ]

    words = "Best of 2 points on these examples (test), which flatters them: "
    assert f"{words}choose on validation data, as scripts/screen.py does. Corrected" in headline(
        chosen()
    )
    for split in ("validation", "valid", "dev"):
        said = headline(chosen(split=split))
        assert f"({split}): measure the choice on test data. Corrected" in said
    # a single point was not chosen
    assert "Best of" not in headline([sample_baseline(), chosen()[0]])
    assert "Best of" not in headline(chosen(-3.0))  # nothing was chosen


def test_points_that_were_screened_are_not_told_to_be(tmp_path: Path) -> None:
    """Fault: who has screened reads that scripts/screen.py would choose on other texts."""
    points = [
        replace(one, folder=tmp_path / "points" / one.point)
        for one in (sample_result("bild", {"fallback": at}, 1.5, **EXACT) for at in (0.3, 0.5))
    ]
    write_rows(tmp_path, [replace(row(fallback=0.3), confirmed=points[0].point)])
    said = headline(points)
    assert (
        "screen.py" not in said
        and (
            "Best of 2 points on these examples (test), which flatters it, though it was screened on"
            " validation: screen.confirmations=1 measures only the point that is chosen there."
            " Corrected"
        )
        in said
    )
    assert "scripts/screen.py does" in headline([replace(points[0], folder=None), points[1]])
    faster = with_speedup(points[1], value=2.0, low=1.9, high=2.1)  # measured beside it
    assert "scripts/screen.py does" in headline([points[0], faster])


def test_the_interval_of_a_choice_holds_for_the_best_of_all_points() -> None:
    random, count, texts = np.random.default_rng(0), 20, 400
    held = dict.fromkeys(("plain", "corrected"), 0)
    for _ in range(texts):  # equally good points, each measured with an error of one
        best = random.normal(size=count).max()
        ends = (best, best - 1.96, best + 1.96)
        held["plain"] += ends[1] <= 0 <= ends[2]
        low, high = interval_of_best(*ends, count, texts=10**6)
        held["corrected"] += low <= 0 <= high
    assert held["plain"] < 0.75 * texts and held["corrected"] >= 0.93 * texts
    few = interval_of_best(0, -1, 1, count, texts=20)
    assert few[1] == pytest.approx(3.512 * np.sqrt(20 / 19) / 1.96, rel=0.01)
    assert interval_of_best(1.5, 1.4, 1.7, 1, texts=10**7) == pytest.approx((1.4, 1.7))
    of_speedup = speedup_interval_of_best(1.5, 1.2, 1.875, count, texts=10**7)
    assert of_speedup[0] * of_speedup[1] == pytest.approx(1.5**2) and of_speedup[0] < 1.2


def test_points_of_several_sampling_seeds_are_pooled_with_an_interval_over_the_seeds() -> None:
    def sampled(temperature: float, **knobs: float) -> list[Result]:
        decoding = {**SETTING["decoding"], "temperature": temperature}
        return [
            sample_result(
                "bild", knobs, speedup, loss, setting={"seed": seed, "decoding": decoding}
            )
            for seed, (speedup, loss) in enumerate([(1.4, 0.2), (1.5, 0.0), (1.6, -0.2)])
        ]

    text = headline(sampled(1.0, fallback=0.5))
    # Student's t with two degrees of freedom: 4.303 · 0.2 / √3 in quality; of speeds the logarithms
    own = "bild (fallback 0.5) 1.50× [1.27, 1.77], BLEU 0.00 [−0.50, +0.50] (seeds 0, 1, 2)."
    assert text.startswith(
        f"Mean and 95 % interval over sampling seeds: {own} One of 3 seeds (seed 0): "
    )
    assert "Best of" not in text and "decodes 1.40×" in text
    assert "over sampling seeds" not in headline(sampled(0.0, fallback=0.5))
    two = headline([*sampled(1.0, fallback=0.5, window=4), *sampled(1.0, fallback=0.9, window=4)])
    assert "bild (fallback 0.5) 1.50×" in two and "bild (fallback 0.9) 1.50×" in two
    # the quantile for the better of two points is 6.205
    corrected = "bild (fallback 0.9) 1.50× [1.18, 1.90], BLEU 0.00 [−0.72, +0.72]"
    assert f"seeds (Bonferroni, of 2 points): {corrected}" in two
    # fault: one point with one seed beside it was among the choice in the list of runs, and not here
    (single, *_), three = sampled(1.0, fallback=0.9), sampled(1.0, fallback=0.5)
    own = "bild (fallback 0.5) 1.50× [1.18, 1.90], BLEU 0.00 [−0.72, +0.72] (seeds 0, 1, 2)."
    assert f"seeds (Bonferroni, of 2 points): {own}" in headline([*three, single])
    # two seeds have no interval: a dozen deviations would hold speeds below 0
    pair = headline(sampled(1.0, fallback=0.5)[:2])
    own = "bild (fallback 0.5) 1.45×, BLEU +0.10 (seeds 0, 1)."
    assert pair.startswith(f"Mean over sampling seeds: {own} One of 2 seeds (seed 0): ")


def test_settings_that_were_sampled_with_one_seed_have_no_mean_over_seeds() -> None:
    decoding = {**SETTING["decoding"], "temperature": 1.0}
    one_seed = [bild(setting={"draft": draft, "decoding": decoding}) for draft in ("small", "tiny")]
    assert "over sampling seeds" not in headline(one_seed)


def test_of_settings_with_several_seeds_the_best_has_the_best_mean() -> None:
    def seeds(draft: str, *speedups: float) -> list[Result]:
        return [
            sample_result("bild", {}, speedup, setting={"draft": draft, "seed": seed})
            for seed, speedup in enumerate(speedups)
        ]

    results = [*seeds("lucky", 1.0, 1.9), *seeds("good", 1.6, 1.7)]
    assert best_group(by_setting(results)).setting.draft == "good"
    assert "Best of 2 settings (draft good, seed 0): bild decodes 1.60×" in headline(results)
    assert "Best of 2 points of 2 settings (test)" in headline(results)


def test_a_setting_without_words_is_not_the_best() -> None:
    """Fault: after a first run without the prompt of its task, the headline was about that one."""
    without_words = bild(
        2.0, setting={"prompt_template": "{source}"}, baseline_empty=1.0, empty=1.0
    )
    assert best_group(by_setting([without_words, bild(1.5)])).results[0].speedup.value == 1.5


def test_a_setting_of_a_few_examples_is_not_the_best() -> None:
    few = bild(2.0, setting={"draft": "few", "n_examples": 10})
    assert best_group(by_setting([few, bild(1.5)])).setting.draft == SETTING["draft"]
    assert headline([few, bild(1.5)]).startswith("One of 2 settings (draft t5-tiny")
    # nor is one of a few texts that a server gave
    server = sample_result("server", {}, 9.0, independent_texts=3)
    faster = bild(1.6, setting={"draft": "faster"})
    assert best_group(by_setting([server, bild(1.5), faster])).setting.draft == "faster"


def test_the_best_of_many_settings_is_corrected_for_the_points_of_all() -> None:
    results = [
        sample_result("speculative", {"window": 5}, 1 + place / 100, setting={"draft": f"d{place}"})
        for place in range(12)
    ]
    said = headline(results)
    assert "Best of 12 settings (draft d11)" in said
    assert "Best of 12 points of 12 settings (test), which flatters them" in said
    # Student's t of 99 degrees of freedom for 12 points is 2.95, for one 1.98
    assert "(Bonferroni), speculative has [1.04, 1.18]" in said


def test_a_choice_is_corrected_by_the_texts_that_are_independent() -> None:
    """Of a hundred, a quarter: as conversations of four turns each are."""
    chosen = [
        sample_result("bild", {"fallback": at}, 1.5, -0.5, independent_texts=25)
        for at in (0.3, 0.5)
    ]
    wide = [with_speedup(one, low=1.2, high=1.875) for one in chosen]
    said = headline([with_quality(one, difference_low=-5.5, difference_high=4.5) for one in wide])
    speed = interval(*speedup_interval_of_best(1.5, 1.2, 1.875, 2, 25))
    loss = interval(*interval_of_best(-0.5, -5.5, 4.5, 2, 25), write=signed)
    assert f"(Bonferroni), bild (fallback 0.3) has {speed}, BLEU {loss}." in said


def line(*results):
    (group,) = by_setting(list(results))
    return dict(reason_lines(group))


def test_every_traced_policy_has_a_line_about_its_fastest_point_at_no_loss():
    assert list(line(*sample_sweep())) == [
        "bild (fallback 0.3, rollback 1), 1.55×",
        "speculative (window 4), 1.38×",
    ]


def test_a_policy_that_always_loses_is_explained_by_its_fastest_point():
    slow, fast = (
        sample_result("bild", {"fallback": speed}, speed, -0.5, stages_s=STAGES)
        for speed in (1.2, 1.7)
    )
    assert list(line(slow, fast)) == ["bild (fallback 1.7), 1.70×"]


def test_a_line_names_gains_and_costs():
    prediction = sample_prediction("bild", {}, 2.0) | {
        "rounds": 3.0,
        "host": 2.4,
        "cost_ratio": 0.169,
    }
    counts = {"tokens_per_target_call": 4.2, "acceptance_rate": 0.8, "drafted": 900}
    result = sample_result("bild", {}, 2.0, stages_s=STAGES, prediction=prediction, **counts)
    assert line(result) == {
        "bild, 2.00×": (
            "4.20 tokens a call (α 80 %); a drafter step costs 17 % of a target token (c), checking"
            " a draft 1.35 tokens; time: prefill 10 %, draft 20 %, verify 60 %, host 10 %."
        )
    }


def test_methods_that_draft_nothing_have_their_own_measure():
    calm = sample_result(
        "calm", {}, 1.1, exit_layer_mean=3.42, stages_s={**STAGES, "prefill": 0.3, "draft": 0.0}
    )
    assert line(calm)["calm, 1.10×"].startswith(
        "a token leaves after 3.4 layers on average; time: prefill 30 %, verify"
    )
    pipeline = {
        "match_rate": 0.5,
        "latency_units": 4.6,
        "compute_units": 9.0,
        "predicted_latency_units": 4.5,
    }
    pipeline |= {"predicted_compute_units": 9.1, "layers": 6, "exit_layer": 3, "theorem": 1.33}
    ppd = sample_result("ppd", {}, 1.1, pipeline=pipeline, stages_s=STAGES)
    assert line(ppd)["ppd, 1.10×"].startswith(
        "50 % of the predictions right, for which Theorem 4.1 gives 1.33×; time:"
    )


def test_a_difference_of_nothing_does_not_read_as_a_score() -> None:
    quality = {"difference": 0.0, "difference_low": 0.0, "difference_high": 0.0}
    same = bild(setting={"n_examples": 19})
    same = replace(same, quality=replace(same.quality, **quality))
    assert "[1.45, 1.55], no change in BLEU." in headline([same])


def test_a_speedup_above_tokens_per_call_is_no_number() -> None:
    def at(speedup: float, knob: float) -> Result:
        own = {
            "drafted": 3000,
            "tokens_per_target_call": 1.73,
            "tokens_per_s_ratio": speedup,
            **EXACT,
        }
        return sample_result("bild", {"fallback": knob}, speedup, **own)

    fair, wild = at(1.6, 0.5), at(4.15, 0.7)
    assert (fair.impossible, wild.impossible) == (False, True)
    (group,) = by_setting([sample_baseline(), fair, wild])
    assert group.front == [fair] and best_at_loss(group.results, 1.0) == fair
    assert headline(group.results).startswith("bild (fallback 0.5) decodes 1.60×")
    assert "4.15" not in headline(group.results)
    alone = headline([sample_baseline(), wild])
    assert (
        alone.startswith("bild (fallback 0.7) emits 1.73 tokens per call")
        and "4.15× [4.10, 4.20] is more" in alone
    )
    few = replace(fair, independent_texts=10)
    assert headline([wild, few]).startswith("10 examples are too few")
    # a text that ends earlier, another baseline, and noise are no reason
    for changed in (
        {"tokens_per_s_ratio": 1.6},
        {"setting": {"baseline": "hf_generate"}},
        {"tokens_per_target_call": 4.0},
    ):
        own = {"drafted": 3000, "tokens_per_target_call": 1.73, "tokens_per_s_ratio": 4.15}
        assert not sample_result("bild", {}, 4.15, **{**own, **changed}).impossible


def test_points_with_graphs_and_without_are_not_compared() -> None:
    """The setting with the greatest speedup is named, but not called the best: its baseline is
    another one.
    """
    graphs, plain = {"compile": "graphs"}, {"compile": "false"}
    mixed = [
        sample_result("medusa", {}, 1.5, setting=graphs),
        sample_result("bita", {}, 2.0, setting=plain),
    ]
    said = headline(mixed)
    assert (
        said.startswith("One of 2 settings (compile false): ")
        and "are not compared with each other" in said
    )
    alike = [
        sample_result("medusa", {}, 1.5, setting=plain),
        sample_result("bita", {}, 2.0, setting=plain),
    ]
    assert "not compared" not in headline(alike)


def test_where_every_point_was_timed_under_load_counts_and_their_prediction_lead_and_the_reason() -> (
    None
):
    counted = {"tokens_per_target_call": 3.3, "target_calls": 500, "acceptance_rate": 0.9}
    load = under(busy_elsewhere_percent=74.4)
    busy = bild(1.5, **EXACT, **counted, **load, prediction=sample_prediction("bild", {}, 1.5))
    first, *others = headline_sentences([sample_baseline(), busy])
    assert (
        first == "Other programs used 74 % of the machine while the point was timed, so counts come"
        " first, which no load changes: bild emits 3.30 tokens per call of the target (500"
        " forwards for 1,650 tokens, 90 % of its drafted tokens accepted), no change in BLEU."
        " With a drafter step at 17 % of a token of the target these counts predict 1.86×,"
        " before the cost of checking drafts."
    )
    assert others[0] == "Do not rely on these speedups:" and "decodes 1.50×" in others[1]
    alone = replace(bild(1.5, **counted, **load), speedup=Speedup())
    assert "Do not rely on these times:" in headline_sentences([alone])
    alone = with_quality(alone, difference=None, difference_low=None, difference_high=None)
    assert "accepted), BLEU 41.00." in headline_sentences([alone])[0]
    few = headline_sentences([bild(1.5, **counted, **load, setting={"n_examples": 2})])
    assert "1.50×" not in few[0] and "too few" in few[-1]
    idle = bild(1.4, **EXACT, **counted)
    # one of them can be relied on
    assert headline_sentences([busy, idle])[0].startswith("bild decodes 1.50×")
    ((label, _),) = reason_lines(by_setting([busy])[0])
    assert label == "bild, 1.50×, machine 74 % busy"


def test_under_load_the_counts_of_what_lost_nothing_come_before_those_of_what_may_have() -> None:
    load = under(busy_elsewhere_percent=74.4)
    points = [
        sample_result("bild", {"fallback": at}, 1.5, loss, tokens_per_target_call=tokens, **load)
        for at, loss, tokens in ((0.3, 0.0, 3.3), (0.5, -0.5, 4.1), (0.7, -1.5, 5.0))
    ]
    first, second, third = headline_sentences(points)[:3]
    assert "bild (fallback 0.3) emits 3.30" in first and "bild (fallback 0.5) emits 4.10" in second
    assert third == "Do not rely on these speedups:"


def test_points_that_were_disturbed_in_several_ways_share_no_percentage() -> None:
    busy = sample_result("bild", {"fallback": 0.3}, 1.5, **under(busy_elsewhere_percent=74.4))
    shared = sample_result("bild", {"fallback": 0.5}, 1.5, **under(shared_device=True))
    first = headline_sentences([busy, shared])[0]
    assert first.startswith("All points were timed beside other work, so counts come first")


def test_without_a_baseline_the_fastest_point_is_named() -> None:
    points = [
        sample_result("bild", {"fallback": at}, None, setting={"baseline": None})
        for at in (0.3, 0.5, 0.7)
    ]
    timed = [
        replace(one, latency_s=replace(one.latency_s, median=median_s))
        for one, median_s in zip(points, (0.2, 0.1, 0.4), strict=True)
    ]
    assert "Fastest: bild (fallback 0.5), 100.0 ms an example (median)" in headline(timed)
    few = [replace(one, independent_texts=3) for one in timed]
    assert "Measured: bild (fallback 0.5)" in headline(few)  # nothing is called the fastest
    assert "Fastest: bild (fallback 0.3)" in headline([timed[0], few[1], timed[2]])


REPLAYED = (
    "answers (file theirs.jsonl) replays texts: 97 of 100 are the target’s own, 2 numerical ties, 1"
    " defect; BLEU {}0, {}."
)


def test_replayed_texts_are_counted_and_never_called_fast_or_best() -> None:
    better = sample_replayed(+5.0)
    said = REPLAYED.format("+5.0", "+4.55 to +5.50")
    assert headline([*sample_sweep(), better]) == f"{headline(sample_sweep())} {said}"
    assert headline([better]) == said
    assert headline([better, sample_baseline()]) == f"{headline([sample_baseline()])} {said}"
    alone = sample_replayed(
        certificate=None, quality={"metric": "BLEU", "value": 40.0, "low": 39.0, "high": 41.0}
    )
    assert headline([alone]) == "answers (file theirs.jsonl) replays texts; BLEU 40.00."


def test_under_load_counts_come_first_whatever_was_replayed_beside_them() -> None:
    loaded = bild(**under(busy_elsewhere_percent=74.4))
    assert headline_sentences([loaded, sample_replayed()])[:-1] == headline_sentences([loaded])
