"""Colours and markers of policies, the same in every figure.

Okabe and Ito's colour-blind safe set, with orange and sky blue darker: every colour stands out from a white and from a
dark page by 3 to 1.
"""

from dataclasses import dataclass

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97F00", "#2E93CC")
_MARKERS = (("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down"))

INK = "#1c1e21"
MUTED = "#777c86"
HAIRLINE = "#e5e7eb"
STAGE_COLOURS = {"prefill": "#8A8A8A", "draft": "#2E93CC", "verify": "#0072B2", "host": "#B97F00"}

FIGURE_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


@dataclass(frozen=True)
class Mark:
    """How one policy is drawn."""

    colour: str
    marker: str
    plotly_symbol: str


def marks(policies: list[str]) -> dict[str, Mark]:
    """Give each policy its colour and marker; no two of thirty policies get the same pair."""
    return {
        policy: Mark(COLOURS[index % len(COLOURS)], *_MARKERS[index % len(_MARKERS)])
        for index, policy in enumerate(policies)
    }
