"""Stands in for `python -m bild_lab.training.toy NAME`; the variable TOY_CHILD says what it does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def train() -> None:
    """Train the pair of the configuration in TOY_CONF; the project's own takes minutes."""
    from bild_lab.lab import toy_pair
    from bild_lab.training import toy

    toy_pair.config_dir = lambda: Path(os.environ["TOY_CONF"])
    sys.exit(toy.main(sys.argv[1]))


def refuse() -> None:
    print("the cache is full; make room")
    sys.exit(2)


def fail() -> None:
    raise RuntimeError("a fault")


def interrupted() -> None:
    sys.exit(130)


def interrupted_at_the_start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[os.environ["TOY_CHILD"]]()
