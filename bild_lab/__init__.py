"""bild_lab: experiments in fast decoding of transformers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bild_lab.lab.decoder import Decoder, Generation
    from bild_lab.lab.load import load

try:
    __version__ = version("bild_lab")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.1.0"

__all__ = ["Decoder", "Generation", "load"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when decoding is asked for."""
    if name in __all__:
        from bild_lab.lab import decoder, load

        return getattr(load if name == "load" else decoder, name)
    raise AttributeError(f"module 'bild_lab' has no attribute {name!r}")
