"""The table of all policies on its page is that of the heads of conf/policy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs.hooks import keys, policies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(keys.CONF / "policy", tmp_path / "policy"))


def test_the_page_has_the_table_that_the_heads_make() -> None:
    """After a change of a head: python -m docs.hooks.policies."""
    page = policies.PAGE.read_text(encoding="utf-8")
    assert page == policies.with_table(page, policies.table())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Big Little Decoder", "# Another decoder"),
        ("| needs: draft model", "| needs: two draft models"),
        ("fallback: 0.6", "threshold: 0.6"),
    ],
)
def test_a_changed_head_or_knob_changes_the_table(folder: Path, before: str, after: str) -> None:
    file = folder / "bild.yaml"
    text = file.read_text(encoding="utf-8")
    assert before in text and policies.table(folder) == policies.table()
    file.write_text(text.replace(before, after), encoding="utf-8")
    assert policies.table(folder) != policies.table()


def test_a_new_policy_has_a_row_and_a_removed_one_has_none(folder: Path) -> None:
    (folder / "bild.yaml").rename(folder / "renamed.yaml")
    rows = policies.table(folder).splitlines()
    assert [row for row in rows if row.startswith("| `bild` |")] == []
    assert len([row for row in rows if row.startswith("| `renamed` | Big Little")]) == 1


@pytest.mark.parametrize("second", ["name: bild", "# lossless: yes | works on: any", "# needs: –"])
def test_a_head_without_its_second_line_is_named(folder: Path, second: str) -> None:
    (folder / "bild.yaml").write_text(f"# What: python run.py\n{second}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"the second line of .*bild\.yaml must be"):
        policies.table(folder)


def test_a_page_without_the_two_comments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have the lines"):
        policies.with_table("# Policies\n", "| `bild` |")
