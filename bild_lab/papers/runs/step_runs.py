"""Runs the steps of a paper's item, here, side by side on several GPUs, or as Slurm jobs; what is
done is skipped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, NoReturn

from bild_lab.errors import UserError
from bild_lab.lab.config.entrypoint import Stopped
from bild_lab.lab.store.progress import roughly
from bild_lab.papers.runs.machine import Machine, Placement, blocked_by, placement_of
from bild_lab.papers.runs.step_processes import (
    STAMPS,
    command_line,
    execute,
    finish,
    is_done,
    log_of,
    start,
    visible,
)
from bild_lab.papers.runs.steps import Step

DONE, TO_DO = "done", "to do"
POLL_S = 0.2  # between two looks at the running processes
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
GRACE_S = 60  # in which a step that is stopped writes its report


def plan(steps: Sequence[Step], machine: Machine) -> Iterator[tuple[Step, str]]:
    """Each step with its status: done, to do, or why it cannot run."""
    statuses: dict[str, str] = {}
    for step in steps:
        statuses[step.command] = _status(step, machine, statuses)
        yield step, statuses[step.command]


def _status(step: Step, machine: Machine, statuses: Mapping[str, str]) -> str:
    """The status of a step. statuses: of the steps before it, by their commands."""
    blocked = [command for command in step.after if statuses[command] not in (DONE, TO_DO)]
    if step.figure is not None:
        if all(command in blocked for command in step.drawn):
            return "no step of it can run"
    elif blocked:
        return f"it waits for {blocked[0]}"
    elif (reason := blocked_by(step, machine)) is not None:
        return reason
    changes = any(statuses[command] == TO_DO for command in step.after)
    return DONE if not changes and is_done(step) else TO_DO


def run_steps(steps: Sequence[Step], machine: Machine, say: Callable[[str], None]) -> bool:
    """Run what is to do, on several GPUs side by side. Returns whether everything was done.

    Raises UserError where the machine's GPUs are not here.
    """
    if machine.devices and len(machine.devices) < machine.gpus:
        raise UserError(
            f"{machine.gpus} GPUs were named, but {len(machine.devices)} are visible here; leave out"
            " gpu and gpus to run on these"
        )
    return _Runner(steps, machine, say).run()


@dataclass(frozen=True)
class _Running:
    """A step whose process runs. slots: the numbers of the GPUs that it holds."""

    index: int
    slots: tuple[int, ...]
    process: subprocess.Popen[bytes]
    log: Path | None
    began_s: float


class _Runner:
    """Runs steps, each as soon as those that it waits for have ended and its GPUs are free.

    A GPU is held by one step at a time. A step that draws holds one, too, so that it disturbs no
    timing on a machine with one. The step that needs most GPUs starts first.
    """

    def __init__(self, steps: Sequence[Step], machine: Machine, say: Callable[[str], None]) -> None:
        self._steps, self._machine, self._say = steps, machine, say
        self._placements = [placement_of(step, machine) or Placement() for step in steps]
        self._statuses: dict[str, str] = {}
        self._running: list[_Running] = []
        self._free = list(range(machine.gpus))

    def run(self) -> bool:
        """Run all. A signal ends the steps that run, too."""
        try:
            with _stopped_by_signals():
                return self._run()
        finally:
            for running in self._running:
                running.process.terminate()
            for running in self._running:
                _end(running.process)

    def _run(self) -> bool:
        while True:
            for index in sorted(self._ready(), key=self._slots, reverse=True):
                if self._slots(index) <= len(self._free):
                    self._start(index)
            if not self._running:
                return all(status == DONE for status in self._statuses.values())
            self._end_finished()

    def _label(self, index: int) -> str:
        return f"step {index + 1} of {len(self._steps)}"

    def _slots(self, index: int) -> int:
        return max(1, self._placements[index].gpus)

    def _ready(self) -> list[int]:
        """The steps that can start, in order; those that are done, or cannot run, are noted."""
        ready: list[int] = []
        running = {self._steps[running.index].command for running in self._running}
        for index, step in enumerate(self._steps):
            if step.command in running or step.command in self._statuses:
                continue
            if any(command not in self._statuses for command in step.after):
                continue
            status = _status(step, self._machine, self._statuses)
            if status == TO_DO:
                ready.append(index)
            else:
                self._note(index, status)
        return ready

    def _note(self, index: int, status: str) -> None:
        step = self._steps[index]
        self._statuses[step.command] = status
        if status != DONE:
            self._say(f"{self._label(index)} was not done: {step.command}\n  {status}")

    def _start(self, index: int) -> None:
        from bild_lab.engine.models.device import thread_share  # late: torch takes seconds to load

        step, placement = self._steps[index], self._placements[index]
        slots = tuple(self._free[: self._slots(index)])
        self._free = self._free[len(slots) :]
        devices = [self._machine.devices[slot] for slot in slots if self._machine.devices]
        environment, log, where = visible(devices), None, ""
        if self._machine.gpus > 1:
            environment["OMP_NUM_THREADS"] = thread_share(self._machine.gpus)
            log = log_of(step)
            taken = f"on GPU {','.join(devices)}, " if devices else ""
            where = f"\n  {taken}log in {log}"
        line = command_line(step, placement)
        self._say(f"{self._label(index)}: {line}{where}")
        began_s = time.monotonic()
        process = start(step, placement, environment, log)
        self._running.append(_Running(index, slots, process, log, began_s))

    def _end_finished(self) -> None:
        """Wait until a process has ended, and note what became of its step."""
        while not (ended := self._ended()):
            time.sleep(POLL_S)
        for running in ended:
            step, seconds = self._steps[running.index], time.monotonic() - running.began_s
            self._running.remove(running)
            self._free = sorted([*self._free, *running.slots])
            try:
                finish(step, running.process.returncode, running.log)
                status = DONE
            except UserError as error:
                status = str(error)
            if running.log is not None and status == DONE:
                self._say(f"{self._label(running.index)} is done after {roughly(seconds)}")
            self._note(running.index, status)

    def _ended(self) -> list[_Running]:
        return [running for running in self._running if running.process.poll() is not None]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Inside the block a signal that would end this process at once raises an exception."""

    def stop(number: int, _: Any) -> NoReturn:
        raise Stopped(128 + number, sys.exit)

    if current_thread() is not main_thread():  # Python allows handlers there alone
        yield
        return
    earlier_handlers = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process that got a signal has written what it has, for a while."""
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def submit_steps(
    steps: Sequence[Step],
    machine: Machine,
    parameters: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    """Submit what is to do as Slurm jobs, each after those that it waits for. Returns whether every
    step was.

    parameters: of the jobs, as sbatch takes them: partition, mem, time. gpus_per_node is that of
    the step where nothing is said of GPUs. Logs are in outputs/.steps. A job whose predecessor
    failed is cancelled by Slurm; a figure is drawn after all, whatever became of them.

    Raises UserError without submitit or sbatch.
    """
    executor = _slurm_executor()
    statuses: dict[str, str] = {}
    jobs: dict[str, str] = {}
    for place, step in enumerate(steps, 1):
        statuses[step.command] = status = _status(step, machine, statuses)
        placement = placement_of(step, machine) or Placement()
        if status == TO_DO:
            predecessors = [jobs[command] for command in step.after if command in jobs]
            executor.update_parameters(
                job_name=step.writes.replace("/", "_"),
                additional_parameters={
                    **_gpus_of(placement, parameters),
                    **parameters,
                    **_dependency(step, predecessors),
                },
            )
            job = jobs[step.command] = executor.submit(execute, step, placement).job_id
            waits = f" after {', '.join(predecessors)}" if predecessors else ""
            say(f"step {place} of {len(steps)} is job {job}{waits}: {step.command}")
        elif status != DONE:
            say(f"step {place} of {len(steps)} was not submitted: {step.command}\n  {status}")
    return all(status in (DONE, TO_DO) for status in statuses.values())


def _slurm_executor() -> Any:
    """What submits jobs to Slurm. Raises UserError without submitit or sbatch."""
    try:
        from submitit import SlurmExecutor  # optional

        return SlurmExecutor(STAMPS)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"launcher=slurm needs submitit and Slurm's commands: {error}; leave it out to run here"
        ) from error


def _dependency(step: Step, predecessors: Sequence[str]) -> dict[str, str]:
    """What sbatch gets of the jobs that a step waits for. A figure is drawn whatever became of them."""
    if not predecessors:
        return {}
    kind = "afterok" if step.figure is None else "afterany"
    return {"dependency": ":".join([kind, *predecessors]), "kill_on_invalid_dep": "yes"}


def _gpus_of(placement: Placement, parameters: Mapping[str, str]) -> dict[str, str]:
    """The GPUs that a job asks for, unless its parameters say so themselves."""
    if placement.gpus == 0 or any("gpu" in key or key in ("gres", "tres") for key in parameters):
        return {}
    return {"gpus_per_node": str(placement.gpus)}
