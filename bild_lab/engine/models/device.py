"""The device that a configuration names, its free memory, and the precisions that there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

from bild_lab.errors import UserError, first_line, require_whole

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
CORES = 2  # how many a process needs while it drives a GPU with the clock running
# Linux's control groups, and those that a process is in
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# by their version how they name a limit, what is used of it, and the lines of memory.stat begin
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which a precision is set, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


# variables with which libraries below PyTorch multiply float32 with fewer digits, and what else
# these may be
_FEWER_DIGITS = {
    "cpu": ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    "cuda": ("NVIDIA_TF32_OVERRIDE",),
}
_ALL_DIGITS = ("", "0", "STRICT")


def require_float32(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError where PyTorch would multiply float32 with fewer digits: with TF32 on a GPU, or
    by bfloat16 on a CPU. Results would call that float32.
    """
    if dtype != torch.float32:
        return
    on_cpu = device.type == "cpu"
    variables = _FEWER_DIGITS["cpu" if on_cpu else "cuda"]
    named = [name for name in variables if os.environ.get(name, "").upper() not in _ALL_DIGITS]
    setting, precision, highest = _matmul_precision(on_cpu)
    # high is TF32 on a GPU, and changes nothing on most CPUs
    exact = (highest, "none", *(("high", "tf32") if on_cpu else ()))
    if named:
        cause, remedy = f"{named[0]}={os.environ[named[0]]} says", f"unset {named[0]}"
    elif precision not in exact:
        cause, remedy = f"its {setting} is {precision!r}", f"set it to {highest!r}"
    else:
        return
    raise UserError(
        f"PyTorch multiplies float32 with fewer digits here, as {cause}; {remedy}, or decode in"
        " bfloat16 (runtime.dtype, train.precision)"
    )


def _matmul_precision(on_cpu: bool) -> tuple[str, str, str]:
    """PyTorch's setting for products of float32 on a device, its value, and that of all digits."""
    try:
        return "float32_matmul_precision", torch.get_float32_matmul_precision(), "highest"
    except RuntimeError:  # once any of the backends' own settings is set
        backend = "mkldnn" if on_cpu else "cuda"
        settings = getattr(torch.backends, backend).matmul
        return f"torch.backends.{backend}.matmul.fp32_precision", settings.fp32_precision, "ieee"


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        raise UserError(f"{requirement}: {first_line(error).partition('. ')[0]}") from error
    return device


def cpu_by_default() -> AbstractContextManager[Any]:
    """Inside the block tensors are made on the CPU where no device is named, whatever
    `torch.set_default_device` has said.
    """
    # a mode takes time in every call of PyTorch
    is_usual = torch.get_default_device().type == "cpu"
    return nullcontext() if is_usual else torch.device("cpu")


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them: by numbers, or by UUIDs.

    Where CUDA sees none, those that the variable names.
    """
    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, range(count)))
    names = [name.strip() for name in listed.split(",")]
    # CUDA reads the list up to the first name that is none
    names = list(takewhile(lambda name: name and not name.startswith("-"), names))
    return tuple(names[:count] if count else names)


def thread_share(processes: int) -> str:
    """The value of OMP_NUM_THREADS for each of so many processes: what it is, else an even share of
    the cores.
    """
    return os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))


def default_threads() -> int:
    """How many threads of the CPU a process takes that nobody tells: those of PyTorch, which asks
    OMP_NUM_THREADS or counts the machine's cores, as far as there are cores for them.

    Threads beyond a container's share wait for each other until the next period of its scheduler.
    """
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else min(threads, usable_cores())


def usable_cores() -> int:
    """How many cores this process may run on: those that it is bound to, within the limits of its
    container.
    """
    cores_of = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(cores_of(0)) if cores_of is not None else os.cpu_count() or 1
    return max(1, min([cores, *map(int, cores_of_groups())]))


def set_threads(threads: int | None) -> None:
    """Give PyTorch so many threads of the CPU; None: as many as it has. Raises UserError below 1."""
    if threads is not None:
        require_whole("runtime.threads", threads, 1)
        torch.set_num_threads(threads)


def few_cores(processes: int) -> str:
    """That so many processes, of which each drives a GPU, would wait for the CPU; empty where they
    do not.
    """
    cores = usable_cores()
    if processes == 1 or cores >= CORES * processes:
        return ""
    return (
        f"{cores} CPU cores for {processes} processes: what is timed side by side waits for the CPU;"
        f" fewer GPUs at once, such as {max(1, cores // CORES)}, give fairer times"
    )


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


def free_bytes(device: torch.device) -> int:
    """How much memory this process can still take: of a GPU, or of the machine within the limits of
    its container.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + kept_bytes(device)
    return max(0, min([psutil.virtual_memory().available, *free_in_groups()]))


def kept_bytes(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch keeps of freed tensors. To the driver they are taken, but new
    tensors get them, unless they lie in one piece with a tensor that is in use.
    """
    counts = torch.cuda.memory_stats(device)
    reserved, active, beside_active = (
        counts.get(f"{name}_bytes.all.current", 0)
        for name in ("reserved", "active", "inactive_split")
    )
    return reserved - active - beside_active


def free_in_groups(mounted: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[int]:
    """Bytes that are free in each control group of this process that has a limit, of version 1 or
    2. Pages of files that can be read again are free, as in `MemAvailable`.
    """
    for group, version in _groups("memory", mounted, membership):
        limit_file, used_file, prefix = MEMORY_FILES[version]
        try:
            limit, used = (int((group / name).read_text()) for name in (limit_file, used_file))
            lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            statistics = {name: int(value) for name, value in lines}
        except (OSError, ValueError):  # ValueError: the limit is the word max
            continue
        pages = (statistics.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
        yield limit - used + sum(pages)


def cores_of_groups(mounted: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[float]:
    """Seconds of the CPU in a second that each control group of this process lets it use, where it
    has a limit.
    """
    for group, version in _groups("cpu", mounted, membership):
        try:
            if version == 1:
                limit = (group / "cpu.cfs_quota_us").read_text()
                period = (group / "cpu.cfs_period_us").read_text()
            else:
                limit, period = (group / "cpu.max").read_text().split()
            cores = int(limit) / int(period)
        except (OSError, ValueError):  # ValueError: the limit is the word max
            continue
        if cores > 0:  # -1: no limit
            yield cores


def _groups(controller: str, mounted: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups that may limit what a controller counts, and
    which version they are of.

    A group's limit counts for those below it. Inside a container its own group may be the topmost
    that is seen.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mounts, version = (mounted, mounted / "unified"), 2
        elif controller in controllers.split(","):
            mounts, version = (mounted / controller,), 1
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            for folder in (path, *path.parents):
                yield mount / folder, version
