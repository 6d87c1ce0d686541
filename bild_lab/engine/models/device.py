"""The device that a configuration names, and the precisions that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bild_lab.errors import UserError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}

SHORT_DTYPES = {
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def resolve_device(name: str) -> torch.device:
    """The device with this name; `auto` is the GPU if there is one.

    Raises UserError for an unusable device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        requirement = (
            f"runtime.device must be auto, cpu, or an accelerator that is there, got {name!r}"
        )
        if meant := _meant(name):
            raise UserError(f"{requirement}; did you mean {meant}?") from error
        raise UserError(
            f"{requirement}: {str(error).splitlines()[0].partition('. ')[0]}"
        ) from error
    return device


def _meant(name: str) -> str:
    """The device in PyTorch's words, such as cuda:0 for gpu0; empty if the name is PyTorch's
    already, or no device.
    """
    match = re.fullmatch(r"(auto|cpu|mps|cuda|gpu|nvidia)\W?(\d*)", str(name).strip().lower())
    if match is None:
        return ""
    kind = {"gpu": "cuda", "nvidia": "cuda"}.get(match[1], match[1])
    meant = f"{kind}:{match[2]}" if match[2] else kind
    return "" if meant == name else meant


@contextmanager
def within_memory(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Turn running out of memory in the block, on a GPU or a CPU, into a UserError.

    what: the thing that does not fit, as its keys. remedy: which key to change.
    """
    try:
        yield
    except RuntimeError as error:  # PyTorch has an error of its own for GPUs alone
        if "not enough memory" not in str(error) and not isinstance(
            error.__cause__ or error, torch.OutOfMemoryError
        ):
            raise
        raise UserError(f"{what} does not fit into the memory of {device}; {remedy}") from error


def processor(*fields: str) -> str:
    """The lines of these fields in /proc/cpuinfo, each once, in order; nothing on systems without
    it.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))
