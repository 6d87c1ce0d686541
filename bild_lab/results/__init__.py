"""Results on disk: one folder per point, written whole or not at all."""

from bild_lab.results.records import Sweep
from bild_lab.results.table import write_table

__all__ = ["Sweep", "write_table"]
