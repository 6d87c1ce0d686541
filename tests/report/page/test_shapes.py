"""A fitted tree is drawn with its ranks, its chances and the speed that was expected of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.lab.schema.result import Result
from bild_lab.report.page.shapes import draw
from tests.report.page.test_html import report
from tests.report.sample import sample_baseline, sample_result

FILE = {
    "trees": [
        {"parents": [], "ranks": [], "probes": [2]},
        {"parents": [-1, 0, -1], "ranks": [0, 1, 2], "probes": [2, 1, 0, 0]},
    ],
    "acceptance": [[0.5, 0.2, 0.1], [0.4, 0.25, 0.0]],
    "budgets": [{"rows": 1, "tokens": 1.0, "ms": 2.0}, {"rows": 4, "tokens": 1.7, "ms": 2.5}],
    "chosen": {"rows": 3.5, "tokens": 1.68, "ms": 2.4},
    "costs": {"plain_ms": 2.0},
}


def fitted() -> Result:
    facts = {"pair": "first", "aligned": False, "acceptance": None, "trained": {"tree": FILE}}
    return sample_result("medusa", {"heads": "any", "tree": "auto", "top_k": 3}, 1.3, facts=facts)


def test_a_drawing_has_every_node_with_rank_masks_and_chances() -> None:
    drawing = draw("medusa", FILE)
    assert [node.text for node in drawing.nodes] == [" +2", "1 +1", "2", "3"]
    assert "right in 25 % behind what is right before it; accepted in 12 % of all rounds" in drawing.nodes[2].title
    assert drawing.nodes[2].radius == pytest.approx(drawing.nodes[1].radius / 2)  # a quarter of the area
    assert [(line[0], line[2]) for line in drawing.lines] == [(24, 134), (134, 244), (24, 134)]
    assert len({(node.x, node.y) for node in drawing.nodes}) == 4
    assert all(0 < node.x < drawing.width and 0 < node.y <= drawing.height for node in drawing.nodes)
    assert drawing.summary.startswith("7 rows; expected in a mean round: 1.68 tokens in 2.40 ms")


def test_the_report_draws_the_tree_and_the_curve(tmp_path: Path) -> None:
    page = report(tmp_path, [fitted(), sample_baseline()], [])
    assert "Trees fitted to the machine" in page.text
    assert [tag for tag, _ in page.tags].count("circle") == 4
    assert "Expected tokens per second" in (tmp_path / "report.html").read_text()
    assert [attributes["id"] for _, attributes in page.tags if attributes.get("id", "").startswith("budgets")]


def test_a_report_without_fitted_trees_says_nothing_of_them(tmp_path: Path) -> None:
    page = report(tmp_path, [sample_baseline()], [])
    assert "Trees fitted" not in page.text
