"""Running an application under `torchrun`: only the first process prints and writes."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bild_lab.engine.models.ranks import launched
from bild_lab.errors import UserError
from bild_lab.lab.cli import console, output

GRACE_S = 30  # time for the first process to print what went wrong and to report finished points
SIGNALLED = 128  # a higher exit status means a signal, which all processes got


@contextmanager
def only_first_prints() -> Iterator[None]:
    """Run an application in each process that `torchrun` started. Only the first one prints.

    Another process prints only if it fails. `torchrun` ends all processes when one fails, so the failed process waits
    a while before it exits, to let the first process print.
    """
    ranks, printed = launched(), io.StringIO()
    if not ranks.first:
        console.file, output.quiet = printed, True
    try:
        yield
    except SystemExit as ended:
        if ended.code and not ranks.first and ended.code <= SIGNALLED:
            time.sleep(GRACE_S)
            sys.stderr.write(f"process {ranks.rank}:\n{printed.getvalue()}")
        torch = sys.modules.get("torch")  # not imported for `--help`
        if not ended.code and ranks.count > 1 and torch is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise


def require_basic_launcher(launcher: str) -> None:
    """Raise UserError for a Hydra launcher other than the basic one: `torchrun` does not know its processes."""
    if launched().count > 1 and not launcher.endswith(".BasicLauncher"):
        raise UserError(f"under torchrun every process runs every point, got the launcher {launcher}; leave it out")
