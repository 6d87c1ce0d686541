"""The process of another engine answers, sleeps between turns, and never outlives us."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bild_lab.benchmark import peer_process as process
from bild_lab.benchmark.peer_process import Worker, converted
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError

pytestmark = pytest.mark.usefixtures("fake_engines")
JOB = {"engine": "openvino", "encoder_decoder": False, "model": "any", "threads": 2}


def text(*prompt: int, most: int = 9) -> dict[str, Any]:
    return {"encoder": None, "prompt": list(prompt), "most": most, "end": []}


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_worker_answers_each_text_and_what_its_libraries_print_is_no_answer() -> None:
    worker = Worker(JOB)
    assert [worker.decode(text(5, 6)), worker.decode(text(7, most=1))] == [[2, 5, 6], [2]]
    worker.close()


def test_a_worker_is_stopped_between_turns_and_runs_once_it_is_woken() -> None:
    worker = Worker(JOB)
    seen = psutil.Process(worker._process.pid)
    wait_until(lambda: seen.status() == psutil.STATUS_STOPPED)
    worker.wake()
    assert seen.status() != psutil.STATUS_STOPPED
    worker.decode(text(5))
    wait_until(lambda: seen.status() == psutil.STATUS_STOPPED)
    worker.close()


def test_a_worker_that_dies_over_a_text_is_told_with_its_last_words() -> None:
    worker = Worker(JOB)
    with pytest.raises(RuntimeError, match="openvino ended with status 7: Illegal instruction"):
        worker.decode(text(666))
    assert not worker.alive


def test_a_failed_text_is_told_and_the_next_one_is_answered() -> None:
    worker = Worker(JOB)
    with pytest.raises(RuntimeError, match="openvino failed: ValueError: 13 brings bad luck"):
        worker.decode(text(13))
    assert worker.decode(text(5)) == [2, 5]
    worker.close()


def test_a_model_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(UserError, match="openvino cannot load broken: ValueError: no such layers"):
        Worker(JOB | {"model": "broken"})


def test_an_interrupt_during_a_text_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer would be taken for that to the next text."""
    worker = Worker(JOB)

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.decode(text(5))
    assert not worker.alive


def test_a_worker_ends_with_its_object() -> None:
    worker = Worker(JOB)
    number = worker._process.pid
    del worker
    assert not psutil.pid_exists(number)


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel of Linux kills a worker whose parent dies"
)
def test_a_stopped_worker_dies_with_a_killed_parent() -> None:
    command = [sys.executable, str(process.SCRIPT), "serve", json.dumps(JOB)]
    parent = f"""
import os, signal, subprocess
worker = subprocess.Popen({command!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
worker.send_signal(signal.SIGSTOP)
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    number = int(done.stdout)
    wait_until(
        lambda: (
            not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
        )
    )


def test_the_time_that_a_worker_uses_is_known_until_it_ends() -> None:
    worker = Worker(JOB)
    # the system counts in hundredths of a second: one text may take none
    wait_until(lambda: worker.decode(text(5)) == [2, 5] and worker.cpu_seconds() > 0)
    worker.close()
    assert worker.cpu_seconds() == 0.0


def test_the_worker_imports_nothing_of_ours() -> None:
    assert "import bild_lab" not in Path(process.__file__).with_name("peer_worker.py").read_text()
    assert "from bild_lab" not in Path(process.__file__).with_name("peer_worker.py").read_text()


def test_a_checkpoint_is_converted_once_for_its_weights_engine_versions_and_converter(
    checkpoints: Path, fake_engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, draft = (
        Checkpoint(str(checkpoints / "llama")),
        Checkpoint(str(checkpoints / "llama-draft")),
    )
    first = converted(llama, "openvino", {"openvino": "1"})
    assert (first / "model").read_text() == str(
        checkpoints / "llama"
    ) and first.parent == fake_engines
    others = [
        converted(draft, "openvino", {"openvino": "1"}),
        converted(llama, "ctranslate2", {"openvino": "1"}),
        converted(llama, "openvino", {"openvino": "2"}),
    ]
    with monkeypatch.context() as change:
        change.setattr(process, "_convert", None)
        assert (
            converted(Checkpoint(str(checkpoints / "llama")), "openvino", {"openvino": "1"})
            == first
        )
    changed = tmp_path / "worker.py"
    changed.write_text(process.SCRIPT.read_text() + "# another converter")
    monkeypatch.setattr(process, "SCRIPT", changed)
    assert len({first, *others, converted(llama, "openvino", {"openvino": "1"})}) == 5


def test_on_a_disk_without_locks_a_checkpoint_that_two_processes_convert_is_kept_once(
    no_locks: None, checkpoints: Path, fake_engines: Path
) -> None:
    """Fault: `No locks available`, and the second to end failed."""
    llama = Checkpoint(str(checkpoints / "llama"))
    folder = converted(llama, "openvino", {"openvino": "1"})
    process._convert(llama, "openvino", folder, None)  # as one that began before it was there
    assert [file.name for file in folder.iterdir()] == ["model"]
    assert [file for file in fake_engines.iterdir() if file.suffix != ".lock"] == [folder]


def test_a_conversion_that_fails_is_refused_and_leaves_nothing(
    checkpoints: Path, fake_engines: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "unknown"
    folder.symlink_to(checkpoints / "llama")
    message = (
        "openvino cannot convert .*unknown: ValueError: unknown architecture; use another policy"
    )
    with pytest.raises(UserError, match=message):
        converted(Checkpoint(str(folder)), "openvino", {"openvino": "1"})
    assert [file for file in fake_engines.iterdir() if file.suffix != ".lock"] == []
