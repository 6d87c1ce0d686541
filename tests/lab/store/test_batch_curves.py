"""Curves over the batch: what belongs to one curve, where it crosses 1."""

from __future__ import annotations

import pytest

from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.batch_curves import batch_curves
from tests.report.sample import sample_replayed, sample_result


def at(batch: int, speedup: float, policy: str = "speculative", **changes: object) -> Result:
    setting = {} if batch == 1 else {"batch": batch}
    return sample_result(policy, {"window": 5}, speedup, setting=setting, **changes)


def test_points_that_differ_in_the_batch_alone_are_a_curve() -> None:
    curve, other = batch_curves(
        [
            *(at(batch, 1.0, "vanilla") for batch in (1, 4)),
            *(sample_replayed(setting=setting) for setting in ({}, {"batch": 4})),
            at(1, 1.9, "prompt_lookup"),  # at one batch alone
            *(at(1, 2.0), at(8, 1.2), at(4, 1.6)),
            *(at(1, 3.0, "bild"), at(2, 2.5, "bild")),
        ]
    )
    assert (curve.policy, other.policy) == ("speculative", "bild")
    assert (curve.label, other.label) == ("speculative", "bild")
    assert [(one.setting.batch, one.speedup.value) for one in curve.points] == [
        (1, 2.0),
        (4, 1.6),
        (8, 1.2),
    ]
    exact = sample_result(
        "speculative", {"window": 5}, 1.4, setting={"batch": 2, "dtype": "float32"}
    )
    assert batch_curves([at(1, 2.0), exact]) == []  # another precision is another curve
    knobs = [{"window": 5, "fallback": 0.5}, {"fallback": 0.5, "window": 5}]
    (one,) = batch_curves(
        [sample_result("bild", each, 1.5, setting={"batch": n}) for n, each in enumerate(knobs, 2)]
    )
    assert len(one.points) == 2  # the order of the knobs tells nothing
    other_knob = sample_result("speculative", {"window": 3}, 1.4, setting={"batch": 2})
    assert batch_curves([at(1, 2.0), other_knob]) == []
    third = sample_result("speculative", {"window": 3}, 1.2, setting={"batch": 4})
    both = batch_curves([at(1, 2.0), other_knob, at(2, 1.5), third, at(1, 3.0, "bild")])
    assert [one.label for one in both] == ["speculative (window 5)", "speculative (window 3)"]


def test_curves_of_several_settings_say_in_what_these_differ() -> None:
    seeds = [
        sample_result("bild", {}, 1.5, setting={"batch": batch, "seed": seed})
        for seed in (0, 1)
        for batch in (2, 4)
    ]
    # in what another policy's setting differs tells nothing
    other = [
        sample_result("speculative", {}, 1.2, setting={"batch": batch, "threads": 7})
        for batch in (2, 4)
    ]
    labels = [curve.label for curve in batch_curves([*seeds, *other])]
    assert labels == ["bild, seed 0", "bild, seed 1", "speculative"]
    # nor where a curve begins
    labels = [curve.label for curve in batch_curves([sample_result("bild", {}, 1.9), *seeds])]
    assert labels == ["bild, seed 0", "bild, seed 1"]


@pytest.mark.parametrize(
    ("speedups", "even"),
    [
        ({1: 2.0, 2: 1.5, 4: 0.5}, 2 * 2**0.5),  # halfway between 2 and 4, in doublings
        ({1: 2.0, 8: 1.1}, None),
        ({1: 0.9, 2: 0.8}, 1.0),
        ({1: 2.0, 2: 1.0}, 2.0),  # as fast is not faster
        ({2: 2.0, 8: 0.5, 16: 0.4}, 2 * 4 ** (2 / 3)),
        ({1: 1.5, 2: 0.9, 4: 1.2, 8: 0.8}, 4 * 2**0.5),  # for good
    ],
)
def test_the_break_even_batch_is_where_the_curve_falls_to_one_for_good(
    speedups: dict[int, float], even: float | None
) -> None:
    (curve,) = batch_curves([at(batch, value) for batch, value in speedups.items()])
    assert curve.break_even == (None if even is None else pytest.approx(even))
