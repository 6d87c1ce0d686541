"""What `make gpu` found, as a page and as one JSON file."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.report.page.base import page_environment

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
MOST_LINES = 40  # of a failure's output


class LeftOut(Exception):
    """A step does not apply here. The message says why."""


@dataclass(frozen=True)
class Found:
    """What a step found. lines: sentences. rows: a table, every row with the same keys."""

    lines: Sequence[str] = ()
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """A step that has run. verdict: passed, failed or left out. output: of a failure, its last lines."""

    name: str
    verdict: str
    seconds: float
    lines: Sequence[str] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    output: str = ""


def attempt(name: str, work: Callable[[], Found]) -> Step:
    """Run a step. What goes wrong is its verdict, so that the steps behind it still run."""
    started = time.perf_counter()

    def done(verdict: str, lines: Sequence[str] = (), rows: Sequence[Mapping[str, Any]] = (), output: str = "") -> Step:
        return Step(name, verdict, time.perf_counter() - started, tuple(lines), tuple(rows), last_lines(output))

    try:
        found = work()
    except LeftOut as reason:
        return done(LEFT_OUT, [str(reason)])
    except UserError as error:
        message, _, output = str(error).partition("\n")
        return done(FAILED, [message], output=output)
    except Exception as error:
        return done(
            FAILED, [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"], output=traceback.format_exc()
        )
    return done(PASSED, found.lines, found.rows)


def last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-MOST_LINES:])


def headline(steps: Sequence[Step]) -> str:
    """What passed, in one sentence."""
    count = {verdict: sum(step.verdict == verdict for step in steps) for verdict in (PASSED, FAILED, LEFT_OUT)}
    failed = ", ".join(step.name for step in steps if step.verdict == FAILED)
    parts = [f"{count[PASSED]} of {len(steps)} steps passed"]
    if count[LEFT_OUT]:
        parts.append(f"{count[LEFT_OUT]} left out")
    return "; ".join([*parts, *([f"failed: {failed}"] if failed else [])]) + "."


def write(folder: Path, environment: Mapping[str, Any], steps: Sequence[Step]) -> tuple[Path, Path]:
    """Write `report.html` and `gpu.json`. Returns their paths."""
    page, data = folder / "report.html", folder / "gpu.json"
    folder.mkdir(parents=True, exist_ok=True)
    found = {"environment": dict(environment), "steps": [asdict(step) for step in steps]}
    write_atomically(data, (json.dumps(found, indent=2, default=str) + "\n").encode())
    shown = [{**asdict(step), "table": table_of(step.rows)} for step in steps]
    html = page_environment().get_template("gpu.html.j2")
    text = html.render(headline=headline(steps), environment=environment, steps=shown, data=data.name)
    write_atomically(page, text.encode())
    return page, data


def table_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Titles and cells of a step's rows; None without rows."""
    if not rows:
        return None
    titles = list(rows[0])
    return {
        "titles": [title.replace("_", " ") for title in titles],
        "rows": [[cell(row[key]) for key in titles] for row in rows],
    }


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
