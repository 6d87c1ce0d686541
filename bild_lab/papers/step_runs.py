"""Runs the steps of a paper's item, here or as Slurm jobs; what is done is skipped."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.papers.machine import Machine, blocked_by
from bild_lab.papers.needs import hours_of, needs
from bild_lab.papers.steps import OUTPUTS, Step

PACKAGE = Path(__file__).resolve().parents[1]
STAMPS = OUTPUTS / ".steps"
DONE, TO_DO = "done", "to do"


def is_done(step: Step) -> bool:
    """Whether a step ended well with this configuration and code, and nothing that it read or wrote
    has changed.

    A change of the code makes every step look again, which takes seconds where its results still
    count.
    """
    stamp = _stamp(step)
    if not stamp.is_file():
        return False
    noted = json.loads(stamp.read_text(encoding="utf-8"))
    current = _state(step)
    unchanged = noted["writes"].items() <= current["writes"].items()
    return noted["reads"] == current["reads"] and unchanged


def _stamp(step: Step) -> Path:
    digest = hashlib.sha256(f"{_code_digest()}\n{step.command}\n{step.configuration}".encode())
    return STAMPS / f"{digest.hexdigest()[:16]}.json"


@cache
def _code_digest() -> str:
    files = sorted(
        file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h", ".yaml")
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _state(step: Step) -> dict[str, dict[str, list[int]]]:
    """Size and time of every file that a step reads and writes in outputs.

    Of a sweep's folder, which other steps write too, the points count: they are never changed.
    """
    if step.figure is not None:
        written = [*OUTPUTS.glob(f"{step.writes}*")]
    elif shlex.split(step.command)[1] == "run.py":
        written = [*(OUTPUTS / step.writes).glob("points/*/result.json")]
    else:
        written = _visible_files(step.writes)
    read = [file for folder in step.reads for file in _visible_files(folder)]
    return {"reads": _sizes_and_times(read), "writes": _sizes_and_times(written)}


def _visible_files(folder: str) -> list[Path]:
    return [
        file
        for file in (OUTPUTS / folder).rglob("*")
        if not any(name.startswith(".") for name in file.parts)
    ]


def _sizes_and_times(files: Sequence[Path]) -> dict[str, list[int]]:
    """Each file's bytes, and when it was written, in nanoseconds."""
    stats = {str(file): file.stat() for file in files if file.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def execute(step: Step) -> None:
    """Run a step's command as a process, and note that it is done.

    Raises UserError if it fails or writes nothing.
    """
    _, script, *words = shlex.split(step.command)
    code = subprocess.run(
        [sys.executable, "-m", "bild_lab", Path(script).stem, *words], check=False
    ).returncode
    if code != 0:
        raise UserError(f"failed with status {code}: {step.command}")
    state = _state(step)
    if not state["writes"]:
        raise UserError(f"wrote nothing to outputs/{step.writes}: {step.command}")
    STAMPS.mkdir(parents=True, exist_ok=True)
    write_atomically(_stamp(step), json.dumps(state).encode())


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
        if len(blocked) == len(step.after):
            return "no step of it can run"
    elif blocked:
        return f"it waits for {blocked[0]}"
    elif (reason := blocked_by(step, machine)) is not None:
        return reason
    changes = any(statuses[command] == TO_DO for command in step.after)
    return DONE if not changes and is_done(step) else TO_DO


def run_steps(steps: Sequence[Step], machine: Machine, say: Callable[[str], None]) -> bool:
    """Run what is to do, in order. Returns whether everything was done."""
    statuses: dict[str, str] = {}
    clock = _RemainingTime(steps, machine)
    for index, step in enumerate(steps):
        label = f"step {index + 1} of {len(steps)}"
        status = _status(step, machine, statuses)
        if status == TO_DO:
            say(f"{label}, {clock.left(index)}: {step.command}")
            start = time.monotonic()
            try:
                execute(step)
                status = DONE
            except UserError as error:
                status = str(error)
            clock.spent(index, time.monotonic() - start)
        if status != DONE:
            say(f"{label} was not done: {step.command}\n  {status}")
        statuses[step.command] = status
    return all(status == DONE for status in statuses.values())


class _RemainingTime:
    """How long the remaining steps will take: their estimates, scaled by the steps that ran.

    A step without an estimate counts as the mean of the others.
    """

    def __init__(self, steps: Sequence[Step], machine: Machine) -> None:
        self._steps = steps
        self._hours = [
            hours_of([needs(setting, machine.gpu) for setting in step.settings]) for step in steps
        ]
        estimates = [hours for hours in self._hours if hours]
        mean = sum(estimates) / len(estimates) if estimates else 1.0
        self._shares = [hours or mean for hours in self._hours]
        self._spent_s = 0.0
        self._covered = 0.0  # estimated hours of the steps that took `_spent_s`

    def spent(self, index: int, seconds: float) -> None:
        """Note what a step took."""
        self._spent_s += seconds
        self._covered += self._shares[index]

    def left(self, index: int) -> str:
        """How long this step and all after it will take."""
        remaining = range(index, len(self._steps))
        known = all(self._hours[later] for later in remaining if self._steps[later].figure is None)
        if not self._covered and not known:
            return "time left unknown yet"
        seconds_an_hour = self._spent_s / self._covered if self._covered else 3600
        seconds = sum(self._shares[later] for later in remaining) * seconds_an_hour
        if seconds >= 3600:
            return f"about {seconds / 3600:.1f} h left"
        return f"about {seconds / 60:.0f} min left"


def submit_steps(
    steps: Sequence[Step],
    machine: Machine,
    parameters: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    """Submit what is to do as Slurm jobs, each after those that it waits for. Returns whether every
    step was.

    parameters: of the jobs, as sbatch takes them: partition, gpus_per_node, mem, time. Logs are in
    outputs/.steps. A job whose predecessor failed is cancelled by Slurm; a figure is drawn after
    all, whatever became of them.

    Raises UserError without submitit or sbatch.
    """
    try:
        from submitit import SlurmExecutor  # optional

        executor = SlurmExecutor(STAMPS)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"launcher=slurm needs submitit and Slurm's commands: {error}; leave it out to run here"
        ) from error
    statuses: dict[str, str] = {}
    jobs: dict[str, str] = {}
    for place, step in enumerate(steps, 1):
        statuses[step.command] = status = _status(step, machine, statuses)
        if status == TO_DO:
            predecessors = [jobs[command] for command in step.after if command in jobs]
            kind = "afterok" if step.figure is None else "afterany"
            dependency = (
                {"dependency": ":".join([kind, *predecessors]), "kill_on_invalid_dep": "yes"}
                if predecessors
                else {}
            )
            executor.update_parameters(
                job_name=step.writes.replace("/", "_"),
                additional_parameters={**parameters, **dependency},
            )
            jobs[step.command] = executor.submit(execute, step).job_id
            after = f" after {', '.join(predecessors)}" if predecessors else ""
            say(f"step {place} of {len(steps)} is job {jobs[step.command]}{after}: {step.command}")
        elif status != DONE:
            say(f"step {place} of {len(steps)} was not submitted: {step.command}\n  {status}")
    return all(status in (DONE, TO_DO) for status in statuses.values())
