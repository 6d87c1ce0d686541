"""A step of a paper's item as a process: its command line, its environment, and the note that it is
done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from bild_lab.errors import UserError
from bild_lab.files import PINS, write_atomically
from bild_lab.lab.store.code import PACKAGE
from bild_lab.papers.runs.machine import Placement
from bild_lab.papers.runs.paper_runs import replaced_words
from bild_lab.papers.runs.steps import OUTPUTS, Step

STAMPS = OUTPUTS / ".steps"
ACCELERATE, COUNT = ["accelerate", "launch", "--multi_gpu"], "--num_processes="
TAIL = 60  # lines of a failed step's log that are printed: those of Accelerate come after its own


def is_done(step: Step) -> bool:
    """Whether a step ended well with this configuration and code, and nothing that it read or wrote
    has changed.

    A change of the code makes every step look again, which takes seconds where its results still
    count.
    """
    stamp = stamp_of(step)
    if not stamp.is_file():
        return False
    noted = json.loads(stamp.read_text(encoding="utf-8"))
    current = _state(step)
    unchanged = noted["writes"].items() <= current["writes"].items()
    return noted["reads"] == current["reads"] and unchanged


def stamp_of(step: Step) -> Path:
    """The file that notes that a step is done with this configuration and code."""
    digest = hashlib.sha256(f"{_code_digest()}\n{step.command}\n{step.configuration}".encode())
    return STAMPS / f"{digest.hexdigest()[:16]}.json"


def log_of(step: Step) -> Path:
    """The file for what a step prints beside others."""
    return STAMPS / f"{step.writes.replace('/', '_')}-{stamp_of(step).stem[:6]}.log"


@cache
def _code_digest() -> str:
    files = sorted(
        file
        for file in PACKAGE.rglob("*")
        # the pins of what a step reads are a part of its configuration
        if file.suffix in (".py", ".cpp", ".h", ".yaml") and file != PINS
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


def command_line(step: Step, placement: Placement) -> str:
    """What starts a step so, to be typed in a checkout."""
    python, script, *words = replaced_words(tuple(shlex.split(step.command)), placement.overrides)
    starts = (
        [python] if placement.processes == 1 else [*ACCELERATE, f"{COUNT}{placement.processes}"]
    )
    return shlex.join([*starts, script, *words])


def start(
    step: Step, placement: Placement, environment: Mapping[str, str], log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a step's process. environment: variables beside those of this process. log: the file
    for what it prints; None: the terminal.
    """
    _, script, *words = replaced_words(tuple(shlex.split(step.command)), placement.overrides)
    launcher = []
    if placement.processes > 1:
        # the port 0 is a free one
        settings = [*ACCELERATE[2:], f"{COUNT}{placement.processes}", "--main_process_port=0"]
        launcher = ["-m", "accelerate.commands.launch", *settings]
    command = [sys.executable, *launcher, "-m", "bild_lab", Path(script).stem, *words]
    # of its own group, so that Ctrl+C reaches it through this process alone, which waits for it
    options = {"env": {**os.environ, **environment}, "process_group": 0}
    if log is None:
        return subprocess.Popen(command, **options)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, **options
        )


def finish(step: Step, code: int, log: Path | None = None) -> None:
    """Note that a step is done whose process ended with this status.

    Raises UserError if it failed, with the end of its log, or wrote nothing.
    """
    if code != 0:
        raise UserError(f"failed with status {code}: {step.command}{_end_of(log)}")
    state = _state(step)
    if not state["writes"]:
        raise UserError(f"wrote nothing to outputs/{step.writes}: {step.command}")
    STAMPS.mkdir(parents=True, exist_ok=True)
    write_atomically(stamp_of(step), json.dumps(state).encode())


def _end_of(log: Path | None) -> str:
    """The last lines of a log; empty without one."""
    if log is None:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    return "".join(f"\n  | {line}" for line in lines)


def execute(step: Step, placement: Placement) -> None:
    """Run a step as a Slurm job does, on the first of the GPUs that the job has.

    Raises UserError if it fails or writes nothing.
    """
    from bild_lab.engine.models.device import visible_gpus  # late: torch takes seconds to load

    devices = visible_gpus()[: placement.gpus]
    finish(step, start(step, placement, visible(devices)).wait())


def visible(devices: Sequence[str]) -> dict[str, str]:
    """The variable that shows a process these GPUs; none where there are none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
