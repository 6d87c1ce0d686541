"""pass@1: the share of answers whose program passes its tests. The programs run in processes of
their own.

Isolation: one process for each program, with limits on memory and processor time, a clock, none of
the user's environment variables, and Python's audit hooks, which refuse network, processes, signals
and every change of a file (`program_worker`). That keeps a program from harm by accident. It does
not keep it from reading what the user can read, from using the processor until its time is over,
from deceiving its own tests, or from breaking out on purpose: run code that somebody may have meant
to do harm in a virtual machine.

Programs have Python's own modules alone. Hashes have one seed, so that a program whose result hangs
on the order of a set passes in every process or in none.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from bild_lab.engine.models.checkpoint.chat import without_thoughts
from bild_lab.errors import UserError, warn_once

ANSWER = "{answer}"  # where a reference, a program with its tests, has the place of the answer
CPU_S = 10
CLOCK_S = 30.0
MEMORY_BYTES = 2**31

# a ValueError for a null character, the last two for what is nested too deeply
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
# one of which fits where a right answer would
_TRIED_ANSWERS = ("", "pass", "    pass", "\n    pass\n", "0")

_WORKER = Path(__file__).with_name("program_worker.py")
# a line that begins or ends a block of code: its indentation, its marks, and what it says of the
# code
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})([^`\r\n]*)\r?\n?", re.MULTILINE)
# columns that the end of a block may be indented deeper than its beginning (CommonMark)
_DEEPER = 3
# a block whose fences stand anywhere, such as behind words
_LOOSELY_FENCED = re.compile(r"```[ \t]*[\w+-]*[ \t]*\r?\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
# on one line, or on several, in brackets or with backslashes
_FUTURE = re.compile(
    r"^from +__future__ +import +(?:\([^)]*\)[^\r\n]*|(?:\\\r?\n|[^\r\n])*)", re.MULTILINE
)
_HEAD = re.compile(r"^(?:async +)?def +(\w+)", re.MULTILINE)


def passes(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """100 for each answer whose program ran to its end, 0 for others. Call `require_permission`
    first.

    references: of each answer one program, in which `{answer}` stands for it. Of an answer with
    fenced blocks of code one block counts (`code_of`). Raises UserError for another reference, and
    where no program runs.
    """
    from bild_lab.engine.models.device import usable_cores  # late: torch takes seconds to load

    programs = []
    for answer, (program_head, program_tail) in zip(
        answers, map(_parts, range(len(references)), references), strict=True
    ):
        code = code_of(answer, program_head)
        programs.append(_future_first(program_head + code + program_tail))
    _require_running()
    # more at once would wait for each other while their clocks run
    with ThreadPoolExecutor(usable_cores()) as pool:
        ended = list(pool.map(ends_well, programs))
    _warn_of_missing_modules(
        program for program, well in zip(programs, ended, strict=True) if not well
    )
    return [100.0 * well for well in ended]


def _warn_of_missing_modules(failed_programs: Iterable[str]) -> None:
    """Warn of programs that failed, and would elsewhere have modules that they lack here."""
    lacking = [modules for modules in map(_missing_modules, failed_programs) if modules]
    if lacking:
        names = ", ".join(sorted({name for modules in lacking for name in modules}))
        warn_once(
            "pass_at_1: programs here have Python's own modules alone; wrong answers that import"
            f" {names}: {len(lacking)}"
        )


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
        tried = [program_head + answer + program_tail for answer in _TRIED_ANSWERS]
        problems = list(map(_syntax_problem, tried))
        if all(problems):
            raise UserError(
                f"pass_at_1: the program of example {index} is no Python around any answer"
                f" ({problems[0]}); correct its columns or dataset.reference_template"
            )
        if modules := _missing_modules(tried[problems.index("")]):
            raise UserError(
                f"pass_at_1: the program of example {index} imports {modules[0]} around the answer,"
                " and programs here have Python's own modules alone, so that every answer would"
                " fail; leave such rows out of the data"
            )
    _require_running()


def _missing_modules(program: str) -> list[str]:
    """The modules that a program imports and that are not Python's own, in the order of the alphabet;
    none that it may do without, as within `try` or `if`, and none of what cannot be parsed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts: list[ast.AST] = [ast.parse(program)]
    except UNREADABLE:
        return []
    imported = set()
    while parts:
        part = parts.pop()
        if isinstance(part, ast.Try | ast.TryStar | ast.If):
            continue
        parts += ast.iter_child_nodes(part)
        if isinstance(part, ast.Import):
            imported |= {name.name.partition(".")[0] for name in part.names}
        elif isinstance(part, ast.ImportFrom) and part.module and not part.level:
            imported.add(part.module.partition(".")[0])
    return sorted(imported - sys.stdlib_module_names)


def _syntax_problem(program: str) -> str:
    """Why a program does not compile; empty if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(_future_first(program), "program", "exec", dont_inherit=True)
    except UNREADABLE as error:
        return str(error) or type(error).__name__
    return ""


def _future_first(program: str) -> str:
    """The program with its imports from `__future__` before all else, where alone Python takes them:
    an answer that is a whole script may have some, and comes after the program's head.
    """
    imports = "".join(f"{line}\n" for line in dict.fromkeys(_FUTURE.findall(program)))
    return imports + _FUTURE.sub("", program) if imports else program


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
    """The code of an answer, without what a model thought before it: a fenced block, on lines of
    its own; without one the answer as it is.

    program_head: what the program begins with, such as imports and a function's head. It stays: a
    block that defines the function anew comes after it, and any other block is the function's body
    and gets its indentation. Of several blocks the first that defines the function and compiles
    behind the head counts, else the first that compiles, else the first. Code outside all blocks
    comes before them: an answer that is code alone, or the end of a block that the prompt began.
    """
    answer = without_thoughts(answer)
    for code in (answer, _block_begun_by_the_prompt(answer)):
        if _is_code(code, program_head):
            return code
    # a block whose end cannot be told is read in both ways
    blocks = [*_fenced_blocks(answer), *_LOOSELY_FENCED.findall(answer)]
    if not blocks:
        return _placed(answer, program_head) if _defines_anew(answer, program_head) else answer
    programs = [_placed(block, program_head) for block in blocks]
    defining = [program for program in programs if _defines_anew(program, program_head)]
    compiling = (
        program for program in [*defining, *programs] if not _syntax_problem(program_head + program)
    )
    return next(compiling, programs[0])


def _block_begun_by_the_prompt(answer: str) -> str:
    """The text before the first fence, if that may end a block; else empty."""
    fence = _FENCE.search(answer)
    return "" if fence is None or fence[3].strip() else answer[: fence.start()]


def _is_code(text: str, program_head: str) -> bool:
    """Whether a whole text is code and no prose: a function, or the indented body of one."""
    indented_body = text.lstrip("\r\n")[:1] in (" ", "\t") and text.strip() != ""
    may_be_code = indented_body or _HEAD.search(text) is not None
    return may_be_code and not _syntax_problem(program_head + text)


def _fenced_blocks(answer: str) -> list[str]:
    """The blocks of code between lines that are fences; the last may lack its end."""
    blocks, opening = [], None
    for fence in _FENCE.finditer(answer):
        if opening is None:
            opening = fence
        elif _closes(fence, opening):
            blocks.append(_between(answer, opening, fence.start()))
            opening = None
    if opening is not None:
        blocks.append(_between(answer, opening, len(answer)))
    return blocks


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    """Whether a fence ends the block that another one begins, as CommonMark says."""
    deepest = len(opening[1]) + _DEEPER
    return fence[2].startswith(opening[2]) and not fence[3].strip() and len(fence[1]) <= deepest


def _between(answer: str, opening: re.Match[str], end: int) -> str:
    """A block, up to the place of its end, without the indentation that its beginning has."""
    block = answer[opening.end() : end].removesuffix("\n")
    return re.sub(rf"^[ \t]{{0,{len(opening[1])}}}", "", block, flags=re.MULTILINE)


def _placed(block: str, program_head: str) -> str:
    """A block as it comes after the program's head: on lines of its own, a body with the
    indentation of its function.

    Behind a head that ends with its colon, without a docstring, a function that is defined anew
    leaves an empty one.
    """
    last_line = program_head.rstrip().rpartition("\n")[2]
    indentation = last_line[: len(last_line) - len(last_line.lstrip())]
    lacks_body = last_line.endswith(":")
    if lacks_body:
        indentation += "    "
    in_function = indentation and _HEAD.search(program_head)
    if in_function and not _defines_anew(block, program_head):
        block = textwrap.dedent(block)
        if not _defines_anew(block, program_head):
            block = textwrap.indent(block, indentation)
    empty_body = f"{indentation}pass\n" if lacks_body and _defines_anew(block, program_head) else ""
    return f"\n{empty_body}{block}\n"


def _defines_anew(code: str, program_head: str) -> bool:
    """Whether code defines the function that the program's head ends in, by `def` or as a value."""
    if not (function_names := _HEAD.findall(program_head)):
        return False
    name = function_names[-1]
    return name in _HEAD.findall(code) or bool(
        re.search(rf"^{name}(?: *:[^=\n]+)? *=[^=]", code, re.MULTILINE)
    )


@lru_cache(maxsize=4096)  # baselines repeat from point to point
def ends_well(program: str) -> bool:
    """Whether the program runs to its end within its limits, without an error."""
    token = secrets.token_hex(16)
    request = {"program": program, "token": token, "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-s", "-S", "-B", str(_WORKER)],
                input=json.dumps(request).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=CLOCK_S,
                env={"PYTHONHASHSEED": "0"},
                cwd=folder,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.stdout == token.encode()
