"""Tests of the Pareto front and of the best point at a given loss."""

from bild_lab.lab.schema.statistics import best_at_loss, pareto_front
from tests.report.sample import sample_baseline, sample_result, sample_sweep, with_quality


def test_identical_points_are_all_on_the_front_in_their_order():
    assert pareto_front([(1.0, 10.0), (2.0, 9.0), (1.0, 10.0)]) == [0, 2]


def test_front_agrees_with_comparing_every_pair():
    points = [((7 * i) % 11 / 10, (5 * i) % 13 / 10) for i in range(40)] + [
        (0.0, 0.3),
        (0.0, 0.4),
        (0.05, 0.4),
    ]

    def dominated(one):
        return any(a[0] <= one[0] and a[1] >= one[1] and a != one for a in points)

    front = pareto_front(points)
    assert sorted(front) == [i for i, one in enumerate(points) if not dominated(one)]
    assert [points[i] for i in front] == sorted(points[i] for i in front)  # cheapest first
    assert pareto_front([]) == []


def test_best_at_no_loss_is_the_fastest_at_least_as_good_as_the_baseline():
    best = best_at_loss(sample_sweep(), 0.0)
    assert (best.speedup.value, best.quality.value) == (1.55, 41.05)


def test_best_at_one_point_of_loss_may_be_one_point_worse_but_not_more():
    results = [
        sample_result("bild", {"rollback": 1}, 1.5, -1.0),
        sample_result("bild", {"rollback": 9}, 1.9, -1.01),
    ]
    assert best_at_loss(results, 1.0) is results[0]


def test_best_compares_each_result_with_the_baseline_of_its_own_setting():
    easy = sample_result("bild", {"rollback": 1}, 1.2, 0.0, setting={"dataset": "easy"})
    easy = with_quality(easy, value=10.0, baseline=9.0)
    assert best_at_loss([easy, sample_result("bild", {}, 1.1, 0.0)], 0.0) is easy


def test_the_baseline_and_results_without_one_are_no_candidates():
    assert best_at_loss([sample_baseline()], 5.0) is None
    assert best_at_loss([sample_result("bild", {}, 1.5, empty=1.0)], 5.0) is None
    alone = with_quality(sample_result("bild", {}, None, setting={"baseline": None}), baseline=None)
    assert best_at_loss([alone], 5.0) is None


def test_rounding_in_the_last_bit_is_no_loss():
    result = sample_result("bild", {}, 1.5, -1e-12)
    assert best_at_loss([result], 0.0) is result


def test_among_equally_fast_results_the_better_one_is_the_best():
    results = [sample_result("bild", {"rollback": at}, 1.5, at / 10) for at in (1, 3, 2)]
    assert best_at_loss(results, 0.0) is results[1]
