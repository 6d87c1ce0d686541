"""The process of another engine: started once, asked by lines of JSON, stopped while others are timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from bild_lab.engine.peers.environment import python
from bild_lab.errors import UserError

SCRIPT = Path(__file__).with_name("worker.py")


def convert(job: dict[str, Any]) -> str | None:
    """Have the engine write a checkpoint in its format. Returns what went wrong, None if nothing did."""
    done = subprocess.run(_command("convert", job), capture_output=True, text=True, env=_surroundings())
    return None if done.returncode == 0 else last_line(done.stderr)


class Worker:
    """A process that has loaded a model and decodes with it.

    Between turns it is stopped (SIGSTOP), because an engine's idle threads spin for a while and would take the cores
    from what is timed next. It ends with this object, and is killed if our process dies, stopped or not. variables: of
    its environment, beside ours. Raises UserError if the engine cannot load the model.
    """

    def __init__(self, job: dict[str, Any], variables: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process; a pipe would fill up
        self._name = job["engine"]
        self._process = subprocess.Popen(
            _command("serve", job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=_surroundings() | dict(variables or {}),
        )
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        self._stopped = False
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
        used = psutil.Process(self._process.pid).cpu_times()
        return used.user + used.system

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
        """The new tokens of one text, after which the process is stopped. Raises RuntimeError if it fails or dies."""
        self.wake()
        answer = self._ask(request)
        self.stop()
        if "error" in answer:
            raise RuntimeError(f"{self._name} failed: {answer['error']}")
        return answer["tokens"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has died, as its missing answer tells
            self._process.stdin.write(json.dumps(question) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._process.stdout.readline()
            return json.loads(line) if line else self._died()
        except BaseException:  # an interrupt too: the answer that is still to come would be taken for a later one
            self.close()
            raise

    def _died(self) -> dict[str, Any]:
        code = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"the process of {self._name} ended with status {code}: {last_line(self._errors.read())}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def _command(work: str, job: dict[str, Any]) -> list[str]:
    return [str(python()), "-I", str(SCRIPT), work, json.dumps(job)]


def _surroundings() -> dict[str, str]:
    """Our environment variables, with everything read from disk."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _end(process: subprocess.Popen[str], errors: IO[str]) -> None:
    process.kill()  # which ends a stopped process too
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        with suppress(BrokenPipeError):  # a question that was not read any more
            stream.close()
