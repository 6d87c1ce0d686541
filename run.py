"""Measure decoding policies: `python run.py --help`, or docs/commands.md. Installed, it is `bild-lab run`."""

from bild_lab.lab.application import command as run
from bild_lab.lab.application import main

__all__ = ["main", "run"]

if __name__ == "__main__":
    run()
