"""Fitted trees in the HTML report: each as a small drawing, and the speed expected of every number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from bild_lab.engine.draft import ROOT
from bild_lab.engine.drafters.tree_file import trees_in
from bild_lab.engine.drafters.trees import ProbedTree
from bild_lab.lab.formatting import number, percent, point_label
from bild_lab.lab.results.groups import Group
from bild_lab.lab.schema.result import Result
from bild_lab.report.page.plots import Figure, figure_of
from bild_lab.report.style import Mark

STEP, ROW, MARGIN = 110, 22, 24  # pixels between depths, between nodes, and around
LARGEST = 9.0  # pixels, the radius of a node that is always reached


@dataclass(frozen=True)
class DrawnNode:
    """A row of the target's forward. text: its rank from 1 and its probes. title: its numbers in words."""

    x: float
    y: float
    radius: float
    text: str
    title: str


@dataclass(frozen=True)
class TreeDrawing:
    """A tree from left to right. lines: from each parent to its child, x and y of both ends."""

    label: str
    summary: str
    width: float
    height: float
    nodes: list[DrawnNode]
    lines: list[tuple[float, float, float, float]]


def fitted_trees(group: Group) -> list[tuple[Result, Mapping[str, Any]]]:
    """The selected points that drafted with a fitted tree, each with the content of its file."""
    found = ((one, ((one.facts or {}).get("trained") or {}).get("tree")) for one in group.results)
    return [(one, content) for one, content in found if content]


def tree_drawings(group: Group) -> list[TreeDrawing]:
    return [draw(point_label(one, group.knobs(one)), content) for one, content in fitted_trees(group)]


def draw(label: str, content: Mapping[str, Any]) -> TreeDrawing:
    """Draw the tree of a file for candidates of all depths. A node's area is its probability of being accepted."""
    tree, acceptance = trees_in(content)[-1], content["acceptance"]
    heights = _heights(tree)
    nodes = [_node(0, heights[0], 1.0, "", "the last committed token", tree.probes[0])]
    lines, reached = [], [1.0]
    for index, node in enumerate(tree.nodes):
        chance = acceptance[node.depth][node.rank]
        reached.append(reached[node.parent + 1] * chance)
        title = (
            f"depth {node.depth + 1}, rank {node.rank + 1}: right in {percent(chance)} behind what is right before it; "
            f"accepted in {percent(reached[-1])} of all rounds"
        )
        nodes.append(
            _node(node.depth + 1, heights[index + 1], reached[-1], str(node.rank + 1), title, tree.probes[index + 1])
        )
        parent = nodes[node.parent + 1]
        lines.append((parent.x, parent.y, nodes[-1].x, nodes[-1].y))
    chosen, costs = content["chosen"], content["costs"]
    summary = (
        f"{tree.rows} rows; expected in a mean round: {number(chosen['tokens'])} tokens in {number(chosen['ms'])} ms, "
        f"where a round of the target alone takes {number(costs['plain_ms'])} ms"
    )
    deepest = max((node.depth + 1 for node in tree.nodes), default=0)
    width, height = 2 * MARGIN + STEP * deepest + 40, 2 * MARGIN + ROW * max(heights)
    return TreeDrawing(label, summary, width, height, nodes, lines)


def budget_figure(group: Group, colours: Mapping[str, Mark]) -> Figure | None:
    """Draw the tokens per second that were expected of each number of rows; None without a fitted tree."""
    found = fitted_trees(group)
    if not found:
        return None
    traces = []
    for one, content in found:
        mark, label = colours[one.policy], escape(point_label(one, group.knobs(one)))
        budgets, chosen = content["budgets"], content["chosen"]
        traces.append(
            {
                "type": "scatter",
                "x": [each["rows"] for each in budgets],
                "y": [1000 * each["tokens"] / each["ms"] for each in budgets],
                "customdata": [f"{each['tokens']:.2f} tokens in {each['ms']:.2f} ms" for each in budgets],
                "name": label,
                "mode": "lines",
                "line": {"color": mark.colour, "width": 1.8},
                "hovertemplate": "%{x} rows: %{y:.0f} tokens/s<br>%{customdata}<extra></extra>",
            }
        )
        traces.append(
            {
                "type": "scatter",
                "x": [chosen["rows"]],
                "y": [1000 * chosen["tokens"] / chosen["ms"]],
                "name": f"{label}, chosen",
                "mode": "markers",
                "marker": {"color": mark.colour, "symbol": mark.plotly_symbol, "size": 11},
                "hovertemplate": "chosen: %{x:.1f} rows, %{y:.0f} tokens/s<extra></extra>",
            }
        )
    layout = {
        "xaxis": {"title": "Rows of the target’s forward"},
        "yaxis": {"title": "Expected tokens per second", "rangemode": "tozero"},
    }
    return figure_of(traces, layout, height=380)


def _node(depth: int, height: float, reached: float, rank: str, title: str, probes: int) -> DrawnNode:
    text = f"{rank} +{probes}" if probes else rank
    more = f"; {probes} mask{'' if probes == 1 else 's'} behind it" if probes else ""
    return DrawnNode(MARGIN + STEP * depth, MARGIN + ROW * height, max(2.0, LARGEST * reached**0.5), text, title + more)


def _heights(tree: ProbedTree) -> list[float]:
    """The place of each row from top to bottom: leaves one below the other, parents beside their children's middle."""
    children: list[list[int]] = [[] for _ in range(len(tree.nodes) + 1)]
    for index, node in enumerate(tree.nodes):
        children[node.parent - ROOT].append(index + 1)
    places = [0.0] * len(children)
    leaves = 0
    stack = [(0, False)]
    while stack:
        row, done = stack.pop()
        if done:
            places[row] = (places[children[row][0]] + places[children[row][-1]]) / 2
        elif children[row]:
            stack += [(row, True), *((child, False) for child in reversed(children[row]))]
        else:
            places[row] = leaves
            leaves += 1
    return places
