"""Changes the modules that decide tokens and numbers, one small change at a time, and counts what the tests notice.

`python -m tests.mutants` runs every group of groups.yaml; words such as `engine.loop` choose some. A group whose code
and tests are as they were at its last run is not run again. MUTANT_EVERY=10 (or 5, or 2) takes each function's first
mutant and every tenth after it. MUTANT_AGAIN=1 runs the survivors of a stored result alone, for tests that were added.
Results are in outputs/mutants.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from fnmatch import fnmatch
from pathlib import Path

import yaml
from mutmut.mutation.diff_apply import get_diff_for_mutant

from tests.mutants.prepare import PROJECT, prepare

HERE = Path(__file__).parent
RESULTS = PROJECT / "outputs" / "mutants"
EVERY = {1: "", 2: "[13579]", 5: "[16]", 10: "1"}  # the last digit of the mutants that are run
SURVIVED = (0, 5, 33, 255)  # exit codes: all passed, none runs the function, tests could not begin; others: noticed
Group = Mapping[str, Sequence[str]]  # its `modules` and `tests`


def main() -> None:
    groups: dict[str, Group] = yaml.safe_load((HERE / "groups.yaml").read_text())
    RESULTS.mkdir(parents=True, exist_ok=True)
    every = int(os.environ.get("MUTANT_EVERY", "1"))
    failed = []
    for name in sys.argv[1:] or groups:
        try:
            measure(name, groups[name], every, bool(os.environ.get("MUTANT_AGAIN")))
        except RuntimeError as error:
            failed.append(name)
            print(f"{name}: {error}", flush=True)
    known = yaml.safe_load((HERE / "equivalent.yaml").read_text()) or []
    print(report({name: found for name in groups if (found := stored(name)) is not None}, known))
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def measure(name: str, group: Group, every: int, again: bool) -> None:
    """Run a group's mutants and store the result, unless that of the same code and tests, and no fewer, is there.

    again: only those that survived. Raises RuntimeError without a result of the same code.
    """
    modules, tests = (
        [f"{root}/{one}.py" for one in group[kind]] for kind, root in (("modules", "bild_lab"), ("tests", "tests"))
    )
    keys = {"code": content(modules), "tests": content(tests)}
    found = stored(name)
    if again and (found is None or found["code"] != keys["code"]):
        raise RuntimeError("no result of this code is stored, so its survivors are not known")
    if found is not None and keys.items() <= found.items() and found["every"] <= every:
        return
    chosen = survivors_of(found) if again else [f"*__mutmut_*{EVERY[every]}"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder, modules, tests)
        run_mutmut(folder, chosen, file_of(name).with_suffix(".log"))
        counted = {module: outcome(folder, module, chosen) for module in modules}
    if again:
        every = found["every"]
        for module, one in counted.items():
            one["mutants"] = found["modules"][module]["mutants"]
    file_of(name).write_text(json.dumps({**keys, "every": every, "modules": counted}, indent=1, ensure_ascii=False))
    survivors = sum(len(one["survivors"]) for one in counted.values())
    print(f"{name}: {sum(one['mutants'] for one in counted.values())} mutants, {survivors} survived", flush=True)


def content(paths: Sequence[str]) -> str:
    return hashlib.sha256(b"".join((PROJECT / path).read_bytes() for path in paths)).hexdigest()


def survivors_of(found: Mapping) -> list[str]:
    return [each["name"] for one in found["modules"].values() for each in one["survivors"]]


def run_mutmut(folder: Path, chosen: Sequence[str], log_file: Path) -> None:
    processes = os.environ.get("MUTANT_PROCESSES", str(os.cpu_count()))
    quick = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WHOLE_TABLES": "1"}
    with log_file.open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "mutmut", "run", "--max-children", processes, *chosen],
            cwd=folder,
            env={**os.environ, **quick},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )


def outcome(folder: Path, module: str, chosen: Sequence[str]) -> dict:
    """How many of a module's chosen mutants were run, and those that survived."""
    meta = folder / "mutants" / f"{module}.meta"
    codes = json.loads(meta.read_text())["exit_code_by_key"] if meta.is_file() else {}
    codes = {mutant: code for mutant, code in codes.items() if any(fnmatch(mutant, each) for each in chosen)}
    if None in codes.values() or (not codes and "*" in chosen[0]):
        raise RuntimeError(f"mutmut ended early in {module}; outputs/mutants says why")
    with chdir(folder):
        survivors = [difference(mutant, module) for mutant, code in codes.items() if code in SURVIVED]
    return {"mutants": len(codes), "survivors": survivors}


def difference(mutant: str, module: str) -> dict[str, str]:
    """A mutant as text: its function, the lines that were there and those that replace them."""
    lines = [line for line in get_diff_for_mutant(mutant, path=module).splitlines() if line[:3] not in ("---", "+++")]
    was, now = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    function = mutant.rpartition("__mutmut_")[0].rpartition(".x")[2].strip("_ǁ").replace("ǁ", ".")
    return {"name": mutant, "function": function, "was": was, "now": now}


def report(found: Mapping[str, dict], known: Sequence[Mapping[str, str]]) -> str:
    """The survivors that are not listed as equivalent, and the share of mutants noticed."""
    listed = {(each["module"], each["was"], each["now"]) for each in known if "module" in each}
    alike = re.compile("|".join(each["alike"] for each in known if "alike" in each) or "(?!)")
    rows, left, total, equal = [], [], 0, 0
    for module, one in (item for group in found.values() for item in group["modules"].items()):
        name = module.removeprefix("bild_lab/").removesuffix(".py")
        ours = [
            each
            for each in one["survivors"]
            if (name, each["was"], each["now"]) not in listed and not alike.fullmatch(f"{each['was']}\n{each['now']}")
        ]
        same = len(one["survivors"]) - len(ours)
        total, equal = total + one["mutants"], equal + same
        left += [f"{name}: {each['function']}\n  - {each['was']}\n  + {each['now']}" for each in ours]
        rows.append(f"| `{name}` | {one['mutants']} | {same} | {len(ours)} |")
    head = ["| Module | Mutants | Equivalent | Survived |", "|---|---|---|---|"]
    share = 1 - len(left) / max(1, total - equal)
    return "\n".join([*left, *head, *rows, f"{share:.1%} of {total - equal} noticed; {equal} equivalent ones left out"])


def stored(name: str) -> dict | None:
    return json.loads(file_of(name).read_text()) if file_of(name).is_file() else None


def file_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


if __name__ == "__main__":
    main()
