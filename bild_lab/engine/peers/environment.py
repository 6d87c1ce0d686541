"""The environment that `make peers` makes: its Python, and the versions of what it has."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from bild_lab.errors import UserError

FOLDER = Path(__file__).resolve().parents[3] / ".venv-peers"


def why_no_peers() -> str | None:
    """Why the peers cannot run here, or None if they can."""
    if python().is_file():
        return None
    return f"CTranslate2 and OpenVINO run in an environment of their own, and there is none in {FOLDER}; run make peers"


def python() -> Path:
    """The environment's Python, which may be missing."""
    return FOLDER / "bin" / "python"


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of these packages in the environment. Raises UserError if it or one of them is missing."""
    if (reason := why_no_peers()) is not None:
        raise UserError(reason)
    places = [str(place) for place in FOLDER.glob("lib/python*/site-packages")]
    found = {one.name.lower(): one.version for one in distributions(path=places)}
    if missing := [name for name in names if name not in found]:
        raise UserError(f"{FOLDER} lacks {missing[0]}; remove it and run make peers")
    return {name: found[name] for name in names}
