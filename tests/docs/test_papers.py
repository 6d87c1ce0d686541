"""The table of what the papers' items need is made of the steps that paper_run lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.papers.published import published_names
from docs.hooks import papers, policies


def rows_of_page() -> dict[str, str]:
    """The rows by their items."""
    table = papers.PAGE.read_text(encoding="utf-8").partition(papers.BEGIN)[2]
    lines = table.partition(policies.END)[0].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def test_the_page_has_a_row_for_each_item() -> None:
    assert sorted(rows_of_page()) == sorted(name.replace("_", "/", 1) for name in published_names())


@pytest.mark.slow
def test_rows_are_those_that_the_steps_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of an item: python -m docs.hooks.papers."""
    monkeypatch.chdir(tmp_path)
    for item in ("bild_fig6_7", "spec_tab5", "bita_fig8"):
        assert papers.table([item]).splitlines()[2] == rows_of_page()[item.replace("_", "/", 1)]


def test_what_does_not_run_says_why() -> None:
    step = papers.paper_steps("spec_tab5")
    assert papers.what_runs(step, 1) == "all"
    without_switch = papers.steps_of("spec_tab5", "paper")
    assert papers.what_runs(without_switch, 1).startswith("0 of ")
    assert "in pickles alone" in papers.what_runs(without_switch, 8)
