"""How figures are written, in whatever process."""

from __future__ import annotations

import logging
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot as plt

from bild_lab.report.style import written_figure


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
