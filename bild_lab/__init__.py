"""bild_lab: experiments in fast decoding of transformers."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bild_lab.lab.application import run
    from bild_lab.lab.point.decoder import Decoder, Generation
    from bild_lab.lab.point.load import load
    from bild_lab.lab.store.table import load_results

try:
    __version__ = version("bild_lab")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0.1.0"

# PyTorch asks Linux for huge pages for what it holds of large tensors, if it has been told so before
# the first: each token reads all weights, and with small pages it waits for their addresses too
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# NVIDIA's containers set it, and PyTorch reads it when it is imported: on a GPU it would multiply
# float32 with fewer digits
os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)

_MODULES = {
    "Decoder": "point.decoder",
    "Generation": "point.decoder",
    "load": "point.load",
    "load_results": "store.table",
    "run": "application",
}
__all__ = ["Decoder", "Generation", "load", "load_results", "run"]


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})


if not TYPE_CHECKING:  # else a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        """Import torch and transformers only when decoding is asked for; reading results needs
        neither.
        """
        if name in _MODULES:
            return getattr(import_module(f"bild_lab.lab.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'bild_lab' has no attribute {name!r}")
