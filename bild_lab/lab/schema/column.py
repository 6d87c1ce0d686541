"""A column of a table: where its value is in a result, what it is called, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bild_lab.lab.formatting import number, percent, times
from bild_lab.lab.schema.result import Result

SHARE, TIMES = "share", "times"  # units: a fraction of 1, and a ratio to the baseline's


@dataclass(frozen=True)
class Column:
    """One number, or word, of a result. `columns.py` lists them.

    name: in `sweep.csv`. path: the dotted attribute path in a `Result`. label: its name in words. heading: above a
    column of the report, if it differs from the label. short: above a column in the terminal, if it differs from the
    heading. unit: empty for words and plain counts. digits: decimals shown. scale: the shown number is the value
    divided by this.
    """

    name: str
    path: str
    explanation: str
    label: str = ""
    heading: str = ""
    short: str = ""
    unit: str = ""
    digits: int = 2
    scale: float = 1.0

    @property
    def words(self) -> str:
        return self.label or self.name.replace("_", " ")

    @property
    def title(self) -> str:
        return self.heading or self.words

    @property
    def short_title(self) -> str:
        return self.short or self.title

    @property
    def summary_key(self) -> str:
        """Its name in the summary of a Weights & Biases run, such as `speedup/value`."""
        return self.path.removeprefix("counts.").replace(".", "/")

    def of(self, result: Result) -> Any:
        """The value; None if the result has none."""
        value: Any = result
        for name in self.path.split("."):
            value = None if value is None else getattr(value, name)
        return value

    def text(self, result: Result) -> str:
        """The value as the report shows it; a dash if there is none."""
        value = self.of(result)
        if value is None or isinstance(value, str):
            return number(None) if value is None else value
        if self.unit == SHARE:
            return percent(value, self.digits)
        return times(value) if self.unit == TIMES else number(value / self.scale, self.digits)
