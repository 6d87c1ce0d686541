"""Run one program and say whether it ended well: python -I -S -B program_worker.py, which `programs` starts.

Standard input is a JSON object: the program, a token, the limits. The token is written back if the program ran to its
end. The filter of system calls is for Linux on x86-64; it is Linux's seccomp, which needs no rights and cannot be
taken off again.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

NO_FILTER = 77  # the exit code if the filter cannot be installed

# What a program may ask of the system, by the numbers of Linux on x86-64. Everything else fails: sockets, processes,
# threads, signals to others, and every change of a file.
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "nanosleep": 35, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "gettid": 186, "time": 201,
    "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270,
    "ppoll": 271, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
OPENING = {2: 1, 257: 2}  # open, openat: which argument holds the flags
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

AUDIT_ARCH_X86_64 = 0xC000003E
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # REFUSE: the call fails with EPERM
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of the filter
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in what it is given


class Instruction(ctypes.Structure):
    """`struct sock_filter`. if_true, if_false: how many instructions to skip."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction))]


def instructions() -> list[tuple[int, int, int, int]]:
    """The filter: allowed calls, and opening a file to read it."""
    found = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in ALLOWED.values():
        found += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number, argument in OPENING.items():
        found += [
            (EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENTS + 8 * argument),
            (ANY_BIT, 0, 1, WRITING),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    return [*found, (RETURN, 0, 0, REFUSE)]


def confine() -> bool:
    """Refuse every other system call from now on. Returns False where that is not possible."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return False
    listed = [Instruction(*each) for each in instructions()]
    array = (Instruction * len(listed))(*listed)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Filter(len(listed), array)), 0, 0) == 0


def main() -> None:
    """Read, limit, confine, run."""
    asked = json.loads(sys.stdin.read())
    answers, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for limit, most in (
        (resource.RLIMIT_AS, asked["memory_bytes"]),
        (resource.RLIMIT_CPU, asked["cpu_s"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    program = asked["program"]
    if not confine():
        os._exit(NO_FILTER)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except BaseException:  # whatever ends a program early, sys.exit too, is a failure
        os._exit(1)
    os.write(answers, asked["token"].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
