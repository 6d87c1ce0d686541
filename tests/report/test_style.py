"""How figures are written, in whatever process."""

from __future__ import annotations

import logging
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot as plt

from bild_lab.report.style import COLUMN, as_panel, paper_figure, written_figure


def test_a_figure_logs_nothing_and_leaves_matplotlib_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = matplotlib.get_backend(), dict(matplotlib.rcParams), plt.get_fignums()
    with caplog.at_level(logging.INFO):
        with written_figure(tmp_path / "mine.pdf", (3.0, 2.0)) as figure:
            figure.add_subplot().set_title("one, two")
    assert (tmp_path / "mine.pdf").read_bytes().startswith(b"%PDF") and caplog.records == []
    assert (matplotlib.get_backend(), dict(matplotlib.rcParams), plt.get_fignums()) == before
    assert logging.getLogger("fontTools").level == logging.NOTSET


@pytest.mark.parametrize("width", [COLUMN, 8.0])
def test_labels_and_a_legend_are_within_a_papers_figure_and_below_its_heading(
    width: float, tmp_path: Path
) -> None:
    """Fault: in a column the labels of speculative decoding's Figure 2 were outside."""
    with paper_figure(
        tmp_path / "mine.png", (width, 0.7 * width), "A title", "words " * 40
    ) as page:
        axes = as_panel(page.add_subplot(), "panel", xlabel="below", ylabel="beside")
        axes.plot([0, 1], [0, 1000], label="line")
        page.legend(loc="outside lower center")
    panel, legend = axes.get_tightbbox(), page.legends[0].get_window_extent()
    top = min((text.get_window_extent().y0 for text in page.texts), default=page.bbox.y1)
    assert page.bbox.x0 <= panel.x0 and panel.x1 <= page.bbox.x1
    assert page.bbox.y0 <= legend.y0 < legend.y1 <= panel.y0 < panel.y1 <= top
