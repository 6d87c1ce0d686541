"""Run one program and say whether it ended well: python -P -s -S -B program_worker.py, which
`programs` starts.

Standard input is a JSON object: the program, a token, the limits. The token is written back if the
program ran to its end. What a program asks of the system goes through Python's audit hooks, which
cannot be taken off again.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from typing import Any

READING = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"}
REFUSED = (
    "os.",
    "socket.",
    "subprocess.",
    "shutil.",
    "fcntl.",
    "signal.",
    "ctypes.",
    "mmap.",
    "pty.",
)
BEYOND = {"ctypes", "_ctypes", "_posixsubprocess"}  # modules that could do more than the hooks see
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: no network, processes or signals, and no change of a file."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    beyond = event == "import" and arguments[0] in BEYOND
    if writes or beyond or (event.startswith(REFUSED) and event not in READING):
        raise PermissionError(f"a program may not do this: {event}")


def main() -> None:
    """Read, limit, run."""
    request = json.loads(sys.stdin.read())
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for limit, maximum in (
        (resource.RLIMIT_AS, request["memory_bytes"]),
        (resource.RLIMIT_CPU, request["cpu_s"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (maximum, maximum))
    # a module as others are: dataclasses and pickle look for it by its name
    module = types.ModuleType("program")
    sys.modules[module.__name__] = module
    sys.addaudithook(refuse)
    write, leave = os.write, os._exit  # as they are before the program
    try:
        # without this file's own `from __future__`, which makes texts of all annotations
        program = compile(request["program"], "program", "exec", dont_inherit=True)
        exec(program, module.__dict__)
    except BaseException:  # whatever ends a program early, sys.exit too, is a failure
        leave(1)
    write(answers, request["token"].encode())
    leave(0)


if __name__ == "__main__":
    main()
