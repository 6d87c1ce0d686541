"""Another engine in the environment of `make peers`: its versions, converted checkpoints, and its
process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import IO, Any

import psutil

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.files import cache_folder, holding

log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parents[2] / ".venv-peers"
SCRIPT = Path(__file__).with_name("peer_worker.py")


def why_no_peers() -> str | None:
    """Why the peers cannot run here, or None if they can."""
    if python().is_file():
        return None
    remedy = "run make peers"
    if not (FOLDER.parent / "Makefile").is_file():  # the package is installed
        remedy += " in a clone of its repository, and this command there"
    return (
        f"other engines run in an environment of their own, and there is none in {FOLDER}; {remedy}"
    )


def python() -> Path:
    """The environment's Python, which may be missing."""
    return FOLDER / "bin" / "python"


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of these packages in the environment.

    Raises UserError if it or one of them is missing.
    """
    if (reason := why_no_peers()) is not None:
        raise UserError(reason)
    places = [str(place) for place in FOLDER.glob("lib/python*/site-packages")]
    installed = {
        distribution.name.lower(): distribution.version
        for distribution in distributions(path=places)
    }
    if missing := [name for name in names if name not in installed]:
        raise UserError(f"{FOLDER} lacks {missing[0]}; remove it and run make peers")
    return {name: installed[name] for name in names}


def converted(
    checkpoint: Checkpoint,
    engine: str,
    versions: Mapping[str, str],
    cache: Path | None = None,
    bits: int | None = None,
) -> Path:
    """The folder of the converted checkpoint. The first call for these weights and versions
    converts, in seconds.

    bits: to how many the weights are quantized; None: the engine rounds them, if at all, as it
    loads. cache: where to keep it, by default the cache of bild_lab. The weights of a checkpoint on
    the hub must have been read once, so that they are in the hub's cache. Raises UserError if the
    engine cannot convert the checkpoint.
    """
    inputs = (
        checkpoint.fingerprint,
        *(f"{name} {version}" for name, version in versions.items()),
        SCRIPT.read_text(encoding="utf-8"),
    )
    digest = hashlib.sha256(chr(0).join(inputs).encode()).hexdigest()
    name = f"{engine}{bits or ''}-{digest[:16]}"
    folder = (cache or cache_folder() / "peers") / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with holding(Path(f"{folder}.lock"), patience_s=-1):
        if not folder.exists():
            log.warning("converting %s for %s, once", checkpoint.path, engine)
            _convert(checkpoint, engine, folder, bits)
    return folder


def _convert(checkpoint: Checkpoint, engine: str, folder: Path, bits: int | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new_folder = Path(temporary) / "made"
        job = {
            "engine": engine,
            "source": str(checkpoint.files),
            "folder": str(new_folder),
            "bits": bits,
        }
        command = _command("convert", job | {"encoder_decoder": checkpoint.encoder_decoder})
        process = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", env=_environment()
        )
        if process.returncode:
            raise UserError(
                f"{engine} cannot convert {checkpoint.path}: {last_line(process.stderr)}; "
                "use another policy for this model"
            )
        try:
            os.rename(new_folder, folder)
        except OSError:  # where there are no locks, another process may have been first
            if not folder.is_dir():
                raise


class Worker:
    """A process that has loaded a model and decodes with it.

    Between turns it is stopped (SIGSTOP), because an engine's idle threads spin for a while and
    would take the cores from what is timed next. It ends with this object, and is killed if our
    process dies, stopped or not. variables: of its environment, beside ours. Raises UserError if
    the engine cannot load the model.
    """

    def __init__(self, job: dict[str, Any], variables: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed with the process; a pipe would fill up
        self._name = job["engine"]
        self._process = subprocess.Popen(
            _command("serve", job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            bufsize=1,
            env=_environment() | dict(variables or {}),
        )
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        self._stopped = False
        self.seconds: list[float] = []  # after which each token of the last text was there
        loaded = self._answer()
        if "error" in loaded:
            self.close()
            raise UserError(f"{self._name} cannot load {job['model']}: {loaded['error']}")
        self.stop()

    @property
    def alive(self) -> bool:
        return self.close.alive

    def cpu_seconds(self) -> float:
        """What it has used of the CPU so far; 0.0 once it has ended."""
        if not self.alive:
            return 0.0
        cpu_times = psutil.Process(self._process.pid).cpu_times()
        return cpu_times.user + cpu_times.system

    def stop(self) -> None:
        """Take the process off the cores until `wake`."""
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def wake(self) -> None:
        """Let a stopped process run, and wait until it does."""
        if self._stopped:
            self._process.send_signal(signal.SIGCONT)
            self._stopped = False
            self._ask({})

    def decode(self, request: dict[str, Any]) -> list[int]:
        """The new tokens of one text, after which the process is stopped.

        Raises RuntimeError if it fails or dies.
        """
        self.wake()
        answer = self._ask(request)
        self.stop()
        if "error" in answer:
            raise RuntimeError(f"{self._name} failed: {answer['error']}")
        self.seconds = answer["seconds"]
        return answer["tokens"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has died, as its missing answer tells
            self._process.stdin.write(json.dumps(question) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._process.stdout.readline()
            return json.loads(line) if line else self._died()
        except BaseException:
            # an interrupt too: the answer that is still to come would be taken for a later one
            self.close()
            raise

    def _died(self) -> dict[str, Any]:
        code = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(
            f"the process of {self._name} ended with status {code}:"
            f" {last_line(self._errors.read())}"
        )


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def _command(work: str, job: dict[str, Any]) -> list[str]:
    return [str(python()), "-I", str(SCRIPT), work, json.dumps(job)]


def _environment() -> dict[str, str]:
    """Our environment variables, with everything read from disk."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}


def _end(process: subprocess.Popen[str], errors: IO[str]) -> None:
    process.kill()  # which ends a stopped process too
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        with suppress(BrokenPipeError):  # a question that was not read any more
            stream.close()
