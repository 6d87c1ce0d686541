"""`hydra/launcher=gpus` gives each device one point at a time; `tests/faults` runs whole sweeps by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab import launcher
from bild_lab.lab.config.compose import config_dir
from bild_lab.lab.preflight import require_gpus


class Worker(ThreadPoolExecutor):
    """In place of a process: it would run several points at once, if it were given them."""

    def __init__(self, device: str, variables: dict[str, str]) -> None:
        super().__init__(4, thread_name_prefix=f"{device} ")
        self.stopped = False

    def shutdown(self, wait: bool = True, *, kill_workers: bool = False, **_: Any) -> None:
        self.stopped = True
        super().shutdown(wait)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    made: list[Worker] = []

    def worker(device: str, variables: dict[str, str]) -> Worker:
        made.append(Worker(device, variables))
        return made[-1]

    monkeypatch.setattr(launcher, "_worker", worker)
    return made


def test_no_two_points_are_on_a_device_at_once_and_each_answer_has_its_place(
    workers: list[Worker],
) -> None:
    running: list[str] = []

    def measured(index: int, seconds: float) -> tuple[int, str]:
        device = threading.current_thread().name.split()[0]
        assert device not in running, "two points on one device"
        running.append(device)
        time.sleep(seconds)
        running.remove(device)
        return index, device

    jobs = [(measured, (index, 0.08 if index == 0 else 0.01)) for index in range(9)]
    answers = launcher.side_by_side(jobs, ["4", "7"], {})
    assert [index for index, _ in answers] == list(range(9))
    devices = [device for _, device in answers]
    assert set(devices) == {"4", "7"} and devices.count("7") > devices.count("4")
    assert len(workers) == 2 and all(worker.stopped for worker in workers)


def test_a_device_whose_process_died_gets_another(workers: list[Worker]) -> None:
    def measured(index: int) -> int:
        if index == 1:
            raise RuntimeError("killed")
        return index

    first, died, *others = launcher.side_by_side(
        [(measured, (index,)) for index in range(4)], ["0"], {}
    )
    assert [first, *others] == [0, 2, 3] and str(died) == "killed"
    assert len(workers) == 2 and all(worker.stopped for worker in workers)


def test_what_ends_the_command_ends_the_workers(workers: list[Worker]) -> None:
    def stopped() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        launcher.side_by_side([(stopped, ())] * 2, ["0"], {})
    assert workers and all(worker.stopped for worker in workers)


def test_points_that_have_no_gpu_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = OmegaConf.load(config_dir() / "hydra/launcher/gpus.yaml")._target_
    config = OmegaConf.create({"hydra": {"launcher": {"_target_": target}}})
    plain = OmegaConf.create({"hydra": {"launcher": {"_target_": "hydra.BasicLauncher"}}})
    whole, spread = (OmegaConf.create({"runtime": {"device_map": name}}) for name in (None, "auto"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    require_gpus(config, [whole])
    require_gpus(plain, [spread])
    with pytest.raises(UserError, match="device_map=auto spreads a target over all GPUs"):
        require_gpus(config, [whole, spread])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UserError, match="none is visible"):
        require_gpus(config, [whole])


def test_points_have_their_numbers_and_no_more_gpus_than_there_are_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def measured(jobs: list[Any], devices: Sequence[str], variables: dict[str, str]) -> list[str]:
        seen.update(jobs=jobs, devices=devices, variables=variables)
        return ["measured"] * len(jobs)

    monkeypatch.setattr(launcher, "side_by_side", measured)
    monkeypatch.setattr(launcher, "configure_log", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    sweep = {"hydra_logging": None, "verbose": False, "sweep": {"dir": str(tmp_path)}}
    ours = launcher.GpuLauncher()
    ours.setup(hydra_context=None, task_function=None, config=OmegaConf.create({"hydra": sweep}))
    assert ours.launch([["a=1"], ["a=2"]], 3) == ["measured", "measured"]
    assert tuple(seen["devices"]) == ("0", "1")
    assert [given[:2] for _, given in seen["jobs"]] == [(3, ["a=1"]), (4, ["a=2"])]
    assert seen["variables"]["TTY_COMPATIBLE"] == "0"
