"""`hydra/launcher=gpus`: the points of a sweep on all visible GPUs, one a GPU at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from rich.markup import escape

from bild_lab.errors import UserError
from bild_lab.lab.config.compose import PLUGIN, update_numbers, without_hydra
from bild_lab.lab.config.console import console, status_line

Job = tuple[Callable[..., JobReturn], tuple[Any, ...]]  # a function and its arguments


class GpuLauncher(Launcher):
    """Measures points in worker processes of joblib's loky, of which each sees one GPU.

    A worker keeps its models for its next point. One that dies takes its point with it, and another
    takes its place.
    """

    __module__ = PLUGIN

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """What became of each point, in their order."""
        # late: torch takes seconds to load
        from bild_lab.engine.models.device import few_cores, thread_share, visible_gpus

        devices = visible_gpus()[: len(job_overrides)]
        status_line.leave()
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        if warning := few_cores(len(devices)):
            console.print(f"[bold]{escape(warning)}[/bold]")
        shared = (self._context, self._config, self._task, Singleton.get_state())
        jobs = [
            (run_point, (initial_job_idx + index, overrides, *shared))
            for index, overrides in enumerate(job_overrides)
        ]
        # bars of several processes would write over each other
        variables = {"OMP_NUM_THREADS": thread_share(len(devices)), "TTY_COMPATIBLE": "0"}
        outcomes = side_by_side(jobs, devices, variables)
        return [
            self._failed(overrides, outcome) if isinstance(outcome, Exception) else outcome
            for overrides, outcome in zip(job_overrides, outcomes, strict=True)
        ]

    def _failed(self, overrides: Sequence[str], error: Exception) -> JobReturn:
        """Store that a point's process died, as a point that fails is stored."""
        from bild_lab.lab.sweep import record_failure

        loader = self._context.config_loader
        config = update_numbers(loader.load_sweep_config(self._config, list(overrides)), overrides)
        record_failure(without_hydra(config), UserError(f"its process ended: {error}"))
        return JobReturn(overrides, status=JobStatus.COMPLETED, _return_value=math.nan)


def run_point(
    number: int,
    overrides: Sequence[str],
    context: HydraContext,
    config: DictConfig,
    task: TaskFunction,
    singletons: dict[Any, Any],
) -> JobReturn:
    """Run one point of a sweep in a process of its own, as Hydra's launchers do.

    singletons: Hydra's, of the process that launches.
    """
    setup_globals()
    Singleton.set_state(singletons)
    point_config = context.config_loader.load_sweep_config(config, list(overrides))
    with open_dict(point_config):
        point_config.hydra.job.id = f"{point_config.hydra.job.name}_{number}"
        point_config.hydra.job.num = number
    HydraConfig.instance().set_config(point_config)
    return run_job(
        hydra_context=context,
        config=point_config,
        task_function=task,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def register_launcher() -> None:
    """Make `hydra/launcher=gpus` known to Hydra.

    Hydra takes plugins of its own package alone, so this module goes by a name in it, too.
    """
    sys.modules[PLUGIN] = sys.modules[__name__]
    Plugins.instance().register(GpuLauncher)


def side_by_side(
    jobs: Sequence[Job], devices: Sequence[str], variables: Mapping[str, str]
) -> list[JobReturn | Exception]:
    """Call each job in a process that sees one of these devices, and no other job on it meanwhile.

    variables: of the environment of all processes. Returns what each job returned, in their order;
    for one whose process died, the error.
    """
    outcomes: dict[int, JobReturn | Exception] = {}
    waiting, free = list(enumerate(jobs)), list(devices)
    running: dict[Future[JobReturn], tuple[int, str]] = {}
    with _workers() as workers:
        while waiting or running:
            while waiting and free:
                (index, (function, arguments)), device = waiting.pop(0), free.pop(0)
                if device not in workers:
                    workers[device] = _worker(device, variables)
                running[workers[device].submit(function, *arguments)] = index, device
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                index, device = running.pop(future)
                free.append(device)
                try:
                    outcomes[index] = future.result()
                except Exception as error:
                    outcomes[index] = error
                    workers.pop(device).shutdown(kill_workers=True)
    return [outcomes[index] for index in range(len(jobs))]


def _worker(device: str, variables: Mapping[str, str]) -> Executor:
    """A process that sees this device alone, from before it loads any module."""
    from joblib.externals.loky import ProcessPoolExecutor

    return ProcessPoolExecutor(1, env={**variables, "CUDA_VISIBLE_DEVICES": device})


@contextmanager
def _workers() -> Iterator[dict[str, Executor]]:
    """The worker of each device, empty at first. After the block none is left, whatever it did."""
    workers: dict[str, Executor] = {}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.shutdown(kill_workers=True)
