"""Servers that a policy starts: whose answers they are, when they are ready, and what they leave."""

from __future__ import annotations

import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from bild_lab.errors import UserError
from bild_lab.servers import server_process as module
from bild_lab.servers.server_process import ServerProcess, server_process

PROGRAM = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status})
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


@pytest.fixture
def url() -> Iterator[str]:
    """An address at which nothing answers; what was started there ends with the test."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/v1"
    yield address
    if address in module._started:
        module._started.pop(address).stop()


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def command(url: str, status: int = 200) -> str:
    program = PROGRAM.format(status=status, port=httpx.URL(url).port)
    return shlex.join([sys.executable, "-S", "-c", program])


def test_another_servers_answers_are_not_taken_for_its_own(url: str) -> None:
    process = server_process(command(url), url)
    assert server_process(command(url), url) is process
    with pytest.raises(UserError, match="answers at .* before policy.launch has started one"):
        ServerProcess("sleep 30", url)


def test_a_server_of_another_command_takes_the_place_of_the_one_before(url: str) -> None:
    first = server_process(command(url), url)
    second = server_process(command(url, 404), url)
    assert not first.alive and second.alive
    assert httpx.get(f"{url}/models").status_code == 404


def test_a_server_that_died_is_started_anew(url: str) -> None:
    first = server_process(command(url), url)
    first._process.kill()
    first._process.wait()
    assert server_process(command(url), url).alive


def test_nothing_is_left_of_a_servers_log(url: str, temporary_folder: Path) -> None:
    process = server_process(command(url), url)
    assert process.log.is_relative_to(temporary_folder)
    process.stop()
    for launch in ("no-such-program", "false"):
        with pytest.raises(UserError):
            server_process(launch, url)
    assert not list(temporary_folder.iterdir())


def test_a_server_that_asks_for_a_key_is_ready(url: str) -> None:
    assert server_process(command(url, 401), url).alive


def test_a_server_that_loads_is_not_ready_and_is_ended(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READY_S", 0.6)
    with pytest.raises(UserError, match="did not answer"):
        server_process(command(url, 503), url)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")


def test_a_server_that_ends_at_once_leaves_no_children(url: str) -> None:
    script = "sleep 60 & echo child $!; exit 3"
    with pytest.raises(UserError, match="ended with status 3") as caught:
        server_process(shlex.join(["bash", "-c", script]), url)
    child = int(str(caught.value).split()[-1])
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child goes on"
        time.sleep(0.02)


def test_the_end_of_a_long_log_is_told(url: str) -> None:
    with pytest.raises(UserError) as caught:
        server_process(shlex.join(["bash", "-c", "seq 1 30; exit 3"]), url)
    assert str(caught.value).split("\n")[1:] == [str(line) for line in range(19, 31)]


def in_a_child(url: str, before: str = "") -> str:
    """A command whose child answers."""
    return shlex.join(["bash", "-c", f"{before}{command(url)} & wait"])


def test_the_seconds_of_a_servers_children_are_its_own(url: str) -> None:
    process = server_process(in_a_child(url), url)
    (child,) = psutil.Process(process._process.pid).children()
    used = child.cpu_times()
    assert process.cpu_seconds() >= used.user + used.system > 0


def test_what_a_server_started_in_another_session_ends_with_it(url: str) -> None:
    process = server_process(in_a_child(url, "setsid sleep 60 & "), url)
    family = psutil.Process(process._process.pid).children(recursive=True)
    assert len(family) == 2
    process.stop()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_a_server_that_does_not_want_to_end_is_ended(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    port = httpx.URL(url).port
    program = deaf + PROGRAM.format(status=200, port=port)
    process = server_process(shlex.join([sys.executable, "-S", "-c", program]), url)
    process.stop()
    assert not process.alive


@pytest.mark.parametrize("launch", ["", "no_such_program", "sleep 'a"])
def test_what_is_no_command_is_refused(launch: str, url: str) -> None:
    with pytest.raises(UserError, match=r"policy\.launch cannot start"):
        server_process(launch, url)
