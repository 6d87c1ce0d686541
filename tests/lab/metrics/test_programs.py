"""Programs of models: what passes, what is kept from them, and when they may not run at all."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from threading import Lock
from time import sleep

import pytest

from bild_lab.engine.models import device
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.metrics import programs
from bild_lab.lab.metrics.programs import code_of, ends_well, passes
from bild_lab.lab.metrics.quality import Scoring, score

HUMANEVAL = (
    Path(__file__).resolve().parents[4] / "shared" / "data" / "humaneval" / "HumanEval.jsonl"
)
TESTED = "def double(x):\n{answer}\n\nassert double(2) == 4\n"
REFUSED = """
try:
    {attempt}
except (PermissionError, ImportError):
    pass
else:
    raise SystemExit("it was allowed")
"""


def test_an_answer_passes_if_its_program_runs_to_the_end() -> None:
    answers = ["    return 2 * x", "    return x", "    return", "    return 2 *"]
    answers += [f"    import os, sys\n    {leave}(0)" for leave in ("sys.exit", "os._exit")]
    assert passes(answers, [[TESTED]] * 6) == [100, 0, 0, 0, 0, 0]
    quality = score("pass_at_1", answers[:2], [[TESTED]] * 2, run_code=True)
    assert (quality.metric, quality.value) == ("pass@1", 50)


@pytest.mark.parametrize(
    "program",
    [
        "@dataclass\nclass Node:\n    value: int\n    left: 'Optional[Node]' = None\n\nNode(2)",
        "class Two:\n    x: int\n\nassert Two.__annotations__ == {'x': int}",
        "class Two: ...\n\nimport pickle\npickle.loads(pickle.dumps(Two()))",
        "import sys\nassert sys.modules[__name__].Optional is Optional",
    ],
)
def test_a_program_is_a_module_with_annotations_of_its_own(program: str) -> None:
    """Planted: no module of its name, where dataclasses find none, and annotations that are texts,
    as in the worker's own file.
    """
    imports = "from dataclasses import dataclass\nfrom typing import Optional\n\n"
    assert ends_well(imports + program)
    assert ends_well("assert __name__ not in ('__main__', 'builtins')")


def test_imports_from_the_future_come_before_the_programs_head() -> None:
    answer = (
        "```python\nfrom __future__ import generators\nfrom __future__ import annotations\n\n"
        "def double(x: Unknown):\n    return 2 * x\n```"
    )
    head = 'from typing import List\n\n\ndef double(x: int) -> int:\n    """Twice x."""\n'
    program = head + "{answer}\n\nassert double(2) == 4\n"
    right, wrong = answer, answer.replace("2 * x", "x")
    assert passes([right, wrong, "    return 2 * x\n"], [[program]] * 3) == [100, 0, 100]


@pytest.mark.parametrize(
    "lines",
    [
        "from __future__ import (\n    annotations,  # late\n    generators,\n)  # all",
        "from __future__ import annotations, \\\n    generators",
        "from  __future__  import annotations",
    ],
)
def test_an_import_from_the_future_on_several_lines_stays_whole(lines: str) -> None:
    """Planted: its first line alone came first, and no such program ran."""
    for begins in ("", "import math\n\n"):
        program = f"{begins}{lines}\n\n{TESTED}"
        assert passes(["    return 2 * x", "    return x"], [[program]] * 2) == [100, 0]


def test_no_more_programs_run_at_once_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: as many as the machine of a container has, which then run out of time."""
    running, most, lock = 0, 0, Lock()

    def counted(_: str) -> bool:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        sleep(0.02)
        with lock:
            running -= 1
        return True

    monkeypatch.setattr(programs, "ends_well", counted)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(device, "usable_cores", lambda: 2)
    passes([f"    return {number}" for number in range(8)], [[TESTED]] * 8)
    assert most == 2


def test_files_can_be_read_but_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_text("here")
    assert ends_well(f"assert open({str(file)!r}).read() == 'here'")
    for attempt in (
        f"open({str(file)!r}, 'w')",
        f"import os; os.unlink({str(file)!r})",
        f"os.mkdir({str(file)!r} + 'x')",
    ):
        assert ends_well("import os\n" + REFUSED.format(attempt=attempt))
    assert [one.name for one in tmp_path.iterdir()] == ["kept"] and file.read_text() == "here"


@pytest.mark.parametrize(
    "attempt",
    [
        "__import__('socket').socket()",
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "__import__('subprocess').run('true')",
        "__import__('ctypes').CDLL(None).fork()",
        "fcntl.fcntl(1, fcntl.F_SETOWN, 1)",
    ],
)
def test_there_are_no_network_other_processes_and_signals(attempt: str) -> None:
    assert ends_well("import fcntl, os\n" + REFUSED.format(attempt=attempt))


def test_memory_and_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ends_well("x = bytearray(3 * 2**30)")
    monkeypatch.setattr(programs, "CPU_S", 1)
    assert not ends_well("while True: pass")
    monkeypatch.setattr(programs, "CLOCK_S", 0.5)
    assert not ends_well("import time\ntime.sleep(60)")


def test_a_program_sees_none_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert ends_well("import os\nassert 'HF_TOKEN' not in os.environ")


def test_nothing_runs_without_permission_or_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ends_well", lambda program: pytest.fail("a program was run"))
    with pytest.raises(UserError, match=r"measure\.run_code=true"):
        score("pass_at_1", ["    return 2 * x"], [[TESTED]])
    monkeypatch.setattr(programs.sys, "platform", "win32")
    with pytest.raises(UserError, match="Linux only, got win32"):
        score("pass_at_1", ["    return 2 * x"], [[TESTED]], run_code=True)


def test_an_interpreter_that_fails_every_program_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "ends_well", lambda program: False)
    with pytest.raises(UserError, match="a program that does nothing wrong fails"):
        passes(["    return 2 * x"], [[TESTED]])


@pytest.mark.parametrize("references", [["x == 2"], ["{answer}{answer}"], ["{answer}", "{answer}"]])
def test_a_reference_must_be_one_program_with_a_place_for_the_answer(references: list[str]) -> None:
    with pytest.raises(UserError, match="example 0 must be one program that holds {answer} once"):
        passes(["x = 2"], [references])


def test_of_an_answer_in_prose_the_first_block_of_code_counts() -> None:
    assert code_of("    return 1") == "    return 1"
    assert (
        code_of("Sure!\n```python\nx = 1\ny = 2\n```\nOr:\n```\nx = 3\n```") == "\nx = 1\ny = 2\n"
    )
    assert code_of("```\nx = 1") == "\nx = 1\n"
    assert code_of("1. So:\n   ``` Python \nx = 1\n   ```\nThat is it.") == "\nx = 1\n"


@pytest.mark.parametrize(
    "block",
    [
        "def double(x):\n    return two() * x",
        "    return two() * x",
        "y = two() * x\nif y:\n    return y\nreturn 0",
    ],
)
@pytest.mark.parametrize("docstring", ['    """Twice x."""\n', ""])
def test_a_block_is_the_function_anew_or_its_body_after_the_prompts_imports_and_head(
    block: str, docstring: str
) -> None:
    """Fault: behind a head without a docstring neither ran, so every right answer was wrong."""
    prompt = (
        "from math import ceil\n\ndef two():\n    return ceil(1.5)\n\ndef double(x):\n" + docstring
    )
    reference = prompt + "{answer}\n\nassert double(2) == 4\n"
    assert passes([f"Here it is:\n```python\n{block}\n```\nIt doubles."], [[reference]]) == [100]
    assert passes(
        [block.replace("two()", "1") for block in (block, f"```\n{block}\n```")], [[reference]] * 2
    ) == [0, 0]


HEAD = 'from math import ceil\n\ndef double(x):\n    """Twice x."""\n'
DOUBLE = "def double(x):\n    return 2 * x\n"
INDENTED = textwrap.indent(DOUBLE, "   ")
FENCED_DOCSTRING = (
    'def double(x):\n    """So:\n    ```\n    >>> 1\n    ```\n    """\n    return 2 * x\n'
)


@pytest.mark.parametrize(
    "answer",
    [
        f"<think>\nPerhaps\n```python\ndef double(x): ...\n```\n</think>\n```python\n{DOUBLE}```",
        f"It begins.\n```python\ndef double(x): ...\n```\n</think>\n{DOUBLE}",
        f"analysisPerhaps\n```python\ndef double(x): ...\n```\nassistantfinal{DOUBLE}",
        f"1. So:\n\n   ```python\n{INDENTED}   ```\nThat is it.",
        f'```python title="double.py"\n{DOUBLE}```\nThat is it.',
        f"```{{.python}}\n{DOUBLE}```\nThat is it.",
        f"~~~python\n{DOUBLE}~~~\nThat is it.",
        f"Here: ```python\n{DOUBLE}```\nThat is it.",
        f"```bash\npip install numpy\n```\n```python\n{DOUBLE}```",
        f"For example:\n```\n>>> double(1)\n2\n```\nSo:\n```python\n{DOUBLE}```",
        f"```python\ndouble(1) == 2\n```\nSo:\n```python\n{DOUBLE}```",
        "```bash\npip install numpy\n```\n```python\nreturn 2 * x\n```",
        "    return 2 * x\n```\n\nIt doubles.",
        f"{DOUBLE}```\n\nIt doubles:\n```\ndouble(1) == 2\n```",
        f"```python\n{FENCED_DOCSTRING}```\nThat is it.",
        FENCED_DOCSTRING,
        f"```python\n{DOUBLE}```\n```python\ndef double(x): ...\n```",
        "```python\nreturn 2 * x\n    ```\nThat is it.",
    ],
)
def test_the_block_that_answers_is_found_however_it_is_written(answer: str) -> None:
    assert passes([answer], [[HEAD + "{answer}\n\nassert double(2) == 4\n"]]) == [100]


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (" Sure\n```\n    return 2 * x\n```", "\n    return 2 * x\n"),
        ("```python\nreturn 2 *\n```\n```\nno code here\n```", "\n    return 2 *\n"),
        ("```python\n" + "-" * 100_000 + "1\n```", "\n    " + "-" * 100_000 + "1\n"),
    ],
)
def test_prose_is_no_code_and_code_that_does_not_compile_fails_alone(
    answer: str, counts: str
) -> None:
    assert code_of(answer, HEAD) == counts


def test_a_function_without_a_fence_may_follow_a_head_without_a_docstring() -> None:
    assert passes([DOUBLE], [["def double(x):\n{answer}\n\nassert double(2) == 4\n"]]) == [100]


def test_a_function_may_be_defined_as_a_value() -> None:
    head = 'def double(x):\n    """Twice x."""\n'
    program = head + "{answer}\n\nassert double(2) == 4\n"
    codes = {
        "double = lambda x: 2 * x": 100,
        "double: object = lambda x: 2 * x": 100,
        "import math\ndouble = lambda x: math.prod([2, x])": 100,
        "x == double": 0,
        # bodies, which begin like it
        "double == 3\nreturn 2 * x": 100,
        "doubled = 2 * x\nreturn doubled": 100,
    }
    answers = [f"```python\n{code}\n```" for code in codes]
    assert passes(answers, [[program]] * len(codes)) == [*codes.values()]


@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL.is_file(), reason="no shared/data folder beside the repository")
def test_humanevals_own_solutions_pass_and_no_others() -> None:
    rows = [json.loads(line) for line in HUMANEVAL.read_text().splitlines()]
    references = [
        [f"{row['prompt']}{{answer}}\n\n{row['test']}\n\ncheck({row['entry_point']})\n"]
        for row in rows
    ]
    solutions = [row["canonical_solution"] for row in rows]
    assert passes(solutions, references) == [100] * 164
    whole = [
        f"Sure:\n```python\n{row['prompt']}{row['canonical_solution']}\n```\nDone." for row in rows
    ]
    bodies = [f"```\n{textwrap.dedent(solution)}```" for solution in solutions]
    assert passes(whole, references) == passes(bodies, references) == [100] * 164
    assert sum(passes(["    return None\n"] * 164, references)) == 0


IMPORTING = "import numpy as np\n" + TESTED


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (IMPORTING, "numpy"),
        (
            f"from math import inf\n{TESTED}from pandas.testing import assert_frame_equal\n",
            "pandas",
        ),
        ("def double(x):\n    import numpy\n{answer}\n\nassert double(2) == 4\n", "numpy"),
        # planted: what a program may do without, its own modules, and none by a name
        (f"try:\n    import numpy\nexcept ImportError:\n    numpy = None\n{TESTED}", None),
        (f"if __name__ == '__main__':\n    import numpy\n{TESTED}", None),
        (f"import os.path, typing\nfrom collections import abc\n{TESTED}", None),
        (f"{TESTED}assert 'import numpy'\n", None),
    ],
)
def test_tests_that_import_what_programs_do_not_have_are_refused_before_decoding(
    program: str, module: str | None
) -> None:
    """Planted: pass@1 of 0 for every answer, as of HumanEval+ and MBPP+, whose tests import numpy."""
    scoring = Scoring(("pass_at_1",), run_code=True)
    if module is None:
        assert scoring.fitted([[program]]).metrics == ("pass_at_1",)
        assert passes(["    return 2 * x"], [[program]]) == [100]
        return
    with pytest.raises(
        UserError, match=f"the program of example 1 imports {module} around the answer"
    ):
        scoring.fitted([[TESTED], [program]])


def test_wrong_answers_that_import_what_programs_do_not_have_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    answers = [
        "    import numpy\n    return 2 * x",
        "    return 3 * x",
        "    import math\n    return x",
    ]
    assert passes(answers, [[TESTED]] * 3) == [0, 0, 0]
    assert "wrong answers that import numpy: 1" in caplog.text
    caplog.clear()
    nested = "    return 3 * " + "(" * 500 + "x" + ")" * 500  # too deep to be read
    assert passes(["    return 2 * x", nested, "    return 2 *"], [[TESTED]] * 3) == [100, 0, 0]
    assert not caplog.text


def test_a_program_has_one_order_of_sets_in_every_process() -> None:
    """Planted: a seed of hashes for each process, by which the same text passed and failed."""
    first = "int(next(iter({f'{number}' for number in range(50)})))"
    passed = {ends_well(f"assert {first} % 2  # process {process}") for process in range(12)}
    assert len(passed) == 1


def test_a_program_that_is_no_python_around_any_answer_is_refused_before_decoding() -> None:
    scoring = Scoring(("pass_at_1",), run_code=True)
    whole = [
        "{answer}\nassert f()",
        "x = {answer}\n",
        "if x:\n{answer}\n",
        "def f():\n    {answer}\n",
    ]
    assert scoring.fitted([[one] for one in [TESTED, *whole]]).metrics == ("pass_at_1",)
    broken = "{answer}\nassert f( == 4\n"
    with pytest.raises(
        UserError, match=r"the program of example 1 is no Python around any answer \(.*line 2"
    ):
        scoring.fitted([[TESTED], [broken]])
    with pytest.raises(UserError, match="example 0 must be one program"):
        scoring.fitted([["assert f()"]])
