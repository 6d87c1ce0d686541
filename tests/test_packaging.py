"""An installed package holds every folder of the source."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "bild_lab").rglob("*.py")}
    assert sorted(set(listed) - {"bild_lab.conf"}) == sorted(".".join(folder.parts) for folder in folders)
