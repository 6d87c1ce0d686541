"""Predict a sweep's speed on declared machines: python scripts/predict.py outputs/NAME machine=h100_sxm,a100_sxm

machine: files of conf/machine by name, or files of your own with the same keys. Nothing is run or timed: the forwards
that a sweep has recorded are priced by a roofline. The rows are also written to outputs/NAME/predicted.csv.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from bild_lab.errors import UserError
from bild_lab.files import write_atomically
from bild_lab.lab.cli import output, run_application, stages

if TYPE_CHECKING:
    from bild_lab.lab.analysis.cost import Machine
    from bild_lab.lab.schema.result import Result

FILE = "predicted.csv"
KEY = "machine="


def row(result: Result, machines: list[Machine]) -> dict[str, object]:
    """One point: what was measured, and what each machine would do. None where a point has no such number."""
    predicted = {}
    for machine in machines:
        known = result.work is not None
        speedup = machine.speedup(result.work, result.setting["dtype"]) if known else None
        predicted[f"predicted_speedup {machine.name}"] = speedup
    counts = result.counts
    return {
        "policy": result.policy,
        "knobs": " ".join(f"{knob} {value}" for knob, value in result.knobs.items()),
        "tokens_per_call": counts.tokens_per_target_call,
        "acceptance_rate": counts.acceptance_rate,
        "speedup": result.speedup.value,
        **predicted,
    }


def shown(value: object) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    folders = [word for word in sys.argv[1:] if not word.startswith(KEY)]
    names = [name for word in sys.argv[1:] if word.startswith(KEY) for name in word.removeprefix(KEY).split(",")]
    if len(folders) != 1 or not names:
        raise UserError(
            f"one sweep and its machines are needed, got {' '.join(sys.argv[1:]) or 'nothing'}; "
            "python scripts/predict.py outputs/NAME machine=h100_sxm"
        )
    stages.enter("loading libraries")
    from bild_lab.lab.analysis.cost import read_machine  # late: torch takes seconds to load
    from bild_lab.lab.results.records import Sweep

    machines = [read_machine(name) for name in names]
    results = Sweep(Path(folders[0])).results()
    if not results:
        raise UserError(f"{folders[0]} has no finished points; give the folder of a sweep, outputs/NAME")
    rows = [row(result, machines) for result in results if not result.is_baseline]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["policy"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(Path(folders[0]) / FILE, text.getvalue().encode())
    table = Table(*(name.replace("_", " ") for name in writer.fieldnames))
    for one in rows:
        table.add_row(*map(shown, one.values()))
    output.print(table)
    if lacking := sum(result.work is None for result in results if not result.is_baseline):
        output.print(f"{lacking} points recorded no forwards: Transformers' own loops, or an older version")
    output.print(f"{folders[0]}/{FILE} contains these rows; predicted from declared figures, not measured")


if __name__ == "__main__":
    run_application(main, None)
