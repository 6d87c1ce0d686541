"""List the runs in outputs, or print one as a Markdown table: python scripts/ls.py [WORD …] [outputs=DIR]

    python scripts/ls.py                        # all, the newest first; writes outputs/index.html anew
    python scripts/ls.py multi30k t5-large      # those that contain all these words
    python scripts/ls.py outputs/NAME           # the points of one, for a page or an issue

A WORD is a name, model, dataset or policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, output, run_application, stages

POINT = "policy|knobs|quality|difference|speedup|latency|tokens/s|tokens/call|acceptance|same output".split("|")


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    words = [word for word in sys.argv[1:] if "=" not in word]
    if unknown := sorted(set(settings) - {"outputs"}):
        raise UserError(f"the only setting is outputs=DIR, got {unknown[0]}; leave it out")
    if len(words) == 1 and (Path(words[0]) / "points").is_dir():
        print_points(Path(words[0]))
    else:
        print_runs(Path(settings.get("outputs", "outputs")), words)


def print_runs(outputs: Path, words: Sequence[str]) -> None:
    """Print the runs that contain all words, and write the page. Raises UserError for a missing folder."""
    from bild_lab.report.index import PAGE, read_runs, write_index

    if not outputs.is_dir():
        raise UserError(
            f"{outputs} is no folder; run a sweep first, python run.py experiment=quickstart, or give outputs=DIR"
        )
    try:
        runs, written = write_index(outputs), f"{outputs / PAGE} shows them too, with their commands"
    except OSError as error:  # another user's folder, or a full disk
        runs, written = read_runs(outputs), f"{outputs / PAGE} was not written: {error}"
    chosen = [run for run in runs if run.contains(words)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("name, date", "models, data", "points", "no loss", "one point"):
        table.add_column(title, overflow="fold", justify="right" if title == "points" else "left")
    for run in chosen:
        name, about = f"{run.name}\n{run.date[:10]}", f"{run.pair}\n{run.data}"
        table.add_row(*map(Text, (name, about, str(run.points), run.free, run.cheap)))
    output.print(table)
    if words:
        console.print(f"{len(chosen)} of {len(runs)} contain {escape(' '.join(words))}")
    console.print(escape(written))


def print_points(folder: Path) -> None:
    """Print a sweep's headline and its points, fastest first, in Markdown. Raises UserError without points."""
    stages.enter("loading libraries")
    from bild_lab.lab.formatting import knob_label  # late: pandas takes seconds to load
    from bild_lab.lab.results.records import Sweep
    from bild_lab.report.headline import headline
    from bild_lab.report.page.tables import cell_of

    results = Sweep(folder).results()
    if not results:
        raise UserError(f"{folder} has no finished points; give the folder of a sweep, outputs/NAME")
    rows = [POINT, ["---"] * len(POINT)]
    for result in sorted(results, key=lambda result: result.latency_s.mean):
        names = ("quality", "quality_difference", "speedup", "latency_s_median", "tokens_per_s")
        names += ("tokens_per_target_call", "acceptance_rate", "agreement_with_target")
        cells = [cell_of(result, name) for name in names]
        numbers = [f"{cell.text} {cell.detail}".strip() for cell in cells]
        rows.append([f"`{result.policy}`", knob_label(result, list(result.knobs)), *numbers])
    stages.leave()
    print(headline(results) + "\n")
    print("\n".join("| " + " | ".join(cells) + " |" for cells in rows))


if __name__ == "__main__":
    run_application(main, None)
