"""The device and the precision that a configuration names."""

from __future__ import annotations

import torch

from bild_lab.errors import UserError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def resolve_device(name: str) -> torch.device:
    """The device with this name; `auto` is the GPU if there is one. Raises UserError for an unusable device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"runtime.device must be auto, cpu, or an accelerator that is there, got {name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return device


def resolve_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"runtime.dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
