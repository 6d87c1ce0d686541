"""pass@1: the share of answers whose program passes its tests. The programs run in processes of
their own.

Isolation: one process for each program, with limits on memory and processor time, a clock, an empty
environment, and Python's audit hooks, which refuse network, processes, signals and every change of
a file (`program_worker`). That keeps a program from harm by accident. It does not keep it from
reading what the user can read, from using the processor until its time is over, from deceiving its
own tests, or from breaking out on purpose: run code that somebody may have meant to do harm in a
virtual machine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from bild_lab.errors import UserError

ANSWER = "{answer}"  # where a reference, a program with its tests, has the place of the answer
CPU_S = 10
CLOCK_S = 30.0
MEMORY_BYTES = 2**31

# one of which fits where a right answer would
_TRIED_ANSWERS = ("", "pass", "    pass", "\n    pass\n", "0")

_WORKER = Path(__file__).with_name("program_worker.py")
_FENCED = re.compile(r"```[ \t]*[\w+-]*[ \t]*\r?\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_HEAD = re.compile(r"^(?:async +)?def +(\w+)", re.MULTILINE)


def passes(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """100 for each answer whose program ran to its end, 0 for others. Call `require_permission`
    first.

    references: of each answer one program, in which `{answer}` stands for it. Of an answer with a
    fenced block of code the first such block counts. Raises UserError for another reference, and
    where no program runs.
    """
    programs = []
    for answer, (program_head, program_tail) in zip(
        answers, map(_parts, range(len(references)), references), strict=True
    ):
        programs.append(program_head + code_of(answer, program_head) + program_tail)
    _require_running()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [100.0 * ended for ended in pool.map(ends_well, programs)]


def _parts(index: int, references: Sequence[str]) -> tuple[str, str]:
    """What comes before and after the answer to example `index`.

    Raises UserError for another reference.
    """
    if len(references) != 1 or references[0].count(ANSWER) != 1:
        raise UserError(
            f"pass_at_1: the reference of example {index} must be one program that holds {ANSWER}"
            " once; set dataset.reference_template, as conf/dataset/humaneval.yaml does"
        )
    program_head, _, program_tail = references[0].partition(ANSWER)
    return program_head, program_tail


def _require_running() -> None:
    """Raise UserError where no program runs."""
    if not ends_well("assert 1 + 1 == 2"):
        raise UserError(
            f"a program that does nothing wrong fails under {sys.executable}; pass_at_1 cannot be"
            " measured"
        )


def require_programs(references: Sequence[Sequence[str]]) -> None:
    """Raise UserError, before anything is decoded, for references that no answer could make a
    program.

    Call `require_permission` first.
    """
    for index, example_references in enumerate(references):
        program_head, program_tail = _parts(index, example_references)
        problems = [
            _syntax_problem(program_head + answer + program_tail) for answer in _TRIED_ANSWERS
        ]
        if all(problems):
            raise UserError(
                f"pass_at_1: the program of example {index} is no Python around any answer"
                f" ({problems[0]}); correct its columns or dataset.reference_template"
            )
    _require_running()


def _syntax_problem(program: str) -> str:
    """Why a program does not compile; empty if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(program, "program", "exec")
    except (SyntaxError, ValueError) as error:  # a ValueError for a null character
        return str(error)
    return ""


def require_permission(run_code: bool) -> None:
    """Raise UserError unless programs may run, and can be limited here."""
    if not run_code:
        raise UserError(
            "pass_at_1 runs the programs that a model wrote, in processes without network; "
            "allow it with measure.run_code=true"
        )
    if sys.platform != "linux":
        raise UserError(
            f"pass_at_1 limits programs on Linux only, got {sys.platform}; choose another"
            " dataset.metric"
        )


def code_of(answer: str, program_head: str = "") -> str:
    """The answer's first fenced block of code, on lines of its own; without one the answer as it
    is.

    program_head: what the program begins with, such as imports and a function's head. It stays: a
    block that defines the function anew comes after it, and any other block is the function's body
    and gets its indentation.
    """
    fenced_block = _FENCED.search(answer)
    if fenced_block is None:
        return answer
    block, last_line = fenced_block[1], program_head.rstrip().rpartition("\n")[2]
    indentation = last_line[: len(last_line) - len(last_line.lstrip())]
    function_names = _HEAD.findall(program_head)
    if indentation and function_names and function_names[-1] not in _HEAD.findall(block):
        block = textwrap.indent(textwrap.dedent(block), indentation)
    return f"\n{block}\n"


@lru_cache(maxsize=4096)  # baselines repeat from point to point
def ends_well(program: str) -> bool:
    """Whether the program runs to its end within its limits, without an error."""
    token = secrets.token_hex(16)
    request = {"program": program, "token": token, "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-S", "-B", str(_WORKER)],
                input=json.dumps(request).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=CLOCK_S,
                env={},
                cwd=folder,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.stdout == token.encode()
