"""The table of what the papers' items need in docs/papers.md, made of the steps that paper_run lists.

python -m docs.hooks.papers      # some minutes: composes every command of every item
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

from bild_lab.errors import UserError
from bild_lab.papers.published import published_names
from bild_lab.papers.runs.machine import Machine
from bild_lab.papers.runs.needs import GPUS, downloads, gpu_hours_of, needs
from bild_lab.papers.runs.step_runs import TO_DO, plan
from bild_lab.papers.runs.steps import Step, steps_of
from docs.hooks import keys, policies

PAGE = keys.ROOT / "docs/papers.md"
BEGIN = "<!-- bild_lab/papers: python -m docs.hooks.papers writes this table -->"
GPU = "a100"
NODES = (1, 8)  # GPUs of a machine
SWITCH = "runtime.allow_pickles=true"


def table(items: Sequence[str] | None = None) -> str:
    """The rows of these items; None: of all."""
    return "\n".join(_rows(published_names() if items is None else items))


def paper_steps(item: str) -> list[Step]:
    """The steps of an item at the papers' scale, with weights in pickles allowed."""
    try:
        return steps_of(item, "paper", [SWITCH])
    except UserError:  # no step of it loads a model
        return steps_of(item, "paper")


def what_runs(steps: Sequence[Step], gpus: int) -> str:
    """How many steps run on so many GPUs, by somebody who may read what is gated; if not all, why
    the first does not.
    """
    machine = Machine(GPU, GPUS[GPU][0], gated=True, gpus=gpus)
    statuses = [status for _, status in plan(steps, machine)]
    refused = [status for status in statuses if status != TO_DO]
    if not refused:
        return "all"
    reason = refused[0].partition(", here are")[0].partition(": put it")[0]
    return f"{len(statuses) - len(refused)} of {len(statuses)} steps; {reason}"


def _rows(items: Sequence[str]) -> Iterator[str]:
    titles = [
        "Item",
        "Download, GB",
        "Memory, GB",
        "GPU-hours",
        *(f"{gpus} × {GPUS[GPU][0]} GB" for gpus in NODES),
    ]
    yield f"| {' | '.join(titles)} |"
    yield "|---|" + "---:|" * 3 + "---|" * len(NODES)
    for item in items:
        steps = paper_steps(item)
        step_needs = [[needs(setting, GPU) for setting in step.settings] for step in steps]
        known = [need for needed in step_needs for need in needed]
        hours = [gpu_hours_of(needed) for needed in step_needs if needed]
        least = "≥ " if None in hours else ""
        total = sum(value for value in hours if value is not None)
        cells = [
            f"`{item.replace('_', '/', 1)}`",
            f"{sum(downloads(known).values()):.0f}",
            f"{max((need.memory_gb for need in known), default=0):.0f}",
            f"{least}{total:.0f}" if total >= 1 or not total else f"{least}{total:.1f}",
            *(what_runs(steps, gpus) for gpus in NODES),
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # where nothing is done yet
        os.chdir(folder)
        rows = table()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(policies.with_table(page, rows, BEGIN), encoding="utf-8")
    sys.stdout.write(f"{PAGE} has the table of the papers' items\n")


if __name__ == "__main__":
    main()
