"""A server that a policy starts and stops: its process, its log, and when it answers."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import httpx
import psutil

from bild_lab.errors import UserError

READY_S = 1800.0  # a server may load weights for so long before it answers
WAIT_S = 0.25  # between two questions whether it answers
ANSWER_S = 1.0  # for the answer
END_S = 20.0  # it may take so long to end before it is killed
LAST_LINES = 12  # of a log, in a message


class ServerProcess:
    """A server's process. command: as typed in a shell, without one. url: where it will answer.

    Its output goes to the file `log`, which is there until `stop`. It ends with this process.
    Raises UserError if another server answers there, and, with the end of its log, if it ends or
    does not answer in time.
    """

    def __init__(self, command: str, url: str) -> None:
        if _answers(url):
            raise UserError(
                f"a server answers at {url} before policy.launch has started one; end it, or leave"
                " policy.launch out to measure it"
            )
        self.command = command
        self._folder = tempfile.TemporaryDirectory(prefix="bild_lab_server_")
        self.log = Path(self._folder.name) / "server.log"
        try:
            with self.log.open("wb") as output:
                self._process = subprocess.Popen(
                    shlex.split(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError, IndexError) as error:
            self._folder.cleanup()
            raise UserError(f"policy.launch cannot start: {error}; it is {command!r}") from error
        self._stopped = False
        atexit.register(self.stop)
        self._wait_until_ready(url)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """What the server and its children have used of the CPU; 0.0 once it has ended."""
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            family = [process, *process.children(recursive=True)]
            return sum(sum(member.cpu_times()[:2]) for member in family)
        return 0.0

    def last_lines(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def stop(self) -> None:
        """End the server and its children, with force if it must be. They may outlive it."""
        if self._stopped:
            return
        self._stopped = True
        family = []
        with suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._signal_group(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        for member in family:
            with suppress(psutil.Error):
                member.kill()
        self._folder.cleanup()
        atexit.unregister(self.stop)

    def _signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the server and those children that stayed in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if not self.alive:
                self._refuse(f"ended with status {self._process.returncode}")
            if _answers(url):
                return
            time.sleep(WAIT_S)
        self._refuse(f"did not answer at {url} for {READY_S:.0f} s")

    def _refuse(self, problem: str) -> NoReturn:
        """Stop the server. Raises UserError with the end of its log."""
        last_lines = self.last_lines()
        self.stop()
        raise UserError(f"the server of policy.launch {problem}; its log ends:\n{last_lines}")


def _answers(url: str) -> bool:
    """Whether a server is ready there. It may ask for a key; one that loads refuses for now."""
    try:
        response = _asking().get(f"{url.rstrip('/')}/models")
    except httpx.HTTPError:
        return False
    return not response.is_server_error


@cache
def _asking() -> httpx.Client:
    """The client that asks whether a server is ready; a new one takes a tenth of a second."""
    return httpx.Client(timeout=ANSWER_S, limits=httpx.Limits(max_keepalive_connections=0))


_started: dict[str, ServerProcess] = {}  # by their URL


def server_process(command: str, url: str) -> ServerProcess:
    """The server of this command, shared by all points of this process while it runs. One of
    another command at the same URL is stopped before.
    """
    process = _started.get(url)
    if process is not None and (process.command != command or not process.alive):
        process.stop()
        process = None
    if process is None:
        process = _started[url] = ServerProcess(command, url)
    return process
