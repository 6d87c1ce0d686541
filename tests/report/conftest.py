"""A browser without a network, to see what a page does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dom_of() -> Callable[[Path, str], str]:
    """Return a page's DOM after a browser of a width in pixels ran it, and then a script."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium, which is not installed")

    def dom(page: Path, script: str = "", width: int = 1280) -> str:
        page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=4000",
            "--dump-dom",
        ]
        options.append(f"--window-size={width},900")
        done = subprocess.run(
            [program, *options, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    return dom
