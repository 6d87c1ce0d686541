"""What is said of the machine is true of it, and a process knows whether its device was its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from bild_lab.lab.point import environment
from bild_lab.lab.point.environment import (
    DeviceUse,
    Energy,
    GpuClock,
    OtherLoad,
    git_commit,
    name_in,
    peak_memory_mb,
    wait_for_quiet,
)


def test_another_busy_process_is_noticed_and_our_own_work_is_not() -> None:
    own = OtherLoad()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pass
    quiet = own.percent()
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        time.sleep(0.3)
        others = OtherLoad()
        time.sleep(1.0)
        loud = others.percent()
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert loud > quiet + 10  # the other half of the tests may be running too


def test_other_load_is_what_neither_we_nor_our_helpers_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([(0.0, 0.0, 0.0), (10.0, 8.0 * (os.cpu_count() or 1), 3.0)])  # wall, busy, own
    monkeypatch.setattr(OtherLoad, "_seconds", lambda self: next(seconds))
    assert OtherLoad().percent() == pytest.approx(80 - 30.0 / (os.cpu_count() or 1))


def test_seconds_of_helpers_are_ours_and_waits_for_a_disk_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Machine(NamedTuple):
        user: float = 30.0
        system: float = 10.0
        idle: float = 50.0
        iowait: float = 7.0

    own = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=3.0, system=1.0))
    monkeypatch.setattr(environment.psutil, "cpu_times", Machine)
    monkeypatch.setattr(environment.psutil, "Process", lambda: own)
    assert OtherLoad(lambda: 5.0)._seconds()[1:] == (40.0, 9.0)


@pytest.mark.parametrize(("system", "told"), [("linux", 2_000_000), ("darwin", 2_048_000_000)])
def test_the_peak_is_in_millions_of_bytes(
    system: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells it in kibibytes."""
    usage = SimpleNamespace(ru_maxrss=told)
    monkeypatch.setattr(environment.resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(environment.sys, "platform", system)
    assert peak_memory_mb(torch.device("cpu")) == 2048


@pytest.mark.parametrize(
    ("most_s", "loads", "waited_s"),
    [(120, [8], 0), (120, [60, 11, 10], 4), (6, [60, 60, 60, 60], 6), (0, [], 0)],
)
def test_a_busy_machine_is_waited_for_but_not_for_ever(
    most_s: float, loads: list[float], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(environment.time, "sleep", slept.append)
    monkeypatch.setattr(OtherLoad, "percent", lambda self: loads[len(slept) - 1])
    assert wait_for_quiet(most_s) == waited_s
    assert len(slept) == min(len(loads), most_s / 2)  # a look of two seconds each


def test_processors_of_one_name_differ_by_their_tiles() -> None:
    flags, name = "flags\t\t: fpu avx512_bf16", "model name\t: Intel(R) Xeon(R) Processor"
    assert name_in(f"{flags}\n{name}") == "Intel(R) Xeon(R) Processor"
    assert name_in(f"{flags} amx_bf16\n{name}") == "Intel(R) Xeon(R) Processor with AMX"
    assert name_in("Features\t: fp asimd") == name_in("") == ""


def test_the_commit_is_of_the_repository_that_has_our_source(tmp_path: Path) -> None:
    """An environment in another project's folder is in that project's repository, but no file of
    it.
    """
    source = tmp_path / ".venv" / "environment.py"
    source.parent.mkdir()
    source.touch()

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "--message=theirs")
    assert git_commit.__wrapped__(source) is None
    git("add", ".")
    git("commit", "--message=ours")
    assert git_commit.__wrapped__(source) == git("rev-parse", "--short", "HEAD")
    source.write_text("changed")
    assert git_commit.__wrapped__(source) == git("rev-parse", "--short", "HEAD") + "+"


CPU = torch.device("cpu")


def test_both_of_two_uses_at_once_are_shared(tmp_path: Path) -> None:
    first = DeviceUse(CPU, tmp_path)
    second = DeviceUse(CPU, tmp_path)
    assert first.shared() and second.shared()


def test_a_process_that_is_killed_leaves_the_device_free(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()

    def use_until_killed() -> None:
        use = DeviceUse(CPU, tmp_path)
        ready.set()
        go.wait()
        use.close()

    process = context.Process(target=use_until_killed)
    process.start()
    assert ready.wait(30)
    assert DeviceUse(CPU, tmp_path).shared()
    process.kill()
    process.join()
    assert not DeviceUse(CPU, tmp_path).shared()


@pytest.mark.parametrize("fault", ["no locks", "no folder", "full"])
def test_a_temporary_folder_that_takes_no_locked_file_leaves_unsaid_whether_a_device_was_shared(
    fault: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: every point failed, by a bare `No locks available`."""
    warnings: list[str] = []
    monkeypatch.setattr(environment, "warn_once", warnings.append)
    folder = tmp_path / "missing" if fault == "no folder" else tmp_path
    if fault == "no locks":
        request.getfixturevalue("no_locks")
    if fault == "full":
        (tmp_path / f"bild_lab-{os.getuid()}-cpu.lock").symlink_to("/dev/full")
        monkeypatch.setattr(environment.os, "ftruncate", lambda *_: None)
    use = DeviceUse(CPU, folder)
    assert use.shared() is None
    assert len(warnings) == 1 and "export TMPDIR=DIR" in warnings[0]
    use.close()


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems keep the peak of the whole process"
)
def test_the_peak_of_a_point_is_without_what_was_freed_before_it(tmp_path: Path) -> None:
    held = torch.ones(50_000_000)
    before = peak_memory_mb(held.device)
    del held
    assert peak_memory_mb(torch.device("cpu")) >= before
    DeviceUse(torch.device("cpu"), tmp_path).close()
    after = peak_memory_mb(torch.device("cpu"))
    assert after < before - 150
    held = torch.ones(25_000_000)
    assert after + 90 < peak_memory_mb(held.device) < before


def test_energy_is_that_of_the_packages_also_where_a_counter_begins_anew(tmp_path: Path) -> None:
    def put(zone: str, name: str, used: int | str) -> None:
        (tmp_path / zone).mkdir(exist_ok=True)
        for file, content in (
            ("name", name),
            ("energy_uj", used),
            ("max_energy_range_uj", 9_999_999),
        ):
            (tmp_path / zone / file).write_text(f"{content}\n")

    assert Energy(CPU, folder=tmp_path).since() is None
    for socket, used in enumerate((1_000_000, 9_500_000)):
        put(f"intel-rapl:{socket}", f"package-{socket}", used)
    put("intel-rapl:0:0", "core", 5)  # a part of the package
    put("intel-rapl:2", "psys", 5)  # which has the packages, too
    energy = Energy(CPU, folder=tmp_path)
    for zone, name, used in (
        ("0", "package-0", 3_000_000),
        ("1", "package-1", 500_000),
        ("0:0", "core", 900_000),
    ):
        put(f"intel-rapl:{zone}", name, used)
    assert energy.since() == pytest.approx(2.0 + 1.0)
    assert energy.since() == 0
    put("intel-rapl:1", "package-1", "denied")
    assert energy.since() is None and energy.since() is None
    put("intel-rapl:1", "package-1", 500_000)
    assert energy.since() is None and energy.since() == 0  # nothing is known of the time before


def test_the_energy_of_a_spread_target_is_that_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: of four GPUs the first one's, a quarter of it."""
    counters = [1000, 2000, 3000, 4000]  # millijoules

    def counter(device: torch.device) -> Callable[[], int] | None:
        return None if device.index in uncounted else lambda: counters[device.index or 0]

    uncounted: set[int] = set()
    monkeypatch.setattr(environment, "_gpu_millijoules", counter)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(counters))
    one = Energy(torch.device("cuda", 0))
    spread = Energy(torch.device("cuda", 0), device_map="auto")
    counters[:] = [1500, 2000, 3500, 6000]
    assert (one.since(), spread.since()) == (0.5, 3.0)
    uncounted.add(3)
    assert Energy(torch.device("cuda", 0), device_map="auto").since() is None


def test_the_memory_of_a_spread_target_is_that_of_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {0: 3e6, 1: 4e6}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(peaks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: peaks[gpu.index])
    first = torch.device("cuda", 0)
    assert (peak_memory_mb(first), peak_memory_mb(first, device_map="auto")) == (3, 7)
    reset: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: reset.append(gpu.index))
    monkeypatch.setattr(DeviceUse, "_join", lambda *_: None)
    DeviceUse(first, tmp_path, device_map="auto").close()
    assert reset == [0, 1]


class NVMLError(Exception):
    """What NVML raises."""


def test_the_gpus_clock_is_read_with_what_held_it_down(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1980, 41, 0), (1755, 83, 0x20 | 0x4 | 0x80), (1700, 84, 0x40)])
    now = [0, 0, 0]

    def reading(_: object) -> int:
        now[:] = next(readings, (None,) * 3)
        return now[0]

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda gpu, kind: reading(gpu),
        nvmlDeviceGetTemperature=lambda gpu, kind: now[1],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: now[2],
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
    )
    monkeypatch.setattr(environment, "_nvml_of", lambda device: (nvml, "gpu"))
    clock = GpuClock(torch.device("cuda"))
    assert clock.facts == {}
    clock.read()
    assert clock.facts == {"gpu_mhz": [1980, 1980], "gpu_celsius": [41, 41], "gpu_slowed_by": None}
    clock.read()
    clock.read()
    assert clock.facts == {
        "gpu_mhz": [1700, 1980],
        "gpu_celsius": [41, 84],
        "gpu_slowed_by": "power brake, heat",
    }


def test_a_cpu_has_no_clock_of_a_gpu() -> None:
    clock = GpuClock(CPU)
    clock.read()
    assert clock.facts == {}
