"""Heat maps hold every point of a policy with two knobs at the place of its values."""

from __future__ import annotations

from bild_lab.lab.results.groups import by_setting
from bild_lab.report.page.heat import heat_maps
from tests.report.sample import sample_baseline, sample_result, sample_sweep


def test_each_point_is_in_the_cell_of_its_knobs() -> None:
    (group,) = by_setting(sample_sweep())
    (bild,) = heat_maps(group)  # speculative has one knob with several values
    assert bild["policy"] == "bild"
    assert bild["knobs"] == [
        {"name": "fallback", "values": ["0.3", "0.5", "0.9"]},
        {"name": "rollback", "values": ["0.69", "1", "2", "5"]},
    ]
    assert sorted(tuple(point["at"]) for point in bild["points"]) == [(a, b) for a in range(3) for b in range(4)]
    values = {tuple(point["at"]): point["values"] for point in bild["points"]}
    assert values[0, 3] == [1.83, -1.31]
    assert [one["title"] for one in bild["shown"]] == ["Speedup", "BLEU, difference from vanilla"]


def test_values_are_in_order_whatever_they_are() -> None:
    knobs = [(10, "entropy"), (2, "margin"), ("inf", "margin")]
    results = [sample_result("calm", {"limit": limit, "measure": how}, 1.2) for limit, how in knobs]
    (group,) = by_setting([sample_baseline(), *results])
    (only,) = heat_maps(group)
    assert [knob["values"] for knob in only["knobs"]] == [["2", "10", "\u221e"], ["entropy", "margin"]]


def test_without_a_baseline_maps_show_latency_and_quality() -> None:
    results = [
        sample_result("bild", {"fallback": f, "rollback": r}, None, setting={"baseline": None})
        for f, r in ((0.3, 1), (0.5, 2))
    ]
    (group,) = by_setting(results)
    (only,) = heat_maps(group)
    assert [one["title"] for one in only["shown"]] == ["Latency, ms", "BLEU"]
    assert only["points"][0]["values"] == [110.0, 41.0]
