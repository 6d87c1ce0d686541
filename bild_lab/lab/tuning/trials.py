"""Trials of a search, decoded over a record of the models' scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property

from bild_lab.errors import UserError
from bild_lab.lab.cli import console, escape
from bild_lab.lab.measure.cost_model import CostModel, fit
from bild_lab.lab.screening.candidates import Candidate, grid_of
from bild_lab.lab.screening.replay import Screened
from bild_lab.lab.screening.rows import Row
from bild_lab.lab.screening.screen import RecordSpec, Screening
from bild_lab.lab.screening.space import Space, Values

TIMED_S = 30.0  # of live decoding, from which the cost model learns
TIMED_POINTS = 8


class RecordedTrials:
    """Points of a space on one split, each decoded once over the record.

    overrides: that all points share.
    """

    def __init__(self, space: Space, overrides: Sequence[str], split: str, record: RecordSpec) -> None:
        self._space, self._overrides, self._split, self._record = space, overrides, split, record
        self._rows: dict[Values, Row | None] = {}

    @cached_property
    def screening(self) -> Screening:
        lists = [f"{several[0].partition('=')[0]}={','.join(map(_value, several))}" for several in self._space.lists]
        task = [*self._overrides, *self._space.fixed]
        return Screening(grid_of(task, lists, "tune"), self._split, self._record, "tune")

    def check(self) -> None:
        """Raise UserError for a search that a record cannot serve."""
        _ = self.screening.replay

    def row(self, values: Values) -> Row | None:
        """The point with these values; None if it cannot be built."""
        if values not in self._rows:
            try:
                (row,) = self.screening.rows([self._vanilla, *self._decoded(values)], self._model)
                self._rows[values] = row
            except UserError as error:
                console.print(f"[bold red]failed[/bold red] {escape(' '.join(values))}: {escape(str(error))}")
                self._rows[values] = None
        return self._rows[values]

    @cached_property
    def _by_values(self) -> dict[frozenset[str], Candidate]:
        known = {value for several in self._space.lists for value in several}
        return {frozenset(known & set(one.words)): one for one in self.screening.grid.candidates}

    def _decoded(self, values: Values) -> list[Screened]:
        return self.screening.decode([self._by_values[frozenset(values)]])[1:]

    @cached_property
    def _vanilla(self) -> Screened:
        return self.screening.decode([])[0]

    @cached_property
    def _model(self) -> CostModel:
        """Fitted to the corners of the space and a few points inside."""
        chance = random.Random(0)
        places = [[chance.randrange(len(several)) for several in self._space.lists] for _ in range(TIMED_POINTS)]
        chosen = dict.fromkeys([*self._space.corners(), *map(self._space.at, places)])
        screened = self.screening.decode([self._by_values[frozenset(values)] for values in chosen])
        texts, _, _ = self.screening.timed(screened, TIMED_S)
        return fit(texts, "0")


def _value(word: str) -> str:
    return word.partition("=")[2]
