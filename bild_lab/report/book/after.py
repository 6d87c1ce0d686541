"""Writing the lab book at the end of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape

OUTPUTS = Path("outputs")


@contextmanager
def in_lab_book(outputs: Path = OUTPUTS) -> Iterator[None]:
    """Write the lab book when the block ends, however it ends, unless its input was refused."""
    try:
        yield
    except UserError:
        raise
    except BaseException:
        update(outputs)
        raise
    update(outputs)


def update(outputs: Path = OUTPUTS) -> None:
    """Write the lab book. A fault is told in a line: what was measured does not depend on it."""
    from bild_lab.report.book.book import write_book  # late: the templates take a while to import

    if not launched().first or not outputs.is_dir():
        return
    try:
        write_book(outputs)
    except Exception as error:
        console.print(f"[bold]the lab book was not written[/bold]: {escape(f'{type(error).__name__}: {error}')}")
