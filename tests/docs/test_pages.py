"""What the hooks make of pages, and the site as a whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="`make docs` installs it")

from docs.hooks import pages

ROOT = Path(__file__).resolve().parents[2]


def test_links_between_pages_stay_and_others_lead_to_pages_that_show_files() -> None:
    text = (
        "[a](b.md#c) [plot](results/trace.png) [code](../bild_lab/files.py)"
        " [home](../README.md#limits) [web](https://x.y)"
    )
    told = text.replace("b.md", "commands.md")
    assert (
        pages.with_links(told, "docs/start.md", "start.md")
        == "[a](commands.md#c) [plot](results/trace.png) [code](source/bild_lab/files.py.md)"
        " [home](index.md#limits) [web](https://x.y)"
    )


def test_links_of_a_file_outside_docs_lead_from_its_page() -> None:
    assert (
        pages.with_links("[a](docs/start.md) ![b](docs/results/trace.png)", "README.md", "index.md")
        == "[a](start.md) ![b](results/trace.png)"
    )
    shown = pages.with_links(
        "[a](../docs/start.md) [b](tour.ipynb)", "notebooks/README.md", "notebooks.md"
    )
    assert shown == "[a](start.md) [b](source/notebooks/tour.ipynb.md)"


def test_links_from_a_folder_go_up() -> None:
    shown = pages.with_links(
        "[a](../../conf) [b](field.md)", "docs/results/kernels.md", "results/kernels.md"
    )
    assert shown == "[a](../source/conf.md) [b](field.md)"


def test_code_and_links_to_nothing_stay_as_they_are() -> None:
    text = "```\n[a](../README.md)\n```\n[b](nowhere.md) [c](#here)"
    assert pages.with_links(text, "docs/start.md", "start.md") == text


def test_a_file_a_folder_and_a_notebook_have_pages_that_show_them(tmp_path: Path) -> None:
    shown = pages.shown_file(ROOT / "bild_lab/errors.py")
    assert (
        "# bild_lab/errors.py" in shown
        and "````python" in shown
        and "class UserError(ValueError):" in shown
    )
    assert "- `policy/bild.yaml`" in pages.shown_file(ROOT / "conf").splitlines()
    notebook = pages.shown_file(ROOT / "notebooks/tour.ipynb")
    cells = json.loads((ROOT / "notebooks/tour.ipynb").read_text())["cells"]
    assert notebook.count("```python") == sum(cell["cell_type"] == "code" for cell in cells) > 3


@pytest.mark.slow
def test_comments_in_pages_are_filled_in() -> None:
    found = {
        page.name: pages.COMMENT.findall(page.read_text()) for page in (ROOT / "docs").rglob("*.md")
    }
    assert {name: what for name, what in found.items() if what} == {
        "configuration.md": ["keys"],
        "outputs.md": ["columns", "glossary"],
    }
    assert "**Speedup**" in pages.generated("glossary")
    assert "| `speedup` | × | " in pages.generated("columns")
    assert "| `policy.rollback` |" in pages.generated("keys")


def test_a_key_without_a_meaning_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages.keys, "without_meaning", lambda: ["measure.repeats"])
    pages.generated("keys")
    assert "measure.repeats has no meaning" in caplog.text


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_takes_nothing_from_the_network(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    written = {page: page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert len(written) > 30
    loaded = re.compile(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+"
    )
    assert {
        page.name: found for page, text in written.items() if (found := loaded.findall(text))
    } == {}
