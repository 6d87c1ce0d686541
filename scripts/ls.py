"""List everything in outputs, and write the lab book anew: python scripts/ls.py [WORD …] [outputs=DIR]

    python scripts/ls.py                        # the newest of each kind first
    python scripts/ls.py multi30k interrupted   # what contains all these words

A WORD is a name, model, dataset, policy, kind or state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape, output, run_application

if TYPE_CHECKING:
    from bild_lab.report.book.entry import Entry

STYLES = {"finished": "green", "running": "blue", "interrupted": "yellow", "failed": "red", "damaged": "red"}
WIDEST = 110  # columns


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    if unknown := sorted(set(settings) - {"outputs"}):
        raise UserError(f"the only setting is outputs=DIR, got {unknown[0]}; leave it out")
    print_book(Path(settings.get("outputs", "outputs")), [word for word in sys.argv[1:] if "=" not in word])


def print_book(outputs: Path, words: Sequence[str] = ()) -> None:
    """Print the entries that contain all words, by kind, and write the page. Raises UserError for a missing folder."""
    from bild_lab.report.book.book import PAGE, TITLES, matching, of_kind, read_entries, write_book

    if not outputs.is_dir():
        raise UserError(
            f"{outputs} is no folder; run a sweep first, python run.py experiment=quickstart, or give outputs=DIR"
        )
    try:
        entries = write_book(outputs)
        written = f"{outputs / PAGE} shows them with pictures"
    except OSError as error:  # another user's folder, or a full disk
        entries, written = read_entries(outputs), f"{outputs / PAGE} was not written: {error}"
    chosen = matching(entries, words)
    for kind, title in TITLES.items():
        if found := of_kind(chosen, kind):
            output.print(f"[bold underline]{title}[/bold underline] ({len(found)})")
            for entry in found:
                output.print(shown(entry, min(WIDEST, output.width)), soft_wrap=False)
    if words:
        console.print(f"{len(chosen)} of {len(entries)} contain {escape(' '.join(words))}")
    console.print(escape(written))


def shown(entry: Entry, width: int) -> Group:
    """An entry's lines: name, state, date and size; then what was found, and of what."""
    from bild_lab.report.book.book import day, told_bytes

    first = Table.grid(padding=(0, 1, 0, 0), expand=True)
    first.add_column(ratio=1, overflow="fold")
    first.add_column(width=26, justify="right")
    first.add_column(width=16, no_wrap=True)
    first.add_column(width=9, justify="right", no_wrap=True)
    state = Text(entry.told_state, STYLES[entry.state])
    first.add_row(Text(entry.name, "bold"), state, day(entry.date), told_bytes(entry.size_bytes))
    about = Text(" · ".join(filter(None, (entry.pair, entry.data))), "dim")
    lines = [Padding(each, (0, 0, 0, 2)) for each in (Text(entry.headline), about) if each]
    return Group(Constrain(first, width), *(Constrain(line, width) for line in lines))


if __name__ == "__main__":
    run_application(main, None)
