"""Figures of the pages, as plotly.js reads them: {"data": traces, "layout": …}.

`plotly/` holds the library's basic bundle (scatter, bar and pie), compressed: the file of the npm package
plotly.js-basic-dist-min 4.1.1, a quarter of the whole library. Colours of text and grid follow the page's scheme.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bild_lab.report.style import MUTED

Figure = dict[str, Any]
Trace = dict[str, Any]

_LIBRARY = Path(__file__).parent / "plotly" / "plotly-basic.min.js.gz"
_CLEAR = "rgba(0,0,0,0)"


def plotly_js() -> str:
    """The source of plotly.js, about 1.2 MB."""
    return gzip.decompress(_LIBRARY.read_bytes()).decode()


def figure_of(traces: Sequence[Trace], layout: Mapping[str, Any], height: int) -> Figure:
    """A figure with the page's margins and legend. layout: what it adds; its axes are merged with the page's."""
    font = {"size": 13}
    look = {
        "height": height,
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "margin": {"l": 64, "r": 84, "t": 64, "b": 96},
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "modebar": {"bgcolor": _CLEAR, "color": MUTED, "activecolor": MUTED},
        "legend": {"orientation": "h", "yref": "container", "yanchor": "bottom", "y": 0.01, "x": 0},
        "showlegend": True,
        **{key: value for key, value in layout.items() if not key.startswith(("xaxis", "yaxis"))},
    }
    for name in {"xaxis": {}, "yaxis": {}, **layout}:
        if name.startswith(("xaxis", "yaxis")):
            own = dict(layout.get(name, {}))
            title = {"text": own.pop("title", ""), "standoff": 12, "font": font}
            look[name] = {"zeroline": False, "title": title, **own}
    return {"data": list(traces), "layout": look}
