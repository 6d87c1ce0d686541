"""The environment of a measurement: versions, hardware, load, and whether the device was shared."""

from __future__ import annotations

import fcntl
import gc
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from bild_lab.engine.models.device import processor
from bild_lab.errors import warn_once
from bild_lab.lab.schema.result import BUSY_PERCENT

# packages whose version can change a number
PACKAGES = ("torch", "transformers", "tokenizers", "sacrebleu", "rouge-score")


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that a reader needs to judge the timings."""
    return {
        "bild_lab": package_version("bild_lab"),
        **{name: package_version(name) for name in (*PACKAGES, "datasets")},
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "os": f"{platform.system()} {platform.release()}",
        "git": git_commit(),
        "load_average": os.getloadavg()[0],
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def peak_memory_mb(device: torch.device, device_map: str | None = None) -> float:
    """Peak memory in MB, a million bytes, since the last `DeviceUse`: of the GPUs that a target runs
    on, each at its own time, or on Linux of the process. device_map: as of `Energy`.
    """
    if device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, _gpus_of(device_map, device))) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kibibytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


POWERCAP = Path("/sys/class/powercap")  # where Linux counts the energy of the CPU's packages


class Energy:
    """The energy that a device uses, by its own counters: a GPU's (NVML), or those of the CPU's
    packages (RAPL).

    It is that of all programs on the device. Many systems let only administrators read RAPL.
    device_map: how a target is spread over all GPUs of the process, which all count then; None: on
    one device.
    """

    def __init__(
        self, device: torch.device, device_map: str | None = None, folder: Path = POWERCAP
    ) -> None:
        zones = sorted(folder.glob("intel-rapl:*/name")) if device.type == "cpu" else []
        self._zones = [
            name.parent for name in zones if name.read_text(encoding="utf-8").startswith("package")
        ]  # a package's counter holds those of its other zones
        self._gpus = [_gpu_millijoules(gpu) for gpu in _gpus_of(device_map, device)]
        self._last_counters = self._counters()

    def since(self) -> float | None:
        """Joules since the last call; None where no counter can be read."""
        earlier, self._last_counters = self._last_counters, self._counters()
        if not earlier or not self._last_counters:
            return None
        microjoules = 0
        for (now, modulus), (then, _) in zip(self._last_counters, earlier, strict=True):
            microjoules += (now - then) % modulus  # a counter begins anew behind its last value
        return microjoules / 1e6

    def _counters(self) -> list[tuple[int, int]]:
        """Microjoules so far, and the value behind each counter's last; empty unless all can be
        read.
        """
        if self._gpus:
            known = None not in self._gpus
            return [(1000 * millijoules(), 1 << 64) for millijoules in self._gpus] if known else []
        names = ("energy_uj", "max_energy_range_uj")
        with suppress(OSError, ValueError):
            values = [
                [int((zone / name).read_text(encoding="utf-8")) for name in names]
                for zone in self._zones
            ]
            return [(now, last_value + 1) for now, last_value in values]
        return []


def _gpus_of(device_map: str | None, device: torch.device) -> list[torch.device]:
    """The GPUs that a target runs on, none on a CPU. device_map: how it is spread over all GPUs of
    the process, None: on one device.
    """
    if device.type != "cuda" or device_map is None:
        return [device] if device.type == "cuda" else []
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _gpu_millijoules(device: torch.device) -> Callable[[], int] | None:
    """A GPU's counter; None without NVML's package, or on a GPU that counts no energy."""
    with suppress(Exception):  # NVML's errors come with its package
        nvml, gpu = _nvml_of(device)
        nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        return partial(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
    return None


def _nvml_of(device: torch.device) -> tuple[Any, Any]:
    """NVML's package and its handle of a GPU. Raises an error without either."""
    import pynvml

    pynvml.nvmlInit()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)


# NVML's reasons for a clock below its maximum that something is wrong with; a cap on the power is
# how many GPUs always run
SLOWED_BY = {
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware",
}


class GpuClock:
    """A GPU's clock and temperature, and what slowed it down, from the first reading to the last.

    It reads nothing without NVML's package, and on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._mhz: list[int] = []
        self._celsius: list[int] = []
        self._slowed_by: dict[str, None] = {}
        self._nvml: tuple[Any, Any] | None = None
        if device.type == "cuda":
            with suppress(Exception):  # NVML's errors come with its package
                self._nvml = _nvml_of(device)

    def read(self) -> None:
        """Read the GPU as it is now, best while it is busy."""
        if self._nvml is None:
            return
        nvml, gpu = self._nvml
        with suppress(nvml.NVMLError):
            self._mhz.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
            self._celsius.append(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            for name, words in SLOWED_BY.items():
                if reasons & getattr(nvml, name):
                    self._slowed_by[words] = None

    @property
    def facts(self) -> dict[str, Any]:
        """The lowest and the highest reading, for the environment of a result; empty without one."""
        if not self._celsius:
            return {}
        return {
            "gpu_mhz": [min(self._mhz), max(self._mhz)],
            "gpu_celsius": [min(self._celsius), max(self._celsius)],
            "gpu_slowed_by": ", ".join(self._slowed_by) or None,
        }


class OtherLoad:
    """How much CPU time others have used since this object was created: processes that do not
    belong to this run.

    helpers_s: the seconds that processes which work for this one have used so far.
    """

    def __init__(self, helpers_s: Callable[[], float] = lambda: 0.0) -> None:
        self._helpers_s = helpers_s
        self._start = self._seconds()

    def percent(self) -> float:
        """Percent of all cores' time. Other load can make short timings several times too long."""
        wall_s, busy_s, own_s = (
            now - then for now, then in zip(self._seconds(), self._start, strict=True)
        )
        cores_s = max(wall_s * (os.cpu_count() or 1), 1e-9)
        return 100 * max(0.0, busy_s - own_s) / cores_s

    def _seconds(self) -> tuple[float, float, float]:
        """Seconds so far: of the clock, busy seconds of all cores, and those of this run."""
        machine, process = psutil.cpu_times(), psutil.Process().cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)
        process_s = process.user + process.system
        return time.monotonic(), sum(machine) - idle_s, process_s + self._helpers_s()


BUSY_REMEDY = (
    "timings suffer; runtime.threads=1 suffers least, measure.quiet=120 waits for it to end"
)
LOOK_S = 2.0  # how long the load on a machine is looked at


def wait_for_quiet(limit_s: float, helpers_s: Callable[[], float] = lambda: 0.0) -> float:
    """Wait while others use more than `BUSY_PERCENT` of the machine, for so many seconds at most.

    Returns the wait.
    """
    waited_s = 0.0
    while waited_s < limit_s:
        other_load = OtherLoad(helpers_s)
        time.sleep(LOOK_S)
        if other_load.percent() <= BUSY_PERCENT:
            break
        waited_s += LOOK_S
    return waited_s


def hardware(device_map: str | None, device: torch.device) -> str:
    """The processors that a timing depends on. With a GPU the CPU counts too: at batch 1 the GPU
    waits for it.

    device_map: how a target is spread over all GPUs of the process, None: on one device.
    """
    if device.type != "cuda":
        return cpu_name()
    counts = Counter(map(torch.cuda.get_device_name, _gpus_of(device_map, device)))
    return ", ".join(
        [
            *(name if count == 1 else f"{count} x {name}" for name, count in counts.items()),
            cpu_name(),
        ]
    )


@lru_cache(maxsize=1)
def cpu_name() -> str:
    return name_in(processor("model name", "flags")) or platform.processor() or platform.machine()


def name_in(facts: str) -> str:
    """A processor's name in these lines of /proc/cpuinfo. Virtual machines give one name to several
    kinds: whether it has matrix tiles, which make rows nearly free, is said too."""
    names = [
        line.partition(":")[2].strip()
        for line in facts.splitlines()
        if line.startswith("model name")
    ]
    return "" if not names else names[0] + (" with AMX" if "amx_bf16" in facts else "")


@lru_cache(maxsize=1)
def git_commit(source: Path = Path(__file__)) -> str | None:
    """The checkout's commit, with `+` if there are uncommitted changes; None outside a checkout.

    source: a file of ours. A repository that does not have it is another project's, in whose
    environment we are installed.
    """
    folder = source.resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=5,
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


@lru_cache
def package_version(package: str) -> str | None:
    """The version of an installed package, None without it. Its metadata are read once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class DeviceUse:
    """Marks a device as used by this process, from creation to `close`, and detects other users on
    the same machine.

    All users of a device hold one shared lock, and each adds a byte to the locked file when it
    starts. The system releases the lock if a process dies. Only processes of the same user with the
    same temporary folder see each other, as in one container; where that folder is full, read-only
    or without locks, nobody is seen. `OtherLoad` measures all other load on the CPU. Peak memory
    counts from here on.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path | None = None,
        device_map: str | None = None,
    ) -> None:
        for gpu in _gpus_of(device_map, device):
            torch.cuda.reset_peak_memory_stats(gpu)
        with suppress(OSError):  # other systems keep the peak of the whole process
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self._stream: BinaryIO | None = None
        try:
            self._join(device, Path(tempfile.gettempdir()) if folder is None else folder)
        except OSError as error:
            self.close()
            warn_once(
                f"whether other points are timed on this device meanwhile is not seen ({error});"
                " export TMPDIR=DIR names a folder on a disk with locks and free space"
            )

    def _join(self, device: torch.device, folder: Path) -> None:
        """Add this process to the users of the device. Raises OSError where the folder takes no
        locked file.
        """
        name = device.type
        if name == "cuda":  # unique on this machine, whatever subset of devices the process sees
            name = f"cuda-{torch.cuda.get_device_properties(device).uuid}"
        path = folder / f"bild_lab-{os.getuid()}-{name}.lock"
        with path.with_suffix(".gate").open("w", encoding="utf-8") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)  # one process starts at a time
            self._stream = path.open("ab")
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._stream.fileno(), 0)  # no other process needs the count
                self._was_alone = True
            except BlockingIOError:
                self._was_alone = False
            fcntl.flock(self._stream, fcntl.LOCK_SH)
            self._stream.write(b".")
            self._stream.flush()
            self._arrivals = os.fstat(self._stream.fileno()).st_size

    def shared(self) -> bool | None:
        """Whether another process used the device at any time since this object was created; None
        where that is not seen.
        """
        if self._stream is None:
            return None
        return not self._was_alone or os.fstat(self._stream.fileno()).st_size != self._arrivals

    def close(self) -> None:
        """Release the device. Deleting the object also releases it."""
        if self._stream is not None:
            with suppress(OSError):  # what a full disk did not take
                self._stream.close()
            self._stream = None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from running inside a timed example."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
