"""The kernels as a library: compiled once for each machine, then loaded from a cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bild_lab.engine.models.device import processor
from bild_lab.files import cache_folder, holding

if TYPE_CHECKING:
    from bild_lab.engine.session import LoadedModel

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
# the parameter: else one query's products may be fused where those of four are not, and round
# otherwise
FLAGS = (
    "-std=gnu++20",
    "-O3",
    "-march=native",
    "--param=avoid-fma-max-bits=0",
    "-fopenmp",
    "-fPIC",
    "-Wno-psabi",
)
LEAST_GCC = 12  # the first with the vector extensions
# functions that return a number, 0 if they could run
CHECKED = ("run", "draft_chains", "grow_trees", "draft_by_parents")
PRECISIONS = (torch.float32, torch.bfloat16)


def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run here in this precision, or None if they can.

    Compiles them if need be.
    """
    if device.type != "cpu" or dtype not in PRECISIONS:
        return (
            f"they run float32 and bfloat16 on a CPU, not {str(dtype).removeprefix('torch.')} on"
            f" {device.type}"
        )
    return _why_no_library()


def runs_by_cpu_kernels(target: LoadedModel, dtype: torch.dtype) -> bool:
    """Whether what drafts beside a target, in this precision, runs by these kernels too."""
    return target.engine == "kernels" and target.device.type == "cpu" and dtype in PRECISIONS


@lru_cache(maxsize=1)
def _why_no_library() -> str | None:
    try:
        library()
    except KernelError as error:
        log.warning("PyTorch runs the decoders, as the faster CPU kernels are missing: %s", error)
        return str(error)
    return None


class KernelError(Exception):
    """The kernels cannot be compiled or loaded here."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded kernels. Raises KernelError if they cannot be compiled or loaded."""
    path = _compiled()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path} cannot be loaded: {error}") from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, arguments in {
        "run": [pointer] * 2,
        "draft_chains": [pointer] * 3,
        "grow_trees": [pointer] * 3,
        "most_likely_tokens": [pointer, pointer, integer, integer, integer, pointer, pointer],
        "draft_by_parents": [pointer, pointer, pointer, integer, ctypes.c_int64, integer, pointer],
        "read_all": [pointer, ctypes.c_int64, integer],
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, integer if name in CHECKED else None
    # GNU OpenMP would wait for threads that a forked process does not have. PyTorch's own workers,
    # of data loaders, have one thread too.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    return loaded


def _compiled() -> Path:
    """The library's file, named by everything that decides its content."""
    compiler, runtime = _compiler(), _openmp()
    seen_by_compiler = processor("model name", "flags", "Features")
    sources = [
        file.read_text(encoding="utf-8") for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
    ]
    decisive = (
        *sources,
        " ".join(FLAGS),
        _answer(compiler, "--version"),
        str(runtime),
        seen_by_compiler,
    )
    name = hashlib.sha256("\0".join(decisive).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    path = folder / f"{name}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with holding(Path(f"{path}.lock"), patience_s=-1):
                if not path.exists():
                    _compile(compiler, runtime, path)
    except OSError as error:
        raise KernelError(
            f"{folder} cannot be written: {error}; export BILD_LAB_CACHE=DIR names another folder"
        ) from error
    return path


def _compile(compiler: str, runtime: Path, path: Path) -> None:
    """Compile and link against PyTorch's own OpenMP: two pools of threads would wait for the same
    cores.
    """
    log.warning("compiling the CPU kernels, once for this machine, about 15 seconds")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, linked = (Path(folder) / f"kernels.{suffix}" for suffix in ("o", "so"))
        _answer(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(objects))
        _answer(compiler, "-shared", str(objects), str(runtime), "-o", str(linked))
        linked.replace(path)


def _compiler() -> str:
    """The C++ compiler: `$CXX`, else g++. Raises KernelError if there is none that can compile the
    kernels.
    """
    if sys.platform != "linux":
        raise KernelError(f"they are compiled on Linux only, not on {platform.system()}")
    named = os.environ.get("CXX")
    compiler = shutil.which(named or "g++")
    if compiler is None:
        corrected = f", or let CXX name a program, got CXX={named}" if named else ""
        raise KernelError(f"there is no C++ compiler; install g++{corrected}")
    version = _answer(compiler, "-dumpversion").partition(".")[0]
    if not version.isdigit() or int(version) < LEAST_GCC:
        raise KernelError(f"they need g++ {LEAST_GCC} or newer, {compiler} is version {version}")
    return compiler


def _openmp() -> Path:
    """The OpenMP library that PyTorch has loaded."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    path = next((line.split(maxsplit=5)[5] for line in lines if "libgomp" in line), None)
    if path is None:
        raise KernelError("PyTorch runs without GNU OpenMP")
    return Path(path)


def _answer(*command: str) -> str:
    try:
        options = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "timeout": 300}
        return subprocess.run(command, check=True, **options).stdout.strip()
    except subprocess.CalledProcessError as error:
        raise KernelError(
            f"{' '.join(command[:2])} failed: {error.stderr.strip()[-500:]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"{command[0]} failed: {error}") from error
