"""What all pages share: their templates, plotly.js, and the look of its figures.

A figure is what plotly.js reads: {"data": traces, "layout": …}. `plotly/` holds the library's basic
bundle (scatter, bar and pie), compressed: the file of the npm package plotly.js-basic-dist-min
4.1.1, a quarter of the whole library. Colours of text and grid follow the page's scheme, in
`report.css`.
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bild_lab.report.style import MUTED

Figure = dict[str, Any]
Trace = dict[str, Any]

HOVER = "%{text}<extra></extra>"  # a trace's texts, as a mouse over its marks shows them

_HERE = Path(__file__).parent
_LIBRARY = _HERE / "plotly" / "plotly-basic.min.js.gz"
_CLEAR = "rgba(0,0,0,0)"
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
_LEGEND = {
    "orientation": "h",
    "traceorder": "normal",
    "yref": "container",
    "yanchor": "bottom",
    "y": 0.01,
    "x": 0,
}


def page_environment() -> Environment:
    """The templates of the package's pages. They escape every value."""
    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def plotly_js() -> Markup:
    """The source of plotly.js, about 1.2 MB.

    No part of it comes from a result, so it is not escaped.
    """
    return Markup(gzip.decompress(_LIBRARY.read_bytes()).decode())


def escape(text: str) -> str:
    """A text without markup for a figure. plotly.js does not know `&quot;`, so quotes stay."""
    return html.escape(text, quote=False)


def scatter(places: Iterable[tuple[Any, Any]], mode: str, **look: Any) -> Trace:
    """A trace through these places, of x and y. look: its other attributes."""
    x, y = zip(*places, strict=True) if (places := list(places)) else ((), ())
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **look}


def error_bars(ends: Sequence[tuple[float, float, float]], colour: str) -> dict[str, Any]:
    """Bars around values, each given as its lower end, the value and its upper end."""
    look = {"type": "data", "symmetric": False, "thickness": 1.1, "width": 0, "color": colour}
    above = [high - value for _, value, high in ends]
    return {**look, "array": above, "arrayminus": [value - low for low, value, _ in ends]}


def figure_of(traces: Sequence[Trace], layout: Mapping[str, Any], height: int) -> Figure:
    """A figure with the page's margins and legend. layout: what it adds; its axes are merged with
    the page's.

    The title of an axis is a text.
    """
    look = {
        "height": height,
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"size": 12.5, "family": _FONT},
        "margin": {"l": 24, "r": 16, "t": 56, "b": 24},
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "modebar": {"bgcolor": _CLEAR, "color": MUTED, "activecolor": MUTED},
        "legend": _LEGEND,
        "showlegend": True,
        **{key: value for key, value in layout.items() if not key.startswith(("xaxis", "yaxis"))},
    }
    for name in {"xaxis": {}, "yaxis": {}, **layout}:
        if name.startswith(("xaxis", "yaxis")):
            axis = dict(layout.get(name, {}))
            title = {"text": axis.pop("title", ""), "standoff": 12}
            look[name] = {"zeroline": False, "automargin": True, "title": title, **axis}
    return {"data": list(traces), "layout": look}
