"""What is told of the machine is true of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bild_lab.lab.measure.environment import OtherLoad, name_in


def test_another_busy_process_is_noticed_and_our_own_work_is_not() -> None:
    own = OtherLoad()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pass
    quiet = own.percent()
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.3)
        others = OtherLoad()
        time.sleep(1.0)
        loud = others.percent()
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert loud > quiet + 10  # the other half of the tests may be running too


def test_processors_of_one_name_are_told_apart_by_their_tiles() -> None:
    flags, name = "flags\t\t: fpu avx512_bf16", "model name\t: Intel(R) Xeon(R) Processor"
    assert name_in(f"{flags}\n{name}") == "Intel(R) Xeon(R) Processor"
    assert name_in(f"{flags} amx_bf16\n{name}") == "Intel(R) Xeon(R) Processor with AMX"
    assert name_in("Features\t: fp asimd") == name_in("") == ""
