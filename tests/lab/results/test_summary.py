"""The numbers of a result, from timed examples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bild_lab.engine.trace import Round, Trace
from bild_lab.lab.data.examples import Example
from bild_lab.lab.measure.timing import Timed
from bild_lab.lab.results.summary import by_category, counts, speed
from bild_lab.lab.schema.result import Counts, Speedup


def timed(tokens: int, median_s: float, drafted: int = 0, accepted: int = 0) -> Timed:
    trace = Trace()
    for kept in (accepted, 0):  # two rounds, of which the second drafted nothing
        trace.rounds.append(Round(tuple(range(drafted if kept else 0)), kept, 9))
    return Timed(list(range(tokens)), [median_s, 9.0, median_s], trace)


EXAMPLES = [Example(str(index), "", "", category=name) for index, name in enumerate(["math", "stem", "math", None])]
TIMED = {
    "method": [timed(4, 1.0, drafted=4, accepted=3), timed(6, 2.0), timed(8, 3.0), timed(2, 4.0)],
    "baseline": [timed(4, 2.0), timed(6, 2.0), timed(4, 4.0), timed(2, 6.0)],
}


def test_the_ratio_of_tokens_a_second_is_the_papers_greedy_speedup() -> None:
    measured = speed(TIMED, seed=0)
    assert (measured["tokens"], measured["tokens_per_s"]) == (20, 20 / 10)
    assert measured["baseline_tokens_per_s"] == pytest.approx(16 / 14)
    assert measured["tokens_per_s_ratio"] == pytest.approx((20 / 10) / (16 / 14))
    assert measured["speedup"].value == pytest.approx(14 / 10)


def test_the_ratio_is_the_speedup_where_both_emit_the_same_tokens() -> None:
    same = {name: [several[0], several[1], several[3]] for name, several in TIMED.items()}
    measured = speed(same, seed=0)
    assert measured["tokens_per_s_ratio"] == pytest.approx(measured["speedup"].value)


def test_without_a_baseline_there_is_no_ratio() -> None:
    measured = speed({"method": TIMED["method"]}, seed=0)
    assert measured["tokens_per_s_ratio"] is None and measured["baseline_tokens_per_s"] is None
    assert measured["speedup"] == Speedup()


def test_each_category_has_the_numbers_of_its_own_examples() -> None:
    found = by_category(EXAMPLES, TIMED, seed=0)
    assert list(found) == ["math", "stem"]
    assert (found["math"].n_examples, found["stem"].n_examples) == (2, 1)
    assert found["math"].tokens == 12
    assert found["math"].tokens_per_s == 12 / 4
    assert found["math"].speedup.value == pytest.approx(6 / 4)
    assert found["math"].tokens_per_target_call == 12 / 4
    assert found["math"].acceptance_rate == 3 / 4
    assert found["stem"].acceptance_rate is None
    assert found["stem"].speedup.value == 1.0


def test_a_data_set_without_categories_has_no_numbers_by_category() -> None:
    assert by_category([Example("1", "", "")], {"method": TIMED["method"][:1]}, seed=0) is None


def test_rounds_add_up_to_counts_with_the_mean_of_what_a_method_recorded() -> None:
    one = timed(8, 1.0, drafted=4, accepted=3)
    one.trace.rounds[0] = replace(one.trace.rounds[0], stats={"exit_layer": 3})
    found = counts([one, timed(2, 1.0)])
    assert (found.drafted, found.accepted, found.target_calls, found.rollbacks) == (4, 3, 4, 1)
    assert found.tokens_per_target_call == 10 / 4
    assert found.accepted_by_depth == [0.25, 0.25, 0.25]
    assert found.exit_layer_mean == 3  # of the rounds that have one


def test_a_method_without_rounds_has_no_counts() -> None:
    assert counts([Timed([1, 2], [1.0], Trace())]) == Counts()
