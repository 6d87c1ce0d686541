"""The figures beside quality against latency hold the numbers that were measured, and nothing where
there are none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bild_lab.lab.metrics.quality import Difference
from bild_lab.lab.schema.examples import read_certificates
from bild_lab.lab.schema.numbers import Speedup
from bild_lab.lab.schema.result import Result
from bild_lab.lab.store.batch_curves import batch_curves
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from bild_lab.report.matching import MatchedPoint
from bild_lab.report.page import figures
from bild_lab.report.page.tables import batch_table
from bild_lab.report.paired_comparison import MetricComparison, PointComparison
from bild_lab.report.style import COLOURS, MUTED, marks
from tests.report.sample import (
    sample_baseline,
    sample_drafted,
    sample_example,
    sample_result,
    with_speedup,
)

BY_ROWS = {"verdict": "numerical tie", "gap": 1e-3, "margin": 2e-4, "wide_gap": -1e-3}
OTHER_TIE = {**BY_ROWS, "wide_gap": 1e-3}
DEFECT = {"verdict": "defect", "gap": 0.5, "margin": 0.4, "wide_gap": 0.5}
SESSION = {"verdict": "defect of the model's session", "gap": 1e-3, "margin": 9.0, "wide_gap": -4.0}
EQUAL = {"verdict": "equal", "margin": None}
FURTHER = {"verdict": "defect", "margin": None}  # one text goes on where the other ends
TREE = {
    "trees": [
        {"parents": [], "ranks": [], "probes": [2]},
        {"parents": [-1, 0, -1], "ranks": [0, 1, 2], "probes": [2, 1, 0, 0]},
    ],
    "acceptance": [[0.5, 0.2, 0.1], [0.4, 0.25, 0.0]],
}


def test_stage_bars_add_up_to_the_mean_latency_however_few_examples_were_traced() -> None:
    stages = {"prefill": 0.1, "draft": 0.0, "verify": 0.8, "host": 0.1}
    (group,) = by_setting([sample_baseline(stages_s=stages)])
    figure = figures.stages_figure(group)
    assert [trace["name"] for trace in figure["data"]] == ["prefill", "draft", "verify", "host"]
    assert [trace["x"][0] for trace in figure["data"]] == pytest.approx([11.0, 0.0, 88.0, 11.0])


def test_points_with_equal_labels_have_bars_of_their_own() -> None:
    twins = [
        sample_result("bild", {}, speedup, point=name)
        for speedup, name in ((1.5, "one"), (1.4, "two"))
    ]
    (group,) = by_setting(twins)
    assert figures.stages_figure(group)["data"][0]["y"] == ["bild", "bild two"]


def test_acceptance_is_drawn_in_percent_from_position_one() -> None:
    (group,) = by_setting([sample_result("bild", {}, 1.5, acceptance_by_position=[0.9, None, 0.8])])
    (trace,) = figures.acceptance_figure(group, marks(group.policies))["data"]
    assert (trace["x"], trace["y"]) == ([1, 2, 3], [90.0, None, 80.0])


def test_several_points_of_a_policy_have_lines_of_their_own() -> None:
    results = [
        sample_result("bild", {"fallback": fallback}, 1.5, loss, acceptance_by_position=[0.9])
        for fallback, loss in ((0.3, 0.0), (0.5, 0.2))
    ]
    (group,) = by_setting([sample_baseline(), *results])
    traces = figures.acceptance_figure(group, marks(group.policies))["data"]
    assert [trace["line"]["dash"] for trace in traces] == ["solid", "dash"]


def differences(tmp_path: Path, *certificates: dict[str, Any] | None) -> Any:
    """The figure of certificates as a point's folder holds them; None: a text without one."""
    examples = [sample_example(str(at), certificate=one) for at, one in enumerate(certificates)]
    folder = Sweep(tmp_path).write_point("abc", "", sample_result("bild", {}, 1.4), examples)
    return figures.divergence_figure(read_certificates(folder))


def test_differences_are_counted_by_gap_and_by_kind(tmp_path: Path) -> None:
    at_once = {**BY_ROWS, "wide_gap": 0.0}  # scored alike, beside other rows
    figure = differences(
        tmp_path, BY_ROWS, at_once, OTHER_TIE, DEFECT, SESSION, EQUAL, FURTHER, None
    )
    counted = {
        trace["name"]: {
            label: count for label, count in zip(trace["x"], trace["y"], strict=True) if count
        }
        for trace in figure["data"]
    }
    assert counted == {
        "rounding by the number of rows": {"0.0001 to 0.001": 2},
        "another tie": {"0.0001 to 0.001": 1},
        "defect": {"0.1 to 1": 1},
        "defect of the model’s session": {"1 to 10": 1},
    }


def test_speedups_are_drawn_over_the_batch() -> None:
    results = [
        sample_drafted(
            "bild",
            {},
            2.0 / batch,
            0.0,
            (0.8, 1.0),
            setting={"batch": batch},
            baseline_tokens_per_s=rate,
        )
        for batch, rate in ((1, 10.0), (4, 30.0))
    ]
    (measured,) = figures.batch_figure(batch_curves(results), marks(["bild"]))["data"]
    assert (measured["x"], measured["y"]) == ([1, 4], [2.0, 0.5])
    assert measured["error_y"]["array"] == pytest.approx([0.05, 0.05])


def test_the_numbers_of_batches_sort_by_their_size() -> None:
    rates = {batch: {"tokens_per_s": rate} for batch, rate in ((1, 987.0), (4, 1234.0))}
    rates[4]["baseline_tokens_per_s"] = 617.0
    results = [
        sample_drafted("bild", {}, 2.0, 0.0, (0.8, 1.0), setting={"batch": batch}, **own)
        for batch, own in rates.items()
    ]
    table = batch_table(batch_curves(results))
    titles = [column.title for column in table.columns]
    cells = [row.cells[titles.index("tokens/s")] for row in table.rows]
    assert [(cell.text, cell.order) for cell in cells] == [("987", 987.0), ("1,234", 1234.0)]
    last = dict(zip(titles, (cell.text for cell in table.rows[1].cells), strict=True))
    seconds = [last[title] for title in ("median latency, ms", "p95, ms")]
    assert (last["baseline, tokens/s"], seconds) == ("617", ["51", "94"])


@pytest.mark.parametrize(("noise", "told"), [(0.01, "none up to 4"), (None, "not known")])
def test_a_curve_that_stays_faster_breaks_even_at_none_of_its_batches(
    noise: float | None, told: str
) -> None:
    """Where the clock of batches is known."""
    results = [
        with_speedup(
            sample_drafted("bild", {}, 2.0, 0.0, (0.8, 1.0), setting={"batch": batch}), noise=noise
        )
        for batch in (1, 4)
    ]
    table = batch_table(batch_curves(results))
    place = [column.title for column in table.columns].index("break-even batch")
    assert {row.cells[place].text for row in table.rows} == {told}


def test_a_batch_without_a_speedup_has_no_mark() -> None:
    results = [
        sample_drafted("bild", {}, 2.0, 0.0, (0.8, 1.0), setting={"batch": batch})
        for batch in (1, 2, 4)
    ]
    results[1] = with_speedup(results[1], value=None, low=None, high=None)
    (drawn,) = figures.batch_figure(batch_curves(results), marks(["bild"]))["data"]
    assert drawn["x"] == [1, 4]


def test_a_node_lies_beside_the_middle_between_its_first_and_its_last_child() -> None:
    assert figures._heights([0, 0, 0, 1, 1]) == [1.75, 0.5, 2.0, 3.0, 0.0, 1.0]


def fitted() -> Result:
    facts = {"pair": "first", "aligned": False, "acceptance": None, "trained": {"tree": TREE}}
    return sample_result("medusa", {"heads": "any", "tree": "auto", "top_k": 3}, 1.3, facts=facts)


def test_a_fitted_tree_has_every_node_with_rank_masks_and_chances() -> None:
    (group,) = by_setting([fitted(), sample_baseline()])
    ((_, content),) = figures.fitted_trees(group)
    figure = figures.tree_figure("medusa", content)
    assert figure["layout"]["title"]["text"] == "medusa: 7 rows"  # four nodes and three masks
    lines, nodes = figure["data"]
    assert [text.strip() for text in nodes["text"]] == ["+2", "1 +1", "2", "3"]
    assert nodes["x"] == [0, 1, 2, 1] and len(set(zip(nodes["x"], nodes["y"], strict=True))) == 4
    assert (
        "right in 25 %" in nodes["hovertext"][2]
        and "accepted in 12 % of all rounds" in nodes["hovertext"][2]
    )
    # a quarter of the area
    assert nodes["marker"]["size"][2] == pytest.approx(nodes["marker"]["size"][1] / 2)
    assert lines["x"] == [0, 1, None, 1, 2, None, 0, 1, None]


def compared(
    latency: tuple | None = (0.8, 0.7, 0.9), quality: tuple | None = (0.5, 0.1, 0.9, 0.01)
) -> PointComparison:
    result, unknown = sample_result("bild", {}, 1.5), (Speedup(), Speedup())
    ratio = None if latency is None else Speedup(*latency)
    difference = None if quality is None else Difference("BLEU", *quality)
    judged = (MetricComparison("BLEU", (None, None), difference),)
    own = {
        "n_examples": 3,
        "n_decoded": (3, 3),
        "speedups": unknown,
        "not_compared_reason": None,
        "metric_comparisons": judged,
    }
    return PointComparison(
        MatchedPoint(result, result, {}), **own, latency_ratio=ratio, baseline_latency_ratio=None
    )


def test_a_comparison_has_both_intervals_of_every_point_in_the_colour_of_its_verdict() -> None:
    several = [
        compared(),
        compared((1.3, 1.2, 1.5), (-2.0, -3.0, -1.0, 0.001)),
        compared((1.0, 0.9, 1.1), (0.1, -1, 1, 0.8)),
    ]
    both = figures.comparison_figures(several, ["one", "two", "three"])
    speeds, qualities = (figure["data"] for figure in both)
    for traces in (speeds, qualities):
        assert [trace["marker"]["color"] for trace in traces] == [COLOURS[0], COLOURS[1], MUTED]
        assert [trace["y"] for trace in traces] == [[0], [1], [2]]
    assert speeds[0]["text"] == ["0.800 [0.700, 0.900]: faster"]
    assert qualities[1]["text"] == ["−2.00 [−3.00, −1.00]: worse"]
    assert both[0]["layout"]["yaxis"]["ticktext"] == ["one", "two", "three"]
